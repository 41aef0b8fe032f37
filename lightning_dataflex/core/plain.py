"""Values that a checkpoint can hold: what `torch.load(weights_only=True)` reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

ARRAY, OBJECTS = "__array__", "__objects__"


def plain(value: Any, name: str, *, copy: bool = True) -> Any:
    """The value as tensors, dicts, lists, tuples, numbers and texts, NumPy's arrays and numbers included.

    Args:
        value: What is to be saved.
        name: What it is called in an error.
        copy: Whether tensors are copied to main memory; False to see whether the value will do.

    Raises:
        ValueError: There is something else in it.

    Example:
        >>> plain({"question": "1 + 1", "level": np.int64(3)}, "a prompt")
        {'question': '1 + 1', 'level': 3}
    """
    if isinstance(value, (str, int, float, bool, bytes, type(None))):
        return value
    if isinstance(value, Tensor):
        return value.detach().cpu().clone() if copy else value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        if value.dtype.kind in "biuf":
            return {ARRAY: torch.from_numpy(value.copy() if copy else value)}
        return {OBJECTS: [plain(each, name, copy=copy) for each in value.tolist()]}
    if isinstance(value, Mapping):
        return {key: plain(each, f"{name}.{key}", copy=copy) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(plain(each, name, copy=copy) for each in value)
    if isinstance(value, list):
        return [plain(each, name, copy=copy) for each in value]
    raise ValueError(
        f"{name} holds a {type(value).__name__}, which a checkpoint cannot hold. "
        "Use tensors, arrays, dicts, lists, numbers and texts."
    )


def restored(value: Any) -> Any:
    """What `plain` was given; other mappings come back as dicts.

    Example:
        >>> restored(plain({"a": np.array([1, 2])}, "a prompt"))
        {'a': array([1, 2])}
    """
    if isinstance(value, dict):
        if ARRAY in value:
            return value[ARRAY].numpy()
        if OBJECTS in value:
            array = np.empty(len(value[OBJECTS]), dtype=object)
            array[:] = [restored(each) for each in value[OBJECTS]]
            return array
        return {key: restored(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(restored(each) for each in value)
    return value
