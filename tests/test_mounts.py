"""Every mount gives the closed-form gradient, in every optimisation mode, and leaves no trace."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_dataflex import DataFlexCallback
from lightning_dataflex.calls import with_decision
from lightning_dataflex.core.rollout import RolloutBatch
from tests.flowing import Prompts, Rolling
from tests.toy import (
    LR,
    MOUNTS,
    Toy,
    fit,
    gradient,
    kept_rows,
    minibatches,
    per_token,
    policy,
    rollout,
    softmax_weights,
)

TEMPERATURE = 0.5


def reweight(offers: str, **options: Any) -> DataFlexCallback:
    actuator = {"name": "softmax", "params": {"temperature": TEMPERATURE}}
    return DataFlexCallback("reweight", "advantage_magnitude", actuator, mount=MOUNTS[offers], **options)


def select(offers: str, **options: Any) -> DataFlexCallback:
    return DataFlexCallback("select", "group_solve_rate", "threshold_band", mount=MOUNTS[offers], **options)


def start() -> np.ndarray:
    return policy().weight.detach().numpy().copy()


def reweighted(weight: np.ndarray, batch: dict[str, Any]) -> np.ndarray:
    return gradient(weight, batch, softmax_weights(batch, TEMPERATURE), batch["response_mask"].numpy())


def trained(module: Toy) -> np.ndarray:
    return module.linear.weight.detach().float().double().numpy()


@pytest.mark.parametrize("offers", MOUNTS)
class TestReweight:
    def test_automatic(self, offers: str) -> None:
        module, batches, weight = Toy(offers), [rollout(0), rollout(1)], start()
        fit(module, [reweight(offers)], batches)
        for batch in batches:
            weight -= LR * reweighted(weight, batch)
        np.testing.assert_allclose(module.linear.weight.detach().numpy(), weight, atol=1e-7)

    def test_accumulation(self, offers: str) -> None:
        module, batches, weight = Toy(offers), [rollout(i) for i in range(4)], start()
        fit(module, [reweight(offers)], batches, accumulate_grad_batches=2)
        for pair in (batches[:2], batches[2:]):
            weight -= LR * np.mean([reweighted(weight, batch) for batch in pair], 0)
        np.testing.assert_allclose(module.linear.weight.detach().numpy(), weight, atol=1e-7)

    def test_manual_ppo(self, offers: str) -> None:
        module, batch, weight = Toy(offers, manual=True), rollout(3), start()
        fit(module, [reweight(offers)], [batch])
        whole = batch | {"weights": torch.from_numpy(softmax_weights(batch, TEMPERATURE))}
        for mini in minibatches(whole):
            # A mount on the loss sees one minibatch; the others decide once, on the whole rollout batch.
            decided_here = offers in ("submodule", "method", "keyword", "gradient")
            weights = softmax_weights(mini, TEMPERATURE) if decided_here else mini["weights"].numpy()
            weight -= LR * gradient(weight, mini, weights, mini["response_mask"].numpy())
        np.testing.assert_allclose(module.linear.weight.detach().numpy(), weight, atol=3e-7)

    def test_bf16_mixed(self, offers: str) -> None:
        module, batch, weight = Toy(offers).float(), _float32(rollout(0)), start()
        fit(module, [reweight(offers)], [batch], precision="bf16-mixed")
        expected = weight - LR * reweighted(weight, rollout(0))
        unweighted = weight - LR * gradient(weight, rollout(0), np.ones_like(batch["response_mask"]), _mask(batch))
        np.testing.assert_allclose(trained(module), expected, atol=4e-3)
        assert np.abs(expected - unweighted).max() > 3 * 4e-3  # a silent no-op would be seen

    def test_module_left_as_found(self, offers: str) -> None:
        module, plain = Toy(offers), Toy(offers)
        fit(plain, [], [rollout(0)])
        fit(module, [reweight(offers)], [rollout(0)])
        assert _traces(module) == _traces(plain)

    @pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
    def test_module_left_as_found_after_an_exception(self, offers: str, error: type[BaseException]) -> None:
        module, plain = Toy(offers), Toy(offers)
        with pytest.raises((error, SystemExit)):
            fit(plain, [Failing(error)], [rollout(0)])
        with pytest.raises((error, SystemExit)):
            fit(module, [reweight(offers), Failing(error)], [rollout(0)])
        assert _traces(module) == _traces(plain)

    def test_no_decision_outside_training(self, offers: str) -> None:
        module, expected = ValidatedToy(offers), Toy(offers)._loss(rollout(5)).item()
        fit(module, [reweight(offers)], [rollout(0)], num_sanity_val_steps=1)
        assert module.validated[0] == pytest.approx(expected, abs=1e-12)
        assert module.validated[1] == pytest.approx(module._loss(rollout(5)).item(), abs=1e-12)


class ValidatedToy(Toy):
    def __init__(self, offers: str) -> None:
        super().__init__(offers)
        self.validated: list[float] = []

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        batch = self.dataflex(batch) if self.offers == "point" else batch
        self.validated.append(self._loss(batch).item())

    def val_dataloader(self) -> DataLoader:
        return DataLoader([rollout(5)], batch_size=None)


class Failing(Callback):
    """Raises once the first decision is in the loss."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error = error

    def on_before_optimizer_step(self, *_: Any) -> None:
        raise self.error


