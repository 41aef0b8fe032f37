"""What a signal says of each sample or token. NaN marks what cannot be scored."""

from __future__ import annotations

import operator
from typing import Literal

import torch
from torch import Tensor

from lightning_dataflex.functional.blocks import by_rows, masked
from lightning_dataflex.functional.choices import check_choice
from lightning_dataflex.functional.comparing import compared, is_finite, is_nan
from lightning_dataflex.functional.groups import TOLERANCE, by_sample, group_differs, group_size, group_std
from lightning_dataflex.functional.tokens import any_nan, as_float, num_valid, token_sum

TokenReduction = Literal["mean", "sum", "max"]


def outcome(rewards: Tensor, response_mask: Tensor | None = None, *, length: Tensor | None = None) -> Tensor:
    """Reward of each sample: the sum of its valid tokens' rewards.

    Args:
        rewards: (N, L) token rewards, or (N,) rewards that are already per sample.
        response_mask: (N, L); what stands elsewhere is not read.
        length: (N,) the number of valid tokens, where it is known.

    Returns:
        (N,) float. NaN for a sample without a valid token, and where a valid reward is NaN.

    Example:
        >>> outcome(torch.tensor([[0.0, 1.0, 9.0]]), torch.tensor([[1, 1, 0]]))
        tensor([1.])
    """
    return token_sum(rewards, response_mask, length=length)


def is_solved(outcomes: Tensor, success_threshold: float) -> Tensor:
    """(N,) bool: the outcomes above the threshold; one within 1e-6 of it is on it, and NaN is above none.

    Example:
        >>> is_solved(torch.tensor([0.5, 1.0, torch.nan]), 0.5)
        tensor([False,  True, False])
    """
    return compared(operator.gt, outcomes, success_threshold + TOLERANCE)


def solve_rate(outcomes: Tensor, group: Tensor, num_groups: int, *, success_threshold: float = 0.5) -> Tensor:
    """Share of each sample's group whose outcome is above the threshold.

    Source: the accuracy of DAPO's dynamic sampling, Yu et al. 2025, arXiv:2503.14476, equation 11.

    Args:
        outcomes: (N,); a NaN outcome is no data: it counts in no rate and its own score is NaN.
        group: (N,) dense group index.

    Returns:
        (N,) in [0, 1].

    Example:
        >>> solve_rate(torch.tensor([1.0, 0.0, torch.nan, 1.0]), torch.tensor([0, 0, 0, 1]), 2)
        tensor([0.5000, 0.5000,    nan, 1.0000])
    """
    valid = is_finite(outcomes)
    solved = group_size(group, num_groups, valid & is_solved(outcomes, success_threshold))
    rate = solved / group_size(group, num_groups, valid)
    return torch.where(valid, by_sample(rate, group), torch.nan).to(outcomes.dtype)


def reward_variance(outcomes: Tensor, group: Tensor, num_groups: int) -> Tensor:
    """Population variance of each sample's group, times 4: 1 at most for rewards in [0, 1].

    Source: VCRL, Jiang et al. 2025, arXiv:2509.19803: the variance over the largest that an even number of rewards of 0
    and 1 can have, 4 q (1 - q) of a solve rate q, which never reaches 1 for an odd number.

    Args:
        outcomes: (N,); a NaN outcome is no data, and its own score is NaN.
        group: (N,) dense group index.

    Example:
        >>> reward_variance(torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.tensor([0, 0, 0, 0]), 1)
        tensor([0.7500, 0.7500, 0.7500, 0.7500])
    """
    return 4 * reward_spread(outcomes, group, num_groups, power=2)


def reward_spread(
    outcomes: Tensor,
    group: Tensor,
    num_groups: int,
    *,
    power: Literal[1, 2] = 1,
    correction: Literal[0, 1] = 0,
) -> Tensor:
    """Standard deviation (power 1) or variance (power 2) of each sample's group; exactly 0 without `group_differs`.

    Source: the uncertainty of RAGEN, Wang et al. 2025, arXiv:2504.20073; the tolerance is ours: the deviation of three
    rewards of 0.1 is 1.4e-17 in float64.

    Args:
        outcomes: (N,); a NaN outcome is no data, and its own score is NaN.
        group: (N,) dense group index.
        correction: 0 divides by the number of samples, 1 by one less.

    Example:
        >>> reward_spread(torch.tensor([1.0, 0.0, 0.1, 0.1]), torch.tensor([0, 0, 1, 1]), 2)
        tensor([0.5000, 0.5000, 0.0000, 0.0000])
    """
    valid = is_finite(outcomes)
    spread = group_std(outcomes, group, num_groups, valid, correction=correction) ** power
    spread = by_sample(torch.where(no_signal(outcomes, group, num_groups), 0.0, spread), group)
    return torch.where(valid, spread, torch.nan).to(outcomes.dtype)


def no_signal(outcomes: Tensor, group: Tensor, num_groups: int) -> Tensor:
    """Whether each group's outcomes are all equal, (num_groups,) bool; true of a group of one and of an empty one.

    Example:
        >>> no_signal(torch.tensor([0.1, 0.1, 0.1, 1.0, 0.0]), torch.tensor([0, 0, 0, 1, 1]), 2)
        tensor([ True, False])
    """
    return ~group_differs(outcomes, group, num_groups, is_finite(outcomes))


