"""What a run tells while it goes: the files of its loggers, its progress bars, its lines."""

from __future__ import annotations

import csv
import json
import logging
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_dataflex import DataFlexCallback
from tests import flowing
from tests.toy import Toy, fit, kept_rows, rollout, softmax_weights

BATCHES = [rollout(seed) for seed in (0, 10, 2, 13)]
NAME = "select.group_solve_rate.threshold_band"


def outcomes(batch: dict[str, Any]) -> np.ndarray:
    return np.where(batch["response_mask"].numpy() > 0, batch["rm_scores"].numpy(), 0).sum(-1)


def rates(batch: dict[str, Any]) -> np.ndarray:
    """The solve rate of each sample's group of two."""
    return outcomes(batch).reshape(-1, 2).mean(1).repeat(2)


def solving(**changes: Any) -> DataFlexCallback:
    return DataFlexCallback("select", "group_solve_rate", "threshold_band", **changes)


def run(callback: DataFlexCallback, folder: Path, *more: Any, every: int = 1, **settings: Any) -> Trainer:
    loggers = [CSVLogger(folder, name="", version="csv"), TensorBoardLogger(folder, name="", version="tb")]
    settings = {"logger": loggers, "log_every_n_steps": every, **settings}
    return fit(Toy(), [callback, *more], BATCHES, **settings)


def events(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder / "tb"), {"histograms": 0}).Reload()


def test_what_the_files_hold_is_what_the_batches_hold(tmp_path: Path) -> None:
    run(solving(), tmp_path)
    kept = [kept_rows(batch).mean() for batch in BATCHES]
    rewards = [outcomes(batch).mean() for batch in BATCHES]
    assert len(set(kept)) > 1
    with (tmp_path / "csv" / "metrics.csv").open() as file:
        table = list(csv.DictReader(file))
    board = events(tmp_path)
    for name, expected in (("kept_frac", kept), ("reward_all", rewards)):
        assert [float(row[f"dataflex/{name}"]) for row in table] == pytest.approx(expected)
        scalars = board.Scalars(f"dataflex/{name}")
        assert [scalar.value for scalar in scalars] == pytest.approx(expected)
        assert [int(row["step"]) for row in table] == [scalar.step for scalar in scalars] == [0, 1, 2, 3]


def test_histograms_are_of_scores_and_weights(tmp_path: Path) -> None:
    run(solving(), tmp_path)
    for i, (scores, weights) in enumerate(
        zip(*map(events(tmp_path).Histograms, ("dataflex/scores", "dataflex/weights")))
    ):
        assert scores.step == weights.step == i
        assert scores.histogram_value.num == weights.histogram_value.num == len(rates(BATCHES[i]))
        assert scores.histogram_value.sum == pytest.approx(rates(BATCHES[i]).sum())
        assert scores.histogram_value.sum_squares == pytest.approx((rates(BATCHES[i]) ** 2).sum())
        assert weights.histogram_value.sum == pytest.approx(kept_rows(BATCHES[i]).sum())


def test_histograms_of_token_scores_leave_padding_out(tmp_path: Path) -> None:
    callback = DataFlexCallback("reweight", "advantage_magnitude", {"name": "softmax", "params": {"temperature": 0.7}})
    token = DataFlexCallback("select", "token_entropy", "high_entropy_tokens", label="token")
    batches = [batch | {"entropies": batch["old_log_probs"].exp()} for batch in BATCHES]
    logger = TensorBoardLogger(tmp_path, name="", version="tb")
    fit(Toy(), [callback, token], batches, logger=logger, log_every_n_steps=1)
    first = events(tmp_path).Histograms("dataflex/token/scores")[0].histogram_value
    mask = batches[0]["response_mask"].numpy() > 0
    assert first.num == mask.sum() < mask.size
    assert first.sum == pytest.approx(batches[0]["entropies"].numpy()[mask].sum())


def test_histograms_come_when_the_loggers_are_told(tmp_path: Path) -> None:
    run(solving(warmup_step=2), tmp_path, every=2)
    board = events(tmp_path)
    assert [each.step for each in board.Scalars("dataflex/kept_frac")] == [1, 3]
    assert [each.step for each in board.Histograms("dataflex/weights")] == [1, 3]
    assert [each.step for each in board.Histograms("dataflex/scores")] == [3]


def test_accumulated_batches_are_told_once(tmp_path: Path) -> None:
    run(solving(), tmp_path, accumulate_grad_batches=2)
    board = events(tmp_path)
    assert [each.step for each in board.Histograms("dataflex/weights")] == [0, 1]
    assert [each.step for each in board.Scalars("dataflex/kept_frac")] == [0, 1]


