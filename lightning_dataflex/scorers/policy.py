"""Scorers by what a policy says of tokens."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_dataflex.core.registry import register_scorer
from lightning_dataflex.core.scorer import Scorer
from lightning_dataflex.functional import scoring


@register_scorer("token_prob")
class TokenProb(Scorer):
    """Probability of each token under the policy that generated it.

    Example:
        >>> import torch
        >>> TokenProb().score({"old_log_probs": torch.tensor([[0.0, -1.0]]), "response_mask": torch.tensor([[1, 1]])})
        tensor([[1.0000, 0.3679]])
    """

    requires = ("old_log_probs", "response_mask")
    signal = "probability"
    timing = "post_advantage"
    granularity = "token"
    row_wise = True
    paper = "Advantage reweighting, arXiv:2505.12929"

    def score(self, batch: Any, step_id: int = 0, **ctx: Any) -> Tensor:
        return scoring.token_prob(batch.tensor("old_log_probs"), batch.response_mask)
