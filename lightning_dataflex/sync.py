"""The ranks' rows become the global batch: the collectives, on tensors alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def num_ranks() -> int:
    """Number of processes that train together; 1 without a process group.

    Example:
        >>> num_ranks()
        1
    """
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def mean_over_ranks(value: Tensor) -> Tensor:
    """Mean of a tensor over ranks, the same on each. A collective; the identity on one process.

    Example:
        >>> mean_over_ranks(torch.tensor(3.0))
        tensor(3.)
    """
    if num_ranks() == 1:
        return value
    total = value.detach().double().clone()
    dist.all_reduce(total)
    return (total / num_ranks()).to(value.dtype)


def gathered(columns: Mapping[str, Tensor], num_rows: int) -> tuple[dict[str, Tensor], slice]:
    """The rows of all ranks, one rank after the other, and where this rank's are among them.

    Two collectives: the sizes, then all columns packed into one tensor. Every rank calls it with the same
    columns in the same order; ranks may differ in rows, and may have none.

    Args:
        columns: (N,) or (N, L) each, of numbers or booleans; every column has an L of its own.
        num_rows: N of this rank.

    Returns:
        The columns, L being the largest of any rank and filled up with zeros, and this rank's rows.

    Example:
        >>> gathered({"reward": torch.tensor([1.0, 0.0])}, num_rows=2)
        ({'reward': tensor([1., 0.])}, slice(0, 2, None))
    """
    if num_ranks() == 1:
        return dict(columns), slice(0, num_rows)
    device = next(iter(columns.values())).device
    widths = [column.shape[1] if column.dim() == 2 else 1 for column in columns.values()]
    sizes = _all_gather(torch.tensor([[num_rows, *widths]], device=device))
    most, *widest = sizes.max(0).values.tolist()
    packed = torch.cat([_as_bytes(column, most, width) for column, width in zip(columns.values(), widest)], dim=1)
    everyone = _all_gather(packed).unflatten(0, (num_ranks(), most))
    rows = torch.cat([block[:count] for block, count in zip(everyone, sizes[:, 0].tolist())])
    result = {}
    for (name, column), part in zip(columns.items(), rows.split([8 * width for width in widest], dim=1)):
        values = part.contiguous().view(_wire_type(column)).to(column.dtype)
        result[name] = values if column.dim() == 2 else values[:, 0]
    before = int(sizes[: dist.get_rank(), 0].sum())
    return result, slice(before, before + num_rows)


def gathered_objects(values: list[Any]) -> list[Any]:
    """The values of all ranks, one rank after the other, of any type that can be pickled: slow.

    Example:
        >>> gathered_objects(["math", "code"])
        ['math', 'code']
    """
    if num_ranks() == 1:
        return list(values)
    lists: list[list[Any]] = [[] for _ in range(num_ranks())]
    dist.all_gather_object(lists, list(values))
    return [value for each in lists for value in each]


def _all_gather(rows: Tensor) -> Tensor:
    everyone = rows.new_empty(num_ranks() * len(rows), *rows.shape[1:])
    dist.all_gather_into_tensor(everyone, rows.contiguous())
    return everyone


def _as_bytes(column: Tensor, num_rows: int, width: int) -> Tensor:
    """(num_rows, 8 width) bytes, each number in eight."""
    table = column.to(_wire_type(column)).reshape(len(column), column.shape[1] if column.dim() == 2 else 1)
    padded = table.new_zeros(num_rows, width)
    padded[: len(table), : table.shape[1]] = table
    return padded.view(torch.uint8)


def _wire_type(column: Tensor) -> torch.dtype:
    return torch.float64 if column.is_floating_point() else torch.int64
