"""PromptSource: the prompts that a Trainer's next step rolls out, drawn from its loader through gates."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning_dataflex.core.plain import plain, restored
from lightning_dataflex.core.registry import registered_name
from lightning_dataflex.core.samples import Layout
from lightning_dataflex.core.warn import warn_once
from lightning_dataflex.gate import Gate
from lightning_dataflex.loading import SourceBatches, rest, validate_at_the_end
from lightning_dataflex.mount import replaced_attribute
from lightning_dataflex.prompts import PromptQueue
from lightning_dataflex.sync import Group

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

MOST_CANDIDATES = 16
"""Prompts that gates look at for each that is to be rolled out, before a step goes on with those that passed."""


@dataclass(frozen=True)
class PromptDraw:
    """The prompts of a rollout, over all ranks, as many for each.

    Attributes:
        prompts: One by one.
        judged: Of each gate, how many prompts of all ranks passed and were skipped for it.
    """

    prompts: list[Any]
    judged: list[list[int]]


class PromptSource:
    """Stands in the place of a Trainer's loader: its batches are the prompts that passed, as many as a step needs.

    The first prompts of a step are drawn before the step before them is trained on, because the Trainer asks then which
    step is the last of an epoch. Every rank draws as many prompts as the others, and judges them alike.

    Args:
        gates: What decides before a rollout, in order.
        layout: What the fields of a batch of prompts are.
        step: The number of the current step.
        first_size: How many prompts a step rolls out first, over all ranks; given how many a loader's batch has on one
            rank, and with how many prompts the step before begins that is yet to be trained on.
        next_size: How many it rolls out next.
        enough: How many prompts must be left for a step that began with so many, and for the one after it.
    """

    def __init__(
        self,
        gates: Sequence[Gate],
        layout: Layout,
        *,
        step: Callable[[], int],
        first_size: Callable[[int, int], int],
        next_size: Callable[[int], int],
        enough: Callable[[int], int],
    ) -> None:
        self.enough = enough
        self.gates, self.step, self.first_size, self.next_size = list(gates), step, first_size, next_size
        self.queue = PromptQueue(layout)
        self.num_pulled = 0
        """Batches of the loader that this epoch has used."""
        self.given: list[Any] = []
        """The prompts that this rank rolls out now."""
        self._ahead: PromptDraw | None = None
        self._loader: Any = ()
        self._iterator: Iterator[Any] = iter(())
        self._length: int | None = None
        self._has_ended = self._has_stepped = self._lives_on_rest = False
        self._loop: Any = None
        self.is_under_way = False
        """Whether prompts were drawn for a step that is not over."""
        self._fetcher: Any = None
        self._saved_ranks: int | None = None
        self._restore: Callable[[], None] = lambda: None

    def attach(self, trainer: Trainer, process_group: Group) -> None:
        """Be there whenever the Trainer sets its loader up, and know the ranks that roll out."""
        self.queue.process_group = process_group
        for gate in self.gates:
            gate.process_group = process_group
        loop: Any = trainer.fit_loop
        set_up = loop.setup_data

        @functools.wraps(set_up)
        def setup_data() -> None:
            set_up()
            self._enter_loader(trainer)

        self._restore = replaced_attribute(loop, "setup_data", setup_data)

    def _enter_loader(self, trainer: Trainer) -> None:
        """Become the source of the Trainer's batches, in place of its loader."""
        loop: Any = trainer.fit_loop
        fetcher = self._fetcher = loop._data_fetcher
        if fetcher is None or isinstance(fetcher._combined_loader, SourceBatches):
            return
        loader = fetcher._combined_loader
        if not hasattr(fetcher, "prefetch_batches") or not isinstance(loader.iterables, type(loader.flattened[0])):
            raise ValueError(
                "Prompts can be chosen from one training loader, in a training_step that takes a batch. Give one "
                "loader, in no list or dict, and no dataloader_iter."
            )
        validate_at_the_end(trainer)
        self._length, self._iterator = fetcher.length, rest(list(fetcher.batches), fetcher.iterator)
        if self._saved_ranks not in (None, self.queue.world):
            warn_once(
                self,
                f"The checkpoint was written by {self._saved_ranks} ranks, and here are {self.queue.world}: their "
                "batches of the loader are others, and the epoch begins anew. What waits is kept.",
            )
            self.num_pulled, self._has_ended = 0, False
        self._saved_ranks = None
        num_batches = math.inf
        if self._is_over:
            self.num_pulled, self._has_ended = 0, False
            if loop.epoch_loop.restarting:
                # Saved at the last batch of an epoch: the Trainer counts from 0 again if the epoch had as many.
                num_batches = loop.epoch_loop.batch_progress.current.processed
        self._lives_on_rest = self._has_ended
        self._loader = loader
        batches = SourceBatches(loader, self)
        fetcher._combined_loader, fetcher.iterator = batches, batches
        fetcher.prefetch_batches, fetcher.length, fetcher.batches, fetcher.done = 0, None, [], False
        self._loop, loop.max_batches = loop, num_batches

    def restart(self) -> None:
        """The loader begins another epoch."""
        self._iterator, self.num_pulled = iter(self._loader), 0
        self._has_ended = self._has_stepped = self._lives_on_rest = False

    def detach(self) -> None:
        """Let go of the Trainer."""
        self._restore()
        self._loop = self._fetcher = None
        self._loader, self._iterator, self.given = (), iter(()), []

    # -- draws -----------------------------------------------------------------------------------------------------

    def first_prompts(self) -> Any:
        """The prompts that this rank rolls out first in the next step. A collective.

        Raises:
            StopIteration: The data are used up.
        """
        # Nobody knows how many steps the epoch has.
        self._loop.max_batches = math.inf
        self.is_under_way = True
        draw = self._ahead or self._first_draw(self.step(), 0)
        if draw is None:
            self.is_under_way = False
            raise StopIteration
        self._has_stepped = True
        self._ahead = self._first_draw(self.step() + 1, len(draw.prompts))
        if self._ahead is not None and self._num_left < self.enough(len(draw.prompts)):
            # Not enough for this step and one more: all that is left of the data is for this one.
            while self._pull():
                pass
            self.queue.put_back(self._ahead.prompts)
            self._ahead = None
        self._fetcher.done = self._ahead is None
        for gate, judged in zip(self.gates, draw.judged):
            gate.judged = judged
        return self._own(draw)

    def next_prompts(self) -> Any:
        """Further prompts for this rank; None where there are not enough for every rank. A collective."""
        draw = self._draw(self.next_size(self.queue.batch_size), self.step())
        for gate, judged in zip(self.gates, draw.judged):
            gate.judged = [before + more for before, more in zip(gate.judged, judged)]
        return self._own(draw) if draw.prompts else None

    def _own(self, draw: PromptDraw) -> Any:
        self.given = self.queue.own(draw.prompts)
        return self.queue.batch(self.given)

    def _first_draw(self, step: int, num_before: int) -> PromptDraw | None:
        if not self.queue.batch_size:
            self._pull()
        draw = self._draw(self.first_size(self.queue.batch_size, num_before), step)
        return draw if draw.prompts else None

    def _draw(self, size: int, step: int) -> PromptDraw:
        judged = [[0, 0] for _ in self.gates]
        prompts = self._passed(size, step, judged)
        num = len(prompts) - len(prompts) % self.queue.world
        self.queue.put_back(prompts[num:])
        return PromptDraw(prompts[:num], judged)

    def _passed(self, num: int, step: int, judged: list[list[int]]) -> list[Any]:
        """The next prompts that pass all gates, at most so many, over all ranks."""
        passed: list[Any] = []
        skipped: list[Any] = []
        while len(passed) < num and len(skipped) < MOST_CANDIDATES * num:
            pool = math.prod(gate.pool(step) for gate in self.gates)
            candidates = self._next_waiting(math.ceil(pool * (num - len(passed))))
            if not candidates:
                break
            for gate, counts in zip(self.gates, judged):
                judgement = gate.passing(candidates, self.queue, num - len(passed), step)
                counts[0], counts[1] = counts[0] + sum(judgement), counts[1] + len(judgement) - sum(judgement)
                passing = judgement if gate.enforce else [True] * len(judgement)
                skipped += [prompt for prompt, passes in zip(candidates, passing) if not passes]
                candidates = [prompt for prompt, passes in zip(candidates, passing) if passes]
            passed += candidates
        # At the end of the data the epoch is over; but each has a step, or there might never be one.
        must_go_on = len(skipped) >= MOST_CANDIDATES * num or not self._has_stepped
        if must_go_on and len(passed) < self.queue.world <= len(skipped) + len(passed):
            warn_once(
                self,
                f"Of {len(skipped) + len(passed)} prompts {len(passed)} passed {self._names}, and each of "
                f"{self.queue.world} ranks needs one: the first of the others are rolled out too. Widen the rule.",
            )
            passed += skipped[: self.queue.world - len(passed)]
        self.queue.put_back(passed[num:])
        return passed[:num]

    def _next_waiting(self, num: int) -> list[Any]:
        while len(self.queue) < num and self._pull():
            pass
        return self.queue.take(num)

    def _pull(self) -> bool:
        """Queue the next batch of the loader, on every rank its own; False at the end of the data. A collective."""
        if self._has_ended:
            return False
        batch, *_ = next(self._iterator, (None,))
        if batch is None and not self.num_pulled:
            # A loader that resumes by itself (torchdata's), at the end of an epoch, begins with an empty one.
            self._iterator = iter(self._loader)
            batch, *_ = next(self._iterator, (None,))
        self.num_pulled += batch is not None
        is_last = self._length is not None and self.num_pulled >= self._length
        self._has_ended = not self.queue.add(batch, is_last=is_last)
        return batch is not None

    @property
    def _num_left(self) -> float:
        """Prompts that the epoch still has, over all ranks, those drawn ahead included."""
        queue = self.queue
        ahead = len(self._ahead.prompts) if self._ahead is not None else 0
        if self._has_ended:
            return len(queue) + ahead
        if self._length is None:
            return math.inf
        return len(queue) + ahead + (self._length - self.num_pulled) * queue.batch_size * queue.world

    @property
    def _names(self) -> str:
        return " and ".join(registered_name(gate.scorer) for gate in self.gates)

    @property
    def _is_over(self) -> bool:
        return self._has_ended and self._ahead is None

    @property
    def num_used(self) -> int | None:
        """Batches that this iteration of the loader has given; None if the run was resumed after its last.

        What then waits still belongs to the epoch before, while the loader is at the next.
        """
        return None if self._lives_on_rest else self.num_pulled

    def end_step(self) -> None:
        """Let the gates remember what the step has shown."""
        for gate in self.gates:
            gate.end_step(self.step())
        self.is_under_way = False

    def state_dict(self) -> dict[str, Any]:
        """What waits, and how far the epoch has come; the same on every rank."""
        ahead = self._ahead
        return {
            "queue": self.queue.state_dict(),
            "ahead": ahead and {"prompts": plain(ahead.prompts, "A prompt"), "judged": ahead.judged},
            "num_pulled": self.num_pulled,
            "num_ranks": self.queue.world,
            "has_ended": self._has_ended,
            "has_stepped": self._has_stepped,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self.queue.load_state_dict(state["queue"])
        self.num_pulled, self._has_ended = state["num_pulled"], state["has_ended"]
        self._saved_ranks = state["num_ranks"]
        self._has_stepped, ahead = state["has_stepped"], state["ahead"]
        self._ahead = ahead and PromptDraw(restored(ahead["prompts"]), ahead["judged"])
