"""Numbers of each token as numbers of each sample."""

from __future__ import annotations

import torch
from torch import Tensor


def token_mean(values: Tensor, response_mask: Tensor | None = None) -> Tensor:
    """Mean over each sample's valid tokens of (N, L) values, or (N,) values as they are; NaN for an empty sample.

    Example:
        >>> token_mean(torch.tensor([[1.0, 3.0, torch.nan]]), torch.tensor([[1, 1, 0]])), token_mean(torch.tensor([2]))
        (tensor([2.]), tensor([2.]))
    """
    values = as_float(values)
    if response_mask is None:
        return values if values.dim() == 1 else values.mean(-1)
    length = response_mask.bool().sum(-1)
    if values.dim() == 1:
        return torch.where(length > 0, values, torch.nan)
    return torch.where(response_mask.bool(), values, 0.0).sum(-1) / length


def token_sum(values: Tensor, response_mask: Tensor | None = None) -> Tensor:
    """Sum over each sample's valid tokens, (N,); NaN for an empty sample.

    Example:
        >>> token_sum(torch.tensor([[1.0, 3.0, torch.nan]]), torch.tensor([[1, 1, 0]]))
        tensor([4.])
    """
    if response_mask is None:
        return as_float(values).sum(-1)
    valid = response_mask.bool()
    return torch.where(valid.any(-1), torch.where(valid, as_float(values), 0.0).sum(-1), torch.nan)


def as_float(values: Tensor) -> Tensor:
    """The values in float32, or in float64 if they are that already."""
    return values if values.dtype in (torch.float32, torch.float64) else values.float()
