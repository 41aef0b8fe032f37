"""Pipeline: the one path from a rollout batch to a decision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_dataflex.core.actuator import Actuator, Mixer, Reweighter, Selector
from lightning_dataflex.core.config import DataFlexConfig, Drop, validate_compat
from lightning_dataflex.core.containers import ORIGINAL
from lightning_dataflex.core.global_batch import global_batch
from lightning_dataflex.core.registry import nearest, registered_name
from lightning_dataflex.core.rollout import FIELDS, RolloutBatch
from lightning_dataflex.core.scorer import Scorer
from lightning_dataflex.core.summary import summary
from lightning_dataflex.core.tidy import scored
from lightning_dataflex.core.warn import warn_once


@dataclass(frozen=True)
class Decision:
    """What becomes of this rank's samples.

    Attributes:
        scores: (N,), or (N, L) of tokens; NaN where there is nothing to score.
        keep: (N,) bool, or (N, L) of tokens; False for padding and for what has no score.
        weights: (N, L) float, 0 outside the mask and for what is not kept, without gradient.
        advantages: (N,) to train the kept samples with, or None for those of the batch.
        metrics: Scalars of the global batch; see `summary`.
        num_kept: Kept samples (or tokens) of the global batch.
        fell_back: The rule kept nothing anywhere, and every sample that has a score is kept in its place.
    """

    scores: Tensor
    keep: Tensor
    weights: Tensor
    advantages: Tensor | None
    metrics: dict[str, Tensor]
    num_kept: int
    fell_back: bool = False

    def updates(
        self, batch: RolloutBatch, *, drop: Drop = "mask", weights_key: str = "rollout_is_weights"
    ) -> dict[str, Any]:
        """The fields that put the decision into a batch, and the originals of those that it replaces.

        Weights that the batch has already are multiplied.
        """
        mask = batch.token_mask
        home = batch.get("response_mask")
        weights = self.weights.to(home.device) if isinstance(home, Tensor) else self.weights
        if batch.get(weights_key) is not None:
            there = torch.as_tensor(batch[weights_key]).detach().to(weights.device)
            there = there if there.dim() == 2 else there[:, None]
            weights = torch.where(weights != 0, weights * there, 0.0)
        updates: dict[str, Any] = {weights_key: weights}
        if drop == "mask":
            current = torch.as_tensor(batch["response_mask"])
            dropped = mask & ~(self.keep if self.keep.dim() == 2 else self.keep[:, None])
            updates["response_mask"] = torch.where(dropped.to(current.device), torch.zeros_like(current), current)
            updates[ORIGINAL + "response_mask"] = batch.original("response_mask")
        if self.advantages is not None:
            batch.require(["advantages"])
            current = torch.as_tensor(batch["advantages"])
            new = self.advantages.to(current)
            updates["advantages"] = new if current.dim() == 1 else torch.where(mask.to(new.device), new[:, None], 0.0)
            updates[ORIGINAL + "advantages"] = batch.original("advantages")
        return updates


class Pipeline:
    """A scorer and an actuator, from a rollout batch to a decision; it knows no Trainer.

    Args:
        scorer: What scores.
        actuator: What acts on the scores.
        fields: The batch's own field names, `{"rm_scores": "rewards"}`.
        adv_estimator: The advantage estimator, where it is known.

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
    ) -> None:
        validate_compat(scorer, actuator, adv_estimator)
        self.scorer, self.actuator = scorer, actuator
        self.fields = dict(fields or {})
        # Listed once each, in an order that every rank agrees on.
        self.requires = tuple(dict.fromkeys(("response_mask", *scorer.requires, *actuator.requires)))
        readable = dict.fromkeys((*self.requires, *FIELDS))
        for name in self.fields:
            if name not in readable:
                raise ValueError(f"fields maps {name!r}, which nothing reads. {nearest(name, readable)}")

    @classmethod
    def from_config(cls, block: DataFlexConfig | Mapping[str, Any], *, adv_estimator: str | None = None) -> Pipeline:
        """The pipeline of a `dataflex` block."""
        config = DataFlexConfig.of(block)
        scorer, actuator = config.components()
        return cls(scorer, actuator, fields=config.fields, adv_estimator=adv_estimator or config.adv_estimator)

    @torch.no_grad()
    def decide(self, batch: Any, step_id: int = 0, *, keep_all_if_empty: bool = False) -> Decision:
        """Decide on a rollout batch of any type; the batch itself stays as it is.

        Under a process group a collective: the decision is the one on the samples of all ranks.

        Args:
            batch: The samples of this rank.
            step_id: The training step, for scorers that ask.
            keep_all_if_empty: Where the rule keeps nothing, keep every sample that has a score.
        """
        local, world, rows = self._batches(batch)
        scores = self.scorer.score(world, step_id)
        keep, weights, advantages = self._action(scores, world)
        fell_back = keep_all_if_empty and not keep.any()
        if fell_back:
            keep, advantages = scored(world, scores), None
            weights = keep.float()
        decision = self._decision(local, world, rows, scores, keep, weights, advantages, fell_back)
        if decision.metrics["n_nan"] > 0:
            warn_once(
                self,
                f"{int(decision.metrics['n_nan'])} samples have no score: their reward, or another field that "
                f"{registered_name(self.scorer)} reads, is NaN. They are not kept; the others are scored without them.",
            )
        return decision

    @torch.no_grad()
    def keep_all(self, batch: Any) -> Decision:
        """The decision to leave a batch as it is: every sample with a valid token counts alike."""
        local, world, rows = self._batches(batch)
        keep = world.num_tokens > 0
        return self._decision(local, world, rows, torch.zeros_like(keep, dtype=torch.float32), keep, keep.float())

    def _batches(self, batch: Any) -> tuple[RolloutBatch, RolloutBatch, slice]:
        local = RolloutBatch.of(batch, self.fields)
        local.require(self.requires)
        world, rows = global_batch(local, self.scorer, self.actuator)
        if not world.num_samples:
            raise ValueError("The rollout batch has no samples. Give at least one.")
        return local, world, rows

    def _decision(
        self,
        local: RolloutBatch,
        world: RolloutBatch,
        rows: slice,
        scores: Tensor,
        keep: Tensor,
        weights: Tensor,
        advantages: Tensor | None = None,
        fell_back: bool = False,
    ) -> Decision:
        """This rank's part of a decision on the global batch."""
        mask = local.token_mask
        scores_here, keep_here, weights_here = (
            value[rows] if value.dim() == 1 else value[rows, : mask.shape[1]] for value in (scores, keep, weights)
        )
        spread_out = weights_here if weights_here.dim() == 2 else weights_here[:, None]
        return Decision(
            scores=scores_here,
            keep=keep_here,
            weights=torch.where(mask.to(weights.device), spread_out, 0.0).float(),
            advantages=None if advantages is None else advantages[rows],
            metrics=summary(world, scores, keep, weights),
            num_kept=int(keep.sum()),
            fell_back=fell_back,
        )

    def _action(self, scores: Tensor, batch: RolloutBatch) -> tuple[Tensor, Tensor, Tensor | None]:
        if isinstance(self.actuator, Selector):
            keep = self.actuator.keep(scores, batch)
            return keep, keep.float(), self.actuator.advantages(keep, batch)
        if isinstance(self.actuator, Reweighter):
            weights = self.actuator.act(scores, batch)
            return scored(batch, scores), weights, None
        assert isinstance(self.actuator, Mixer)
        raise ValueError("A Mixer decides on domains, not on the samples of a batch. Use a Selector or a Reweighter.")
