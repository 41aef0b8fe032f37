"""Rollout batches: plain dicts, and what is done to them between rollout and loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Batch = dict[str, Any]
"""A rollout batch: tensors and lists with one entry per sample."""


def at_last_token(rewards: Tensor, mask: Tensor) -> Tensor:
    """One reward per sample, (N,), put at its last valid token, (N, L).

    Example:
        >>> at_last_token(torch.tensor([1.0, 0.5]), torch.tensor([[1, 1, 0], [1, 1, 1]]))
        tensor([[0.0000, 1.0000, 0.0000],
                [0.0000, 0.0000, 0.5000]])
    """
    last = torch.arange(mask.shape[1], device=mask.device) == mask.sum(1, keepdim=True) - 1
    return torch.where(last, rewards[:, None], 0.0)


def minibatches(uid: Sequence[Any], num_minibatches: int, generator: torch.Generator) -> list[list[int]]:
    """Rows of each minibatch: whole groups, shuffled, dealt out as evenly as they go; of too few, some have no rows."""
    groups: dict[Any, list[int]] = {}
    for row, name in enumerate(uid):
        groups.setdefault(name, []).append(row)
    rows = list(groups.values())
    order = torch.randperm(len(rows), generator=generator)
    return [[row for group in part.tolist() for row in rows[group]] for part in order.tensor_split(num_minibatches)]


def sliced(batch: Batch, rows: Sequence[int]) -> Batch:
    """The given samples of a batch."""
    index = torch.as_tensor(rows, dtype=torch.int64)
    return {
        name: value[index.to(value.device)] if isinstance(value, Tensor) else [value[row] for row in rows]
        for name, value in batch.items()
    }


def num_micro_batches(num_samples: int, size: int | None) -> int:
    """Pieces of at most `size` samples that so many samples make; at least one."""
    return max(1, -(-num_samples // (size or max(num_samples, 1))))


def micro_batches(batch: Batch, count: int) -> list[Batch]:
    """The samples in `count` pieces of about the same size; a piece without samples has one that nothing is read of.

    Ranks must agree on the count: each piece is a backward pass, in which they wait for each other.
    """
    pieces = torch.arange(len(batch["response_mask"])).tensor_split(count)
    return [sliced(batch, rows.tolist()) if len(rows) else blank(batch) for rows in pieces]


def blank(batch: Batch) -> Batch:
    """A sample without a valid response token, because models refuse a batch of no samples."""
    fields = {name: value.new_zeros(1, *value.shape[1:]) for name, value in batch.items() if isinstance(value, Tensor)}
    return fields | {"attention_mask": torch.ones_like(fields["attention_mask"])}
