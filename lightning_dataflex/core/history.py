"""What is remembered of each prompt over a run: numbers under a 64-bit id, in arrays, of at most so many prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_dataflex.core.checks import check_whole
from lightning_dataflex.functional.groups import group_differs, group_index, group_mean, group_size, group_sum
from lightning_dataflex.functional.scoring import is_solved


@dataclass(frozen=True)
class Visits:
    """What the responses to each prompt of a step were worth, over all ranks: one entry per prompt, (K,) each.

    Attributes:
        ids: int64, ascending; see `stable_ids`.
        num: Responses that have a reward, at least 1.
        rewards: Their mean reward.
        solved: How many of them are above the threshold that it was asked for.
        has_signal: bool, whether their rewards differ.
    """

    ids: Tensor
    num: Tensor
    rewards: Tensor
    solved: Tensor
    has_signal: Tensor

    @classmethod
    def of(cls, ids: Tensor, outcomes: Tensor, success_threshold: float = 0.5) -> Visits:
        """Those of samples (N,) with these ids and outcomes; a sample whose outcome is NaN is none.

        Example:
            >>> visits = Visits.of(torch.tensor([7, 7, 9]), torch.tensor([1.0, 0.0, 1.0]))
            >>> visits.ids.tolist(), visits.solved.tolist(), visits.has_signal.tolist()
            ([7, 9], [1.0, 1.0], [True, False])
        """
        ids, outcomes = ids.cpu(), outcomes.cpu()
        valid = outcomes.isfinite()
        ids, outcomes = ids[valid], outcomes[valid]
        everyone = torch.ones_like(ids, dtype=torch.bool)
        group, num_groups = group_index(ids)
        solved = is_solved(outcomes, success_threshold).double()
        return cls(
            ids=torch.unique(ids),
            num=group_size(group, num_groups, everyone),
            rewards=group_mean(outcomes, group, num_groups, everyone),
            solved=group_sum(solved, group, num_groups, everyone),
            has_signal=group_differs(outcomes, group, num_groups, everyone),
        )


class PromptHistory:
    """A table of numbers by prompt id; what was not visited for the longest is forgotten first.

    A prompt takes 16 bytes and 4 for each column.

    Args:
        columns: The names of the numbers, and what stands for a prompt that was never seen.
        max_prompts: How many are remembered.

    Example:
        >>> history = PromptHistory({"num": 0.0}, max_prompts=2)
        >>> history.put(torch.tensor([7, 9]), {"num": torch.tensor([1.0, 2.0])}, step=0)
        >>> history.put(torch.tensor([8]), {"num": torch.tensor([3.0])}, step=1)
        >>> history.seen(torch.tensor([7, 8, 9])), history.look_up(torch.tensor([8, 1]))["num"]
        (tensor([False,  True,  True]), tensor([3., 0.]))
    """

    def __init__(self, columns: Mapping[str, float], max_prompts: int = 1_000_000) -> None:
        check_whole("max_prompts", max_prompts, 1)
        self.unseen, self.max_prompts = dict(columns), max_prompts
        self._ids = np.empty(0, np.int64)
        self._last = np.empty(0, np.int64)
        self._columns = {name: np.empty(0, np.float32) for name in columns}

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""
        return self._ids.nbytes + self._last.nbytes + sum(column.nbytes for column in self._columns.values())

    def seen(self, ids: Tensor) -> Tensor:
        """(N,) bool: whether a prompt is in the table."""
        return torch.from_numpy(self._places(ids.cpu().numpy())[1])

    def look_up(self, ids: Tensor) -> dict[str, Tensor]:
        """The numbers (N,) float32 of these prompts."""
        place, found = self._places(ids.cpu().numpy())
        result = {}
        for name, column in self._columns.items():
            values = np.full(len(place), self.unseen[name], np.float32)
            values[found] = column[place[found]]
            result[name] = torch.from_numpy(values)
        return result

    def put(self, ids: Tensor, values: Mapping[str, Tensor], step: int) -> None:
        """Remember numbers (N,) of these prompts, each of which is named once."""
        if set(values) != set(self._columns):
            raise ValueError(
                f"The history has the columns {', '.join(self._columns) or '(none)'}, but was given "
                f"{', '.join(values) or 'none'}. Name them in columns_remembered."
            )
        order = np.argsort(ids.cpu().numpy())
        sorted_ids = ids.cpu().numpy()[order]
        given = {name: values[name].cpu().numpy().astype(np.float32)[order] for name in self._columns}
        place, found = self._places(sorted_ids)
        for name, column in self._columns.items():
            column[place[found]] = given[name][found]
        self._last[place[found]] = step
        new = ~found
        if new.any():
            self._ids = np.insert(self._ids, place[new], sorted_ids[new])
            self._last = np.insert(self._last, place[new], step)
            for name, column in self._columns.items():
                self._columns[name] = np.insert(column, place[new], given[name][new])
        if len(self._ids) > self.max_prompts:
            self._forget(len(self._ids) - self.max_prompts)

    def _places(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where each id is, or would be, and whether it is there."""
        place = np.searchsorted(self._ids, ids)
        inside = np.minimum(place, max(len(self._ids) - 1, 0))
        return place, (self._ids[inside] == ids if len(self._ids) else np.zeros(len(ids), bool))

    def _forget(self, count: int) -> None:
        # A sixteenth more than it must, so that it need not at every step.
        count += self.max_prompts // 16
        # Of prompts of the same step those with the smallest id, on every rank.
        keep = np.sort(np.argsort(self._last, kind="stable")[count:])
        self._ids, self._last = self._ids[keep], self._last[keep]
        self._columns = {name: column[keep] for name, column in self._columns.items()}

    def state_dict(self) -> dict[str, Any]:
        """Everything that is remembered, as tensors."""
        columns = {name: torch.from_numpy(column.copy()) for name, column in self._columns.items()}
        return {"ids": torch.from_numpy(self._ids.copy()), "last": torch.from_numpy(self._last.copy())} | columns

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self._ids = state["ids"].cpu().numpy().astype(np.int64)
        self._last = state["last"].cpu().numpy().astype(np.int64)
        self._columns = {name: state[name].cpu().numpy().astype(np.float32) for name in self._columns}
        sizes = {len(self._ids), len(self._last), *map(len, self._columns.values())}
        if len(sizes) > 1:
            raise ValueError(f"The history has columns of {min(sizes)} to {max(sizes)} prompts. Each has one of all.")
