"""What a decision did, in numbers of the global batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_dataflex.core.rollout import RolloutBatch
from lightning_dataflex.functional.groups import group_index
from lightning_dataflex.functional.scoring import no_signal, unscored


def summary(batch: RolloutBatch, scores: Tensor, keep: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """The metrics of a decision, each a finite scalar tensor; the same keys for the same fields of the batch.

    Args:
        batch: The global batch.
        scores: (N,) or (N, L).
        keep: (N,) bool, or (N, L).
        weights: (N,) or (N, L).

    Returns:
        - `kept_frac`: kept samples among those with a valid token (kept tokens, for a rule on tokens).
        - `weight_mean`, `weight_std`: over valid tokens.
        - `ess`: effective sample size, (sum w)^2 / sum w^2 over the samples' mean weights; at most N.
        - `n_nan`: samples with a valid token and no score.
        - `frac_zero_std`: groups whose rewards are all equal, among all groups (with `rm_scores` and `uid`).
        - `reward_all`, `reward_kept`: mean reward of the samples that have one, and of the kept ones; 0 where
          there is none (with `rm_scores`).
    """
    tokens = batch.num_tokens.to(weights.device).double()
    valid = tokens > 0
    exact = weights.double()
    # A weight per sample counts once for each of its tokens.
    times = tokens if weights.dim() == 1 else batch.token_mask.to(weights.device).double()
    mean = _ratio((exact * times).sum(), times.sum())
    per_sample = exact * valid if weights.dim() == 1 else (exact * times).sum(-1) / tokens.clamp(min=1)
    counted = valid if keep.dim() == 1 else batch.token_mask.to(keep.device)
    metrics = {
        "kept_frac": _ratio((keep & counted).sum(), counted.sum()),
        "weight_mean": mean,
        "weight_std": _ratio(((exact - mean).square() * times).sum(), times.sum()).sqrt(),
        "ess": _ratio(per_sample.sum().square(), per_sample.square().sum()),
        "n_nan": (unscored(scores) & valid).sum(),
    }
    if "rm_scores" in batch:
        outcomes = batch.outcomes.to(weights.device).double()
        scored = valid & outcomes.isfinite()
        kept_rows = scored & (keep if keep.dim() == 1 else keep.any(-1))
        if "uid" in batch:
            metrics["frac_zero_std"] = _share_without_signal(batch, outcomes, valid)
        metrics["reward_all"] = _ratio(torch.where(scored, outcomes, 0.0).sum(), scored.sum())
        metrics["reward_kept"] = _ratio(torch.where(kept_rows, outcomes, 0.0).sum(), kept_rows.sum())
    return {name: value.float() for name, value in metrics.items()}


def merged(metrics: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The metrics of a step with several decisions: their mean, of `n_nan` the sum.

    Example:
        >>> merged([{"n_nan": torch.tensor(1.0)}, {"n_nan": torch.tensor(2.0)}])
        {'n_nan': tensor(3.)}
    """
    names = dict.fromkeys(name for each in metrics for name in each)
    stacked = {name: torch.stack([each[name] for each in metrics if name in each]) for name in names}
    return {name: values.sum() if name == "n_nan" else values.mean() for name, values in stacked.items()}


def _share_without_signal(batch: RolloutBatch, outcomes: Tensor, valid: Tensor) -> Tensor:
    if not valid.any():
        return torch.zeros((), dtype=torch.float64, device=valid.device)
    group, num_groups = group_index(batch.group_ids.to(valid.device)[valid])
    return no_signal(outcomes[valid], group, num_groups).double().mean()


def _ratio(part: Tensor, whole: Tensor) -> Tensor:
    return torch.where(whole > 0, part.double() / whole.double().clamp(min=1e-300), 0.0)
