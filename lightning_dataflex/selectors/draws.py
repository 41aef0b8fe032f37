"""Selectors by chance: seeded, and the same on every rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_dataflex.core.actuator import Selector
from lightning_dataflex.core.checks import check_finite, check_range, check_whole
from lightning_dataflex.core.ids import prompt_ids
from lightning_dataflex.core.registry import register_selector
from lightning_dataflex.core.rollout import RolloutBatch
from lightning_dataflex.functional import drawing, selection, visits
from lightning_dataflex.functional.groups import group_mean


class _Drawing(Selector):
    """Draws by a seed."""

    def __init__(self, seed: int = 0) -> None:
        check_whole("seed", seed, 0)
        self.seed = seed


@register_selector("bernoulli")
class Bernoulli(_Drawing):
    """Keeps each group with the probability that is its score, all of its samples or none.

    The draw follows from the seed, the step and the prompt's id alone: one for all groups of a prompt.

    Args:
        seed: Of the draws.

    Example:
        >>> import torch
        >>> Bernoulli().act(torch.tensor([1.0, 0.0, 1.0]), {"uid": [7, 8, 9]})
        [0, 2]
    """

    requires = ("prompt_id",)
    granularities = ("prompt",)
    row_wise = True
    paper = "GRESO, arXiv:2506.02177"

    def act(self, scores: Tensor, batch: Any, **ctx: Any) -> Any:
        drawn = visits.uniform(prompt_ids(batch), self.seed, ctx.get("step_id", 0))
        return drawn.to(scores.device) < scores

    def columns(self, batch: RolloutBatch) -> dict[str, Tensor]:
        return {"prompt_id": prompt_ids(batch)}


@register_selector("dots")
class DOTS(_Drawing):
    """Draws prompts in proportion to exp(-|score - target| / temperature), without replacement.

    All samples of a prompt are kept, or none. The draw follows from the seed, the step and the prompts' ids alone. The
    paper draws before the rollout, by pass rates that a model of its own predicts: any other estimate will do.

    Args:
        target: The pass rate to be near to.
        temperature: > 0; with 0.001 as in the paper nearly the nearest ones.
        fraction: In (0, 1], of the prompts. Before a rollout it is not read: the step says how many it needs.
        seed: Of the draws.

    Example:
        >>> import torch
        >>> DOTS(fraction=0.5).act(torch.tensor([0.9, 0.5, 0.0, 0.4]), {"uid": [6, 7, 8, 9]})
        [1, 3]
    """

    requires = ("prompt_id",)
    granularities = ("prompt",)
    default_scorer = "group_solve_rate"
    paper = "DOTS, arXiv:2506.05316"

    def __init__(self, target: float = 0.5, temperature: float = 1e-3, fraction: float = 0.5, seed: int = 0) -> None:
        super().__init__(seed)
        check_finite("target", target)
        check_range("temperature", temperature, 0, float("inf"), open_low=True)
        check_range("fraction", fraction, 0, 1, open_low=True)
        self.target, self.temperature, self.fraction = target, temperature, fraction

    def act(self, scores: Tensor, batch: Any, **ctx: Any) -> Any:
        ids, group = torch.unique(prompt_ids(batch).to(scores.device), return_inverse=True)
        # Of a prompt that was drawn twice the mean.
        rates = group_mean(scores, group, len(ids), ~scores.isnan())
        num = ctx.get("num")
        num = int(selection.share(torch.tensor(len(ids)), self.fraction)) if num is None else num
        chances = drawing.log_nearness(rates, self.target, self.temperature)
        return drawing.drawn(chances, num, ids, self.seed, ctx.get("step_id", 0))[group]

    def columns(self, batch: RolloutBatch) -> dict[str, Tensor]:
        return {"prompt_id": prompt_ids(batch)}


@register_selector("selective_backprop")
class SelectiveBackprop(_Drawing):
    """Draws int(keep * N) samples without replacement, in proportion to ((r + 1/2) / N)^(1 / keep - 1).

    r is the rank of the score, the sample's loss in the paper, from the smallest; by default that is how improbable
    the policy found the response. In a batch in which it does not act, all samples are kept.

    Args:
        keep: In (0, 1], the share that is kept; at least one sample. 1 keeps all.
        start: Share of the run from which it acts.
        end: Share of the run from which it acts no more.
        interrupt: Every so many batches none is dropped; 0 for never.
        total_steps: The length of the run, where the Trainer has no max_steps and no max_epochs.
        seed: Of the draws.

    Example:
        >>> import torch
        >>> SelectiveBackprop(keep=0.5, seed=1).act(torch.tensor([0.1, 5.0, 0.2, 4.0]), {}, step_id=0, progress=0.5)
        [1, 3]
    """

    granularities = ("response",)
    default_scorer = {
        "name": "weighted_sum",
        "params": {"scorers": [{"name": "sequence_logprob", "params": {"level": "mean"}}], "weights": [-1.0]},
    }
    paper = "Selective backpropagation, arXiv:1910.00762"

    def __init__(
        self,
        keep: float = 0.5,
        start: float = 0.5,
        end: float = 0.9,
        interrupt: int = 2,
        total_steps: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(seed)
        check_range("keep", keep, 0, 1, open_low=True)
        check_range("start", start, 0, 1)
        check_range("end", end, start, 1)
        check_whole("interrupt", interrupt, 0)
        if total_steps is not None:
            check_whole("total_steps", total_steps, 1)
        self.keep_fraction, self.start, self.end = keep, start, end
        self.interrupt, self.total_steps = interrupt, total_steps
        self.needs_progress = total_steps is None and (start > 0 or end < 1)

    def act(self, scores: Tensor, batch: Any, **ctx: Any) -> Any:
        step, progress = ctx.get("step_id", 0), ctx.get("progress")
        if self.total_steps is not None:
            progress = step / self.total_steps
        if progress is None and self.needs_progress:
            raise ValueError(
                "selective_backprop acts in a part of the run, and nobody says how long that is. Give progress, or "
                "total_steps, or start 0 and end 1."
            )
        # At the very end of a run that it acts in to the end, it still acts.
        acts = drawing.in_schedule(min(progress or 0.0, 1 - 1e-9), step, self.start, self.end, self.interrupt)
        num = len(scores)
        if not acts or self.keep_fraction == 1:
            return torch.ones(num, dtype=torch.bool)
        chances = drawing.rank_power(num, self.keep_fraction).log()
        drawn = drawing.drawn(chances, max(1, int(self.keep_fraction * num)), torch.arange(num), self.seed, step)
        # The draw is of ranks, whatever order the samples have.
        keep = torch.zeros(num, dtype=torch.bool, device=scores.device)
        keep[torch.argsort(scores, stable=True)[drawn.to(scores.device)]] = True
        return keep
