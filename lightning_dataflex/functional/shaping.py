"""Weights of published rules that follow from rewards, solve rates, entropies or ratios. All are >= 0."""

from __future__ import annotations

import math
import operator
from typing import Literal

import torch
from torch import Tensor

from lightning_dataflex.functional.blocks import by_rows, masked, whole_slices
from lightning_dataflex.functional.choices import check_choice
from lightning_dataflex.functional.comparing import compared, without_nan
from lightning_dataflex.functional.groups import TOLERANCE, by_sample, group_rank, group_size
from lightning_dataflex.functional.storage import empty
from lightning_dataflex.functional.tokens import as_float
from lightning_dataflex.functional.weighting import FLOAT_MAX, softmax

SMALLEST = torch.finfo(torch.float32).tiny
ENTROPY_EPS = 1e-8
"""Added to an entropy before it is inverted."""

Resample = Literal["bon", "br", "bw"]
Stage = Literal["easy", "medium", "hard"]


def best_of(rewards: Tensor, group: Tensor, mode: Resample = "bon") -> Tensor:
    """How often each response is drawn when its group is drawn anew, as a share: the best, or it and another.

    The shares sum to 1 in each group; of equal rewards the earliest is the best, and the worst. In a group of one, and
    where best and worst are equal, `bw` gives everything to the best.

    Source: PF-PPO, Shen and Zhang 2024, arXiv:2409.06957. `br` is the expectation over the random response: 1/2 for the
    best and the rest shared by the others.

    Args:
        rewards: (N,); NaN gets 0.
        group: (N,) dense group index.
        mode: `bon`, `br` or `bw`.

    Example:
        >>> best_of(torch.tensor([0.2, 0.9, -0.5, 0.4]), torch.zeros(4).long(), "bw")
        tensor([0.0000, 0.5000, 0.5000, 0.0000])
    """
    check_choice("mode", mode, Resample)
    valid = ~rewards.isnan()
    weights = torch.zeros_like(rewards)
    if not valid.any():
        return weights
    values, index = rewards[valid], torch.unique(group[valid], return_inverse=True)[1]
    best = group_rank(values, index, descending=True) == 0
    size = group_size(index, int(index.max()) + 1, torch.ones_like(best))[index]
    if mode == "bon":
        shares = best.double()
    elif mode == "br":
        shares = torch.where(size == 1, 1.0, torch.where(best, 0.5, 0.5 / (size - 1)))
    else:
        worst = group_rank(values, index) == 0
        # The earliest of equals is both, and then nothing is left for another.
        shares = torch.where(best & worst, 1.0, 0.5 * (best | worst).double())
    weights[valid] = shares.to(weights)
    return weights


def exp_advantage(advantages: Tensor, temperature: float = 1.0, clip: float = 20.0, eps: float = 1e-5) -> Tensor:
    """exp(A' / temperature), at most `clip`, of advantages that are normalised over the batch.

    Source: AWR, Peng et al. 2019, arXiv:1910.00177, with the population deviation of the authors' implementation.

    Args:
        advantages: (N,); NaN enters no statistic and gets 0.

    Example:
        >>> exp_advantage(torch.tensor([-1.0, 0.0, 1.0, 4.0]))
        tensor([0.3433, 0.5860, 1.0000, 4.9707])
    """
    valid = ~advantages.isnan()
    exact = advantages[valid].double()
    weights = torch.zeros_like(advantages)
    if len(exact):
        if exact.isinf().any():  # beside which the others are all the same
            exact = torch.where(exact.isinf(), exact.sign(), 0.0)
        normed = (exact - exact.mean()) / (exact.std(correction=0) + eps)
        weights[valid] = (normed / temperature).exp().clamp(max=clip).to(weights)
    return weights


