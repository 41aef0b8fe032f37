"""Team: the callbacks of a Trainer, as far as they must know of each other."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_dataflex.core.compat import chooses_prompts
from lightning_dataflex.core.config import RefillConfig
from lightning_dataflex.core.mixture import Mixture
from lightning_dataflex.core.pipeline import Pipeline
from lightning_dataflex.core.rollout import RolloutBatch
from lightning_dataflex.core.samples import Layout, compacted
from lightning_dataflex.core.summary import Summary
from lightning_dataflex.core.warn import warn_once
from lightning_dataflex.flow import RolloutFlow
from lightning_dataflex.gate import Gate
from lightning_dataflex.mount import BatchMount, PointMount
from lightning_dataflex.reading import FirstReading
from lightning_dataflex.refill import Refill
from lightning_dataflex.relay import Relay

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

    from lightning_dataflex.callback import DataFlexCallback


class Team:
    """What several callbacks do together.

    Args:
        members: Those of a Trainer, in order.
    """

    def __init__(self, members: Sequence[DataFlexCallback]) -> None:
        self.members = list(members)
        self.relay = Relay()

    @property
    def refilling(self) -> DataFlexCallback | None:
        """The one that collects rollouts."""
        return next((each for each in self.members if each.config.refill is not None), None)

    @property
    def gating(self) -> list[DataFlexCallback]:
        """Those that decide before a rollout."""
        return [each for each in self.members if chooses_prompts(each.pipeline.scorer)]

    @property
    def leader(self) -> DataFlexCallback | None:
        """The one that holds the flow of rollouts, where there is one."""
        return self.refilling or next(iter(self.gating), None)

    @functools.cached_property
    def layout(self) -> Layout:
        """What all of them have said of the batch."""
        return functools.reduce(operator.or_, (each.layout for each in self.members))

    def finished(self, batch: Any, fields: Mapping[str, str]) -> Any:
        """A batch that every callback has decided on, without the samples that are to leave it."""
        if not any(each.config.drop == "rows" and each.config.enforce for each in self.members):
            return batch
        trim = any(each.config.trim for each in self.members)
        return compacted(RolloutBatch(batch, fields), self.layout, trim=trim)

    def first_reading(self) -> FirstReading | None:
        """What shows whether the module reads the decisions, where they can be lost on it."""
        deciding = [each for each in self.members if each.config.enforce and isinstance(each.pipeline, Pipeline)]
        for each in deciding:
            if each.config.mechanism == "reweight" or each.config.drop == "weight":
                return FirstReading.of_weights(each.name, each.config.weights_key)
        # Rows that left the batch, or a flow of rollouts, are gone whatever is read.
        masking = [each for each in deciding if each.config.drop == "mask"]
        if not masking or len(masking) < len(deciding) or self.leader is not None:
            return None
        keys = ["response_mask", masking[0].config.weights_key]
        if any(each.pipeline.actuator.changes_advantages for each in masking):
            # What is not kept has none.
            keys.insert(1, "advantages")
        return FirstReading.of_selection(masking[0].name, keys)

    @property
    def has_stepped(self) -> bool:
        """Whether an optimiser has made a step in this training batch."""
        return any(each.deciding is not None and each.deciding.has_stepped for each in self.members)

    def log_prefix(self, member: DataFlexCallback) -> str:
        """`dataflex/`, and a label only where several callbacks log: the mechanism, if that says which."""
        if len(self.members) == 1:
            return "dataflex/"
        mechanism = member.config.mechanism
        alone = sum(each.config.mechanism == mechanism for each in self.members) == 1
        return f"dataflex/{member.config.label or (mechanism if alone else member.name)}/"

    def load_flow(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Take up what waits of the callbacks of a checkpoint, whichever of them has led the flow."""
        saved = next((state["flow"] for state in states if "flow" in state), None)
        leader = self.leader
        if saved is not None and leader is not None and leader.flow is not None:
            leader.flow.load_state_dict(saved)
        elif leader is not None and states:
            warn_once(
                leader,
                f"The checkpoint was written without refill and rules on prompts: {leader.name} begins the epoch of "
                "the data anew.",
            )
        elif saved is not None:
            warn_once(
                self.members[0],
                "The checkpoint has prompts that wait for a refill or a rule on prompts, and here is neither: they are "
                "dropped.",
            )

    def flow(self) -> RolloutFlow:
        """The flow of rollouts that the leader holds."""
        refilling, leader = self.refilling, self.leader
        assert leader is not None
        gates = []
        for each in self.gating:
            assert isinstance(each.pipeline, Pipeline)
            parts = (each.pipeline.scorer, each.pipeline.actuator, each.pipeline.fields)
            gates.append(Gate(*parts, warmup_step=each.config.warmup_step, enforce=each.config.enforce))
        mixtures = [(each.pipeline, each) for each in self.members if isinstance(each.pipeline, Mixture)]
        refill = None
        if refilling is not None:
            config = refilling.config
            assert isinstance(config.refill, RefillConfig)
            fields = f"drop: {config.drop}, weights_key: {config.weights_key}"
            refill = Refill(config.refill, self.layout, refilling.name, fields)
        return RolloutFlow(
            gates=gates,
            refill=refill,
            decide=None if refilling is None else functools.partial(_decided, refilling),
            account=functools.partial(_account, refilling or leader),
            observers=[functools.partial(_observe, mixture, owner) for mixture, owner in mixtures],
            screening=None if refilling is None else getattr(refilling.pipeline.scorer, "num_screening", None),
            estimator=leader.config.adv_estimator,
            layout=self.layout,
            fields=leader.pipeline.fields,
            weights_key=leader.config.weights_key,
            step=lambda: leader.num_steps,
        )

    def metrics_of(self, member: DataFlexCallback) -> dict[str, float]:
        """What the flow of rollouts has to say in the name of one callback."""
        flow = None if self.leader is None else self.leader.flow
        if flow is None:
            return {}
        metrics: dict[str, float] = {}
        if member is self.refilling and flow.refill is not None:
            metrics |= flow.refill.metrics
        if member in self.gating:
            metrics |= flow.source.gates[self.gating.index(member)].metrics
        return metrics


