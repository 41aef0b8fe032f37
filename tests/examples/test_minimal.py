"""The shortest example does what its page says: it trains, in a folder of its own, and leaves nothing there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "examples" / "minimal.py"


def test_it_is_short_and_its_solve_rate_rises(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(SCRIPT)], cwd=tmp_path, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-2000:]
    rates = {when: float(rate) for when, rate in re.findall(r"solve rate (before|after): +([\d.]+)", done.stdout)}
    assert rates["before"] < 0.2
    assert rates["after"] > 0.9
    assert list(tmp_path.iterdir()) == []
    assert len(SCRIPT.read_text().splitlines()) <= 60
