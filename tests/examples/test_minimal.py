"""The shortest example does what its page says: it trains, and leaves nothing in the folder that it is started in."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "examples" / "minimal.py"


def test_it_is_short_and_its_solve_rate_rises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PL_GLOBAL_SEED", "")
    with torch.random.fork_rng(devices=[]):
        runpy.run_path(str(SCRIPT), run_name="__main__")
    printed = capsys.readouterr().out
    rates = {when: float(rate) for when, rate in re.findall(r"solve rate (before|after): +([\d.]+)", printed)}
    assert rates["before"] < 0.2
    assert rates["after"] > 0.9
    assert list(tmp_path.iterdir()) == []
    assert len(SCRIPT.read_text().splitlines()) <= 60
