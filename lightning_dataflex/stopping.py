"""Stops in the middle of a step: what is saved then is no state to go on from, unless nothing of ours has changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torchmetrics.utilities import rank_zero_warn

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

UNSEEN = "unseen"
"""Of a batch that was being worked on, nothing was remembered."""


class StepWatch:
    """Knows how much of a training step is in a callback's state.

    The Trainer may save at any time, after an exception too, and a resumed run begins the batch anew that was being
    worked on. What a rule has remembered of that batch, it would remember twice.
    """

    def __init__(self) -> None:
        self._in_batch = self._acted = False
        self._num_waiting = 0
        self._progress: Any = None
        self._saved: Mapping[str, Any] = {}

    def reset(self) -> None:
        """A fit begins, with the state that it is about to be given, if any."""
        self._in_batch, self._num_waiting, self._saved = False, 0, {}

    def begin_batch(self, trainer: Trainer) -> None:
        """A training batch is about to be worked on."""
        self._in_batch, self._acted = True, False
        self._progress = trainer.fit_loop.epoch_loop.batch_progress

    def act(self) -> None:
        """What the callback remembers is about to change."""
        self._acted = True

    def end_batch(self, trainer: Trainer, batch_idx: int) -> None:
        """The callback has done all that it does in a batch."""
        self._in_batch = False
        accumulates = trainer.lightning_module.automatic_optimization and not trainer.is_last_batch
        self._num_waiting = (batch_idx + 1) % trainer.accumulate_grad_batches if accumulates else 0

    def marks(self, *, remembers: bool, steers: bool = False) -> dict[str, Any]:
        """What a state has to say of itself; nothing between two optimiser steps.

        Args:
            remembers: Whether the callback remembers anything of a batch.
            steers: Whether it tells the loader where to go on.
        """
        if not self._in_batch:
            return {"num_waiting": self._num_waiting} if self._num_waiting else {}
        # The Trainer counts a batch that was processed, even if not every callback has seen the end of it.
        over = self._progress.current.processed > self._progress.current.completed
        if over or (self._acted and remembers):
            return {"unfinished": True}
        return {} if steers else {"unfinished": UNSEEN}

    def load(self, state: Mapping[str, Any]) -> None:
        """A state was loaded, for a fit or for something else."""
        self._saved = {name: state[name] for name in ("unfinished", "num_waiting") if name in state}

    def check(self, name: str) -> None:
        """A fit goes on from what was loaded.

        Raises:
            ValueError: It was saved in the middle of a step.
        """
        if self._saved.get("unfinished") is True:
            raise ValueError(
                f"The checkpoint was saved in the middle of a training step, of which {name} had seen a part: to begin "
                "the step anew would count that part twice. Resume from a checkpoint that was saved after a step "
                "(ModelCheckpoint with every_n_train_steps, or a stop by SIGTERM, which ends the step first)."
            )
        if self._saved.get("unfinished") == UNSEEN:
            rank_zero_warn(
                f"The checkpoint was saved in the middle of a training step, before {name} had remembered anything of "
                "it. Lightning begins the step anew; a loader that resumes by itself may have gone past its batch.",
                UserWarning,
            )
        if num := self._saved.get("num_waiting", 0):
            rank_zero_warn(
                f"The checkpoint was saved after {num} of the batches of one optimiser step (accumulate_grad_batches), "
                "and Lightning saves no gradients: the first step is made of the other batches alone. To go on as if "
                "never stopped, resume from a checkpoint that was saved after an optimiser step.",
                UserWarning,
            )
