"""Scorers by rewards and advantages."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from lightning_dataflex.core.checks import check_range
from lightning_dataflex.core.global_batch import rewards_and_groups
from lightning_dataflex.core.registry import register_scorer
from lightning_dataflex.core.rollout import RolloutBatch
from lightning_dataflex.core.scorer import Scorer
from lightning_dataflex.functional import scoring


@register_scorer("reward_difficulty")
class RewardDifficulty(Scorer):
    """Outcome reward of each response: a high one was easy, a low one hard.

    A band on it is not dynamic sampling as in DAPO: a group of equal rewards inside the band stays.

    Example:
        >>> import torch
        >>> RewardDifficulty().score({"rm_scores": torch.tensor([1.0, 0.0])}, step_id=0)
        tensor([1., 0.])
    """

    requires = ("rm_scores", "response_mask")
    signal = "reward"
    timing = "post_reward"
    granularity = "response"
    row_wise = True

    def score(self, batch: Any, step_id: int = 0, **ctx: Any) -> Tensor:
        return batch.outcomes

    def columns(self, batch: RolloutBatch) -> dict[str, Tensor]:
        return {"rm_scores": batch.outcomes}


@register_scorer("advantage_magnitude")
class AdvantageMagnitude(Scorer):
    """|advantage| of each response: how much there is to learn from it.

    Args:
        agg: `mean`, `sum` or `max` over the valid tokens.

    Example:
        >>> import torch
        >>> AdvantageMagnitude().score({"advantages": torch.tensor([-2.0, 0.5])}, step_id=0)
        tensor([2.0000, 0.5000])
    """

    requires = ("advantages", "response_mask")
    signal = "advantage"
    timing = "post_advantage"
    granularity = "response"
    row_wise = True

    def __init__(self, agg: scoring.TokenReduction = "mean", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        scoring.check_reduction(agg)
        self.agg = agg

    def score(self, batch: Any, step_id: int = 0, **ctx: Any) -> Tensor:
        return scoring.advantage_magnitude(batch.tensor("advantages"), batch.response_mask, reduction=self.agg)

    def columns(self, batch: RolloutBatch) -> dict[str, Tensor]:
        # |A| of a sample is its own magnitude, whatever the reduction.
        mask, advantages = batch.response_mask, batch.tensor("advantages")
        return {"advantages": scoring.advantage_magnitude(advantages, mask, reduction=self.agg)}


@register_scorer("group_solve_rate")
class GroupSolveRate(Scorer):
    """Share of a prompt's responses that are solved, as the score of each of them.

    A response whose reward is NaN counts in no rate. A group of one has its own outcome as its rate.

    Args:
        success_threshold: A response is solved when its outcome reward is above this.

    Example:
        >>> import torch
        >>> batch = {"rm_scores": torch.tensor([1.0, 0.0, torch.nan, 1.0]), "uid": ["a", "a", "a", "b"]}
        >>> GroupSolveRate().score(batch, step_id=0)
        tensor([0.5000, 0.5000,    nan, 1.0000])
    """

    requires = ("rm_scores", "response_mask", "uid")
    signal = "reward"
    timing = "post_reward"
    granularity = "prompt"
    needs_groups = True
    paper = "DAPO, arXiv:2503.14476"

    def __init__(self, success_threshold: float = 0.5, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_range("success_threshold", success_threshold, -math.inf, math.inf)
        self.success_threshold = success_threshold

    def score(self, batch: Any, step_id: int = 0, **ctx: Any) -> Tensor:
        group, num_groups = batch.groups
        return scoring.solve_rate(batch.outcomes, group, num_groups, success_threshold=self.success_threshold)

    def columns(self, batch: RolloutBatch) -> dict[str, Tensor]:
        return rewards_and_groups(batch)


@register_scorer("group_reward_variance")
class GroupRewardVariance(Scorer):
    """Variance of a prompt's rewards, as a share of the largest that rewards of 0 and 1 can have.

    That is 4 p (1 - p) of a solve rate p.

    Example:
        >>> import torch
        >>> batch = {"rm_scores": torch.tensor([1.0, 0.0, 1.0, 1.0]), "uid": ["a", "a", "b", "b"]}
        >>> GroupRewardVariance().score(batch, step_id=0)
        tensor([1., 1., 0., 0.])
    """

    requires = ("rm_scores", "response_mask", "uid")
    signal = "variance"
    timing = "post_reward"
    granularity = "prompt"
    needs_groups = True
    paper = "VCRL, arXiv:2509.19803"

    def score(self, batch: Any, step_id: int = 0, **ctx: Any) -> Tensor:
        group, num_groups = batch.groups
        return scoring.reward_variance(batch.outcomes, group, num_groups)

    def columns(self, batch: RolloutBatch) -> dict[str, Tensor]:
        return rewards_and_groups(batch)
