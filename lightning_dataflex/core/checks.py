"""Checks of a user's numbers and texts: one sentence of fact and one of cure."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any

import numpy as np

from lightning_dataflex.functional.choices import shown

MOST_WHOLE = 2**63 - 1
"""The largest whole number that a tensor holds."""
MOST_NESTED, MOST_ENTRIES = 32, 1_000_000
"""How deep parameters of a component, or fields of a batch, may be nested, and how many entries parameters may have."""
MOST_LISTED = 10
"""Names that a message lists."""


def listed(names: Iterable[object]) -> str:
    """Names as a message lists them: the first of many, and how many there are besides.

    Example:
        >>> listed(["math", "code"]), listed([]), listed(range(256))
        ('math, code', 'none', '0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 246 others')
    """
    texts = [str(name) for name in names]
    num_others = len(texts) - MOST_LISTED
    # To say that one is left out takes the room of one.
    return f"{', '.join(texts[:MOST_LISTED])} and {num_others} others" if num_others > 1 else ", ".join(texts) or "none"


def is_number(value: object) -> bool:
    """Whether a value is a finite real number, and no truth value.

    Example:
        >>> is_number(0.5), is_number(True), is_number("0.5"), is_number(float("nan")), is_number(10**400)
        (True, False, False, False, False)
    """
    # NumPy would take the largest float64 for infinity beside a float32.
    exact = value.item() if isinstance(value, np.generic) else value
    return isinstance(exact, Real) and not isinstance(exact, bool) and abs(exact) <= sys.float_info.max  # type: ignore[operator]


def is_whole(value: object) -> bool:
    """Whether a value is a whole number, and no truth value.

    Example:
        >>> is_whole(3), is_whole(True), is_whole(3.0)
        (True, False, False)
    """
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_range(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> None:
    """Raise a ValueError unless low <= value <= high (low < value when open_low); an infinite end is never reached.

    Example:
        >>> check_range("fraction", 0.0, 0, 1, open_low=True)
        Traceback (most recent call last):
        ValueError: fraction is 0.0. It must be in (0, 1].
    """
    if not is_number(value) or not low <= value <= high or (open_low and value == low):
        left, right = "(" if open_low or low == -math.inf else "[", ")" if high == math.inf else "]"
        raise ValueError(f"{name} is {shown(value)}. It must be in {left}{low}, {high}{right}.")


def check_finite(name: str, value: Any) -> None:
    """Raise a ValueError for what is no number, NaN and infinity.

    Example:
        >>> check_finite("target", float("nan"))
        Traceback (most recent call last):
        ValueError: target is nan. Give a number.
    """
    if not is_number(value):
        raise ValueError(f"{name} is {shown(value)}. Give a number.")


def check_whole(name: str, value: Any, least: int, most: int = MOST_WHOLE) -> None:
    """Raise a ValueError unless a value is a whole number, and neither too small nor too large.

    Example:
        >>> check_whole("seed", -1, 0)
        Traceback (most recent call last):
        ValueError: seed is -1. It must be a whole number of at least 0.
        >>> check_whole("k", 10**30, 1, most=1000)
        Traceback (most recent call last):
        ValueError: k is 1000000000000000000000000000000. It must be a whole number of at most 1000.
    """
    if not is_whole(value) or value < least:
        raise ValueError(f"{name} is {shown(value)}. It must be a whole number of at least {least}.")
    if value > most:
        raise ValueError(f"{name} is {shown(value)}. It must be a whole number of at most {most}.")


def check_nesting(name: str, value: Any) -> None:
    """Raise a ValueError for mappings and lists that are nested too deep, or in themselves, or are too many.

    Example:
        >>> loop = []
        >>> loop.append(loop)
        >>> check_nesting("params", loop)
        Traceback (most recent call last):
        ValueError: params is nested more than 32 deep. Write it flatter.
    """
    waiting, num = [(value, 0)], 0
    while waiting:
        each, depth = waiting.pop()
        if not isinstance(each, (Mapping, list, tuple)):
            continue
        if depth >= MOST_NESTED:
            raise ValueError(f"{name} is nested more than {MOST_NESTED} deep. Write it flatter.")
        num += len(each)
        if num > MOST_ENTRIES:
            raise ValueError(f"{name} has more than {MOST_ENTRIES} entries. Give fewer.")
        waiting += [(inner, depth + 1) for inner in (each.values() if isinstance(each, Mapping) else each)]
