"""The ranks' rows become the global batch."""

from __future__ import annotations

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


def any_rank(flag: bool, device: torch.device | None = None) -> bool:
    """Whether the flag is set on some rank. A collective.

    Example:
        >>> any_rank(True)
        True
    """
    if num_ranks() == 1:
        return flag
    highest = torch.tensor(int(flag), device=device)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    return bool(highest)
