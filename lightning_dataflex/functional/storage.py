"""Main memory for tables of numbers: what a step has written is used again once nobody reads it.

Memory of a large tensor goes back to the system when the tensor is gone, and the system clears what it gives to the
next, page by page, which takes several times longer than filling it. PyTorch keeps such memory on accelerators only.
"""

from __future__ import annotations

import math
import threading
import weakref
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

MAIN = torch.device("cpu")
LARGE = 2**19
"""Bytes from which memory is kept. NumPy asks Linux for huge pages from 2^22 on, which PyTorch does not."""
ALIGNMENT = 64
"""Bytes of a line of the processor's cache: numbers that lie across two take longer."""
MOST_KEPT = 8
"""Pieces that wait for another use, at most."""


@dataclass
class _Piece:
    memory: np.ndarray
    used: weakref.ref[np.ndarray]
    """The part that a tensor reads; gone when no tensor, array or graph refers to it any more."""


class _Kept(threading.local):
    """What a thread has allocated."""

    def __init__(self) -> None:
        self.pieces: list[_Piece] = []


_kept = _Kept()


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device = MAIN) -> Tensor:
    """A tensor for values to come.

    Example:
        >>> empty((2, 3), torch.bfloat16).shape
        torch.Size([2, 3])
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < LARGE or device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    piece = _free_piece(num_bytes)
    part = piece.memory[:num_bytes]
    piece.used = weakref.ref(part)
    return torch.from_numpy(part).view(dtype).view(shape)


def places_in_use() -> set[int]:
    """Addresses of the tensors of this thread that have kept memory: for who counts what lives.

    Example:
        >>> tensor = empty((512, 512), torch.float32)
        >>> tensor.data_ptr() in places_in_use()
        True
    """
    parts = [piece.used() for piece in _kept.pieces]
    return {part.ctypes.data for part in parts if part is not None}


def _free_piece(num_bytes: int) -> _Piece:
    """A piece that no tensor reads, the smallest that is large enough and not more than twice that; or a new one."""
    free = [piece for piece in _kept.pieces if piece.used() is None]
    fitting = [piece for piece in free if num_bytes <= len(piece.memory) <= 2 * num_bytes]
    found = min(fitting, key=lambda piece: len(piece.memory), default=None)
    waiting = [piece for piece in free if piece is not found]
    superfluous = waiting[: max(0, len(waiting) + 1 - MOST_KEPT)]
    _kept.pieces = [piece for piece in _kept.pieces if not any(piece is each for each in superfluous)]
    if found is None:
        # In steps of a quarter to an eighth, so that a batch that is a little longer finds what is there.
        step = 2 ** (num_bytes.bit_length() - 3)
        memory = _aligned(-(-num_bytes // step) * step)
        found = _Piece(memory, weakref.ref(memory))
        _kept.pieces.append(found)
    return found


def _aligned(num_bytes: int) -> np.ndarray:
    memory = np.empty(num_bytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + num_bytes]
