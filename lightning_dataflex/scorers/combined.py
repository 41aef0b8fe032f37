"""Scorers of scorers: a criterion from several signals without code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_dataflex.core.building import component
from lightning_dataflex.core.checks import FLOAT_MAX, check_range
from lightning_dataflex.core.global_batch import joint_columns
from lightning_dataflex.core.history import PromptHistory
from lightning_dataflex.core.ids import prompt_ids, stable_ids
from lightning_dataflex.core.registry import register_scorer, registered_name
from lightning_dataflex.core.rollout import RolloutBatch
from lightning_dataflex.core.scorer import Scorer, scores_on
from lightning_dataflex.core.tidy import TidyBatch
from lightning_dataflex.functional import combining
from lightning_dataflex.functional.groups import group_index, group_mean
from lightning_dataflex.functional.tokens import token_mean

TIMINGS = ("post_reward", "post_advantage", "in_loss")
GRANULARITIES = ("domain", "prompt", "response", "token")


class _Combined(Scorer):
    """Scores from those of other scorers.

    It is as fine, as late and as demanding as the finest, latest and most demanding of them. A sample that one of them
    cannot score has no score, but the others count it where they compare.
    """

    screened = ()

    def _combine(self, scorers: Sequence[Any]) -> None:
        if isinstance(scorers, (str, dict)) or not scorers:
            raise ValueError(f"scorers is {scorers!r}. Give a list of at least one scorer.")
        parts: list[Scorer] = [component("scorer", each) for each in scorers]
        for part in parts:
            if part.timing == "pre_rollout":
                raise ValueError(
                    f"{registered_name(part)} scores prompts before their rollout, where nothing else is known. Give "
                    "it a block of its own."
                )
        self.parts = nn.ModuleList(parts)
        self.requires = tuple(dict.fromkeys(name for part in parts for name in part.requires))
        self.timing = max((part.timing for part in parts), key=TIMINGS.index)
        self.granularity = max((part.granularity for part in parts), key=GRANULARITIES.index)
        self.needs_groups = any(part.needs_groups for part in parts)
        self._of_each_row = all(part.row_wise for part in parts)

    @property
    def _each(self) -> list[Scorer]:
        return list(self.parts)  # type: ignore[arg-type]

    @property
    def remembers(self) -> bool:
        return any(part.remembers for part in self._each)

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
class WeightedSum(_Combined):
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

    columns = _Combined.columns

    def __init__(self, scorers: list[Any], weights: list[float] | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._combine(scorers)
        weights = [1.0] * len(scorers) if weights is None else list(weights)
        if len(weights) != len(scorers):
            raise ValueError(f"weights has {len(weights)} numbers for {len(scorers)} scorers. Give one for each.")
        for weight in weights:
            check_range("weights", abs(weight), 0, FLOAT_MAX)
        self.weights = weights
        self.row_wise = self._of_each_row

    @property
    def recipe(self) -> str:
        return f"{super().recipe}{self.weights}"

    def score(self, batch: Any, step_id: int = 0, **ctx: Any) -> Tensor:
        return combining.weighted_sum(self._scores(batch, step_id, **ctx), self.weights)


@register_scorer("product")
class Product(_Combined):
    """The product of several scores.

    Args:
        scorers: Names, `{name, params}`, `{class_path, init_args}` or scorers.

    Example:
        >>> import torch
        >>> batch = {"rm_scores": torch.tensor([1.0, 0.5]), "response_mask": torch.tensor([[1, 1], [1, 0]])}
        >>> Product(["outcome", "response_length"]).score(batch)
        tensor([2.0000, 0.5000])
    """

    columns = _Combined.columns

    def __init__(self, scorers: list[Any], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._combine(scorers)
        self.row_wise = self._of_each_row

    def score(self, batch: Any, step_id: int = 0, **ctx: Any) -> Tensor:
        return combining.product(self._scores(batch, step_id, **ctx))


@register_scorer("rank")
class Rank(_Combined):
    """The share of the global batch that a score is above of, in [0, 1]; of equal scores the middle of their places.

    Args:
        scorer: A name, `{name, params}`, `{class_path, init_args}` or a scorer.

    Example:
        >>> import torch
        >>> Rank("outcome").score({"rm_scores": torch.tensor([5.0, -1.0, 0.5]), "response_mask": torch.ones(3, 1)})
        tensor([1.0000, 0.0000, 0.5000])
    """

    columns = _Combined.columns

    def __init__(self, scorer: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._combine([scorer])

    def score(self, batch: Any, step_id: int = 0, **ctx: Any) -> Tensor:
        return self._over_valid(self._scores(batch, step_id, **ctx)[0], batch, combining.percentile_rank)


@register_scorer("zscore")
class ZScore(_Combined):
    """A score minus its mean over its standard deviation, of the global batch; 0 where all are equal.

    Args:
        scorer: A name, `{name, params}`, `{class_path, init_args}` or a scorer.

    Example:
        >>> import torch
        >>> ZScore("outcome").score({"rm_scores": torch.tensor([5.0, 1.0]), "response_mask": torch.ones(2, 1)})
        tensor([ 1.0000, -1.0000])
    """

    columns = _Combined.columns

    def __init__(self, scorer: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._combine([scorer])

    def score(self, batch: Any, step_id: int = 0, **ctx: Any) -> Tensor:
        return self._over_valid(self._scores(batch, step_id, **ctx)[0], batch, combining.standardised)


@register_scorer("ema")
class EMA(_Combined):
    """Exponential moving average of a score over the visits of a prompt, or over the steps of a domain.

    At a visit the average becomes decay * average + (1 - decay) * the mean score of this step; at the first the mean
    itself. What was visited longest ago is forgotten first.

    Args:
        scorer: A name, `{name, params}`, `{class_path, init_args}` or a scorer. Of tokens the mean of a response is
            taken.
        decay: In [0, 1); 0 remembers nothing.
        by: `prompt`, by the batch's `prompt_id` or else `uid`, which must then be the same at every visit; or `domain`.
        max_entries: How many prompts or domains are remembered.

    Example:
        >>> import torch
        >>> scorer = EMA("outcome", decay=0.5)
        >>> batch = {"rm_scores": torch.tensor([1.0, 0.0]), "uid": [7, 7], "response_mask": torch.ones(2, 1)}
        >>> scorer.score(batch, step_id=0), scorer.score(batch | {"rm_scores": torch.tensor([1.0, 1.0])}, step_id=1)
        (tensor([0.5000, 0.5000]), tensor([0.7500, 0.7500]))
    """

    def __init__(
        self,
        scorer: Any,
        decay: float = 0.9,
        by: Literal["prompt", "domain"] = "prompt",
        max_entries: int = 1_000_000,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._combine([scorer])
        check_range("decay", decay, 0, 1)
        if decay == 1:
            raise ValueError("decay is 1: nothing new would ever count. Give less.")
        if by not in ("prompt", "domain"):
            raise ValueError(f"by is {by!r}. Use prompt or domain.")
        if max_entries < 1:
            raise ValueError(f"max_entries is {max_entries}. Remember at least 1.")
        self.decay, self.by = decay, by
        self.granularity = "prompt"
        self.requires = tuple(dict.fromkeys((*self.requires, "prompt_id" if by == "prompt" else "domain")))
        self._memory = PromptHistory({"average": torch.nan}, max_entries)

    @property
    def remembers(self) -> bool:
        return True

    def score(self, batch: Any, step_id: int = 0, **ctx: Any) -> Tensor:
        values = self._scores(batch, step_id, **ctx)[0]
        values = token_mean(values, batch.token_mask) if values.dim() == 2 else values
        names = self._names(batch)
        group, num = group_index(names.to(values.device))
        # An infinite score would stay in the average for good.
        now = group_mean(values, group, num, values.isfinite()).cpu()
        ids = torch.unique(names).cpu()
        before = self._memory.look_up(ids)["average"].double()
        average = torch.where(before.isnan(), now, self.decay * before + (1 - self.decay) * now)
        average = torch.where(now.isnan(), before, average)
        if ctx.get("remember", True):
            self._memory.put(ids, {"average": average}, step_id)
        scores = average.to(values.device)[group].to(values.dtype)
        return torch.where(values.isnan(), torch.nan, scores)

    def columns(self, batch: RolloutBatch) -> dict[str, Tensor] | None:
        names = {"prompt_id" if self.by == "prompt" else "domain": self._names(batch)}
        return joint_columns([*(part.columns(batch) for part in self._each), names])

    def _names(self, batch: Any) -> Tensor:
        return prompt_ids(batch) if self.by == "prompt" else stable_ids(batch["domain"], "domain")

    def get_extra_state(self) -> dict[str, Any]:
        """The averages, as a part of the scorer's state."""
        return {"memory": self._memory.state_dict()}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Take back what `get_extra_state` gave."""
        self._memory.load_state_dict(state["memory"])
