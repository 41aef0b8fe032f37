"""Statistics of groups of samples, over the whole batch at once.

A group is named by a dense index: `group` (N,) int64 in [0, num_groups). Sums run in float64, so that a
group's statistic does not depend on the order of its samples, and no function loops over groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_dataflex.functional.blocks import masked
from lightning_dataflex.functional.comparing import is_finite

TOLERANCE = 1e-6
"""Two rewards, or a score and a threshold, that differ by no more than this are the same number."""


def group_index(ids: Tensor) -> tuple[Tensor, int]:
    """Dense index of each id, and the number of distinct ids.

    Args:
        ids: (N,) integers of any size and order.

    Returns:
        `group` (N,) int64 in [0, num_groups), and `num_groups`.

    Example:
        >>> group_index(torch.tensor([70, 7, 70]))
        (tensor([1, 0, 1]), 2)
    """
    countable = len(ids) > 0 and not ids.is_floating_point() and ids.dtype != torch.bool
    if countable and ids.min() == 0 and ids.max() < len(ids) and torch.bincount(ids).all():
        # A dense index already, which a sort would give back in ten times the time.
        return ids.long(), int(ids.max()) + 1
    distinct, group = torch.unique(ids, return_inverse=True)
    return group, distinct.numel()


def by_sample(values: Tensor, group: Tensor) -> Tensor:
    """What is known of each group, (num_groups, ...), for each sample: `values[group]` in a quarter of the time.

    Example:
        >>> by_sample(torch.tensor([0.5, 1.0]), torch.tensor([1, 0, 1]))
        tensor([1.0000, 0.5000, 1.0000])
    """
    return values.index_select(0, group)


def group_sum(values: Tensor, group: Tensor, num_groups: int, valid: Tensor) -> Tensor:
    """Sum of the valid values of each group, float64 (num_groups,); an empty group sums to 0.

    Example:
        >>> valid = torch.tensor([True, True, False])
        >>> group_sum(torch.tensor([1.0, 2.0, torch.nan]), torch.tensor([0, 0, 1]), 2, valid)
        tensor([3., 0.], dtype=torch.float64)
    """
    exact = masked(values, valid).double()
    return exact.new_zeros(num_groups).index_add_(0, group, exact)


def group_size(group: Tensor, num_groups: int, valid: Tensor) -> Tensor:
    """Number of valid samples of each group, float64 (num_groups,).

    Example:
        >>> group_size(torch.tensor([0, 0, 1]), 2, torch.tensor([True, True, False]))
        tensor([2., 0.], dtype=torch.float64)
    """
    counted = valid.double()
    return counted.new_zeros(num_groups).index_add_(0, group, counted)


def group_mean(values: Tensor, group: Tensor, num_groups: int, valid: Tensor) -> Tensor:
    """Mean of the valid values of each group, float64 (num_groups,); NaN for an empty group.

    Example:
        >>> group_mean(torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0, 0, 1]), 2, torch.tensor([True, True, False]))
        tensor([0.5000,    nan], dtype=torch.float64)
    """
    return group_sum(values, group, num_groups, valid) / group_size(group, num_groups, valid)


def group_std(values: Tensor, group: Tensor, num_groups: int, valid: Tensor, *, correction: int = 1) -> Tensor:
    """Standard deviation of the valid values of each group, float64 (num_groups,).

    Args:
        correction: 1 for the sample estimate, 0 for that of the population. A group of at most `correction`
            samples has a deviation of 0, not NaN.

    Example:
        >>> group_std(torch.tensor([1.0, 0.0, 5.0]), torch.tensor([0, 0, 1]), 2, torch.tensor([True, True, True]))
        tensor([0.7071, 0.0000], dtype=torch.float64)
    """
    return group_mean_and_std(values, group, num_groups, valid, correction=correction)[1]


def group_mean_and_std(
    values: Tensor, group: Tensor, num_groups: int, valid: Tensor, *, correction: int = 1
) -> tuple[Tensor, Tensor]:
    """`group_mean` and `group_std` in fewer passes.

    Example:
        >>> valid = torch.tensor([True, True, True])
        >>> group_mean_and_std(torch.tensor([1.0, 0.0, 5.0]), torch.tensor([0, 0, 1]), 2, valid, correction=0)
        (tensor([0.5000, 5.0000], dtype=torch.float64), tensor([0.5000, 0.0000], dtype=torch.float64))
    """
    size = group_size(group, num_groups, valid)
    mean = group_sum(values, group, num_groups, valid) / size
    squares = group_sum((values.double() - by_sample(mean, group)).square(), group, num_groups, valid)
    return mean, torch.where(size > correction, squares / (size - correction), 0.0).sqrt()


def group_spread(values: Tensor, group: Tensor, num_groups: int, valid: Tensor) -> Tensor:
    """Largest minus smallest valid value of each group, float64 (num_groups,); 0 for an empty group.

    The spread is exact where a standard deviation is not: that of three rewards of 0.1 is 1.4e-17.

    Example:
        >>> group_spread(torch.tensor([0.1, 0.1, 0.1]), torch.tensor([0, 0, 0]), 1, torch.tensor([True] * 3))
        tensor([0.], dtype=torch.float64)
    """
    values = values if values.is_floating_point() else values.double()
    high = values.new_full((num_groups,), -torch.inf)
    low = values.new_full((num_groups,), torch.inf)
    high.scatter_reduce_(0, group, torch.where(valid, values, -torch.inf), "amax")
    low.scatter_reduce_(0, group, torch.where(valid, values, torch.inf), "amin")
    return torch.where(high >= low, high.double() - low.double(), 0.0)


def group_differs(values: Tensor, group: Tensor, num_groups: int, valid: Tensor) -> Tensor:
    """Whether the valid values of each group are not all the same number, (num_groups,) bool: whether it has a signal.

    They differ when their spread is more than `TOLERANCE`, or that share of the largest where it is above 1: sums of
    the same parts in another order are equal but for the rounding of their size.

    Example:
        >>> rewards = torch.tensor([0.1, 0.1, 1.0, 0.0, 100.40000153, 100.40000916])
        >>> group_differs(rewards, torch.tensor([0, 0, 1, 1, 2, 2]), 3, torch.tensor([True] * 6))
        tensor([False,  True, False])
    """
    values = values if values.is_floating_point() else values.double()
    size = masked(values, valid & is_finite(values)).abs()
    largest = size.new_ones(num_groups).scatter_reduce_(0, group, size, "amax")
    return group_spread(values, group, num_groups, valid) > TOLERANCE * largest.double()


def group_order(values: Tensor, group: Tensor, *, descending: bool = False) -> Tensor:
    """The samples group by group, those of a group by value: (N,) int64 indices of samples.

    Of equal values the earlier sample comes first, and NaN last.

    Example:
        >>> group_order(torch.tensor([3.0, 1.0, 3.0, 2.0]), torch.tensor([0, 0, 1, 0]))
        tensor([1, 3, 0, 2])
    """
    size = torch.bincount(group)
    widest, exact = int(size.max()) if len(size) else 0, -values.double() if descending else values.double()
    if len(size) * widest > 2 * len(group):
        # Groups of very different sizes: a table of them would be mostly empty.
        by_value = torch.argsort(exact, stable=True)
        return by_value[torch.argsort(group[by_value], stable=True)]
    start = (size.cumsum(0) - size)[:, None]
    together = bool((group[1:] >= group[:-1]).all())
    if together and len(size) * widest == len(group):
        return (start + torch.argsort(exact.view(len(size), widest), dim=1, stable=True)).flatten()
    by_group = torch.arange(len(group), device=group.device) if together else torch.argsort(group, stable=True)
    inside = torch.arange(widest, device=group.device) < size[:, None]
    table = exact.new_full(inside.shape, torch.nan).masked_scatter_(inside, exact[by_group])
    return by_group[(start + torch.argsort(table, dim=1, stable=True))[inside]]


def group_rank(values: Tensor, group: Tensor, *, descending: bool = False) -> Tensor:
    """Place of each value among those of its group, (N,) int64 from 0; see `group_order`.

    Example:
        >>> group_rank(torch.tensor([3.0, 1.0, 3.0, 2.0]), torch.tensor([0, 0, 0, 1]), descending=True)
        tensor([0, 2, 1, 0])
    """
    order = group_order(values, group, descending=descending)
    size = torch.bincount(group)
    place = torch.arange(len(order), device=group.device) - by_sample(
        size.cumsum(0) - size, group.index_select(0, order)
    )
    return torch.empty_like(place).scatter_(0, order, place)
