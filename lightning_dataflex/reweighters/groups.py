"""Reweighters by the solve rate of a prompt, or by the place of a response in its group."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from lightning_dataflex.core.actuator import Normalize, Reweighter
from lightning_dataflex.core.checks import check_finite, check_range
from lightning_dataflex.core.registry import register_reweighter
from lightning_dataflex.core.rollout import RolloutBatch
from lightning_dataflex.functional import shaping
from lightning_dataflex.functional.choices import check_choice
from lightning_dataflex.functional.groups import group_size
from lightning_dataflex.functional.tokens import token_mean
from lightning_dataflex.functional.weighting import FLOAT_MAX


@register_reweighter("focal")
class Focal(Reweighter):
    """Weights (1 - rate)^gamma: the harder a prompt, the more. Largest where nothing was solved and advantages are 0.

    Args:
        gamma: >= 0; 0 weighs all alike.
        normalize: `tokens`, `samples`, `abs_advantage` or `none`; see `Reweighter.normalize`.

    Example:
        >>> import torch
        >>> Focal(normalize="none").act(torch.tensor([0.0, 0.5, 1.0]), {})
        tensor([1.0000, 0.2500, 0.0000])
    """

    granularities = ("prompt", "response")
    row_wise = True
    signals = ("reward",)
    default_scorer = "group_solve_rate"
    paper = "by analogy with the focal loss, arXiv:1708.02002"

    def __init__(self, gamma: float = 2.0, normalize: Normalize = "tokens") -> None:
        super().__init__(normalize)
        check_range("gamma", gamma, 0, math.inf)
        check_finite("gamma", gamma)
        self.gamma = gamma

    def act(self, scores: Tensor, batch: Any, **ctx: Any) -> Tensor:
        return shaping.focal(scores, self.gamma)


@register_reweighter("grpo_lead")
class GRPOLead(Reweighter):
    """Weights by difficulty: w(rate) for a positive advantage, w(1 - rate) for any other, with w a falling logistic.

    Args:
        low: What w falls to.
        high: What it falls from.
        centre: The rate in the middle.
        slope: How steeply.
        normalize: `none`, as in the paper, `tokens`, `samples` or `abs_advantage`; see `Reweighter.normalize`.

    Example:
        >>> import torch
        >>> batch = {"advantages": torch.tensor([2.5, -0.4]), "response_mask": torch.ones(2, 1)}
        >>> GRPOLead().act(torch.tensor([0.125, 0.125]), batch)
        tensor([1.4979, 0.6450])
    """

    requires = ("advantages",)
    granularities = ("prompt",)
    row_wise = True
    signals = ("reward",)
    default_scorer = "group_solve_rate"
    paper = "GRPO-LEAD, arXiv:2504.09696"

    def __init__(
        self,
        low: float = 0.4,
        high: float = 1.5,
        centre: float = 0.75,
        slope: float = 10.0,
        normalize: Normalize = "none",
    ) -> None:
        super().__init__(normalize)
        for name, value, least in (
            ("low", low, 0),
            ("high", high, 0),
            ("centre", centre, -math.inf),
            ("slope", slope, 0),
        ):
            check_range(name, value, least, math.inf)
            check_finite(name, value)
        self.low, self.high, self.centre, self.slope = low, high, centre, slope

    def act(self, scores: Tensor, batch: Any, **ctx: Any) -> Tensor:
        advantages = token_mean(batch.tensor("advantages"), batch.response_mask).to(scores.device)
        return shaping.difficulty_logistic(
            scores, advantages, low=self.low, high=self.high, centre=self.centre, slope=self.slope
        )

    def columns(self, batch: RolloutBatch) -> dict[str, Tensor]:
        return {"advantages": token_mean(batch.tensor("advantages"), batch.response_mask)}


@register_reweighter("odsw")
class ODSW(Reweighter):
    """Weights a prompt by its solve rate, as the stage of training asks: easy, medium or hard prompts count whole.

    Args:
        stage: `easy`, `medium` or `hard`.
        all_failed: In the stage `hard`, for a prompt that no response solves.
        normalize: `none`, as in the authors' code, `tokens`, `samples` or `abs_advantage`; see `Reweighter.normalize`.

    Example:
        >>> import torch
        >>> ODSW("easy").act(torch.tensor([0.0, 0.25, 0.75]), {})
        tensor([0.0000, 0.7071, 1.0000])
    """

    granularities = ("prompt",)
    row_wise = True
    signals = ("reward",)
    default_scorer = "group_solve_rate"
    paper = "VL-Cogito, arXiv:2507.22607"

    def __init__(
        self, stage: shaping.Stage = "medium", all_failed: float = 0.25, normalize: Normalize = "none"
    ) -> None:
        super().__init__(normalize)
        check_choice("stage", stage, shaping.Stage)
        check_range("all_failed", all_failed, 0, FLOAT_MAX)
        self.stage, self.all_failed = stage, all_failed

    def act(self, scores: Tensor, batch: Any, **ctx: Any) -> Tensor:
        return shaping.stage_weight(scores, self.stage, self.all_failed)


@register_reweighter("pf_ppo")
class PFPPO(Reweighter):
    """Weights the responses of each group as if they were drawn anew: the best, the best and one more, or the extremes.

    With PPO too, where a prompt has several responses.

    The weight is how often a response is drawn on average. With `normalize: tokens` a mean over all tokens is that over
    the tokens of the batch that is drawn.

    Args:
        mode: `bon`, the best alone; `br`, half for the best and the rest shared by the others; `bw`, half for the best
            and half for the worst. Of equal rewards the earliest is the best, and the worst.
        normalize: `tokens`, `samples`, `abs_advantage` or `none`; see `Reweighter.normalize`.

    Example:
        >>> import torch
        >>> batch = {"uid": [7, 7, 7, 7], "response_mask": torch.ones(4, 1)}
        >>> PFPPO("bw").act(torch.tensor([0.2, 0.9, -0.5, 0.4]), batch)
        tensor([0., 2., 2., 0.])
    """

    requires = ("uid",)
    needs_groups = True
    any_estimator = True
    granularities = ("response",)
    default_scorer = "outcome"
    paper = "PF-PPO, arXiv:2409.06957"

    def __init__(self, mode: shaping.Resample = "bw", normalize: Normalize = "tokens") -> None:
        super().__init__(normalize)
        check_choice("mode", mode, shaping.Resample)
        self.mode = mode

    def act(self, scores: Tensor, batch: Any, **ctx: Any) -> Tensor:
        group, num_groups = batch.groups
        group = group.to(scores.device)
        size = group_size(group, num_groups, ~scores.isnan())
        return (shaping.best_of(scores, group, self.mode) * size[group]).to(scores.dtype)

    def columns(self, batch: RolloutBatch) -> dict[str, Tensor]:
        return {"uid": batch.group_ids}
