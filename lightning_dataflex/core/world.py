"""The global batch: what a rule has to know of the samples of all ranks."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_dataflex.core.actuator import Actuator
from lightning_dataflex.core.containers import as_tensor
from lightning_dataflex.core.rollout import RolloutBatch
from lightning_dataflex.core.scorer import Scorer
from lightning_dataflex.sync import gathered, gathered_objects, num_ranks


def global_batch(local: RolloutBatch, scorer: Scorer, actuator: Actuator) -> tuple[RolloutBatch, slice]:
    """The samples of all ranks, and which of them are this rank's. A collective; the batch itself on one process.

    Rules that can say what they need of a sample in a few numbers (`reduced`) exchange those; for the others the
    fields that they require are gathered whole.
    """
    if num_ranks() == 1:
        return local, slice(0, local.num_samples)
    parts = [part.reduced(local) for part in (scorer, actuator)]
    numbers: dict[str, Tensor] = {"num_tokens": local.num_tokens}
    objects: dict[str, list[Any]] = {}
    if any(part is None for part in parts):
        for name in dict.fromkeys(("response_mask", *scorer.requires, *actuator.requires)):
            value = local.response_mask if name == "response_mask" else local.group_ids if name == "uid" else None
            value = as_tensor(local.original(name)) if value is None else value
            if isinstance(value, Tensor):
                numbers[name] = value
            else:
                objects[name] = list(value)
    for part in parts:
        numbers |= part or {}
    # For the log: rewards and groups, where the batch has them.
    if "rm_scores" in local and "rm_scores" not in numbers:
        numbers["rm_scores"] = local.outcomes
    if "uid" in local:
        numbers["uid"] = local.group_ids
    device = local.num_tokens.device
    columns, rows = gathered({name: numbers[name].to(device) for name in sorted(numbers)}, local.num_samples)
    return RolloutBatch(columns | {name: gathered_objects(objects[name]) for name in sorted(objects)}), rows
