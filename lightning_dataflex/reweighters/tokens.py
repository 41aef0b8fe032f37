"""Reweighters of tokens."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from lightning_dataflex.core.actuator import Reweighter
from lightning_dataflex.core.checks import check_range
from lightning_dataflex.core.registry import register_reweighter
from lightning_dataflex.functional import weighting

Normalize = Literal["tokens", "none"]


@register_reweighter("advantage_reweight")
class AdvantageReweight(Reweighter):
    """Weights tokens by alpha * p + 1 - alpha, which damps those that the policy found improbable.

    Args:
        alpha: In [0, 1]; 0 changes nothing.
        normalize: `tokens` scales to a mean of 1, as the ancestor does; `none` is the paper's rule.

    Example:
        >>> import torch
        >>> AdvantageReweight(alpha=0.3, normalize="none").act(torch.tensor([[0.1, 0.9, 1.0]]), {})
        tensor([[0.7300, 0.9700, 1.0000]])
    """

    row_wise = True
    paper = "Advantage reweighting, arXiv:2505.12929"

    def __init__(self, alpha: float = 0.5, normalize: Normalize = "tokens") -> None:
        check_range("alpha", alpha, 0, 1)
        if normalize not in ("tokens", "none"):
            raise ValueError(f"normalize is {normalize!r}. Use tokens or none.")
        self.alpha, self.normalize = alpha, normalize

    def act(self, scores: Tensor, batch: Any, **ctx: Any) -> Tensor:
        return weighting.probability_mix(scores, self.alpha)
