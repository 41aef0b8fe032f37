"""What a decision did, in numbers of the global batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_dataflex.core.global_batch import rewards_and_groups
from lightning_dataflex.core.rollout import RolloutBatch
from lightning_dataflex.functional.blocks import by_rows, masked
from lightning_dataflex.functional.groups import group_index, group_mean, group_sum
from lightning_dataflex.functional.scoring import no_signal
from lightning_dataflex.functional.tokens import num_valid
from lightning_dataflex.functional.weighting import row_means

SOLVED = 0.5
"""A group whose rewards are all equal counts as solved above this."""

REASONS = ("kept", "solved", "failed", "rule", "nan")
"""What may have become of a sample; see `reasons`."""

RowNumbers = dict[str, Tensor]
"""What the log, and the scaling of weights, have to know of each sample of the global batch; see `row_numbers`."""


def row_numbers(
    batch: RolloutBatch,
    keep: Tensor,
    weights: Tensor,
    scored: Tensor,
    measure: Tensor | None = None,
    *,
    local_ids: bool = False,
) -> RowNumbers:
    """A few numbers of each sample, 29 bytes, or 37 with a measure, in place of its tokens.

    Args:
        keep: (N,) bool, or (N, L).
        weights: (N,) or (N, L).
        scored: (N,) bool, the samples that have a score.
        measure: (N,) or (N, L) as the weights, how much each counts in the mean that is to be 1; see `measure_of`.
        local_ids: Whether there is no other rank; see `in_brief`.

    Returns:
        (N,) each: `num_tokens` valid ones; `num_kept`, of the tokens for a rule on tokens, else 0 or 1;
        `weight_mean` and `weight_std` over valid tokens; `scored`; where the batch has them `rm_scores` and `uid`; and
        with a measure `measure` and the mean weight by it, `measured`.
    """
    tokens = batch.num_tokens.to(weights.device)
    if weights.dim() == 2 or keep.dim() == 2:
        mask = batch.token_mask.to(weights.device)
        # A batch that says how many tokens there are and not which has one weight for all of them.
        tokens = num_valid(mask) if batch.response_mask is None else tokens
    kept = by_rows(lambda k, m: num_valid(k & m), keep, mask) if keep.dim() == 2 else keep & (tokens > 0)
    if weights.dim() == 1:
        mean, std = weights, torch.zeros(len(weights), device=weights.device)
    elif weights.dtype == torch.bool:
        # Those of a selector are what it keeps.
        mean = kept.double() / tokens.clamp(min=1)
        std = (mean * (1 - mean)).sqrt()
    else:
        mean, std = by_rows(_mean_and_std, weights, mask, tokens).unbind(-1)
    logged = rewards_and_groups(batch, local_ids=local_ids)
    if "rm_scores" in logged:
        logged["rm_scores"] = logged["rm_scores"].float()
    if measure is not None:
        measured, total = row_means(weights, measure)
        logged |= {"measured": measured.float(), "measure": total.float()}
    return logged | {
        "num_tokens": tokens.int(),
        "num_kept": kept.int(),
        "weight_mean": mean.float(),
        "weight_std": std.float(),
        "scored": scored,
    }


def _mean_and_std(weights: Tensor, mask: Tensor, tokens: Tensor) -> Tensor:
    weights, num, exact = masked(weights, mask), tokens.clamp(min=1), torch.float64
    mean = weights.sum(-1, dtype=exact) / num
    deviations = masked(weights - mean[:, None].to(weights.dtype), mask)
    return torch.stack([mean, torch.linalg.vector_norm(deviations, dim=-1, dtype=exact) / num.sqrt()], -1)


def scaled(numbers: RowNumbers, scale: Tensor) -> RowNumbers:
    """The numbers of the same samples with their weights times `scale`."""
    return numbers | {
        name: numbers[name] * scale for name in ("weight_mean", "weight_std", "measured") if name in numbers
    }


def counting_alike(numbers: RowNumbers) -> RowNumbers:
    """The numbers of the same samples when each that has a score is kept with a weight of 1."""
    alike = numbers["scored"].float()
    kept = {"num_kept": numbers["scored"].int()}
    return numbers | kept | {"weight_mean": alike, "weight_std": torch.zeros_like(alike)}


@dataclass(frozen=True)
class Summary:
    """What a decision did to each sample of the global batch.

    Attributes:
        numbers: See `row_numbers`.
        of_tokens: Whether `num_kept` counts tokens.
    """

    numbers: RowNumbers
    of_tokens: bool

    def num_groups_kept(self, size: int | None) -> int:
        """Groups of which a sample is kept. With the size of a group, more samples of one `uid` are several groups."""
        kept, uid = self.numbers["num_kept"] > 0, self.numbers["uid"]
        names = torch.unique(uid[kept.to(uid.device)])
        return len(names) if size is None else int(torch.isin(uid, names).sum()) // size

    def group_size(self, size: int | None) -> int | None:
        """The size if every group has as many samples, or a multiple, as a prompt that was drawn twice; else None."""
        counts = torch.unique(self.numbers["uid"], return_counts=True)[1]
        return size if size and not (counts % size).any() else None


def summary(numbers: RowNumbers, *, of_tokens: bool) -> dict[str, Tensor]:
    """The metrics of a decision, each a finite scalar tensor; the same keys for the same fields of the batch.

    Args:
        numbers: Of the global batch; see `row_numbers`.
        of_tokens: Whether `num_kept` counts tokens.

    Returns:
        - `kept_frac`: kept samples among those with a valid token (kept tokens, for a rule on tokens).
        - `weight_mean`, `weight_std`: over valid tokens.
        - `ess`: effective sample size, (sum w)^2 / sum w^2 over the samples' mean weights; at most N.
        - `n_nan`: samples with a valid token and no score.
        - `frac_zero_std`: groups whose rewards are all equal, among all groups (with `rm_scores` and `uid`).
        - `dropped_solved`, `dropped_failed`, `dropped_rule`, `dropped_nan`: groups of which no sample is kept, because
          all rewards are equal and above 0.5, or not above it, because the rule would have it so, or because none has
          a score (with `rm_scores` and `uid`).
        - `reward_all`, `reward_kept`: mean reward of the samples that have one, and of the kept ones; 0 where
          there is none (with `rm_scores`).
    """
    tokens, weights = numbers["num_tokens"].double(), numbers["weight_mean"].double()
    valid, kept = tokens > 0, numbers["num_kept"]
    mean = _ratio((weights * tokens).sum(), tokens.sum())
    squares = numbers["weight_std"].double().square() + (weights - mean).square()
    counted = torch.where(valid, weights, 0.0)
    metrics = {
        "kept_frac": _ratio(kept.sum(), (tokens if of_tokens else valid).sum()),
        "weight_mean": mean,
        "weight_std": _ratio((squares * tokens).sum(), tokens.sum()).sqrt(),
        "ess": _ratio(counted.sum().square(), counted.square().sum()),
        "n_nan": (valid & ~numbers["scored"]).sum(),
    }
    if "rm_scores" in numbers:
        outcomes = numbers["rm_scores"].to(tokens)
        rewarded = valid & outcomes.isfinite()
        if "uid" in numbers:
            metrics |= _group_metrics(numbers["uid"].to(tokens.device), outcomes, valid, kept > 0, numbers["scored"])
        metrics["reward_all"] = _mean(outcomes, rewarded)
        metrics["reward_kept"] = _mean(outcomes, rewarded & (kept > 0))
    return {name: value.float() for name, value in metrics.items()}


def merged(parts: Sequence[Summary]) -> dict[str, Tensor]:
    """The metrics of a step with several decisions, as if it were one on all their samples.

    Groups of different decisions are different groups, whatever their ids.

    Example:
        >>> one = {"num_tokens": torch.tensor([2]), "num_kept": torch.tensor([1]), "weight_mean": torch.ones(1),
        ...        "weight_std": torch.zeros(1), "scored": torch.tensor([True])}
        >>> none = one | {"num_kept": torch.tensor([0]), "weight_mean": torch.zeros(1)}
        >>> merged([Summary(one, False), Summary(none, False)])["kept_frac"]
        tensor(0.5000)
    """
    if not parts:
        return {}
    if len(parts) == 1:
        (only,) = parts
        return summary(only.numbers, of_tokens=only.of_tokens)
    names = set.intersection(*(set(part.numbers) for part in parts))
    numbers = {name: torch.cat([part.numbers[name] for part in parts]) for name in names}
    if "uid" in numbers:
        which = torch.cat([torch.full_like(part.numbers["uid"], i) for i, part in enumerate(parts)])
        numbers["uid"] = torch.unique(torch.stack([which, numbers["uid"]]), dim=1, return_inverse=True)[1]
    return summary(numbers, of_tokens=any(part.of_tokens for part in parts))


def reasons(numbers: RowNumbers) -> Tensor:
    """Why each sample of the global batch is kept or not, (N,) int64 places in `REASONS`.

    `kept`; `solved` and `failed` of a group without signal that is dropped whole; `nan` without a score; else `rule`.

    Args:
        numbers: See `row_numbers`.

    Example:
        >>> numbers = {"num_tokens": torch.ones(4), "num_kept": torch.tensor([1, 0, 0, 0]), "uid": torch.zeros(4),
        ...            "scored": torch.tensor([True, True, False, True]), "rm_scores": torch.tensor([1.0, 0, 0, 0])}
        >>> [REASONS[i] for i in reasons(numbers)]
        ['kept', 'rule', 'nan', 'rule']
    """
    kept, scored = numbers["num_kept"] > 0, numbers["scored"]
    found = torch.where(kept, 0, torch.where(scored, REASONS.index("rule"), REASONS.index("nan")))
    if "rm_scores" in numbers and "uid" in numbers:
        valid = numbers["num_tokens"] > 0
        group, flags = _dropped_groups(numbers["uid"].to(kept.device), numbers["rm_scores"], valid, kept, scored)
        for name in ("solved", "failed"):
            whole = torch.zeros_like(kept)
            whole[valid] = flags[name][group]
            found = torch.where(whole & scored, REASONS.index(name), found)
    return found


def _group_metrics(ids: Tensor, outcomes: Tensor, valid: Tensor, kept: Tensor, scored: Tensor) -> dict[str, Tensor]:
    """`frac_zero_std`, and the groups that are dropped, by reason."""
    _, flags = _dropped_groups(ids, outcomes, valid, kept, scored)
    quiet = flags.pop("quiet")
    return {"frac_zero_std": _ratio(quiet.sum(), torch.tensor(len(quiet)))} | {
        f"dropped_{name}": groups.sum() for name, groups in flags.items()
    }


def _dropped_groups(
    ids: Tensor, outcomes: Tensor, valid: Tensor, kept: Tensor, scored: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """The group of each valid sample; and which groups are `quiet`, and which of no kept sample, by reason."""
    group, num_groups = group_index(ids[valid])
    rewards = outcomes[valid]
    quiet = no_signal(rewards, group, num_groups)

    def any_of(flags: Tensor) -> Tensor:
        return group_sum(flags[valid].double(), group, num_groups, torch.ones_like(group, dtype=torch.bool)) > 0

    dropped, has_score = ~any_of(kept), any_of(scored.to(valid.device))
    high = group_mean(rewards, group, num_groups, rewards.isfinite()) > SOLVED
    return group, {
        "quiet": quiet,
        "solved": dropped & has_score & quiet & high,
        "failed": dropped & has_score & quiet & ~high,
        "rule": dropped & has_score & ~quiet,
        "nan": dropped & ~has_score,
    }


def _mean(values: Tensor, where: Tensor) -> Tensor:
    return _ratio(torch.where(where, values, 0.0).sum(), where.sum())


def _ratio(part: Tensor, whole: Tensor) -> Tensor:
    return torch.where(whole > 0, part.double() / whole, 0.0)
