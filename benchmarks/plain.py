"""Rules on groups in plain form, a Python loop over `np.unique(uid)` as in a tutorial: what `decide.py` compares with.

Each is the whole rule: `tests/test_plain.py` holds its weights and advantages to those of the project. Rules that draw
have none, because the plain form would draw otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Samples:
    """What a rule reads of some samples: (n,) rewards, lengths and mean advantages, (n, L) entropies and masks."""

    rewards: np.ndarray
    lengths: np.ndarray
    advantages: np.ndarray
    entropies: np.ndarray
    mask: np.ndarray

    def of(self, index: Any) -> Samples:
        return Samples(**{name: values[index] for name, values in vars(self).items()})


def _as_it_is(values: np.ndarray, samples: Samples, uid: np.ndarray) -> np.ndarray:
    return values


@dataclass(frozen=True)
class Rule:
    """A rule as a tutorial writes it.

    Attributes:
        of_group: From the samples of a group to what is kept, a weight or a score of each of them.
        of_all: From those of all samples, the samples and the ids of their groups to weights.
        advantages: Where those of the kept samples are normalised anew: `ddof` and what is added to the deviation.
        of_tokens: Whether weights are those of tokens, (n, L).
    """

    of_group: Callable[[Samples], Any]
    of_all: Callable[[np.ndarray, Samples, np.ndarray], np.ndarray] = _as_it_is
    advantages: tuple[int, float] | None = None
    of_tokens: bool = False


def _rate(group: Samples) -> Any:
    return (group.rewards > 0.5).mean()


def _first(num: int, order: np.ndarray) -> np.ndarray:
    """The first `num` of an order as a mask."""
    keep = np.zeros(len(order), bool)
    keep[order[:num]] = True
    return keep


def _half(num: int) -> int:
    return (num + 1) // 2


def _most_varied(group: Samples) -> Any:
    rewards = group.rewards
    order, num = np.argsort(rewards, kind="stable"), _half(len(rewards))
    keep = np.zeros(len(rewards), bool)
    # Of equally good ones that with the most low ones.
    subsets = [np.r_[order[:i], order[len(order) - num + i :]] for i in reversed(range(num + 1))]
    chosen = np.sort(rewards[max(subsets, key=lambda subset: rewards[subset].var().round(9))])
    for value in np.unique(chosen):
        keep[np.flatnonzero(rewards == value)[: (chosen == value).sum()]] = True
    return keep


def _largest(group: Samples) -> Any:
    order = np.argsort(-np.abs(group.advantages), kind="stable")
    return _first(_half(len(order)), order)


def _extremes(group: Samples) -> Any:
    weights = np.zeros(len(group.rewards))
    weights[group.rewards.argmax()] += 0.5
    weights[group.rewards.argmin()] += 0.5
    return weights * len(weights)


def _logistic(group: Samples) -> Any:
    seen = np.where(group.advantages > 0, _rate(group), 1 - _rate(group))
    return 0.4 + 1.1 / (1 + np.exp(10 * (seen - 0.75)))


def _entropy_shares(entropies: np.ndarray, mask: np.ndarray, solved: np.ndarray) -> np.ndarray:
    weights = np.zeros(entropies.shape)
    for side, sizes in ((solved, entropies), (~solved, 1 / (entropies + 1e-8))):
        valid = mask & side[:, None]
        size, count = np.where(valid, sizes, 0), valid.sum(0)
        weights += valid * (1 + 0.1 * count * size / np.maximum(size.sum(0), 1e-30))
    return weights


def _by_token_entropy(group: Samples) -> Any:
    return _entropy_shares(group.entropies, group.mask, group.rewards > 0.5)


def _by_mean_entropy(group: Samples) -> Any:
    means = (group.entropies * group.mask).sum(1, keepdims=True) / group.lengths[:, None]
    return _entropy_shares(means, np.ones_like(means, bool), group.rewards > 0.5)[:, 0]


def _mean_one(weights: np.ndarray, samples: Samples, uid: np.ndarray) -> np.ndarray:
    return weights * samples.lengths.sum() / (weights * samples.lengths).sum()


def _softmax(scores: np.ndarray, samples: Samples, uid: np.ndarray) -> np.ndarray:
    return _mean_one(np.exp(scores - scores.max()), samples, uid)


def _nearest_half(rates: np.ndarray, samples: Samples, uid: np.ndarray) -> np.ndarray:
    return _first(_half(len(rates)), np.argsort(np.abs(rates - 0.5).round(6), kind="stable"))


def _ranked(scores: np.ndarray, uid: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The groups with the largest scores first, the earlier of equal ones, and their scores."""
    _, first = np.unique(uid, return_index=True)
    first = np.sort(first)
    order = first[np.argsort(-scores[first], kind="stable")]
    return uid[order], scores[order]


