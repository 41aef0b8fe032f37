"""RolloutFlow: which prompts a training step rolls out, and how often, until the loss has its batch."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_dataflex.asking import setting
from lightning_dataflex.calls import check_passed
from lightning_dataflex.core.fields import check_batch
from lightning_dataflex.core.rollout import RolloutBatch, by_prompt
from lightning_dataflex.core.samples import Layout
from lightning_dataflex.core.summary import Summary
from lightning_dataflex.core.warn import warn_once
from lightning_dataflex.functional.advantages import group_advantages
from lightning_dataflex.gate import Gate, check_given
from lightning_dataflex.mount import points_of, replaced_attribute
from lightning_dataflex.refill import Refill
from lightning_dataflex.screening import continued
from lightning_dataflex.source import PromptSource
from lightning_dataflex.sync import Group, exchanged

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

RoundDecision = Callable[[RolloutBatch], "tuple[RolloutBatch, Tensor, Summary]"]
"""A round's batch with the decision in it, which samples are kept, (N,), and what became of all ranks' samples."""


class RolloutFlow:
    """Stands between the data loader and the loss: prompts pass gates, rollouts are repeated until enough is kept.

    The Trainer's next batch is what a `PromptSource` draws from the loader's. At the module's `DataFlexPoint` the
    rollouts arrive; with a `Refill` the module's rollout method is called with further prompts, on every rank as often.

    Args:
        gates: What decides before a rollout, in order.
        refill: What collects kept groups; None to train on each rollout as it comes.
        decide: With a refill, what keeps groups.
        account: With a refill, is told how many groups of all ranks the loss gets.
        observers: What else is to see every rollout.
        screening: Responses to judge a prompt by before the rest is generated; None to generate all at once.
        estimator: With screening, how the advantages of a whole group are computed. Default: as the module says.
        layout: What the fields of batches are.
        fields: The names that batches have for this project's fields.
        weights_key: The field of the weights.
        step: The number of the current step.
    """

    def __init__(
        self,
        *,
        gates: Sequence[Gate],
        refill: Refill | None,
        decide: RoundDecision | None,
        account: Callable[[int], None],
        observers: Sequence[Callable[[RolloutBatch], None]],
        screening: int | None,
        estimator: str | None,
        layout: Layout,
        fields: Mapping[str, str],
        weights_key: str,
        step: Callable[[], int],
    ) -> None:
        self.refill, self.decide, self.account, self.observers = refill, decide, account, list(observers)
        self.screening, self.estimator, self._estimator = screening, estimator, estimator
        self.layout, self.fields, self.weights_key, self.step = layout, dict(fields), weights_key, step
        self.source = PromptSource(
            gates, layout, step=step, first_size=self._first_size, next_size=self._next_size, enough=self._enough
        )
        self._full: Any = None
        self._seen: list[Any] = []
        self._restore: list[Callable[[], None]] = []
        self._trainer: Trainer | None = None
        self._module: LightningModule | None = None

    # -- coming and going ------------------------------------------------------------------------------------------

    def attach(self, trainer: Trainer, module: LightningModule, process_group: Group) -> None:
        """Be there when the module's point, and its rollout method, are called."""
        self._trainer, self._module = trainer, module
        self.source.attach(trainer, process_group)
        if self.refill is not None:
            self.refill.process_group = process_group

        @torch.compiler.disable(recursive=True)
        def hook(point: Any, _args: Any, batch: Any) -> Any:
            if not trainer.training:
                return None
            check_passed(batch, module, point)
            return self._filled(batch)

        # Before the hooks of the callbacks, whatever their order: they act on the batch that comes out of it.
        self._restore = [point.register_forward_hook(hook, prepend=True).remove for point in points_of(module)]
        if self.refill is not None:
            rollout = getattr(module, self.refill.config.rollout)
            if self.screening is not None:
                self._estimator = self.estimator or setting(module, "adv_estimator")
                # Said now, and not after the first rollout.
                group_advantages(torch.zeros(2), torch.zeros(2).long(), self._estimator)
                self._screen(module, rollout, self.screening)

    def _screen(self, module: LightningModule, rollout: Callable[..., Any], num: int) -> None:
        assert self.refill is not None
        total = setting(module, "num_generations")
        if not isinstance(total, int) or total <= num:
            raise ValueError(
                f"num_generations of {type(module).__name__} is {total!r}, and {num} responses are to screen a prompt. "
                "Set it to the size of a whole group, larger than that."
            )

        parameters = inspect.signature(rollout).parameters
        if "num_generations" not in parameters and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            raise ValueError(
                f"{self.refill.config.rollout} of {type(module).__name__} has no parameter num_generations. Screening "
                "asks it for a part of a group: add num_generations=None."
            )

        @functools.wraps(rollout)
        def screened(*args: Any, **kwargs: Any) -> Any:
            assert self._trainer is not None
            return rollout(*args, **{"num_generations": num, **kwargs} if self._trainer.training else kwargs)

        self._restore.append(replaced_attribute(module, self.refill.config.rollout, screened))

    def detach(self) -> None:
        """Leave the module as it was found."""
        while self._restore:
            self._restore.pop()()
        self._trainer = self._module = None
        self.source.detach()

    # -- rollouts --------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """A step is about to be trained on."""
        self._full, self._seen = None, []
        for gate in self.source.gates:
            gate.begin_step()
        if self.refill is not None:
            self.refill.begin_step(self.step())

    def _filled(self, source: Any) -> Any:
        """The step's batch, from its first rollouts."""
        if self.refill is None:
            # What passes through a second point was seen at the first.
            if all(source is not each for each in self._seen):
                self._seen.append(source)
                self._see(RolloutBatch.of(source, self.fields))
            return source
        if self._full is None:
            rollout = RolloutBatch.of(source, self.fields)
            self._see(rollout)
            self._full = self._refilled(self.refill, rollout)
        # Also if the step is called again, as some optimisers do: it has one batch.
        return self._full

    def _refilled(self, refill: Refill, rollout: RolloutBatch) -> Any:
        assert self.decide is not None
        source, queue, ended = self.source, self.source.queue, False
        while True:
            num_own = len(source.given)
            batch, keep, summary = self.decide(rollout)
            num_prompts, size = queue.world * num_own, summary.group_size(self._group_size)
            num_kept = summary.num_groups_kept(size)
            if self.screening is not None:
                batch, keep, size = self._continued(rollout, keep, num_kept)
            refill.add(batch, keep, self.step(), size=size, num_prompts=num_prompts, num_kept=num_kept)
            if not refill.missing(queue.world) or refill.metrics["rounds"] == refill.config.max_rounds:
                break
            prompts = source.next_prompts()
            if prompts is None:
                ended = True
                break
            rollout = self._rolled_out(prompts)
            self._see(rollout)
        full, num_groups = refill.full_batch(batch, queue.rank, queue.world, ended=ended)
        self.account(num_groups)
        whole = RolloutBatch(full, self.fields)
        return full if self.weights_key in whole else whole.replaced({self.weights_key: whole.token_mask.float()})

    @property
    def _group_size(self) -> int | None:
        size = setting(self._module, "num_generations") if self.screening is None else self.screening  # type: ignore[arg-type]
        return size if isinstance(size, int) else None

    def _see(self, rollout: RolloutBatch) -> None:
        for gate in self.source.gates:
            gate.see(rollout, self.source.given, self.source.queue)
        for observe in self.observers:
            observe(rollout)

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
        check_batch(rollout, f"{refill.config.rollout} of {type(module).__name__} has returned it")
        return RolloutBatch.of(rollout, self.fields)

    def _continued(self, rollout: RolloutBatch, keep: Tensor, num_kept: int) -> tuple[RolloutBatch, Tensor, int]:
        """The whole groups of promising prompts, which of their samples are kept, and the size of a group."""
        assert self._module is not None
        assert self.screening is not None
        total = setting(self._module, "num_generations")
        if not num_kept:
            return rollout, keep, total
        rest = total - self.screening

        def generate(prompts: Sequence[Any]) -> RolloutBatch:
            return self._rolled_out(self.source.queue.batch(prompts), num_generations=rest)

        given = self.source.given
        ids = self.source.queue.columns(given, ["prompt_id"], self.fields)

        def checked() -> tuple[dict[str, Tensor], int]:
            check_given(by_prompt(rollout), ids)
            return {}, 0

        # What one rank has to say of it, every rank hears: none is left waiting for the others.
        exchanged(checked, self.source.queue.process_group, "whether each has its prompts screened")
        batch, keep = continued(rollout, keep, given, ids, generate, self.screening, rest, self.layout, self._estimator)
        return batch, keep, total

    # -- after a step ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What waits, and how far the epoch has come; the same on every rank."""
        return {"source": self.source.state_dict()} | ({"refill": self.refill.state_dict()} if self.refill else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self.source.load_state_dict(state["source"])
        if self.refill is not None and "refill" in state:
            self.refill.load_state_dict(state["refill"])
        elif state.get("refill", {}).get("stock"):
            warn_once(self, "The checkpoint has groups in stock for a refill, and here is none: they are dropped.")

    def _first_size(self, batch_size: int, num_before: int) -> int:
        world = self.source.queue.world
        return batch_size * world if self.refill is None else self.refill.first_size(batch_size, world, num_before)

    def _next_size(self, batch_size: int) -> int:
        assert self.refill is not None
        return self.refill.next_size(batch_size, self.source.queue.world)

    def _enough(self, num_begun: int) -> int:
        queue = self.source.queue
        return 0 if self.refill is None else self.refill.enough(num_begun, queue.batch_size, queue.world)