@pytest.mark.parametrize("offers", ["point", "submodule", "method", "batch"])
@pytest.mark.parametrize("drop", ["mask", "weight"])
def test_select(offers: str, drop: str) -> None:
    module, batch, weight = Toy(offers), rollout(0), start()
    fit(module, [select(offers, drop=drop)], [batch])
    keep, mask = kept_rows(batch)[:, None], batch["response_mask"].numpy()
    assert 0 < keep.mean() < 1
    expected = weight - LR * gradient(weight, batch, keep * mask, mask * keep if drop == "mask" else mask)
    np.testing.assert_allclose(module.linear.weight.detach().numpy(), expected, atol=1e-7)


def test_select_at_the_gradient() -> None:
    module, batch, weight = Toy("gradient"), rollout(0), start()
    fit(module, [select("gradient", drop="weight")], [batch])
    keep, mask = kept_rows(batch)[:, None], batch["response_mask"].numpy()
    np.testing.assert_allclose(trained(module), weight - LR * gradient(weight, batch, keep * mask, mask), atol=1e-6)


@pytest.mark.parametrize("what", ["policy", "loss", "module"])
@pytest.mark.parametrize("offers", ["point", "submodule", "method", "batch", "gradient"])
def test_compiled(offers: str, what: str) -> None:
    module, batches, weight = Toy(offers), [rollout(0), rollout(1)], start()
    fitted: Any = module
    if what == "policy":
        module.linear.compile(backend="aot_eager")
    elif what == "module":
        fitted = torch.compile(module, backend="aot_eager")
    elif offers == "submodule":
        module.policy_loss = torch.compile(module.policy_loss, backend="aot_eager")
    elif offers == "method":
        module.my_loss = torch.compile(module.my_loss, backend="aot_eager")
    else:
        module._loss = torch.compile(module._loss, backend="aot_eager")
    if offers == "gradient" and what != "policy":
        with pytest.raises(RuntimeError, match=r"No gradient reached pg_losses|was not published"):
            fit(fitted, [reweight(offers)], batches)
        return
    fit(fitted, [reweight(offers)], batches)
    for batch in batches:
        weight -= LR * reweighted(weight, batch)
    np.testing.assert_allclose(module.linear.weight.detach().numpy(), weight, atol=1e-7)


def test_compiled_module_that_was_traced_without_the_callback() -> None:
    module, weight = Toy("submodule"), start()
    compiled = torch.compile(module, backend="aot_eager")
    fit(compiled, [], [rollout(0)])
    fit(compiled, [reweight("submodule")], [rollout(1)])
    mask = _mask(rollout(0))
    weight -= LR * gradient(weight, rollout(0), mask, mask)
    weight -= LR * reweighted(weight, rollout(1))
    np.testing.assert_allclose(module.linear.weight.detach().numpy(), weight, atol=1e-7)


