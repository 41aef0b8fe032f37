"""What log-probabilities and entropies say: likelihood, distance to another policy, importance ratios.

Every function takes (N, L) tables and the mask of valid tokens, and gives 0 outside of it, or per sample (N,).
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from lightning_dataflex.functional.blocks import by_rows, masked
from lightning_dataflex.functional.choices import check_choice
from lightning_dataflex.functional.comparing import may_hold_nan
from lightning_dataflex.functional.loss import MAX_LOG_RATIO, KLEstimator, token_kl
from lightning_dataflex.functional.tokens import as_float, num_valid

Level = Literal["token", "sequence", "geometric"]
"""Of each token; the product over a response; its geometric mean."""


def kl_to(log_probs: Tensor, other: Tensor, response_mask: Tensor, estimator: KLEstimator = "k3") -> Tensor:
    """Estimate of KL(policy || other) at each token, (N, L); see `functional.loss.token_kl`.

    Example:
        >>> import torch
        >>> kl_to(torch.tensor([[0.0, -1.0]]), torch.tensor([[0.0, -2.0]]), torch.tensor([[1, 1]]), "k1")
        tensor([[0., 1.]])
    """

    def kl(log_probs: Tensor, other: Tensor, mask: Tensor) -> Tensor:
        return masked(token_kl(log_ratio(log_probs, other), estimator), mask.bool())

    return by_rows(kl, log_probs, other, response_mask)


def importance_ratio(log_ratios: Tensor, response_mask: Tensor, level: Level = "token") -> Tensor:
    """exp of a log-ratio of two policies: (N, L) of tokens, else (N,) of responses; 1 for an empty response.

    The log-ratio is clamped to +-20 before it is exponentiated, that of a whole response too.

    Source: `geometric` is the sequence ratio of GSPO, Zheng et al. 2025, arXiv:2507.18071, equation 7.

    Args:
        log_ratios: (N, L) log of new over old probabilities.
        response_mask: (N, L); what stands elsewhere is not read.
        level: `token`, `sequence` for the product over a response, `geometric` for its geometric mean.

    Example:
        >>> import torch
        >>> ratios, mask = torch.tensor([[0.0, 2.0, 9.0]]).log1p(), torch.tensor([[1, 1, 0]])
        >>> importance_ratio(ratios, mask), importance_ratio(ratios, mask, "sequence")
        (tensor([[1., 3., 0.]]), tensor([3.]))
    """
    check_choice("level", level, Level)

    def ratio(log_ratios: Tensor, mask: Tensor) -> Tensor:
        valid = mask.bool()
        log_ratios = masked(as_float(log_ratios), valid)
        if level == "token":
            return masked(log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp(), valid)
        total = log_ratios.sum(1)
        total = total / num_valid(valid).clamp(min=1) if level == "geometric" else total
        return total.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()

    return by_rows(ratio, log_ratios, response_mask)


def log_ratio(log_probs: Tensor, other: Tensor) -> Tensor:
    """log_probs - other, 0 where both are -inf: what is impossible to both is as likely to one as to the other.

    Example:
        >>> import torch
        >>> log_ratio(torch.tensor([-1.0, -torch.inf]), torch.tensor([-2.0, -torch.inf]))
        tensor([1., 0.])
    """

    def difference(log_probs: Tensor, other: Tensor) -> Tensor:
        log_probs, other = as_float(log_probs), as_float(other)
        ratio = log_probs - other
        # Where both are finite a difference of 0 has a gradient.
        return masked(ratio, (log_probs != other) | log_probs.isfinite()) if may_hold_nan(ratio) else ratio

    return by_rows(difference, log_probs, other)
