"""The numbers of a field, whatever holds them, as a tensor that can be calculated with."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_dataflex.functional.choices import shown

WIDENED = {
    torch.uint16: torch.int64,
    torch.uint32: torch.int64,
    torch.uint64: torch.float64,
}
"""Types that PyTorch stores and hardly calculates with, and those that hold as much."""


def as_numbers(value: Any, name: str) -> Tensor:
    """A tensor, an array, or a list of real numbers as a dense tensor without gradient.

    Args:
        value: Of any number type, byte order and memory layout.
        name: What it is called in an error.

    Raises:
        ValueError: It holds something else than real numbers, or rows of different lengths.

    Example:
        >>> as_numbers(np.array([1, 2, 3], ">i2")[::-1], "rm_scores")
        tensor([3, 2, 1], dtype=torch.int16)
        >>> as_numbers([[1.0], [0.0, 1.0]], "rm_scores")
        Traceback (most recent call last):
        ValueError: rm_scores is not numeric: it has rows of 1 and of 2. Give a tensor, an array or a list of numbers.
    """
    try:
        tensor = value if isinstance(value, Tensor) else _tensor(value)
    except Exception as error:  # in the words of whatever failed to read it
        raise ValueError(not_numeric(name, _why(value))) from error
    tensor = dense(tensor, name)
    if tensor.is_floating_point() and tensor.dtype.itemsize == 1:
        return tensor.float()
    return tensor.to(WIDENED[tensor.dtype]) if tensor.dtype in WIDENED else tensor


def dense(tensor: Tensor, name: str) -> Tensor:
    """A tensor without gradient; a ValueError if it does not hold real numbers one beside the other."""
    if tensor.is_meta:
        raise ValueError(not_numeric(name, "it is on the meta device, where shapes are and no numbers"))
    check_rows_apart(name, tensor)
    if tensor.is_quantized:
        raise ValueError(not_numeric(name, "it is a quantized tensor"))
    if tensor.is_complex():
        raise ValueError(not_numeric(name, f"it is {tensor.dtype}, not real"))
    return (tensor.detach() if tensor.requires_grad else tensor).resolve_neg()


def check_rows_apart(name: str, tensor: Tensor) -> None:
    """Raise a ValueError for a tensor whose rows do not lie one beside the other."""
    if tensor.layout != torch.strided or tensor.is_nested:
        raise ValueError(f"{name} is a sparse or nested tensor. Give a dense one, padded where rows are shorter.")


def plain_array(array: np.ndarray) -> np.ndarray:
    """The same numbers in an array that PyTorch reads: of its byte order, forwards, writable, no wider than float64."""
    dtype = array.dtype.newbyteorder("=")
    dtype = np.dtype(np.float64) if dtype == np.longdouble else dtype
    odd = any(stride < 0 or stride % array.itemsize for stride in array.strides)
    return array.astype(dtype, order="C") if odd or dtype != array.dtype or not array.flags.writeable else array


def not_numeric(name: str, why: str) -> str:
    """What to tell the user of a field that should hold numbers."""
    return f"{name} is not numeric: {why}. Give a tensor, an array or a list of numbers."


def _tensor(value: Any) -> Tensor:
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError("what is masked is no number")
    if isinstance(value, np.ndarray):
        return torch.as_tensor(plain_array(value) if value.dtype.kind in "biufc" else value.tolist())
    if isinstance(value, (list, tuple)) and value and all(isinstance(each, (Tensor, np.ndarray)) for each in value):
        return torch.stack([as_numbers(each, "a row") for each in value])
    if isinstance(value, (str, bytes, bytearray)):
        raise TypeError("a text is no list of numbers")
    return torch.as_tensor(value)


def _why(value: Any) -> str:
    """Why a value is no table of numbers, as far as one can see."""
    items = value.tolist() if isinstance(value, np.ndarray) else value
    if not isinstance(items, (list, tuple)):
        return f"it is {shown(value)}"
    while items and all(isinstance(each, (list, tuple)) for each in items):
        sizes = sorted({len(each) for each in items})
        if len(sizes) > 1:
            return f"it has rows of {' and of '.join(map(str, sizes[:3]))}"
        items = [inner for each in items for inner in each]
    odd = next((each for each in items if not isinstance(each, (bool, int, float))), value)
    return f"it holds {shown(odd)}"
