"""Actuators: what turns scores into an action, on samples. `Mixer` is that on domains."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from lightning_dataflex.core.rollout import RolloutBatch
from lightning_dataflex.core.rows import check_length, checked_index, measure_of, scored_rows, tokens_of
from lightning_dataflex.core.tidy import TidyBatch, fields_screened
from lightning_dataflex.core.warn import warn_once
from lightning_dataflex.functional.blocks import by_rows, masked
from lightning_dataflex.functional.choices import check_choice
from lightning_dataflex.functional.tokens import numbers_inside
from lightning_dataflex.functional.weighting import FLOAT_MAX, finite_weights, least_and_largest, mean_one

Normalize = Literal["tokens", "samples", "abs_advantage", "none"]


class Actuator(ABC):
    """Base of Selector, Reweighter and Mixer.

    Subclasses write `act`, which may be plain single-process code. What a Selector or a Reweighter reads holds no
    padding and no sample without a score, and what it returns is put back in place.
    """

    requires: Sequence[str] = ()
    """Batch fields that the rule reads beside the scores."""
    granularities: Sequence[str] = ("prompt", "response", "token")
    """The granularities of scores that the rule understands."""
    needs_groups: bool = False
    """Whether the rule compares the samples of one prompt."""
    any_estimator: ClassVar[bool] = False
    """Of a rule that compares them: whether the advantage estimator may be one that does not."""
    row_wise: ClassVar[bool] = False
    """Whether what becomes of a sample depends on that sample alone, scaling aside; see `Scorer.row_wise`."""
    by_mask: ClassVar[bool] = False
    """Whether it reads tables of tokens with the mask alone; see `Scorer.by_mask`."""
    changes_advantages: bool = False
    """Whether kept samples are trained with advantages of this rule's own; see `Selector.advantages`."""
    signals: ClassVar[Sequence[str]] = ()
    """Of the scorers that the rule can use, their `signal`; empty for any."""
    screened: Sequence[str] | None = None
    """The fields in which a NaN leaves a sample without an action, not kept or of weight 0; None for `requires`."""
    remembers: bool = False
    """Whether what it does follows from earlier batches too: ranks must then see the same ones."""
    needs_progress: bool = False
    """Whether the rule must be told the share of the run that is over."""
    default_scorer: str | Mapping[str, Any] = ""
    """The scorer of its paper, as a configuration names it; empty for a rule on any score."""
    paper: ClassVar[str] = ""
    """Where the rule was published."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in ("requires", "granularities"):
            if isinstance(getattr(cls, name), str):
                raise ValueError(f"{cls.__name__}.{name} is {getattr(cls, name)!r}. Give a list of names.")
        if "act" in vars(cls):
            # Those of a base belong to the base's own act.
            if "columns" not in vars(cls):
                cls.columns = Actuator.columns  # type: ignore[method-assign]
            for name in ("row_wise", "by_mask"):
                if name not in vars(cls):
                    setattr(cls, name, False)

    @abstractmethod
    def act(self, scores: Any, batch: Any, **ctx: Any) -> Any:
        """The action on a batch with these scores."""

    def columns(self, batch: RolloutBatch) -> dict[str, Tensor] | None:
        """Numbers (N,) that say as much to `act` as this rank's batch does; None where there are none.

        They travel to the other ranks in place of the fields that the rule requires. On one process the ids of groups
        are numbers from 0 in each batch, except for what `remembers`.
        """
        return None if self.requires else {}

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs: tensors, dicts, lists, numbers and strings, the same on every rank."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""


def _on_scored_rows(rule: Callable[..., Any], from_outside: Callable[..., Any]) -> Callable[..., Any]:
    """An author's `act`, with `from_outside` around it unless its batch is tidy already."""

    @functools.wraps(rule)
    def act(self: Any, scores: Any, batch: Any, **ctx: Any) -> Any:
        if isinstance(batch, TidyBatch):
            return rule(self, scores, batch, **ctx)
        return from_outside(self, scores, batch, **ctx)

    return act


