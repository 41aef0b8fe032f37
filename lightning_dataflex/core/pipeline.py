"""Pipeline: the one path from a rollout batch to a decision."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_dataflex.core.action import Action, action_of, with_unit_mean
from lightning_dataflex.core.actuator import Actuator, Reweighter
from lightning_dataflex.core.compat import validate_compat
from lightning_dataflex.core.config import DataFlexConfig, Scope
from lightning_dataflex.core.decision import Decision
from lightning_dataflex.core.fields import FIELDS
from lightning_dataflex.core.global_batch import LOWEST, global_batch, in_brief
from lightning_dataflex.core.home import at_home, sent
from lightning_dataflex.core.ids import ToldApart
from lightning_dataflex.core.memory import memory_of, recall
from lightning_dataflex.core.registry import nearest, registered_name
from lightning_dataflex.core.rollout import RolloutBatch
from lightning_dataflex.core.rows import measure_of
from lightning_dataflex.core.scorer import Scorer
from lightning_dataflex.core.summary import RowNumbers, Summary, counting_alike, row_numbers
from lightning_dataflex.core.warn import warn_once
from lightning_dataflex.functional.blocks import blank_padding, by_rows
from lightning_dataflex.functional.weighting import least_and_largest
from lightning_dataflex.sync import Group, exchanged, num_ranks

RANGE = "range of the weights"
"""A name that is no field's."""


class _WholeAdvantages:
    """Reads the advantages of all tokens: those of weights that are scaled by them."""

    requires = ("advantages",)
    remembers = False

    def columns(self, batch: RolloutBatch) -> None:
        return None