@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
def test_progress_bars_show_kept_fraction_and_solve_rate(
    bar: Any, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")  # of a Rich console that is no terminal
    run(solving(), tmp_path, bar(refresh_rate=1), enable_progress_bar=True)
    shown = "".join(capsys.readouterr()).replace("=", ": ").replace("\n", " ")
    assert f"dataflex/kept_frac: {kept_rows(BATCHES[-1]).mean():.3f}" in shown
    assert f"dataflex/reward_all: {outcomes(BATCHES[-1]).mean():.3f}" in shown


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the logger has said so far."""
    logger = logging.getLogger("lightning_dataflex")
    monkeypatch.setattr(logger, "propagate", True)
    monkeypatch.setattr(logger, "handlers", [])
    level = logger.level
    logger.setLevel(logging.NOTSET)
    yield lambda: [record.getMessage() for record in caplog.records if record.name == "lightning_dataflex"]
    logger.setLevel(level)


def test_a_line_at_the_start_and_one_at_the_end(tmp_path: Path, lines: Any) -> None:
    run(solving(fields={"rm_scores": "rm_scores"}), tmp_path)
    kept, rewards = [np.concatenate([of(batch) for batch in BATCHES]) for of in (kept_rows, outcomes)]
    by_step = [outcomes(batch)[kept_rows(batch) > 0] for batch in BATCHES]
    of_kept = np.mean([each.mean() if len(each) else 0 for each in by_step])
    start, end = lines()
    read = "response_mask, rm_scores (as rm_scores), uid"
    assert start == f"dataflex {NAME}: acts at dataflex (DataFlexPoint); reads {read}; drop: mask."
    assert end == (
        f"dataflex {NAME}: 4 steps; {kept.sum():.0f} of {len(kept)} samples kept; "
        f"mean kept fraction {kept.mean():.3f}; mean reward {rewards.mean():.3f}, of the kept {of_kept:.3f}."
    )


def test_a_reweighter_says_its_effective_sample_size(lines: Any) -> None:
    callback = DataFlexCallback(
        "reweight", "advantage_magnitude", {"name": "softmax", "params": {"temperature": 0.7}}, mount="my_loss"
    )
    fit(Toy("method"), [callback], BATCHES[:1])
    weight = softmax_weights(BATCHES[0], 0.7)[:, 0]
    assert ": acts around my_loss; " in lines()[0]
    assert f"; mean ess {weight.sum() ** 2 / (weight**2).sum():.1f}." in lines()[1]


def test_a_mixer_says_its_proportions(lines: Any) -> None:
    callback = DataFlexCallback("mix", actuator={"name": "reward_gap", "params": {"temperature": 0.5}})
    flowing.fit([callback], flowing.Mixed(["easy", "hard", "mixed"] * 4))
    shares = ", ".join(f"{name} {share:.3f}" for name, share in callback.pipeline.proportions.items())
    assert "; mixes the domains of the sampler." in lines()[0]
    assert lines()[1] == f"dataflex {callback.name}: 3 steps; proportions {shares}."


@pytest.mark.parametrize(("level", "num"), [("debug", 6), ("info", 2), ("warning", 0)])
def test_the_level_says_how_much_is_said(level: str, num: int, tmp_path: Path, lines: Any) -> None:
    run(solving(log_level=level), tmp_path)
    assert len(lines()) == num


def test_another_level_is_refused_before_training() -> None:
    with pytest.raises(ValueError, match=r"log_level is 'infos'\. Did you mean 'info'\?"):
        solving(log_level="infos")


def test_another_level_is_no_other_setting_to_a_checkpoint() -> None:
    assert solving(log_level="debug").state_dict() == solving().state_dict()


def test_other_ranks_say_nothing(tmp_path: Path, lines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    callback = solving(log_level="debug")
    monkeypatch.setattr(Trainer, "is_global_zero", property(lambda trainer: False))
    run(callback, tmp_path)
    assert lines() == []
    assert callback.telling.history.steps == []
    assert not events(tmp_path).Tags()["histograms"]


def test_where_nobody_listens_it_speaks_to_stderr_once(
    lines: Any, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    for _ in range(2):
        fit(Toy(), [solving()], BATCHES[:1])
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith(f"dataflex {NAME}")]
    assert len(said) == 4


def test_a_level_of_the_users_own_stays(lines: Any) -> None:
    logging.getLogger("lightning_dataflex").setLevel(logging.ERROR)
    fit(Toy(), [solving(log_level="debug")], BATCHES[:1])
    assert lines() == []


def records(file: Path) -> Iterator[bytes]:
    """Those of a .wandb file: blocks of 32 KiB, and in them pieces with a checksum, a length and a kind."""
    data, place, whole = file.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        size, kind = struct.unpack_from("<HB", data, place + 4)
        whole += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # the whole, or its last piece
            yield whole
            whole = b""


def test_wandb_is_told_offline(tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb", reason="wandb is not installed: pip install wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    run(solving(), tmp_path, logger=WandbLogger(save_dir=tmp_path, offline=True, project="test"))
    wandb.finish()
    found: dict[str, list[Any]] = {}
    for item in (i for data in records(next(tmp_path.rglob("*.wandb"))) for i in Record.FromString(data).history.item):
        found.setdefault("/".join(item.nested_key) or item.key, []).append(json.loads(item.value_json))
    assert found["dataflex/kept_frac"] == pytest.approx([kept_rows(batch).mean() for batch in BATCHES])
    assert [sum(counts) for counts in found["dataflex/scores/values"]] == [len(rates(batch)) for batch in BATCHES]
    # Of 64 bins from 0 to 1 the last has the samples that are kept.
    assert [counts[-1] for counts in found["dataflex/weights/values"]][:3] == [kept_rows(b).sum() for b in BATCHES[:3]]


def test_mlflow_is_told_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason="mlflow is not installed: pip install mlflow-skinny")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    run(solving(), tmp_path, logger=MLFlowLogger(tracking_uri=(tmp_path / "mlflow").as_uri()))
    file = next((tmp_path / "mlflow").rglob("dataflex/kept_frac"))
    values = [float(line.split()[1]) for line in file.read_text().splitlines()]
    assert values == pytest.approx([kept_rows(batch).mean() for batch in BATCHES])
