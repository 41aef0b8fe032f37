"""The decision trace: what a row says, and which rows there are after stops, errors and on several files."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_dataflex import DataFlexCallback, Pipeline, Reweighter, build
from lightning_dataflex.asking import holds_first_copy
from lightning_dataflex.core import files
from lightning_dataflex.core.rollout import RolloutBatch
from lightning_dataflex.core.summary import REASONS
from tests.flowing import Prompts, dapo
from tests.flowing import fit as rolling_fit
from tests.toy import Toy, fit, rollout

BAND = ("select", "group_solve_rate", "threshold_band")


def rows_of(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".parquet":
        return pq.read_table(path).to_pylist()
    return [json.loads(line) for line in path.read_text().splitlines()]


def traced(path: Path, num_steps: int = 4, **more: Any) -> DataFlexCallback:
    callback = DataFlexCallback(*BAND, trace=str(path), **more)
    fit(Toy(), [callback], [rollout(seed) for seed in range(num_steps)])
    return callback


def columns(decision: Any, batch: dict[str, Any]) -> dict[str, Any]:
    found = {name: column.tolist() for name, column in decision.columns(RolloutBatch(batch)).items()}
    return found | {"reason": [REASONS[i] for i in found["reason"]]}


# -- what a row says ---------------------------------------------------------------------------------------------------


def a_group_each() -> dict[str, Any]:
    """Solved, failed, mixed, one of two without a reward, without any; then padding."""
    rewards = [1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0, torch.nan, torch.nan, torch.nan, 0.0]
    uid = list("aabbccddeef")
    mask = torch.ones(11, 2, dtype=torch.int64)
    mask[10], mask[5, 1] = 0, 0
    return {"rm_scores": torch.tensor(rewards), "uid": uid, "response_mask": mask}


def test_a_sample_has_the_reason_of_its_group_or_its_own() -> None:
    block = {"mechanism": "select", "scorer": "group_solve_rate", "actuator": "threshold_band"}
    with warnings.catch_warnings(record=True):
        decision = Pipeline.from_config(block).decide(batch := a_group_each())
    found = columns(decision, batch)
    assert found["reason"][:10] == ["solved"] * 2 + ["failed"] * 2 + ["kept"] * 2 + ["solved"] + ["nan"] * 3
    assert found["length"] == [2, 2, 2, 2, 2, 1, 2, 2, 2, 2, 0]
    assert found["kept"] == found["weight"] == [False] * 4 + [True] * 2 + [False] * 5
    np.testing.assert_array_equal(found["score"][:6], [1, 1, 0, 0, 0.5, 0.5])
    np.testing.assert_array_equal(found["reward"][:10], batch["rm_scores"][:10])


def test_what_is_dropped_beside_a_kept_sample_is_dropped_by_the_rule_and_groups_count_as_in_the_metrics() -> None:
    block = {"mechanism": "select", "scorer": "outcome", "actuator": {"name": "topk_fraction", "params": {}}}
    block["actuator"]["params"]["fraction"] = 0.3
    batch = {"rm_scores": torch.tensor([1.0, 1, 1, 0, 0, 0, 1, 0]), "uid": list("aabbccdd")}
    batch["response_mask"] = torch.ones(8, 1)
    decision = Pipeline.from_config(block).decide(batch)
    assert columns(decision, batch)["reason"] == ["kept", "kept", "rule", "rule", "failed", "failed", "rule", "rule"]
    assert [int(decision.metrics[f"dropped_{name}"]) for name in REASONS[1:]] == [0, 1, 2, 0]


class AsScored(Reweighter):
    def act(self, scores: torch.Tensor, batch: Any, **ctx: Any) -> torch.Tensor:
        return scores


def test_scores_and_weights_of_tokens_are_means_over_valid_ones() -> None:
    entropies = torch.tensor([[1.0, 3.0, torch.nan], [4.0, 100.0, 100.0]])
    batch = {"entropies": entropies, "response_mask": torch.tensor([[1, 1, 0], [1, 0, 0]])}
    decision = Pipeline(build("scorer", "token_entropy"), AsScored()).decide(batch)
    found = columns(decision, batch)
    assert found["score"] == [2.0, 4.0]
    # Their mean over the three tokens is 8/3.
    np.testing.assert_allclose(found["weight"], [2 / (8 / 3), 4 / (8 / 3)], rtol=1e-6)


@pytest.mark.parametrize(
    ("domain", "written"),
    [
        ("math", ["math"] * 8),
        (torch.tensor(3), ["3"] * 8),
        (["a", None] * 4, ["a", None] * 4),
        (["\ud800"] * 8, ["\\ud800"] * 8),
    ],
)
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_domain_of_all_or_of_none_loses_no_row(domain: Any, written: Any, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"t{suffix}"
    fit(Toy(), [DataFlexCallback(*BAND, trace=str(path))], [rollout() | {"domain": domain}])
    assert [row["domain"] for row in rows_of(path)] == written


def test_domains_of_other_samples_are_refused(tmp_path: Path) -> None:
    callback = DataFlexCallback(*BAND, trace=str(tmp_path / "t.jsonl"))
    with pytest.raises(ValueError, match="domain has 2 rows but the rollout batch has 8 samples"):
        fit(Toy(), [callback], [rollout() | {"domain": ["a", "b"]}])


def test_a_file_has_what_the_batches_had_in_either_format(tmp_path: Path) -> None:
    traced(tmp_path / "t.jsonl", label="mine")
    traced(tmp_path / "t.parquet", label="mine")
    rows = rows_of(tmp_path / "t.jsonl")
    assert rows == rows_of(tmp_path / "t.parquet")
    expected = []
    for step in range(4):
        batch = rollout(step)
        rewards = torch.where(batch["response_mask"] > 0, batch["rm_scores"], 0.0).sum(-1).tolist()
        lengths = batch["response_mask"].sum(-1).tolist()
        expected += [(step, str(i // 2), rewards[i], lengths[i], None, "mine") for i in range(8)]
    names = ("step", "uid", "reward", "length", "domain", "label")
    assert [tuple(row[name] for name in names) for row in rows] == expected


def test_numbers_of_single_precision_are_written_in_their_own_digits_and_no_number_as_null(tmp_path: Path) -> None:
    batch = rollout(0)
    batch["rm_scores"] = torch.tensor([0.1, torch.nan, 0.7, 0.3, 1e-8, 1e20, 0.0, 1.0])
    with warnings.catch_warnings(record=True):
        fit(Toy(), [DataFlexCallback(*BAND, trace=str(tmp_path / "t.jsonl"))], [batch])
    assert [row["reward"] for row in rows_of(tmp_path / "t.jsonl")] == [0.1, None, 0.7, 0.3, 1e-8, 1e20, 0.0, 1.0]


def test_steps_before_the_rule_acts_have_no_score(tmp_path: Path) -> None:
    traced(tmp_path / "t.jsonl", warmup_step=2)
    rows = rows_of(tmp_path / "t.jsonl")
    assert [row["score"] is None for row in rows] == [True] * 16 + [False] * 16
    assert all(row["kept"] and row["reason"] == "kept" for row in rows[:16])


def test_padding_has_no_row(tmp_path: Path) -> None:
    batch = rollout(0)
    batch["response_mask"][2:4] = 0
    fit(Toy(), [DataFlexCallback(*BAND, trace=str(tmp_path / "t.jsonl"))], [batch])
    assert [row["uid"] for row in rows_of(tmp_path / "t.jsonl")] == ["0", "0", "2", "2", "3", "3"]


def test_every_round_of_a_refill_is_there(tmp_path: Path) -> None:
    callback = dapo(4, trace=str(tmp_path / "t.jsonl"))
    kinds = ["hard", "mixed", "easy"] * 16
    module, *_ = rolling_fit([callback], Prompts(kinds, 4), max_steps=3, max_epochs=-1)
    rows = rows_of(tmp_path / "t.jsonl")
    reasons_of = {"hard": "failed", "mixed": "kept", "easy": "solved"}
    expected = [
        (step, name, reasons_of[kinds[int(name[1:])]], "abc"[int(name[1:]) % 3])
        for step, out in enumerate(module.rolled_out)
        for name, num in out
        for _ in range(num)
    ]
    assert len({row["step"] for row in rows}) == 3
    assert [(row["step"], row["uid"], row["reason"], row["domain"]) for row in rows] == expected


def test_of_ranks_that_hold_the_same_samples_one_writes_them() -> None:
    class Mesh:
        mesh_dim_names = ("data_parallel", "tensor_parallel")

        def __init__(self, *place: int) -> None:
            self.place = dict(zip(self.mesh_dim_names, place))

        def get_local_rank(self, name: str) -> int:
            return self.place[name]

    def writes(mesh: Any) -> bool:
        return holds_first_copy(SimpleNamespace(device_mesh=mesh))

    assert [writes(mesh) for mesh in (None, Mesh(0, 0), Mesh(1, 0), Mesh(0, 1), Mesh(1, 1))] == [True] * 3 + [False] * 2


# -- which rows there are ----------------------------------------------------------------------------------------------


def test_every_so_many_steps(tmp_path: Path) -> None:
    traced(tmp_path / "t.jsonl", trace_every=3)
    assert [row["step"] for row in rows_of(tmp_path / "t.jsonl")] == [0] * 8 + [3] * 8


def test_no_more_than_so_many_rows_and_one_warning(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"more than 20 rows \(trace_rows\): nothing is written of step 2") as caught:
        traced(tmp_path / "t.jsonl", trace_rows=20)
    assert sum("trace_rows" in str(each.message) for each in caught) == 1
    assert len(rows_of(tmp_path / "t.jsonl")) == 16


class Resumable(LightningDataModule):
    def train_dataloader(self) -> StatefulDataLoader:
        return StatefulDataLoader([rollout(seed) for seed in range(6)], batch_size=None)


class Stops(Callback):
    """Fails in a step, after what came before it."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_before_backward(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self.at:
            raise RuntimeError("stopped")


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_run_that_was_stopped_and_goes_on_has_each_row_once(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"t{suffix}"
    saves = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1)

    def run(*more: Any, **settings: Any) -> None:
        callback = DataFlexCallback(*BAND, trace=str(path))
        fit(Toy(), [callback, *more], Resumable(), enable_checkpointing=bool(more), **settings)

    with pytest.raises(RuntimeError, match="stopped"):
        run(Stops(5), saves)
    # Of the step that failed too: it was decided on.
    assert [row["step"] for row in rows_of(path)] == [step for step in range(6) for _ in range(8)]
    if suffix == ".jsonl":
        with path.open("a") as file:
            file.write('{"step": 5, "ui')
    run(ckpt_path=tmp_path / "epoch=0-step=4.ckpt")
    resumed = rows_of(path)
    other = tmp_path / f"whole{suffix}"
    fit(Toy(), [DataFlexCallback(*BAND, trace=str(other))], Resumable())
    assert resumed == rows_of(other)


