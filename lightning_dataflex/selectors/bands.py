"""Selectors by thresholds on the scores."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from lightning_dataflex.core.actuator import Selector
from lightning_dataflex.core.checks import check_finite, check_range, is_number
from lightning_dataflex.core.registry import register_selector
from lightning_dataflex.core.rollout import RolloutBatch
from lightning_dataflex.functional import selection, subsets
from lightning_dataflex.functional.choices import shown


@register_selector("threshold_band")
class ThresholdBand(Selector):
    """Keeps what scores inside a band, low < s < high.

    With `group_solve_rate` and rewards of 0 and 1, the band 0..1 is the filter of DAPO's dynamic sampling.

    Args:
        low: Lower end.
        high: Upper end.
        closed: Keep what lies on an end too. A score within 1e-6 of an end lies on it.

    Example:
        >>> import torch
        >>> ThresholdBand(low=0.2, high=0.8).act(torch.tensor([0.2, 0.5, 1.0]), {})
        [1]
    """

    by_mask = True
    row_wise = True
    default_scorer = "group_solve_rate"
    paper = "DAPO, arXiv:2503.14476"

    def __init__(self, low: float = 0.0, high: float = 1.0, closed: bool = False) -> None:
        for name, end in (("low", low), ("high", high)):
            if not is_number(end) and not (isinstance(end, float) and math.isinf(end)):
                raise ValueError(f"{name} is {shown(end)}. Give a number; an infinite one leaves that end open.")
        if not low < high and not (closed and low == high):
            raise ValueError(f"low is {low} and high is {high}: no score lies between. Give a low below high.")
        self.low, self.high, self.closed = low, high, closed

    def act(self, scores: Tensor, batch: Any, **ctx: Any) -> Any:
        return selection.in_band(scores, self.low, self.high, closed=self.closed)


@register_selector("online_difficulty_filter")
class OnlineDifficultyFilter(ThresholdBand):
    """Keeps the prompts of medium solve rate, low <= s <= high: a `threshold_band` with the thresholds of a recipe.

    Args:
        low: Lower end; 0.2 in PRIME's recipe.
        high: Upper end; 0.8 there.
        closed: Keep what lies on an end too, as the recipe does. A score within 1e-6 of an end lies on it.

    Example:
        >>> import torch
        >>> OnlineDifficultyFilter().act(torch.tensor([0.0, 0.2, 0.5, 1.0]), {})
        [1, 2]
    """

    paper = "Online difficulty filtering, arXiv:2504.03380"

    def __init__(self, low: float = 0.2, high: float = 0.8, closed: bool = True) -> None:
        super().__init__(low, high, closed)


class _AtLeast(Selector):
    """Keeps scores of at least, or above, a threshold."""

    strict: bool

    row_wise = True

    def __init__(self, threshold: float) -> None:
        check_finite("threshold", threshold)
        self.threshold = threshold

    def act(self, scores: Tensor, batch: Any, **ctx: Any) -> Any:
        return selection.at_least(scores, self.threshold, strict=self.strict)


@register_selector("vcrl")
class VCRLSelector(_AtLeast):
    """Keeps the prompts whose rewards vary enough: 4 p (1 - p) >= kappa.

    What is dropped is replaced by fresh prompts with `refill`; the paper replaces it from a memory of prompts that
    varied.

    Args:
        kappa: In [0, 1]; the paper moves it over the run, by a schedule of its own. Groups of an odd number of samples
            never reach 1.

    Example:
        >>> import torch
        >>> VCRLSelector(kappa=0.75).act(torch.tensor([0.4375, 0.75, 1.0]), {})
        [1, 2]
    """

    granularities = ("prompt",)
    signals = ("variance",)
    default_scorer = "group_reward_variance"
    paper = "VCRL, arXiv:2509.19803"
    strict = False

    def __init__(self, kappa: float = 0.3) -> None:
        check_range("kappa", kappa, 0, 1)
        super().__init__(kappa)
        self.kappa = kappa


@register_selector("limr")
class LIMR(_AtLeast):
    """Keeps the prompts whose accuracy followed that of a whole earlier run: alignment > threshold.

    The alignment of each prompt is computed once, by `functional.scoring.trajectory_alignment` from its accuracies in
    the epochs of that run, and is a column of the data, `limr_score` unless the scorer says otherwise.

    Args:
        threshold: 0.6 in the paper.

    Example:
        >>> import torch
        >>> LIMR().act(torch.tensor([1.0, 0.6, 0.0]), {})
        [0]
    """

    granularities = ("prompt", "response")
    default_scorer = {"name": "metadata", "params": {"column": "limr_score"}}
    paper = "LIMR, arXiv:2502.11886"
    strict = True

    def __init__(self, threshold: float = 0.6) -> None:
        super().__init__(threshold)


@register_selector("nonzero_variance")
class NonzeroVariance(Selector):
    """Keeps the groups whose scores are not all equal, but for rounding: dynamic sampling, without its refill.

    Select by accuracy: a reward that also counts the length differs in nearly every group.

    Example:
        >>> import torch
        >>> NonzeroVariance().act(torch.tensor([0.1, 0.1, 1.0, 0.0]), {"uid": ["a", "a", "b", "b"]})
        [2, 3]
    """

    requires = ("uid",)
    needs_groups = True
    granularities = ("response",)
    default_scorer = "outcome"
    paper = "DAPO, arXiv:2503.14476"

    def act(self, scores: Tensor, batch: Any, **ctx: Any) -> Any:
        group, num_groups = batch.groups
        return subsets.mixed_groups(scores, group.to(scores.device), num_groups)

    def columns(self, batch: RolloutBatch) -> dict[str, Tensor]:
        return {"uid": batch.group_ids}
