"""Files that a run reads: how large they may be, and what may stand in a configuration."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from lightning_dataflex.functional.choices import shown

MOST_CONFIG_BYTES = 2**20
"""The largest configuration file that is read."""
MOST_DEPTH, MOST_NODES, MOST_DIGITS = 64, 100_000, 4_000
"""How deep a configuration may be nested, how many values it may hold, and digits of a number in it."""

TRACE_SUFFIXES = (".jsonl", ".parquet")


def check_file(path: str | os.PathLike[str], most_bytes: int, cure: str) -> None:
    """Raise a ValueError unless there is a file to read, neither empty nor too large.

    Args:
        path: Where it should be.
        most_bytes: How large it may be.
        cure: The sentence that says what to do instead.

    Example:
        >>> check_file("nowhere.pt", 2**20, "Collect a pool first.")
        Traceback (most recent call last):
        ValueError: There is no file 'nowhere.pt'. Collect a pool first.
    """
    name, file = repr(os.fspath(path)), Path(path)
    if file.is_dir():
        raise ValueError(f"{name} is a folder and no file. {cure}")
    if not file.exists():
        raise ValueError(f"There is no file {name}. {cure}")
    if not file.is_file():
        raise ValueError(f"{name} is no regular file. {cure}")
    size = file.stat().st_size
    if not size:
        raise ValueError(f"{name} is empty. {cure}")
    check_size(name, size, most_bytes)


def check_size(name: str, size: int, most_bytes: int, how: str = "Give a smaller file.") -> None:
    """Raise a ValueError for what takes more bytes than are read."""
    if size > most_bytes:
        raise ValueError(f"{name} has {size:,} bytes, and at most {most_bytes:,} are read. {how}")


def check_config_file(path: str | os.PathLike[str]) -> None:
    """Raise a ValueError for a file that is no plain configuration in YAML, or JSON, of a size to be read by people.

    What its aliases stand for counts each time: a few lines can stand for billions of values.
    """
    name = repr(os.fspath(path))
    check_file(path, MOST_CONFIG_BYTES, "Give a configuration in YAML.")
    try:
        text = Path(path).read_text("utf-8")
        depth, num = _extent(text)
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is no text in UTF-8. Give a configuration in YAML.") from error
    except OSError as error:
        raise ValueError(f"{name} cannot be read: {error.strerror}. Give another file.") from error
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        place = f" at line {where.line + 1}" if where else ""
        raise ValueError(f"{name} cannot be read as YAML{place}. Correct it there.") from error
    if depth > MOST_DEPTH:
        raise ValueError(f"{name} is nested more than {MOST_DEPTH} deep. Write it flatter.")
    if num > MOST_NODES:
        raise ValueError(f"{name} holds more than {MOST_NODES:,} values, those of its aliases included. Give fewer.")
    if re.search(rf"\d{{{MOST_DIGITS},}}", text):
        raise ValueError(f"{name} holds a number of more than {MOST_DIGITS:,} digits. Give a shorter one.")


def plain_config(path: str | os.PathLike[str]) -> Any:
    """What a configuration of plain values holds.

    Raises:
        ValueError: It is none.
    """
    check_config_file(path)
    try:
        return yaml.safe_load(Path(path).read_text("utf-8"))
    except (yaml.YAMLError, ValueError) as error:
        first = str(error).splitlines()[0]
        raise ValueError(f"{os.fspath(path)!r} holds what is no plain value: {first}. Correct it there.") from error


def blocks_in(config: Any) -> list[Any]:
    """The `dataflex` blocks of a configuration, if it has any.

    It is one for `dataflex fit`, with the blocks under `dataflex` or as callbacks of the Trainer, or a block alone, or
    a list of blocks.

    Example:
        >>> blocks_in({"dataflex": {"mechanism": "mix"}}), blocks_in({"trainer": {}})
        ([{'mechanism': 'mix'}], [])
    """
    if isinstance(config, list):
        return config
    config = config if isinstance(config, dict) else {}
    found = config.get("dataflex", config if "mechanism" in config else None)
    blocks = found if isinstance(found, list) else [found] if found is not None else []
    callbacks = within(config, "trainer", "callbacks") or []
    return blocks + [
        within(callback, "init_args") or {}
        for callback in (callbacks if isinstance(callbacks, list) else [callbacks])
        if str(within(callback, "class_path")).endswith("DataFlexCallback")
    ]


def within(value: Any, *keys: str) -> Any:
    """What is under these keys, one in the other; None where there is nothing.

    Example:
        >>> within({"trainer": {"max_steps": 3}}, "trainer", "max_steps"), within({"trainer": None}, "trainer", "a")
        (3, None)
    """
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def check_trace_path(path: object) -> None:
    """Raise a ValueError unless a trace can be written under this name, as far as the name says.

    Example:
        >>> check_trace_path("trace.csv")
        Traceback (most recent call last):
        ValueError: trace is 'trace.csv'. Give a path that ends in .jsonl or .parquet.
    """
    if not isinstance(path, (str, os.PathLike)) or Path(path).suffix not in TRACE_SUFFIXES or "://" in str(path):
        raise ValueError(f"trace is {shown(path)}. Give a path that ends in .jsonl or .parquet.")
    if Path(path).suffix == ".parquet" and not find_spec("pyarrow"):
        raise ValueError(
            f"trace is {shown(path)}, and pyarrow, which writes Parquet, is not installed. "
            "Install lightning_dataflex[see], or give a path that ends in .jsonl."
        )


def _extent(text: str) -> tuple[int, int]:
    """How deep a document is nested, and how many values it stands for; no further than is allowed."""
    depth = num = deepest = 0
    named: dict[str, int] = {}
    opened: list[tuple[str | None, int]] = []
    for event in yaml.parse(text, yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            # Of one that is still open: it holds itself, and has no end.
            num += named.get(str(event.anchor), MOST_NODES + 1)
        elif isinstance(event, yaml.CollectionStartEvent):
            opened.append((event.anchor, num))
            depth, num = depth + 1, num + 1
        elif isinstance(event, yaml.ScalarEvent):
            num += 1
            if event.anchor:
                named[event.anchor] = 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = opened.pop()
            depth -= 1
            if anchor:
                named[anchor] = num - before
        deepest = max(deepest, depth)
        if deepest > MOST_DEPTH or num > MOST_NODES:
            break
    return deepest, num
