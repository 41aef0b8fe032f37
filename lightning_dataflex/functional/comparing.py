"""What is true of numbers: of each one in main memory by NumPy, in a sixth of PyTorch's time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

KNOWN = (torch.float32, torch.float64)
"""The types that NumPy is asked about."""


def compared(how: Callable[[Any, Any], Any], values: Tensor, limit: float | Tensor) -> Tensor:
    """Whether each value is above the limit, or what else `how` asks, in float64; NaN is none of it.

    Args:
        how: `operator.gt`, `ge`, `lt` or `le`.
        values: Of any shape.
        limit: One number.

    Example:
        >>> import operator
        >>> compared(operator.ge, torch.tensor([0.5, 0.4, torch.nan]), 0.5)
        tensor([ True, False, False])
    """
    array = _array(values)
    if array is None:
        return how(values.double(), limit)
    # Not a scalar: with one of those NumPy 1 compares in the type of the array.
    return torch.from_numpy(how(array, np.full(1, limit, np.float64)))


def is_nan(values: Tensor) -> Tensor:
    """Whether each value is NaN.

    Example:
        >>> is_nan(torch.tensor([1.0, torch.nan]))
        tensor([False,  True])
    """
    array = _array(values)
    return values.isnan() if array is None else torch.from_numpy(np.isnan(array))


def is_finite(values: Tensor) -> Tensor:
    """Whether each value is neither NaN nor infinite.

    Example:
        >>> is_finite(torch.tensor([1.0, torch.nan, torch.inf]))
        tensor([ True, False, False])
    """
    array = _array(values)
    return values.isfinite() if array is None else torch.from_numpy(np.isfinite(array))


def may_hold_nan(values: Tensor) -> bool:
    """False where no value is NaN, as their sum tells.

    True on an accelerator, where the host would wait for the answer.

    Example:
        >>> may_hold_nan(torch.tensor([1.0, torch.nan])), may_hold_nan(torch.tensor([1.0, torch.inf]))
        (True, False)
    """
    return values.device.type != "cpu" or bool(values.sum().isnan())


def without_nan(values: Tensor) -> Tensor:
    """The values, and 0 for NaN.

    Example:
        >>> without_nan(torch.tensor([torch.nan, torch.inf]))
        tensor([0., inf])
    """
    return values.nan_to_num(0.0, posinf=torch.inf, neginf=-torch.inf)


def _array(values: Tensor) -> Any:
    """The values as NumPy sees them; None where it does not, and for a scalar, of which its answer is no array."""
    if values.device.type != "cpu" or values.dtype not in KNOWN or not values.dim():
        return None
    return values.numpy(force=True)
