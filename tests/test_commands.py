"""Commands of the pages: what costs little is run, of what trains the block is built, what others name is there."""

from __future__ import annotations

import importlib
import re
import shlex
import sys

import pytest
import yaml
from torch.distributed.run import get_args_parser

from lightning_dataflex import DataFlexCallback
from lightning_dataflex.cli import main
from tests.pages import PAGES, ROOT, every, inline

STARTS = r"(?:dataflex|python|pytest|mkdocs|pip|torchrun|tensorboard) "
NOT_LOOKED_AT = ("python3 -m venv", "tensorboard", "mkdocs")
"""Of others; and the site is built in .ci/run."""


def commands() -> list[str]:
    """Each command of the pages once, without the folder that it lies in."""
    lines = [
        part
        for block in every("bash")
        for line in block.text.replace("\\\n", " ").splitlines()
        for part in line.split("&&")
    ]
    lines += [code for page in PAGES for code in inline(page)]
    bare = [" ".join(line.replace(".venv/bin/", "").split()) for line in lines]
    shown = {line for line in bare if re.match(STARTS + r"\S", line) and not line.startswith(NOT_LOOKED_AT)}
    return sorted(shown - {"dataflex fit"})


def of(*starts: str) -> list[str]:
    return [command for command in commands() if command.startswith(starts)]


@pytest.mark.parametrize("command", of("dataflex", "torchrun"))
def test_dataflex_commands_are_run_or_parsed_to_their_end(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    words = ["configs/select.yaml" if word == "FILE" else word for word in shlex.split(command)]
    if words[0] == "torchrun":
        launch = get_args_parser().parse_args(words[1:])
        assert launch.module
        assert launch.training_script == "lightning_dataflex"
        words = ["dataflex", *launch.training_script_args]
    if words[1:] == ["check"]:
        words += ["--config", "configs/select.yaml"]
    if words[1] in ("preview", "report"):
        # They read what a run has left, and tests/test_preview.py and tests/test_run_report.py run them on that.
        importlib.import_module(f"lightning_dataflex.{words[1]}.command")._parser().parse_args(words[2:])
        return
    if words[1:3] == ["fit", "--config"] and len(words) == 4:
        # tests/test_configs.py checks each, and trains with it.
        assert (ROOT / words[3]).is_file()
        return
    monkeypatch.setattr(sys, "argv", ["dataflex"])
    monkeypatch.chdir(ROOT)
    trains = words[1] == "fit" and "--dataflex.help" not in words
    code: object = None
    try:
        main([*words[1:], *(["--print_config"] if trains else [])])
    except SystemExit as stop:
        code = stop.code
    printed = capsys.readouterr()
    assert not code, printed.err[-2000:]
    assert printed.out.strip()
    if trains:
        given = yaml.safe_load(printed.out)["dataflex"]
        for block in given if isinstance(given, list) else [given]:
            DataFlexCallback(**block)


@pytest.mark.parametrize("command", of("python "))
def test_scripts_and_their_options_are_there(command: str) -> None:
    _, script, *options = shlex.split(command)
    if script == "-m":
        script = f"{options.pop(0)}/__main__.py"
    source = (ROOT / script).read_text()
    assert all(f'"{option}"' in source for option in options if option.startswith("--"))


@pytest.mark.parametrize("command", of("pytest "))
def test_tests_that_are_named_are_there(command: str) -> None:
    paths, _, wanted = command.removeprefix("pytest ").partition(" -k ")
    places = [ROOT / path for path in paths.split()]
    files = [file for place in places for file in (place.rglob("test_*.py") if place.is_dir() else [place])]
    assert all(file.is_file() for file in files)
    names = re.findall(r"def (test_\w+)|id=\"([^\"]+)\"|\"(\w+)\":", "".join(file.read_text() for file in files))
    text = " ".join(part for match in names for part in match)
    for word in re.findall(r"\w+", wanted):
        assert word in ("or", "and", "not") or word in text, word


@pytest.mark.parametrize("command", of("pip "))
def test_what_is_installed_is_there(command: str) -> None:
    project = (ROOT / "pyproject.toml").read_text()
    for word in shlex.split(command)[2:]:
        for extra in re.findall(r"\[(\w+)\]", word):
            assert re.search(rf"^{extra} = \[", project, re.M), extra
        if "/" in word or word.endswith(".txt"):
            assert (ROOT / word).exists(), word


def test_every_kind_of_command_is_looked_at() -> None:
    kinds = {command.split()[0] for command in commands()}
    assert kinds == {"dataflex", "python", "pytest", "pip", "torchrun"}
    assert (ROOT / ".ci" / "run").read_text().count("mkdocs build --strict") == 1