def test_rows_are_there_when_a_checkpoint_is(tmp_path: Path) -> None:
    path, seen = tmp_path / "t.jsonl", []

    class Looks(ModelCheckpoint):
        def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
            super()._save_checkpoint(trainer, filepath)
            seen.append(len(rows_of(path)))

    callbacks = [DataFlexCallback(*BAND, trace=str(path)), Looks(tmp_path, every_n_train_steps=2, save_top_k=-1)]
    fit(Toy(), callbacks, [rollout(seed) for seed in range(4)], enable_checkpointing=True)
    assert seen == [16, 32]


def test_rows_of_ranks_that_are_no_more_are_cut_too(tmp_path: Path) -> None:
    path, batches = tmp_path / "t.jsonl", [rollout(seed) for seed in range(4)]
    saves = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1)
    fit(Toy(), [DataFlexCallback(*BAND, trace=str(path)), saves], batches, enable_checkpointing=True)
    (tmp_path / "t.rank1.jsonl").write_text(path.read_text())
    fit(Toy(), [DataFlexCallback(*BAND, trace=str(path))], batches, ckpt_path=tmp_path / "epoch=0-step=2.ckpt")
    assert [row["step"] for row in rows_of(tmp_path / "t.rank1.jsonl")] == [0] * 8 + [1] * 8


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"trace": "t.csv"}, "trace is 't.csv'. Give a path that ends in .jsonl or .parquet."),
        ({"trace": 3}, "trace is 3. Give a path"),
        ({"trace": "s3://bucket/t.jsonl"}, "Give a path that ends in"),
        ({"trace": "t.jsonl", "trace_every": 0}, "trace_every is 0. It must be a whole number of at least 1."),
        ({"trace": "t.jsonl", "trace_rows": -1}, "trace_rows is -1"),
        ({"trace": "t.jsonl", "mechanism": "mix"}, "trace is 't.jsonl', which mechanism: mix does not read."),
    ],
)
def test_a_trace_that_cannot_be_is_refused_when_the_callback_is_made(keys: dict[str, Any], says: str) -> None:
    block = {"mechanism": "select", "scorer": "group_solve_rate", "actuator": "threshold_band"}
    if keys.get("mechanism") == "mix":
        block = {"actuator": "reward_gap", "domains": ["a", "b"]}
    with pytest.raises(ValueError, match="trace") as caught:
        DataFlexCallback(**block | keys)
    assert says in str(caught.value)


