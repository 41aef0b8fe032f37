"""Copies between main memory and an accelerator, which wait for all work before them as seldom as may be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device. An accelerator is not waited for; what comes from one is there when this returns.

    Example:
        >>> sent(torch.tensor([7, 8]), torch.device("cpu"))
        tensor([7, 8])
    """
    # Memory that is not pinned has been read when the call returns.
    return tensor.to(device, non_blocking=device.type != "cpu")


def at_home(columns: Mapping[str, Any]) -> dict[str, Any]:
    """The same columns, tensors in main memory: what the host has to know, in one copy.

    Example:
        >>> at_home({"uid": torch.tensor([7, 8])})
        {'uid': tensor([7, 8])}
    """
    far = [name for name, column in columns.items() if isinstance(column, Tensor) and column.device.type != "cpu"]
    if not far:
        return dict(columns)
    # The widest numbers first, so that each column starts where its type can be read.
    far.sort(key=lambda name: -columns[name].dtype.itemsize)
    # A single number is contiguous with any stride, and its bytes are read with one of 1.
    flat = [columns[name].contiguous().as_strided((columns[name].numel(),), (1,)) for name in far]
    whole = torch.cat([numbers.view(torch.uint8) for numbers in flat]).cpu()
    parts = whole.split([columns[name].numel() * columns[name].dtype.itemsize for name in far])
    return dict(columns) | {
        name: part.view(columns[name].dtype).reshape(columns[name].shape) for name, part in zip(far, parts)
    }
