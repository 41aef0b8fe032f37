"""Columns of samples as one tensor of bytes, which says itself what it holds: what travels between ranks.

A block is a prefix of two int64 (the ends of the header and of the block, in bytes), a header in JSON, and the columns
one after the other in their own types. Blocks may be joined by concatenation.
"""

from __future__ import annotations

import functools
import itertools
import json
import pickle
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_dataflex.core.numbers import plain_array

Columns = Mapping[str, "Tensor | np.ndarray | Sequence[Any]"]
"""One entry per sample each: a tensor or array (N, ...), or a list of what can be pickled. Each keeps its type."""

ALIGNMENT = 8
"""Every column starts at a multiple of this, as the widest number type needs."""
PREFIX = 16


class Block(NamedTuple):
    """What some samples' bytes held: their number, and their columns; or the error that took their place.

    Blocks with the same header are read as one: `num_blocks` says how many, of `num_rows // num_blocks` samples each.
    """

    num_rows: int
    columns: dict[str, Any]
    error: str | None = None
    num_blocks: int = 1


def packed(columns: Columns, num_rows: int, *, error: str | None = None, source: str = "") -> Tensor:
    """The block of these columns, on the device of the first tensor among them.

    Args:
        columns: What it holds.
        num_rows: N.
        error: What to tell in place of columns.
        source: What the columns were made by: blocks of different sources are different.

    Example:
        >>> block = packed({"uid": torch.tensor([7, 8]), "domain": ["math", "code"]}, 2)
        >>> unpacked(block)
        [Block(num_rows=2, columns={'uid': tensor([7, 8]), 'domain': ['math', 'code']}, error=None, num_blocks=1)]
    """
    described, parts = [], []
    for name, column in columns.items():
        numbers = torch.from_numpy(plain_array(column)) if _is_numeric(column) else column  # type: ignore[arg-type]
        if isinstance(numbers, Tensor):
            # A fresh tensor, because one of a single element may have any stride.
            flat = torch.empty(numbers.numel(), dtype=numbers.dtype, device=numbers.device)
            data = flat.copy_(numbers.detach().reshape(-1)).view(torch.uint8)
            kind = "tensor" if isinstance(column, Tensor) else "array"
            described.append([name, kind, str(numbers.dtype).removeprefix("torch."), list(numbers.shape)])
        else:
            data = torch.frombuffer(bytearray(pickle.dumps(list(column))), dtype=torch.uint8)
            kind = "objects" if isinstance(column, np.ndarray) else "list"
            described.append([name, kind, "", [len(data)]])
        parts.append(data)
    header = json.dumps([num_rows, error, described, source], separators=(",", ":")).encode()
    end = _aligned(PREFIX + len(header))
    total = end + sum(_aligned(len(part)) for part in parts)
    device = next((column.device for column in columns.values() if isinstance(column, Tensor)), torch.device("cpu"))
    head = np.array([end, total], np.int64).tobytes() + header.ljust(end - PREFIX)
    block = torch.zeros(total, dtype=torch.uint8, device=device)
    block[:end] = torch.frombuffer(bytearray(head), dtype=torch.uint8).to(device)
    for part in parts:
        block[end : end + len(part)] = part.to(device)
        end += _aligned(len(part))
    return block


def unpacked(blocks: Tensor) -> list[Block]:
    """The blocks in a tensor of bytes, in their order."""
    found = []
    while len(blocks):
        end, total = ends(blocks[:PREFIX].clone()).tolist()
        found.append(_block(blocks[None, :total], bytes(blocks[PREFIX:end].tolist())))
        blocks = blocks[total:]
    return found


def unpacked_rows(rows: Tensor, header_ends: Sequence[int]) -> list[Block]:
    """The blocks at the start of each row, whose headers end where the caller knows; neighbours that are alike as one.

    All headers leave the device in one copy.
    """
    heads = rows[:, : max(header_ends)].cpu().numpy()
    headers = [head[PREFIX:end].tobytes() for head, end in zip(heads, header_ends)]
    found, start = [], 0
    for header, alike in itertools.groupby(headers):
        stop = start + len(list(alike))
        found.append(_block(rows[start:stop], header))
        start = stop
    return found


