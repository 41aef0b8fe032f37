"""Reweighters by the score of a sample, whatever it measures."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from lightning_dataflex.core.actuator import Reweighter
from lightning_dataflex.core.checks import check_range
from lightning_dataflex.core.registry import register_reweighter
from lightning_dataflex.functional import weighting


@register_reweighter("softmax")
class Softmax(Reweighter):
    """Weights in proportion to exp(s / temperature).

    Args:
        temperature: > 0; the smaller, the more the highest scores count.

    Example:
        >>> import torch
        >>> Softmax().act(torch.tensor([0.0, torch.nan, 1.0]), {})
        tensor([0.5379, 0.0000, 1.4621])
    """

    granularities = ("prompt", "response")

    def __init__(self, temperature: float = 1.0) -> None:
        check_range("temperature", temperature, 0, math.inf, open_low=True)
        self.temperature = temperature

    def act(self, scores: Tensor, batch: Any, **ctx: Any) -> Tensor:
        return weighting.softmax(scores, self.temperature)


@register_reweighter("difficulty_band")
class DifficultyBand(Reweighter):
    """Weights the samples between two quantiles of the scores `focus_weight` times as much as the others.

    On rewards of 0 and 1 the quantiles fall on the rewards themselves, so that the band holds all samples or
    one of the two outcomes: use a graded score.

    Args:
        low_q: Lower quantile, in [0, 1].
        high_q: Upper quantile, in [low_q, 1].
        focus_weight: >= 0.

    Example:
        >>> import torch
        >>> DifficultyBand().act(torch.tensor([0.0, 0.5, 0.5, 1.0]), {})
        tensor([0.6667, 1.3333, 1.3333, 0.6667])
    """

    granularities = ("prompt", "response")

    def __init__(self, low_q: float = 0.25, high_q: float = 0.75, focus_weight: float = 2.0) -> None:
        check_range("low_q", low_q, 0, 1)
        check_range("high_q", high_q, low_q, 1)
        check_range("focus_weight", focus_weight, 0, math.inf)
        self.low_q, self.high_q, self.focus_weight = low_q, high_q, focus_weight

    def act(self, scores: Tensor, batch: Any, **ctx: Any) -> Tensor:
        return weighting.quantile_band(scores, self.low_q, self.high_q, self.focus_weight)


@register_reweighter("per_advantage")
class PerAdvantage(Reweighter):
    """Weights in proportion to s^alpha, |advantage|^alpha with `advantage_magnitude`.

    This is the ancestor's name. The rule is not prioritised experience replay; see `functional.weighting.power`.

    Args:
        alpha: >= 0; 0 weighs all alike.

    Example:
        >>> import torch
        >>> PerAdvantage(alpha=0.5).act(torch.tensor([4.0, 1.0]), {})
        tensor([1.3333, 0.6667])
    """

    row_wise = True

    def __init__(self, alpha: float = 0.5) -> None:
        check_range("alpha", alpha, 0, math.inf)
        self.alpha = alpha

    def act(self, scores: Tensor, batch: Any, **ctx: Any) -> Tensor:
        return weighting.power(scores, self.alpha)
