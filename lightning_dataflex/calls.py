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

    The rollout batch is the first argument that holds a response mask, and fields that are arguments of their own
    name count as part of it. Without such an argument, the arguments together are the batch.

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
    holder = next((name for name, value in arguments.items() if _is_rollout(value, fields)), None)
    if holder is None:
        batch = RolloutBatch(Arguments(own), fields)
        if "response_mask" not in batch:
            raise ValueError(
                f"No argument of the loss is a rollout batch; it was called with {', '.join(arguments) or 'none'}. "
                "Pass it the batch, or use a DataFlexPoint."
            )
        try:
            updates = updates_of(batch)
        except ValueError as error:
            raise ValueError(
                f"{error} Here the batch is what the loss is called with: {', '.join(arguments)}."
            ) from error
    else:
        batch = RolloutBatch(arguments[holder], fields)
        shared = {name: value for name, value in own.items() if name != holder and (name in batch or name in known)}
        updates = updates_of(RolloutBatch(batch.replaced(shared), fields) if shared else batch)
        if updates:
            arguments[holder] = batch.replaced(updates)
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


def check_passed(batch: Any, module: nn.Module, point: nn.Module) -> None:
    """Raise a TypeError if what a module passes through its point is no rollout batch."""
    if not is_batch(batch):
        names = (name for name, part in module.named_modules() if part is point)
        name = next(names, "point").replace("_orig_mod.", "")
        check_batch(batch, f"{type(module).__name__} calls its {name} (DataFlexPoint) with it")


def _is_rollout(value: Any, fields: Mapping[str, str]) -> bool:
    return is_batch(value) and "response_mask" in RolloutBatch(value, fields)
