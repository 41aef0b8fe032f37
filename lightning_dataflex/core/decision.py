"""Decision: what becomes of a rank's samples, and how that is put into its batch."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_dataflex.core.config import Drop
from lightning_dataflex.core.containers import ORIGINAL
from lightning_dataflex.core.home import sent
from lightning_dataflex.core.ids import ToldApart
from lightning_dataflex.core.numbers import as_numbers
from lightning_dataflex.core.rollout import RolloutBatch
from lightning_dataflex.core.summary import Summary, merged, reasons
from lightning_dataflex.functional.blocks import blank_padding, by_rows
from lightning_dataflex.functional.tokens import token_mean


@dataclass(frozen=True)
class Decision:
    """What becomes of this rank's samples.

    Attributes:
        scores: (N,), or (N, L) of tokens; NaN where there is nothing to score.
        keep: (N,) bool, or (N, L) of tokens; False for padding and for what has no score.
        weights: (N, L) float, 0 outside the mask and for what is not kept, without gradient.
        advantages: (N,) to train the kept samples with, or None for those of the batch.
        summary: What became of each sample of the global batch, for the log.
        rows: Which samples of the global batch are this rank's.
        num_kept: Kept samples (or tokens) of the global batch.
        told_apart: The groups of the global batch, where it has any.
        fell_back: The rule kept nothing anywhere, and every sample that has a score is kept in its place.
    """

    scores: Tensor
    keep: Tensor
    weights: Tensor
    advantages: Tensor | None
    summary: Summary
    rows: slice
    num_kept: int
    told_apart: ToldApart | None = None
    fell_back: bool = False

    @property
    def group_ids(self) -> Tensor | None:
        """(N,) of the global batch, where it has groups; see `stable_ids`."""
        return None if self.told_apart is None else self.told_apart.ids

    @functools.cached_property
    def metrics(self) -> dict[str, Tensor]:
        """Scalars of the global batch; see `core.summary.summary`."""
        return merged([self.summary])

    def columns(self, batch: RolloutBatch) -> dict[str, Tensor]:
        """What became of each of this rank's samples, (N,) each, on the CPU.

        Args:
            batch: The one that was decided on.

        Returns:
            `score`, NaN where there is none, and `weight`, the means over valid tokens; `kept`, of a rule on tokens
            whether any is; `reason`, places in `REASONS`; `reward`, NaN where there is none; `length`, valid tokens.
        """
        numbers, scores = self.summary.numbers, self.scores.double()
        if scores.dim() == 2:
            scores = token_mean(scores, batch.token_mask.to(scores.device) & ~scores.isnan())
        length = numbers["num_tokens"][self.rows]
        columns = {
            "score": scores.to(length.device).float(),
            "kept": numbers["num_kept"][self.rows] > 0,
            "weight": numbers["weight_mean"][self.rows],
            "reason": reasons(numbers)[self.rows],
            "reward": numbers["rm_scores"][self.rows] if "rm_scores" in numbers else torch.full_like(scores, torch.nan),
            "length": length,
        }
        return {name: column.cpu() for name, column in columns.items()}

    def updates(
        self, batch: RolloutBatch, *, drop: Drop = "mask", weights_key: str = "rollout_is_weights"
    ) -> dict[str, Any]:
        """The fields that put the decision into a batch, and the originals of those that it replaces.

        Weights that the batch has already are multiplied.
        """
        mask = batch.get("response_mask")
        weights = self.weights.to(mask.device) if isinstance(mask, Tensor) else self.weights
        if batch.get(weights_key) is not None:
            there = batch.tensor(weights_key).to(weights.device)
            there = there if there.dim() == 2 else there[:, None]
            weights = by_rows(lambda w, t: torch.where(w != 0, w * t, 0.0), weights, there)
        updates: dict[str, Any] = {weights_key: weights}
        if drop != "weight":
            current = as_numbers(batch["response_mask"], "response_mask")
            keep = sent(self.keep if self.keep.dim() == 2 else self.keep[:, None], current.device)
            # What is no valid token is 0 already.
            updates["response_mask"] = blank_padding(current, keep)
            updates[ORIGINAL + "response_mask"] = batch.original("response_mask")
        if self.advantages is not None:
            batch.require(["advantages"])
            updates["advantages"] = batch.spread_advantages(self.advantages)
            updates[ORIGINAL + "advantages"] = batch.original("advantages")
        return updates
