"""The rollout batch among the arguments of a loss, or of a point."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from lightning_dataflex.core.containers import ORIGINAL, Arguments, is_batch
from lightning_dataflex.core.fields import FIELDS, check_batch
from lightning_dataflex.core.rollout import RolloutBatch

Updates = Callable[[RolloutBatch], Mapping[str, Any]]
"""The fields to put into a rollout batch; none to leave it as it is."""


def with_decision(
    signature: inspect.Signature, args: tuple, kwargs: dict[str, Any], fields: Mapping[str, str], updates_of: Updates
) -> tuple[tuple, dict[str, Any]]:
    """The arguments of a loss with the decision in them; those that were given stay as they are.

    The rollout batch is the first argument that holds a response mask, within `*args` and `**kwargs` too, and fields
    that are arguments of their own name count as part of it. Without such an argument, the arguments together are the
    batch.

    Example:
        >>> def loss(log_probs, response_mask, rollout_is_weights=None): ...
        >>> with_decision(inspect.signature(loss), (0.5, [[1]]), {}, {}, lambda batch: {"rollout_is_weights": 2})
        ((0.5, [[1]], 2), {})
    """
    known = {fields.get(name, name) for name in FIELDS}
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    arguments = bound.arguments
    spread_out = [arguments[p.name] for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD]
    own = {k: v for each in spread_out for k, v in each.items()}
    own |= {fields.get(name, name): value for name, value in arguments.items() if value is not None}
    given = _given(signature, arguments)
    holder = next((place for place, value in given.items() if _is_rollout(value, fields)), None)
    if holder is None:
        batch = RolloutBatch(Arguments(own), fields)
        if "response_mask" not in batch:
            raise ValueError(_why_none(given, fields))
        try:
            updates = updates_of(batch)
        except ValueError as error:
            raise ValueError(
                f"{error} Here the batch is what the loss is called with: {', '.join(arguments)}."
            ) from error
    else:
        batch = RolloutBatch(given[holder], fields)
        shared = {name: value for name, value in own.items() if name not in holder and (name in batch or name in known)}
        updates = updates_of(RolloutBatch(batch.replaced(shared), fields) if shared else batch)
        if updates:
            _put(arguments, holder, batch.replaced(updates))
    for name, value in updates.items():
        argument = next((each for each in (fields.get(name, name), name) if each in signature.parameters), None)
        if argument is not None:
            arguments[argument] = value
        elif holder is None and not name.startswith(ORIGINAL):
            raise ValueError(
                f"The loss has no argument {fields.get(name, name)!r} to put the decision into. "
                f"Add {fields.get(name, name)}=None and use it, or pass the loss the batch."
            )
    return bound.args, bound.kwargs


def _given(signature: inspect.Signature, arguments: Mapping[str, Any]) -> dict[tuple[Any, ...], Any]:
    """Each value that a loss is called with, by its argument and, within `*args` and `**kwargs`, its place there."""
    found: dict[tuple[Any, ...], Any] = {}
    for name, value in arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            found |= {(name, place): each for place, each in enumerate(value)}
        elif kind is inspect.Parameter.VAR_KEYWORD:
            found |= {(name, key): each for key, each in value.items()}
        else:
            found[name,] = value
    return found


def _put(arguments: dict[str, Any], place: tuple[Any, ...], value: Any) -> None:
    name, *within = place
    if within:
        (key,) = within
        held = arguments[name]
        value = {**held, key: value} if isinstance(held, dict) else (*held[:key], value, *held[key + 1 :])
    arguments[name] = value


def _why_none(given: Mapping[tuple[Any, ...], Any], fields: Mapping[str, str]) -> str:
    """What to tell the user of a loss whose arguments hold no response mask."""
    names = {str(place[-1] if isinstance(place[-1], str) else place[0]): value for place, value in given.items()}
    listed = ", ".join(f"{name} ({type(value).__name__})" for name, value in names.items())
    text = f"No argument of the loss is a rollout batch; it was called with {listed or 'none'}."
    batches = [value for value in names.values() if is_batch(value) and RolloutBatch(value, fields).keys()]
    missing = RolloutBatch((batches or [Arguments(names)])[0], fields).missing("response_mask")
    # Of tensors under other names there is nothing to map.
    cure = missing if batches or "..." not in missing else "Pass it the batch, or use a DataFlexPoint."
    return f"{text} {cure}"


def check_passed(batch: Any, module: nn.Module, point: nn.Module) -> None:
    """Raise a TypeError if what a module passes through its point is no rollout batch."""
    if not is_batch(batch):
        names = (name for name, part in module.named_modules() if part is point)
        name = next(names, "point").replace("_orig_mod.", "")
        check_batch(batch, f"{type(module).__name__} calls its {name} (DataFlexPoint) with it")


def _is_rollout(value: Any, fields: Mapping[str, str]) -> bool:
    return is_batch(value) and "response_mask" in RolloutBatch(value, fields)
