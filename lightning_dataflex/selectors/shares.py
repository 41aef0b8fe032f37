"""Selectors of a share of the batch: the best or the nearest."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_dataflex.core.actuator import Selector
from lightning_dataflex.core.checks import check_finite, check_range
from lightning_dataflex.core.registry import register_selector
from lightning_dataflex.core.rollout import RolloutBatch
from lightning_dataflex.functional import selection, subsets
from lightning_dataflex.functional.choices import check_choice


@register_selector("topk_fraction")
class TopKFraction(Selector):
    """Keeps the share of samples with the largest (or smallest) scores; of equal scores the earlier sample.

    Args:
        fraction: In (0, 1], of the samples with a score; rounded to nearest, halves up, at least one.
        largest: False keeps the smallest.

    Example:
        >>> import torch
        >>> TopKFraction(fraction=0.5).act(torch.tensor([0.1, 0.3, 0.9, 0.3]), {})
        [1, 2]
    """

    granularities = ("prompt", "response")
    default_scorer = "advantage_magnitude"

    def __init__(self, fraction: float = 0.5, largest: bool = True) -> None:
        check_range("fraction", fraction, 0, 1, open_low=True)
        self.fraction, self.largest = fraction, largest

    def act(self, scores: Tensor, batch: Any, **ctx: Any) -> Any:
        return selection.top_fraction(scores, self.fraction, largest=self.largest)


@register_selector("nearest")
class Nearest(Selector):
    """Keeps what scores nearest to a target, prompts before their rollout and samples after it; of equals the earlier.

    Args:
        target: The score to be near to.
        fraction: In (0, 1], of what has a score. Before a rollout it is not read: the step says how many it needs.

    Example:
        >>> import torch
        >>> Nearest(0.5, fraction=0.5).act(torch.tensor([0.9, 0.55, 0.2, 0.48]), {})
        [1, 3]
    """

    granularities = ("prompt", "response")
    default_scorer = "group_solve_rate"
    paper = "MoPPS, arXiv:2507.04632"

    def __init__(self, target: float = 0.5, fraction: float = 0.5) -> None:
        check_range("fraction", fraction, 0, 1, open_low=True)
        check_finite("target", target)
        self.target, self.fraction = target, fraction

    def act(self, scores: Tensor, batch: Any, **ctx: Any) -> Any:
        num = ctx.get("num")
        if num is None:
            num = int(selection.share(torch.tensor(len(scores)), self.fraction))
        return selection.nearest_to(scores, self.target, num)


class _OfGroups(Selector):
    """Keeps groups by their place among all."""

    requires = ("uid",)
    granularities = ("prompt",)
    default_scorer = "group_std"

    def columns(self, batch: RolloutBatch) -> dict[str, Tensor]:
        return {"uid": batch.group_ids}


@register_selector("variance_top_k")
class VarianceTopK(_OfGroups):
    """Keeps the share of groups whose scores, the deviation of their rewards, are largest; of equal ones the earlier.

    Args:
        fraction: In (0, 1], of the groups; rounded to nearest, halves up, at least one.

    Example:
        >>> import torch
        >>> VarianceTopK(fraction=0.5).act(torch.tensor([0.1, 0.5, 0.1]), {"uid": ["a", "b", "a"]})
        [1]
    """

    paper = "RAGEN, arXiv:2504.20073"
    columns = _OfGroups.columns

    def __init__(self, fraction: float = 0.25) -> None:
        check_range("fraction", fraction, 0, 1, open_low=True)
        self.fraction = fraction

    def act(self, scores: Tensor, batch: Any, **ctx: Any) -> Any:
        group, num_groups = batch.groups
        return subsets.top_groups(scores, group.to(scores.device), num_groups, self.fraction)


@register_selector("variance_top_p")
class VarianceTopP(_OfGroups):
    """Keeps the fewest groups with the largest scores, the deviation of their rewards, that have a share p of the sum.

    Args:
        p: In (0, 1].
        shares: `linear`, a group's score over the sum of all; a score of 0 is never kept. Or `softmax` of the scores.

    Example:
        >>> import torch
        >>> VarianceTopP(p=0.9).act(torch.tensor([0.0, 0.2, 0.8]), {"uid": ["a", "b", "c"]})
        [1, 2]
    """

    paper = "RAGEN-2 (2026)"
    columns = _OfGroups.columns

    def __init__(self, p: float = 0.9, shares: subsets.Shares = "linear") -> None:
        check_range("p", p, 0, 1, open_low=True)
        check_choice("shares", shares, subsets.Shares)
        self.p, self.shares = p, shares

    def act(self, scores: Tensor, batch: Any, **ctx: Any) -> Any:
        group, num_groups = batch.groups
        return subsets.nucleus_groups(scores, group.to(scores.device), num_groups, self.p, self.shares)