def test_parquet_without_pyarrow_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pyarrow.*not installed\. Install lightning_dataflex\[see\]"):
        DataFlexCallback(*BAND, trace="t.parquet")
    DataFlexCallback(*BAND, trace="t.jsonl")


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_the_trace_of_another_run_stays_as_it_is(tmp_path: Path, suffix: str) -> None:
    traced(path := tmp_path / f"t{suffix}", 1)
    before = rows_of(path)
    with pytest.raises(ValueError, match=r"There is a trace at .* already"):
        traced(path)
    assert rows_of(path) == before


def test_a_file_that_is_no_trace_stays_as_it_is(tmp_path: Path) -> None:
    saves = ModelCheckpoint(tmp_path, every_n_train_steps=1)
    fit(Toy(), [DataFlexCallback(*BAND), saves], [rollout(0)], enable_checkpointing=True)
    path = tmp_path / "data.jsonl"
    path.write_text('{"step": 99, "prompt": "mine"}\n')
    with pytest.raises(ValueError, match=r"no row of a trace: .*mine.*Give another path"):
        fit(Toy(), [DataFlexCallback(*BAND, trace=str(path))], [rollout(0)], ckpt_path=saves.best_model_path)
    assert path.read_text() == '{"step": 99, "prompt": "mine"}\n'


def test_a_folder_that_cannot_be_written_is_refused_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    module = Toy()
    with pytest.raises(ValueError, match=r"DataFlexCallback is to write to .*file, and cannot"):
        fit(module, [DataFlexCallback(*BAND, trace=str(tmp_path / "file" / "t.jsonl"))], [rollout(0)])
    assert not module.losses_seen


def test_two_callbacks_have_files_of_their_own(tmp_path: Path) -> None:
    callbacks = [DataFlexCallback(*BAND, trace=str(tmp_path / "t.jsonl"), label=label) for label in "ab"]
    with pytest.raises(ValueError, match=r"Two callbacks have trace: .*t\.jsonl\. Give each a file of its own"):
        fit(Toy(), callbacks, [rollout(0)])
