"""Values that nobody should give, and what an error of ours looks like."""

from __future__ import annotations

import ast
import collections
import datetime
import functools
import re
import traceback
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

NAN, INF = float("nan"), float("inf")
TRIED: collections.Counter[str] = collections.Counter()
"""Inputs that were tried, by kind."""


class Nasty:
    """Fails at everything that one may do to show or compare it."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no equal")

    def __bool__(self) -> bool:
        raise RuntimeError("no truth")

    __hash__ = None  # type: ignore[assignment]


def called(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("what a configuration names was called")


def nested(depth: int, kind: type = list) -> Any:
    value: Any = 1.0
    for _ in range(depth):
        value = [value] if kind is list else {"a": value}
    return value


def endless() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


TEXTS = [
    "",
    " ",
    "x",
    "nan",
    "null",
    "0.5",
    "1",
    "true",
    "ünï/cødé",
    "a\nb",
    "\0",
    "\ud800",
    "x" * 5000,
    "🜁",
    "../..",
    ".",
]
NAMES = [
    "os.system",
    "__import__('os')",
    "builtins.eval",
    "eval",
    "__class__",
    "tests.hostile.called",
    "${HOME}",
    "a.b",
]
NUMBERS: list[Any] = [
    NAN,
    INF,
    -INF,
    0,
    -1,
    -0.0,
    1e-320,
    1e308,
    1e39,
    2**31,
    2**63,
    -(2**70),
    10**400,
    -(10**5000),
    1e6,
]
OTHERS: list[Any] = [
    None,
    True,
    False,
    b"1",
    b"",
    1j,
    Decimal("0.5"),
    datetime.date(2025, 1, 1),
    print,
    called,
    int,
    object(),
]
OTHERS += [
    Nasty(),
    range(3),
    {1, 2},
    torch.tensor(0.5),
    torch.ones(2),
    np.float32(0.5),
    np.int64(1),
    np.ones(2),
    iter([1]),
]
OTHERS += [nested(40), nested(5000), nested(5000, dict), endless(), np.array(["a", "b"]), np.bool_(True), ...]

FIXED = [*TEXTS, *NAMES, *NUMBERS, *OTHERS]


def fixed(place: int) -> Any:
    return FIXED[place]


# By their place: hypothesis would show them, and for some there is no text.
SCALARS = st.integers(0, len(FIXED) - 1).map(fixed) | st.integers() | st.floats() | st.text(max_size=8)
JUNK = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from([*TEXTS, *NAMES, "name", "params", "scorer", 3, None]), inner, max_size=3)
    ),
    max_leaves=5,
)
"""Anything that a configuration may hold where something else is wanted."""


# -- an error of ours --------------------------------------------------------------------------------------------------


@functools.cache
def _raises(path: str) -> list[tuple[int, int]]:
    """The lines of each `raise` of a file."""
    tree = ast.parse(Path(path).read_text())
    return [(node.lineno, node.end_lineno or 0) for node in ast.walk(tree) if isinstance(node, ast.Raise)]


def not_ours(error: BaseException) -> str:
    """Why an error is none that the package raises itself, for the user to read; empty if it is."""
    frame, line = list(traceback.walk_tb(error.__traceback__))[-1]
    where = f"{frame.f_code.co_filename}:{line}"
    if not frame.f_globals.get("__name__", "").startswith("lightning_dataflex."):
        return f"raised in {where}"
    if not any(first <= line <= last for first, last in _raises(frame.f_code.co_filename)):
        return f"not raised but happened in {where}"
    if type(error) not in (ValueError, TypeError):
        return f"{type(error).__name__} in {where}"
    text = str(error)
    if not re.search(r"[\w)'\"}\]>`.?]\. [A-Z`]", text) or not text.rstrip().endswith((".", "?")) or len(text) > 2000:
        return f"no sentence of fact and one of cure in {where}"
    return ""


def check_ours(error: Exception, *given_: Any) -> None:
    why = not_ours(error)
    assert not why, (why, str(error)[:500], as_text(given_))


def as_text(value: Any) -> str:
    try:
        return repr(value)[:500]
    except Exception:
        return "something without a text"
