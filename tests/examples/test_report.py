from __future__ import annotations

import csv
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from examples.rlhf import PromptDataModule, Report, RLHFModule, policy
from examples.rlhf.report import held_out_rates, plot
from examples.rlhf.solving import SolveRates
from examples.rlhf.tasks import DOMAINS

Train = Callable[..., RLHFModule]


@pytest.fixture(autouse=True)
def _small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "EMBEDDED", policy.EMBEDDED | {"hidden_size": 32, "intermediate_size": 64})


class Knows(RLHFModule):
    """Answers what it is told to: addition is right from the second step on, all else wrong."""

    def scores(self, rows, responses):  # type: ignore[no-untyped-def]
        return torch.tensor([float(row["domain"] == "addition" and self.global_step > 1) for row in rows])


class Scheduler(Callback):
    """Logs, after the report's turn, the kept fraction of a data scheduler."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        pl_module.log("dataflex/kept_frac", trainer.global_step / 10, batch_size=1)


def knows() -> Knows:
    return Knows(warmup_steps=0, num_generations=2, max_new_tokens=3, seed=0)


def test_the_report_tells_before_and_after_and_the_curves(trained: Train, tmp_path: Path) -> None:
    report = Report(batch_size=7)
    trained(knows(), 3, callbacks=[report, Scheduler()])
    with (tmp_path / "report.csv").open() as file:
        table = {row["domain"]: (float(row["before"]), float(row["after"])) for row in csv.DictReader(file)}
    assert table == {name: (0.0, float(name == "addition")) for name in DOMAINS} | {"overall": (0.0, 0.2)}
    result = json.loads((tmp_path / "report.json").read_text())
    assert result["curves"]["dataflex/kept_frac"] == [
        [1, pytest.approx(0.1)],
        [2, pytest.approx(0.2)],
        [3, pytest.approx(0.3)],
    ]
    assert [step for step, _ in result["curves"]["solve_rate"]] == [1, 2, 3]
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


def test_without_a_scheduler_there_is_one_curve(trained: Train) -> None:
    report = Report()
    trained(knows(), 2, callbacks=[report])
    assert list(report.curves) == ["solve_rate"]
    assert len(plot(report.curves).axes[0].lines) == 1


def test_the_shares_of_mixed_domains_are_drawn_below() -> None:
    curves = {f"dataflex/prop_{name}": [[1, share], [2, share]] for name, share in (("copy", 0.25), ("sorting", 0.75))}
    upper, lower = plot(curves | {"solve_rate": [[1, 0.5], [2, 0.6]]}).axes
    assert len(upper.lines) == 1
    top = lower.collections[1].get_paths()[0].vertices[:, 1]
    assert (top.min(), top.max()) == (0.25, 1.0)


def test_a_resumed_report_remembers_its_start(trained: Train, tmp_path: Path) -> None:
    model = trained(knows(), 2, callbacks=[Report()])
    model.trainer.save_checkpoint(tmp_path / "run.ckpt")
    report = Report()
    trained(knows(), 2, callbacks=[report], max_epochs=2, ckpt_path=tmp_path / "run.ckpt")
    assert report.before["addition"] == 0.0
    assert [step for step, _ in report.curves["solve_rate"]] == [1, 2, 3, 4]


def test_validation_and_test_count_every_held_out_prompt(tmp_path: Path) -> None:
    model = knows()
    trainer = Trainer(
        accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, default_root_dir=tmp_path,
        enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    data = PromptDataModule(num_train=8, num_held_out=3, held_out_batch_size=4)
    model.scores = lambda rows, responses: torch.tensor([float(row["domain"] != "copy") for row in rows])
    (validated,) = trainer.validate(model, data, verbose=False)
    (tested,) = trainer.test(model, data, verbose=False)
    assert validated["val/solve_rate"] == pytest.approx(0.8)
    assert tested["test/solve_rate"] == pytest.approx(0.8)
    assert (validated["val/solve_rate/copy"], validated["val/solve_rate/sorting"]) == (0.0, 1.0)


def test_two_ranks_share_the_held_out_prompts() -> None:
    data = PromptDataModule(num_train=1, num_held_out=3)
    data.setup()
    seen: list[str] = []

    def evaluate(rank: int) -> None:
        strategy = SimpleNamespace(reduce=lambda counts, reduce_op: counts)
        precision = SimpleNamespace(val_step_context=nullcontext)
        trainer = SimpleNamespace(
            datamodule=data, global_rank=rank, world_size=2, strategy=strategy, precision_plugin=precision
        )
        model = knows()
        model.solve_rates = lambda rows: (
            seen.extend(row["prompt_id"] for row in rows)
            or SolveRates.of(data.domains, [row["domain"] for row in rows], torch.ones(len(rows)))
        )
        held_out_rates(trainer, model, batch_size=4)

    evaluate(0)
    evaluate(1)
    assert sorted(seen) == sorted(row["prompt_id"] for row in data.prompts.held_out)


def test_two_ranks_write_one_report(trained: Train, tmp_path: Path) -> None:
    report = Report()
    trained(knows(), 2, callbacks=[report], devices=2, strategy="ddp_spawn", limit_val_batches=1)
    result = json.loads((tmp_path / "report.json").read_text())
    assert result["before"]["overall"] == 0.0
    assert result["after"]["overall"] == pytest.approx(0.2)
