"""Selectors of tokens."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from lightning_dataflex.core.actuator import Selector
from lightning_dataflex.core.checks import check_range
from lightning_dataflex.core.registry import register_selector
from lightning_dataflex.functional import selection
from lightning_dataflex.functional.choices import check_choice

Part = Literal["low", "high", "alternate"]


@register_selector("high_entropy_tokens")
class HighEntropyTokens(Selector):
    """Keeps the tokens whose score, the entropy, is among the highest of all valid tokens of the global batch.

    Equal scores at the quantile all stay: of tokens that are all alike all. The paper divides by the number of all
    tokens, which is `drop: weight`; a token that is dropped from the mask is not counted.

    Args:
        fraction: In (0, 1], of the tokens; 0.2 in the paper.

    Example:
        >>> import torch
        >>> mask = torch.tensor([[1, 1, 1, 0]])
        >>> HighEntropyTokens().act(torch.tensor([[0.1, 2.0, 0.3, 9.9]]), {"response_mask": mask})
        tensor([[False,  True, False, False]])
    """

    by_mask = True
    granularities = ("token",)
    default_scorer = "token_entropy"
    paper = "Beyond the 80/20 rule, arXiv:2506.01939"

    def __init__(self, fraction: float = 0.2) -> None:
        check_range("fraction", fraction, 0, 1, open_low=True)
        self.fraction = fraction

    def act(self, scores: Tensor, batch: Any, **ctx: Any) -> Any:
        return selection.top_tokens(scores, batch.token_mask.to(scores.device), self.fraction)


@register_selector("lopti")
class Lopti(Selector):
    """Keeps the tokens that the policy found improbable, score < threshold, or the others: the two masks of Lopti.

    The paper trains on each batch twice, first on the improbable tokens. That is a matter of the module's loop: with
    `alternate` every other training batch, from the first, is one of `low`, for modules that train on each rollout in
    two batches one after the other.

    Args:
        part: `low`, `high` or `alternate`.
        threshold: 0.5 in the paper.

    Example:
        >>> import torch
        >>> Lopti("low").act(torch.tensor([[0.1, 0.5, 0.49]]), {"response_mask": torch.tensor([[1, 1, 1]])})
        tensor([[ True, False,  True]])
    """

    by_mask = True
    granularities = ("token",)
    row_wise = True
    default_scorer = "token_prob"
    paper = "Lopti, arXiv:2505.12929"

    def __init__(self, part: Part = "alternate", threshold: float = 0.5) -> None:
        check_choice("part", part, Part)
        check_range("threshold", threshold, 0, 1)
        self.part, self.threshold = part, threshold

    def act(self, scores: Tensor, batch: Any, **ctx: Any) -> Any:
        low = self.part == "low" or (self.part == "alternate" and ctx.get("step_id", 0) % 2 == 0)
        likely = selection.at_least(scores, self.threshold)
        return likely.logical_not_() if low else likely
