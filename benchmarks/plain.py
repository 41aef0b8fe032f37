"""Group rules in plain form, a Python loop over `np.unique(uid)` as in a tutorial: what `decide.py` compares with."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

Kept = Callable[[np.ndarray, np.ndarray, np.ndarray], Any]
"""Which samples of a group stay, by their rewards, lengths and advantages."""


def _in_band(rewards: np.ndarray, *_: np.ndarray) -> Any:
    return 0.2 < (rewards > 0.5).mean() < 0.8


def _varies(rewards: np.ndarray, *_: np.ndarray) -> Any:
    return rewards.max() - rewards.min() > 1e-6


def _shortest(rewards: np.ndarray, lengths: np.ndarray, advantages: np.ndarray) -> Any:
    keep = np.zeros(len(rewards), bool)
    keep[np.argsort(lengths, kind="stable")[:4]] = True
    return keep


def _most_varied(rewards: np.ndarray, *_: np.ndarray) -> Any:
    order, num = np.argsort(rewards, kind="stable"), (len(rewards) + 1) // 2
    subsets = [np.r_[order[:i], order[len(order) - num + i :]] for i in range(num + 1)]
    keep = np.zeros(len(rewards), bool)
    keep[max(subsets, key=lambda subset: rewards[subset].var())] = True
    return keep


def _largest(rewards: np.ndarray, lengths: np.ndarray, advantages: np.ndarray) -> Any:
    keep = np.zeros(len(rewards), bool)
    keep[np.argsort(-np.abs(advantages), kind="stable")[: len(rewards) - len(rewards) // 2]] = True
    return keep


RULES: dict[tuple[str, str], Kept] = {
    ("group_solve_rate", "threshold_band"): _in_band,
    ("outcome", "nonzero_variance"): _varies,
    ("outcome", "gfpo"): _shortest,
    ("outcome", "max_variance"): _most_varied,
    ("advantage_magnitude", "cppo"): _largest,
}
"""By scorer and selector, with the settings of `decide.SETTINGS`."""


def milliseconds(kept: Kept, batch: dict[str, Any], most: int) -> float:
    """The time of the plain form, its loop timed over `most` of the groups and scaled to all of them."""
    begin = time.perf_counter()
    uid, mask = np.asarray(batch["uid"]), batch["response_mask"].numpy()
    rewards = (batch["rm_scores"].numpy() * mask).sum(-1)
    advantages = (batch["advantages"].numpy() * mask).sum(-1) / mask.sum(-1)
    lengths = mask.sum(-1)
    keep, groups = np.zeros(len(uid), bool), np.unique(uid)
    looping = time.perf_counter()
    for group in groups[:most]:
        index = np.where(uid == group)[0]
        keep[index] = kept(rewards[index], lengths[index], advantages[index])
    looped = time.perf_counter()
    (keep[:, None] * mask).astype(np.float32)
    ended = time.perf_counter()
    return 1e3 * (looping - begin + ended - looped + (looped - looping) * len(groups) / len(groups[:most]))
