"""Checks of a user's numbers: one sentence of fact and one of cure."""

from __future__ import annotations

import math


def check_range(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    """Raise a ValueError unless low <= value <= high (low < value when open_low).

    Example:
        >>> check_range("fraction", 0.0, 0, 1, open_low=True)
        Traceback (most recent call last):
        ValueError: fraction is 0.0. It must be in (0, 1].
    """
    if not (low <= value <= high) or (open_low and value == low) or math.isnan(value):
        left, right = "(" if open_low or low == -math.inf else "[", ")" if high == math.inf else "]"
        raise ValueError(f"{name} is {value}. It must be in {left}{low}, {high}{right}.")


def check_finite(name: str, value: float) -> None:
    """Raise a ValueError for NaN and infinity.

    Example:
        >>> check_finite("target", float("nan"))
        Traceback (most recent call last):
        ValueError: target is nan. Give a number.
    """
    if not math.isfinite(value):
        raise ValueError(f"{name} is {value}. Give a number.")
