"""Scorers by rewards."""

from __future__ import annotations

import math
from typing import Any, Literal

from torch import Tensor

from lightning_dataflex.core.checks import check_range, is_whole
from lightning_dataflex.core.global_batch import rewards_and_groups
from lightning_dataflex.core.registry import register_scorer
from lightning_dataflex.core.rollout import RolloutBatch
from lightning_dataflex.core.scorer import Scorer
from lightning_dataflex.functional import scoring
from lightning_dataflex.functional.choices import shown


@register_scorer("outcome")
class Outcome(Scorer):
    """Outcome reward of each response, the sum over its valid tokens.

    Args:
        success_threshold: 1 for a reward above this and 0 for any other. Default: the reward itself.

    Example:
        >>> import torch
        >>> Outcome(success_threshold=0.5).score({"rm_scores": torch.tensor([0.9, 0.1])}, step_id=0)
        tensor([1., 0.])
    """

    requires = ("rm_scores", "response_mask")
    signal = "reward"
    timing = "post_reward"
    granularity = "response"
    row_wise = True

    def __init__(self, success_threshold: float | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if success_threshold is not None:
            check_range("success_threshold", success_threshold, -math.inf, math.inf)
        self.success_threshold = success_threshold

    def score(self, batch: Any, step_id: int = 0, **ctx: Any) -> Tensor:
        if self.success_threshold is None:
            return batch.outcomes
        return scoring.is_solved(batch.outcomes, self.success_threshold).float()

    def columns(self, batch: RolloutBatch) -> dict[str, Tensor]:
        return {"rm_scores": batch.outcomes}


@register_scorer("reward_difficulty")
class RewardDifficulty(Outcome):
    """Outcome reward of each response, as DataFlex-RL calls it: a high one was easy, a low one hard.

    A band on it is not dynamic sampling as in DAPO: a group of equal rewards inside the band stays.

    Args:
        success_threshold: As that of `outcome`.

    Example:
        >>> import torch
        >>> RewardDifficulty().score({"rm_scores": torch.tensor([1.0, 0.0])}, step_id=0)
        tensor([1., 0.])
    """


class _OfGroups(Scorer):
    """Compares the rewards of a group."""

    requires = ("rm_scores", "response_mask", "uid")
    timing = "post_reward"
    granularity = "prompt"
    needs_groups = True

    def columns(self, batch: RolloutBatch) -> dict[str, Tensor]:
        return rewards_and_groups(batch)


@register_scorer("group_solve_rate")
class GroupSolveRate(_OfGroups):
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

    signal = "reward"
    paper = "DAPO, arXiv:2503.14476"
    columns = _OfGroups.columns

    def __init__(self, success_threshold: float = 0.5, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_range("success_threshold", success_threshold, -math.inf, math.inf)
        self.success_threshold = success_threshold

    def score(self, batch: Any, step_id: int = 0, **ctx: Any) -> Tensor:
        group, num_groups = batch.groups
        return scoring.solve_rate(batch.outcomes, group, num_groups, success_threshold=self.success_threshold)


@register_scorer("group_reward_variance")
class GroupRewardVariance(_OfGroups):
    """4 times the variance of a prompt's rewards, 4 p (1 - p) of a solve rate p: 1 at most for rewards in [0, 1].

    Of an odd number of rewards of 0 and 1 it is always below 1.

    Example:
        >>> import torch
        >>> batch = {"rm_scores": torch.tensor([1.0, 0.0, 1.0, 1.0]), "uid": ["a", "a", "b", "b"]}
        >>> GroupRewardVariance().score(batch, step_id=0)
        tensor([1., 1., 0., 0.])
    """

    signal = "variance"
    paper = "VCRL, arXiv:2509.19803"
    columns = _OfGroups.columns

    def score(self, batch: Any, step_id: int = 0, **ctx: Any) -> Tensor:
        group, num_groups = batch.groups
        return scoring.reward_variance(batch.outcomes, group, num_groups)


class _Spread(_OfGroups):
    """Standard deviation, or its square, of a prompt's rewards."""

    signal = "variance"
    power: Literal[1, 2]
    paper = "RAGEN, arXiv:2504.20073"
    columns = _OfGroups.columns

    def __init__(self, correction: int = 0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if not is_whole(correction) or correction not in (0, 1):
            raise ValueError(f"correction is {shown(correction)}. Use 0 for the population's variance, or 1.")
        self.correction: Any = correction

    def score(self, batch: Any, step_id: int = 0, **ctx: Any) -> Tensor:
        group, num = batch.groups
        return scoring.reward_spread(batch.outcomes, group, num, power=self.power, correction=self.correction)


@register_scorer("group_variance")
class GroupVariance(_Spread):
    """Variance of a prompt's rewards; exactly 0 where they differ by at most 1e-6 (of the largest above 1).

    Args:
        correction: 0 divides by the number of samples, 1 by one less.

    Example:
        >>> import torch
        >>> batch = {"rm_scores": torch.tensor([1.0, 0.0, 0.1, 0.1]), "uid": ["a", "a", "b", "b"]}
        >>> GroupVariance().score(batch, step_id=0)
        tensor([0.2500, 0.2500, 0.0000, 0.0000])
    """

    power = 2


@register_scorer("group_std")
class GroupStd(_Spread):
    """Standard deviation of a prompt's rewards; exactly 0 where they differ by at most 1e-6 (of the largest above 1).

    Args:
        correction: 0 divides by the number of samples, 1 by one less.

    Example:
        >>> import torch
        >>> batch = {"rm_scores": torch.tensor([1.0, 0.0, 0.1, 0.1]), "uid": ["a", "a", "b", "b"]}
        >>> GroupStd().score(batch, step_id=0)
        tensor([0.5000, 0.5000, 0.0000, 0.0000])
    """

    power = 1


@register_scorer("efficiency")
class Efficiency(Scorer):
    """Reward per token of each response. Of negative rewards the longest failure has the highest.

    Example:
        >>> import torch
        >>> batch = {"rm_scores": torch.tensor([1.0, 1.0]), "response_mask": torch.tensor([[1, 1], [1, 0]])}
        >>> Efficiency().score(batch, step_id=0)
        tensor([0.5000, 1.0000])
    """

    requires = ("rm_scores", "response_mask")
    signal = "efficiency"
    timing = "post_reward"
    granularity = "response"
    row_wise = True
    paper = "GFPO, arXiv:2508.09726"

    def score(self, batch: Any, step_id: int = 0, **ctx: Any) -> Tensor:
        return batch.outcomes / batch.num_tokens

    def columns(self, batch: RolloutBatch) -> dict[str, Tensor]:
        return {"rm_scores": batch.outcomes}
