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


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of the values at valid tokens."""
    return torch.where(mask.bool(), values, 0.0).sum() / mask.sum()


def minibatches(uid: Sequence[Any], num_minibatches: int, generator: torch.Generator) -> list[list[int]]:
    """Rows of each minibatch: whole groups, shuffled, dealt out as evenly as they go."""
    groups: dict[Any, list[int]] = {}
    for row, name in enumerate(uid):
        groups.setdefault(name, []).append(row)
    if len(groups) < num_minibatches:
        raise ValueError(
            f"num_minibatches is {num_minibatches} but the batch has {len(groups)} prompts. "
            "Use more prompts or fewer minibatches."
        )
    rows = list(groups.values())
    order = torch.randperm(len(rows), generator=generator)
    return [[row for group in part.tolist() for row in rows[group]] for part in order.tensor_split(num_minibatches)]


def sliced(batch: Batch, rows: Sequence[int]) -> Batch:
    """The given samples of a batch."""
    index = torch.as_tensor(rows)
    return {
        name: value[index.to(value.device)] if isinstance(value, Tensor) else [value[row] for row in rows]
        for name, value in batch.items()
    }