def check_team(members: Sequence[DataFlexCallback]) -> None:
    """Raise a ValueError for callbacks that cannot work together."""
    if sum(each.steering is not None for each in members) > 1:
        raise ValueError("Two callbacks have mechanism: mix, and only one can steer the sampler. Leave one out.")
    changing = [each.name for each in members if each.pipeline.actuator.changes_advantages]
    if len(changing) > 1:
        raise ValueError(
            f"{' and '.join(changing)} each normalise the advantages of their own kept samples, and only one can. "
            "Give the others advantages: group."
        )
    refilling = [each.name for each in members if each.config.refill is not None]
    if len(refilling) > 1:
        raise ValueError(
            f"{' and '.join(refilling)} each collect rollouts into a full batch, and only one can. Leave refill out of "
            "the others: what they drop or weigh is then put into its batch."
        )
    traces = [Path(each.config.trace).absolute() for each in members if each.config.trace]
    if len(set(traces)) < len(traces):
        raise ValueError(f"Two callbacks have trace: {traces[0]}. Give each a file of its own.")
    rows = [each.name for each in members if each.config.drop == "rows"]
    mounts = {str(each.config.mount or "point") for each in members}
    if rows and len(mounts) > 1:
        raise ValueError(
            f"{rows[0]} has drop: rows, and the callbacks act at {' and '.join(sorted(mounts))}: a later one would not "
            "see the samples that an earlier one has taken out. Give all of them one mount."
        )


def check_mount(member: DataFlexCallback, kind: Any, pl_module: LightningModule) -> None:
    """Raise a ValueError for a module in which a callback cannot do what it is asked for."""
    module = type(pl_module).__name__
    config, chooses = member.config, member.pipeline.scorer.timing == "pre_rollout"
    if isinstance(config.refill, RefillConfig) and not callable(getattr(pl_module, config.refill.rollout, None)):
        raise ValueError(
            f"{module} has no method {config.refill.rollout!r} to roll out prompts with. Give it one that takes "
            "prompts and returns what its DataFlexPoint gets, or name it: refill: {rollout: ...}."
        )
    if kind is PointMount or not (config.drop == "rows" or config.refill or chooses):
        return
    if kind is BatchMount and not (config.refill or chooses):
        return
    what = "refill is set" if config.refill else f"{member.name} chooses prompts" if chooses else "drop is 'rows'"
    instead = "" if config.refill or chooses else ", or use drop: mask"
    raise ValueError(
        f"{what}, and {module} has no DataFlexPoint. Add self.dataflex = DataFlexPoint(), and batch = "
        f"self.dataflex(batch) before the policy's forward pass{instead}."
    )


def _decided(member: DataFlexCallback, batch: RolloutBatch) -> tuple[RolloutBatch, Tensor, Summary]:
    assert member.deciding is not None
    decision = member.deciding.asked(batch, member.num_steps)
    keep = decision.keep if decision.keep.dim() == 1 else decision.keep.any(-1)
    updates = decision.updates(batch, drop=member.config.drop, weights_key=member.config.weights_key)
    return RolloutBatch(batch.replaced(updates), batch.fields), keep, decision.summary


def _account(member: DataFlexCallback, num_groups: int) -> None:
    assert member.deciding is not None
    member.deciding.account(num_groups, member.num_steps)


def _observe(mixture: Mixture, owner: DataFlexCallback, batch: Any) -> None:
    mixture.observe(RolloutBatch(batch.source, mixture.fields), owner.num_steps)
