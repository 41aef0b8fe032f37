"""Reweighters by the entropy among the responses of a group."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_dataflex.core.actuator import Normalize, Reweighter
from lightning_dataflex.core.checks import check_finite, check_range
from lightning_dataflex.core.global_batch import rewards_and_groups
from lightning_dataflex.core.registry import register_reweighter
from lightning_dataflex.core.rollout import RolloutBatch
from lightning_dataflex.functional import scoring, shaping
from lightning_dataflex.functional.weighting import FLOAT_MAX


class _ByEntropy(Reweighter):
    """Weights by the entropy among the solved, or the failed, responses of a group."""

    requires = ("rm_scores", "uid")
    needs_groups = True

    def __init__(self, amount: float = 0.1, success_threshold: float = 0.5, normalize: Normalize = "none") -> None:
        super().__init__(normalize)
        check_range("amount", amount, 0, FLOAT_MAX)
        check_finite("success_threshold", success_threshold)
        self.amount, self.success_threshold = amount, success_threshold

    def columns(self, batch: RolloutBatch) -> dict[str, Tensor]:
        return rewards_and_groups(batch)

    def _shares(self, entropies: Tensor, mask: Tensor, batch: Any) -> Tensor:
        solved = scoring.is_solved(batch.outcomes, self.success_threshold)
        (group, num_groups), device = batch.groups, entropies.device
        return shaping.entropy_share(
            entropies, mask, group.to(device), solved.to(device), self.amount, num_groups=num_groups
        )


@register_reweighter("gtpo")
class GTPO(_ByEntropy):
    """Weights tokens 1 + amount * share * count: the uncertain ones of solved responses, the confident of failed ones.

    The share is that of the token's entropy (its inverse, in a failed response) among the responses of the group with
    the same outcome that reach its place; count is how many those are. The paper puts this into the rewards, and
    normalises solved and failed responses apart; here it weighs the advantages that the batch has.

    Args:
        amount: alpha_2 in the paper, beside an alpha_1 of 1.
        success_threshold: A response is solved when its reward is above this.
        normalize: `none`, `tokens`, `samples` or `abs_advantage`; see `Reweighter.normalize`.

    Example:
        >>> import torch
        >>> batch = {"rm_scores": torch.ones(2), "uid": [7, 7], "response_mask": torch.ones(2, 1)}
        >>> GTPO().act(torch.tensor([[3.0], [1.0]]), batch)
        tensor([[1.1500],
                [1.0500]])
    """

    by_mask = True
    granularities = ("token",)
    signals = ("entropy",)
    default_scorer = "token_entropy"
    paper = "GTPO, arXiv:2508.04349"
    columns = _ByEntropy.columns

    def act(self, scores: Tensor, batch: Any, **ctx: Any) -> Tensor:
        return self._shares(scores, batch.token_mask.to(scores.device), batch)


@register_reweighter("grpo_s")
class GRPOS(_ByEntropy):
    """Weights responses 1 + amount * share * count: `gtpo` with the mean entropy of a response in place of a token's.

    Args:
        amount: beta_2 in the paper, beside a beta_1 of 1.
        success_threshold: A response is solved when its reward is above this.
        normalize: `none`, `tokens`, `samples` or `abs_advantage`; see `Reweighter.normalize`.

    Example:
        >>> import torch
        >>> batch = {"rm_scores": torch.ones(2), "uid": [7, 7], "response_mask": torch.ones(2, 1)}
        >>> GRPOS().act(torch.tensor([3.0, 1.0]), batch)
        tensor([1.1500, 1.0500])
    """

    granularities = ("response",)
    signals = ("entropy",)
    default_scorer = "sequence_entropy"
    paper = "GRPO-S, arXiv:2508.04349"
    columns = _ByEntropy.columns

    def act(self, scores: Tensor, batch: Any, **ctx: Any) -> Tensor:
        table = scores[:, None]
        return self._shares(table, torch.ones_like(table, dtype=torch.bool), batch)[:, 0]
