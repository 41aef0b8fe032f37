"""Refill and rules on prompts under a real Trainer's epochs: what comes at their end comes, whatever the loader is."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.flowing import GENERATIONS, Prompts, Rolling, dapo, fit, gate, names

MIXED_OF_3 = ["hard", "mixed", "easy"] * 8


def rolled_out(module: Rolling) -> list[str]:
    return [name for step in module.rolled_out for name, _ in step]


class Stream(IterableDataset):
    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return iter(self.rows)


class Streamed(Prompts):
    """The same rows from a loader that has no length."""

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Stream(self.rows), self.batch_size, collate_fn=list)


def in_band(kinds: list[str], batch_size: int, loader: Any = DataLoader) -> tuple[Any, Prompts]:
    """A gate that lets `mixed` prompts pass alone, and prompts that know what they are."""
    data = Prompts(kinds, batch_size, loader)
    for row in data.rows:
        row["rate"] = 0.5 if row["kind"] == "mixed" else 1.0
    return gate({"name": "pass_rate_band", "params": {"known": "rate", "learned": False}}), data


@pytest.mark.parametrize("make", [lambda: gate("greso"), lambda: dapo(2)], ids=["gate", "refill"])
def test_a_loader_without_a_length_gives_all_prompts_each_epoch_and_is_validated(make: Any) -> None:
    module, _, trainer = fit([make()], Streamed(["mixed"] * 12, 2), max_epochs=2)
    assert sorted(rolled_out(module)) == sorted([f"p{i}" for i in range(12)] * 2)
    assert trainer.global_step == 12
    assert module.validated_after == [6, 12]


class Scheduled(Rolling):
    """A schedule that counts epochs."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


def test_an_epoch_whose_last_prompts_do_not_pass_ends_like_any_other() -> None:
    callback, data = in_band(["mixed"] * 8 + ["easy"] * 4, 4)
    module, _, trainer = fit([callback], data, Scheduled(), max_epochs=3)
    assert rolled_out(module) == [f"p{i}" for i in range(8)] * 3
    assert module.validated_after == [2, 4, 6]
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 / 8)


@pytest.mark.parametrize("refills", [False, True])
def test_the_last_gradients_of_an_epoch_are_stepped_on(refills: bool) -> None:
    if refills:
        callback, data = dapo(2), Prompts(MIXED_OF_3[:15], 2)
    else:
        callback, data = in_band(["mixed"] * 6 + ["easy"] * 6, 2)
    module, _, trainer = fit([callback], data, accumulate_grad_batches=2)
    assert len(module.given) == 3
    assert trainer.global_step == 2


def test_validation_at_a_share_of_an_epoch_of_unknown_length_is_refused() -> None:
    with pytest.raises(ValueError, match=r"val_check_interval is 0\.5, a share of an epoch.*Give a number of steps"):
        fit([dapo(2)], Prompts(MIXED_OF_3, 2), val_check_interval=0.5)
    module, _, _ = fit([dapo(2)], Prompts(MIXED_OF_3, 2), val_check_interval=2)
    assert module.validated_after[0] == 2
    fit([dapo(2)], Prompts(MIXED_OF_3, 2), val_check_interval=0.5, limit_val_batches=0)


@pytest.mark.parametrize("refills", [False, True])
def test_a_loader_that_is_made_anew_each_epoch_is_drawn_from_after_a_stop_too(refills: bool, tmp_path: Path) -> None:
    def parts() -> tuple[list[Any], Prompts]:
        callback, data = in_band(["mixed", "easy"] * 8, 4)
        return ([dapo(2, label="dapo")] if refills else [callback]), data

    length = {"max_epochs": 4, "reload_dataloaders_every_n_epochs": 1}
    callbacks, data = parts()
    whole, _, _ = fit(callbacks, data, **length)
    saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    callbacks, data = parts()
    fit([*callbacks, saver], data, enable_checkpointing=True, **length)
    last = len(whole.rolled_out) // 4
    callbacks, data = parts()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*is not resumable.*")
        module, _, _ = fit(callbacks, data, ckpt_path=tmp_path / f"step={last}.ckpt", **length)
    assert module.rolled_out == whole.rolled_out[last:]


