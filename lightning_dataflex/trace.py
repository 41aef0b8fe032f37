"""DecisionTrace: what became of every sample of a run, in a file."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lightning_dataflex.asking import holds_first_copy
from lightning_dataflex.core.decision import Decision
from lightning_dataflex.core.fields import is_per_sample
from lightning_dataflex.core.rollout import RolloutBatch
from lightning_dataflex.core.summary import REASONS
from lightning_dataflex.sync import Group, exchanged, num_ranks, own_rank
from lightning_dataflex.trace_files import COLUMNS, Part
from lightning_dataflex.writing import check_folder

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

MOST_WAITING = 10_000
"""Rows of this rank that are held before they are written."""


class DecisionTrace:
    """Writes a row for each sample of each decision.

    Every rank writes the samples that it holds to a part of its own, and nothing travels between ranks but for how
    many rows there are at the start.

    Args:
        path: Ends in `.jsonl` or `.parquet`.
        every: Only the decisions of every so many steps.
        max_rows: Of all ranks together; what comes after them is not written.
        label: What the callback is called, in every row.
    """

    def __init__(self, path: str | os.PathLike[str], every: int, max_rows: int, label: str) -> None:
        self.path, self.every, self.max_rows, self.label = Path(path), every, max_rows, label
        self._part: Part | None = None
        self._writes = self._is_full = False
        self._num_rows = 0
        self._waiting: list[dict[str, Any]] = []

    def begin(self, pl_module: LightningModule, group: Group, step: int) -> None:
        """A fit begins, or goes on, with this step; earlier rows of it and of later steps are taken out. A collective.

        Raises:
            ValueError: Nothing can be written there, or a run that begins anew finds the trace of another.
        """
        rank, world = own_rank(group), num_ranks(group)
        self._part, self._waiting, self._is_full = Part.of(self.path, rank), [], False
        self._writes = holds_first_copy(pl_module)

        def there() -> tuple[dict[str, torch.Tensor], int]:
            # A run may have had other ranks before: each looks after what theirs have left.
            found = [each for each in Part.of(self.path).ranks() if each % world == rank and self._writes]
            if found and not step:
                raise ValueError(
                    f"There is a trace at {str(self.path)!r} already, and this run does not go on from a checkpoint. "
                    "Move it, or give another path as trace."
                )
            check_folder(self.path.parent, self.label)
            return {"num_rows": torch.tensor([sum(Part.of(self.path, each).cut(step) for each in found)])}, 1

        columns, _ = exchanged(there, group, "what there is of a trace")
        self._num_rows = int(columns["num_rows"].sum())

    def add(self, batch: RolloutBatch, decision: Decision, step: int, *, scored: bool = True) -> None:
        """One more decision, on this batch; `scored` is False where the rule was not asked."""
        if self._part is None or step % self.every or self._is_full:
            return
        # All ranks count the samples of all ranks, and stop at the same decision.
        self._num_rows += int((decision.summary.numbers["num_tokens"] > 0).sum())
        if self._num_rows > self.max_rows:
            self._is_full = True
            warnings.warn(
                f"The trace of {self.label} would have more than {self.max_rows:,} rows (trace_rows): nothing is "
                f"written of step {step} and after. To see more of a run, raise trace_every.",
                UserWarning,
                stacklevel=2,
            )
            return
        if self._writes:
            self._waiting.append(_rows(batch, decision, step, self.label, scored=scored))
        if sum(len(rows["step"]) for rows in self._waiting) >= MOST_WAITING:
            self.flush()

    def flush(self) -> None:
        """Write what waits."""
        waiting, self._waiting = [rows for rows in self._waiting if len(rows["step"])], []
        if waiting:
            assert self._part is not None
            self._part.append({name: _joined([rows[name] for rows in waiting]) for name in COLUMNS})

    def end(self) -> None:
        """The fit is over, whether it has come to its end or not."""
        self.flush()
        self._part = None


def _rows(batch: RolloutBatch, decision: Decision, step: int, label: str, *, scored: bool) -> dict[str, Any]:
    columns: dict[str, Any] = {name: column.numpy() for name, column in decision.columns(batch).items()}
    valid = columns["length"] > 0
    columns = {name: column[valid] for name, column in columns.items()}
    if not scored:
        columns["score"] = np.full_like(columns["score"], np.nan)
    columns["reason"] = [REASONS[i] for i in columns["reason"]]
    num = int(valid.sum())
    names = {name: _texts(batch, name, valid) for name in ("uid", "domain")}
    return columns | names | {"step": np.full(num, step), "label": [label] * num}


def _texts(batch: RolloutBatch, name: str, valid: np.ndarray) -> list[str | None]:
    """A field of the samples that count as texts that can be written, None where there is none."""
    values = batch.original(name)
    if is_per_sample(values):
        batch.check_rows(name, values)
    else:
        # One value is that of every sample.
        values = [values] * len(valid)
    items = values.tolist() if hasattr(values, "tolist") else values
    return [_text(item) for item, counts in zip(items, valid) if counts]


def _text(item: Any) -> str | None:
    if isinstance(item, torch.Tensor):
        item = item.tolist()
    # Half of a surrogate pair is no text in UTF-8.
    return None if item is None else str(item).encode("utf-8", "backslashreplace").decode("utf-8")


def _joined(parts: list[Any]) -> Any:
    return np.concatenate(parts) if isinstance(parts[0], np.ndarray) else [value for part in parts for value in part]
