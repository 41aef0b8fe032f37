"""Refill: kept groups are collected over rounds of rollouts until the loss has a full batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lightning_dataflex.core.config import RefillConfig
from lightning_dataflex.core.rollout import RolloutBatch
from lightning_dataflex.core.sample_group import SampleGroup, groups_of, padding, together
from lightning_dataflex.core.samples import Layout
from lightning_dataflex.core.warn import NowAndThen, warn_once
from lightning_dataflex.sync import Group, exchanged

MARGIN = 1.25
"""How many times the expected prompts a further rollout has. That of the adaptive batch of GRESO, arXiv:2506.02177."""

KEEP_RATE_STEP = 0.3
"""How far the keep rate goes, at each step, towards what was kept in it."""


class Refill:
    """Fills each step's batch with groups that are worth training on.

    Groups beyond those that a step takes are in stock for the next one, the same on every rank. A rank that had more
    luck than another gives it what it has too many.

    Args:
        config: How many groups, how long, how often.
        layout: What the fields of a rollout batch are.
        name: What the rule is called in a warning.
        fields: What says which fields a group has that is in stock: how samples are dropped, and where weights go.
    """

    process_group: Group = None
    """The ranks that hold different samples; None for all."""

    def __init__(self, config: RefillConfig, layout: Layout, name: str, fields: str = "") -> None:
        self.config, self.layout, self.name, self.fields = config, layout, name, fields
        self.stock: list[SampleGroup] = []
        self.keep_rate = 1.0
        self._warnings = NowAndThen()
        self._own: list[SampleGroup] = []
        self._spare: SampleGroup | None = None
        self._num_kept = self._num_prompts = 0
        self.metrics: dict[str, float] = {}

    def begin_step(self, step: int) -> None:
        """Nothing is generated yet; what is in stock for too long leaves it."""
        fresh = [group for group in self.stock if step - group.born <= self.config.max_age]
        self.metrics = {"rounds": 0.0, "prompts": 0.0, "expired": float(len(self.stock) - len(fresh))}
        self.stock, self._own, self._spare = fresh, [], None
        self._num_kept = self._num_prompts = 0

    def missing(self, world: int) -> int:
        """Groups that all ranks together still need for this step."""
        return max(0, world * self.config.groups - len(self.stock) - self._num_kept)

    def first_size(self, most: int, world: int, num_before: int) -> int:
        """Prompts to begin a step with, over all ranks, one per rank at least.

        Args:
            most: Of one rank.
            world: Number of ranks.
            num_before: With how many prompts the step before begins, if that is still to come; else 0.
        """
        target, stock = world * self.config.groups, float(len(self.stock))
        if num_before:
            stock = max(0.0, stock + self.keep_rate * num_before - target)
        return draw_size(target - stock, self.keep_rate, most * world, world)

    def enough(self, num_begun: int, most: int, world: int) -> int:
        """Prompts, over all ranks, that are likely to fill up a step that begins with so many, and the one after it.

        They are never more than the step can still roll out.
        """
        target = world * self.config.groups
        missing = max(0.0, target - len(self.stock) - self.keep_rate * num_begun)
        return min(_likely(missing + target, self.keep_rate), (self.config.max_rounds - 1) * most * world)

    def next_size(self, most: int, world: int) -> int:
        """Prompts to roll out next, over all ranks."""
        return draw_size(self.missing(world), self.keep_rate, most * world, world, MARGIN)

    def add(
        self, batch: RolloutBatch, keep: Tensor, step: int, *, size: int | None, num_prompts: int, num_kept: int
    ) -> None:
        """A round's rollouts.

        Args:
            batch: This rank's, with the decision in it.
            keep: (N,) bool, its samples that are kept; a group stays whole.
            step: This one.
            size: Samples of a group, where all have as many.
            num_prompts: Prompts of the round, over all ranks.
            num_kept: Groups that are kept, over all ranks.
        """
        self._own += groups_of(batch, self.layout, step, among=keep, size=size)
        if self._spare is None:
            self._spare = padding(batch, self.layout, size or int((batch.group_ids == batch.group_ids[0]).sum()), step)
            # Said now, and not when a checkpoint is to be written.
            self._spare.state_dict()
        self._num_kept += num_kept
        self._num_prompts += num_prompts
        self.metrics["rounds"] += 1
        self.metrics["prompts"] += num_prompts

    def full_batch(self, like: RolloutBatch, rank: int, world: int, *, ended: bool) -> tuple[Any, int]:
        """The step's batch, and the groups of all ranks in it. A collective.

        Args:
            like: A rollout batch of this step, for its type and its fields that are no column.
            rank: This one.
            world: Number of ranks.
            ended: Whether the data came to an end before the batch was full.
        """
        if self._num_prompts:
            self.keep_rate += KEEP_RATE_STEP * (self._num_kept / self._num_prompts - self.keep_rate)
        mine, num_groups = self._shared_out(rank, world)
        self.metrics |= {"kept": float(self._num_kept), "carried": float(len(self.stock))}
        if num_groups < world * self.config.groups and not ended:
            self._warn(num_groups, world)
        assert self._spare is not None
        mine += [self._spare] * (self.config.groups - len(mine))
        self._own, self._spare = [], None
        return together(mine, like, self.layout), num_groups

    def _shared_out(self, rank: int, world: int) -> tuple[list[SampleGroup], int]:
        """This rank's groups, at most as many as it needs, and how many all ranks have; the rest goes into stock."""
        size = self.config.groups
        dealt = [self.stock[each::world] for each in range(world)]
        rest = [group for part in dealt for group in part[size:]]
        mine = dealt[rank][:size] + self._own
        if world == 1:
            self.stock = [group.on_cpu() for group in rest + mine[size:]]
            return mine[:size], min(len(mine), size)
        surplus = [group.on_cpu() for group in mine[size:]]
        said = (max(0, size - len(mine)), surplus)
        everyone, _ = exchanged(lambda: ({"said": [said]}, 1), self.process_group, "groups for a refill")
        rest += [group for _, more in everyone["said"] for group in more]
        num_groups = 0
        for each, (lacking, _) in enumerate(everyone["said"]):
            given, rest = rest[:lacking], rest[lacking:]
            num_groups += size - lacking + len(given)
            if each == rank:
                mine = mine[:size] + given
        self.stock = rest
        return mine[:size], num_groups

    def _warn(self, num_groups: int, world: int) -> None:
        self._warnings.warn(
            lambda count: (
                f"{self.name} kept {num_groups} of {world * self.config.groups} groups after "
                f"{int(self.metrics['rounds'])} rounds of rollouts ({int(self.metrics['prompts'])} prompts). The step "
                f"goes on with them. Such steps so far: {count}. Widen the rule, raise max_rounds, or give other data."
            )
        )

    def state_dict(self) -> dict[str, Any]:
        """The stock, and how often groups were kept; the same on every rank."""
        return {
            "stock": [group.state_dict() for group in self.stock],
            "keep_rate": self.keep_rate,
            "fields": self.fields,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self.stock = [SampleGroup.of_state(each) for each in state["stock"]]
        if state["fields"] != self.fields and self.stock:
            warn_once(
                self,
                f"The checkpoint's groups in stock have the fields of {state['fields']}, and {self.name} has "
                f"{self.fields}: they are dropped.",
            )
            self.stock = []
        self.keep_rate = state["keep_rate"]


def draw_size(missing: float, keep_rate: float, most: int, world: int, margin: float = 1.0) -> int:
    """Prompts to roll out so that `missing` of them are likely to be kept, over all ranks, as many on each.

    Args:
        missing: Groups that are still wanted.
        keep_rate: Share of the prompts that were kept so far.
        most: Prompts that a rollout may have, over all ranks.
        world: Number of ranks.
        margin: How many times as many as are expected to do.

    Example:
        >>> draw_size(8, keep_rate=0.5, most=64, world=1), draw_size(8, keep_rate=0.5, most=12, world=1)
        (16, 12)
    """
    return -(-max(min(_likely(margin * missing, keep_rate), most), 1) // world) * world


def _likely(groups: float, keep_rate: float) -> int:
    """Prompts of which so many are kept on average."""
    return math.ceil(groups / max(keep_rate, 1e-3) - 1e-9)