def test_a_stop_when_the_loader_is_used_up_and_prompts_still_wait(tmp_path: Path) -> None:
    def data() -> Prompts:
        return Prompts(["mixed"] * 8, 8, StatefulDataLoader)

    whole, _, _ = fit([dapo(2)], data(), max_steps=6, max_epochs=-1)
    saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    fit([dapo(2), saver], data(), enable_checkpointing=True, max_steps=6, max_epochs=-1)
    for stop in (1, 2, 3):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*is not resumable.*")
            path = tmp_path / f"step={stop}.ckpt"
            module, _, _ = fit([dapo(2)], data(), ckpt_path=path, max_steps=4, max_epochs=-1)
        assert module.rolled_out == whole.rolled_out[stop:4]


def test_a_second_fit_with_the_same_callback_begins_anew(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    callback, settings = dapo(2), {"max_epochs": -1}
    fit([dapo(2), saver], Prompts(["mixed"] * 40, 8), enable_checkpointing=True, max_steps=2, **settings)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*is not resumable.*")
        path = tmp_path / "step=2.ckpt"
        fit([callback], Prompts(["mixed"] * 40, 8), ckpt_path=path, max_steps=4, **settings)
    module, _, _ = fit([callback], Prompts(["mixed"] * 40, 8), max_steps=2, **settings)
    assert [names(batch) for batch in module.given] == [["p0", "p1"], ["p2", "p3"]]


def test_a_prompt_that_comes_twice_in_a_round_is_two_groups() -> None:
    data = Prompts(["mixed"] * 12, 4)
    data.rows = [data.rows[i] for i in (0, 0, 1, 2, 3, 3, 4, 5, 6, 7, 8, 9)]
    module, logged, _ = fit([dapo(3)], data)
    assert all(len(batch["uid"]) == 3 * GENERATIONS for batch in module.given[:3])
    assert [len(set(batch["uid"])) for batch in module.given[:3]] == [3] * 3
    assert sum(row["kept"] for row in logged) == 12


class Numbered(Rolling):
    """Numbers its groups from 0 in each rollout."""

    def rollout(self, rows: Any, num_generations: int | None = None) -> dict[str, Any]:
        batch = super().rollout(rows, num_generations)
        batch["prompt"] = batch["uid"]
        batch["uid"] = torch.arange(len(rows)).repeat_interleave(self.num_generations)
        return batch


def test_groups_of_other_rollouts_with_the_same_number_stay_apart() -> None:
    module, _, _ = fit([dapo(4)], Prompts(MIXED_OF_3 * 4, 4), Numbered(), max_steps=4, max_epochs=-1)
    for batch in module.given:
        pairs = set(zip(batch["uid"].tolist(), batch["prompt"]))
        assert len({uid for uid, _ in pairs}) == len({prompt for _, prompt in pairs}) == len(pairs) == 4


def test_a_rule_that_cannot_learn_says_so_and_a_field_for_the_prompt_cures_it() -> None:
    with pytest.raises(ValueError, match=r"samples of prompts that were not given.*Hand each prompt's id on"):
        fit([gate("greso")], Prompts(MIXED_OF_3, 4), Numbered())

    class Named(Numbered):
        def rollout(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
            batch = super().rollout(*args, **kwargs)
            return batch | {"prompt_id": batch["prompt"]}

    _, logged, _ = fit([gate("greso")], Prompts(MIXED_OF_3, 4), Named(), max_epochs=4)
    assert sum(row["skipped"] for row in logged) > 0
    # The loader may call it otherwise than the rollout does, and the other way round.
    for field in ("prompt", "name"):
        data = Prompts(MIXED_OF_3, 4)
        for row in data.rows:
            row["name"] = row["prompt_id"]
        fit([gate("greso", fields={"prompt_id": field})], data, Named())


def test_a_pool_is_never_rolled_out_whole() -> None:
    wide = {"name": "threshold_band", "params": {"low": -1.0, "high": 2.0}}
    scorer = {"name": "mopps", "params": {"pool": 4.0}}
    module, _, _ = fit([gate(scorer, actuator=wide)], Prompts(MIXED_OF_3, 4))
    assert [len(step) for step in module.rolled_out] == [4] * 6


def test_rollouts_may_need_gradients_in_every_round() -> None:
    class Differentiates(Rolling):
        def rollout(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
            slope = torch.autograd.grad((self.weight**2).sum(), self.weight)[0]
            return super().rollout(*args, **kwargs) | {"slope": slope.sum()}

    module, _, _ = fit([dapo(4)], Prompts(MIXED_OF_3, 4), Differentiates(), max_steps=2)
    assert len(module.given) == 2


def test_a_step_that_is_called_again_gets_the_same_batch() -> None:
    class Searching(Rolling):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)

    module, _, _ = fit([dapo(2)], Prompts(MIXED_OF_3, 4), Searching(), max_steps=1)
    assert len(module.given) > 1
    assert len({tuple(names(batch)) for batch in module.given}) == 1
    assert all(set(batch["kind"]) == {"mixed"} for batch in module.given)


class Row:
    def __init__(self, prompt_id: str) -> None:
        self.prompt_id = prompt_id


REFUSED = {
    "rows that no checkpoint holds": ([Row("p0")] * 4, list, "A prompt holds a Row, which a checkpoint cannot hold"),
    "columns in a list": (
        TensorDataset(torch.arange(4), torch.arange(4)),
        None,
        "gives a list of tensors: they may be",
    ),
}


@pytest.mark.parametrize(("dataset", "collate", "message"), REFUSED.values(), ids=list(REFUSED))
def test_prompts_that_cannot_wait_are_refused_at_once(dataset: Any, collate: Any, message: str) -> None:
    class Given(Prompts):
        def train_dataloader(self) -> DataLoader:
            return DataLoader(dataset, 4, collate_fn=collate)

    with pytest.raises(ValueError, match=message):
        fit([gate("greso")], Given(["mixed"]))


def test_several_loaders_are_refused() -> None:
    class Several(Prompts):
        def train_dataloader(self) -> Any:
            return [super().train_dataloader()]

    with pytest.raises(ValueError, match="chosen from one training loader"):
        fit([gate("greso")], Several(["mixed"] * 4))


def test_screening_needs_a_rollout_of_parts_of_a_group() -> None:
    class Whole(Rolling):
        def rollout(self, rows: Any) -> dict[str, Any]:  # type: ignore[override]
            return super().rollout(rows)

    speed = gate({"name": "speed", "params": {"num_screening": 2}}, refill={"groups": 2})
    with pytest.raises(ValueError, match="rollout of Whole has no parameter num_generations"):
        fit([speed], Prompts(MIXED_OF_3, 4), Whole())


def test_prompts_of_which_the_rollout_leaves_samples_out_are_whole_groups_still() -> None:
    class Leaves(Rolling):
        """Without the last sample of every third prompt."""

        def rollout(self, rows: Any, num_generations: int | None = None) -> dict[str, Any]:
            batch = super().rollout(rows, num_generations)
            place = {}
            keep = []
            for row, name in enumerate(batch["uid"]):
                place[name] = place.get(name, -1) + 1
                if place[name] < 3 or int(name[1:]) % 3:
                    keep.append(row)
            index = torch.tensor(keep)
            tensors = {k: v[index] for k, v in batch.items() if isinstance(v, torch.Tensor)}
            lists = {k: [v[i] for i in keep] for k, v in batch.items() if isinstance(v, list)}
            return batch | tensors | lists

    module, logged, _ = fit([dapo(3)], Prompts(["mixed"] * 24, 6), Leaves(), max_steps=2)
    for batch in module.given:
        sizes = [batch["uid"].count(name) for name in names(batch)]
        assert sizes == [4 - (int(name[1:]) % 3 == 0) for name in names(batch)]
        assert len(sizes) == 3
    assert logged[0]["kept"] == logged[0]["prompts"]


def test_a_rollout_without_groups_cannot_be_refilled() -> None:
    class Nameless(Rolling):
        def rollout(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
            batch = super().rollout(*args, **kwargs)
            del batch["uid"]
            return batch

    block = {"scorer": "reward_difficulty", "actuator": "topk_fraction"}
    with pytest.raises(ValueError, match="The rollout batch has no field 'uid'"):
        fit([dapo(2, **block)], Prompts(MIXED_OF_3, 4), Nameless())
