"""One check of a setting that is one of a few words."""

from __future__ import annotations

from typing import Any, get_args


def check_choice(name: str, value: object, allowed: Any) -> None:
    """Raise a ValueError for a value that is not among those of a Literal.

    Example:
        >>> from typing import Literal
        >>> check_choice("agg", "median", Literal["mean", "sum"])
        Traceback (most recent call last):
        ValueError: agg is 'median'. Use one of mean, sum.
    """
    if value not in get_args(allowed):
        raise ValueError(f"{name} is {value!r}. Use one of {', '.join(get_args(allowed))}.")
