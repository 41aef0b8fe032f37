"""A run that is killed goes on as if it had not been: killed by SIGKILL, three times, in real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.killing import CASES, KILLS, ended, read, run, started

pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    return tmp_path / "whole", tmp_path / "killed"


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_a_killed_run_goes_on_as_one_that_was_not(case: str, world: int, folders: tuple[Path, Path]) -> None:
    whole, killed = folders
    uninterrupted_run = started(case, world, whole, "run")
    for num, (name, kill) in enumerate(KILLS.items()):
        assert run(case, world, killed, name, kill, resume=num > 0) == [-9] * world
    assert run(case, world, killed, "the rest", resume=True) == [0] * world
    assert ended(uninterrupted_run) == [0] * world
    for rank in range(world):
        uninterrupted = read(whole, "run", rank)
        lives = [read(killed, name, rank) for name in (*KILLS, "the rest")]
        assert set().union(*lives) == set(uninterrupted)
        for life in lives:
            assert life == {key: uninterrupted[key] for key in life}


def numbers(text: str) -> Any:
    return eval(text, {"__builtins__": {}, "nan": np.nan, "inf": np.inf})


@pytest.mark.parametrize("case", ["every scorer, selector and reweighter", "every mixer, and the sampler"])
def test_one_rank_goes_on_as_two_would_have(case: str, folders: tuple[Path, Path]) -> None:
    whole, killed = folders
    assert run(case, 1, whole, "run") == [0]
    assert run(case, 2, killed, "two", KILLS["mid-accumulation"]) == [-9, -9]
    assert run(case, 1, killed, "one", resume=True) == [0]
    uninterrupted, rest = read(whole, "run", 0), read(killed, "one", 0)
    assert (0, 4) in rest
    for key in rest.keys() - {"end"}:
        (rows, logged, decisions, _), (rows_1, logged_1, decisions_1, _) = (
            numbers(rest[key]),
            numbers(uninterrupted[key]),
        )
        assert rows == rows_1
        assert logged == pytest.approx(logged_1, rel=1e-6, abs=1e-6, nan_ok=True)
        for one, other in zip(decisions, decisions_1, strict=True):
            for part, other_part in zip(one, other, strict=True):
                np.testing.assert_allclose(part, other_part, atol=1e-6)


def test_one_rank_takes_up_what_waits_of_two_and_begins_the_epoch_anew(folders: tuple[Path, Path]) -> None:
    _, killed = folders
    assert run("refill", 2, killed, "two", KILLS["mid-accumulation"]) == [-9, -9]
    assert run("refill", 1, killed, "one", resume=True) == [0]
    assert "was written by 2 ranks, and here are 1" in (killed / "one.0.warnings").read_text()
    assert max(read(killed, "one", 0).keys() - {"end"})[0] == 1
