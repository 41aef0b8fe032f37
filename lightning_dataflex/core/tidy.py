"""A batch as the author of a rule sees it: without padding, without samples that cannot be scored, in full precision.

A rule in plain code, a mean over a group or a top-k, is then right as it stands; what it returns is spread
over the rows of the whole batch again.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_dataflex.core.containers import as_tensor
from lightning_dataflex.core.fields import FieldView, is_per_sample
from lightning_dataflex.core.numbers import dense
from lightning_dataflex.core.rollout import RolloutBatch
from lightning_dataflex.functional.blocks import blank_padding
from lightning_dataflex.functional.comparing import is_nan
from lightning_dataflex.functional.groups import group_index
from lightning_dataflex.functional.scoring import unscored
from lightning_dataflex.functional.tokens import any_nan


class TidyBatch(RolloutBatch):
    """The rows of a batch that count, with 0 in padding tokens whatever stood there.

    Through `.batch`, fields have verl's layout of one value per token: a reward per sample stands at its last
    valid token, an advantage per sample at each of them. Group ids of mixed types are read as their `stable_ids`.
    What it gives is read-only: it may be the module's own.

    Args:
        batch: The batch as it came.
        rows: (N,) bool, the samples that count.
        by_mask: Whether the others may stay, as samples without a valid token. They do on an accelerator, which would
            have to be waited for to take them out.

    Example:
        >>> mask = torch.tensor([[1, 1], [0, 0]])
        >>> whole = RolloutBatch({"rm_scores": torch.tensor([1.0, 5.0]), "response_mask": mask})
        >>> tidy = TidyBatch(whole, torch.tensor([True, False]))
        >>> tidy["rm_scores"], tidy.batch["rm_scores"]
        (tensor([1.]), tensor([[0., 1.]]))
    """

    def __init__(self, batch: RolloutBatch, rows: Tensor, *, by_mask: bool = False) -> None:
        super().__init__(batch.source, batch.fields)
        self._whole, self._rows = batch, rows
        mask = batch.token_mask if by_mask else None
        self._blank = mask is not None and rows.device == mask.device and rows.device.type != "cpu"
        self.num_samples = len(rows) if self._blank else int(rows.sum())
        self._all_stay = self.num_samples == len(rows)
        if mask is not None and self._blank:
            self.response_mask = mask & rows[:, None]
            self.num_tokens = batch.num_tokens * rows

    def __getitem__(self, name: str) -> Any:
        if name not in self._whole:
            raise KeyError(self.missing(name))
        value = self._whole.original(name)
        mask = self.response_mask if self._blank else self._whole.response_mask
        if name == "uid" and not isinstance(value, Tensor) and len({type(uid) for uid in value}) > 1:
            # Ids of several types cannot be sorted, as `np.unique` does.
            value = self._whole.group_ids.cpu().numpy()
        table = as_tensor(value)
        # The batch's own mask has no padding of its own, unless rows of it do not count.
        has_padding = self._blank or name != "response_mask"
        if isinstance(table, Tensor) and mask is not None and table.shape == mask.shape and has_padding:
            value = blank_padding(table, mask)
        if isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16):
            value = value.float()
        return self.of_rows(value)

    def missing(self, name: str) -> str:
        return f"{super().missing(name)} Or the rule does not declare it: add it to requires."

    def __setitem__(self, name: str, value: Any) -> None:
        raise TypeError(f"A rule reads its batch and cannot write {name!r} into it. Return what it finds.")

    def original(self, name: str) -> Any:
        return self.get(name)

    @property
    def batch(self) -> FieldView:
        return FieldView(self, self._per_token)

    @functools.cached_property
    def response_mask(self) -> Tensor | None:
        return self.of_rows(self._whole.response_mask)

    @functools.cached_property
    def num_tokens(self) -> Tensor:
        return self.of_rows(self._whole.num_tokens)

    @functools.cached_property
    def outcomes(self) -> Tensor:
        return self.of_rows(self._whole.outcomes)

    @functools.cached_property
    def group_ids(self) -> Tensor:
        return self.of_rows(self._whole.group_ids)

    @functools.cached_property
    def groups(self) -> tuple[Tensor, int]:
        # The rules of a step share one sort of the ids, unless rows are left out.
        return self._whole.groups if self._all_stay else group_index(self.of_rows(self._whole.groups[0]))

    def of_rows(self, value: Any) -> Any:
        """Those of the samples that count, of a value with an entry for each sample; any other value as it is."""
        if self._all_stay or not is_per_sample(value) or len(value) != len(self._rows):
            return value
        if isinstance(value, Tensor):
            return value[self._rows.to(value.device)]
        index = self._rows.nonzero().flatten().tolist()
        return value[index] if isinstance(value, np.ndarray) else [value[i] for i in index]

    def placed(self, values: Tensor, fill: float) -> Tensor:
        """Values of the samples that count at their places in the whole batch, `fill` elsewhere."""
        if self._blank:
            rows = self._rows.to(values.device)
            return torch.where(rows if values.dim() == 1 else rows[:, None], values, fill)
        if self._all_stay:
            return values
        whole = torch.full((len(self._rows), *values.shape[1:]), fill, dtype=values.dtype, device=values.device)
        whole[self._rows.to(values.device)] = values
        return whole

    def tokens(self, name: str) -> Tensor:
        """A field of token numbers as a tensor (N, L), with anything in padding: for who reads it with the mask."""
        return self.of_rows(self._whole.tokens(name))

    def _per_token(self, name: str) -> Any:
        value, mask = as_tensor(self[name]), self.response_mask
        if name not in ("rm_scores", "advantages") or mask is None or not isinstance(value, Tensor) or value.dim() != 1:
            return value
        if name == "rm_scores":
            mask = mask & (mask.cumsum(1) == mask.sum(1, keepdim=True))
        return torch.where(mask, value[:, None], torch.zeros((), dtype=value.dtype, device=value.device))


def scorable(batch: RolloutBatch, names: Iterable[str]) -> Tensor:
    """(N,) bool: the samples that have a valid token and no NaN among the valid values of these fields."""
    rows = batch.has_tokens
    for name in names:
        if name == "rm_scores" and name in batch:
            rows = rows & ~is_nan(batch.outcomes).to(rows.device)
            continue
        value = as_tensor(batch.original(name))
        if isinstance(value, Tensor) and value.dim() and value.is_floating_point() and name != "uid":
            value = dense(value, name)
            batch.check_rows(name, value)
            mask = batch.response_mask
            inside = mask.to(value.device) if mask is not None and mask.shape == value.shape else None
            rows = rows & ~any_nan(value if value.dim() > 1 else value[:, None], inside).to(rows.device)
    return rows


def fields_screened(part: Any) -> Iterable[str]:
    """The fields in which a NaN leaves a sample out for a scorer or an actuator."""
    return part.requires if part.screened is None else part.screened


def scored(batch: RolloutBatch, scores: Tensor) -> Tensor:
    """(N,) bool: the samples that have a valid token and a score."""
    return ~unscored(scores) & batch.has_tokens.to(scores.device)
