"""Batches of saved rollouts: what a rule reads of each step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_dataflex.core.compat import OTHER_ESTIMATORS
from lightning_dataflex.core.global_batch import joint_columns
from lightning_dataflex.core.registry import registered_name
from lightning_dataflex.core.rollout import RolloutBatch
from lightning_dataflex.functional.advantages import group_advantages
from lightning_dataflex.preview.rollouts import Rollouts, is_list

MOST_TOKENS = 2**31
"""Of the table of one step's tokens."""
ESTIMATORS = ("grpo", "dr_grpo", "rloo")


class SampleBatch(RolloutBatch):
    """Samples of which the number of tokens is known, and no token: what ranks send each other of theirs."""

    def require(self, names: Iterable[str]) -> None:
        super().require(name for name in names if name != "response_mask")


class Batches:
    """Gives the samples of a step as a batch for these rules.

    Args:
        rollouts: What was saved.
        parts: The scorer and the actuator.
        estimator: What computes advantages where they are read and not there.
        more: Further fields that are read.

    Raises:
        ValueError: A rule reads what the rollouts do not have.
    """

    def __init__(
        self, rollouts: Rollouts, parts: Sequence[Any], estimator: str | None, more: Sequence[str] = ()
    ) -> None:
        self.rollouts, self.notes = rollouts, list[str]()
        self._parts = parts
        self._estimator = estimator if estimator in ESTIMATORS else "grpo"
        self._own: dict[str, np.ndarray] = {}
        self._lists: dict[str, Any] = {}
        self._with_tokens: bool | None = None
        self._read = dict.fromkeys([name for part in parts for name in part.requires] + list(more))
        for name in self._read:
            reader = next((registered_name(part) for part in parts if name in part.requires), "A mixer")
            self._take(name, reader, estimator)
        self._computes = "advantages" in self._read and "advantages" not in self._own | self._lists

    def _take(self, name: str, reader: str, estimator: str | None) -> None:
        there = self.rollouts.columns
        if name in ("response_mask", "rm_scores", "uid", "domain") and (name in there or name == "response_mask"):
            return
        if name == "prompt_id" and "uid" in there:
            return
        column = self.rollouts.column(name)
        if column is not None and is_list(column):
            self._lists[name] = self.rollouts.lists(column)
        elif column is not None:
            self._own[name] = there[name] if name in there else self.rollouts.numbers(name, column).astype(np.float32)
        elif name == "advantages" and {"rm_scores", "uid"} <= set(there) and estimator not in OTHER_ESTIMATORS:
            self.notes.append(f"advantages are not there, and computed as {self._estimator} does, within each group")
        else:
            raise ValueError(self.rollouts.missing(name, reader))

    def batch(self, rows: slice) -> RolloutBatch:
        """That of some rows; of one with tokens where a rule must see them."""
        columns = self._columns(rows)
        batch = SampleBatch(columns)
        if self._with_tokens is None:
            # As between ranks: rules that cannot say what they need of a sample in a few numbers see its tokens.
            told = joint_columns([part.columns(batch) for part in self._parts])
            self._with_tokens = bool(self._lists) or told is None
        return self._table(columns, rows) if self._with_tokens else batch

    def _columns(self, rows: slice) -> dict[str, Any]:
        there = self.rollouts.columns
        columns: dict[str, Any] = {"num_tokens": torch.from_numpy(there["length"][rows])}
        for name in ("rm_scores", "uid"):
            if name in there:
                columns[name] = torch.from_numpy(there[name][rows])
        if "domain" in self._read:
            columns["domain"] = [self.rollouts.domains[code] for code in there["domain"][rows].tolist()]
        if "uid" in there:
            columns["prompt_id"] = columns["uid"]
        columns |= {name: torch.from_numpy(values[rows]) for name, values in self._own.items()}
        if self._computes:
            columns["advantages"] = group_advantages(columns["rm_scores"], columns["uid"], self._estimator)
        return columns

    def _table(self, columns: dict[str, Any], rows: slice) -> RolloutBatch:
        num_tokens = columns.pop("num_tokens")
        width = int(num_tokens.max().clamp(min=1))
        if len(num_tokens) * width > MOST_TOKENS:
            raise ValueError(
                f"A step has {len(num_tokens):,} samples of up to {width:,} tokens, too many for a rule that reads "
                "tokens. Give a step column, or fewer rows."
            )
        columns["response_mask"] = (torch.arange(width) < num_tokens[:, None]).long()
        for name, values in self._lists.items():
            columns[name] = _padded(name, values[rows], num_tokens, width)
        return RolloutBatch(columns)


def _padded(name: str, lists: Any, num_tokens: Tensor, width: int) -> Tensor:
    """Numbers of tokens (N, L), 0 after the last of each sample."""
    sizes = np.diff(lists.offsets.to_numpy())
    if (sizes != num_tokens.numpy()).any():
        raise ValueError(f"{name} has other numbers of tokens than length says. Give both of the same tokens.")
    table, numbers = np.zeros((len(sizes), width), np.float32), lists.flatten()
    try:
        table[np.arange(width) < sizes[:, None]] = numbers.to_numpy(zero_copy_only=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"The column for {name} holds lists of {numbers.type}. Give lists of numbers.") from error
    return torch.from_numpy(table)
