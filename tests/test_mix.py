"""Mixing in a Trainer: proportions reach the next batches, survive a stop, and are the same on every rank."""

from __future__ import annotations

import subprocess
import sys
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_dataflex import DataFlexCallback, DomainMixtureSampler, Mixer, Mixture, mixture_dataloader
from tests.launch import ROOT, run
from tests.loaders import loaders_as_they_were
from tests.mixing import BATCH, DOMAINS, ROWS, Bandit, Rows, fit, mix


def shares_of(rows: list[int]) -> dict[str, float]:
    counts = Counter(ROWS[row]["domain"] for row in rows)
    return {name: counts[name] / len(rows) for name in DOMAINS}


class Turning(Mixer):
    """A domain alone, another at each step."""

    def act(self, scores: Any, batch: Any, *, step_id: int, **ctx: Any) -> list[float]:
        return [float(i == step_id % 3) for i in range(3)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_batches_of_a_fit_have_the_logged_proportions_step_by_step(num_workers: int) -> None:
    module, record = fit([mix(Turning())], Rows(num_workers))
    lag = 2 * num_workers
    assert len(module.seen) == 45
    for step, (rows, logged) in enumerate(zip(module.seen, record.logged)):
        logged_shares = {name: logged[f"dataflex/prop_{name}"] for name in DOMAINS}
        assert shares_of(rows) == pytest.approx(logged_shares, abs=0.34 if step <= lag else 1e-9)
        at = step % 15
        if at >= lag and step > lag:
            # The proportions that the mixer set after the step before, or as many steps ago as are drawn ahead.
            assert logged_shares[DOMAINS[(step - lag) % 3]] == 1.0
        assert logged["dataflex/lag"] == min(lag, 15 - at - 1)


def test_proportions_follow_the_scores_of_the_batches() -> None:
    module, record = fit([mix(update_step=2, warmup_step=4)])
    alone = Mixture.from_config(
        {
            "mechanism": "mix",
            "actuator": {"name": "dump_ucb", "params": {"temperature": 0.1}},
            "domains": DOMAINS,
            "warmup_step": 4,
            "update_step": 2,
        }
    )
    moved = 0.0
    for step, rows in enumerate(module.seen):
        expected = alone.proportions
        moved = max(moved, abs(expected["code"] - 1 / 3))
        twice = np.repeat(rows, 2)
        sample = np.arange(len(twice)) % 2
        level = np.array([DOMAINS.index(ROWS[row]["domain"]) for row in twice])
        draw = np.abs(np.sin(twice * 7 + sample * 3 + step * 5 + 1))
        batch = {
            "advantages": torch.tensor(((draw > 0.3 * level) - 0.5) * draw),
            "domain": [DOMAINS[i] for i in level],
            "response_mask": torch.ones(len(twice), 3),
        }
        alone.observe(batch, step)
        alone.end_step(step)
        for name in DOMAINS:
            assert record.logged[step][f"dataflex/prop_{name}"] == pytest.approx(expected[name], abs=1e-6)
            got, want = record.logged[step][f"dataflex/score_{name}"], alone.metrics[f"score_{name}"]
            assert got == pytest.approx(want, abs=1e-6, nan_ok=True)
    assert moved > 0.02


def test_initial_weights_hold_for_the_first_prefetched_batches_too() -> None:
    module, _ = fit([mix(domains={"math": 1, "code": 0, "logic": 0}, warmup_step=100)], Rows(2), max_epochs=1)
    assert all(shares_of(rows)["math"] == 1 for rows in module.seen)


def test_without_enforce_the_sampler_keeps_its_own() -> None:
    module, record = fit([mix(Turning(), enforce=False)], max_epochs=1)
    assert sum((Counter(ROWS[r]["domain"] for r in rows) for rows in module.seen), Counter()) == dict.fromkeys(
        DOMAINS, 20
    )
    assert record.logged[3]["dataflex/prop_code"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("stop", [1, 7, 15, 19, 30])
def test_law_8_a_resumed_run_is_one_that_never_stopped(num_workers: int, stop: int, tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    whole, logged = fit([mix(), saver], Rows(num_workers))
    resumed, later = fit([mix()], Rows(num_workers), ckpt_path=tmp_path / f"step={stop}.ckpt")
    assert len(whole.seen) == 45
    assert resumed.seen == whole.seen[stop:]
    for got, want in zip(later.logged, logged.logged[stop:], strict=True):
        assert got == pytest.approx(want, nan_ok=True)
    assert torch.equal(resumed.weight, whole.weight)


class StatefulRows(Rows):
    """With torchdata's loader, which has a state of its own."""

    def train_dataloader(self) -> DataLoader:
        loader = super().train_dataloader()
        workers = {"num_workers": loader.num_workers, "prefetch_factor": loader.prefetch_factor}
        return StatefulDataLoader(ROWS, BATCH, sampler=loader.sampler, **workers)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_with_a_state_of_its_own_does_no_harm(num_workers: int, tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    whole, _ = fit([mix()], Rows(num_workers))
    stateful, _ = fit([mix(), saver], StatefulRows(num_workers))
    assert stateful.seen == whole.seen
    for stop in (7, 15):
        resumed, _ = fit([mix()], StatefulRows(num_workers), ckpt_path=tmp_path / f"step={stop}.ckpt")
        assert resumed.seen == whole.seen[stop:], stop


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_run_resumed_between_epochs_goes_on(num_workers: int, tmp_path: Path) -> None:
    whole, _ = fit([mix()], Rows(num_workers))
    first, _ = fit([mix(), ModelCheckpoint(tmp_path, "end")], Rows(num_workers), max_epochs=1)
    second, _ = fit([mix()], Rows(num_workers), ckpt_path=tmp_path / "end.ckpt")
    assert first.seen + second.seen == whole.seen


class SaveFirst(Callback):
    """Saves before the first batch of an epoch is trained on."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 15:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_run_saved_as_an_epoch_begins_goes_on(num_workers: int, tmp_path: Path) -> None:
    whole, _ = fit([mix(), SaveFirst(tmp_path / "first.ckpt")], Rows(num_workers))
    resumed, _ = fit([mix()], Rows(num_workers), ckpt_path=tmp_path / "first.ckpt")
    assert resumed.seen == whole.seen[15:]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_run_that_is_made_longer_draws_every_epoch(num_workers: int, tmp_path: Path) -> None:
    whole, _ = fit([mix()], Rows(num_workers), max_epochs=-1, max_steps=40)
    first, _ = fit([mix(), ModelCheckpoint(tmp_path, "end", every_n_train_steps=1)], Rows(num_workers), max_steps=7)
    second, _ = fit([mix()], Rows(num_workers), ckpt_path=tmp_path / "end.ckpt", max_epochs=-1, max_steps=40)
    assert first.seen + second.seen == whole.seen


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("stop", [7, 15])
def test_loaders_made_anew_each_epoch_resume_too(num_workers: int, stop: int, tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    whole, _ = fit([mix(), saver], Rows(num_workers), reload_dataloaders_every_n_epochs=1)
    path = tmp_path / f"step={stop}.ckpt"
    resumed, _ = fit([mix()], Rows(num_workers), ckpt_path=path, reload_dataloaders_every_n_epochs=1)
    assert resumed.seen == whole.seen[stop:]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_epochs_that_are_cut_short_resume_too(num_workers: int, tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    whole, _ = fit([mix(), saver], Rows(num_workers), limit_train_batches=6)
    for stop in (3, 6, 8):
        resumed, _ = fit([mix()], Rows(num_workers), ckpt_path=tmp_path / f"step={stop}.ckpt", limit_train_batches=6)
        assert resumed.seen == whole.seen[stop:], stop


def test_a_killed_run_resumes_from_its_last_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    run([sys.executable, "tests/mixing.py", str(tmp_path / "whole")])
    killed = subprocess.run(
        [sys.executable, "tests/mixing.py", str(tmp_path), "1", "20"], cwd=ROOT, capture_output=True
    )
    assert killed.returncode == -9
    whole = torch.load(tmp_path / "whole" / "0.pt")
    resumed, later = fit([mix()], Rows(2), ckpt_path=tmp_path / "step=20.ckpt")
    assert resumed.seen == whole["seen"][20:]
    assert later.logged[-1] == pytest.approx(whole["logged"][-1])


def test_two_ranks_draw_and_decide_as_one(tmp_path: Path) -> None:
    alone, record = fit([mix()], Rows(2))
    run([sys.executable, "tests/mixing.py", str(tmp_path), "2"])
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for step, rows in enumerate(alone.seen):
        assert sorted(row for rank in ranks for row in rank["seen"][step]) == sorted(rows)
        for rank in ranks:
            assert list(rank["logged"][step]) == list(record.logged[step])
            assert rank["logged"][step] == pytest.approx(record.logged[step], abs=1e-6, nan_ok=True)


@pytest.mark.parametrize("place", ["datamodule", "module", "loader", "dict of loaders"])
def test_the_sampler_is_found_wherever_the_loader_is_made(place: str) -> None:
    class WithLoader(Bandit):
        def train_dataloader(self) -> DataLoader:
            return Rows().train_dataloader()

    module: Any = WithLoader() if place == "module" else Bandit()
    data: Any = Rows()
    if place == "module":
        fit([mix(Turning())], module=module, max_epochs=1, data=False)
    elif place == "datamodule":
        fit([mix(Turning())], data, module=module, max_epochs=1)
    elif place == "loader":
        fit([mix(Turning())], Rows().train_dataloader(), module=module, max_epochs=1)
    else:
        step = module.training_step
        module.training_step = lambda batch, batch_idx: step(batch["prompts"], batch_idx)
        loaders = {"prompts": Rows().train_dataloader(), "more": DataLoader(range(60), 4)}
        fit([mix(Turning())], loaders, module=module, max_epochs=1)
    assert [max(shares_of(rows).values()) for rows in module.seen[1:]] == [1.0] * 14
    assert "train_dataloader" not in vars(data) | vars(module)


def test_a_loader_that_is_made_anew_each_epoch_keeps_the_proportions() -> None:
    whole, _ = fit([mix()])
    anew, _ = fit([mix()], reload_dataloaders_every_n_epochs=1)
    assert anew.seen == whole.seen


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (lambda: DataLoader(ROWS, BATCH), r"the training loader \(DataLoader\) has 0.*mixture_dataloader\(dataset"),
        (lambda: DataLoader(ROWS, BATCH, sampler=RandomSampler(ROWS)), "has 0"),
        (
            lambda: DataLoader(ROWS, 2, sampler=DomainMixtureSampler([r["domain"] for r in ROWS], BATCH)),
            "batch_size 2 but its DomainMixtureSampler 4",
        ),
        (lambda: [Rows().train_dataloader(), Rows().train_dataloader()], "has 2"),
        (lambda: Rows(num_replicas=2, rank=1).train_dataloader(), "deals for rank 1 of 2, but this is rank 0 of 1"),
        (lambda: mixture_dataloader([{"domain": "math", "row": i} for i in range(9)], 3), "needs at least two"),
    ],
)
def test_a_loader_that_cannot_be_steered_is_refused_before_the_first_step(loader: Any, message: str) -> None:
    module = Bandit()
    with pytest.raises(ValueError, match=message):
        fit([mix()], loader(), module=module)
    assert module.seen == []


def test_a_refused_loader_is_nothing_to_the_tests_after_it() -> None:
    with loaders_as_they_were(), pytest.raises(ValueError, match="names math, physics"):
        fit([mix(domains=["math", "physics"])])
    loader = DataLoader(ROWS, BATCH)
    loader.iterator = iter(loader)
    iterator = weakref.ref(loader.iterator)
    loader.iterator = None
    assert iterator() is None


def test_domains_that_are_not_those_of_the_data_are_refused() -> None:
    with pytest.raises(ValueError, match="domains names math, physics, but the data has code, logic, math"):
        fit([mix(domains=["math", "physics"])])


def test_one_callback_steers() -> None:
    with pytest.raises(ValueError, match="Two callbacks have mechanism: mix"):
        fit([mix(label="one"), mix(label="two")])


def test_it_combines_with_select_and_reweight() -> None:
    select = DataFlexCallback("select", "group_solve_rate", "threshold_band")
    reweight = DataFlexCallback("reweight", "advantage_magnitude", "softmax")
    together, record = fit([mix(), select, reweight], max_epochs=1)
    apart, _ = fit([mix()], max_epochs=1)
    assert together.seen == apart.seen  # the rewards do not depend on the weights
    keys = {name.split("/")[1] for name in record.logged[0]}
    assert keys == {"mix", "select", "reweight"}
    assert "dataflex/mix/prop_math" in record.logged[0]
    assert "dataflex/select/kept_frac" in record.logged[0]
    assert together.weight != apart.weight


def test_R048_a_sampler_that_the_trainer_replaces_is_an_error_before_the_first_step() -> None:
    module = Bandit()
    with pytest.raises(RuntimeError, match=r"not drawn by the DomainMixtureSampler.*overfit_batches"):
        fit([mix()], module=module, overfit_batches=6)
    assert module.seen == []


def test_a_mixer_that_follows_progress_is_refused_where_there_is_none() -> None:
    with pytest.raises(ValueError, match="e2h follows the progress of the run, but the Trainer has no max_steps"):
        fit([mix({"name": "e2h"})], max_epochs=-1)


def test_R062_each_domain_has_its_own_key() -> None:
    _, record = fit([mix()], max_epochs=1)
    keys = {f"dataflex/{kind}_{name}" for name in DOMAINS for kind in ("prop", "score")}
    assert set(record.logged[-1]) == keys | {"dataflex/n_nan", "dataflex/lag"}


class OneOfFour(Bandit):
    """Domain a has one good response in four, b three: what a rule on the reward keeps of each."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rewards = torch.tensor([1.0, 0, 0, 0, 1, 1, 1, 0])
        names = ["code"] * 4 + ["math"] * 4
        self.dataflex({"rm_scores": rewards, "response_mask": torch.ones(8, 3), "domain": names})
        return self.weight * 0


def test_R062_the_kept_shares_of_domains_stand_beside_the_total() -> None:
    band = {"name": "threshold_band", "params": {"low": 0.5, "high": 1.5}}
    select = DataFlexCallback("select", "outcome", band)
    _, record = fit([mix("reward_gap"), select], module=OneOfFour(), max_epochs=1, limit_train_batches=1)
    (logged,) = record.logged
    assert (logged["dataflex/mix/score_code"], logged["dataflex/mix/score_math"]) == (0.25, 0.75)
    assert logged["dataflex/select/kept_frac"] == 0.5
