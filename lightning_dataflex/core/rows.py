"""What an actuator reads and returns, checked and put in place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_dataflex.core.rollout import RolloutBatch
from lightning_dataflex.core.tidy import scorable, scored
from lightning_dataflex.functional.blocks import blank_padding


def scored_rows(batch: Any, scores: Any, names: Iterable[str] = ()) -> tuple[RolloutBatch, Tensor, Tensor]:
    """The batch, the scores, and which rows have a valid token, a score, and no NaN in these fields."""
    batch = RolloutBatch.of({} if batch is None else batch)
    scores = torch.as_tensor(scores)
    if not batch.keys():
        batch = RolloutBatch({"num_tokens": torch.ones(len(scores), dtype=torch.int64)})
    if len(scores) != batch.num_samples:
        raise ValueError(f"There are {len(scores)} scores for {batch.num_samples} samples. Give one per sample.")
    if scores.dim() == 2 and batch.response_mask is not None:
        # What stands in padding tokens is no score, NaN included.
        scores = blank_padding(scores, batch.response_mask)
    rows = scored(batch, scores)
    return batch, scores, rows & scorable(batch, names).to(scores.device) if names else rows


def checked_index(rule: object, kept: Tensor, num_samples: int) -> Tensor:
    name = type(rule).__name__
    if not kept.dim():
        raise ValueError(f"{name}.act returned {kept.item()}. Return the indices to keep, or a boolean mask.")
    if len(kept) and (kept.is_floating_point() or len(kept.unique()) != len(kept)):
        raise ValueError(f"{name}.act returned {kept.tolist()[:8]}. Return each index to keep once, or a boolean mask.")
    if len(kept) and not 0 <= int(kept.min()) <= int(kept.max()) < num_samples:
        raise ValueError(
            f"{name}.act returned indices {int(kept.min())} to {int(kept.max())} of {num_samples} samples. "
            "Return indices into the scores it was given."
        )
    return kept.to(torch.int64)


def check_length(rule: object, result: Tensor, batch: RolloutBatch) -> None:
    mask = batch.response_mask if result.dim() == 2 else None
    too_wide = mask is not None and result.shape[1] not in (1, mask.shape[1])
    if result.dim() not in (1, 2) or len(result) != batch.num_samples or too_wide:
        raise ValueError(
            f"{type(rule).__name__}.act returned shape {tuple(result.shape)} for {batch.num_samples} samples. "
            "Return one value per score it was given."
        )


def measure_of(batch: RolloutBatch, weights: Tensor, normalize: str) -> Tensor | None:
    """How much each weight counts in the mean that is to be 1, of the shape of `weights`; None for each valid token.

    Args:
        normalize: `samples`: each sample 1, spread over its tokens. `abs_advantage`: each token |A|.
    """
    if normalize == "samples":
        tokens = tokens_of(batch, weights)
        return (tokens > 0).double() if weights.dim() == 1 else tokens / tokens.sum(1, keepdim=True).clamp(min=1)
    if normalize != "abs_advantage":
        return None
    size, mask = batch.tensor("advantages").double().abs(), batch.token_mask
    size = torch.where(mask, size if size.dim() == 2 else size[:, None], 0.0).nan_to_num(0.0, posinf=0.0)
    return (size if weights.dim() == 2 else size.sum(1)).to(weights.device)


def tokens_of(batch: RolloutBatch, weights: Tensor) -> Tensor:
    if weights.dim() == 1:
        return batch.num_tokens.to(weights.device)
    mask = batch.response_mask
    return torch.ones_like(weights) if mask is None else mask.to(weights)