def exp_reward(rewards: Tensor, beta: float = 1.0) -> Tensor:
    """exp(r / beta), divided by its mean; NaN gets 0.

    Source: RWR, Peters and Schaal 2007, "Reinforcement learning by reward-weighted regression for operational space
    control"; self-normalised.

    Example:
        >>> exp_reward(torch.tensor([0.0, 1.0, 1.0]), beta=0.5)
        tensor([0.1901, 1.4049, 1.4049])
    """
    return (softmax(rewards.double(), beta) * (~rewards.isnan()).sum()).to(rewards)


def difficulty_logistic(
    rate: Tensor, advantages: Tensor, *, low: float = 0.4, high: float = 1.5, centre: float = 0.75, slope: float = 10.0
) -> Tensor:
    """w(rate) for a positive advantage and w(1 - rate) for any other, w a falling logistic from `high` to `low`.

    Source: GRPO-LEAD, Zhang and Zuo 2025, arXiv:2504.09696.

    Args:
        rate: (N,) solve rate of each sample's prompt.
        advantages: (N,).

    Example:
        >>> difficulty_logistic(torch.tensor([0.125, 0.125]), torch.tensor([1.0, -1.0]))
        tensor([1.4979, 0.6450])
    """
    seen = torch.where(advantages > 0, rate, 1 - rate).double()
    weights = low + (high - low) / (1 + (slope * (seen - centre)).exp())
    return torch.where(rate.isnan() | advantages.isnan(), 0.0, weights).to(rate)


def stage_weight(rate: Tensor, stage: Stage, all_failed: float = 0.25) -> Tensor:
    """What a solve rate counts in a stage of training.

    With c = sin(pi rate): `easy` is c below 1/2 and 1 above, `medium` is c, `hard` is 1 up to 1/2 and c above, and
    `all_failed` for a rate of 0.

    Source: online difficulty soft weighting of VL-Cogito, Yuan et al. 2025, arXiv:2507.22607, as implemented.

    Example:
        >>> stage_weight(torch.tensor([0.0, 0.25, 0.75]), "hard")
        tensor([0.2500, 1.0000, 0.7071])
    """
    check_choice("stage", stage, Stage)
    # At a rate of 1 exactly 0, which pi in floating point misses.
    curve = torch.where((rate > TOLERANCE) & (rate < 1 - TOLERANCE), (rate.double() * math.pi).sin(), 0.0)
    if stage == "easy":
        curve = torch.where(rate > 0.5 + TOLERANCE, 1.0, curve)
    if stage == "hard":
        curve = torch.where(rate <= 0.5 + TOLERANCE, 1.0, curve)
        curve = torch.where(rate.abs() <= TOLERANCE, all_failed, curve)
    return torch.where(rate.isnan(), 0.0, curve).to(rate)


