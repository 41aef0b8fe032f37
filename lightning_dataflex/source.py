"""PromptSource: the prompts that a Trainer's next step rolls out, drawn from its loader through gates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning_dataflex.core.samples import Layout
from lightning_dataflex.core.warn import warn_once
from lightning_dataflex.gate import Gate
from lightning_dataflex.prompts import PromptQueue
from lightning_dataflex.sync import Group

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

MOST_CANDIDATES = 16
"""Prompts that gates look at for each that is to be rolled out, before a step goes on with those that passed."""


class PromptSource:
    """Stands in the place of a Trainer's loader: its batches are the prompts that passed, as many as a step needs.

    Every rank draws as many prompts as the others, and judges them alike.

    Args:
        gates: What decides before a rollout, in order.
        layout: What the fields of a batch of prompts are.
        step: The number of the current step.
        begin_step: Is called before the first prompts of a step are drawn.
        size: How many prompts are to be drawn next, over all ranks, of batches with so many on one rank.
    """

    def __init__(
        self,
        gates: Sequence[Gate],
        layout: Layout,
        *,
        step: Callable[[], int],
        begin_step: Callable[[], None],
        size: Callable[[int], int],
    ) -> None:
        self.gates, self.step, self.begin_step, self.size = list(gates), step, begin_step, size
        self.queue = PromptQueue(layout)
        self.num_pulled = 0
        """Batches of the loader that this epoch has used."""
        self.given: list[Any] = []
        """The prompts that this rank rolls out now."""
        self._iterator: Iterator[Any] = iter(())
        self._length: int | None = None
        self._over = self._has_stepped = self._lives_on_rest = False
        self._loop: Any = None

    def attach(self, process_group: Group) -> None:
        """Know the ranks that roll out."""
        self.queue.process_group = process_group
        for gate in self.gates:
            gate.process_group = process_group

    def enter_loader(self, trainer: Trainer) -> None:
        """Become the source of the Trainer's batches, in place of its loader."""
        loop: Any = trainer.fit_loop
        self._loop = loop
        fetcher = loop._data_fetcher
        if isinstance(fetcher._combined_loader, _Draws):
            return
        if not hasattr(fetcher, "prefetch_batches") or len(fetcher._combined_loader.flattened) != 1:
            raise ValueError(
                "Prompts can be chosen from one training loader, in a training_step that takes a batch. Give one "
                "loader, and no dataloader_iter."
            )
        self._length = fetcher.length
        self._iterator = fetcher.iterator
        if self._over:
            self.num_pulled, self._over = 0, False
        self._lives_on_rest = self._length is not None and 0 < self._length <= self.num_pulled
        draws = _Draws(fetcher._combined_loader, self)
        fetcher._combined_loader, fetcher.iterator = draws, draws
        # Nobody knows how many steps the epoch has, and nothing is drawn before its time.
        fetcher.prefetch_batches, fetcher.length, fetcher.batches, fetcher.done = 0, None, [], False
        if trainer.val_check_batch == loop.max_batches:
            trainer.val_check_batch = float("inf")
        loop.max_batches = float("inf")

    def restart(self, iterator: Iterator[Any]) -> None:
        """The loader begins another epoch."""
        self._iterator, self.num_pulled, self._over = iterator, 0, False
        self._has_stepped = self._lives_on_rest = False

    def detach(self) -> None:
        """Let go of the Trainer."""
        self._loop, self._iterator, self.given = None, iter(()), []

    def first_prompts(self) -> Any:
        """The prompts that this rank rolls out first in the next step. A collective.

        Raises:
            StopIteration: The data are used up.
        """
        for gate in self.gates:
            gate.begin_step()
        self.begin_step()
        if not self.queue.batch_size:
            self._pull()
        batch = self.next_prompts()
        self.say_whether_over()
        if batch is None:
            raise StopIteration
        self._has_stepped = True
        return batch

    def next_prompts(self) -> Any:
        """The next prompts for this rank; None where there are not enough for every rank. A collective."""
        queue, world = self.queue, self.queue.world
        prompts = self._passed(self.size(queue.batch_size))
        num = len(prompts) - len(prompts) % world
        queue.put_back(prompts[num:])
        if not num:
            return None
        self.given = queue.own(prompts[:num])
        return queue.batch(self.given)

    def _passed(self, num: int) -> list[Any]:
        """The next prompts that pass all gates, at most so many, over all ranks."""
        passed: list[Any] = []
        skipped: list[Any] = []
        while len(passed) < num and len(skipped) < MOST_CANDIDATES * num:
            pool = math.prod(gate.pool for gate in self.gates)
            candidates = self._next_waiting(math.ceil(pool * (num - len(passed))))
            if not candidates:
                break
            for gate in self.gates:
                passing = gate.passing(candidates, self.queue, num - len(passed), self.step())
                skipped += [prompt for prompt, passes in zip(candidates, passing) if not passes]
                candidates = [prompt for prompt, passes in zip(candidates, passing) if passes]
            passed += candidates
        # At the end of the data the epoch is over; but each has a step, or there might never be one.
        must_go_on = len(skipped) >= MOST_CANDIDATES * num or not self._has_stepped
        if must_go_on and len(passed) < self.queue.world <= len(skipped) + len(passed):
            warn_once(
                self,
                f"Of {len(skipped) + len(passed)} prompts {len(passed)} passed, fewer than there are ranks: the first "
                "of the others are rolled out too. Widen the rule.",
            )
            passed += skipped[: self.queue.world - len(passed)]
        return passed

    def _next_waiting(self, num: int) -> list[Any]:
        while len(self.queue) < num and self._pull():
            pass
        return self.queue.take(num)

    def _pull(self) -> bool:
        """Queue the next batch of the loader, on every rank its own; False at the end of the data."""
        if self._length is not None and self.num_pulled >= self._length:
            return False
        try:
            batch, *_ = next(self._iterator)
        except StopIteration:
            self._length = self.num_pulled
            return False
        self.num_pulled += 1
        self.queue.add(batch)
        return True

    def say_whether_over(self) -> None:
        """Tell the Trainer whether this is the last step of the epoch."""
        loop = self._loop
        used_up = self._length is not None and self.num_pulled >= self._length
        self._over = used_up and len(self.queue) < self.queue.world
        loop._data_fetcher.done = loop.epoch_loop.batch_progress.is_last_batch = self._over

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

    def state_dict(self) -> dict[str, Any]:
        """What waits, and how far the epoch has come; the same on every rank."""
        return {"queue": self.queue.state_dict(), "num_pulled": self.num_pulled, "over": self._over}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self.queue.load_state_dict(state["queue"])
        self.num_pulled, self._over = state["num_pulled"], state["over"]


class _Draws:
    """What the Trainer takes for its loader: each batch is drawn by the source."""

    def __init__(self, loader: Any, source: PromptSource) -> None:
        self._loader, self._source, self._num_drawn = loader, source, 0

    def __iter__(self) -> _Draws:
        self._source.restart(iter(self._loader))
        self._num_drawn = 0
        return self

    def __next__(self) -> tuple[Any, int, int]:
        batch = self._source.first_prompts()
        self._num_drawn += 1
        return batch, self._num_drawn - 1, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