class Selector(Actuator):
    """Scores to the samples that stay.

    A subclass's `act` returns their indices, or a boolean mask, (N,) for samples or (N, L) for tokens. Called from
    outside it gives the indices as a list, for tokens the mask; `keep` gives the mask in either case.

    Example:
        >>> class AboveHalf(Selector):
        ...     def act(self, scores, batch, **ctx):
        ...         return torch.nonzero(scores > 0.5).flatten().tolist()
        >>> AboveHalf().act(torch.tensor([0.1, torch.nan, 0.9]), {})
        [2]
        >>> AboveHalf().keep(torch.tensor([0.1, torch.nan, 0.9]), {})
        tensor([False, False,  True])
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "act" in vars(cls):
            cls.act = _on_scored_rows(cls.act, _kept_indices)  # type: ignore[method-assign]

    def keep(self, scores: Tensor, batch: Any, **ctx: Any) -> Tensor:
        """What `act` keeps as a mask: (N,) bool, or (N, L) for a rule on tokens."""
        return self.kept(*scored_rows(batch, scores, fields_screened(self)), **ctx)

    def kept(self, batch: RolloutBatch, scores: Tensor, rows: Tensor, **ctx: Any) -> Tensor:
        """As `keep`, of scores that are 0 in padding, where it is known which rows have one and can be read."""
        tidy = TidyBatch(batch, rows, by_mask=self.by_mask)
        if not tidy.num_samples:
            return torch.zeros_like(scores, dtype=torch.bool)
        kept = torch.as_tensor(self.act(tidy.of_rows(scores), tidy, **ctx), device=scores.device)
        if kept.dtype != torch.bool:
            index = checked_index(self, kept, tidy.num_samples)
            kept = torch.zeros(tidy.num_samples, dtype=torch.bool, device=scores.device)
            kept[index] = True
        check_length(self, kept, tidy)
        keep = tidy.placed(kept, False)
        mask = batch.response_mask
        return by_rows(torch.bitwise_and, keep, mask.to(keep.device)) if keep.dim() == 2 and mask is not None else keep

    def advantages(self, keep: Tensor, batch: RolloutBatch) -> Tensor | None:
        """Advantages (N,) to train the kept samples with; None leaves those of the batch."""
        return None


def _kept_indices(self: Selector, scores: Tensor, batch: Any, **ctx: Any) -> list[int] | Tensor:
    keep = self.keep(scores, batch, **ctx)
    return keep if keep.dim() == 2 else keep.nonzero().flatten().tolist()


class Reweighter(Actuator):
    """Scores to weights >= 0 of samples (N,) or tokens (N, L).

    `act` returns them on any scale; what leaves it is scaled as `normalize` says, and 0 for a sample without a score.

    Example:
        >>> class Score(Reweighter):
        ...     def act(self, scores, batch, **ctx):
        ...         return scores
        >>> Score().act(torch.tensor([1.0, torch.nan, 3.0]), {})
        tensor([0.5000, 0.0000, 1.5000])
    """

    normalize: Normalize = "tokens"
    """What scales the weights, over the global batch.

    `tokens`: their mean over the valid tokens is 1. `samples`: their mean over the samples. `abs_advantage`: their mean
    over the tokens, each counted |A| times, so that the size of the policy gradient's terms stays. `none`: nothing.
    """

    def __init__(self, normalize: Normalize | None = None) -> None:
        if normalize is not None:
            check_choice("normalize", normalize, Normalize)
            self.normalize = normalize

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "act" in vars(cls):
            cls.act = _on_scored_rows(cls.act, _scaled_weights)  # type: ignore[method-assign]
        check_choice(f"{cls.__name__}.normalize", cls.normalize, Normalize)

    def weighed(self, batch: RolloutBatch, scores: Tensor, rows: Tensor, **ctx: Any) -> Tensor:
        """What `act` gives, before it is scaled or checked: 0 in padding and for a sample without a score.

        Args:
            batch: The samples.
            scores: 0 in padding.
            rows: (N,) bool, the samples that have a score and can be read.
        """
        tidy = TidyBatch(batch, rows, by_mask=self.by_mask)
        if not tidy.num_samples:
            return torch.zeros_like(scores if scores.dtype == torch.float64 else scores.float())
        weights = torch.as_tensor(self.act(tidy.of_rows(scores), tidy, **ctx)).detach()
        check_length(self, weights, tidy)
        weights = weights if weights.dtype == torch.float64 else weights.float()
        valid = tidy.token_mask if weights.dim() == 2 else torch.ones_like(weights, dtype=torch.bool)
        weights = by_rows(lambda w, v: masked(w, numbers_inside(w, v)), weights, valid.to(weights.device))
        return tidy.placed(weights, 0.0)

    def checked(self, weights: Tensor, low: float, high: float) -> Tensor:
        """The weights; finite ones in their place where they are to be scaled.

        Args:
            weights: From `weighed`.
            low: The least of them.
            high: The largest.

        Raises:
            ValueError: They cannot be weights.
        """
        if low < 0:
            raise ValueError(f"{type(self).__name__}.act gave a weight of {low}. Weights must be >= 0.")
        if high > FLOAT_MAX:
            if self.normalize == "none":
                weight = "an infinite weight" if high == math.inf else f"a weight of {high}, infinite in float32"
                raise ValueError(f"{type(self).__name__} gave {weight}. Weights must be finite.")
            return finite_weights(weights)
        return weights

    def warn_all_zero(self) -> None:
        """Say once that the rule's weights are all 0: they would quietly train on nothing."""
        warn_once(self, f"{type(self).__name__} gave every sample a weight of 0. They count alike instead.")


def _scaled_weights(self: Reweighter, scores: Tensor, batch: Any, **ctx: Any) -> Tensor:
    batch, scores, rows = scored_rows(batch, scores, fields_screened(self))
    weights = self.weighed(batch, scores, rows, **ctx)
    weights = self.checked(weights, *least_and_largest(weights).tolist())
    if self.normalize == "none":
        return weights
    there = rows if weights.dim() == 1 else rows[:, None]
    tokens, measure = tokens_of(batch, weights) * there, measure_of(batch, weights, self.normalize)
    if rows.any() and not (weights * tokens).sum() > 0:
        self.warn_all_zero()
        weights = torch.ones_like(weights)
    return mean_one(weights, tokens, None if measure is None else measure * there)
