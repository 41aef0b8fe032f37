"""Screening: the rest of a group is generated only where its first few responses show a signal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_dataflex.core.ids import prompt_ids
from lightning_dataflex.core.rollout import RolloutBatch, by_prompt
from lightning_dataflex.core.samples import Layout, joined, per_sample, rebuilt, taken
from lightning_dataflex.functional.advantages import group_advantages


def continued(
    screened: RolloutBatch,
    keep: Tensor,
    prompts: Sequence[Any],
    ids: RolloutBatch,
    generate: Callable[[Sequence[Any]], RolloutBatch],
    layout: Layout,
    estimator: str | None,
) -> tuple[RolloutBatch, Tensor]:
    """The screening responses to the promising prompts together with the rest of theirs, and that all are kept.

    Source: SPEED-RL, Zhang et al. 2025, arXiv:2506.09016: both phases are trained on.

    Args:
        screened: The screening responses to this rank's prompts.
        keep: (N,) those of promising prompts.
        prompts: This rank's prompts.
        ids: Their `prompt_id`.
        generate: Rolls out the rest of each given prompt's group. Called on every rank.
        layout: What the fields of a batch are.
        estimator: How a whole group's advantages are computed.
    """
    given = prompt_ids(ids).tolist()
    promising = set(prompt_ids(by_prompt(screened))[keep.cpu()].tolist())
    # A rank without any takes part with its first prompt, and forgets what comes back.
    chosen = [place for place, uid in enumerate(given) if uid in promising] or [0]
    rest = generate([prompts[place] for place in chosen])
    if not promising:
        return screened, keep
    kept = RolloutBatch(taken(screened, keep.nonzero().flatten(), layout), screened.fields)
    parts = [(per_sample(part, layout), part.token_mask.shape[1]) for part in (kept, rest)]
    whole = RolloutBatch(rebuilt(screened.source, joined(parts, layout, screened.fields)), screened.fields)
    advantages = group_advantages(whole.outcomes, whole.group_ids, estimator)
    there = torch.as_tensor(whole["advantages"])
    spread_out = advantages if there.dim() == 1 else advantages[:, None] * whole.token_mask
    updates = {"advantages": spread_out.to(there)}
    return RolloutBatch(whole.replaced(updates), screened.fields), torch.ones(len(whole), dtype=torch.bool)
