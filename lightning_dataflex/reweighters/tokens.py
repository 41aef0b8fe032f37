"""Reweighters of tokens, and by importance ratios."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_dataflex.core.actuator import Normalize, Reweighter
from lightning_dataflex.core.checks import check_range
from lightning_dataflex.core.registry import register_reweighter
from lightning_dataflex.functional import shaping, weighting
from lightning_dataflex.functional.weighting import FLOAT_MAX


@register_reweighter("advantage_reweight")
class AdvantageReweight(Reweighter):
    """Weights tokens by alpha * p + 1 - alpha, which damps those that the policy found improbable.

    Args:
        alpha: In [0, 1]; 0 changes nothing. The authors use 0.2, and 0.3 with Lopti.
        normalize: `none` is the paper's rule; `tokens` scales to a mean of 1, as DataFlex-RL does. Or `samples` or
            `abs_advantage`; see `Reweighter.normalize`.

    Example:
        >>> import torch
        >>> AdvantageReweight(alpha=0.3).act(torch.tensor([[0.1, 0.9, 1.0]]), {})
        tensor([[0.7300, 0.9700, 1.0000]])
    """

    by_mask = True
    row_wise = True
    signals = ("probability",)
    default_scorer = "token_prob"
    paper = "Advantage reweighting, arXiv:2505.12929"

    def __init__(self, alpha: float = 0.2, normalize: Normalize = "none") -> None:
        super().__init__(normalize)
        check_range("alpha", alpha, 0, 1)
        self.alpha = alpha

    def act(self, scores: Tensor, batch: Any, **ctx: Any) -> Tensor:
        return weighting.probability_mix(scores, self.alpha)


@register_reweighter("tis")
class TIS(Reweighter):
    """Weights min(ratio, cap): truncated importance sampling, of tokens or of responses as the scorer's level says.

    Args:
        cap: The largest weight.
        normalize: `none`, `tokens`, `samples` or `abs_advantage`; see `Reweighter.normalize`.

    Example:
        >>> import torch
        >>> TIS().act(torch.tensor([[0.5, 3.0]]), {})
        tensor([[0.5000, 2.0000]])
    """

    by_mask = True
    granularities = ("response", "token")
    row_wise = True
    signals = ("ratio",)
    default_scorer = "importance_ratio"
    paper = "Truncated importance sampling, Ionides 2008"

    def __init__(self, cap: float = 2.0, normalize: Normalize = "none") -> None:
        super().__init__(normalize)
        check_range("cap", cap, 0, FLOAT_MAX, open_low=True)
        self.cap = cap

    def act(self, scores: Tensor, batch: Any, **ctx: Any) -> Tensor:
        return shaping.truncated(scores, self.cap)


@register_reweighter("mis")
class MIS(Reweighter):
    """Weights the ratio inside of [low, high] and 0 outside: masked importance sampling, of tokens or of responses.

    A weight of 0 takes the policy term; KL terms and denominators keep the token.

    Args:
        low: >= 0.
        high: >= low.
        normalize: `none`, `tokens`, `samples` or `abs_advantage`; see `Reweighter.normalize`.

    Example:
        >>> import torch
        >>> MIS().act(torch.tensor([[0.4, 1.1, 3.0]]), {})
        tensor([[0.0000, 1.1000, 0.0000]])
    """

    by_mask = True
    granularities = ("response", "token")
    row_wise = True
    signals = ("ratio",)
    default_scorer = "importance_ratio"
    paper = "Masked importance sampling, as verl and TRL have it"

    def __init__(self, low: float = 0.5, high: float = 2.0, normalize: Normalize = "none") -> None:
        super().__init__(normalize)
        check_range("low", low, 0, FLOAT_MAX)
        check_range("high", high, low, FLOAT_MAX)
        self.low, self.high = low, high

    def act(self, scores: Tensor, batch: Any, **ctx: Any) -> Tensor:
        return shaping.masked_ratio(scores, self.low, self.high)
