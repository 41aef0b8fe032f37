"""A package of another author, installed into a folder of its own, is found by the name in a configuration."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lightning_dataflex import components

ROOT = Path(__file__).parents[2]
CONFIG = {
    "model": {"class_path": "tests.toy.Toy"},
    "data": {"class_path": "tests.toy.ToyData"},
    "dataflex": {
        "mechanism": "select",
        "scorer": {"name": "short_first", "params": {"budget": 5}},
        "actuator": "topk_fraction",
    },
}


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Where pip has installed the example package, without an index."""
    # Building writes beside the sources.
    source = shutil.copytree(ROOT / "examples" / "plugin", tmp_path / "plugin")
    options = ["--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", "-q", *options, "--target", str(tmp_path / "site"), str(source)]
    subprocess.run(command, check=True, timeout=100)
    return tmp_path / "site"


def test_an_installed_package_is_found_by_name_in_a_configuration(site: Path, tmp_path: Path) -> None:
    assert "short_first" not in components("scorer")
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(CONFIG))
    command = [sys.executable, "-m", "lightning_dataflex", "check", "--config", str(config)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(site), str(ROOT)])}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "select.short_first.topk_fraction" in done.stdout