class Deaf(Toy):
    """Its loss has no room for weights."""

    def _loss(self, batch: dict[str, Any]) -> torch.Tensor:
        return self.deaf_loss(per_token(self.linear, batch), batch["response_mask"], batch["advantages"])

    def deaf_loss(self, losses: torch.Tensor, response_mask: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
        return losses.sum() / response_mask.sum()


def test_prompts_that_a_loss_is_given_beside_the_batch_are_read() -> None:
    def loss(batch: Any, prompt_id: Any) -> None: ...

    seen: list[RolloutBatch] = []
    batch = {"response_mask": torch.ones(1, 1)}
    with_decision(inspect.signature(loss), (batch, ["p"]), {}, {}, lambda each: seen.append(each) or {})
    assert seen[0]["prompt_id"] == ["p"]


def first_of_the_rest(x: Any, *rest: Any) -> None: ...


def anything(*args: Any, **kwargs: Any) -> None: ...


@pytest.mark.parametrize(
    ("loss", "args", "kwargs", "where"),
    [
        (first_of_the_rest, (0, 1, "batch", 2), {}, lambda args, kwargs: args[2]),
        (anything, (0, "batch"), {"more": 3}, lambda args, kwargs: args[1]),
        (anything, (0,), {"more": 3, "rollout": "batch"}, lambda args, kwargs: kwargs["rollout"]),
    ],
)
def test_a_batch_within_further_arguments_gets_the_decision(loss: Any, args: Any, kwargs: Any, where: Any) -> None:
    batch = {"response_mask": torch.ones(1, 1), "uid": ["a"]}
    args = tuple(batch if each == "batch" else each for each in args)
    kwargs = {name: batch if each == "batch" else each for name, each in kwargs.items()}

    got = with_decision(inspect.signature(loss), args, kwargs, {}, lambda each: {"rollout_is_weights": 2})

    assert where(*got) == batch | {"rollout_is_weights": 2}
    assert "rollout_is_weights" not in batch
    assert [each for each in got[0] if each is not where(*got)] == [each for each in args if each is not batch]
    assert set(got[1]) == set(kwargs)


def of_fields(log_probs: Any, completion_mask: Any = None, response_mask: Any = None) -> None: ...


def of_a_batch(batch: Any) -> None: ...


@pytest.mark.parametrize(
    ("loss", "args", "message"),
    [
        (
            of_a_batch,
            ({"completion_mask": [[1]]},),
            "batch (dict). The rollout batch has no field 'response_mask'. It has: completion_mask. "
            'If it carries it under another name, map it: fields={"response_mask": "completion_mask"}.',
        ),
        (of_a_batch, ({"mask": [[1]]},), "batch (dict). The rollout batch has no field 'response_mask'. It has: mask."),
        (of_fields, (0.5, [[1]]), 'map it: fields={"response_mask": "completion_mask"}.'),
        (of_a_batch, (torch.ones(1),), "batch (Tensor). Pass it the batch, or use a DataFlexPoint."),
        (of_a_batch, ({},), "batch (dict). Pass it the batch, or use a DataFlexPoint."),
        (
            first_of_the_rest,
            (0.5, torch.ones(1)),
            "x (float), rest (Tensor). Pass it the batch, or use a DataFlexPoint.",
        ),
    ],
)
def test_a_loss_that_gets_no_response_mask_is_told_what_it_got(loss: Any, args: Any, message: str) -> None:
    with pytest.raises(ValueError, match=r"^No argument of the loss is a rollout batch; it was called with ") as error:
        with_decision(inspect.signature(loss), args, {}, {}, lambda each: {})
    assert message in str(error.value)


class Passing(Rolling):
    """Gives a tensor where a rollout batch belongs."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def rollout(self, *args: Any, **kwargs: Any) -> Any:
        again = self.where == "rollout" and bool(self.rolled_out[-1])
        batch = super().rollout(*args, **kwargs)
        return torch.ones(2) if again else batch

    def training_step(self, rows: Any, batch_idx: int) -> Tensor:
        return super().training_step(rows, batch_idx) if self.where == "rollout" else self.dataflex(torch.ones(2))


def test_what_is_no_rollout_batch_is_refused_with_its_place() -> None:
    point = "Passing calls its dataflex \\(DataFlexPoint\\) with it"
    refill: dict[str, Any] = {"groups": 100, "max_rounds": 3}
    for module, options, batches, place in (
        (Passing("point"), {}, [rollout(0)], point),
        (Passing("point"), {"refill": refill}, Prompts(["hard"] * 8), point),
        (Passing("rollout"), {"refill": refill}, Prompts(["hard"] * 8), "rollout of Passing has returned it"),
        (Toy("batch"), {"mount": "on_train_batch_start"}, [torch.ones(2)], "the training loader gives it, and mount"),
        (
            Tensors(),
            {"mount": "on_before_backward", "drop": "weight"},
            [rollout(0)],
            "Tensors has it as rollout_batch, or the training loader gives it",
        ),
    ):
        with pytest.raises(TypeError, match=f"^A rollout batch cannot be a Tensor: {place}.*Give a dict"):
            fit(module, [DataFlexCallback("select", "group_solve_rate", "threshold_band", **options)], batches)


class Tensors(Toy):
    def __init__(self) -> None:
        super().__init__("gradient")

    def _loss(self, batch: dict[str, Any]) -> Tensor:
        loss = super()._loss(batch)
        self.rollout_batch = batch["response_mask"]
        return loss


def test_a_loss_without_room_for_weights_is_refused() -> None:
    callback = DataFlexCallback("reweight", "advantage_magnitude", "softmax", mount="deaf_loss")
    with pytest.raises(ValueError, match="no argument 'rollout_is_weights'"):
        fit(Deaf("method"), [callback], [rollout(0)])


def _mask(batch: dict[str, Any]) -> np.ndarray:
    return batch["response_mask"].numpy()


def _float32(batch: dict[str, Any]) -> dict[str, Any]:
    return {k: v.float() if v.is_floating_point() else v for k, v in batch.items()}


def _traces(module: Toy) -> tuple[set[str], list[tuple[str, int, int]]]:
    """What a mount could leave behind: attributes of the instance, and hooks."""
    hooks = [(n, len(m._forward_hooks), len(m._forward_pre_hooks)) for n, m in module.named_modules()]
    return set(vars(module)), hooks
