"""What log-probabilities and entropies say: likelihood, distance to another policy, importance ratios.

Every function takes (N, L) tables and the mask of valid tokens, and gives 0 outside of it, or per sample (N,).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from lightning_dataflex.functional.choices import check_choice
from lightning_dataflex.functional.loss import MAX_LOG_RATIO, KLEstimator, token_kl
from lightning_dataflex.functional.tokens import as_float

Level = Literal["token", "sequence", "geometric"]
"""Of each token; the product over a response; its geometric mean."""


def kl_to(log_probs: Tensor, other: Tensor, response_mask: Tensor, estimator: KLEstimator = "k3") -> Tensor:
    """Estimate of KL(policy || other) at each token, (N, L); see `functional.loss.token_kl`.

    Example:
        >>> kl_to(torch.tensor([[0.0, -1.0]]), torch.tensor([[0.0, -2.0]]), torch.tensor([[1, 1]]), "k1")
        tensor([[0., 1.]])
    """
    return torch.where(response_mask.bool(), token_kl(log_ratio(log_probs, other), estimator), 0.0)


def importance_ratio(log_ratios: Tensor, response_mask: Tensor, level: Level = "token") -> Tensor:
    """exp of a log-ratio of two policies: (N, L) of tokens, else (N,) of responses; 1 for an empty response.

    The log-ratio is clamped to +-20 before it is exponentiated, that of a whole response too.

    Source: `geometric` is the sequence ratio of GSPO, Zheng et al. 2025, arXiv:2507.18071, equation 7.

    Args:
        log_ratios: (N, L) log of new over old probabilities.
        response_mask: (N, L); what stands elsewhere is not read.
        level: `token`, `sequence` for the product over a response, `geometric` for its geometric mean.

    Example:
        >>> ratios, mask = torch.tensor([[0.0, 2.0, 9.0]]).log1p(), torch.tensor([[1, 1, 0]])
        >>> importance_ratio(ratios, mask), importance_ratio(ratios, mask, "sequence")
        (tensor([[1., 3., 0.]]), tensor([3.]))
    """
    check_choice("level", level, Level)
    valid = response_mask.bool()
    log_ratios = torch.where(valid, as_float(log_ratios), 0.0)
    if level == "token":
        return torch.where(valid, log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp(), 0.0)
    total = log_ratios.sum(1)
    total = total / valid.sum(1).clamp(min=1) if level == "geometric" else total
    return total.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def log_ratio(log_probs: Tensor, other: Tensor) -> Tensor:
    """log_probs - other, 0 where both are -inf: what is impossible to both is as likely to one as to the other.

    Example:
        >>> log_ratio(torch.tensor([-1.0, -torch.inf]), torch.tensor([-2.0, -torch.inf]))
        tensor([1., 0.])
    """
    log_probs, other = as_float(log_probs), as_float(other)
    return torch.where(log_probs == other, 0.0, log_probs - other)
