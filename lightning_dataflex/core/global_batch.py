"""The global batch: what a rule has to know of the samples of all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from lightning_dataflex.core.actuator import Actuator
from lightning_dataflex.core.containers import as_tensor
from lightning_dataflex.core.rollout import RolloutBatch
from lightning_dataflex.core.scorer import Scorer
from lightning_dataflex.sync import gathered, gathered_objects, num_ranks


def global_batch(local: RolloutBatch, scorer: Scorer, actuator: Actuator) -> tuple[RolloutBatch, slice]:
    """The samples of all ranks, and which of them are this rank's. A collective; the batch itself on one process.

    Rules that can say what they need of a sample in a few numbers (`columns`) exchange those; for the others the
    fields that they require are gathered whole.
    """
    if num_ranks() == 1:
        return local, slice(0, local.num_samples)
    numbers: dict[str, Tensor] = {"num_tokens": local.num_tokens}
    objects: dict[str, list[Any]] = {}
    columns = [part.columns(local) for part in (scorer, actuator)]
    if None in columns:
        # A rule that reads whole fields must not find another's numbers under their names.
        for name in dict.fromkeys(("response_mask", *scorer.requires, *actuator.requires)):
            value = _whole_field(local, name)
            if isinstance(value, Tensor):
                numbers[name] = value
            else:
                objects[name] = list(value)
    else:
        for part in columns:
            numbers |= part or {}
    # For the log: rewards and groups, where the batch has them.
    if "rm_scores" in local and "rm_scores" not in numbers:
        numbers["rm_scores"] = local.outcomes
    if "uid" in local and "uid" not in objects:
        numbers["uid"] = local.group_ids
    device = local.num_tokens.device
    everyone, rows = gathered({name: numbers[name].to(device) for name in sorted(numbers)}, local.num_samples)
    return RolloutBatch(everyone | {name: gathered_objects(objects[name]) for name in sorted(objects)}), rows


def _whole_field(batch: RolloutBatch, name: str) -> Any:
    value = as_tensor(batch.original(name))
    return value.tolist() if isinstance(value, np.ndarray) else value
