"""From rewards to advantages, and the loss of the value head that one of the estimators needs."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from examples.rlhf.batches import Batch
from lightning_dataflex.functional.advantages import gae, grpo_advantages, rloo_advantages
from lightning_dataflex.functional.loss import Aggregation, token_scale

Estimator = Literal["grpo", "rloo", "gae"]


def advantage_fields(batch: Batch, estimator: Estimator, num_generations: int, *, gamma: float, lam: float) -> Batch:
    """The batch's `advantages` (N, L), and for `gae` its `returns` (N, L)."""
    mask = batch["response_mask"]
    if estimator == "gae":
        advantages, returns = gae(batch["rm_scores"], batch["values"], mask, gamma=gamma, lam=lam)
        return {"advantages": advantages, "returns": returns}
    outcomes = batch["rm_scores"].sum(1)
    group = torch.arange(len(outcomes), device=outcomes.device) // num_generations
    advantages = (grpo_advantages if estimator == "grpo" else rloo_advantages)(outcomes, group)
    return {"advantages": advantages[:, None] * mask}


def value_loss(
    values: Tensor, batch: Batch, *, aggregation: Aggregation, denominator: Tensor, clip: float | None
) -> Tensor:
    """Half the squared error of the values, over the valid tokens, divided as the policy loss is.

    With `clip` a value that has moved further than that from its old one is no longer pulled: the larger of the
    two errors counts.

    Source: the PPO authors' implementation, as told in Huang et al. 2022, "The 37 implementation details of PPO".
    """
    mask = batch["response_mask"]
    error = (values - batch["returns"]).square()
    if clip is not None:
        clipped = batch["values"] + (values - batch["values"]).clamp(-clip, clip)
        error = torch.maximum(error, (clipped - batch["returns"]).square())
    return torch.where(mask.bool(), 0.5 * error * token_scale(mask, aggregation), 0.0).sum() / denominator
