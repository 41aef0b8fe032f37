"""Decisions of a training step: what becomes of them in the optimiser, in warnings and in the log."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_dataflex.asking import progress, setting
from lightning_dataflex.core.config import DataFlexConfig
from lightning_dataflex.core.decision import Decision
from lightning_dataflex.core.pipeline import Pipeline
from lightning_dataflex.core.registry import registered_name, settings_of
from lightning_dataflex.core.rollout import RolloutBatch
from lightning_dataflex.core.summary import merged
from lightning_dataflex.trace import DecisionTrace
from lightning_dataflex.window import EmptySteps, StepWindow, WholeGroups

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class Deciding:
    """Asks a pipeline, and keeps account of what it has said in this training step.

    Args:
        pipeline: What decides.
        config: The block that it was made from.
        name: What it is called in a warning.
    """

    def __init__(self, pipeline: Pipeline, config: DataFlexConfig, name: str) -> None:
        self.pipeline, self.config, self.name = pipeline, config, name
        self._empty_steps = EmptySteps(config.on_empty if config.enforce else "skip")
        self._windows: list[StepWindow] = []
        self._whole_groups: WholeGroups | None = None
        self._decisions: list[Decision] = []
        self._masks: list[Tensor | None] = []
        self._trainer: Trainer | None = None
        self.trace: DecisionTrace | None = None
        if config.trace is not None:
            self.trace = DecisionTrace(config.trace, config.trace_every, config.trace_rows, name)

    def attach(self, trainer: Trainer, pl_module: LightningModule, step: int) -> None:
        """Watch the optimisers, and that groups are whole; the first step is this."""
        self._trainer = trainer
        if self.trace is not None:
            self.trace.begin(pl_module, self.pipeline.process_group, step)
        if self.config.enforce:
            sharded = trainer.world_size > 1 and not isinstance(trainer.strategy.model, DistributedDataParallel)
            self._windows = [StepWindow(optimizer, sharded=sharded) for optimizer in trainer.optimizers]
        comparing = [part for part in (self.pipeline.scorer, self.pipeline.actuator) if part.needs_groups]
        if comparing:
            size = setting(pl_module, "num_generations")
            known = size if isinstance(size, int) else None
            self._whole_groups = WholeGroups(registered_name(comparing[0]), known, strict=self.config.enforce)

    def detach(self) -> None:
        """Leave the optimisers as they were found."""
        for window in self._windows:
            window.detach()
        self._windows, self._whole_groups, self._decisions, self._trainer = [], None, [], None
        self._masks = []
        if self.trace is not None:
            self.trace.end()

    def begin_batch(self, *, new_step: bool) -> None:
        """A training batch is about to be worked on, the first of an optimiser step or one more of it."""
        for window in self._windows:
            window.begin_batch()
        if self._whole_groups is not None:
            self._whole_groups.begin_batch(new_step=new_step)
        self._decisions, self._masks = [], []

    @property
    def has_stepped(self) -> bool:
        """Whether an optimiser has made a step in this training batch."""
        return any(window.has_stepped for window in self._windows)

    def decide(self, batch: RolloutBatch, step: int) -> Decision:
        """The decision on a rollout batch that the loss is to be computed on."""
        decision = self.asked(batch, step)
        self.account(decision.num_kept, step)
        if self._whole_groups is not None and self._several_batches and decision.group_ids is not None:
            self._whole_groups.add(decision.group_ids)
        if self._whole_groups is not None and len(self._decisions) > 1:
            groups = [each.group_ids for each in self._decisions]
            self._whole_groups.compare([ids for ids in groups if ids is not None])
        return decision

    @property
    def _several_batches(self) -> bool:
        """Whether an optimiser step has them."""
        return self._trainer is None or self._trainer.accumulate_grad_batches > 1

    def asked(self, batch: RolloutBatch, step: int) -> Decision:
        """The decision on a rollout batch; what it means for the step is still to be accounted for."""
        asks = step >= self.config.warmup_step
        if not asks:
            decision = self.pipeline.keep_all(batch)
        else:
            keep_all = self.config.on_empty == "keep"
            share = None if self._trainer is None else progress(self._trainer, step)
            decision = self.pipeline.decide(batch, step, progress=share, keep_all_if_empty=keep_all)
        self._decisions.append(decision)
        if self.trace is not None:
            self.trace.add(batch, decision, step, scored=asks)
        self._masks.append(batch.token_mask if decision.scores.dim() == 2 else None)
        return decision

    def account(self, num_kept: int, step: int) -> None:
        """The loss gets so many kept samples, or groups, of all ranks, after the decisions of the step."""
        last = self._decisions[-1]
        if step >= self.config.warmup_step and (last.fell_back or not num_kept):
            settings = settings_of(self.pipeline.actuator)
            self._empty_steps.report(step, self.name, last, settings)
        dropped = any(bool(decision.metrics["kept_frac"] < 1) for decision in self._decisions)
        for window in self._windows:
            window.add(any_kept=num_kept > 0, any_dropped=dropped)

    def check_loss(self, loss: Tensor) -> None:
        """Raise a ValueError if the loss is not finite on a batch without a kept sample."""
        nothing_kept_here = self._decisions and not any(bool(decision.weights.any()) for decision in self._decisions)
        if self.config.enforce and nothing_kept_here and not loss.isfinite():
            raise ValueError(
                f"The loss is {loss.item()} on a batch of which no sample is kept. "
                "Divide by the number of valid tokens clamped to at least 1: mask.sum().clamp(min=1)."
            )

    @property
    def metrics(self) -> dict[str, Any]:
        """The numbers of the step's decisions together."""
        if len(self._decisions) == 1:
            # It has summed them up already.
            return dict(self._decisions[0].metrics)
        return dict(merged([decision.summary for decision in self._decisions]))

    @property
    def num_samples(self) -> int:
        """Samples of this rank that were decided on in this step."""
        return sum(len(decision.keep) for decision in self._decisions)

    @property
    def counts(self) -> dict[str, Tensor]:
        """Samples of the global batch in this step that have a valid token, and those of them that are kept."""
        numbers = [decision.summary.numbers for decision in self._decisions]
        names = {"num_samples": "num_tokens", "num_kept": "num_kept"} if numbers else {}
        return {name: torch.stack([(each[key] > 0).sum() for each in numbers]).sum() for name, key in names.items()}

    @property
    def scores(self) -> Tensor:
        """This rank's scores in this step, those of tokens in a row; NaN of samples that have none."""
        parts = [each.scores if mask is None else each.scores[mask] for each, mask in zip(self._decisions, self._masks)]
        return torch.cat([part.flatten() for part in parts])

    @property
    def weights(self) -> Tensor:
        """The mean weight of each sample of the global batch in this step that has a valid token."""
        numbers = [decision.summary.numbers for decision in self._decisions]
        return torch.cat([each["weight_mean"][each["num_tokens"] > 0] for each in numbers])
