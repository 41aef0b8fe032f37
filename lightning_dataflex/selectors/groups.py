"""Selectors of some samples of each group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_dataflex.core.actuator import Selector
from lightning_dataflex.core.checks import check_range, is_whole
from lightning_dataflex.core.global_batch import rewards_and_groups
from lightning_dataflex.core.registry import register_selector
from lightning_dataflex.core.rollout import RolloutBatch
from lightning_dataflex.core.warn import warn_once
from lightning_dataflex.functional import subsets
from lightning_dataflex.functional.advantages import grpo_advantages
from lightning_dataflex.functional.choices import check_choice, shown
from lightning_dataflex.functional.comparing import is_nan
from lightning_dataflex.functional.groups import group_mean

Advantages = Literal["subset", "group"]
Metric = Literal["short", "efficiency", "reward"]

MEANS_REMEMBERED = 10_000
"""Groups whose mean rewards say how hard a group is."""


class _WithinGroups(Selector):
    """Keeps some samples of each group, and trains them with advantages relative to each other.

    Args:
        advantages: `subset` normalises the rewards within the kept samples of a group, as the papers do;
            `group` keeps the advantages of the batch.
    """

    requires = ("rm_scores", "uid")
    needs_groups = True
    granularities = ("prompt", "response")
    default_scorer = "outcome"
    correction: int
    eps: float

    def __init__(self, advantages: Advantages = "subset") -> None:
        check_choice("advantages", advantages, Advantages)
        self.changes_advantages = advantages == "subset"

    def columns(self, batch: RolloutBatch) -> dict[str, Tensor]:
        return rewards_and_groups(batch)

    def advantages(self, keep: Tensor, batch: RolloutBatch) -> Tensor | None:
        if not self.changes_advantages:
            return None
        return grpo_advantages(batch.outcomes, batch.group_ids, valid=keep, correction=self.correction, eps=self.eps)


@register_selector("gfpo")
class GFPO(_WithinGroups):
    """Keeps the k shortest, most token-efficient or best rewarded responses of each group.

    Of equal metrics the earlier sample stays. `efficiency` is reward per token; with negative rewards it
    prefers the longest failure.

    With `k_by_difficulty` k is that of the group's difficulty: its mean reward is held against the quartiles of those
    of the last 10,000 groups, this batch's included.

    Args:
        k: Responses to keep of each group.
        metric: `short`, `efficiency` or `reward`.
        k_by_difficulty: k of groups that are very hard, hard, medium and easy, 8, 8, 6 and 4 (of 16) in the paper;
            until 4 groups were seen that of very hard ones. Default: `k` for all.
        advantages: `subset` or `group`. The paper's are relative to the kept subset, with its population
            standard deviation.

    Example:
        >>> import torch
        >>> lengths = torch.tensor([2, 8, 3])
        >>> batch = {"rm_scores": torch.tensor([1.0, 1.0, 0.0]), "num_tokens": lengths, "uid": [7, 7, 7]}
        >>> GFPO(k=2, metric="short").act(torch.zeros(3), batch)
        [0, 2]
    """

    paper = "GFPO, arXiv:2508.09726"
    correction, eps = 0, 1e-6
    columns = _WithinGroups.columns

    def __init__(
        self,
        k: int = 8,
        metric: Metric = "short",
        advantages: Advantages = "subset",
        k_by_difficulty: list[int] | None = None,
    ) -> None:
        super().__init__(advantages)
        if k_by_difficulty is not None and not (isinstance(k_by_difficulty, list) and len(k_by_difficulty) == 4):
            raise ValueError(f"k_by_difficulty is {shown(k_by_difficulty)}. Give a list of four numbers.")
        for each in (k, *(k_by_difficulty or ())):
            if not is_whole(each) or not 1 <= each < 2**31:
                raise ValueError(f"k is {shown(each)}. Keep at least 1 response of each group, and fewer than 2^31.")
        check_choice("metric", metric, Metric)
        if k == 1 and advantages == "subset":
            warn_once(
                self, "k is 1: alone in its subset a response has advantage 0. Use advantages: group or a larger k."
            )
        self.k, self.metric, self.k_by_difficulty = k, metric, k_by_difficulty
        self.remembers = k_by_difficulty is not None
        self._means = torch.empty(0, dtype=torch.float64)

    def act(self, scores: Tensor, batch: Any, **ctx: Any) -> Any:
        group, num_groups = batch.groups
        largest = int(group.bincount().max()) if len(group) else 0
        if self.k_by_difficulty is None and self.k > largest > 0:
            warn_once(
                self, f"k is {self.k} but no group has more than {largest} samples: nothing is filtered. Lower k."
            )
        length, reward = batch.num_tokens.double(), batch.outcomes.double()
        metric = {"short": -length, "efficiency": reward / length, "reward": reward}[self.metric]
        valid = ~is_nan(batch.outcomes)
        k: int | Tensor = self.k
        if self.k_by_difficulty is not None:
            means = group_mean(batch.outcomes, group, num_groups, valid).cpu()
            self._means = torch.cat([self._means, means[means.isfinite()]])[-MEANS_REMEMBERED:]
            k = subsets.k_of_difficulty(means, self._means, self.k_by_difficulty).to(group.device)[group]
        return subsets.group_top_k(metric, group, k, valid=valid)

    def state_dict(self) -> dict[str, Any]:
        return {"means": self._means} if self.remembers else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._means = state.get("means", self._means)


@register_selector("max_variance")
class MaxVariance(_WithinGroups):
    """Keeps the part of each group whose rewards vary most.

    Args:
        keep_fraction: In (0, 1], of each group; rounded to nearest, halves up, at least one.
        advantages: `subset` or `group`. The paper's are relative to the kept subset, with its sample standard
            deviation plus 1e-4.

    Example:
        >>> import torch
        >>> batch = {"rm_scores": torch.tensor([1.0, 0.0, 0.5, 0.0]), "uid": [7, 7, 7, 7]}
        >>> MaxVariance(keep_fraction=0.5).act(torch.zeros(4), batch)
        [0, 1]
    """

    paper = "PODS, arXiv:2504.13818"
    correction, eps = 1, 1e-4
    columns = _WithinGroups.columns

    def __init__(self, keep_fraction: float = 0.5, advantages: Advantages = "subset") -> None:
        super().__init__(advantages)
        check_range("keep_fraction", keep_fraction, 0, 1, open_low=True)
        self.keep_fraction = keep_fraction

    def act(self, scores: Tensor, batch: Any, **ctx: Any) -> Any:
        group, _ = batch.groups
        return subsets.max_variance(batch.outcomes, group, self.keep_fraction)


@register_selector("cppo")
class CPPO(Selector):
    """Leaves out the share of samples with the smallest scores, |advantage| in the paper, of each group or of all.

    Advantages stay those of the full group. Of equal scores the later samples go first.

    Args:
        pruning_rate: In [0, 1). Of n samples int(n * pruning_rate) go.
        within: `group` as in the paper, or `batch` as in the authors' implementation.

    Example:
        >>> import torch
        >>> CPPO(within="batch").act(torch.tensor([1.2, 0.3, 0.7, 1.1]), {})
        [0, 3]
    """

    requires: Sequence[str] = ("uid",)
    needs_groups = True
    granularities = ("response",)
    default_scorer = "advantage_magnitude"
    paper = "CPPO, arXiv:2503.22342"

    def __init__(self, pruning_rate: float = 0.5, within: Literal["group", "batch"] = "group") -> None:
        check_range("pruning_rate", pruning_rate, 0, 1)
        if pruning_rate == 1:
            raise ValueError("pruning_rate is 1: nothing would be left. Give less.")
        check_choice("within", within, Literal["group", "batch"])
        self.pruning_rate, self.within = pruning_rate, within
        self.needs_groups = within == "group"
        self.requires = ("uid",) if self.needs_groups else ()

    def act(self, scores: Tensor, batch: Any, **ctx: Any) -> Any:
        group = batch.groups[0] if self.needs_groups else torch.zeros_like(scores, dtype=torch.int64)
        return subsets.pruned(scores, group, self.pruning_rate)

    def columns(self, batch: RolloutBatch) -> dict[str, Tensor]:
        return {"uid": batch.group_ids} if self.needs_groups else {}