def joined(blocks: Sequence[Block]) -> dict[str, Any]:
    """The columns that all blocks have, one block after the other; numbers are padded with 0 to the widest.

    Example:
        >>> one, two = {"advantages": torch.ones(1, 2)}, {"advantages": torch.full((1, 1), 2.0)}
        >>> joined([Block(1, one), Block(1, two)])
        {'advantages': tensor([[1., 1.],
                [2., 0.]])}
    """
    # A block without rows says nothing of types and widths: its columns may be empty lists.
    telling = [block for block in blocks if block.num_rows] or list(blocks[:1])
    names = [name for name in telling[0].columns if all(name in block.columns for block in telling)]
    return {name: _joined_column(name, [block.columns[name] for block in telling]) for name in names}


def ends(block: Tensor) -> Tensor:
    """Where the header and the block end, (2,) int64."""
    return block[:PREFIX].view(torch.int64)


def _block(rows: Tensor, header: bytes) -> Block:
    """What rows with the same header hold, one after the other."""
    num_rows, error, described, _ = json.loads(header)
    start = _aligned(PREFIX + len(header))
    columns: dict[str, Any] = {}
    for name, kind, dtype_name, shape in described:
        if kind in ("list", "objects"):
            size = shape[0]
            pickled = rows[:, start : start + size].cpu().numpy()
            values = [value for each in pickled for value in pickle.loads(each.tobytes())]
            columns[name] = values if kind == "list" else _object_array(values)
        else:
            dtype: torch.dtype = getattr(torch, dtype_name)
            size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
            data = rows[:, start : start + size].contiguous().view(dtype).reshape(len(rows) * shape[0], *shape[1:])
            columns[name] = data if kind == "tensor" else data.cpu().numpy()
        start += _aligned(size)
    return Block(num_rows * len(rows), columns, error, len(rows))


def _joined_column(name: str, parts: list[Any]) -> Any:
    arrays = [torch.from_numpy(part) if _is_numeric(part) else part for part in parts]
    if all(isinstance(part, Tensor) for part in arrays) and _have_a_common_type(arrays):
        whole = _padded(name, arrays)
        return whole if any(isinstance(part, Tensor) for part in parts) else whole.cpu().numpy()
    values = [value for part in parts for value in (part.tolist() if isinstance(part, (Tensor, np.ndarray)) else part)]
    return _object_array(values) if all(isinstance(part, np.ndarray) for part in parts) else values


def _padded(name: str, parts: list[Tensor]) -> Tensor:
    dims = {part.dim() for part in parts}
    if len(dims) > 1:
        raise ValueError(
            f"{name} has {' and '.join(map(str, sorted(dims)))} dimensions in different parts of the global batch. "
            "Give it the same number on every rank."
        )
    dtype = functools.reduce(torch.promote_types, (part.dtype for part in parts))
    widest = [max(sizes) for sizes in zip(*(part.shape[1:] for part in parts))]
    padded = [part.to(dtype) for part in parts]
    for i, part in enumerate(padded):
        if list(part.shape[1:]) != widest:
            padded[i] = part.new_zeros([len(part), *widest])
            inside = (slice(None), *(slice(size) for size in part.shape[1:]))
            padded[i][inside] = part
    return torch.cat(padded)


def _have_a_common_type(parts: list[Tensor]) -> bool:
    dtypes = {part.dtype for part in parts}
    return len(dtypes) == 1 or not dtypes & {torch.uint16, torch.uint32, torch.uint64}


def _is_numeric(column: Any) -> bool:
    return isinstance(column, np.ndarray) and column.dtype.kind in "biuf"


def _object_array(values: list[Any]) -> np.ndarray:
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
