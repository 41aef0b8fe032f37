"""Actuators: what turns scores into an action."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from lightning_dataflex.core.rollout import RolloutBatch
from lightning_dataflex.core.tidy import TidyBatch, placed, scored
from lightning_dataflex.core.warn import warn_once
from lightning_dataflex.functional.weighting import finite_weights, mean_one


class Actuator(ABC):
    """Base of Selector, Reweighter and Mixer.

    Subclasses write `act`, which may be plain single-process code: the scores and the batch that it reads hold no
    padding and no sample without a score, and what it returns is put back in place.
    """

    requires: ClassVar[Sequence[str]] = ()
    """Batch fields that the rule reads beside the scores."""
    granularities: ClassVar[Sequence[str]] = ("prompt", "response", "token")
    """The granularities of scores that the rule understands."""
    needs_groups: ClassVar[bool] = False
    """Whether the rule compares the samples of one prompt."""
    row_wise: ClassVar[bool] = False
    """Whether what becomes of a sample depends on that sample alone, scaling aside; see `Scorer.row_wise`."""
    paper: ClassVar[str] = ""
    """Where the rule was published."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "act" in vars(cls):
            # Those of a base belong to the base's own act.
            if "columns" not in vars(cls):
                cls.columns = Actuator.columns  # type: ignore[method-assign]
            if "row_wise" not in vars(cls):
                cls.row_wise = False

    @abstractmethod
    def act(self, scores: Any, batch: Any, **ctx: Any) -> Any:
        """The action on a batch with these scores."""

    def columns(self, batch: RolloutBatch) -> dict[str, Tensor] | None:
        """Numbers (N,) that say as much to `act` as this rank's batch does; None where there are none.

        They travel to the other ranks in place of the fields that the rule requires.
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

    changes_advantages: bool = False
    """Whether kept samples are trained with advantages of this rule's own; see `advantages`."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "act" in vars(cls):
            cls.act = _on_scored_rows(cls.act, _kept_indices)  # type: ignore[method-assign]

    def keep(self, scores: Tensor, batch: Any, **ctx: Any) -> Tensor:
        """What `act` keeps as a mask: (N,) bool, or (N, L) for a rule on tokens."""
        batch, scores, rows = _scored(batch, scores)
        tidy = TidyBatch(batch, rows)
        kept = torch.as_tensor(self.act(scores[rows], tidy, **ctx), device=scores.device)
        if kept.dtype != torch.bool:
            index = _checked_index(self, kept, tidy.num_samples)
            kept = torch.zeros(tidy.num_samples, dtype=torch.bool, device=scores.device)
            kept[index] = True
        _check_length(self, kept, tidy)
        keep = placed(kept, rows, False)
        return keep & batch.response_mask if keep.dim() == 2 and batch.response_mask is not None else keep

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

    normalize: Literal["tokens", "none"] = "tokens"
    """`tokens`: the mean over the valid tokens of the global batch is 1. `none`: as the rule gives them."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "act" in vars(cls):
            cls.act = _on_scored_rows(cls.act, _scaled_weights)  # type: ignore[method-assign]

    def unscaled(self, scores: Tensor, batch: Any, **ctx: Any) -> Tensor:
        """What `act` gives, before it is scaled: finite, and 0 for a sample without a score."""
        batch, scores, rows = _scored(batch, scores)
        tidy = TidyBatch(batch, rows)
        weights = torch.as_tensor(self.act(scores[rows], tidy, **ctx)).detach()
        _check_length(self, weights, tidy)
        weights = weights if weights.dtype == torch.float64 else weights.float()
        if weights.dim() == 2:
            weights = torch.where(_tokens(tidy, weights) > 0, weights, 0.0)
        weights = torch.where(weights.isnan(), 0.0, weights)
        if (weights < 0).any():
            raise ValueError(
                f"{type(self).__name__}.act gave a weight of {float(weights.min())}. Weights must be >= 0."
            )
        if weights.isinf().any():
            if self.normalize == "none":
                raise ValueError(f"{type(self).__name__} gave an infinite weight. Weights must be finite.")
            weights = finite_weights(weights)
        return placed(weights, rows, 0.0)

    def warn_all_zero(self) -> None:
        """Say once that the rule's weights are all 0: they would quietly train on nothing."""
        warn_once(self, f"{type(self).__name__} gave every sample a weight of 0. They count alike instead.")


def _scaled_weights(self: Reweighter, scores: Tensor, batch: Any, **ctx: Any) -> Tensor:
    batch, scores, rows = _scored(batch, scores)
    weights = self.unscaled(scores, batch, **ctx)
    if self.normalize == "none":
        return weights
    tokens = _tokens(batch, weights) * (rows if weights.dim() == 1 else rows[:, None])
    if rows.any() and not (weights * tokens).sum() > 0:
        self.warn_all_zero()
        weights = torch.ones_like(weights)
    return mean_one(weights, tokens)


class Mixer(Actuator):
    """Scores of domains to the proportion that each has among the prompts to come; `act` returns them, summing to 1."""


def _scored(batch: Any, scores: Any) -> tuple[RolloutBatch, Tensor, Tensor]:
    """The batch, the scores, and which rows have both a valid token and a score."""
    batch = RolloutBatch.of({} if batch is None else batch)
    scores = torch.as_tensor(scores)
    if not batch.num_samples:
        batch = RolloutBatch({"num_tokens": torch.ones(len(scores), dtype=torch.int64)})
    if len(scores) != batch.num_samples:
        raise ValueError(f"There are {len(scores)} scores for {batch.num_samples} samples. Give one per sample.")
    if scores.dim() == 2:
        # What stands in padding tokens is no score, NaN included.
        scores = torch.where(_tokens(batch, scores) > 0, scores, torch.zeros_like(scores))
    return batch, scores, scored(batch, scores)


def _checked_index(selector: Selector, kept: Tensor, num_samples: int) -> Tensor:
    name = type(selector).__name__
    if len(kept) and (kept.is_floating_point() or len(kept.unique()) != len(kept)):
        raise ValueError(f"{name}.act returned {kept.tolist()[:8]}. Return each index to keep once, or a boolean mask.")
    if len(kept) and not 0 <= int(kept.min()) <= int(kept.max()) < num_samples:
        raise ValueError(
            f"{name}.act returned indices {int(kept.min())} to {int(kept.max())} of {num_samples} samples. "
            "Return indices into the scores it was given."
        )
    return kept.to(torch.int64)


def _check_length(actuator: Actuator, result: Tensor, batch: RolloutBatch) -> None:
    if result.dim() == 0 or len(result) != batch.num_samples:
        raise ValueError(
            f"{type(actuator).__name__}.act returned shape {tuple(result.shape)} for {batch.num_samples} samples. "
            "Return one value per score it was given."
        )


def _tokens(batch: RolloutBatch, weights: Tensor) -> Tensor:
    if weights.dim() == 1:
        return batch.num_tokens.to(weights.device)
    mask = batch.response_mask
    return torch.ones_like(weights) if mask is None else mask.to(weights)
