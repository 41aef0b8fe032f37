"""Prompts between the data loader and the rollout, one by one, those of all ranks in the order of the data."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_dataflex.core.fields import ALIASES
from lightning_dataflex.core.plain import plain, restored
from lightning_dataflex.core.rollout import RolloutBatch
from lightning_dataflex.core.samples import Layout, joined, per_sample, rebuilt, taken
from lightning_dataflex.sync import Group, exchanged, num_ranks, own_rank

Kind = Literal["rows", "tensor", "columns"]
"""What a batch of prompts is: a list of rows, one tensor, or a column for each field."""


class PromptQueue:
    """The prompts that the loader has given and that wait for their turn, the same on every rank.

    A batch of prompts may be a list of rows, a tensor, or a dict with a column per field.

    Args:
        layout: What the columns of a batch are.
        process_group: The ranks that hold different prompts. Default: all.

    Example:
        >>> queue = PromptQueue(Layout())
        >>> queue.add([{"prompt_id": 7}, {"prompt_id": 8}])
        True
        >>> queue.batch(queue.take(1)), len(queue)
        ([{'prompt_id': 7}], 1)
    """

    def __init__(self, layout: Layout, process_group: Group = None) -> None:
        self.layout, self.process_group = layout, process_group
        self._waiting: deque[Any] = deque()
        self._kind: Kind | None = None
        self._like: Any = []
        self.batch_size = 0
        """Prompts of the largest batch that the loader has given, on one rank."""

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def world(self) -> int:
        """Number of ranks that roll out."""
        return num_ranks(self.process_group)

    @property
    def rank(self) -> int:
        """The place of this process among them."""
        return own_rank(self.process_group)

    def add(self, batch: Any, *, is_last: bool = False) -> bool:
        """The next batch of this rank's loader, None at its end. A collective.

        Args:
            batch: The batch.
            is_last: Whether no other comes after it.

        Returns:
            Whether every rank has another.
        """

        def own() -> tuple[dict[str, list[Any]], int]:
            rows = [] if batch is None else self._rows(batch)
            goes_on = batch is not None and not is_last
            # A sampler deals its stream out prompt by prompt: the places put it together again.
            said = [(-1, self.rank, goes_on), *((place, self.rank, row) for place, row in enumerate(rows))]
            return {"said": said}, len(said)

        columns, _ = exchanged(own, self.process_group, "prompts of the data loader")
        said = sorted(columns["said"], key=lambda each: each[:2])
        go_on, rows = [each for *_, each in said[: self.world]], [each for *_, each in said[self.world :]]
        self.batch_size = max(self.batch_size, -(-len(rows) // self.world))
        self._waiting.extend(rows)
        return all(go_on)

    def take(self, num: int) -> list[Any]:
        """The next so many prompts, or what there is."""
        return [self._waiting.popleft() for _ in range(min(num, len(self._waiting)))]

    def put_back(self, prompts: Sequence[Any]) -> None:
        """Prompts that were taken and not used come first again."""
        self._waiting.extendleft(reversed(prompts))

    def own(self, prompts: Sequence[Any]) -> list[Any]:
        """This rank's part of prompts that all ranks are to roll out, as many on each."""
        return list(prompts[self.rank : len(prompts) - len(prompts) % self.world : self.world])

    def batch(self, prompts: Sequence[Any]) -> Any:
        """These prompts as a batch of the loader's type."""
        if self._kind == "tensor":
            return torch.stack(list(prompts))
        if self._kind == "rows":
            return type(self._like)(prompts)
        return rebuilt(self._like, joined([(columns, 0) for columns in prompts], self.layout))

    def columns(self, prompts: Sequence[Any], names: Sequence[str], fields: Mapping[str, str]) -> RolloutBatch:
        """What a rule reads of these prompts."""
        return RolloutBatch({name: [self._value(prompt, name, fields) for prompt in prompts] for name in names})

    def _rows(self, batch: Any) -> list[Any]:
        self._like, self._kind = batch, _kind_of(batch)
        if self._kind != "columns":
            rows = list(batch)
        else:
            whole = RolloutBatch(batch)
            rows = [
                per_sample(RolloutBatch(taken(whole, torch.tensor([row]), self.layout)), self.layout)
                for row in range(whole.num_samples)
            ]
        for row in rows:
            # Said now, and not when a checkpoint is to be written.
            plain(row, "A prompt", copy=False)
        return rows

    def _value(self, prompt: Any, name: str, fields: Mapping[str, str]) -> Any:
        # A rollout batch may call a column otherwise than the prompts do.
        keys = [each for each in (fields.get(name), name, ALIASES.get(name)) if each is not None]
        for key in keys:
            if isinstance(prompt, Mapping) and key in prompt:
                return prompt[key][0] if self._kind == "columns" else prompt[key]
            if not isinstance(prompt, Mapping) and hasattr(prompt, key):
                return getattr(prompt, key)
        has = list(prompt) if isinstance(prompt, Mapping) else sorted(getattr(prompt, "__dict__", {}))
        raise ValueError(
            f"A prompt of the data loader has no {keys[0]!r}. It has: {', '.join(map(str, has)) or 'no fields'}. Give "
            f'every prompt one, or say which column it is: fields={{"{name}": "..."}}.'
        )

    def state_dict(self) -> dict[str, Any]:
        """The prompts that wait; the same on every rank."""
        waiting = [plain(prompt, "A prompt") for prompt in self._waiting]
        state = {"waiting": waiting, "batch_size": self.batch_size, "kind": self._kind, "shared": {}}
        if self._kind == "columns":
            columns = per_sample(RolloutBatch(self._like), self.layout)
            shared = {name: value for name, value in self._like.items() if name not in columns}
            state["shared"] = plain(shared, "A batch of prompts")
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self._waiting = deque(restored(prompt) for prompt in state["waiting"])
        self.batch_size, self._kind = state["batch_size"], state["kind"]
        self._like = restored(state["shared"]) if self._kind == "columns" else []


def _kind_of(batch: Any) -> Kind:
    if isinstance(batch, Tensor):
        return "tensor"
    if isinstance(batch, (list, tuple)) and not hasattr(batch, "_fields"):
        if any(isinstance(each, Tensor) for each in batch):
            raise ValueError(
                f"The loader gives a {type(batch).__name__} of tensors: they may be prompts, or columns of them. Give "
                "a mapping of columns, or a list of rows that are mappings (collate_fn=list)."
            )
        return "rows"
    if type(batch) is dict:
        return "columns"
    raise ValueError(
        f"The loader gives a {type(batch).__name__}, of which single prompts cannot be taken and put together again. "
        "Give a list of rows (collate_fn=list), a tensor, or a dict of columns."
    )
