"""Selectors by thresholds on the scores."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_dataflex.core.actuator import Selector
from lightning_dataflex.core.registry import register_selector
from lightning_dataflex.functional import selection


@register_selector("threshold_band")
class ThresholdBand(Selector):
    """Keeps what scores inside a band, low < s < high.

    With `group_solve_rate`, the band 0..1 is the filter of DAPO's dynamic sampling, and 0.2..0.8 that of online
    difficulty filtering (arXiv:2504.03380).

    Args:
        low: Lower end.
        high: Upper end.
        closed: Keep what lies on an end too. A score within 1e-6 of an end lies on it.

    Example:
        >>> import torch
        >>> ThresholdBand(low=0.2, high=0.8).act(torch.tensor([0.2, 0.5, 1.0]), {})
        [1]
    """

    row_wise = True
    paper = "DAPO, arXiv:2503.14476"

    def __init__(self, low: float = 0.0, high: float = 1.0, closed: bool = False) -> None:
        if not low < high and not (closed and low == high):
            raise ValueError(f"low is {low} and high is {high}: no score lies between. Give a low below high.")
        self.low, self.high, self.closed = low, high, closed

    def act(self, scores: Tensor, batch: Any, **ctx: Any) -> Any:
        return selection.in_band(scores, self.low, self.high, closed=self.closed)
