"""The ranks' rows become the global batch: the collectives, on tensors alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dataflex.packing import Columns, ends, joined, packed, unpacked_rows

Group = Any
"""A `torch.distributed.ProcessGroup`; None for all ranks."""


def num_ranks(group: Group = None) -> int:
    """Number of processes that train together; 1 without a process group.

    Example:
        >>> num_ranks()
        1
    """
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def own_rank(group: Group = None) -> int:
    """The place of this process among those that train together; 0 without a process group.

    Example:
        >>> own_rank()
        0
    """
    return dist.get_rank(group) if num_ranks(group) > 1 else 0


def mean_over_ranks(value: Tensor, group: Group = None, what: str = "a mean") -> Tensor:
    """Mean of a tensor over ranks, the same on each. A collective; the identity on one process.

    Args:
        value: This rank's.
        group: The ranks that take part. Default: all.
        what: The name of the value, for the error where another rank does not answer.

    Raises:
        RuntimeError: Another rank has stopped, or does not answer within the timeout of the group.

    Example:
        >>> mean_over_ranks(torch.tensor(3.0))
        tensor(3.)
    """
    if num_ranks(group) == 1:
        return value
    total = value.detach().to(wire(value.device, group), torch.float64, copy=True)
    with _among_ranks(what):
        dist.all_reduce(total, group=group)
    return (total / num_ranks(group)).to(value)


def exchanged(
    own: Callable[[], tuple[Columns, int]], group: Group = None, what: str = "samples"
) -> tuple[dict[str, Any], slice]:
    """The rows of all ranks, one rank after the other, and where this rank's are among them.

    Two collectives, whatever the columns: the sizes, then everything packed into one tensor of bytes. Ranks may
    differ in rows, widths and number types, and may have no row. A column that some rank does not have is left out.

    Args:
        own: Gives this rank's columns, (N, ...) tensors or lists of anything that can be pickled, and its N. If it
            fails on one rank, every rank raises: none is left waiting for the others.
        group: The ranks that take part. Default: all.
        what: The name of what is exchanged, for the error where another rank does not answer.

    Raises:
        RuntimeError: `own` failed on another rank; where it failed on this one, its own error is raised. Or another
            rank has stopped, or does not answer within the timeout of the group.

    Example:
        >>> exchanged(lambda: ({"reward": torch.tensor([1.0, 0.0])}, 2))
        ({'reward': tensor([1., 0.])}, slice(0, 2, None))
    """
    if num_ranks(group) == 1:
        columns, num_rows = own()
        return dict(columns), slice(0, num_rows)
    failure: Exception | None = None
    device = torch.device("cpu")
    try:
        columns, num_rows = own()
        block = packed(columns, num_rows)
        device = block.device
    except Exception as error:
        failure = error
        block = packed({}, 0, error=f"{type(error).__name__}: {error}")
    block = block.to(wire(device, group))
    sizes = _all_gather(ends(block)[None], group, what).tolist()
    padded = block.new_zeros(max(total for _, total in sizes))
    padded[: len(block)] = block
    blocks = unpacked_rows(_all_gather(padded[None], group, what).to(device), [end for end, _ in sizes])
    if failure is not None:
        raise failure
    before = rank = 0
    for each in blocks:
        if each.error is not None:
            raise RuntimeError(f"Rank {rank} could not give its part of the global batch. {each.error}")
        before += each.num_rows // each.num_blocks * min(max(dist.get_rank(group) - rank, 0), each.num_blocks)
        rank += each.num_blocks
    return joined(blocks), slice(before, before + num_rows)


def _all_gather(row: Tensor, group: Group, what: str) -> Tensor:
    everyone = row.new_empty(num_ranks(group), *row.shape[1:])
    # The first is the name of the second from PyTorch 2.13 on.
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    row = row.contiguous()
    with _among_ranks(what):
        all_gather(everyone, row, group=group)
    return everyone


@contextmanager
def _among_ranks(what: str) -> Iterator[None]:
    """Say what was going on when a collective fails: torch names an address and a port alone."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"The ranks could not exchange {what}: another rank may have stopped, or does not answer. Look at its log "
            f"first. (On this rank: {str(error).splitlines()[0]})"
        ) from error


def wire(device: torch.device, group: Group) -> torch.device:
    """Where a tensor of this device has to be for the group's backend to take it.

    Example:
        >>> wire(torch.device("cpu"), None)
        device(type='cpu')
    """
    if not (dist.is_available() and dist.is_initialized()):
        return device
    backend = dist.get_backend(group)
    if backend == "nccl":
        return device if device.type == "cuda" else torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if backend == "gloo" else device
