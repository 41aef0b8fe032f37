"""Scores on a common scale, so that several make one. NaN stays NaN and enters no statistic."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def percentile_rank(scores: Tensor) -> Tensor:
    """Share of the others that lie below a score, equal ones counted half, in [0, 1]; 1/2 for one alone.

    Example:
        >>> percentile_rank(torch.tensor([3.0, 1.0, 1.0, torch.nan]))
        tensor([1.0000, 0.2500, 0.2500,    nan])
    """
    valid = ~scores.isnan()
    values = scores[valid]
    result = torch.full_like(scores, torch.nan)
    if len(values) == 1:
        result[valid] = 0.5
    elif len(values):
        ordered = values.sort().values
        below = torch.searchsorted(ordered, values)
        not_above = torch.searchsorted(ordered, values, right=True)
        result[valid] = ((below + not_above - 1).double() / 2 / (len(values) - 1)).to(scores)
    return result


def standardised(scores: Tensor) -> Tensor:
    """(s - mean) / std with the population's standard deviation; 0 where all are equal.

    An infinite score is the end of the others' range, where a mean would leave nothing but NaN.

    Args:
        scores: (N,).

    Example:
        >>> standardised(torch.tensor([1.0, 3.0, torch.nan]))
        tensor([-1.,  1., nan])
    """
    valid = ~scores.isnan()
    exact = scores[valid].double()
    result = torch.full_like(scores, torch.nan)
    if not len(exact):
        return result
    finite = exact[exact.isfinite()]
    exact = exact.clamp(finite.min(), finite.max()) if len(finite) else exact.sign()
    # Within -1..1, so that no square overflows, and none is lost.
    centred = exact - exact.mean()
    centred = centred / centred.abs().max()
    equal = exact.max() - exact.min() <= 1e-12 * exact.abs().max()
    result[valid] = torch.where(equal, 0.0, centred / centred.square().mean().sqrt()).to(scores)
    return result


def weighted_sum(parts: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The sum of scores of one shape, each times its weight; a part of weight 0 counts nothing, infinite or not.

    Example:
        >>> weighted_sum([torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])], [1.0, 0.5])
        tensor([ 6., 12.])
    """
    terms = [torch.where(part.isnan() | (weight != 0), part * weight, 0.0) for part, weight in zip(parts, weights)]
    return torch.stack(terms).sum(0)


def product(parts: Sequence[Tensor]) -> Tensor:
    """The product of scores of one shape; 0 times infinity is NaN.

    Example:
        >>> product([torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])])
        tensor([10., 40.])
    """
    return torch.stack(list(parts)).prod(0)
