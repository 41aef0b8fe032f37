"""The types of object that a rollout batch can be: how their fields are found, written and copied."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_dataflex.core.numbers import dense, plain_array

ORIGINAL = "original_"
"""Prefix of the name under which a replaced field's first value is kept: the next decision reads the same batch."""


def is_batch(source: Any) -> bool:
    """Whether a value can hold the fields of a rollout batch.

    Example:
        >>> is_batch({}), is_batch(torch.zeros(2)), is_batch("text")
        (True, False, False)
    """
    if isinstance(source, (Tensor, np.ndarray, str, bytes, int, float, type(None))) or callable(source):
        return False
    return is_verl(source) or _is_mapping(source) or _is_named_tuple(source) or _has_attributes(source)


def is_verl(source: Any) -> bool:
    """Whether a batch keeps tensors in `.batch` and the rest in `.non_tensor_batch`, as verl's `DataProto`."""
    return hasattr(source, "batch") and hasattr(source, "non_tensor_batch")


def _is_mapping(source: Any) -> bool:
    return hasattr(source, "keys") and hasattr(source, "__getitem__")


def _is_named_tuple(source: Any) -> bool:
    return isinstance(source, tuple) and hasattr(source, "_fields")


def _has_attributes(source: Any) -> bool:
    return dataclasses.is_dataclass(source) or (hasattr(source, "__dict__") and not isinstance(source, Sequence))


def stores(source: Any) -> list[Mapping[str, Any]]:
    """The mappings that hold a batch's fields, each with `in`, `[]` and iteration over names."""
    if type(source) is dict:
        return [source]
    if is_verl(source):
        return [_Keyed(store) for store in (source.batch, source.non_tensor_batch) if store is not None]
    if _is_mapping(source):
        return [_Keyed(source)]
    if _is_named_tuple(source):
        return [source._asdict()]
    if dataclasses.is_dataclass(source):
        return [{f.name: getattr(source, f.name) for f in dataclasses.fields(source)} | getattr(source, "__dict__", {})]
    return [vars(source)]


class _Keyed(Mapping[str, Any]):
    """What has `keys()` and `[]`, plainly: a TensorDict iterates over its rows, a defaultdict adds what is read."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def __getitem__(self, name: str) -> Any:
        return self._source[name]

    def __contains__(self, name: object) -> bool:
        return name in self._source.keys()

    def __iter__(self) -> Iterator[str]:
        return iter(self._source.keys())

    def __len__(self) -> int:
        return len(list(self._source.keys()))


def write(source: Any, key: str, value: Any) -> None:
    """Put a field into the very object that was given; a TypeError where its type does not allow it."""
    if is_verl(source):
        _write_verl(source, key, value)
    elif _is_mapping(source):
        _write_item(source, key, value)
    elif _is_named_tuple(source):
        raise TypeError(
            f"{key} cannot be written into a {type(source).__name__}: a NamedTuple is fixed. Use `replaced`, or a dict."
        )
    else:
        try:
            setattr(source, key, value)
        except AttributeError as error:
            raise TypeError(
                f"{key} cannot be written into a {type(source).__name__}: {error}. Declare it as a field or use a dict."
            ) from error


def _write_verl(source: Any, key: str, value: Any) -> None:
    """Tensors go to `.batch`, the rest to `.non_tensor_batch`; the name is then found in no other place."""
    there = source.batch is not None and key in source.batch.keys()
    value = as_tensor(value) if there else value
    if isinstance(value, Tensor) and source.batch is not None:
        _write_item(source.batch, key, value)
        source.non_tensor_batch.pop(key, None)
    else:
        source.non_tensor_batch[key] = value
        if there:
            del source.batch[key]


def _write_item(source: Any, key: str, value: Any) -> None:
    if getattr(source, "is_locked", False):
        raise TypeError(f"{key} cannot be written into a locked {type(source).__name__}. Unlock it, or use `replaced`.")
    source[key] = value


def copy_with(source: Any, values: Mapping[str, Any]) -> Any:
    """A shallow copy of the same type with these fields; the source stays as it is."""
    if _is_named_tuple(source):
        return source._replace(**{k: v for k, v in values.items() if _fits(source, k, source._fields)})
    if is_verl(source):
        new = copy.copy(source)
        new.batch = None if source.batch is None else copy_with(source.batch, {})
        new.non_tensor_batch = dict(source.non_tensor_batch)
    elif _is_mapping(source) and not isinstance(source, Mapping):
        new = source.copy()
    else:
        new = copy.copy(source)
        if isinstance(source, dict) and len(new) != len(source):
            # copy.copy of a Hugging Face ModelOutput keeps the declared fields alone.
            for key, value in source.items():
                new[key] = value
    for key, value in values.items():
        if not dataclasses.is_dataclass(new) or _is_mapping(new):
            write(new, key, value)
        elif hasattr(new, "__dict__") or _fits(new, key, [f.name for f in dataclasses.fields(new)]):
            # Past the guard of a frozen dataclass, whose copy is still ours to fill.
            object.__setattr__(new, key, value)
    return new


class Arguments(dict[str, Any]):
    """The arguments of a loss as a batch; nothing can be added to them that the loss does not declare."""


def holds_originals(source: Any) -> bool:
    """Whether a batch of this type has room for the first values of replaced fields; a NamedTuple has not."""
    if _is_named_tuple(source) or isinstance(source, Arguments):
        return False
    return is_verl(source) or _is_mapping(source) or hasattr(source, "__dict__")


def _fits(source: Any, key: str, declared: Sequence[str]) -> bool:
    if key in declared:
        return True
    if key.startswith(ORIGINAL):
        return False
    raise TypeError(
        f"{type(source).__name__} has no field {key!r} to write into. Declare it with a default of None, or use a dict."
    )


def as_tensor(value: Any) -> Any:
    """Numbers as a tensor; anything else as it is."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return torch.as_tensor(plain_array(value))
    first = value
    while isinstance(first, list) and first:
        first = first[0]
    if isinstance(value, list) and isinstance(first, (bool, int, float, np.number)):
        try:
            return torch.tensor(value)
        except (TypeError, ValueError, RuntimeError):  # rows of different lengths, or mixed with what is no number
            return value
    return value


def as_array(value: Any) -> np.ndarray:
    """Any per-sample field as a NumPy array."""
    if isinstance(value, Tensor):
        value = dense(value, "A field").cpu()
        return (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    if isinstance(value, np.ndarray):
        return value
    if {type(item) for item in value} in ({str}, {int}, {float}, {bool}):
        return np.asarray(value)
    array = np.empty(len(value), dtype=object)
    for i, item in enumerate(value):
        array[i] = item
    return array
