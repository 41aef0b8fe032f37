"""Which samples stay. Every function returns `keep`, a boolean per sample (or token); a NaN score is never kept."""

from __future__ import annotations

import operator

import torch
from torch import Tensor

from lightning_dataflex.functional.blocks import by_rows
from lightning_dataflex.functional.comparing import compared, is_nan
from lightning_dataflex.functional.groups import TOLERANCE
from lightning_dataflex.functional.tokens import flat_values, numbers_inside
from lightning_dataflex.functional.weighting import order_statistics, quantile, quantile_inside


def in_band(scores: Tensor, low: float, high: float, *, closed: bool = False) -> Tensor:
    """Scores inside the band: low < s < high, or low <= s <= high when closed.

    Comparisons carry a tolerance of 1e-6: a score that close to a threshold is on it.

    Source: DAPO, Yu et al. 2025, arXiv:2503.14476 (the open band 0..1 on solve rates); online difficulty
    filtering, Bae et al. 2025, arXiv:2504.03380.

    Args:
        scores: any shape.

    Example:
        >>> in_band(torch.tensor([0.0, 0.2, 0.5, torch.nan]), 0.2, 0.8)
        tensor([False, False,  True, False])
        >>> in_band(torch.tensor([0.0, 0.2, 0.5, torch.nan]), 0.2, 0.8, closed=True)
        tensor([False,  True,  True, False])
    """
    margin = -TOLERANCE if closed else TOLERANCE

    def inside(rows: Tensor) -> Tensor:
        return compared(operator.gt, rows, low + margin) & compared(operator.lt, rows, high - margin)

    return by_rows(inside, scores)


def at_least(scores: Tensor, threshold: float, *, strict: bool = False) -> Tensor:
    """Scores of at least the threshold, or above it when strict; a score within 1e-6 of it is on it.

    Example:
        >>> at_least(torch.tensor([0.5, 0.6, 0.7, torch.nan]), 0.6)
        tensor([False,  True,  True, False])
    """
    limit = threshold + (TOLERANCE if strict else -TOLERANCE)
    return by_rows(lambda rows: compared(operator.gt, rows, limit), scores)


def top_fraction(scores: Tensor, fraction: float, *, largest: bool = True, valid: Tensor | None = None) -> Tensor:
    """The share of samples with the largest (or smallest) scores; of equal scores the earlier sample stays.

    Args:
        scores: (N,).
        fraction: in (0, 1]; `share` says how many that is of the valid samples.
        valid: (N,) bool, the samples that the fraction is a fraction of. Default: all.

    Example:
        >>> top_fraction(torch.tensor([0.1, torch.nan, 0.9, 0.3]), 0.5)
        tensor([False, False,  True,  True])
    """
    valid = torch.ones_like(scores, dtype=torch.bool) if valid is None else valid
    eligible = valid & ~is_nan(scores)
    return top(torch.where(eligible, scores, torch.nan), int(share(valid.sum(), fraction)), largest=largest)


def top(scores: Tensor, num: int, *, largest: bool = True) -> Tensor:
    """The `num` largest (or smallest) scores; of equal ones the earlier stays, NaN never.

    Args:
        scores: (N,).

    Example:
        >>> top(torch.tensor([0.9, torch.nan, 0.5, 0.5]), 2)
        tensor([ True, False,  True, False])
    """
    values = flat_values(scores, ~is_nan(scores))
    num = min(num, len(values))
    if not num:
        return torch.zeros_like(scores, dtype=torch.bool)
    (limit,) = order_statistics(values, [len(values) - num if largest else num - 1], overwrite_input=True)
    inside = scores > limit if largest else scores < limit
    # The earliest of those on the limit fill up what is left.
    on_it = scores == limit
    return inside | (on_it & (on_it.cumsum(0) <= num - inside.sum()))


def share(count: Tensor, fraction: float) -> Tensor:
    """`fraction` of `count` in whole samples, int64: rounded to nearest, halves up, at least 1 where there is any.

    Example:
        >>> share(torch.tensor([5, 4, 1, 0]), 0.5)
        tensor([3, 2, 1, 0])
    """
    rounded = (count.double() * fraction + 0.5 + TOLERANCE).floor().long()
    return torch.minimum(rounded.clamp(min=1), count.long())


def nearest_to(scores: Tensor, target: float, num: int) -> Tensor:
    """(N,) bool: the `num` scores nearest to the target; of equally near ones the earlier stays, NaN never.

    Source: MoPPS, arXiv:2507.04632.

    Example:
        >>> nearest_to(torch.tensor([0.9, 0.55, 0.2, 0.48, 0.5]), 0.5, 3)
        tensor([False,  True, False,  True,  True])
    """
    # On a grid, so that 0.4 and 0.6 are as near to 0.5.
    return top(((scores.double() - target).abs() / TOLERANCE).round(), num, largest=False)


def top_tokens(scores: Tensor, response_mask: Tensor, fraction: float) -> Tensor:
    """(N, L) bool: the valid tokens whose score is at least the 1 - fraction quantile of all valid tokens.

    Equal scores at the quantile all stay, more than the fraction; that of equal scores everywhere keeps everything.

    Source: Wang et al. 2025, "Beyond the 80/20 rule", arXiv:2506.01939, with entropies as scores and a fraction of 0.2.

    Args:
        scores: (N, L).
        response_mask: (N, L); what stands elsewhere is not read.
        fraction: In (0, 1].

    Example:
        >>> top_tokens(torch.tensor([[0.1, 2.0, 0.3, 9.9]]), torch.tensor([[1, 1, 1, 0]]), 0.2)
        tensor([[False,  True, False, False]])
    """
    valid = by_rows(numbers_inside, scores, response_mask)
    if scores.device.type != "cpu":
        lowest = quantile_inside(scores, valid, 1 - fraction)
    elif len(values := flat_values(scores, valid)):
        lowest = quantile(values, 1 - fraction, overwrite_input=True)
    else:
        return torch.zeros_like(valid)
    lowest = lowest.to(scores.dtype)
    return by_rows(lambda inside, rows: inside & compared(operator.ge, rows, lowest), valid, scores)
