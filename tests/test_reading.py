"""Weights that the training step does not read: a run that trains on something else than was decided says so."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from lightning_dataflex import DataFlexCallback
from lightning_dataflex.reading import FirstReading, Watched
from tests import flowing
from tests.toy import MOUNTS, Toy, fit, per_token, rollout


def select(**options: Any) -> DataFlexCallback:
    return DataFlexCallback("select", "advantage_magnitude", "topk_fraction", **options)


def reweight(**options: Any) -> DataFlexCallback:
    return DataFlexCallback("reweight", "advantage_magnitude", "softmax", **options)


class Deaf(Toy):
    """Trains without a look at the weights."""

    def _loss(self, batch: dict[str, Any]) -> torch.Tensor:
        shape = batch["rollout_is_weights"].shape if "rollout_is_weights" in batch else None
        assert shape is None or len(shape) == 2
        kept = {name: value for name, value in batch.items() if name != "rollout_is_weights"}
        return super()._loss(kept)


class DeafLoss(Toy):
    """Has a loss without a look at the weights."""

    def __init__(self, offers: str) -> None:
        super().__init__(offers)
        if offers == "submodule":
            self.policy_loss.forward = lambda batch, losses: losses.mean()

    def my_loss(self, losses: torch.Tensor, batch: Any) -> torch.Tensor:
        return losses.mean()


@pytest.mark.parametrize("mount", ["point", "submodule", "method", "batch"])
def test_R066_weights_that_the_loss_does_not_read_are_warned_of_once(mount: str) -> None:
    deaf = Deaf if mount in ("point", "batch") else DeafLoss
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(deaf(mount), [reweight(mount=MOUNTS[mount])], [rollout(seed) for seed in range(3)])
    said = [str(each.message) for each in caught if "had no effect" in str(each.message)]
    assert said == [
        "The weights of reweight.advantage_magnitude.softmax had no effect: the training step has not read "
        "'rollout_is_weights'. Multiply the per-token policy losses by batch['rollout_is_weights'], (samples, response "
        "tokens), before their mean."
    ]


@contextmanager
def nothing_said() -> Iterator[None]:
    """Fails where something is said to have had no effect."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*had no effect.*")
        yield


@pytest.mark.parametrize("mount", ["point", "submodule", "method", "keyword", "batch", "gradient"])
@pytest.mark.parametrize("callback", [lambda **kw: reweight(**kw), lambda **kw: select(drop="weight", **kw)])
def test_weights_that_are_read_are_not_warned_of(mount: str, callback: Any) -> None:
    with nothing_said():
        fit(Toy(mount), [callback(mount=MOUNTS[mount])], [rollout(0), rollout(1)])


def test_a_selection_that_is_in_the_mask_needs_no_weights() -> None:
    with nothing_said():
        fit(Deaf(), [select()], [rollout(0), rollout(1)])


def test_what_is_watched_is_copied_pickled_and_compiled_as_a_plain_tensor() -> None:
    def loss(weights: torch.Tensor) -> torch.Tensor:
        return (2 * weights).sum() / weights.shape[0]

    weights = torch.ones(2, 3).as_subclass(Watched)
    copies = [copy.deepcopy(weights), pickle.loads(pickle.dumps(weights))]
    assert [type(each) for each in copies] == [torch.Tensor] * 2
    assert weights.was_read
    weights = torch.ones(2, 3).as_subclass(Watched)
    compiled = torch.compile(loss, backend="eager", fullgraph=True)
    assert compiled(weights) == 6
    assert weights.was_read


class Compiled(Toy):
    """Has a loss of compiled code, which takes plain tensors alone."""

    def __init__(self) -> None:
        super().__init__()
        self.types: list[type] = []

    def _loss(self, batch: dict[str, Any]) -> torch.Tensor:
        compiled = torch.compile(lambda losses, weights: (losses * weights).sum(), backend="aot_eager", fullgraph=True)
        self.types.append(type(batch["rollout_is_weights"]))
        return compiled(per_token(self.linear, batch), batch["rollout_is_weights"])


def test_a_compiled_loss_is_given_plain_tensors() -> None:
    compiled, plain = Compiled(), Toy()
    plain._loss = lambda batch: (per_token(plain.linear, batch) * batch["rollout_is_weights"]).sum()
    with nothing_said():
        fit(compiled, [reweight()], [rollout(0), rollout(1)])
    assert compiled.types == [Watched, torch.Tensor]
    fit(plain, [reweight()], [rollout(0), rollout(1)])
    torch.testing.assert_close(compiled.linear.weight, plain.linear.weight)


class Late(Toy):
    """Has no loss at its first step."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor | None:
        if batch_idx == 0:
            self.dataflex(batch)
            return None
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(("late", "num_warnings"), [(Late, 0), (type("DeafLate", (Late, Deaf), {}), 1)])
def test_a_step_without_a_loss_says_nothing_of_the_weights(late: Any, num_warnings: int) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(late(), [reweight()], [rollout(seed) for seed in range(3)])
    assert sum("had no effect" in str(each.message) for each in caught) == num_warnings


def test_of_several_callbacks_the_weights_of_the_one_that_weighs_are_watched() -> None:
    callbacks = [reweight(), select(weights_key="kept")]
    with nothing_said():
        fit(Toy(), callbacks, [rollout(0), rollout(1)])
    with pytest.warns(UserWarning, match="The weights of reweight.advantage_magnitude.softmax had no effect"):
        fit(Deaf(), [reweight(), select(weights_key="kept")], [rollout(0), rollout(1)])


class Lost(Toy):
    """Computes its loss from the batch that it had before."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        self.dataflex(batch)
        return self._loss(batch)


