"""The global batch: what a rule has to know of the samples of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

from torch import Tensor

from lightning_dataflex.core.fields import is_per_sample
from lightning_dataflex.core.home import at_home
from lightning_dataflex.core.rollout import RolloutBatch
from lightning_dataflex.packing import Columns
from lightning_dataflex.sync import Group, exchanged, num_ranks

LOWEST = "lowest of the mask"
"""A name that is no field's."""


class Part(Protocol):
    """A scorer or an actuator, as far as it reads a batch."""

    @property
    def requires(self) -> Iterable[str]: ...

    @property
    def remembers(self) -> bool: ...

    def columns(self, batch: RolloutBatch) -> dict[str, Tensor] | None: ...


def global_batch(
    local: Callable[[], RolloutBatch],
    parts: Iterable[Part],
    group: Group,
    what: str,
    more: Mapping[str, Callable[[], Tensor]] = MappingProxyType({}),
) -> tuple[RolloutBatch, slice, dict[str, Tensor]]:
    """The samples of all ranks, which of them are this rank's, and further columns. A collective.

    On one process it is the batch itself, or what of it the parts have to know; see `in_brief`.

    Args:
        local: Gives this rank's batch. An error in it is raised on every rank.
        parts: What reads the global batch.
        group: The ranks that take part; None for all.
        what: The name of what is exchanged, for an error.
        more: Gives further columns of this rank's samples, under names that are no field's.
    """
    if num_ranks(group) == 1:
        batch = local()
        return (
            in_brief(batch, parts, local_ids=True),
            slice(0, batch.num_samples),
            {name: column() for name, column in more.items()},
        )

    def own() -> tuple[Columns, int]:
        batch = local()
        own_more = {name: column() for name, column in more.items()}
        return rewards_and_groups(batch) | telling_columns(batch, parts) | own_more, batch.num_samples

    columns, rows = exchanged(own, group, what)
    further = {name: columns.pop(name) for name in more}
    return RolloutBatch(_constants(local(), parts) | columns), rows, further


def in_brief(batch: RolloutBatch, parts: Iterable[Part], *, local_ids: bool = False) -> RolloutBatch:
    """What these parts have to know of each sample as a batch of a few columns, where they can say; else the batch.

    Tables of tokens are then read once, whatever is done with the columns, which are in main memory.

    Args:
        batch: That of this rank.
        parts: What reads it.
        local_ids: Whether there is no other rank, so that ids have to tell groups of this batch apart and no others.
    """
    parts = list(parts)
    # What remembers may do so under the ids of groups.
    local_ids = local_ids and not any(part.remembers for part in parts)
    lowest = batch.lowest_in_mask()
    own = {"rm_scores": batch.outcomes} if "rm_scores" in batch else {}
    columns = _told(batch.with_local_ids() if local_ids else batch, parts)
    if columns is None:
        batch.check_mask(lowest)
        return batch
    brief = own | {"num_tokens": batch.num_tokens} | columns
    groups = batch.told_apart.groups if "uid" in batch else None
    if "uid" in batch:
        brief["uid"] = groups[0] if local_ids and groups is not None else batch.told_apart.ids
    brief = at_home(brief | ({} if lowest is None else {LOWEST: lowest}))
    batch.check_mask(brief.pop(LOWEST, None))
    found = RolloutBatch(_constants(batch, parts) | brief)
    if groups is not None:
        found.groups = groups
    return found


def _told(batch: RolloutBatch, parts: Iterable[Part]) -> dict[str, Tensor] | None:
    """The columns of all parts, of one row per sample each."""
    found = joint_columns([part.columns(batch) for part in parts])
    for name, column in (found or {}).items():
        batch.check_rows(name, column)
    return found


def _constants(batch: RolloutBatch, parts: Iterable[Part]) -> dict[str, Any]:
    # A setting that a rule reads from the batch, such as a temperature, is the same on every rank.
    required = {name: batch.original(name) for part in parts for name in part.requires}
    return {name: value for name, value in required.items() if not is_per_sample(value)}


def telling_columns(batch: RolloutBatch, parts: Iterable[Part]) -> dict[str, Any]:
    """Columns that say as much to these parts as the batch does.

    Rules that can say what they need of a sample in a few numbers (`columns`) give those; for the others the
    fields that they require are taken whole.
    """
    found: dict[str, Any] = {"num_tokens": batch.num_tokens.int()}
    together = _told(batch, parts)
    if together is not None:
        return found | together
    # A rule that reads whole fields must not find another's numbers under their names.
    for name in dict.fromkeys(("response_mask", *(name for part in parts for name in part.requires))):
        if name in batch:
            value = batch.original(name)
            if is_per_sample(value):
                batch.check_rows(name, value)
                found[name] = value
    return found


ONE_MEANING = ("rm_scores", "uid", "prompt_id", "domain")
"""Columns that are the same whoever gives them: the outcome of a sample, the ids of its group, prompt and domain."""


def joint_columns(columns: Sequence[dict[str, Tensor] | None]) -> dict[str, Tensor] | None:
    """The columns of several parts under one roof; None if one has none, or two may mean different numbers by a name.

    Example:
        >>> import torch
        >>> joint_columns([{"uid": torch.tensor([7])}, {"uid": torch.tensor([7])}])
        {'uid': tensor([7])}
        >>> joint_columns([{"advantages": torch.tensor([1.0])}, {"advantages": torch.tensor([-1.0])}])
    """
    found: dict[str, Tensor] = {}
    for each in columns:
        if each is None or "num_tokens" in each or any(name in found and name not in ONE_MEANING for name in each):
            return None
        found |= each
    return found


def rewards_and_groups(batch: RolloutBatch, *, local_ids: bool = False) -> dict[str, Tensor]:
    """The reward and the group of each sample, where the batch has them; `local_ids` as in `in_brief`."""
    found = {}
    if "rm_scores" in batch:
        found["rm_scores"] = batch.outcomes
    if "uid" in batch:
        found["uid"] = (batch.with_local_ids() if local_ids else batch).group_ids
    return found
