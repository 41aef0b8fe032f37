"""What a Trainer takes for its loader, while a PromptSource draws the batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from lightning_dataflex.source import PromptSource


class SourceBatches:
    """What the Trainer takes for its loader: each batch is drawn by the source."""

    def __init__(self, loader: Any, source: PromptSource) -> None:
        self._loader, self._source, self._num_drawn = loader, source, 0

    def __iter__(self) -> SourceBatches:
        self._source.restart()
        self._num_drawn = 0
        return self

    def __next__(self) -> tuple[Any, int, int]:
        batch = self._source.first_prompts()
        self._num_drawn += 1
        return batch, self._num_drawn - 1, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def rest(fetched: Sequence[Any], iterator: Iterator[Any]) -> Iterator[Any]:
    """What was fetched already, and then what comes; asking a loader for its iterator would begin it anew."""
    yield from fetched
    while True:
        try:
            yield next(iterator)
        except StopIteration:
            return


def validate_at_the_end(trainer: Trainer) -> None:
    """Let a validation that comes once an epoch come at its end, whenever that is.

    Raises:
        ValueError: It is to come at a share of an epoch of which nobody knows how long it is.
    """
    if not isinstance(trainer.val_check_interval, float) or trainer.check_val_every_n_epoch is None:
        return
    if trainer.val_check_interval == 1.0:
        trainer.val_check_batch = float("inf")
    elif trainer.enable_validation:
        raise ValueError(
            f"val_check_interval is {trainer.val_check_interval}, a share of an epoch, but with refill or rules on "
            "prompts nobody knows how many steps an epoch has. Give a number of steps."
        )
