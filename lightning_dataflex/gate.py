"""Gate: which prompts are worth a rollout, and what the rollouts that took place have shown of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lightning_dataflex.core.actuator import Selector
from lightning_dataflex.core.history import Visits
from lightning_dataflex.core.ids import prompt_ids
from lightning_dataflex.core.prompt_scorer import PromptScorer
from lightning_dataflex.core.registry import registered_name
from lightning_dataflex.core.rollout import RolloutBatch, by_prompt
from lightning_dataflex.core.scorer import Scorer
from lightning_dataflex.prompts import PromptQueue
from lightning_dataflex.sync import Group, exchanged


class Gate:
    """A scorer of prompts and a selector. Every rank judges the same prompts, and comes to the same end.

    Args:
        scorer: One whose timing is pre_rollout.
        selector: What acts on its scores.
        fields: The names that prompts and rollout batches have for this project's fields.
        warmup_step: The first step for which prompts are judged; until then every prompt passes.
        enforce: False judges and counts, and lets every prompt pass.
    """

    process_group: Group = None
    """The ranks that hold different prompts; None for all."""

    def __init__(
        self, scorer: Scorer, selector: Any, fields: Mapping[str, str], *, warmup_step: int = 0, enforce: bool = True
    ) -> None:
        assert isinstance(selector, Selector)
        self.scorer, self.selector, self.fields = scorer, selector, dict(fields)
        self.warmup_step, self.enforce = warmup_step, enforce
        self.judged = [0, 0]
        """Prompts that passed, and that were skipped, for the rollouts of this step; of all ranks."""
        self._in_force: dict[str, float] = {}
        self._ids: list[torch.Tensor] = []
        self._outcomes: list[torch.Tensor] = []

    def pool(self, step_id: int) -> float:
        """Candidates to look at for each prompt that is rolled out in a step."""
        return self.scorer.pool if self.enforce and step_id >= self.warmup_step else 1.0

    @torch.no_grad()
    def passing(self, prompts: Sequence[Any], queue: PromptQueue, num: int, step_id: int) -> list[bool]:
        """Which of these prompts are to be rolled out, of which `num` are wanted."""
        if step_id < self.warmup_step or not prompts:
            return [True] * len(prompts)
        names = dict.fromkeys((*self.scorer.requires, *self.selector.requires))
        batch = queue.columns(prompts, list(names), self.fields)
        scores = self.scorer.score(batch, step_id)
        return self.selector.keep(scores, batch, num=num, step_id=step_id).tolist()

    def begin_step(self) -> None:
        """A step is about to be trained on."""
        self._in_force = dict(self.scorer.settings) if isinstance(self.scorer, PromptScorer) else {}

    @torch.no_grad()
    def see(self, batch: RolloutBatch, prompts: Sequence[Any], queue: PromptQueue) -> None:
        """Rollouts of these prompts on this rank. A collective."""
        if not isinstance(self.scorer, PromptScorer):
            return
        rollout = by_prompt(RolloutBatch(batch.source, self.fields))

        def own() -> tuple[dict[str, torch.Tensor], int]:
            rollout.require(("rm_scores", "prompt_id"))
            ids = prompt_ids(rollout)
            check_given(rollout, queue.columns(prompts, ["prompt_id"], self.fields))
            return {"id": ids, "outcome": rollout.outcomes.double()}, rollout.num_samples

        columns, _ = exchanged(own, self.process_group, f"outcomes for {registered_name(self.scorer)}")
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
        return {"passed": float(self.judged[0]), "skipped": float(self.judged[1]), **self._in_force}


def check_given(rollout: RolloutBatch, prompts: RolloutBatch) -> None:
    """Raise a ValueError if a rollout batch has a sample of a prompt that was not given to it."""
    if not torch.isin(prompt_ids(rollout).cpu(), prompt_ids(prompts)).all():
        raise ValueError(
            "The rollout batch has samples of prompts that were not given to it: its prompt_id (or uid) "
            f"{list(rollout['prompt_id'])[:3]} is none of theirs, {list(prompts['prompt_id'])[:3]}. Hand each prompt's "
            "id on in a field prompt_id, or nothing can be said of the prompt."
        )
