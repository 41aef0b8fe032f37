"""Ranks that die, fail or hang, and stops from outside: nobody waits for ever, and what resumes is what was stopped."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_dataflex.cli import main
from lightning_dataflex.writing import places
from tests.faults import CASES, Run, interrupted_mounts, stop_and_resume, train, train_on_a_full_disk
from tests.flowing import fit

WAITED = "The ranks could not exchange samples for ema and threshold_band: another rank may have stopped, or does not "
AFTER_2, ON_STOP, BY_MODEL_CHECKPOINT = "step=2.ckpt", "on_exception.ckpt", "stopped.ckpt"


def assert_never_stopped(seen: dict[str, Any], num: int) -> None:
    """Parameters, prompts, logs and states of the last steps are those of a run that was never stopped."""
    assert seen["num"] == num
    assert seen["resumed"] == seen["never stopped"]


# -- one rank of two ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["decision", "end"])
def test_a_rank_that_is_killed_ends_the_other_with_what_it_was_waiting_for(place: str, tmp_path: Path) -> None:
    with Run(tmp_path, train, "ema", place, (1,), world=2) as run:
        run.send(signal.SIGKILL, 1)
        assert run.ended(0) == 1
    assert WAITED in run.output()
    assert "The above exception was the direct cause of" in run.output()


def test_a_rank_that_hangs_ends_the_other_at_the_timeout_of_the_strategy(tmp_path: Path) -> None:
    with Run(tmp_path, train, "ema", "rollout", (1,), False, 8, world=2) as run:
        run.send(signal.SIGSTOP, 1)
        assert run.ended(0) == 1
    assert WAITED in run.output()
    assert "Timed out waiting" in run.output()


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("decision", "Rank 1 could not give its part of the global batch. ArithmeticError: out of luck"),
        ("rollout", WAITED),
        ("loss", "Connection closed by peer"),  # DDP waits there, and not we
    ],
)
def test_a_rank_that_fails_ends_the_other_too(place: str, said: str, tmp_path: Path) -> None:
    with Run(tmp_path, train, "ema", place, (1,), True, world=2) as run:
        assert (run.ended(0), run.ended(1)) == (1, 1)
    assert said in run.output()
    assert "ArithmeticError: out of luck" in run.output(1)


# -- stops from outside ------------------------------------------------------------------------------------------------


def test_ctrl_c_leaves_the_module_as_it_was_found_at_every_mount(tmp_path: Path) -> None:
    with Run(tmp_path, interrupted_mounts) as run:
        for place in range(6):
            run.send(signal.SIGINT, 0, place=place)
        seen = run.left()
    for before, during, after in seen.values():
        assert during != before
        assert after == before
    assert len(seen) == 6


@pytest.mark.parametrize(
    ("case", "place", "step", "world"),
    [(case, "rollout", 2, 1) for case in CASES] + [("refill", "more", 1, 1), ("refill", "rollout", 2, 2)],
)
def test_sigterm_ends_the_step_and_its_checkpoint_resumes(
    case: str, place: str, step: int, world: int, tmp_path: Path
) -> None:
    checkpoints = [ON_STOP] if world > 1 else [ON_STOP, BY_MODEL_CHECKPOINT]
    with Run(tmp_path, stop_and_resume, case, place, step, checkpoints, world=world) as run:
        run.send(signal.SIGTERM, *range(world))
        seen = [run.left(rank) for rank in range(world)]
    for each in seen:
        before, during, after = each["traces"]
        assert during != before
        assert after == before
        for checkpoint in checkpoints:
            assert_never_stopped(each[checkpoint], 4 - step)


@pytest.mark.parametrize(
    ("case", "place", "refused"),
    [
        ("ema", "decision", True),
        ("ema", "end", False),
        ("refill", "rollout", True),
        ("mix", "rollout", False),
        ("mix", "loss", True),
    ],
)
def test_after_ctrl_c_a_checkpoint_resumes_or_says_why_not(
    case: str, place: str, refused: bool, tmp_path: Path
) -> None:
    with Run(tmp_path, stop_and_resume, case, place, 2, [AFTER_2, ON_STOP]) as run:
        run.send(signal.SIGINT, 0)
        seen = run.left()
    before, _, after = seen["traces"]
    assert after == before
    assert_never_stopped(seen[AFTER_2], 3)
    if refused:
        assert "saved in the middle of a training step" in seen[ON_STOP]
    else:
        assert_never_stopped(seen[ON_STOP], 2 if place == "end" else 3)


def test_ctrl_c_on_all_ranks(tmp_path: Path) -> None:
    with Run(tmp_path, stop_and_resume, "ema", "loss", 2, [AFTER_2, ON_STOP], world=2) as run:
        run.send(signal.SIGINT, 0, 1)
        seen = [run.left(rank) for rank in range(2)]
    for each in seen:
        assert_never_stopped(each[AFTER_2], 3)
        assert "saved in the middle of a training step" in each[ON_STOP]


def test_a_batch_that_a_rule_without_memory_was_stopped_in_may_be_lost_to_the_loader(tmp_path: Path) -> None:
    with Run(tmp_path, stop_and_resume, "plain", "loss", 2, [ON_STOP]) as run:
        run.send(signal.SIGINT, 0)
        seen = run.left()[ON_STOP]
    assert "a loader that resumes by itself may have gone past its batch" in seen["said"]
    assert seen["num"] == 3


def test_a_stop_between_the_batches_of_an_optimiser_step_is_warned_of(tmp_path: Path) -> None:
    with Run(tmp_path, stop_and_resume, "ema", "rollout", 2, [ON_STOP], 2) as run:
        run.send(signal.SIGTERM, 0)
        seen = run.left()[ON_STOP]
    assert "saved after 1 of the batches of one optimiser step" in seen["said"]


class Early(Callback):
    """Saves at the end of a batch, before the callbacks that come after it have seen that end."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 2:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("case", CASES)