def advantage_magnitude(
    advantages: Tensor,
    response_mask: Tensor | None = None,
    *,
    reduction: TokenReduction = "mean",
    length: Tensor | None = None,
) -> Tensor:
    """|A| of each sample, over its valid tokens.

    Args:
        advantages: (N, L), or (N,) for one per sample, which stands for each of its tokens.
        response_mask: (N, L); what stands elsewhere is not read.
        reduction: `mean`, `sum` or `max` over the valid tokens.
        length: (N,) the number of valid tokens, where it is known.

    Returns:
        (N,) float; NaN for a sample without a valid token, and where a valid advantage is NaN.

    Example:
        >>> advantage_magnitude(torch.tensor([[1.0, -3.0, 9.0]]), torch.tensor([[1, 1, 0]]))
        tensor([2.])
    """
    check_choice("agg", reduction, TokenReduction)
    if response_mask is None:
        size = as_float(advantages).abs()
        return size if size.dim() == 1 else getattr(torch, "amax" if reduction == "max" else reduction)(size, -1)

    def magnitudes(advantages: Tensor, mask: Tensor) -> Tensor:
        sizes = masked(as_float(advantages), mask.bool()).abs_()
        # A padded column, because the maximum of no tokens at all is an error.
        return torch.nn.functional.pad(sizes, (0, 1)).amax(-1) if reduction == "max" else sizes.sum(-1)

    reduced = by_rows(magnitudes, advantages[:, None] if advantages.dim() == 1 else advantages, response_mask)
    length = num_valid(response_mask) if length is None else length
    if reduction == "mean":
        reduced = reduced / length.clamp(min=1)
    return torch.where(length > 0, reduced, torch.nan)


def token_prob(log_probs: Tensor, response_mask: Tensor | None = None) -> Tensor:
    """Probability of each token under the policy that generated it, exp(log_probs), (N, L); 0 outside the mask.

    Example:
        >>> token_prob(torch.tensor([[0.0, -torch.inf, torch.nan]]), torch.tensor([[1, 1, 0]]))
        tensor([[1., 0., 0.]])
    """
    if response_mask is None:
        return as_float(log_probs).exp()
    return by_rows(lambda x, mask: masked(as_float(x).exp(), mask.bool()), log_probs, response_mask)


def trajectory_alignment(rates: Tensor, baseline: Tensor | None = None) -> Tensor:
    """How well the accuracy of each prompt over the epochs of a run follows that of all prompts, (N,); at most 1.

    1 - sum_k (r_k - b_k)^2 / sum_k (1 - b_k)^2: a prompt that was always solved has exactly 0.

    Source: LIMR, Li et al. 2025, arXiv:2502.11886, equation 3; kept above 0.6.

    Args:
        rates: (N, K) accuracy of each prompt in each epoch; NaN where a prompt was not seen takes the next epoch that
            it was seen in, and after the last that one.
        baseline: (K,) mean accuracy of the run. Default: that of the prompts seen in the epoch.

    Returns:
        float64. NaN for a prompt that was never seen; 1 where the baseline is all 1 and the prompt was always solved,
        -inf where it was not.

    Example:
        >>> curves = torch.tensor([[0.2, 0.5, 0.8], [1.0, 1.0, 1.0], [0.0, 0.4, 1.0]])
        >>> trajectory_alignment(curves, torch.tensor([0.2, 0.5, 0.8]))
        tensor([1.0000, 0.0000, 0.9032], dtype=torch.float64)
    """
    exact = rates.double()
    if exact.dim() != 2 or (baseline is not None and baseline.shape != exact.shape[1:]):
        shape = None if baseline is None else tuple(baseline.shape)
        raise ValueError(
            f"rates has shape {tuple(rates.shape)} and baseline {shape}. They must be (prompts, epochs) and (epochs,)."
        )
    mean = exact.nanmean(0) if baseline is None else baseline.double()
    # An epoch in which no prompt was seen says nothing.
    exact, mean = exact[:, ~mean.isnan()], mean[~mean.isnan()]
    filled = exact.clone()
    for k in reversed(range(filled.shape[1] - 1)):
        filled[:, k] = torch.where(filled[:, k].isnan(), filled[:, k + 1], filled[:, k])
    for k in range(1, filled.shape[1]):
        filled[:, k] = torch.where(filled[:, k].isnan(), filled[:, k - 1], filled[:, k])
    if not len(mean):
        return torch.full((len(rates),), torch.nan, dtype=torch.float64)
    distance, whole = (filled - mean).square().sum(1), (1 - mean).square().sum()
    limit = torch.where(distance > 0, -torch.inf, 1.0)
    return torch.where(filled.isnan().any(1), torch.nan, torch.where(whole > 0, 1 - distance / whole, limit))


def unscored(scores: Tensor) -> Tensor:
    """(N,) bool: the samples without a score, those with a NaN among their token scores included.

    Example:
        >>> unscored(torch.tensor([0.0, torch.nan])), unscored(torch.tensor([[0.0, torch.nan], [1.0, 1.0]]))
        (tensor([False,  True]), tensor([ True, False]))
    """
    if scores.dim() == 1:
        return is_nan(scores)
    return any_nan(scores)
