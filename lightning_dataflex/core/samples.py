"""Samples of a batch: some of them, and those of several batches together, whatever the batch's type.

Which fields have an entry for each sample is a matter of declaration: every tensor, array and list does, but for
those that a `Layout` calls shared. Scalars, texts and None belong to the batch. Of a `TensorDict`, and of what verl
keeps in `.batch` and `.non_tensor_batch`, every field is per sample.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_dataflex.core.checks import MOST_NESTED
from lightning_dataflex.core.containers import ORIGINAL, copy_with, is_verl, stores
from lightning_dataflex.core.fields import ALIASES, FIELDS, is_per_sample
from lightning_dataflex.core.numbers import as_numbers, check_rows_apart
from lightning_dataflex.core.rollout import RolloutBatch
from lightning_dataflex.packing import Block
from lightning_dataflex.packing import joined as joined_columns

Columns = dict[str, Any]
"""The fields of a batch that have an entry per sample, by the names that the batch has for them."""


@dataclass(frozen=True)
class Layout:
    """What the fields of a batch are.

    Attributes:
        shared: Names of fields that have no entry per sample, whatever their length.
        token_fields: Names of further fields (N, L) or (N, P + L) whose last L columns are response tokens, after P of
            the prompt.
    """

    shared: frozenset[str] = frozenset()
    token_fields: frozenset[str] = frozenset({"input_ids", "attention_mask", "position_ids"})

    @classmethod
    def of(cls, shared: Iterable[str] | None = None, token_fields: Iterable[str] | None = None) -> Layout:
        """A layout with these names beside those that go without saying."""
        return cls(frozenset(shared or ()), cls.token_fields | frozenset(token_fields or ()))

    def __or__(self, other: Layout) -> Layout:
        return Layout(self.shared | other.shared, self.token_fields | other.token_fields)


def per_sample(batch: RolloutBatch, layout: Layout) -> Columns:
    """The fields that have an entry per sample.

    Raises:
        ValueError: One that should has not.

    Example:
        >>> batch = RolloutBatch({"uid": ["a", "b"], "step": 3, "scale": torch.ones(2)})
        >>> list(per_sample(batch, Layout.of(shared=["scale"])))
        ['uid']
    """
    found = {}
    for store in stores(batch.source):
        for name in store:
            value = store[name]
            if name not in layout.shared and (is_per_sample(value) or isinstance(value, Mapping)):
                _check_rows(str(name), value, batch.num_samples)
                found[name] = value
    return found


def taken(batch: RolloutBatch, rows: Tensor, layout: Layout) -> Any:
    """A batch of the same type with these samples alone, in this order; the batch itself stays as it is.

    Example:
        >>> batch = RolloutBatch({"uid": ["a", "b", "c"], "rm_scores": torch.tensor([0.1, 0.2, 0.3]), "step": 3})
        >>> taken(batch, torch.tensor([2, 0]), Layout())
        {'uid': ['c', 'a'], 'rm_scores': tensor([0.3000, 0.1000]), 'step': 3}
    """
    return rebuilt(batch.source, {name: _rows(value, rows) for name, value in per_sample(batch, layout).items()})


def rebuilt(source: Any, columns: Columns) -> Any:
    """A batch of the type of `source`, with these columns in place of its own and its other fields as they are."""
    if is_verl(source):
        new = copy.copy(source)
        tensors = set() if source.batch is None else set(source.batch.keys())
        if source.batch is not None:
            new.batch = rebuilt(source.batch, {k: v for k, v in columns.items() if k in tensors})
        new.non_tensor_batch = {k: v for k, v in columns.items() if k not in tensors}
        return new
    if hasattr(source, "batch_size") and hasattr(source, "to_tensordict"):
        size = [len(next(iter(columns.values())))]
        new = source.empty()
        new.batch_size = size
        for name, value in columns.items():
            new[name] = value
        return new
    return copy_with(source, columns)


def joined(parts: Sequence[tuple[Columns, int]], layout: Layout, names: Mapping[str, str] | None = None) -> Columns:
    """The columns of several batches, one batch after the other, padded with 0 to common widths.

    Responses are padded on the right; prompts, in the `token_fields` of the layout, on the left.

    Args:
        parts: Of each batch the columns, and L, the width of its response mask; 0 for prompts alone.
        layout: What the columns are.
        names: The batch's own names for this project's fields.

    Raises:
        ValueError: The batches have different fields, or a field has widths of which nobody has said what they are.

    Example:
        >>> a = {"input_ids": torch.tensor([[7, 1]]), "response_mask": torch.tensor([[1]])}
        >>> b = {"input_ids": torch.tensor([[8, 8, 2, 2]]), "response_mask": torch.tensor([[1, 1]])}
        >>> joined([(a, 1), (b, 2)], Layout())["input_ids"]
        tensor([[0, 7, 1, 0],
                [8, 8, 2, 2]])
    """
    if len(parts) == 1:
        return parts[0][0]
    names_of = [set(columns) for columns, _ in parts]
    lacking = {name for every in names_of for name in every if not all(name in each for each in names_of)}
    if lacking:
        raise ValueError(
            f"Rollouts of one step have different fields: {', '.join(sorted(map(str, lacking)))} is not in all of "
            "them. Let the rollout give the same fields every time."
        )
    tokens = _token_names(layout, names)
    aligned = [dict(columns) for columns, _ in parts]
    for name in aligned[0]:
        values = [columns[name] for columns in aligned]
        if name in tokens and all(isinstance(value, Tensor) and value.dim() > 1 for value in values):
            for value, (_, width) in zip(values, parts):
                _check_tokens(str(name), value, width)
            prompts = [value.shape[1] - width for value, (_, width) in zip(values, parts)]
            for columns, value, length in zip(aligned, values, prompts):
                columns[name] = _left_padded(value, max(prompts) - length)
        else:
            _check_widths(str(name), values, [width for _, width in parts])
    return _joined(aligned)


def trimmed(batch: RolloutBatch, layout: Layout, *, strict: bool = True) -> Any:
    """The batch without the last response tokens that are valid in no sample; at least one stays.

    Args:
        layout: What its fields are.
        strict: Raise a ValueError for a field as wide as the responses of which nobody has said what it is.

    Example:
        >>> batch = {"input_ids": torch.tensor([[5, 6, 7, 0]]), "response_mask": torch.tensor([[1, 1, 0]])}
        >>> trimmed(RolloutBatch(batch), Layout())
        {'input_ids': tensor([[5, 6, 7]]), 'response_mask': tensor([[1, 1]])}
    """
    mask = as_numbers(batch["response_mask"], "response_mask") != 0
    used = mask.any(0).nonzero()
    width = mask.shape[1]
    cut = width - (int(used.max()) + 1 if len(used) else min(1, width))
    if not cut:
        return batch.source
    tokens, columns = _token_names(layout, batch.fields), per_sample(batch, layout)
    for name, value in columns.items():
        wide = isinstance(value, (Tensor, np.ndarray)) and value.ndim > 1
        if wide and name in tokens:
            _check_tokens(str(name), value, width)
            columns[name] = value[:, : value.shape[1] - cut]
        elif strict and wide and value.shape[1] == width:
            raise ValueError(
                f"{name} has {width} columns, as the response mask has. If they are response tokens, name it in "
                "token_fields, so that trim can cut it; if not, turn trim off."
            )
    return rebuilt(batch.source, columns)


def compacted(batch: RolloutBatch, layout: Layout, *, trim: bool = False) -> Any:
    """The batch without the samples that have no valid token left; the first stays, blank, where none has any.

    Example:
        >>> batch = {"response_mask": torch.tensor([[0, 0], [1, 0]]), "rewards": [0.5, 1.0]}
        >>> compacted(RolloutBatch(batch), Layout())
        {'response_mask': tensor([[1, 0]]), 'rewards': [1.0]}
    """
    mask = as_numbers(batch["response_mask"], "response_mask") != 0
    rows = mask.any(1).nonzero().flatten()
    if not len(rows):
        # Models refuse a batch of no samples, and every rank must take part in the backward pass.
        rows = torch.arange(min(1, len(mask)), device=mask.device)
    source = batch.source if len(rows) == len(mask) else taken(batch, rows, layout)
    return trimmed(RolloutBatch(source, batch.fields), layout) if trim and len(rows) else source


def blanked(batch: RolloutBatch) -> Any:
    """The batch with nothing but padding: it fills a shape, and no rule, loss or statistic counts it."""
    blank = torch.zeros_like(as_numbers(batch["response_mask"], "response_mask"))
    names = ["response_mask", *([ORIGINAL + "response_mask"] if ORIGINAL + "response_mask" in batch else [])]
    return batch.replaced(dict.fromkeys(names, blank))


def _token_names(layout: Layout, names: Mapping[str, str] | None) -> set[str]:
    of_tokens = [name for name in FIELDS if name not in ("uid", "prompt_id", "domain")]
    known = [(names or {}).get(name, name) for name in of_tokens]
    known += [alias for name, alias in ALIASES.items() if name in of_tokens]
    return {*layout.token_fields, *known, *(ORIGINAL + name for name in known)}


def _check_rows(name: str, value: Any, num_samples: int) -> None:
    for path, leaf in _leaves(name, value):
        if isinstance(leaf, Tensor):
            check_rows_apart(path, leaf)
        if len(leaf) != num_samples:
            raise ValueError(
                f"{path} has {len(leaf)} entries but the rollout batch has {num_samples} samples, and samples are to "
                f"leave it. If it is no field of samples, name it in shared_fields: [{name}]."
            )


def _leaves(name: str, value: Any, depth: int = 0) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        if depth == MOST_NESTED:
            raise ValueError(
                f"{name[:100]}... is a mapping within {MOST_NESTED} others. Give what is of samples as fields of the "
                "batch."
            )
        for key, each in value.items():
            yield from _leaves(f"{name}.{key}", each, depth + 1)
    elif is_per_sample(value):
        yield name, value


def _rows(value: Any, rows: Tensor) -> Any:
    if isinstance(value, Mapping):
        return {key: _rows(each, rows) for key, each in value.items()}
    if not is_per_sample(value):
        return value
    if isinstance(value, Tensor):
        return value[rows.to(value.device)]
    if isinstance(value, np.ndarray):
        return value[rows.cpu().numpy()]
    picked = [value[i] for i in rows.tolist()]
    return tuple(picked) if type(value) is tuple else picked


def _joined(parts: Sequence[Columns]) -> Columns:
    """Columns one after the other, nested ones included, padded with 0 on the right."""
    result: Columns = {}
    for name, first in parts[0].items():
        values = [part[name] for part in parts]
        if isinstance(first, Mapping):
            for key, each in first.items():
                _check_same_width(f"{name}.{key}", [value[key] for value in values], each)
            result[name] = _joined(values)
        elif is_per_sample(first):
            result |= joined_columns([Block(len(value), {name: value}) for value in values])
        else:
            result[name] = first
    return result


def _check_tokens(name: str, value: Any, width: int) -> None:
    if value.shape[1] < width:
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}, and there are {width} response tokens, which must lie along its "
            "second dimension. Give it as (samples, tokens, ...)."
        )


def _check_same_width(name: str, values: Sequence[Any], like: Any) -> None:
    if isinstance(like, (Tensor, np.ndarray)) and like.ndim > 1 and len({value.shape[1] for value in values}) > 1:
        raise ValueError(
            f"{name} has other widths in different rollouts, and nobody can say how they belong together inside of a "
            "mapping. Put it into the batch itself, and name it in token_fields if its last columns are responses."
        )


def _left_padded(value: Tensor, num_columns: int) -> Tensor:
    if not num_columns:
        return value
    return torch.cat([value.new_zeros(len(value), num_columns, *value.shape[2:]), value], 1)


def _check_widths(name: str, values: Sequence[Any], widths: Sequence[int]) -> None:
    if not all(isinstance(value, (Tensor, np.ndarray)) and value.ndim > 1 for value in values):
        return
    shapes = [value.shape[1] for value in values]
    of_tokens = shapes == list(widths)
    if not of_tokens and len(set(shapes)) > 1:
        raise ValueError(
            f"{name} has {' and '.join(map(str, sorted(set(shapes))))} columns in different rollouts of one step. If "
            "its last columns are the response tokens, name it in token_fields; if not, give it one width."
        )
