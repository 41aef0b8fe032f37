"""RolloutFlow: which prompts a training step rolls out, and how often, until the loss has its batch."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_dataflex.asking import setting
from lightning_dataflex.core.rollout import RolloutBatch
from lightning_dataflex.core.samples import Layout
from lightning_dataflex.core.warn import warn_once
from lightning_dataflex.gate import Gate
from lightning_dataflex.mount import points_of, replaced_attribute
from lightning_dataflex.prompts import PromptQueue
from lightning_dataflex.refill import Refill
from lightning_dataflex.screening import continued
from lightning_dataflex.sync import Group

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

Decide = Callable[[RolloutBatch], "tuple[RolloutBatch, Tensor, int]"]
"""A round's batch with the decision in it, which of its samples are kept, (N,), and the groups that all ranks keep."""

MOST_CANDIDATES = 16
"""Prompts that gates look at for each that is to be rolled out, before a step goes on with those that passed."""


class RolloutFlow:
    """Stands between the data loader and the loss: prompts pass gates, rollouts are repeated until enough is kept.

    The Trainer's next batch is what this draws from the loader's: its prompts are those that passed, as many as the
    step needs. At the module's `DataFlexPoint` the rollouts arrive; with a `Refill` the module's rollout method is
    called with further prompts. Every rank draws as many prompts as the others, and calls as often.

    Args:
        gates: What decides before a rollout, in order.
        refill: What collects kept groups; None to train on each rollout as it comes.
        decide: With a refill, what keeps groups.
        account: With a refill, is told how many groups of all ranks the loss gets.
        observers: What else is to see every rollout.
        screening: Responses to judge a prompt by before the rest is generated; None to generate all at once.
        layout: What the fields of batches are.
        fields: The names that batches have for this project's fields.
        step: The number of the current step.
    """

    def __init__(
        self,
        *,
        gates: Sequence[Gate],
        refill: Refill | None,
        decide: Decide | None,
        account: Callable[[int], None],
        observers: Sequence[Callable[[RolloutBatch], None]],
        screening: int | None,
        layout: Layout,
        fields: Mapping[str, str],
        step: Callable[[], int],
    ) -> None:
        self.gates, self.refill, self.decide, self.observers = list(gates), refill, decide, list(observers)
        self.account = account
        self.screening, self.layout, self.fields, self.step = screening, layout, dict(fields), step
        self.queue = PromptQueue(layout)
        self.num_pulled = 0
        """Batches of the loader that this epoch has used."""
        self.num_groups = 0
        """Groups in the step's batch, over all ranks."""
        self._iterator: Iterator[Any] = iter(())
        self._length: int | None = None
        self._over = False
        self._given: list[Any] = []
        self._is_filled = self._has_stepped = self._lives_on_rest = False
        self._restore: list[Callable[[], None]] = []
        self._trainer: Trainer | None = None
        self._module: LightningModule | None = None

    # -- coming and going ------------------------------------------------------------------------------------------

    def attach(self, trainer: Trainer, module: LightningModule, process_group: Group) -> None:
        """Be there when the module's point, and its rollout method, are called."""
        self._trainer, self._module = trainer, module
        self.queue.process_group = process_group
        for gate in self.gates:
            gate.process_group = process_group
        if self.refill is not None:
            self.refill.process_group = process_group

        @torch.compiler.disable(recursive=True)
        def hook(_point: Any, _args: Any, batch: Any) -> Any:
            return self._filled(batch) if trainer.training and not trainer.sanity_checking else None

        # Before the hooks of the callbacks, whatever their order: they act on the batch that comes out of it.
        self._restore = [point.register_forward_hook(hook, prepend=True).remove for point in points_of(module)]
        if self.refill is not None:
            rollout = getattr(module, self.refill.config.rollout, None)
            if not callable(rollout):
                raise ValueError(
                    f"{type(module).__name__} has no method {self.refill.config.rollout!r} to roll out prompts with. "
                    "Give it one that takes prompts and returns what its DataFlexPoint gets, or name it: "
                    "refill: {rollout: ...}."
                )
            if self.screening is not None:
                self._screen(module, rollout, self.screening)

    def _screen(self, module: LightningModule, rollout: Callable[..., Any], num: int) -> None:
        total = setting(module, "num_generations")
        if not isinstance(total, int) or total <= num:
            raise ValueError(
                f"num_generations of {type(module).__name__} is {total!r}, and {num} responses are to screen a prompt. "
                "Set it to the size of a whole group, larger than that."
            )

        @functools.wraps(rollout)
        def screened(*args: Any, **kwargs: Any) -> Any:
            assert self._trainer is not None
            return rollout(*args, **{"num_generations": num, **kwargs} if self._trainer.training else kwargs)

        assert self.refill is not None
        self._restore.append(replaced_attribute(module, self.refill.config.rollout, screened))

    def enter_loader(self, trainer: Trainer) -> None:
        """Become the source of the Trainer's batches, in place of its loader."""
        loop: Any = trainer.fit_loop
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
        """Leave the module as it was found."""
        while self._restore:
            self._restore.pop()()
        self._trainer = self._module = None
        self._iterator, self._given = iter(()), []

    # -- prompts ---------------------------------------------------------------------------------------------------

    def first_prompts(self) -> Any:
        """The prompts that this rank rolls out first in the next step. A collective.

        Raises:
            StopIteration: The data are used up.
        """
        self._is_filled, self.num_groups = False, 0
        for gate in self.gates:
            gate.begin_step()
        if self.refill is not None:
            self.refill.begin_step(self.step())
        if not self.queue.batch_size:
            self._pull()
        batch = self._drawn()
        if batch is None:
            self._say_whether_over()
            raise StopIteration
        self._has_stepped = True
        self._say_whether_over()
        return batch

    def _drawn(self) -> Any:
        """The next prompts for this rank; None where there are not enough for every rank."""
        queue, world = self.queue, self.queue.world
        most = queue.batch_size
        prompts = self._passed(self.refill.next_size(most, world) if self.refill else most * world)
        num = len(prompts) - len(prompts) % world
        queue.put_back(prompts[num:])
        if not num:
            return None
        self._given = queue.own(prompts[:num])
        return queue.batch(self._given)

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

    def _say_whether_over(self) -> None:
        """Tell the Trainer whether this is the last step of the epoch."""
        assert self._trainer is not None
        loop: Any = self._trainer.fit_loop
        used_up = self._length is not None and self.num_pulled >= self._length
        self._over = used_up and len(self.queue) < self.queue.world
        loop._data_fetcher.done = loop.epoch_loop.batch_progress.is_last_batch = self._over

    @property
    def num_used(self) -> int | None:
        """Batches that this iteration of the loader has given; None if the run was resumed after its last.

        What then waits still belongs to the epoch before, while the loader is at the next.
        """
        return None if self._lives_on_rest else self.num_pulled

    # -- rollouts --------------------------------------------------------------------------------------------------

    def _filled(self, source: Any) -> Any:
        """The step's batch, from its first rollouts; None to leave them as they are."""
        if self._is_filled:  # a second point
            return None
        self._is_filled = True
        rollout = RolloutBatch.of(source, self.fields)
        self._see(rollout)
        if self.refill is None:
            return None
        assert self.decide is not None
        refill, queue, ended = self.refill, self.queue, False
        while True:
            num_prompts = queue.world * len(self._given)
            batch, keep, num_kept = self.decide(rollout)
            if self.screening is not None:
                batch, keep = self._continued(rollout, keep, num_kept)
            refill.add(batch, keep, num_prompts, num_kept, self.step())
            if not refill.missing(queue.world) or refill.metrics["rounds"] == refill.config.max_rounds:
                break
            prompts = self._drawn()
            if prompts is None:
                ended = True
                break
            rollout = self._rolled_out(prompts)
            self._see(rollout)
        full, self.num_groups = refill.full_batch(batch, queue.rank, queue.world, ended=ended)
        self.account(self.num_groups)
        self._say_whether_over()
        return full

    def _see(self, rollout: RolloutBatch) -> None:
        for gate in self.gates:
            gate.see(rollout)
        for observe in self.observers:
            observe(rollout)

    @torch.no_grad()
    def _rolled_out(self, prompts: Any, **settings: Any) -> RolloutBatch:
        """Rollouts of prompts that come from the queue, made ready as the Trainer does with its batches."""
        trainer, module, refill = self._trainer, self._module, self.refill
        assert trainer is not None
        assert module is not None
        assert refill is not None
        prompts = trainer.precision_plugin.convert_input(prompts)
        prompts = module._on_before_batch_transfer(prompts, dataloader_idx=0)
        prompts = trainer.strategy.batch_to_device(prompts, dataloader_idx=0)
        rollout = getattr(module, refill.config.rollout)(prompts, **settings)
        return RolloutBatch.of(rollout, self.fields)

    def _continued(self, rollout: RolloutBatch, keep: Tensor, num_kept: int) -> tuple[RolloutBatch, Tensor]:
        assert self._module is not None
        assert self.screening is not None
        if not num_kept:
            return rollout, keep
        rest = setting(self._module, "num_generations") - self.screening

        def generate(prompts: Sequence[Any]) -> RolloutBatch:
            return self._rolled_out(self.queue.batch(prompts), num_generations=rest)

        ids = self.queue.columns(self._given, ["prompt_id"], self.fields)
        estimator = setting(self._module, "adv_estimator")
        return continued(rollout, keep, self._given, ids, generate, self.layout, estimator)

    # -- after a step ----------------------------------------------------------------------------------------------

    def end_step(self) -> None:
        """Let the gates remember what the step has shown."""
        for gate in self.gates:
            gate.end_step(self.step())

    def state_dict(self) -> dict[str, Any]:
        """What waits, and how far the epoch has come; the same on every rank."""
        state = {"queue": self.queue.state_dict(), "num_pulled": self.num_pulled, "over": self._over}
        return state | ({"refill": self.refill.state_dict()} if self.refill else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self.queue.load_state_dict(state["queue"])
        self.num_pulled, self._over = state["num_pulled"], state["over"]
        if self.refill is not None and "refill" in state:
            self.refill.load_state_dict(state["refill"])


class _Draws:
    """What the Trainer takes for its loader: each batch is drawn by the flow."""

    def __init__(self, loader: Any, flow: RolloutFlow) -> None:
        self._loader, self._flow, self._num_drawn = loader, flow, 0

    def __iter__(self) -> _Draws:
        self._flow.restart(iter(self._loader))
        self._num_drawn = 0
        return self

    def __next__(self) -> tuple[Any, int, int]:
        batch = self._flow.first_prompts()
        self._num_drawn += 1
        return batch, self._num_drawn - 1, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
