"""What the callbacks of a step hand on to each other, so that a batch is read once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lightning_dataflex.core.rollout import RolloutBatch


class Relay:
    """The reading of a batch, for the callback that acts next on it: its ids are told apart once.

    A hook of somebody else may have had the batch in between: if a field is another, or a tensor was written to, it is
    read anew. What is written into a list or an array is not seen.
    """

    def __init__(self) -> None:
        self._last: RolloutBatch | None = None
        self._held: list[tuple[str, Any, int]] = []

    def reading(self, batch: Any, fields: Mapping[str, str]) -> RolloutBatch:
        """The last callback's, if it has just handed on this batch and calls its fields the same; else a new one."""
        (last, held), (self._last, self._held) = (self._last, self._held), (None, [])
        if last is not None and last.source is batch and last.fields == dict(fields):
            now = _held(batch)
            same = (a[0] == b[0] and a[1] is b[1] and a[2] == b[2] for a, b in zip(held, now))
            if len(held) == len(now) and all(same):
                return last
        return RolloutBatch.of(batch, fields)

    def hand_on(self, reading: RolloutBatch, result: Any) -> None:
        """The next callback gets `result`, which was made of this reading's batch."""
        self._last, self._held = reading.after(result), _held(result)


def _held(batch: Any) -> list[tuple[str, Any, int]]:
    """The fields of a batch, and how often each of its tensors was written to."""
    reading = RolloutBatch(batch)
    fields = [(key, reading[key]) for key in reading.keys()]
    return [(k, v, v._version if isinstance(v, Tensor) and not v.is_inference() else 0) for k, v in fields]
