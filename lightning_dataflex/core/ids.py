"""Group ids of any hashable type as 64-bit integers."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
from collections import defaultdict
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_dataflex.core.numbers import dense
from lightning_dataflex.functional.choices import shown

MOST_BITS = 10_000
"""Of a number that is an id: Python writes no text of one with many more."""


def stable_ids(values: Any, name: str = "uid") -> Tensor:
    """64-bit ids of hashable values, equal for equal values on every rank and in every run, (N,) int64.

    Integers, and what equals one, stand for themselves. Anything else, and integers of more than 64 bits, is hashed by
    blake2b over its type and text: a number as the integer, float or fraction that equals it, and a text of a type of
    its own, such as a member of a `str` enum, as a plain one. Two different values get one id with a probability of
    about n^2 / 2^65 (3e-8 for a million ids); they would be taken for one group.

    Raises:
        ValueError: A value is None, NaN, not hashable or a number of more than `MOST_BITS`, or has no text of its own,
            which would differ between ranks.

    Example:
        >>> stable_ids([7, 8, 7.0, Decimal(7)]).tolist()
        [7, 8, 7, 7]
        >>> first, second, third = stable_ids(["a", "b", "a"]).tolist()
        >>> first == third, first == second
        (True, False)
    """
    return told_apart(values, name).ids


@dataclass(frozen=True)
class ToldApart:
    """Values, such as the groups of samples, told apart.

    Attributes:
        values: The distinct ones in the order in which they come first, as texts or as the ids of them. Of integers,
            which it would take a sort to tell apart, all as they come.
        index: (N,) which of them each value is; None of integers.
    """

    values: list[str] | Tensor
    index: Tensor | None

    @property
    def groups(self) -> tuple[Tensor, int] | None:
        """The dense index (N,) of each, and how many there are; None of integers."""
        return None if self.index is None else (self.index, len(self.values))

    @functools.cached_property
    def ids(self) -> Tensor:
        """(N,) int64; see `stable_ids`."""
        ids = self.values
        if isinstance(ids, list):
            digests = bytearray().join([_digest("str", text) for text in ids])
            ids = torch.from_numpy(np.frombuffer(digests, "<i8").astype(np.int64))
        return ids if self.index is None else ids[self.index]


def told_apart(values: Any, name: str = "uid") -> ToldApart:
    """Values by what they are: see `stable_ids`, of which texts are not hashed before somebody asks.

    Example:
        >>> told_apart(["7", "8", "7"]).index, told_apart(torch.tensor([7, 8, 7])).ids
        (tensor([0, 1, 0]), tensor([7, 8, 7]))
    """
    if isinstance(values, (Tensor, np.ndarray)) and values.ndim != 1:
        raise ValueError(f"{name} has shape {tuple(values.shape)}. It must be (samples,).")
    values = dense(values, name) if isinstance(values, Tensor) else values
    if isinstance(values, Tensor) and not values.is_floating_point() and values.dtype != torch.uint64:
        return ToldApart(values.long(), None)
    if isinstance(values, np.ndarray) and values.dtype.kind in "biu" and values.dtype.newbyteorder("=") != np.uint64:
        return ToldApart(torch.from_numpy(values.astype(np.int64, order="C")), None)
    if isinstance(values, np.ndarray) and values.dtype == object:
        # Samples of a group mostly stand together, and the first of each run says it all.
        edges = _edges(values)
        heads = values[edges[:-1]].tolist()
        if set(map(type, heads)) == {str}:
            # Where none comes again, each has its own place.
            none_again = len(set(heads)) == len(heads)
            distinct, index = (heads, torch.arange(len(heads))) if none_again else _places(heads, name)
            return ToldApart(distinct, torch.from_numpy(np.repeat(index.numpy(), edges[1:] - edges[:-1])))
    items = values.tolist() if isinstance(values, (Tensor, np.ndarray)) else list(values)
    distinct, index = _places(items, name)
    if set(map(type, distinct)) == {str}:
        return ToldApart(distinct, index)
    if any(isinstance(item, Tensor) for item in distinct):
        distinct, index = _places([_number(item, name) if isinstance(item, Tensor) else item for item in items], name)
    if any(item is None for item in distinct):
        raise ValueError(f"{name} of sample {items.index(None)} is None. Give every sample the id of its group.")
    if any(item != item for item in distinct):
        raise ValueError(f"{name} holds NaN. Give every sample the id of its group.")
    ids = [_id(_plain(item, name)) for item in distinct]
    # What compares as different and has one text is one group on every rank.
    places = {each: place for place, each in enumerate(dict.fromkeys(ids))}
    if len(places) < len(ids):
        index = torch.tensor([places[each] for each in ids])[index]
    return ToldApart(torch.tensor(list(places), dtype=torch.int64), index)


def _edges(values: np.ndarray) -> np.ndarray:
    """Where an array has another value than in the place before, its two ends included."""
    changes = np.ones(len(values) + 1, bool)
    # What cannot be compared, whatever its own == raises, stands for itself, to be judged by what it is.
    with contextlib.suppress(Exception):
        changes[1:-1] = ~(values[1:] == values[:-1])
    return np.flatnonzero(changes)


def _places(items: list[Any], name: str) -> tuple[list[Any], Tensor]:
    """The distinct items in the order in which they come first, and the place (N,) of each item among them."""
    try:
        places: defaultdict[Any, int] = defaultdict(itertools.count().__next__)
        index = torch.from_numpy(np.fromiter(map(places.__getitem__, items), np.int64, len(items)))
    except (TypeError, RecursionError) as error:
        raise ValueError(f"{name} holds values that cannot be compared: {error}. Use strings or ints.") from error
    return list(places), index


def prompt_ids(batch: Any) -> Tensor:
    """The ids (N,) of a batch's prompts; see `stable_ids`."""
    return stable_ids(batch["prompt_id"], "prompt_id")


