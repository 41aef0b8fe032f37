"""Scorers by advantages."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_dataflex.core.registry import register_scorer
from lightning_dataflex.core.rollout import RolloutBatch
from lightning_dataflex.core.scorer import Scorer
from lightning_dataflex.functional import scoring
from lightning_dataflex.functional.choices import check_choice
from lightning_dataflex.functional.tokens import token_mean


@register_scorer("advantage")
class Advantage(Scorer):
    """Advantage of each response with its sign, the mean over its valid tokens.

    Example:
        >>> import torch
        >>> Advantage().score({"advantages": torch.tensor([-2.0, 0.5])}, step_id=0)
        tensor([-2.0000,  0.5000])
    """

    requires = ("advantages", "response_mask")
    signal = "signed advantage"
    timing = "post_advantage"
    granularity = "response"
    row_wise = True

    def score(self, batch: Any, step_id: int = 0, **ctx: Any) -> Tensor:
        return token_mean(batch.tensor("advantages"), batch.response_mask)

    def columns(self, batch: RolloutBatch) -> dict[str, Tensor]:
        return {"advantages": token_mean(batch.tensor("advantages"), batch.response_mask)}


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
        check_choice("agg", agg, scoring.TokenReduction)
        self.agg = agg

    def score(self, batch: Any, step_id: int = 0, **ctx: Any) -> Tensor:
        return self._magnitude(batch)

    def columns(self, batch: RolloutBatch) -> dict[str, Tensor]:
        # |A| of a sample is its own magnitude, whatever the reduction.
        return {"advantages": self._magnitude(batch)}

    def _magnitude(self, batch: RolloutBatch) -> Tensor:
        advantages, mask = batch.tensor("advantages"), batch.response_mask
        return scoring.advantage_magnitude(advantages, mask, reduction=self.agg, length=batch.num_tokens)
