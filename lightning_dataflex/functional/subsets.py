"""Which groups stay, and which samples of each group. Every function returns `keep` (N,) bool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from lightning_dataflex.functional.choices import check_choice
from lightning_dataflex.functional.comparing import is_finite, is_nan
from lightning_dataflex.functional.groups import (
    TOLERANCE,
    by_sample,
    group_differs,
    group_mean,
    group_order,
    group_rank,
    group_size,
)
from lightning_dataflex.functional.selection import share

Shares = Literal["linear", "softmax"]


def mixed_groups(scores: Tensor, group: Tensor, num_groups: int) -> Tensor:
    """The groups whose scores are not all equal: see `group_differs`; NaN is none, and neither is an infinite one.

    Source: dynamic sampling of DAPO, Yu et al. 2025, arXiv:2503.14476, equation 11: 0 < correct < G.

    Args:
        scores: (N,) of responses.
        group: (N,) dense group index.

    Example:
        >>> mixed_groups(torch.tensor([0.1, 0.1, 0.1, 1.0, 0.0]), torch.tensor([0, 0, 0, 1, 1]), 2)
        tensor([False, False, False,  True,  True])
    """
    valid = is_finite(scores)
    return valid & by_sample(group_differs(scores, group, num_groups, valid), group)


def top_groups(scores: Tensor, group: Tensor, num_groups: int, fraction: float) -> Tensor:
    """The share of groups with the largest mean scores; of equal ones the group whose first sample comes first.

    Source: uncertainty filtering of RAGEN, Wang et al. 2025, arXiv:2504.20073, section 3.2.

    Args:
        scores: (N,).
        group: (N,) dense group index.
        fraction: In (0, 1], of the groups that have a score; see `share`.

    Example:
        >>> top_groups(torch.tensor([0.1, 0.5, 0.1]), torch.tensor([0, 1, 0]), 2, 0.5)
        tensor([False,  True, False])
    """
    _, order = _ranked_groups(scores, group, num_groups)
    chosen = torch.zeros(num_groups, dtype=torch.bool, device=scores.device)
    chosen[order[: int(share(torch.tensor(len(order)), fraction))]] = True
    return by_sample(chosen, group) & ~is_nan(scores)


def nucleus_groups(scores: Tensor, group: Tensor, num_groups: int, p: float, shares: Shares = "linear") -> Tensor:
    """The fewest groups with the largest mean scores whose shares add up to at least p.

    Source: top-p filtering by reward variance of RAGEN-2 (2026), as documented with its implementation.

    Args:
        scores: (N,), >= 0 for linear shares.
        group: (N,) dense group index.
        p: In (0, 1].
        shares: Of a group: `linear`, its score over the sum of all, where a score of 0 is never kept; or `softmax`.

    Example:
        >>> nucleus_groups(torch.tensor([0.0, 0.2, 0.8]), torch.tensor([0, 1, 2]), 3, 0.9)
        tensor([False,  True,  True])
    """
    check_choice("shares", shares, Shares)
    means, order = _ranked_groups(scores, group, num_groups)
    chosen = torch.zeros(num_groups, dtype=torch.bool, device=scores.device)
    ranked = means[order]
    ranked = torch.softmax(ranked, 0) if shares == "softmax" else ranked.clamp(min=0)
    if shares == "linear":
        order, ranked = order[ranked > TOLERANCE], ranked[ranked > TOLERANCE]
        # Beside an infinite score the others count nothing.
        ranked = torch.where(ranked.isinf().any(), ranked.isinf().double(), ranked)
    total = ranked.sum()
    before = ranked.cumsum(0) - ranked
    chosen[order[before < max(p - 1e-9, 1e-12) * total]] = True
    return by_sample(chosen, group) & ~is_nan(scores)


def _ranked_groups(scores: Tensor, group: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """The mean score of each group, and the groups that have one, best first."""
    valid = ~is_nan(scores)
    means = group_mean(scores, group, num_groups, valid)
    place = torch.arange(len(group), device=group.device)
    first = torch.full((num_groups,), len(group), device=group.device).scatter_reduce_(0, group, place, "amin")
    by_place = torch.argsort(first)
    # In float32, where means that differ by the rounding of their sums are equal.
    order = by_place[torch.argsort(means.float()[by_place], descending=True, stable=True)]
    return means, order[~means[order].isnan()]


def group_top_k(metric: Tensor, group: Tensor, k: int | Tensor, *, valid: Tensor | None = None) -> Tensor:
    """The k samples of each group with the largest metric; of equal ones the earlier stays.

    Source: the selection of GFPO, Shrivastava et al. 2025, arXiv:2508.09726, algorithm 1.

    Args:
        metric: (N,).
        group: (N,) dense group index.
        k: That of all groups, or (N,) that of each sample's group.
        valid: (N,) bool, the samples that may be kept. Default: all. NaN metrics may not.

    Example:
        >>> group_top_k(torch.tensor([-2.0, -8.0, -3.0, -1.0]), torch.tensor([0, 0, 0, 1]), 2)
        tensor([ True, False,  True,  True])
    """
    eligible = ~is_nan(metric) if valid is None else valid & ~is_nan(metric)
    ranked = metric if eligible.all() else torch.where(eligible, metric, torch.nan)
    return eligible & (group_rank(ranked, group, descending=True) < k)


def k_of_difficulty(means: Tensor, seen: Tensor, k: Sequence[int], *, ready_after: int = 4) -> Tensor:
    """How many samples to keep of each group, by where its mean reward lies among those seen.

    Source: adaptive difficulty GFPO, Shrivastava et al. 2025, arXiv:2508.09726. The paper follows the quartiles by a
    t-digest; here they are exact.

    Args:
        means: (num_groups,) mean rewards.
        seen: Those of the groups so far, these included.
        k: Of very hard, hard, medium and easy groups: below the first, second, third quartile, and from there on.
        ready_after: As long as fewer were seen, every group counts as very hard.

    Example:
        >>> seen = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0, 0.6])
        >>> k_of_difficulty(torch.tensor([0.6]), seen, [8, 8, 6, 4])
        tensor([6])
    """
    choices = torch.tensor(list(k), dtype=torch.int64)
    if len(seen) < ready_after:
        return choices[:1].expand(len(means))
    quartiles = torch.quantile(seen.double(), torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64))
    return choices[(means.double()[:, None] >= quartiles - TOLERANCE).sum(1)]


def pruned(scores: Tensor, group: Tensor, rate: float) -> Tensor:
    """All but the int(n * rate) smallest of the n scores of each group; of equal ones the later go.

    Source: CPPO, Lin et al. 2025, arXiv:2503.22342.

    Args:
        scores: (N,), |advantages| in the paper.
        group: (N,) dense group index.

    Example:
        >>> pruned(torch.tensor([3.0, 1.0, 2.0]), torch.zeros(3).long(), 0.5)
        tensor([ True, False,  True])
    """
    eligible = ~is_nan(scores)
    size = group_size(group, int(group.max()) + 1 if len(group) else 0, eligible).long()
    num_pruned = (size.double() * rate + TOLERANCE).floor().long()
    num_kept = torch.maximum(size - num_pruned, size.clamp(max=1))
    return group_top_k(scores, group, by_sample(num_kept, group), valid=eligible)


def max_variance(rewards: Tensor, group: Tensor, keep_fraction: float, *, valid: Tensor | None = None) -> Tensor:
    """The subset of each group whose rewards vary most.

    The best subset of n is the i lowest and the n - i highest rewards for some i, so that trying every i
    finds it. Here the groups of one size, and every i, are tried at once, from prefix sums.

    Source: PODS, Xu et al. 2025, arXiv:2504.13818, theorem 3.1.

    Args:
        rewards: (N,).
        group: (N,) dense group index.
        keep_fraction: in (0, 1]; `share` says how many that is of each group's valid samples.
        valid: (N,) bool, the samples that may be kept. Default: all. Rewards that are not finite may not.

    Example:
        >>> max_variance(torch.tensor([0.0, 0.0, 0.0, 1.0, 1.1, 1.2, 5.0]), torch.zeros(7).long(), 3 / 7)
        tensor([ True,  True, False, False, False, False,  True])
    """
    eligible = is_finite(rewards) if valid is None else valid & is_finite(rewards)
    index = eligible.nonzero().flatten()
    keep = torch.zeros_like(eligible)
    # Group by group, and in each by reward.
    order = index[group_order(rewards[index], group[index])]
    sizes = torch.bincount(group[index])
    starts = sizes.cumsum(0) - sizes
    # Groups of one size are a table. There are few sizes: that of N samples is at most the root of 2 N.
    for size in torch.unique(sizes[sizes > 0]).tolist():
        rows = order[starts[sizes == size][:, None] + torch.arange(size, device=order.device)]
        num = int(share(torch.tensor(size), keep_fraction))
        keep[rows] = _most_varied(rewards[rows].double(), num)
    return keep


def _most_varied(values: Tensor, num: int) -> Tensor:
    """The `num` of each ascending row that vary most, as low as they may be; of equal values the first."""
    width = values.shape[1]
    # Within -1..1 in every row, so that a large reward takes no digits from its variance.
    spread = values[:, -1:] - values[:, :1]
    centred = torch.where(spread > 0, (values - values[:, width // 2, None]) / spread, 0.0)

    def mean(x: Tensor) -> Tensor:
        """Of the i lowest and the num - i highest, for each i."""
        prefix = torch.nn.functional.pad(x.cumsum(1), (1, 0))
        return (prefix[:, : num + 1] + prefix[:, -1:] - prefix[:, width - num :]) / num

    variance = mean(centred.square()) - mean(centred).square()
    # Not as a share of the best: that of a subset of one is 0 but for rounding.
    tied = variance >= variance.amax(1, keepdim=True) - 1e-9
    place = torch.arange(width, device=values.device)
    num_low = (tied * torch.arange(num + 1, device=values.device)).amax(1, keepdim=True)
    at_the_ends = (place < num_low) | (place >= width - num + num_low)
    return _earliest_of_equals(values, at_the_ends)


def _earliest_of_equals(values: Tensor, keep: Tensor) -> Tensor:
    """The same values of each row kept, but among equal ones, which stand together, the first."""
    place = torch.arange(values.shape[1], device=values.device)
    starts = torch.nn.functional.pad(values[:, 1:] != values[:, :-1], (1, 0), value=True)
    first = torch.where(starts, place, 0).cummax(1).values
    num_kept = torch.zeros_like(first).scatter_add_(1, first, keep.long())
    return place - first < num_kept.gather(1, first)
