"""Functions of rows, a few rows at a time: what lies between input and result stays in the processor's cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

BLOCK = 2**18
"""Numbers of a table that are worked on at a time."""
HUGE = 2**22
"""Bytes from which NumPy, unlike PyTorch, asks Linux for huge pages: such memory is there several times sooner."""


def by_rows(function: Callable[..., Tensor], *tables: Tensor) -> Tensor:
    """What a function of each row gives, (N, ...), without intermediate results of the size of the tables.

    Args:
        function: Of so many rows of each table, (n, ...) each, to (n, ...). A row's result depends on that row alone.
        tables: (N, ...) each. On an accelerator, where a block would be too little to do, they are given whole.

    Example:
        >>> by_rows(lambda rewards, mask: torch.where(mask, rewards, 0.0).sum(-1), torch.tensor([[1.0, 2.0]]),
        ...         torch.tensor([[True, False]]))
        tensor([1.])
    """
    num_rows, widest = len(tables[0]), max(table.numel() for table in tables)
    if widest <= BLOCK or any(table.device.type != "cpu" for table in tables):
        return function(*tables)
    size = max(1, BLOCK * num_rows // widest)
    result = None
    for rows in _slices(num_rows, size):
        part = function(*(table[rows] for table in tables))
        if result is None:
            result = empty((num_rows, *part.shape[1:]), part.dtype)
        result[rows] = part
    assert result is not None
    return result


def blank_padding(values: Tensor, mask: Tensor) -> Tensor:
    """The values (N, L), or (N, 1) for all tokens of a sample, with 0 in padding, whatever stood there.

    Example:
        >>> blank_padding(torch.tensor([[0.5, torch.nan]]), torch.tensor([[True, False]]))
        tensor([[0.5000, 0.0000]])
    """
    return by_rows(lambda rows, valid: torch.where(valid, rows, rows.new_zeros(())), values, mask.to(values.device))


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor in main memory for values to come.

    Example:
        >>> empty((2, 3), torch.bfloat16).shape
        torch.Size([2, 3])
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < HUGE:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(np.empty(num_bytes, np.uint8)).view(dtype).view(shape)


def _slices(num_rows: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, num_rows, size))