def test_a_selection_that_nobody_reads_is_warned_of_once() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(Lost(), [select()], [rollout(seed) for seed in range(3)])
    said = [str(each.message) for each in caught if "had no effect" in str(each.message)]
    assert said == [
        "The selection of select.advantage_magnitude.topk_fraction had no effect: the training step has read neither "
        "'response_mask' nor 'rollout_is_weights' of the batch with the decision. Compute the loss from that batch: "
        "batch = self.dataflex(batch), with a DataFlexPoint."
    ]


class OwnMask(Toy):
    """Has a mask of its own, whatever the callback says."""

    def _loss(self, batch: dict[str, Any]) -> torch.Tensor:
        return self.linear(batch["features"]).mean()


@pytest.mark.parametrize("mount", ["point", "batch"])
def test_a_mask_that_nobody_reads_is_warned_of(mount: str) -> None:
    with pytest.warns(UserWarning, match="The selection of .* had no effect"):
        fit(OwnMask(mount), [select(mount=MOUNTS[mount])], [rollout(0), rollout(1)])


@pytest.mark.parametrize("mount", ["point", "submodule", "method", "keyword", "batch"])
def test_a_selection_that_is_read_is_not_warned_of(mount: str) -> None:
    with nothing_said():
        fit(Toy(mount), [select(mount=MOUNTS[mount])], [rollout(0), rollout(1)])


def test_what_does_not_show_whether_it_is_read_is_not_warned_of() -> None:
    with nothing_said():
        fit(OwnMask(), [select(drop="rows")], [rollout(0), rollout(1)])
        fit(OwnMask(), [select(), select(drop="rows", label="other")], [rollout(0), rollout(1)])
        fit(Lost(), [select(enforce=False)], [rollout(0), rollout(1)])
        for mask in ([[1, 1]], torch.ones(1, 2).as_subclass(type("Mask", (torch.Tensor,), {}))):
            reading = FirstReading.of_selection("select", ["response_mask", "rollout_is_weights"])
            reading.watched_in({"response_mask": mask, "rollout_is_weights": torch.ones(1, 2)}, {})
            reading.end_step()


class OwnLength(flowing.Rolling):
    """Learns from what it is given, whatever is masked."""

    def training_step(self, rows: list[dict[str, Any]], batch_idx: int) -> torch.Tensor:
        batch = self.dataflex(self.rollout(rows))
        return -(batch["features"] @ self.weight * batch["advantages"]).mean()


def test_a_selection_that_fresh_rollouts_have_replaced_is_not_warned_of() -> None:
    with nothing_said():
        flowing.fit([flowing.dapo()], flowing.Prompts(["mixed"] * 8), OwnLength())


class Collecting(Toy):
    """Trains on every other step, on two rollouts."""

    def __init__(self) -> None:
        super().__init__(manual=True)
        self.collected: list[Any] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.collected.append(self.dataflex(batch))
        if len(self.collected) == 2:
            self.optimizers().zero_grad()
            self.manual_backward(sum(self._loss(each) for each in self.collected))
            self.optimizers().step()
            self.collected = []


class Lagging(Collecting):
    """Trains in each step on the rollout of the one before."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.collected.append(self.dataflex(batch))
        if len(self.collected) == 2:
            self.optimizers().zero_grad()
            self.manual_backward(self._loss(self.collected.pop(0)))
            self.optimizers().step()


DEAF = [(type(f"Deaf{kind.__name__}", (kind, OwnMask), {}), 1) for kind in (Collecting, Lagging)]


@pytest.mark.parametrize("callback", [select, reweight])
@pytest.mark.parametrize(("module", "num_warnings"), [(Collecting, 0), (Lagging, 0), *DEAF])
def test_rollouts_that_are_trained_on_later_are_read_later(module: Any, callback: Any, num_warnings: int) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(module(), [callback()], [rollout(seed) for seed in range(6)])
    assert sum("had no effect" in str(each.message) for each in caught) == num_warnings


class ByAdvantage(Toy):
    """Reads of the decision the advantages alone, which are 0 for what is not kept."""

    def _loss(self, batch: dict[str, Any]) -> torch.Tensor:
        advantages = torch.where(batch["advantages"].isnan(), 0.0, batch["advantages"])
        return (self.linear(batch["features"]).sum(-1) * advantages).sum()


def test_advantages_of_the_kept_samples_are_a_decision_too() -> None:
    with nothing_said():
        fit(ByAdvantage(), [DataFlexCallback("select", "outcome", "max_variance")], [rollout(0), rollout(1)])
    with pytest.warns(UserWarning, match="read neither 'response_mask', 'advantages' nor 'rollout_is_weights' of"):
        fit(Lost(), [DataFlexCallback("select", "outcome", "max_variance")], [rollout(0), rollout(1)])
