"""Values that a user gave: how an error shows them, and the check of a setting that is one of a few words."""

from __future__ import annotations

from typing import Any, get_args

MOST_SHOWN = 200
"""Characters of a value that an error shows."""


def shown(value: object) -> str:
    """A value as an error shows it, whatever it is: a text that is not too long.

    Example:
        >>> shown("a"), len(shown(list(range(1000)))), shown(10**5000)
        ("'a'", 203, 'a value of type int that cannot be shown')
    """
    try:
        text = repr(value)
    except Exception:  # deeper than Python follows, longer than it writes, or not its own text
        return f"a value of type {type(value).__name__} that cannot be shown"
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


def check_choice(name: str, value: object, allowed: Any) -> None:
    """Raise a ValueError for a value that is not among those of a Literal of texts.

    Example:
        >>> from typing import Literal
        >>> check_choice("agg", "median", Literal["mean", "sum"])
        Traceback (most recent call last):
        ValueError: agg is 'median'. Use one of mean, sum.
    """
    if not isinstance(value, str) or value not in get_args(allowed):
        raise ValueError(f"{name} is {shown(value)}. Use one of {', '.join(get_args(allowed))}.")
