"""Warnings that are said once."""

from __future__ import annotations

from torchmetrics.utilities import rank_zero_warn


def warn_once(owner: object, message: str) -> None:
    """Warn on rank 0, the first time that `owner` has this to say (numbers in the message may differ)."""
    said: set[str] = owner.__dict__.setdefault("_said", set())
    key = "".join(char for char in message if not char.isdigit())
    if key not in said:
        said.add(key)
        rank_zero_warn(message, UserWarning, stacklevel=4)