def _best_groups(scores: np.ndarray, samples: Samples, uid: np.ndarray) -> np.ndarray:
    groups, _ = _ranked(scores, uid)
    return np.isin(uid, groups[: int(len(groups) * 0.25 + 0.5)])


def _most_of_the_sum(scores: np.ndarray, samples: Samples, uid: np.ndarray) -> np.ndarray:
    groups, ranked = _ranked(scores, uid)
    before = np.cumsum(ranked) - ranked
    return np.isin(uid, groups[(before < (0.9 - 1e-9) * ranked.sum()) & (ranked > 0)])


RULES: dict[tuple[str, str], Rule] = {
    ("group_solve_rate", "threshold_band"): Rule(lambda group: 0.2 < _rate(group) < 0.8),
    ("group_solve_rate", "online_difficulty_filter"): Rule(lambda group: 0.2 <= _rate(group) <= 0.8),
    ("group_reward_variance", "vcrl"): Rule(lambda group: 4 * group.rewards.var() >= 0.3),
    ("outcome", "nonzero_variance"): Rule(lambda group: np.ptp(group.rewards) > 1e-6),
    ("outcome", "gfpo"): Rule(lambda group: _first(4, np.argsort(group.lengths, kind="stable")), advantages=(0, 1e-6)),
    ("outcome", "max_variance"): Rule(_most_varied, advantages=(1, 1e-4)),
    ("advantage_magnitude", "cppo"): Rule(_largest),
    ("group_solve_rate", "nearest"): Rule(_rate, _nearest_half),
    ("group_std", "variance_top_k"): Rule(lambda group: group.rewards.std(), _best_groups),
    ("group_std", "variance_top_p"): Rule(lambda group: group.rewards.std(), _most_of_the_sum),
    ("group_solve_rate", "focal"): Rule(lambda group: (1 - _rate(group)) ** 2, _mean_one),
    ("group_solve_rate", "grpo_lead"): Rule(_logistic),
    ("group_solve_rate", "odsw"): Rule(lambda group: np.sin(np.pi * _rate(group))),
    ("outcome", "pf_ppo"): Rule(_extremes, _mean_one),
    ("sequence_entropy", "grpo_s"): Rule(_by_mean_entropy),
    ("token_entropy", "gtpo"): Rule(_by_token_entropy, of_tokens=True),
    ("group_solve_rate", "softmax"): Rule(_rate, _softmax),
    ("group_reward_variance", "softmax"): Rule(lambda group: 4 * group.rewards.var(), _softmax),
    ("group_std", "softmax"): Rule(lambda group: group.rewards.std(), _softmax),
    ("group_variance", "softmax"): Rule(lambda group: group.rewards.var(), _softmax),
}
"""By scorer and actuator, with the settings of `decide.SETTINGS`."""


def decided(rule: Rule, batch: dict[str, Any], most: int | None = None) -> tuple[dict[str, np.ndarray], float]:
    """The fields that a rule writes, and the seconds it took.

    Args:
        rule: The rule.
        batch: As `batches.rollout` gives it.
        most: Loop over so many of the groups only; the seconds of the loops are then scaled to all of them.
    """
    start = time.perf_counter()
    uid, mask = np.asarray(batch["uid"]), batch["response_mask"].numpy()
    samples = Samples(
        rewards=(batch["rm_scores"].numpy() * mask).sum(-1),
        lengths=mask.sum(-1),
        advantages=(batch["advantages"].numpy() * mask).sum(-1) / mask.sum(-1),
        entropies=batch["entropies"].numpy(),
        mask=mask > 0,
    )
    groups = np.unique(uid)
    values = np.zeros(mask.shape if rule.of_tokens else len(uid))
    looped, loop_start = groups[:most], time.perf_counter()
    for group in looped:
        index = np.where(uid == group)[0]
        values[index] = rule.of_group(samples.of(index))
    loops = time.perf_counter() - loop_start
    weights = rule.of_all(values, samples, uid)
    written = {"rollout_is_weights": ((weights if rule.of_tokens else weights[:, None]) * mask).astype(np.float32)}
    if rule.advantages is not None:
        ddof, eps = rule.advantages
        fresh, loop_start = np.zeros(len(uid)), time.perf_counter()
        for group in looped:
            index = np.where((uid == group) & (weights > 0))[0]
            rewards = samples.rewards[index]
            if np.ptp(rewards) > 1e-6:
                fresh[index] = (rewards - rewards.mean()) / (rewards.std(ddof=ddof) + eps)
        loops += time.perf_counter() - loop_start
        written["advantages"] = (fresh[:, None] * mask).astype(np.float32)
    seconds = time.perf_counter() - start
    return written, seconds + loops * (len(groups) / len(looped) - 1)


def milliseconds(rule: Rule, batch: dict[str, Any], most: int) -> float:
    """The time of the plain form, its loop timed over `most` of the groups and scaled to all of them."""
    return 1e3 * decided(rule, batch, most)[1]
