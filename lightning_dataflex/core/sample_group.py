"""Groups of samples that travel by themselves: cut out of rollout batches, kept, and put together again."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
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
        """What a checkpoint holds; a ValueError where there is something that none can hold."""
        return {"columns": plain(self.columns, "A rollout batch"), "width": self.width, "born": self.born}

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> SampleGroup:
        """What `state_dict` was made from."""
        return cls(restored(state["columns"]), state["width"], state["born"])


def groups_of(
    batch: RolloutBatch, layout: Layout, born: int, among: Tensor | None = None, size: int | None = None
) -> list[SampleGroup]:
    """The groups of a batch, in the order in which they come first.

    Args:
        batch: With a `uid` of each sample.
        layout: What its fields are.
        born: The step in which it was generated.
        among: (N,) bool. Only groups with such a sample; default all.
        size: Samples of a group, where that is known: more with one `uid` are several groups.

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
            for start in range(0, len(places), size or len(places)):
                some = torch.tensor(places[start : start + (size or len(places))])
                part = per_sample(RolloutBatch(taken(batch, some, layout), batch.fields), layout)
                found.append(SampleGroup(_detached(part), width, born))
    return found


def together(groups: Sequence[SampleGroup], like: RolloutBatch, layout: Layout) -> Any:
    """A batch of the type of `like` with the samples of these groups, on its device.

    Groups of different rollouts that have the same `uid` get one of their own.
    """
    name = like.fields.get("uid", "uid")
    groups = _renamed(groups, name) if len(groups) > 1 else groups
    there, mask = per_sample(like, layout), like["response_mask"]
    devices = {name: _device(there.get(name)) or _device(mask) for name in groups[0].columns}
    parts = [{name: _moved(value, devices.get(name)) for name, value in group.columns.items()} for group in groups]
    widths = [group.width for group in groups]
    return rebuilt(like.source, joined(list(zip(parts, widths)), layout, like.fields))


def padding(batch: RolloutBatch, layout: Layout, size: int, born: int) -> SampleGroup:
    """A group of so many samples like those of a batch, with nothing but padding in it."""
    some = RolloutBatch(taken(batch, torch.zeros(size, dtype=torch.int64), layout), batch.fields)
    blank = RolloutBatch(blanked(some), batch.fields)
    return SampleGroup(_detached(per_sample(blank, layout)), batch.token_mask.shape[1], born)


def _detached(columns: Columns) -> Columns:
    return {name: _moved(value, None) for name, value in columns.items()}


def _device(value: Any) -> Any:
    if isinstance(value, Mapping):
        return next((each.device for each in value.values() if isinstance(each, Tensor)), None)
    return value.device if isinstance(value, Tensor) else None


def _moved(value: Any, device: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _moved(each, device) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_moved(each, device) for each in value)
    if isinstance(value, Tensor):
        return value.detach() if device is None else value.detach().to(device)
    return value


def _renamed(groups: Sequence[SampleGroup], name: str) -> list[SampleGroup]:
    firsts = [group.columns[name][0] for group in groups]
    names = [each.item() if isinstance(each, (Tensor, np.generic)) else each for each in firsts]
    taken_names, result = set(names), []
    seen: set[Any] = set()
    for group, uid in zip(groups, names):
        if uid in seen:
            uid = _free_name(uid, taken_names)
            taken_names.add(uid)
            group = replace(group, columns=group.columns | {name: filled(group.columns[name], uid)})
        seen.add(uid)
        result.append(group)
    return result


def _free_name(uid: Any, others: set[Any]) -> Any:
    """A name that nobody has, of the same type where that goes."""
    if isinstance(uid, (int, float)):
        return max(each for each in others if isinstance(each, (int, float))) + 1
    candidates = (f"{uid}~{i}" if isinstance(uid, str) else (uid, i) for i in itertools.count(2))
    return next(each for each in candidates if each not in others)


def filled(column: Any, value: Any) -> Any:
    """A column like this one, with one value in each row."""
    if isinstance(column, Tensor):
        return torch.full_like(column, value)
    filled = [value] * len(column)
    if not isinstance(column, np.ndarray):
        return filled
    array = np.empty(len(column), dtype=object)
    array[:] = filled
    return array.astype(column.dtype) if column.dtype.kind in "iuf" else array
