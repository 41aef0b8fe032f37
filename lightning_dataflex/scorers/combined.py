"""Scorers of scorers: a criterion from several signals without code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import torch
from torch import Tensor, nn

from lightning_dataflex.core.building import component
from lightning_dataflex.core.checks import check_range
from lightning_dataflex.core.compat import check_after_rollout
from lightning_dataflex.core.global_batch import joint_columns
from lightning_dataflex.core.memory import described, distinct, title
from lightning_dataflex.core.registry import register_scorer
from lightning_dataflex.core.rollout import RolloutBatch
from lightning_dataflex.core.scorer import Granularity, Scorer, Timing, scores_on
from lightning_dataflex.core.tidy import TidyBatch
from lightning_dataflex.functional import combining
from lightning_dataflex.functional.choices import shown
from lightning_dataflex.functional.weighting import FLOAT_MAX


class Combined(Scorer):
    """Scores from those of other scorers.

    It is as fine, as late and as demanding as the finest, latest and most demanding of them. A sample that one of them
    cannot score has no score, but the others count it where they compare.
    """

    screened = ()

    def _combine(self, scorers: Sequence[Any]) -> None:
        if not isinstance(scorers, (list, tuple)) or not scorers:
            raise ValueError(f"scorers is {shown(scorers)}. Give a list of at least one scorer.")
        parts: list[Scorer] = [component("scorer", each) for each in scorers]
        for part in parts:
            check_after_rollout(part)
        # By title, so that a checkpoint gives each its own memory, whatever their order.
        names = distinct([title(part) for part in parts], [described(part) for part in parts])
        self.parts = nn.ModuleDict(dict(zip(names, parts)))
        self.requires = tuple(dict.fromkeys(name for part in parts for name in part.requires))
        self.timing = max((part.timing for part in parts), key=get_args(Timing).index)
        self.granularity = max((part.granularity for part in parts), key=get_args(Granularity).index)
        self.needs_groups = any(part.needs_groups for part in parts)
        self.remembers = self.remembers or any(part.remembers for part in parts)
        # A subclass with a score of its own is neither unless it says so, whatever its parts are.
        self.row_wise = self.row_wise and all(part.row_wise for part in parts)
        self.by_mask = self.by_mask and all(part.by_mask for part in parts)

    @property
    def part_titles(self) -> list[str]:
        """What the scorers are called in a checkpoint."""
        return list(self.parts)

    @property
    def part_descriptions(self) -> list[str]:
        """What the scorers are, with their settings."""
        return [described(part) for part in self._each]

    @property
    def _each(self) -> list[Scorer]:
        return list(self.parts.values())  # type: ignore[arg-type]

    @property
    def recipe(self) -> str:
        return f"{super().recipe}({', '.join(part.recipe for part in self._each)})"

    def columns(self, batch: RolloutBatch) -> dict[str, Tensor] | None:
        return joint_columns([part.columns(batch) for part in self._each])

    def _scores(self, batch: TidyBatch, step_id: int, **ctx: Any) -> list[Tensor]:
        """The scores of each part, on the finest granularity of them."""
        found = [scores_on(part, batch, step_id, **ctx) for part in self._each]
        if self.granularity != "token":
            return found
        mask = batch.token_mask
        return [each if each.dim() == 2 else torch.where(mask, each[:, None], 0.0) for each in found]

    def _over_valid(self, scores: Tensor, batch: TidyBatch, rule: Any) -> Tensor:
        """A rule on a flat list of scores, for the valid tokens where they are of tokens."""
        if scores.dim() == 1:
            return rule(scores)
        mask, result = batch.token_mask, torch.zeros_like(scores)
        result[mask] = rule(scores[mask])
        return result


@register_scorer("weighted_sum")
class WeightedSum(Combined):
    """The sum of several scores, each times its weight.

    Args:
        scorers: Names, `{name, params}`, `{class_path, init_args}` or scorers.
        weights: One for each. Default: 1.

    Example:
        >>> import torch
        >>> scorer = WeightedSum(["outcome", "response_length"], weights=[1.0, -0.1])
        >>> scorer.score({"rm_scores": torch.tensor([1.0, 1.0]), "response_mask": torch.tensor([[1, 1], [1, 0]])})
        tensor([0.8000, 0.9000])
    """

    row_wise = by_mask = True
    columns = Combined.columns

    def __init__(self, scorers: list[Any], weights: list[float] | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._combine(scorers)
        weights = [1.0] * len(scorers) if weights is None else weights
        if not isinstance(weights, (list, tuple)):
            raise ValueError(f"weights is {shown(weights)}. Give a list of numbers, one for each scorer.")
        if len(weights) != len(scorers):
            raise ValueError(f"weights has {len(weights)} numbers for {len(scorers)} scorers. Give one for each.")
        for weight in weights:
            check_range("weights", weight, -FLOAT_MAX, FLOAT_MAX)
        self.weights = list(weights)

    @property
    def recipe(self) -> str:
        return f"{super().recipe}{self.weights}"

    def score(self, batch: Any, step_id: int = 0, **ctx: Any) -> Tensor:
        return combining.weighted_sum(self._scores(batch, step_id, **ctx), self.weights)


@register_scorer("product")
class Product(Combined):
    """The product of several scores.

    Args:
        scorers: Names, `{name, params}`, `{class_path, init_args}` or scorers.

    Example:
        >>> import torch
        >>> batch = {"rm_scores": torch.tensor([1.0, 0.5]), "response_mask": torch.tensor([[1, 1], [1, 0]])}
        >>> Product(["outcome", "response_length"]).score(batch)
        tensor([2.0000, 0.5000])
    """

    row_wise = by_mask = True
    columns = Combined.columns

    def __init__(self, scorers: list[Any], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._combine(scorers)

    def score(self, batch: Any, step_id: int = 0, **ctx: Any) -> Tensor:
        return combining.product(self._scores(batch, step_id, **ctx))


@register_scorer("rank")
class Rank(Combined):
    """The share of the global batch that lies below a score, in [0, 1]; equal scores count half.

    Args:
        scorer: A name, `{name, params}`, `{class_path, init_args}` or a scorer.

    Example:
        >>> import torch
        >>> Rank("outcome").score({"rm_scores": torch.tensor([5.0, -1.0, 0.5]), "response_mask": torch.ones(3, 1)})
        tensor([1.0000, 0.0000, 0.5000])
    """

    columns = Combined.columns

    def __init__(self, scorer: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._combine([scorer])

    def score(self, batch: Any, step_id: int = 0, **ctx: Any) -> Tensor:
        return self._over_valid(self._scores(batch, step_id, **ctx)[0], batch, combining.percentile_rank)


@register_scorer("zscore")
class ZScore(Combined):
    """A score minus its mean over its standard deviation, of the global batch; 0 where all are equal.

    Args:
        scorer: A name, `{name, params}`, `{class_path, init_args}` or a scorer.

    Example:
        >>> import torch
        >>> ZScore("outcome").score({"rm_scores": torch.tensor([5.0, 1.0]), "response_mask": torch.ones(2, 1)})
        tensor([ 1., -1.])
    """

    columns = Combined.columns

    def __init__(self, scorer: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._combine([scorer])

    def score(self, batch: Any, step_id: int = 0, **ctx: Any) -> Tensor:
        return self._over_valid(self._scores(batch, step_id, **ctx)[0], batch, combining.standardised)
