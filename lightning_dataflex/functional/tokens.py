"""Numbers of each token as numbers of each sample."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_dataflex.functional.blocks import by_rows, masked, slices
from lightning_dataflex.functional.comparing import is_nan, may_hold_nan
from lightning_dataflex.functional.storage import empty


def token_mean(values: Tensor, response_mask: Tensor | None = None) -> Tensor:
    """Mean over each sample's valid tokens of (N, L) values, or (N,) values as they are; NaN for an empty sample.

    Example:
        >>> token_mean(torch.tensor([[1.0, 3.0, torch.nan]]), torch.tensor([[1, 1, 0]])), token_mean(torch.tensor([2]))
        (tensor([2.]), tensor([2.]))
    """
    if response_mask is None:
        return as_float(values) if values.dim() == 1 else as_float(values).mean(-1)
    length = num_valid(response_mask)
    total = token_sum(values, response_mask, length=length)
    return total if values.dim() == 1 else total / length


def token_sum(values: Tensor, response_mask: Tensor | None = None, *, length: Tensor | None = None) -> Tensor:
    """Sum over each sample's valid tokens of (N, L) values, or (N,) values as they are; NaN for an empty sample.

    Args:
        values: (N, L), or (N,).
        response_mask: (N, L); what stands elsewhere is not read.
        length: (N,) the number of valid tokens, where it is known.

    Example:
        >>> token_sum(torch.tensor([[1.0, 3.0, torch.nan]]), torch.tensor([[1, 1, 0]]))
        tensor([4.])
    """
    if values.dim() == 1:
        total = as_float(values)
    elif response_mask is None:
        total = as_float(values).sum(-1)
    else:
        total = by_rows(lambda v, mask: masked(as_float(v), mask.bool()).sum(-1), values, response_mask)
    if response_mask is None:
        return total
    length = num_valid(response_mask) if length is None else length
    return torch.where(length > 0, total, torch.nan)


def num_valid(response_mask: Tensor) -> Tensor:
    """The number of valid tokens of each sample, (N,) int64.

    Example:
        >>> num_valid(torch.tensor([[1, 1], [0, 0]]))
        tensor([2, 0])
    """
    # A sum of float32, exact up to 2^24 tokens, takes half the time of one of truth values.
    return by_rows(lambda mask: mask.bool().view(torch.int8).float().sum(-1), response_mask).long()


def any_nan(values: Tensor, response_mask: Tensor | None = None) -> Tensor:
    """Whether a sample has NaN among its valid tokens, (N,) bool.

    Args:
        values: (N, L), or any (N, ...) without a mask.
        response_mask: (N, L) bool. Default: all are valid.

    Example:
        >>> any_nan(torch.tensor([[torch.nan, 1.0], [1.0, torch.nan]]), torch.tensor([[True, False], [True, False]]))
        tensor([ True, False])
    """
    tables = (values.flatten(1),) if response_mask is None else (values, response_mask)

    def inside(rows: Tensor, mask: Tensor | None = None) -> Tensor:
        return rows if mask is None else masked(rows, mask)

    # Numbers of one byte have no sum.
    if values.device.type != "cpu" or values.dtype.itemsize == 1:
        return inside(*tables).isnan().any(-1)
    # A sum is NaN for one NaN, and for infinite numbers of both signs.
    odd = is_nan(by_rows(lambda *rows: inside(*rows).sum(-1), *tables))
    return odd & by_rows(lambda *rows: inside(*rows).isnan().any(-1), *tables) if odd.any() else odd


def numbers_inside(values: Tensor, response_mask: Tensor) -> Tensor:
    """The valid tokens (N, L) bool whose value is not NaN.

    Example:
        >>> numbers_inside(torch.tensor([[1.0, torch.nan, 1.0]]), torch.tensor([[1, 1, 0]]))
        tensor([[ True, False, False]])
    """
    valid = response_mask.bool()
    return valid & ~is_nan(values) if may_hold_nan(values) else valid


def flat_values(values: Tensor, mask: Tensor) -> Tensor:
    """A new tensor (M,) of the values where the mask is True, row by row.

    Example:
        >>> flat_values(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[True, False], [True, True]]))
        tensor([1., 3., 4.])
    """
    if values.device.type != "cpu" or values.dtype == torch.bfloat16:
        return values[mask]
    # In a tenth of the time.
    return torch.from_numpy(values.detach().numpy()[mask.numpy()])


def mask_read(response_mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The valid tokens (N, L) bool of a mask of numbers, how many each sample has, (N,) int64, and the least number.

    Args:
        response_mask: (N, L), not empty.

    Example:
        >>> mask_read(torch.tensor([[1, 1], [1, 0]]))
        (tensor([[ True,  True],
                [ True, False]]), tensor([2, 1]), tensor(0))
    """
    if response_mask.device.type != "cpu":
        valid = response_mask.bool()
        return valid, num_valid(valid), response_mask.min()
    valid, lowest, lengths = empty(tuple(response_mask.shape), torch.bool), [], []
    for rows in slices(*response_mask.shape):
        here, inside = response_mask[rows], valid[rows]
        low, high = here.aminmax()
        inside.copy_(here)
        # Of ones and zeros the sum, which takes a third of the time of counting truth values.
        whole = not here.is_floating_point() and high <= 1
        lengths.append(here.sum(-1) if whole else num_valid(inside))
        lowest.append(low)
    return valid, torch.cat(lengths), torch.stack(lowest).min()


def as_float(values: Tensor) -> Tensor:
    """The values in float32, or in float64 if they are that already."""
    return values if values.dtype in (torch.float32, torch.float64) else values.float()