def entropy_share(
    entropies: Tensor,
    response_mask: Tensor,
    group: Tensor,
    solved: Tensor,
    amount: float,
    *,
    num_groups: int | None = None,
) -> Tensor:
    """1 + amount * share * count of each valid token, (N, L): how a token's entropy stands at its place in its group.

    Of the solved responses of the group that reach the place, `count` many, the share is H / sum of H; of the failed
    ones it is (1 / H) / sum of 1 / H. The shares of a place sum to 1, so that its weights have the mean 1 + amount.

    Source: GTPO, Tan et al. 2025, arXiv:2508.04349, equations 4 and 6 with alpha_1 = 1, as third parties note them.

    Args:
        entropies: (N, L), >= 0.
        response_mask: (N, L) bool; what stands elsewhere is not read.
        group: (N,) dense group index.
        solved: (N,) bool.
        amount: alpha_2 in the paper.
        num_groups: Where it is known, an accelerator is not waited for.

    Example:
        >>> entropies, ones = torch.tensor([[3.0], [1.0]]), torch.ones(2, 1, dtype=torch.bool)
        >>> entropy_share(entropies, ones, torch.zeros(2).long(), torch.tensor([True, True]), 0.1)
        tensor([[1.1500],
                [1.0500]])
    """

    def among(entropies: Tensor, valid: Tensor, solved: Tensor, side: Tensor, num_sides: int) -> Tensor:
        # Where every entropy is 0 all have an equal share.
        exact = as_float(masked(entropies, valid)).clamp_(min=SMALLEST, max=FLOAT_MAX).double()
        inverse = (exact + ENTROPY_EPS).reciprocal_()
        counted = valid.double()
        size = torch.where(solved[:, None], exact, inverse).mul_(counted)
        none = size.new_zeros(num_sides, size.shape[1])
        total, count = none.index_add(0, side, size), none.index_add_(0, side, counted)
        share = size.mul_(by_sample(amount * count / total, side))
        return masked(share.add_(1).float(), valid)

    side = group * 2 + solved
    if entropies.device.type != "cpu":
        if num_groups is None:
            num_groups = int(group.max()) + 1 if len(group) else 0
        return among(entropies, response_mask, solved, side, 2 * num_groups)
    # The solved responses of a group, or its failed ones, together; a few groups at a time.
    order = torch.argsort(side, stable=True)
    index, sizes = torch.unique_consecutive(side[order], return_inverse=True, return_counts=True)[1:]
    result = empty(tuple(entropies.shape), torch.float32)
    for rows in whole_slices(sizes.tolist(), entropies.shape[1]):
        some, here = order[rows], index[rows] - index[rows.start]
        table, mask, sides = (each.index_select(0, some) for each in (entropies, response_mask, solved))
        result.index_copy_(0, some, among(table, mask, sides, here, int(here[-1]) + 1))
    return result


def length_power(lengths: Tensor, power: float) -> Tensor:
    """length^power; 0 for an empty response.

    With power 1 a mean over each response's tokens becomes their sum, which takes the length out of the loss of GRPO as
    Dr. GRPO does (Liu et al. 2025, arXiv:2503.20783, section 3.1); with power -1 a mean over all tokens becomes one of
    responses.

    Example:
        >>> length_power(torch.tensor([4, 1, 0]), -1.0)
        tensor([0.2500, 1.0000, 0.0000])
    """
    return torch.where(lengths > 0, lengths.double().pow(power), 0.0).float()


def focal(rate: Tensor, gamma: float = 2.0) -> Tensor:
    """(1 - rate)^gamma; NaN gets 0.

    Source: by analogy with the focal loss, Lin et al. 2017, arXiv:1708.02002.

    Example:
        >>> focal(torch.tensor([0.0, 0.5, 1.0]))
        tensor([1.0000, 0.2500, 0.0000])
    """
    return torch.where(rate.isnan(), 0.0, (1 - rate).clamp(min=0).pow(gamma))


def truncated(ratio: Tensor, cap: float = 2.0) -> Tensor:
    """min(ratio, cap): truncated importance sampling.

    Source: Ionides 2008, "Truncated importance sampling"; for rollouts of another engine Yao et al. 2025, "Your
    efficient RL framework secretly brings you off-policy RL training".

    Example:
        >>> truncated(torch.tensor([0.5, 3.0]))
        tensor([0.5000, 2.0000])
    """
    return by_rows(lambda rows: without_nan(rows.clamp(max=cap)), ratio)


def masked_ratio(ratio: Tensor, low: float, high: float) -> Tensor:
    """The ratio inside of [low, high], and 0 outside: masked importance sampling, which drops what it does not trust.

    Example:
        >>> masked_ratio(torch.tensor([0.5, 1.1, 3.0]), 0.8, 2.0)
        tensor([0.0000, 1.1000, 0.0000])
    """

    def inside(rows: Tensor) -> Tensor:
        return compared(operator.ge, rows, low - TOLERANCE) & compared(operator.le, rows, high + TOLERANCE)

    return by_rows(lambda rows: masked(rows, inside(rows)), ratio)