def _number(item: Tensor, name: str) -> Any:
    if item.dim():
        raise ValueError(f"{name} holds a tensor of shape {tuple(item.shape)}. Give one number or text per sample.")
    return item.item()


def _plain(item: Any, name: str) -> Any:
    """The same value as a type that has one text for it."""
    if isinstance(item, np.generic):
        item = item.item()
    if (type(item) is int and item.bit_length() < 64) or (type(item) is float and not item.is_integer()):
        # As most are, told at once.
        return item
    if isinstance(item, str):
        # What str() gives is up to the type.
        return str.__str__(item)
    if isinstance(item, Number):
        return _plain_number(item, name)
    if isinstance(item, tuple):
        return tuple(_plain(each, name) for each in item)
    if isinstance(item, frozenset):
        return frozenset, sorted(repr(_plain(each, name)) for each in item)
    if type(item).__repr__ is object.__repr__:
        raise ValueError(f"{name} holds {shown(item)}, which has another text on every rank. Use strings or ints.")
    return item


def _plain_number(number: Any, name: str) -> Any:
    """The integer, float or fraction that equals a number; itself if none does."""
    if isinstance(number, Decimal):
        # 1e999999999 is short, and the integer that equals it is not.
        _check_bits(abs(number.adjusted()) * 10 // 3, name)
    if isinstance(number, complex) and number == number.real:
        number = number.real
    for kind in (int, float, Fraction):
        # NaN, infinities and complex numbers are not of every kind.
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            if (same := kind(number)) == number:
                number = same
                break
    if isinstance(number, (int, Fraction)):
        _check_bits(max(number.numerator.bit_length(), number.denominator.bit_length()), name)
    return number


def _check_bits(num_bits: int, name: str) -> None:
    if num_bits > MOST_BITS:
        raise ValueError(f"{name} holds a number of {num_bits} bits. Use shorter ones, or texts.")


def _id(item: Any) -> int:
    if isinstance(item, int) and -(2**63) <= item < 2**63:
        return int(item)
    kind = "tuple" if isinstance(item, tuple) else type(item).__name__
    return int.from_bytes(_digest(kind, item), "little", signed=True)


def _digest(kind: str, item: Any) -> bytes:
    return hashlib.blake2b(f"{kind}:{item!r}".encode(), digest_size=8).digest()
