"""A score of several steps."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from lightning_dataflex.core.checks import check_range, check_whole
from lightning_dataflex.core.global_batch import joint_columns
from lightning_dataflex.core.history import PromptHistory
from lightning_dataflex.core.ids import prompt_ids, stable_ids
from lightning_dataflex.core.registry import register_scorer
from lightning_dataflex.core.rollout import RolloutBatch
from lightning_dataflex.functional.choices import check_choice
from lightning_dataflex.functional.groups import group_mean
from lightning_dataflex.functional.tokens import token_mean
from lightning_dataflex.scorers.combined import Combined

By = Literal["prompt", "domain"]


@register_scorer("ema")
class EMA(Combined):
    """Exponential moving average of a score over the visits of a prompt, or of a domain.

    Every decision on a batch in which it is, is a visit: the average becomes decay * average + (1 - decay) * the mean
    score there; at the first the mean itself. What was visited longest ago is forgotten first.

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

    granularity = "prompt"
    remembers = True

    def __init__(
        self,
        scorer: Any,
        decay: float = 0.9,
        by: By = "prompt",
        max_entries: int = 1_000_000,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._combine([scorer])
        check_range("decay", decay, 0, 1)
        if decay == 1:
            raise ValueError("decay is 1: nothing new would ever count. Give less.")
        check_choice("by", by, By)
        check_whole("max_entries", max_entries, 1)
        self.decay, self.by = decay, by
        self.granularity = "prompt"
        self.requires = tuple(dict.fromkeys((*self.requires, "prompt_id" if by == "prompt" else "domain")))
        self._memory = PromptHistory({"average": torch.nan}, max_entries)

    def score(self, batch: Any, step_id: int = 0, **ctx: Any) -> Tensor:
        values = self._scores(batch, step_id, **ctx)[0]
        values = token_mean(values, batch.token_mask) if values.dim() == 2 else values
        ids, group = torch.unique(self._names(batch).to(values.device), return_inverse=True)
        # An infinite score would stay in the average for good.
        now, ids = group_mean(values, group, len(ids), values.isfinite()).cpu(), ids.cpu()
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