def test_what_another_callback_saves_before_the_end_of_a_step_is_refused(case: str, tmp_path: Path) -> None:
    (callbacks, data), path = CASES[case], tmp_path / "early.ckpt"
    fit([Early(path), *callbacks()], data(), max_steps=3)
    with pytest.raises(ValueError, match="saved in the middle of a training step"):
        fit(callbacks(), data(), None, path, max_steps=3)
    fit([*callbacks(), Early(path)], data(), max_steps=3)
    module, *_ = fit(callbacks(), data(), None, path, max_steps=3)
    assert len(module.rolled_out) == 1


# -- nowhere to write to -----------------------------------------------------------------------------------------------


class Quiet(CSVLogger):
    """Writes at the end alone."""

    experiment = None  # type: ignore[assignment]


@pytest.mark.parametrize("writer", ["ModelCheckpoint", "Quiet"])
def test_a_folder_that_cannot_be_written_stops_the_run_before_it_trains(writer: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder, steps = tmp_path / "file" / "run", Steps()
    saver: dict[str, Any] = {"enable_checkpointing": True}
    more, settings = ([], {"logger": Quiet(folder)}) if writer == "Quiet" else ([ModelCheckpoint(folder)], saver)
    callbacks, data = CASES["plain"]
    with pytest.raises(ValueError, match=rf"{writer} is to write to {folder}, and cannot: Not a directory"):
        fit([*callbacks(), *more, steps], data(), **settings)
    assert not steps.num


class Steps(Callback):
    num = 0

    def on_train_batch_start(self, *args: Any) -> None:
        self.num += 1


def test_a_full_disk_stops_every_rank_before_it_trains(tmp_path: Path) -> None:
    with Run(tmp_path, train_on_a_full_disk, world=2) as run:
        assert (run.ended(0), run.ended(1)) == (1, 1)
    said = f"ModelCheckpoint is to write to {tmp_path}/checkpoints, and cannot: File too large"
    assert said in run.output(0)
    assert said in run.output(1)
    assert not list(tmp_path.glob("trained*"))


def test_a_run_that_can_be_written_leaves_no_folder_that_it_does_not_need(tmp_path: Path) -> None:
    callbacks, data = CASES["plain"]
    savers = [ModelCheckpoint(tmp_path / "a" / "b", every_n_train_steps=100), OnExceptionCheckpoint("s3://bucket")]
    savers += [OnExceptionCheckpoint(tmp_path / "a" / "c")]
    *_, trainer = fit([*callbacks(), *savers[::2]], data(), max_steps=1, enable_checkpointing=True)
    trainer.callbacks += savers[1:2]
    assert places(trainer) == [("ModelCheckpoint", f"{tmp_path}/a/b"), ("OnExceptionCheckpoint", f"{tmp_path}/a/c")]
    assert not (tmp_path / "a").exists()


def test_the_command_line_says_so_in_one_sentence(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    (tmp_path / "file").touch()
    folder = f"--trainer.default_root_dir={tmp_path}/file/runs"
    with pytest.raises(SystemExit) as stopped:
        main(["fit", "--config=configs/select.yaml", folder, "--trainer.enable_checkpointing=true"])
    assert stopped.value.code == 2
    said = capfd.readouterr().err
    assert f"error: dataflex: ModelCheckpoint is to write to {tmp_path}/file/runs, and cannot: Not a directory" in said
