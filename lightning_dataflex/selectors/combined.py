"""Selectors of selectors."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from lightning_dataflex.core.actuator import Selector
from lightning_dataflex.core.building import component
from lightning_dataflex.core.compat import check_after_rollout, validate_compat
from lightning_dataflex.core.global_batch import joint_columns
from lightning_dataflex.core.memory import described, distinct, matched_parts, memory_of, recall, title
from lightning_dataflex.core.registry import register_selector, registered_name, settings_of
from lightning_dataflex.core.rollout import RolloutBatch
from lightning_dataflex.core.scorer import Scorer, scores_on
from lightning_dataflex.core.tidy import TidyBatch, scorable, scored
from lightning_dataflex.functional.choices import shown


class _Condition:
    """A selector, and the scores that it acts on: those it is given, or of a scorer of its own."""

    def __init__(self, spec: Any) -> None:
        self.scorer: Scorer | None = None
        if isinstance(spec, dict) and {"scorer", "selector"} & set(spec):
            if "selector" not in spec or set(spec) - {"scorer", "selector"}:
                raise ValueError(f"A condition is {shown(spec)}. Give {{scorer, selector}}, or a selector.")
            self.selector: Selector = component("selector", spec["selector"])
            own = spec.get("scorer") or self.selector.default_scorer
            if not own:
                raise ValueError(
                    f"A condition is {shown(spec)}, and {registered_name(self.selector)} acts on any score. "
                    "Give it a scorer."
                )
            self.scorer = component("scorer", own)
        else:
            self.selector = component("selector", spec)
        if self.scorer is None:
            return
        check_after_rollout(self.scorer)
        validate_compat(self.scorer, self.selector)

    @property
    def parts(self) -> list[Any]:
        return [self.selector] if self.scorer is None else [self.scorer, self.selector]

    @property
    def title(self) -> str:
        return ": ".join(title(part) for part in self.parts)

    @property
    def of_tokens(self) -> bool:
        """Whether it keeps tokens even where the block scores samples."""
        own = self.scorer is not None and self.scorer.granularity == "token"
        return own or (isinstance(self.selector, _Combined) and self.selector.of_tokens)

    def __repr__(self) -> str:
        settings = settings_of(self.selector)
        rule = registered_name(self.selector) + (
            f"({', '.join(f'{k}={v!r}' for k, v in settings.items())})" if settings else ""
        )
        return rule if self.scorer is None else f"{registered_name(self.scorer)}: {rule}"

    def judged(self, scores: Tensor, batch: TidyBatch, **ctx: Any) -> tuple[Tensor, Tensor]:
        """What is kept, (N,) or (N, L) bool, and (N,) bool which samples have what it takes to say so."""
        if self.scorer is not None:
            scores = scores_on(self.scorer, batch, ctx.get("step_id", 0))
        if isinstance(self.selector, _Combined):
            keep, rows = self.selector.judged(scores, batch, **ctx)
            return keep, rows & scored(batch, scores)
        rows = scored(batch, scores) & scorable(batch, self.selector.requires).to(scores.device)
        return self.selector.keep(scores, batch, **ctx), rows


class _Combined(Selector):
    """Keeps what several conditions say together."""

    conditions: list[_Condition]
    screened = ()

    def __init__(self, selectors: list[Any]) -> None:
        if not isinstance(selectors, (list, tuple)) or not selectors:
            raise ValueError(f"selectors is {shown(selectors)}. Give a list of at least one selector.")
        self.conditions = [_Condition(each) for each in selectors]
        parts = [part for condition in self.conditions for part in condition.parts]
        self.requires = tuple(dict.fromkeys(name for part in parts for name in part.requires))
        self.needs_groups = any(part.needs_groups for part in parts)
        self.remembers = any(part.remembers for part in parts)
        self.needs_progress = any(condition.selector.needs_progress for condition in self.conditions)
        on_given = [condition.selector for condition in self.conditions if condition.scorer is None]
        self.granularities = [
            each for each in Selector.granularities if all(each in selector.granularities for selector in on_given)
        ]
        if not self.granularities:
            names = ", ".join(registered_name(selector) for selector in on_given)
            raise ValueError(f"No score suits all of {names}. Give some of them a scorer: {{scorer, selector}}.")
        changing = [condition.selector for condition in self.conditions if condition.selector.changes_advantages]
        if len(changing) > 1:
            raise ValueError(
                f"{registered_name(changing[0])} and {registered_name(changing[1])} both change advantages. Give all "
                "but one of them advantages: group."
            )
        if not on_given:
            # Every condition has its own: of the block nothing is asked, and the lengths score every sample.
            self.default_scorer = "response_length"
        self._changing = changing[0] if changing else None
        self.changes_advantages = bool(changing)

    @property
    def part_titles(self) -> list[str]:
        """What the conditions are called in a checkpoint."""
        return distinct([condition.title for condition in self.conditions], self.part_descriptions)

    @property
    def part_descriptions(self) -> list[str]:
        """What the conditions are, with their settings."""
        return [": ".join(described(part) for part in condition.parts) for condition in self.conditions]

    @property
    def of_tokens(self) -> bool:
        """Whether tokens are kept even where the block scores samples."""
        return any(condition.of_tokens for condition in self.conditions)

    @abstractmethod
    def _merged(self, keeps: Tensor, rows: Tensor) -> Tensor:
        """What is kept, from what each condition keeps, (M, N) or (M, N, L), and which samples all can judge, (N,)."""

    def act(self, scores: Tensor, batch: Any, **ctx: Any) -> Any:
        return self.judged(scores, batch, **ctx)[0]

    def judged(self, scores: Tensor, batch: TidyBatch, **ctx: Any) -> tuple[Tensor, Tensor]:
        """What is kept, and (N,) bool which samples every condition can judge."""
        judgements = [condition.judged(scores, batch, **ctx) for condition in self.conditions]
        keeps = [keep for keep, _ in judgements]
        if self.of_tokens or scores.dim() == 2:
            mask = batch.token_mask.to(scores.device)
            keeps = [(keep if keep.dim() == 2 else keep[:, None]) & mask for keep in keeps]
        rows = torch.stack([rows for _, rows in judgements]).all(0)
        return self._merged(torch.stack(keeps), rows), rows

    def kept(self, batch: RolloutBatch, scores: Tensor, rows: Tensor, **ctx: Any) -> Tensor:
        """As `Selector.kept`. Conditions with their own scorer see what the block's cannot score, too."""
        tidy = TidyBatch(batch, batch.has_tokens.to(scores.device))
        if not tidy.num_samples:
            shape = batch.token_mask.shape if self.of_tokens or scores.dim() == 2 else scores.shape
            return torch.zeros(shape, dtype=torch.bool, device=scores.device)
        keep = tidy.placed(self.judged(tidy.of_rows(scores), tidy, **ctx)[0], False)
        return keep & rows if keep.dim() == 1 else keep & rows[:, None] & batch.token_mask.to(keep.device)

    def columns(self, batch: RolloutBatch) -> dict[str, Tensor] | None:
        return joint_columns([part.columns(batch) for condition in self.conditions for part in condition.parts])

    def advantages(self, keep: Tensor, batch: RolloutBatch) -> Tensor | None:
        rows = keep if keep.dim() == 1 else keep.any(-1)
        return None if self._changing is None else self._changing.advantages(rows, batch)

    def state_dict(self) -> dict[str, Any]:
        parts = {name: condition.parts for name, condition in zip(self.part_titles, self.conditions)}
        saved = {name: [memory_of(part) for part in there] for name, there in parts.items()}
        return {name: memories for name, memories in saved.items() if any(each["state"] for each in memories)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        own = dict(zip(self.part_titles, self.conditions))
        for name, memories in matched_parts(self, state, self.state_dict()).items():
            for part, saved in zip(own[name].parts, memories):
                recall(part, saved)


@register_selector("all_of")
class AllOf(_Combined):
    """Keeps what each of several selectors keeps. They act on all samples, one does not see what another drops.

    Args:
        selectors: Selectors, as names, `{name, params}`, `{class_path, init_args}` or objects, that act on the scores
            of the block's scorer; or `{scorer, selector}` with a scorer of its own; or `{selector}` with that of its
            paper.

    Example:
        >>> import torch
        >>> band = {"name": "threshold_band", "params": {"low": 0.2, "high": 0.8}}
        >>> half = {"name": "topk_fraction", "params": {"fraction": 0.5}}
        >>> AllOf([band, half]).act(torch.tensor([0.9, 0.3, 0.5, 0.0]), {})
        [2]
    """

    def _merged(self, keeps: Tensor, rows: Tensor) -> Tensor:
        return keeps.all(0)


@register_selector("any_of")
class AnyOf(_Combined):
    """Keeps what at least one of several selectors keeps.

    Args:
        selectors: As those of `all_of`.

    Example:
        >>> import torch
        >>> easy, hard = ({"name": "threshold_band", "params": {"low": a, "high": a + 0.3}} for a in (0.0, 0.6))
        >>> AnyOf([easy, hard]).act(torch.tensor([0.1, 0.5, 0.7]), {})
        [0, 2]
    """

    def _merged(self, keeps: Tensor, rows: Tensor) -> Tensor:
        return keeps.any(0)


@register_selector("not_")
class Not(_Combined):
    """Keeps what a selector drops, of the samples that have a score.

    Args:
        selector: As one of those of `all_of`.

    Example:
        >>> import torch
        >>> band = {"name": "threshold_band", "params": {"low": 0.2, "high": 0.8}}
        >>> Not(band).act(torch.tensor([0.1, 0.5, torch.nan]), {})
        [0]
    """

    def __init__(self, selector: Any) -> None:
        super().__init__([selector])
        if self.changes_advantages:
            raise ValueError(
                f"{registered_name(self._changing)} gives advantages to what it keeps, and not_ keeps the others. Use "
                "advantages: group."
            )

    def _merged(self, keeps: Tensor, rows: Tensor) -> Tensor:
        return ~keeps[0] & (rows if keeps.dim() == 2 else rows[:, None])
