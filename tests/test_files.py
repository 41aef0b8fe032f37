"""Files that are none: too large, broken, empty, of another kind."""

from __future__ import annotations

import io
import os
import re
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lightning_dataflex
from lightning_dataflex import ReplayPool, RolloutBatch
from lightning_dataflex.cli import _check_files, main
from lightning_dataflex.core.files import MOST_CONFIG_BYTES, check_config_file
from lightning_dataflex.core.replay import solved
from lightning_dataflex.core.samples import Layout
from lightning_dataflex.replay import RLEP
from tests.hostile import not_ours

PACKAGE = Path(lightning_dataflex.__file__).parent


# -- pools -------------------------------------------------------------------------------------------------------------


def a_pool() -> ReplayPool:
    pool = ReplayPool()
    batch = {"uid": [7, 7], "rm_scores": torch.tensor([0.0, 1.0]), "response_mask": torch.ones(2, 1)}
    pool.add(solved(RolloutBatch(batch), Layout(), threshold=0.5))
    return pool


class Runs:
    """Leaves a folder behind where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def state(**changes: Any) -> dict[str, Any]:
    return a_pool().state_dict() | changes


def sample(**changes: Any) -> dict[int, list[dict[str, Any]]]:
    return {7: [a_pool().state_dict()["samples"][7][0] | changes]}


def packed(content: bytes) -> bytes:
    """A pool whose tensors take 64 MB once they are unpacked, in a file of a few kB."""
    target = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as parts, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as new:
        for part in parts.infolist():
            new.writestr(part.filename, parts.read(part))
    return target.getvalue()


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


LARGE = saved(state(samples=sample(columns={"zeros": torch.zeros(1, 2**24)})))
POOLS: dict[str, tuple[Any, str]] = {
    "empty": (b"", "is empty. Collect a pool first"),
    "text": (b"pool", "cannot be read as a pool of responses, or not whole. Give a file that ReplayPool.save wrote"),
    "binary": (np.random.default_rng(0).bytes(5000), "cannot be read as a pool"),
    "truncated": (saved(state())[:-100], "cannot be read as a pool"),
    "damaged": (saved(state()).replace(b"samples", b"sumples"), "cannot be read as a pool|is no pool"),
    "a zip file": (packed(saved(state()))[:0] + b"PK\x05\x06" + b"\0" * 18, "cannot be read as a pool"),
    "other content": (saved({"a": 1}), "is no pool of responses. Give a file that ReplayPool.save wrote"),
    "a tensor": (saved(torch.ones(3)), "is no pool of responses"),
    "another format": (saved(state(format="pool")), "is no pool of responses"),
    "a list": (saved(state(samples=[1])), "is no pool of responses"),
    "samples that are none": (saved(state(samples={7: [3]})), "is no pool of responses"),
    "a width that is none": (saved(state(samples=sample(width="wide"))), "is no pool of responses"),
    "two rows": (saved(state(samples=sample(columns={"uid": [7, 7]}))), "is no pool of responses"),
    "prompts that are none": (saved(state(samples={"x": sample()[7]})), "is no pool of responses"),
    "a view of billions": (
        saved(state(samples=sample(columns={"a": torch.zeros(1).expand(1, 2**40)}))),
        "has 4,398,046,511,104 bytes, and at most 4,294,967,296 are read. Give a smaller file, or a larger max_bytes",
    ),
}


@pytest.mark.parametrize("kind", list(POOLS))
def test_what_is_no_pool_is_refused_in_our_words(kind: str, tmp_path: Path) -> None:
    content, message = POOLS[kind]
    path = tmp_path / "pool.pt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"'{re.escape(str(path))}'.*({message})") as caught:
        RLEP(path)
    assert not not_ours(caught.value)
    assert path.read_bytes() == content


def test_a_folder_a_pipe_and_nothing_are_no_pool(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, message in (
        (tmp_path, "is a folder and no file"),
        (tmp_path / "pipe", "is no regular file"),
        (tmp_path / "none", "There is no file"),
        (3, "pool is 3. Give a file"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            RLEP(path)  # type: ignore[arg-type]
        assert not not_ours(caught.value)


def test_a_pool_that_is_too_large_is_refused_before_it_is_read_or_unpacked(tmp_path: Path) -> None:
    large, small = tmp_path / "large.pt", tmp_path / "small.pt"
    large.write_bytes(LARGE)
    small.write_bytes(packed(LARGE))
    assert small.stat().st_size < 2**20
    for path in (large, small):
        with pytest.raises(
            ValueError, match=r"bytes, and at most 1,000,000 are read\. Give .* a larger max_bytes|at most"
        ):
            RLEP(path, max_bytes=10**6)
    assert len(RLEP(large, max_bytes=2**27).pool) == 1
    assert len(ReplayPool.load(large)) == 1


def test_a_pool_that_would_run_code_runs_none(tmp_path: Path) -> None:
    path = tmp_path / "pool.pt"
    path.write_bytes(saved(state(samples={7: [Runs(tmp_path / "ran")]})))
    with pytest.raises(ValueError, match="cannot be read as a pool"):
        RLEP(path)
    assert not (tmp_path / "ran").exists()


# -- configurations ----------------------------------------------------------------------------------------------------


def laughs(levels: int = 9) -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, levels)]
    return "\n".join(lines)


CONFIGS: dict[str, tuple[Any, str]] = {
    "empty": ("", "is empty. Give a configuration"),
    "binary": (np.random.default_rng(0).bytes(5000), "is no text in UTF-8"),
    "Latin-1": ("model: é".encode("latin-1"), "is no text in UTF-8"),
    "truncated": ("dataflex: {mechanism: select, scorer: {name: ", "cannot be read as YAML at line 1. Correct it"),
    "deep lists": ("a: " + "[" * 5000 + "]" * 5000, "is nested more than 64 deep. Write it flatter"),
    "deep mappings": ("a: " + "{a: " * 3000 + "1" + "}" * 3000, "is nested more than 64 deep"),
    "deep JSON": ('{"a": ' * 3000 + "1" + "}" * 3000, "is nested more than 64 deep"),
    "aliases of aliases": (laughs(), "holds more than 100,000 values, those of its aliases included"),
    "itself": ("a: &a [*a]", "holds more than 100,000 values"),
    "a long number": (f"warmup_step: {'1' * 6000}", "holds a number of more than 4,000 digits"),
    "large": (
        "#" * (MOST_CONFIG_BYTES + 1),
        "has 1,048,577 bytes, and at most 1,048,576 are read. Give a smaller file",
    ),
}


@pytest.mark.parametrize("kind", list(CONFIGS))
def test_what_is_no_configuration_is_refused_in_our_words(kind: str, tmp_path: Path, capsys: Any) -> None:
    content, message = CONFIGS[kind]
    path = tmp_path / "config.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message) as caught:
        check_config_file(path)
    assert not not_ours(caught.value)
    for arguments in (["--config", str(path)], [f"--dataflex={path}"]):
        with pytest.raises(SystemExit) as exit_:
            main(["check", *arguments])
        assert exit_.value.code == 2
        assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize("path", sorted((PACKAGE.parent / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_configuration_that_people_write_is_none_of_these(path: Path) -> None:
    assert check_config_file(path) is None


def test_aliases_count_as_what_they_stand_for(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(laughs(4))
    assert check_config_file(path) is None
    path.write_text("a: &a {low: 0.2}\nb: *a\nc:\n  <<: *a\n")
    assert check_config_file(path) is None


def test_a_tag_of_python_runs_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["dataflex"])
    path = tmp_path / "config.yaml"
    path.write_text(f"dataflex: !!python/object/apply:os.mkdir ['{tmp_path / 'ran'}']\n")
    with pytest.raises(SystemExit) as exit_:
        main(["check", "--config", str(path)])
    assert exit_.value.code == 2
    assert not (tmp_path / "ran").exists()


def test_only_what_is_read_as_a_configuration_is_checked_as_one(tmp_path):
    prompts = tmp_path / "prompts.json"
    prompts.write_text("[1]\n" * 300_000)
    inline = "a: " + "x" * 5000
    assert _check_files(["fit", f"--data.init_args.path={prompts}", "--config", inline]) is None
    with pytest.raises(SystemExit):
        _check_files(["fit", "--data", str(prompts)])
