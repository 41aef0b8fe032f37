"""Scorers by what a batch says of its samples anyway."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from lightning_dataflex.core.global_batch import ONE_MEANING
from lightning_dataflex.core.registry import register_scorer
from lightning_dataflex.core.rollout import RolloutBatch
from lightning_dataflex.core.scorer import Scorer
from lightning_dataflex.functional.choices import check_choice, shown
from lightning_dataflex.functional.tokens import token_mean


@register_scorer("response_length")
class ResponseLength(Scorer):
    """Valid tokens of each response.

    Example:
        >>> import torch
        >>> ResponseLength().score({"response_mask": torch.tensor([[1, 1], [1, 0]])}, step_id=0)
        tensor([2., 1.])
    """

    requires = ("response_mask",)
    signal = "length"
    timing = "post_reward"
    granularity = "response"
    row_wise = True

    def score(self, batch: Any, step_id: int = 0, **ctx: Any) -> Tensor:
        return batch.num_tokens.float()

    def columns(self, batch: RolloutBatch) -> dict[str, Tensor]:
        return {}


@register_scorer("metadata")
class Metadata(Scorer):
    """A column of the batch, (N,) numbers; of (N, L) the mean over a response's valid tokens.

    Args:
        column: Its name.
        granularity: What a number belongs to, a `response`, or a `prompt`: then all samples of one have the same.

    Example:
        >>> import torch
        >>> Metadata("difficulty").score({"difficulty": [3, 1], "response_mask": torch.ones(2, 1)}, step_id=0)
        tensor([3., 1.])
    """

    timing = "post_reward"
    granularity = "response"
    row_wise = True

    def __init__(self, column: str, granularity: Literal["response", "prompt"] = "response", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_choice("granularity", granularity, Literal["response", "prompt"])
        self.granularity = granularity
        if not isinstance(column, str) or not column:
            raise ValueError(f"column is {shown(column)}. Give the name of a field of the batch.")
        self.column = column
        self.requires = (column, "response_mask")

    def score(self, batch: Any, step_id: int = 0, **ctx: Any) -> Tensor:
        return token_mean(batch.tensor(self.column), batch.response_mask)

    def columns(self, batch: RolloutBatch) -> dict[str, Tensor] | None:
        if self.column in ONE_MEANING:
            return None
        return {self.column: token_mean(batch.tensor(self.column), batch.response_mask)}


@register_scorer("staleness")
class Staleness(Scorer):
    """Training steps since the policy that generated a sample.

    The batch says in `rollout_step` at which step of the run, counted in training batches from 0, that policy was the
    current one. What the batch knows as staleness already is a column for `metadata`.

    Example:
        >>> import torch
        >>> Staleness().score({"rollout_step": [3, 5], "response_mask": torch.ones(2, 1)}, step_id=5)
        tensor([2., 0.])
    """

    requires = ("rollout_step", "response_mask")
    signal = "staleness"
    timing = "post_reward"
    granularity = "response"
    row_wise = True

    def score(self, batch: Any, step_id: int = 0, **ctx: Any) -> Tensor:
        return step_id - token_mean(batch.tensor("rollout_step"), batch.response_mask)

    def columns(self, batch: RolloutBatch) -> dict[str, Tensor]:
        return {"rollout_step": token_mean(batch.tensor("rollout_step"), batch.response_mask)}
