"""What the entry point imports: the decorators register."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_dataflex import Scorer, register_scorer


@register_scorer("short_first")
class ShortFirst(Scorer):
    """Share of the budget that a right response left unused, 0 for a wrong one.

    Args:
        budget: Response tokens that may be used.
        success_threshold: Above this reward a response is right.

    Example:
        >>> batch = {"response_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]), "rm_scores": torch.tensor([1.0, 1.0])}
        >>> ShortFirst(budget=4).score(batch)
        tensor([0.0000, 0.5000])
    """

    requires = ("rm_scores", "response_mask")
    timing = "post_reward"
    granularity = "response"
    row_wise = True

    def __init__(self, budget: int = 1024, success_threshold: float = 0.5, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.budget, self.success_threshold = budget, success_threshold

    def score(self, batch: Any, step_id: int = 0, **ctx: Any) -> Tensor:
        mask = batch.batch["response_mask"]
        rewards = (batch.batch["rm_scores"] * mask).sum(-1)
        unused = 1 - mask.sum(-1) / self.budget
        return torch.where(rewards > self.success_threshold, unused, 0.0)
