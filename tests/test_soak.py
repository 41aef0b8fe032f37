"""The long run's script runs, sees growth where there is some, and has every rule that remembers in it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.soak import GATES, LIMITS, POINTS, REMEMBERING, Table
from lightning_dataflex import components
from tests.launch import ROOT


def test_the_script_runs() -> None:
    command = [sys.executable, "benchmarks/soak.py", "--steps", "50"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    # So short a run has not filled its memories.
    assert run.returncode in (0, 1), run.stderr
    lines = [line.split() for line in run.stdout.splitlines()]
    assert [line[0] for line in lines if len(line) == 1 + len(LIMITS)][-POINTS:] == [str(i + 1) for i in range(POINTS)]
    assert sum("over the second half" in " ".join(line) for line in lines) == 2 * len(LIMITS)


@pytest.mark.parametrize("column", range(len(LIMITS)))
def test_what_grows_is_seen(column: int, capsys: pytest.CaptureFixture) -> None:
    table = Table("nothing", 10)
    table.rows = [tuple(300.0 for _ in LIMITS) for _ in range(POINTS)]
    assert table.is_flat()
    table.rows = [tuple(300.0 * (i + 1) if j == column else 300.0 for j in range(len(LIMITS))) for i in range(POINTS)]
    assert not table.is_flat()
    assert f"{list(LIMITS)[column]}: grows" in capsys.readouterr().out


def test_every_rule_that_remembers_takes_part() -> None:
    scorers = {
        name for name, cls in components("scorer").items() if cls.remembers or getattr(cls, "columns_remembered", False)
    }
    selectors = {name for name, cls in components("selector").items() if cls.remembers}
    assert scorers == {"ema", *GATES}
    assert not selectors
    assert str(REMEMBERING).count("'ema'") == 3
