"""ReplayPool: solved responses by prompt, and how they enter the groups of a batch."""

from __future__ import annotations

import functools
import os
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_dataflex.core.checks import check_whole, is_whole
from lightning_dataflex.core.fields import is_per_sample
from lightning_dataflex.core.files import check_file, check_size
from lightning_dataflex.core.ids import prompt_ids
from lightning_dataflex.core.rollout import RolloutBatch, by_prompt
from lightning_dataflex.core.sample_group import SampleGroup
from lightning_dataflex.core.samples import Layout, joined, per_sample, rebuilt, taken, trimmed
from lightning_dataflex.functional.advantages import group_advantages
from lightning_dataflex.functional.choices import shown
from lightning_dataflex.functional.scoring import is_solved
from lightning_dataflex.functional.visits import uniform
from lightning_dataflex.sync import Group, exchanged

FORMAT = "lightning_dataflex.ReplayPool"
MOST_POOL_BYTES = 4 * 2**30
"""The largest pool that is read, unless more is asked for."""
LARGER = "Give a smaller file, or a larger max_bytes."


class ReplayPool:
    """Solved responses of each prompt, each with all fields of its rollout batch, its log-probabilities among them.

    Args:
        max_per_prompt: Responses that are kept of each prompt, the first ones; the same response is kept once.

    Example:
        >>> pool = ReplayPool(max_per_prompt=1)
        >>> batch = {"uid": [7, 7], "rm_scores": torch.tensor([0.0, 1.0]), "response_mask": torch.ones(2, 1)}
        >>> pool.add(solved(RolloutBatch(batch), Layout(), threshold=0.5))
        1
        >>> len(pool), [sample.columns["rm_scores"] for sample in pool.drawn(7, 2)]
        (1, [tensor([1.])])
    """

    def __init__(self, max_per_prompt: int = 8) -> None:
        check_whole("max_per_prompt", max_per_prompt, 1)
        self.max_per_prompt = max_per_prompt
        self._samples: dict[int, list[SampleGroup]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._samples.values()))

    def has_room(self, prompt: int) -> bool:
        """Whether another response of this prompt would be kept."""
        return len(self._samples.get(prompt, ())) < self.max_per_prompt

    def add(self, samples: Sequence[tuple[int, SampleGroup]], mask: str = "response_mask") -> int:
        """Keep responses, each with the id of its prompt; how many were new and had room.

        Args:
            mask: What their batch calls `response_mask`: two with the same valid `input_ids` are the same.
        """
        before = len(self)
        for prompt, sample in samples:
            there = self._samples.setdefault(prompt, [])
            if self.has_room(prompt) and not any(_same(sample, each, mask) for each in there):
                there.append(sample.on_cpu())
        return len(self) - before

    def drawn(self, prompt: int, num: int, *key: int) -> list[SampleGroup]:
        """At most so many responses to a prompt, without replacement; which follows from the key."""
        there = self._samples.get(prompt, [])
        order = torch.argsort(uniform(torch.arange(len(there)), *key, prompt), stable=True)
        return [there[place] for place in order[:num].tolist()]

    def state_dict(self) -> dict[str, Any]:
        """All of it, as tensors, lists, numbers and texts."""
        samples = {prompt: [each.state_dict() for each in there] for prompt, there in self._samples.items()}
        return {"format": FORMAT, "samples": samples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave; a ValueError for anything else."""
        if not isinstance(state, Mapping) or state.get("format") != FORMAT:
            raise ValueError(f"The state is {shown(state)}. Give one of {FORMAT}.")
        most = self.max_per_prompt
        self._samples = {
            prompt: [SampleGroup.of_state(each) for each in there[:most]] for prompt, there in state["samples"].items()
        }
        for prompt, there in self._samples.items():
            for each in there:
                if not is_whole(prompt) or not is_whole(each.width) or not all(map(_is_one_row, each.columns.values())):
                    raise ValueError(f"What the state has of prompt {shown(prompt)} is no response. Collect it anew.")

    def _num_bytes(self) -> int:
        """What the tensors of all responses take, each in memory of its own."""
        return sum(
            _num_bytes(column) for there in self._samples.values() for each in there for column in each.columns.values()
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file, which is there whole or not at all."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = target.with_name(f"{target.name}.part")
        torch.save(self.state_dict(), beside)
        os.replace(beside, target)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], max_per_prompt: int = 8, max_bytes: int = MOST_POOL_BYTES
    ) -> ReplayPool:
        """That of a file. Nothing in it is run.

        Args:
            path: What `save` wrote.
            max_per_prompt: See `ReplayPool`.
            max_bytes: The largest file to read.

        Raises:
            ValueError: There is no file, or it is none that `save` wrote, or not whole, or too large.
        """
        pool, name = cls(max_per_prompt), repr(os.fspath(path))
        check_file(path, max_bytes, "Collect a pool first, and give its file.")
        try:
            with zipfile.ZipFile(path) as parts:
                size = sum(part.file_size for part in parts.infolist())
            # What is packed is larger than its file.
            state = torch.load(path, map_location="cpu", weights_only=True) if size <= max_bytes else {}
        except Exception as error:  # in the words of whatever failed to read it
            raise ValueError(
                f"{name} cannot be read as a pool of responses, or not whole. Give a file that ReplayPool.save wrote."
            ) from error
        check_size(name, size, max_bytes, LARGER)
        try:
            pool.load_state_dict(state)
        except Exception as error:  # whatever it holds in the place of responses
            raise ValueError(f"{name} is no pool of responses. Give a file that ReplayPool.save wrote.") from error
        check_size(name, pool._num_bytes(), max_bytes, LARGER)
        return pool


def _is_one_row(column: Any) -> bool:
    """Whether a column, or each of a mapping of them, is of one sample."""
    if isinstance(column, Mapping):
        return all(map(_is_one_row, column.values()))
    return not is_per_sample(column) or len(column) == 1


def _num_bytes(column: Any) -> int:
    if isinstance(column, Mapping):
        return sum(map(_num_bytes, column.values()))
    return column.nbytes if isinstance(column, (Tensor, np.ndarray)) else 0


def solved(
    batch: RolloutBatch, layout: Layout, threshold: float, step: int = 0, wanted: Callable[[int], bool] | None = None
) -> list[tuple[int, SampleGroup]]:
    """The responses whose reward is above the threshold, each with the id of its prompt.

    Args:
        batch: A rollout batch, with `rm_scores` and the `prompt_id` or `uid` of each sample.
        layout: What its fields are.
        threshold: Of the reward.
        step: In which it was generated.
        wanted: Of which prompts; default all.
    """
    ids = prompt_ids(by_prompt(batch)).tolist()
    found = []
    for row in is_solved(batch.outcomes, threshold).nonzero().flatten().tolist():
        if wanted is None or wanted(ids[row]):
            one = RolloutBatch(taken(batch, torch.tensor([row]), layout), batch.fields)
            one = RolloutBatch(trimmed(one, layout, strict=False), batch.fields)
            found.append((ids[row], SampleGroup(per_sample(one, layout), one.token_mask.shape[1], step)))
    return found


def with_replayed(
    batch: RolloutBatch, pool: ReplayPool, num: int, layout: Layout, estimator: str | None, group: Group, *key: int
) -> tuple[Any, int]:
    """The batch with at most `num` responses of the pool in each group, and how many came in on all ranks.

    A collective. They stand behind the samples of their group, and its advantages are those of the group with them.

    Source: RLEP, Zhang et al. 2025, arXiv:2507.07451.

    Args:
        batch: This rank's rollouts.
        pool: The same on every rank.
        num: M in the paper, beside G fresh responses.
        layout: What the fields of the batch are.
        estimator: How a group's advantages are computed.
        group: The ranks that hold different samples.
        key: What the draw follows from: a seed, and the step.
    """
    everyone, mine = exchanged(lambda: ({"uid": batch.group_ids}, len(batch)), group, "groups for a replay")
    chosen = _chosen(batch, everyone["uid"], mine, pool, num, key)
    # Inside of the exchange, which tells the other ranks of an error.
    extended = functools.cache(lambda: _put_in(batch, chosen, layout) if chosen else batch)
    all_rows, rows = exchanged(
        lambda: ({"rm_scores": extended().outcomes, "uid": extended().group_ids}, len(extended())),
        group,
        "rewards for a replay",
    )
    whole = extended()
    num_added = len(all_rows["uid"]) - len(everyone["uid"])
    if not num_added:
        return batch.source, 0
    advantages = group_advantages(all_rows["rm_scores"], all_rows["uid"], estimator)[rows]
    there, new = torch.as_tensor(whole["advantages"]), whole.spread_advantages(advantages)
    # A group without a replayed response keeps what the module gave it.
    names, sizes = torch.unique(torch.cat([all_rows["uid"], everyone["uid"]]), return_counts=True)
    old_sizes = torch.unique(everyone["uid"], return_counts=True)[1]
    grown = names[sizes != 2 * old_sizes]
    changed = torch.isin(whole.group_ids, grown).to(there.device)
    changed = changed if there.dim() == 1 else changed[:, None]
    return whole.replaced({"advantages": torch.where(changed, new, there)}), num_added


def _chosen(
    batch: RolloutBatch, uid: Tensor, mine: slice, pool: ReplayPool, num: int, key: Sequence[int]
) -> dict[int, list[SampleGroup]]:
    """What comes behind each of this rank's rows: responses for the groups whose first sample of all ranks it has."""
    prompts, own = prompt_ids(by_prompt(batch)).tolist(), batch.group_ids.tolist()
    before = set(uid[: mine.start].tolist())
    last = {name: row for row, name in enumerate(own)}
    first = {name: row for row, name in reversed(list(enumerate(own)))}
    drawn = {last[name]: pool.drawn(prompts[row], num, *key) for name, row in first.items() if name not in before}
    return {row: samples for row, samples in drawn.items() if samples}


def _put_in(batch: RolloutBatch, chosen: Mapping[int, Sequence[SampleGroup]], layout: Layout) -> RolloutBatch:
    columns, name = per_sample(batch, layout), batch.fields.get("uid", "uid")
    parts, order = [(columns, batch.token_mask.shape[1])], []
    for row in range(len(batch)):
        order.append(row)
        for sample in chosen.get(row, ()):
            lacking = set(columns) ^ set(sample.columns)
            if lacking:
                raise ValueError(
                    f"{', '.join(sorted(map(str, lacking)))} is not a field of both the pool's responses and the "
                    "rollout batch. Collect the pool with the module that it is replayed to."
                )
            renamed = sample.columns | {name: columns[name][row : row + 1]}
            order.append(len(batch) + len(parts) - 1)
            parts.append((_like(renamed, columns), sample.width))
    whole = RolloutBatch(rebuilt(batch.source, joined(parts, layout, batch.fields)), batch.fields)
    return RolloutBatch(taken(whole, torch.tensor(order), layout), batch.fields)


def _like(columns: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """The same columns on the devices and in the number types of the others."""
    result = {}
    for name, value in columns.items():
        there = others[name]
        if isinstance(value, Mapping) and isinstance(there, Mapping) and set(value) == set(there):
            value = _like(value, there)
        elif isinstance(value, Tensor) and isinstance(there, Tensor):
            value = value.to(there)
        result[name] = value
    return result


def _same(one: SampleGroup, other: SampleGroup, mask: str) -> bool:
    """Whether two responses have the same tokens, as far as their batch says which they have."""
    tokens = [_tokens(each, mask) for each in (one, other)]
    return tokens[0] is not None and tokens[0] == tokens[1]


def _tokens(sample: SampleGroup, mask: str) -> list[int] | None:
    ids, valid = sample.columns.get("input_ids"), sample.columns.get(mask)
    if not isinstance(ids, Tensor) or valid is None:
        return None
    return ids[0, ids.shape[1] - sample.width :][torch.as_tensor(valid)[0] != 0].tolist()
