"""What every scorer, selector and reweighter gives, in NumPy and float64, from its sentence in the catalogue."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Table = dict[str, Any]
Rule = Callable[[np.ndarray, Table], np.ndarray]


def mean(values: np.ndarray, b: Table) -> np.ndarray:
    return np.where(b["mask"], values, 0).sum(-1) / b["mask"].sum(-1)


def total(values: np.ndarray, b: Table) -> np.ndarray:
    return np.where(b["mask"], values, 0).sum(-1)


def per_group(values: np.ndarray, b: Table, statistic: Callable[[np.ndarray], Any]) -> np.ndarray:
    result = np.empty(len(values))
    for name in np.unique(b["group"]):
        rows = b["group"] == name
        result[rows] = statistic(values[rows])
    return result


def ranked(values: np.ndarray) -> np.ndarray:
    """The share of the others below each value, equal ones half."""
    ordered = np.sort(values)
    twice = np.searchsorted(ordered, values) + np.searchsorted(ordered, values, "right") - 1
    return twice / 2 / (len(values) - 1)


def of_tokens(values: np.ndarray, b: Table, rule: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    result = np.zeros(values.shape)
    result[b["mask"]] = rule(values[b["mask"]])
    return result


SCORES: dict[str, Callable[[Table], np.ndarray]] = {
    "advantage": lambda b: mean(b["advantages"], b),
    "advantage_magnitude": lambda b: mean(abs(b["advantages"]), b),
    "outcome": lambda b: b["rm_scores"],
    "reward_difficulty": lambda b: b["rm_scores"],
    "group_solve_rate": lambda b: per_group(b["rm_scores"] > 0.5, b, np.mean),
    "speed": lambda b: per_group(b["rm_scores"] > 0.5, b, np.mean),
    "group_reward_variance": lambda b: 4 * per_group(b["rm_scores"], b, np.var),
    "group_variance": lambda b: per_group(b["rm_scores"], b, np.var),
    "group_std": lambda b: per_group(b["rm_scores"], b, np.std),
    "efficiency": lambda b: b["rm_scores"] / b["mask"].sum(-1),
    "response_length": lambda b: b["mask"].sum(-1).astype(float),
    "metadata": lambda b: b["difficulty"],
    "staleness": lambda b: 3 - b["rollout_step"],
    "token_prob": lambda b: np.where(b["mask"], np.exp(b["old_log_probs"]), 0),
    "sequence_logprob": lambda b: total(b["old_log_probs"], b),
    "token_entropy": lambda b: np.where(b["mask"], b["entropies"], 0),
    "sequence_entropy": lambda b: mean(b["entropies"], b),
    "ref_kl": lambda b: of_tokens(b["old_log_probs"] - b["ref_log_probs"], b, lambda r: np.exp(-r) - 1 + r),
    "importance_ratio": lambda b: of_tokens(b["old_log_probs"] - b["rollout_log_probs"], b, np.exp),
    "distill_gap": lambda b: np.where(b["mask"], b["teacher_log_probs"] - b["old_log_probs"], 0),
    "weighted_sum": lambda b: np.where(
        b["mask"], (b["rm_scores"] - 0.1 * b["mask"].sum(-1))[:, None] + 0.5 * b["entropies"], 0
    ),
    "product": lambda b: SCORES["group_std"](b) * SCORES["advantage_magnitude"](b),
    "rank": lambda b: ranked(b["rm_scores"]),
    "zscore": lambda b: of_tokens(b["entropies"], b, lambda x: (x - x.mean()) / x.std()),
    "ema": lambda b: per_group(mean(b["entropies"], b), b, np.mean),
    "of selector limr": lambda b: b["limr_score"],
    "of selector selective_backprop": lambda b: -mean(b["old_log_probs"], b),
}


# -- what stays --------------------------------------------------------------------------------------------------------


def best(values: np.ndarray, num: int) -> np.ndarray:
    keep = np.zeros(len(values), bool)
    keep[np.argsort(-values, kind="stable")[:num]] = True
    return keep


def half(num: int) -> int:
    return max(1, int(np.floor(num / 2 + 0.5)))


def within(values: np.ndarray, b: Table, num: Callable[[int], int]) -> np.ndarray:
    return per_group(values, b, lambda x: best(x, num(len(x)))).astype(bool)


def most_varied(rewards: np.ndarray) -> np.ndarray:
    """The i lowest and the others highest, for the i with the largest variance."""
    num, order = half(len(rewards)), np.argsort(rewards, kind="stable")
    ends = [np.r_[order[:i], order[len(order) - (num - i) :]] for i in range(num + 1)]
    keep = np.zeros(len(rewards), bool)
    keep[max(reversed(ends), key=lambda rows: np.var(rewards[rows]))] = True
    return keep


def top_groups(scores: np.ndarray, b: Table, chosen: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    names = list(dict.fromkeys(b["group"].tolist()))
    means = np.array([scores[b["group"] == name].mean() for name in names])
    return chosen(means)[[names.index(name) for name in b["group"]]]


def nucleus(means: np.ndarray) -> np.ndarray:
    order = np.argsort(-means, kind="stable")
    before = np.cumsum(means[order]) - means[order]
    keep = np.zeros(len(means), bool)
    keep[order[(before < 0.9 * means.sum() - 1e-9) & (means[order] > 0)]] = True
    return keep


def top_fifth(scores: np.ndarray, b: Table) -> np.ndarray:
    return b["mask"] & (scores >= np.quantile(scores[b["mask"]], 0.8))


KEEPS: dict[str, Rule] = {
    "threshold_band": lambda s, b: (s > 0.2) & (s < 0.8),
    "online_difficulty_filter": lambda s, b: (s >= 0.2) & (s <= 0.8),
    "vcrl": lambda s, b: s >= 0.3,
    "limr": lambda s, b: s > 0.6,
    "nonzero_variance": lambda s, b: per_group(s, b, lambda x: np.ptp(x) > 1e-6).astype(bool),
    "all_of": lambda s, b: best(s, half(len(s))) & best(b["rm_scores"], half(len(s))),
    "any_of": lambda s, b: b["mask"] & (best(s, half(len(s)))[:, None] | top_fifth(SCORES["token_prob"](b), b)),
    "not_": lambda s, b: ~best(s, half(len(s))),
    "cppo": lambda s, b: within(s, b, lambda n: n - int(n * 0.5)),
    "gfpo": lambda s, b: within(-b["mask"].sum(-1).astype(float), b, lambda n: 2),
    "max_variance": lambda s, b: per_group(b["rm_scores"], b, most_varied).astype(bool),
    "nearest": lambda s, b: best(-np.round(abs(s - 0.5) / 1e-6), half(len(s))),
    "topk_fraction": lambda s, b: best(s, half(len(s))),
    "variance_top_k": lambda s, b: top_groups(s, b, lambda means: best(means, 1)),
    "variance_top_p": lambda s, b: top_groups(s, b, nucleus),
    "high_entropy_tokens": top_fifth,
    "lopti": lambda s, b: b["mask"] & (s < 0.5),
}
DRAWS = ("bernoulli", "dots", "selective_backprop")
"""What chance decides."""


# -- what counts how much ----------------------------------------------------------------------------------------------


def share(size: np.ndarray, b: Table, mask: np.ndarray) -> np.ndarray:
    """1 + 0.1 * share * count among the solved, or failed, responses of the group that reach a place."""
    solved = b["rm_scores"] > 0.5
    size = np.where(solved[:, None], size, 1 / (size + 1e-8))
    result = np.zeros(size.shape)
    for name in np.unique(b["group"]):
        for side in (True, False):
            rows = (b["group"] == name) & (solved == side)
            part = np.where(mask[rows], size[rows], 0)
            result[rows] = np.where(mask[rows], 1 + 0.1 * part / np.maximum(part.sum(0), 1e-300) * mask[rows].sum(0), 0)
    return result


def resampled(rewards: np.ndarray) -> np.ndarray:
    shares = np.zeros(len(rewards))
    shares[np.argmax(rewards)] += 0.5
    shares[np.argmin(rewards)] += 0.5
    return shares * len(rewards)


def in_middle(s: np.ndarray) -> np.ndarray:
    low, high = np.quantile(s, [0.25, 0.75])
    return np.where((s >= low) & (s <= high), 2.0, 1.0)


def logistic(s: np.ndarray, b: Table) -> np.ndarray:
    seen = np.where(mean(b["advantages"], b) > 0, s, 1 - s)
    return 0.4 + 1.1 / (1 + np.exp(10 * (seen - 0.75)))


WEIGHTS: dict[str, Rule] = {
    "softmax": lambda s, b: np.exp(s),
    "difficulty_band": lambda s, b: in_middle(s),
    "abs_advantage_power": lambda s, b: np.maximum(s, 0) ** 0.5,
    "per_advantage": lambda s, b: np.maximum(s, 0) ** 0.5,
    "length_debias": lambda s, b: b["mask"].sum(-1).astype(float),
    "domain_weight": lambda s, b: np.array([{"math": 2.0, "code": 0.5}.get(name, 1.0) for name in b["domain"]]),
    "advantage_reweight": lambda s, b: 0.7 * s + 0.3,
    "tis": lambda s, b: np.minimum(s, 2),
    "mis": lambda s, b: np.where((s >= 0.5) & (s <= 2), s, 0),
    "focal": lambda s, b: (1 - s) ** 2,
    "grpo_lead": logistic,
    "odsw": lambda s, b: np.where((s > 1e-6) & (s < 1 - 1e-6), np.sin(np.pi * s), 0),
    "pf_ppo": lambda s, b: per_group(s, b, resampled),
    "rwr": lambda s, b: np.exp(s),
    "awr": lambda s, b: np.minimum(np.exp((s - s.mean()) / (s.std() + 1e-5)), 20),
    "gtpo": lambda s, b: share(s, b, b["mask"]),
    "grpo_s": lambda s, b: share(s[:, None], b, np.ones((len(s), 1), bool))[:, 0],
}


def scaled(weights: np.ndarray, b: Table, normalize: str) -> np.ndarray:
    """The weights of the tokens, with a mean of 1 over tokens or over samples."""
    whole = np.where(b["mask"], weights if weights.ndim == 2 else weights[:, None], 0)
    if normalize == "tokens":
        return whole / (whole.sum() / b["mask"].sum())
    return whole / mean(whole, b).mean() if normalize == "samples" else whole
