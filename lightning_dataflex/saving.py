"""What a DataFlexCallback puts into a checkpoint, and how a resumed run takes it back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightning_dataflex.core.checks import check_whole
from lightning_dataflex.core.memory import changes, reading
from lightning_dataflex.core.pipeline import Pipeline
from lightning_dataflex.core.warn import warn_once

if TYPE_CHECKING:
    from lightning_dataflex.callback import DataFlexCallback


def saved(callback: DataFlexCallback) -> dict[str, Any]:
    """What a resumed run needs of a callback; the same on every rank."""
    state: dict[str, Any] = {"num_steps": callback.num_steps, "made_of": dict(callback.made_of)}
    if callback.flow is not None:
        state["flow"] = callback.flow.state_dict()
    if isinstance(callback.pipeline, Pipeline):
        state["pipeline"] = callback.pipeline.state_dict()
        remembers = any(part["state"] for part in state["pipeline"].values())
        state |= callback.watch.marks(remembers=remembers)
    else:
        assert callback.steering is not None
        state |= callback.steering.state_dict() | callback.watch.marks(remembers=True, steers=True)
    leader = None if callback.team is None else callback.team.leader
    if leader is not None and leader.flow is not None and leader.flow.source.is_under_way:
        state["unfinished"] = True
    return state


def take_back(callback: DataFlexCallback, state: Mapping[str, Any]) -> None:
    """Put into a callback what `saved` gave; a warning says what the run was configured otherwise with."""
    with reading(callback.state_key):
        check_whole("num_steps", state["num_steps"], 0)
        callback.num_steps = state["num_steps"]
        callback.watch.load(state)
        changed = changes(state["made_of"], callback.made_of)
        if changed:
            warn_once(callback, f"{callback.name} goes on from a checkpoint with other settings: {changed}.")
        if (state["made_of"]["mechanism"] == "mix") != (callback.steering is not None):
            warn_once(callback, f"What {callback.name} remembers is of another mechanism: it starts without a memory.")
        elif isinstance(callback.pipeline, Pipeline):
            callback.pipeline.load_state_dict(state["pipeline"])
        elif callback.steering is not None:
            callback.steering.load_state_dict(state)


def take_flow_back(callback: DataFlexCallback, states: Mapping[str, Any]) -> None:
    """Give the flow of rollouts what waits in a checkpoint, whichever callback has saved it.

    Args:
        callback: The first of a Trainer's does it for all of them.
        states: Those of all callbacks in the checkpoint.
    """
    if not states.get(callback.state_key):
        warn_once(callback, f"The checkpoint has no state of {callback.state_key}, which starts as in a new run.")
    if callback.team is not None and callback is callback.team.members[0]:
        ours = {key: state for key, state in states.items() if key.startswith("DataFlexCallback[") and state}
        with reading(next((key for key, state in ours.items() if "flow" in state), callback.state_key)):
            callback.team.load_flow(list(ours.values()))
