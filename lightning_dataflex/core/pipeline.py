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
from lightning_dataflex.core.registry import registered_name
from lightning_dataflex.core.rollout import RolloutBatch
from lightning_dataflex.core.scorer import Scorer
from lightning_dataflex.core.summary import summary
from lightning_dataflex.core.warn import warn_once
from lightning_dataflex.core.world import global_batch


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
    """

    scores: Tensor
    keep: Tensor
    weights: Tensor
    advantages: Tensor | None
    metrics: dict[str, Tensor]
    num_kept: int

    @classmethod
    def neutral(cls, batch: RolloutBatch, scores: Tensor | None = None) -> Decision:
        """Every sample that has a score counts alike; without scores, every sample with a valid token."""
        mask = batch.token_mask
        rows = mask.any(-1)
        if scores is not None:
            rows = rows & ~_missing(scores)
        scores = torch.zeros(len(rows), device=rows.device) if scores is None else scores
        metrics = summary(batch, scores, rows, rows.float())
        return cls(scores, rows, _per_token(rows.float(), mask), None, metrics, int(rows.sum()))

    def updates(
        self, batch: RolloutBatch, *, drop: Drop = "mask", weights_key: str = "rollout_is_weights"
    ) -> dict[str, Any]:
        """The fields that put the decision into a batch, and the originals of those that it replaces.

        Weights that the batch has already are multiplied.
        """
        mask, weights = batch.token_mask, self.weights
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
        if self.advantages is not None and batch.get("advantages") is not None:
            current = torch.as_tensor(batch["advantages"])
            new = self.advantages.to(current)
            updates["advantages"] = new if current.dim() == 1 else torch.where(mask, new[:, None], 0.0).to(current)
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

    @classmethod
    def from_config(cls, block: DataFlexConfig | Mapping[str, Any], *, adv_estimator: str | None = None) -> Pipeline:
        """The pipeline of a `dataflex` block."""
        config = DataFlexConfig.of(block)
        scorer, actuator = config.components()
        return cls(scorer, actuator, fields=config.fields, adv_estimator=adv_estimator or config.adv_estimator)

    @torch.no_grad()
    def decide(self, batch: Any, step_id: int = 0) -> Decision:
        """Decide on a rollout batch of any type; the batch itself stays as it is.

        Under a process group a collective: the decision is the one on the samples of all ranks.
        """
        local = RolloutBatch.of(batch, self.fields)
        local.require(self.requires)
        world, rows = global_batch(local, self.scorer, self.actuator)
        if not world.num_samples:
            raise ValueError("The rollout batch has no samples. Give at least one.")
        scores = self.scorer.score(world, step_id)
        keep, weights, advantages = self._action(scores, world)
        metrics = summary(world, scores, keep, weights)
        if metrics["n_nan"] > 0:
            warn_once(
                self,
                f"{int(metrics['n_nan'])} samples have no score: their reward, or another field that "
                f"{registered_name(self.scorer)} reads, is NaN. They are not kept; the others are scored without them.",
            )
        mask = local.token_mask
        width = mask.shape[1]
        mine = [value[rows] if value.dim() == 1 else value[rows, :width] for value in (scores, keep, weights)]
        return Decision(
            scores=mine[0],
            keep=mine[1],
            weights=_per_token(mine[2], mask),
            advantages=None if advantages is None else advantages[rows],
            metrics=metrics,
            num_kept=int(keep.sum()),
        )

    def _action(self, scores: Tensor, batch: RolloutBatch) -> tuple[Tensor, Tensor, Tensor | None]:
        if isinstance(self.actuator, Selector):
            keep = self.actuator.keep(scores, batch)
            return keep, keep.float(), self.actuator.advantages(keep, batch)
        if isinstance(self.actuator, Reweighter):
            weights = self.actuator.act(scores, batch)
            return ~_missing(scores) & (batch.num_tokens > 0).to(scores.device), weights, None
        assert isinstance(self.actuator, Mixer)
        raise ValueError("A Mixer decides on domains, not on the samples of a batch. Use a Selector or a Reweighter.")


def _missing(scores: Tensor) -> Tensor:
    return scores.isnan() if scores.dim() == 1 else scores.isnan().any(-1)


def _per_token(weights: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask.to(weights.device), weights if weights.dim() == 2 else weights[:, None], 0.0)
