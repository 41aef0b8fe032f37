"""Actions: what a rule says of some samples, before and after what only the global batch can say."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_dataflex.core.actuator import Actuator, Reweighter, Selector
from lightning_dataflex.core.rollout import RolloutBatch
from lightning_dataflex.core.scorer import Scorer
from lightning_dataflex.core.summary import RowNumbers, counting_alike, scaled
from lightning_dataflex.core.tidy import fields_screened, scorable, scored
from lightning_dataflex.functional.weighting import rescaled, unit_scale


@dataclass(frozen=True)
class Action:
    """What a rule says of some samples, before what only the global batch can say: see `Decision` for the shapes."""

    scores: Tensor
    keep: Tensor
    weights: Tensor
    scored: Tensor
    advantages: Tensor | None = None

    def of(self, rows: slice, num_tokens: int) -> Action:
        """That of some of the samples, cut to their width."""

        def part(value: Tensor) -> Tensor:
            if value.dim() == 1:
                return value[rows]
            missing = num_tokens - value.shape[1]
            # Nobody has asked for the width of a rank without samples.
            return torch.nn.functional.pad(value[rows], (0, missing)) if missing > 0 else value[rows, :num_tokens]

        advantages = None if self.advantages is None else self.advantages[rows]
        return Action(part(self.scores), part(self.keep), part(self.weights), self.scored[rows], advantages)


def action_of(
    scorer: Scorer, actuator: Actuator, batch: RolloutBatch, step_id: int, *, scale_later: bool, **context: Any
) -> Action:
    """The action of a Selector or a Reweighter; weights that `act` has not scaled are to be checked by `checked`.

    Args:
        scale_later: Whether weights are to have a mean of 1 over more samples than these, see `with_unit_mean`.
        context: What the actuator is told beside the step.
    """
    scores = scorer.score(batch, step_id)
    if names := fields_screened(actuator):
        # What the actuator cannot read has no score either: it is not kept, and counted.
        readable = scorable(batch, names).to(scores.device)
        # On an accelerator the host would wait for the answer.
        if readable.device.type != "cpu" or not readable.all():
            scores = torch.where(readable if scores.dim() == 1 else readable[:, None], scores, torch.nan)
    rows, context = scored(batch, scores), {"step_id": step_id} | context
    if isinstance(actuator, Selector):
        keep = actuator.kept(batch, scores, rows, **context)
        return Action(scores, keep, keep, rows, actuator.advantages(keep, batch))
    if isinstance(actuator, Reweighter):
        if scale_later or actuator.normalize == "none":
            return Action(scores, rows, actuator.weighed(batch, scores, rows, **context), rows)
        return Action(scores, rows, actuator.act(scores, batch, **context), rows)
    raise ValueError("A Mixer decides on domains, not on the samples of a batch. Use a Mixture.")


def with_unit_mean(
    reweighter: Reweighter, action: Action, numbers: RowNumbers, rows: slice
) -> tuple[Action, RowNumbers]:
    """Weights with a mean of 1 over the scored samples of the global batch, as the reweighter says.

    Args:
        action: On this rank's samples.
        numbers: Of the global batch.
        rows: This rank's part of it.
    """
    if not numbers["scored"].any():
        return action, numbers
    tokens = numbers["num_tokens"]
    counts = tokens.clamp(max=1) if reweighter.normalize == "samples" else tokens
    scale = unit_scale(numbers["weight_mean"], counts * numbers["scored"])
    if "measure" in numbers:
        other = unit_scale(numbers["measured"], numbers["measure"] * numbers["scored"])
        scale = torch.where(other > 0, other, scale)
    if scale > 0:
        return replace(action, weights=rescaled(action.weights, scale)), scaled(numbers, scale)
    reweighter.warn_all_zero()
    return replace(action, weights=numbers["scored"][rows].float()), counting_alike(numbers)
