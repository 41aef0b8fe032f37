"""Groups of samples that travel by themselves: cut out of rollout batches, kept, and put together again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_dataflex.core.plain import plain, restored
from lightning_dataflex.core.rollout import RolloutBatch
from lightning_dataflex.core.samples import Columns, Layout, blanked, joined, per_sample, rebuilt, taken


@dataclass(frozen=True)
class SampleGroup:
    """The samples of one prompt.

    Attributes:
        columns: Their fields.
        width: L of their batch.
        born: The step in which they were generated.
    """

    columns: Columns
    width: int
    born: int

    def on_cpu(self) -> SampleGroup:
        """The same in main memory, sharing nothing with its batch."""
        return SampleGroup({name: _moved(value, "cpu") for name, value in self.columns.items()}, self.width, self.born)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"columns": plain(self.columns, "A rollout batch"), "width": self.width, "born": self.born}

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> SampleGroup:
        """What `state_dict` was made from."""
        return cls(restored(state["columns"]), state["width"], state["born"])


def groups_of(batch: RolloutBatch, layout: Layout, born: int, among: Tensor | None = None) -> list[SampleGroup]:
    """The groups of a batch, in the order in which they come first.

    Args:
        batch: With a `uid` of each sample.
        layout: What its fields are.
        born: The step in which it was generated.
        among: (N,) bool. Only groups with such a sample; default all.

    Example:
        >>> batch = RolloutBatch({"uid": ["a", "b", "a"], "response_mask": torch.ones(3, 2)})
        >>> [group.columns["uid"] for group in groups_of(batch, Layout(), 0)]
        [['a', 'a'], ['b']]
    """
    ids = batch.group_ids.cpu().tolist()
    rows: dict[int, list[int]] = {}
    for row, uid in enumerate(ids):
        rows.setdefault(uid, []).append(row)
    chosen = {uid for uid, inside in zip(ids, among.cpu().tolist()) if inside} if among is not None else set(ids)
    width = batch.token_mask.shape[1]
    found = []
    for uid, places in rows.items():
        if uid in chosen:
            part = RolloutBatch(taken(batch, torch.tensor(places), layout), batch.fields)
            found.append(SampleGroup(per_sample(part, layout), width, born))
    return found


def together(groups: Sequence[SampleGroup], like: RolloutBatch, layout: Layout) -> Any:
    """A batch of the type of `like` with the samples of these groups, on its device."""
    columns = joined([(group.columns, group.width) for group in groups], layout, like.fields)
    there = per_sample(like, layout)
    placed = {name: _moved(value, _device(there.get(name))) for name, value in columns.items()}
    return rebuilt(like.source, placed)


def padding(group: SampleGroup, like: RolloutBatch, layout: Layout) -> SampleGroup:
    """A group of the same shape with nothing but padding in it."""
    blank = RolloutBatch(blanked(RolloutBatch(together([group], like, layout), like.fields)), like.fields)
    return SampleGroup(per_sample(blank, layout), group.width, group.born)


def _device(value: Any) -> Any:
    if isinstance(value, Mapping):
        return next((each.device for each in value.values() if isinstance(each, Tensor)), None)
    return value.device if isinstance(value, Tensor) else None


def _moved(value: Any, device: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _moved(each, device) for key, each in value.items()}
    return value.detach().to(device) if isinstance(value, Tensor) and device is not None else value
