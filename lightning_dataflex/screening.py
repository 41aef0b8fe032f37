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
    num_screening: int,
    num_rest: int,
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
        num_screening: Responses that each prompt has got.
        num_rest: And that it is to get.
        layout: What the fields of a batch are.
        estimator: How a whole group's advantages are computed.
    """
    _check_size(screened, len(prompts), num_screening)
    given = prompt_ids(ids).tolist()
    promising = set(prompt_ids(by_prompt(screened))[keep.cpu()].tolist())
    # A rank without any takes part with its first prompt, and forgets what comes back.
    chosen = [place for place, uid in enumerate(given) if uid in promising] or [0]
    rest = generate([prompts[place] for place in chosen])
    _check_size(rest, len(chosen), num_rest)
    if not promising:
        return screened, keep
    # Both phases under one name, whatever each call numbers its groups by.
    names = dict(zip(prompt_ids(by_prompt(screened)).tolist(), _listed(screened["uid"])))
    uid = [names[each] for each in prompt_ids(by_prompt(rest)).tolist()]
    same = torch.tensor(uid).to(rest["uid"]) if isinstance(rest["uid"], Tensor) else uid
    rest = RolloutBatch(rest.replaced({"uid": same}), rest.fields)
    kept = RolloutBatch(taken(screened, keep.nonzero().flatten(), layout), screened.fields)
    parts = [(per_sample(part, layout), part.token_mask.shape[1]) for part in (kept, rest)]
    whole = RolloutBatch(rebuilt(screened.source, joined(parts, layout, screened.fields)), screened.fields)
    advantages = group_advantages(whole.outcomes, whole.group_ids, estimator)
    updates = {"advantages": whole.spread_advantages(advantages)}
    return RolloutBatch(whole.replaced(updates), screened.fields), torch.ones(len(whole), dtype=torch.bool)


def _check_size(batch: RolloutBatch, num_prompts: int, num_generations: int) -> None:
    if len(batch) != num_prompts * num_generations:
        raise ValueError(
            f"The rollout of {num_prompts} prompts has {len(batch)} samples, and {num_generations} of each were asked "
            "for by num_generations. Let the rollout method heed it, and let training_step call that method."
        )


def _listed(column: Any) -> list[Any]:
    return column.tolist() if hasattr(column, "tolist") else list(column)
