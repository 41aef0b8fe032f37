"""Gate: which prompts are worth a rollout, and what the rollouts that took place have shown of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lightning_dataflex.core.actuator import Selector
from lightning_dataflex.core.history import Visits
from lightning_dataflex.core.ids import prompt_ids
from lightning_dataflex.core.prompt_scorer import PromptScorer
from lightning_dataflex.core.rollout import RolloutBatch
from lightning_dataflex.core.scorer import Scorer
from lightning_dataflex.prompts import PromptQueue
from lightning_dataflex.sync import Group, exchanged


class Gate:
    """A scorer of prompts and a selector. Every rank judges the same prompts, and comes to the same end.

    Args:
        scorer: One whose timing is pre_rollout.
        selector: What acts on its scores.
        fields: The names that prompts and rollout batches have for this project's fields.
        is_due: Whether it is time to act; until then every prompt passes.
    """

    process_group: Group = None
    """The ranks that hold different prompts; None for all."""

    def __init__(
        self, scorer: Scorer, selector: Any, fields: Mapping[str, str], is_due: Callable[[], bool] = lambda: True
    ) -> None:
        assert isinstance(selector, Selector)
        self.scorer, self.selector, self.fields, self.is_due = scorer, selector, dict(fields), is_due
        self.num_passed = self.num_skipped = 0
        self._in_force: dict[str, float] = {}
        self._ids: list[torch.Tensor] = []
        self._outcomes: list[torch.Tensor] = []

    @property
    def pool(self) -> float:
        """Candidates to look at for each prompt that is rolled out."""
        return getattr(self.scorer, "pool", 1.0) if self.is_due() else 1.0

    @torch.no_grad()
    def passing(self, prompts: Sequence[Any], queue: PromptQueue, num: int, step_id: int) -> list[bool]:
        """Which of these prompts are to be rolled out, of which `num` are wanted."""
        if not self.is_due() or not prompts:
            self.num_passed += len(prompts)
            return [True] * len(prompts)
        names = dict.fromkeys((*self.scorer.requires, *self.selector.requires))
        batch = queue.columns(prompts, list(names), self.fields)
        scores = self.scorer.score(batch, step_id)
        keep = self.selector.keep(scores, batch, num=num, step_id=step_id).tolist()
        self.num_passed += sum(keep)
        self.num_skipped += len(keep) - sum(keep)
        return keep

    def begin_step(self) -> None:
        """Nothing was judged yet."""
        self.num_passed = self.num_skipped = 0
        self._in_force = dict(self.scorer.settings) if isinstance(self.scorer, PromptScorer) else {}

    @torch.no_grad()
    def see(self, batch: Any) -> None:
        """Rollouts of this rank. A collective."""
        rollout = RolloutBatch.of(batch, self.fields)

        def own() -> tuple[dict[str, torch.Tensor], int]:
            rollout.require(("rm_scores", "prompt_id"))
            return {"id": prompt_ids(rollout), "outcome": rollout.outcomes.double()}, rollout.num_samples

        columns, _ = exchanged(own, self.process_group)
        self._ids.append(columns["id"].cpu())
        self._outcomes.append(columns["outcome"].cpu())

    def end_step(self, step_id: int) -> None:
        """Let the scorer remember what the step has shown."""
        if self._ids and isinstance(self.scorer, PromptScorer):
            visits = Visits.of(torch.cat(self._ids), torch.cat(self._outcomes), self.scorer.success_threshold)
            self.scorer.observe(visits, step_id)
        self._ids, self._outcomes = [], []

    @property
    def metrics(self) -> dict[str, float]:
        """Numbers to log: prompts that passed and were skipped in this step, and by which settings of the scorer."""
        return {"passed": float(self.num_passed), "skipped": float(self.num_skipped), **self._in_force}
