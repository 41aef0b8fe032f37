"""PromptScorer: what scores prompts before their rollout, from what earlier ones have shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from lightning_dataflex.core.checks import check_finite
from lightning_dataflex.core.history import PromptHistory, Visits
from lightning_dataflex.core.ids import prompt_ids
from lightning_dataflex.core.scorer import Scorer


class PromptScorer(Scorer):
    """A score of each prompt that may be rolled out next.

    `score` reads the prompts as the data loader gives them, their `prompt_id` and the columns that `requires` names,
    and returns (N,). `observe` is told at the end of each step what the responses of all ranks were worth, and puts
    into `self.history` what `columns_remembered` names. It is saved, and the same on every rank.

    Args:
        success_threshold: A response is solved when its reward is above this.
        max_prompts: How many prompts are remembered; those visited longest ago are forgotten first.

    Example:
        >>> import torch
        >>> class LastReward(PromptScorer):
        ...     columns_remembered = {"reward": 0.5}
        ...     def score(self, batch, step_id=0, **ctx):
        ...         return self.remembered(batch)["reward"]
        ...     def observe(self, visits, step_id=0):
        ...         self.history.put(visits.ids, {"reward": visits.rewards}, step_id)
        >>> scorer = LastReward()
        >>> scorer.observe(Visits.of(torch.tensor([7, 7]), torch.tensor([1.0, 0.5])))
        >>> scorer.score({"prompt_id": [7, 8]})
        tensor([0.7500, 0.5000], dtype=torch.float64)
    """

    timing = "pre_rollout"
    granularity = "prompt"
    requires: Sequence[str] = ("prompt_id",)
    columns_remembered: ClassVar[dict[str, float]] = {}
    """What is remembered of a prompt, and what stands for one that was never seen."""

    def __init__(self, success_threshold: float = 0.5, max_prompts: int = 1_000_000, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_finite("success_threshold", success_threshold)
        self.success_threshold = success_threshold
        self.history = PromptHistory(self.columns_remembered, max_prompts)

    def observe(self, visits: Visits, step_id: int = 0) -> None:
        """Remember a step's visits."""

    @property
    def settings(self) -> dict[str, float]:
        """Numbers to log."""
        return {}

    def remembered(self, batch: Any) -> dict[str, Tensor]:
        """What is remembered of these prompts, (N,) each; float64, as all that is computed of it."""
        found = self.history.look_up(prompt_ids(batch))
        return {name: values.double() for name, values in found.items()}

    def get_extra_state(self) -> dict[str, Any]:
        """The memory, as a part of the scorer's state."""
        return {"history": self.history.state_dict()}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Take back what `get_extra_state` gave."""
        self.history.load_state_dict(state["history"])