class Pipeline:
    """A scorer and an actuator, from a rollout batch to a decision; it knows no Trainer.

    Args:
        scorer: What scores.
        actuator: What acts on the scores.
        fields: The batch's own field names, `{"rm_scores": "rewards"}`.
        adv_estimator: The advantage estimator, where it is known.
        scope: `global` decides on the samples of all ranks together, `rank` on each rank's for themselves.
        process_group: The ranks that hold different samples. Default: all.

    Example:
        >>> pipeline = Pipeline.from_config({"mechanism": "select", "scorer": {"name": "group_solve_rate"},
        ...     "actuator": {"name": "threshold_band", "params": {"low": 0.2, "high": 0.8}}}, adv_estimator="grpo")
        >>> batch = {"rm_scores": torch.tensor([1.0, 0.0, 1.0, 1.0]), "uid": ["a", "a", "b", "b"],
        ...          "response_mask": torch.ones(4, 2)}
        >>> pipeline.decide(batch, step_id=0).keep
        tensor([ True,  True, False, False])
    """

    def __init__(
        self,
        scorer: Scorer,
        actuator: Actuator,
        *,
        fields: Mapping[str, str] | None = None,
        adv_estimator: str | None = None,
        scope: Scope = "global",
        process_group: Group = None,
    ) -> None:
        validate_compat(scorer, actuator, adv_estimator)
        for part in (scorer, actuator):
            if scope == "rank" and part.remembers:
                raise ValueError(
                    f"scope is 'rank', but {registered_name(part)} remembers earlier groups, which must be the same on "
                    "every rank. Use scope: global."
                )
        self.scorer, self.actuator = scorer, actuator
        self.scope, self.process_group = scope, process_group
        self.fields = dict(fields or {})
        # Listed once each, in an order that every rank agrees on.
        self._parts = (scorer, actuator, *((_WholeAdvantages(),) if self._normalize == "abs_advantage" else ()))
        self.requires = tuple(
            dict.fromkeys(("response_mask", *(name for part in self._parts for name in part.requires)))
        )
        readable = dict.fromkeys((*self.requires, *FIELDS))
        for name in self.fields:
            if name not in readable:
                raise ValueError(f"fields maps {name!r}, which nothing reads. {nearest(name, readable)}")

    @classmethod
    def from_config(cls, block: DataFlexConfig | Mapping[str, Any], *, adv_estimator: str | None = None) -> Pipeline:
        """The pipeline of a `dataflex` block."""
        config = DataFlexConfig.of(block)
        scorer, actuator = config.components()
        estimator = adv_estimator or config.adv_estimator
        return cls(scorer, actuator, fields=config.fields, adv_estimator=estimator, scope=config.scope)

    @property
    def row_wise(self) -> bool:
        """Whether each rank acts on its own samples, and needs of the others' nothing but numbers of each row."""
        return self.scope == "rank" or (self.scorer.row_wise and self.actuator.row_wise)

    def state_dict(self) -> dict[str, Any]:
        """What the scorer and the actuator remember; the same on every rank."""
        return {"scorer": memory_of(self.scorer), "actuator": memory_of(self.actuator)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave; what other components remember is dropped with a warning."""
        recall(self.scorer, state["scorer"])
        recall(self.actuator, state["actuator"])

    @torch.no_grad()
    def decide(
        self, batch: Any, step_id: int = 0, *, progress: float | None = None, keep_all_if_empty: bool = False
    ) -> Decision:
        """Decide on a rollout batch of any type; the batch itself stays as it is.

        Under a process group a collective: the decision is the one on the samples of all ranks.

        Args:
            batch: The samples of this rank.
            step_id: The training step, for rules that ask.
            progress: Share of the run that is over, for rules that ask.
            keep_all_if_empty: Where the rule keeps nothing, keep every sample that has a score.

        Raises:
            ValueError: The batch lacks a field or has one of a wrong shape, or the rule gave what no rule can.
            RuntimeError: The same happened on another rank.
        """
        # Read, and for a rule on rows also decided on, inside of the exchange, which tells the other ranks of an error.
        local = functools.cache(lambda: self._read(batch))
        if self.row_wise or self._is_one_rank:
            acted = functools.cache(lambda: self._acted(self._brief(local()), step_id, progress))
            numbers, rows = self._exchanged(lambda: acted()[1])
            action, _ = acted()
        else:
            world, rows, _ = global_batch(local, self._parts, self.process_group, self._what)
            _check_not_empty(world.num_samples)
            everywhere, numbers = self._acted(world, step_id, progress)
            action = everywhere.of(rows, local().token_mask.shape[1])
        fell_back = keep_all_if_empty and not numbers["num_kept"].any()
        if fell_back:
            keep = numbers["scored"][rows]
            action, numbers = Action(action.scores, keep, keep.float(), keep), counting_alike(numbers)
        elif isinstance(self.actuator, Reweighter) and not self._scales:
            if numbers["scored"].any() and not numbers["weight_mean"].any():
                warn_once(
                    self, f"{registered_name(self.actuator)} gave every sample a weight of 0, and nothing is learned."
                )
        elif isinstance(self.actuator, Reweighter):
            action, numbers = with_unit_mean(self.actuator, action, numbers, rows)
        decision = self._decision(local(), action, numbers, rows, fell_back)
        num_nan = 0 if numbers["scored"].all() else int(((numbers["num_tokens"] > 0) & ~numbers["scored"]).sum())
        if num_nan:
            warn_once(
                self,
                f"{num_nan} samples have no score: their reward, or another field that "
                f"{registered_name(self.scorer)} reads, is NaN. They are not kept; the others are scored without them.",
            )
        return decision

    @torch.no_grad()
    def keep_all(self, batch: Any) -> Decision:
        """The decision to leave a batch as it is: every sample with a valid token counts alike."""
        local = functools.cache(lambda: self._read(batch))

        @functools.cache
        def action() -> Action:
            keep = local().has_tokens
            return Action(torch.zeros_like(keep, dtype=torch.float32), keep, keep.float(), keep)

        numbers, rows = self._exchanged(lambda: self._numbers(local(), action()))
        return self._decision(local(), action(), numbers, rows)

    def _read(self, batch: Any) -> RolloutBatch:
        local = RolloutBatch.of(batch, self.fields)
        local.require(self.requires)
        return local

    def _brief(self, local: RolloutBatch) -> RolloutBatch:
        """What the rule is given of this rank's batch."""
        if self._is_one_rank:
            _check_not_empty(local.num_samples)
        if not (self.scorer.by_mask and self.actuator.by_mask):
            return in_brief(local, self._parts, local_ids=self._is_one_rank)
        # Reads the mask without a wait; whether it is one is told when its lowest comes with the numbers.
        local.lowest_in_mask()
        return local

    def _acted(self, batch: RolloutBatch, step_id: int, progress: float | None) -> tuple[Action, RowNumbers]:
        """An action that has passed all checks, and its numbers in main memory.

        They come from an accelerator in one copy, or in two where infinite weights are to be made finite.
        """
        action = action_of(self.scorer, self.actuator, batch, step_id, scale_later=self._scales, progress=progress)
        numbers, lowest = self._numbers(batch, action), batch.lowest_in_mask()
        checks = {} if lowest is None else {LOWEST: lowest}
        if isinstance(self.actuator, Reweighter):
            checks[RANGE] = least_and_largest(action.weights)
        numbers = at_home(numbers | checks)
        batch.check_mask(numbers.pop(LOWEST, None))
        if isinstance(self.actuator, Reweighter):
            weights = self.actuator.checked(action.weights, *numbers.pop(RANGE).tolist())
            if weights is not action.weights:
                action = replace(action, weights=weights)
                numbers = at_home(self._numbers(batch, action))
        return action, numbers

    def _exchanged(self, own: Callable[[], RowNumbers]) -> tuple[RowNumbers, slice]:
        """The numbers of all ranks' rows, and where this rank's are. A collective."""

        def columns() -> tuple[RowNumbers, int]:
            numbers = own()
            return numbers, len(numbers["num_tokens"])

        numbers, rows = exchanged(columns, self.process_group, self._what)
        _check_not_empty(len(numbers["num_tokens"]))
        return at_home(numbers), rows

    def _numbers(self, batch: RolloutBatch, action: Action) -> RowNumbers:
        # What counts each sample once follows from the other numbers.
        by_advantage = self._scales and self._normalize == "abs_advantage"
        measure = measure_of(batch, action.weights, self._normalize) if by_advantage else None
        return row_numbers(batch, action.keep, action.weights, action.scored, measure, local_ids=self._is_one_rank)

    @property
    def _is_one_rank(self) -> bool:
        return num_ranks(self.process_group) == 1

    @property
    def _what(self) -> str:
        return f"samples for {registered_name(self.scorer)} and {registered_name(self.actuator)}"

    @property
    def _normalize(self) -> str:
        return self.actuator.normalize if isinstance(self.actuator, Reweighter) else "none"

    @property
    def _scales(self) -> bool:
        return self.scope == "global" and self._normalize != "none"

    def _decision(
        self, local: RolloutBatch, action: Action, numbers: RowNumbers, rows: slice, fell_back: bool = False
    ) -> Decision:
        mask = local.token_mask
        groups = None
        if "uid" in numbers:
            groups = local.told_apart if self._is_one_rank else ToldApart(numbers["uid"], None)
        weights = sent(action.weights, mask.device)
        if weights.dim() == 1:
            weights = blank_padding(weights[:, None].float(), mask)
        elif weights.dtype != torch.float32:
            # Those of tokens are 0 in padding already.
            weights = by_rows(Tensor.float, weights)
        return Decision(
            scores=action.scores,
            keep=action.keep,
            weights=weights,
            advantages=action.advantages,
            summary=Summary(numbers, of_tokens=action.keep.dim() == 2),
            rows=rows,
            num_kept=int(numbers["num_kept"].sum()),
            told_apart=groups,
            fell_back=fell_back,
        )


def _check_not_empty(num_samples: int) -> None:
    if not num_samples:
        raise ValueError("The rollout batch has no samples. Give at least one.")
