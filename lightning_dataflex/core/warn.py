"""Warnings that are said once."""

from __future__ import annotations

from collections.abc import Callable

from torchmetrics.utilities import rank_zero_warn

WARN_EVERY = 100
"""After the first, only every so many steps of a kind are warned of."""


def warn_once(owner: object, message: str) -> None:
    """Warn on rank 0, the first time that `owner` has this to say (numbers in the message may differ)."""
    said: set[str] = owner.__dict__.setdefault("_said", set())
    key = "".join(char for char in message if not char.isdigit())
    if key not in said:
        said.add(key)
        rank_zero_warn(message, UserWarning, stacklevel=4)


class NowAndThen:
    """Warns of the first step of a kind, and of every hundredth after it."""

    def __init__(self) -> None:
        self._count = 0

    def warn(self, message: Callable[[int], str]) -> None:
        """One more such step: warn of it if it is time, with a message that is told how many there were."""
        self._count += 1
        if self._count % WARN_EVERY == 1:
            rank_zero_warn(message(self._count), UserWarning)
