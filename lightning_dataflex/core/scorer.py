"""Scorer: what turns a signal of the training step into scores."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_dataflex.core.figures import histogram
from lightning_dataflex.core.global_batch import telling_columns
from lightning_dataflex.core.rollout import RolloutBatch
from lightning_dataflex.core.tidy import TidyBatch, fields_screened, scorable
from lightning_dataflex.core.warn import warn_once
from lightning_dataflex.functional.blocks import blank_padding
from lightning_dataflex.packing import joined, packed, unpacked
from lightning_dataflex.sync import wire

Timing = Literal["pre_rollout", "post_reward", "post_advantage", "in_loss"]
Granularity = Literal["domain", "prompt", "response", "token"]

METRIC_OPTIONS: dict[str, Any] = {
    "compute_on_cpu": bool,
    "compute_with_cache": bool,
    "dist_sync_fn": Callable,
    "dist_sync_on_step": bool,
    "distributed_available_fn": Callable,
    "process_group": Any,
    "sync_on_compute": bool,
}
"""What every torchmetrics Metric takes, with its type."""


class Scorer(Metric):
    """A signal's score of every sample or token.

    Subclasses write `score` and the class attributes; `score` may be plain single-process code, because what
    it reads holds no padding and no sample that cannot be scored (see `TidyBatch`). As a torchmetrics Metric,
    `update` collects samples and `compute` scores all of them together, those of the other ranks included.

    Example:
        >>> class Length(Scorer):
        ...     requires = ["response_mask"]
        ...     granularity = "response"
        ...     def score(self, batch, step_id=0, **ctx):
        ...         return batch["response_mask"].sum(-1).float()
        >>> Length().score({"response_mask": torch.tensor([[1, 1], [1, 0], [0, 0]])}, step_id=0)
        tensor([2., 1., nan])
    """

    full_state_update = False

    requires: Sequence[str] = ()
    """Batch fields that `score` reads."""
    timing: str = "post_reward"
    """When in a step the signal exists: pre_rollout, post_reward, post_advantage or in_loss."""
    granularity: str = "prompt"
    """What one score belongs to: a domain, a prompt, a response or a token."""
    needs_groups: bool = False
    """Whether the score compares the samples of one prompt."""
    row_wise: bool = False
    """Whether the score of a sample depends on that sample alone, and on nothing that the scorer remembers.

    With an actuator that is row-wise too, every rank decides on its own samples, and a few numbers of each travel.
    """
    by_mask: bool = False
    """Whether tables of tokens are read with the mask alone, so that a sample without a valid token changes nothing.

    On an accelerator the samples that do not count are then given as such ones, and the host waits for nothing.
    """
    screened: Sequence[str] | None = None
    """The fields in which a NaN leaves a sample without a score; None for `requires`."""
    remembers: bool = False
    """Whether a score follows from earlier batches too: ranks must then see the same ones."""
    signal: ClassVar[str] = ""
    """What it measures, for rules that need a score of a kind: reward, advantage, variance, probability, ratio, ..."""
    paper: ClassVar[str] = ""
    """Where the signal was published."""
    screens: ClassVar[bool] = False
    """Of a timing of pre_rollout: whether it scores a prompt's first few responses, and not the prompt."""
    pool: float = 1.0
    """Of a timing of pre_rollout: candidates to score for each prompt that is rolled out."""

    rows: list[Tensor]
    step_id: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("rows", default=[], dist_reduce_fx="cat", persistent=False)
        self.add_state("step_id", default=torch.tensor(0), dist_reduce_fx="max", persistent=False)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, allowed in (("timing", get_args(Timing)), ("granularity", get_args(Granularity))):
            if getattr(cls, name) not in allowed:
                raise ValueError(f"{cls.__name__}.{name} is {getattr(cls, name)!r}. Use one of {', '.join(allowed)}.")
        if isinstance(cls.requires, str):
            raise ValueError(f"{cls.__name__}.requires is {cls.requires!r}. Give a list of names.")
        if "score" in vars(cls):
            # Those of a base belong to the base's own score.
            if "columns" not in vars(cls):
                cls.columns = Scorer.columns  # type: ignore[method-assign]
            for name in ("row_wise", "by_mask"):
                if name not in vars(cls):
                    setattr(cls, name, False)
            cls.score = _on_scorable_rows(cls.score)  # type: ignore[method-assign]

    def add_state(self, name: str, default: Any, dist_reduce_fx: Any = None, persistent: bool = True) -> None:
        """As `Metric.add_state`, but saved in the checkpoint unless said otherwise."""
        super().add_state(name, default, dist_reduce_fx, persistent)

    @property
    def recipe(self) -> str:
        """What the scorer is, with its settings."""
        simple = {k: v for k, v in sorted(vars(self).items()) if k[0] != "_" and isinstance(v, (str, int, float))}
        return f"{type(self).__qualname__}{simple}"

    @abstractmethod
    def score(self, batch: Any, step_id: int = 0, **ctx: Any) -> Tensor:
        """Scores of a rollout batch: (N,), or (N, L) for token scores; NaN where there is nothing to score.

        `ctx` has `remember=False` where a scorer is asked as a metric, and what it remembers is to stay as it is.
        """

    def default_selector(self) -> Any:
        """Of a timing of pre_rollout: the Selector of its paper, for a block that names none; None if it has none."""
        return None

    def columns(self, batch: RolloutBatch) -> dict[str, Tensor] | None:
        """Numbers (N,) that say as much to `score` as this rank's batch does, under the names of fields.

        They travel to the other ranks in place of the fields that the scorer requires. None where there are none. On
        one process the ids of groups are numbers from 0 in each batch, except for what `remembers`.
        """
        return None

    def update(self, batch: Any, step_id: int = 0) -> None:
        """Collect what the scorer has to know of the samples of a batch."""
        batch = RolloutBatch.of(batch)
        batch.require(("response_mask", *self.requires) if self.columns(batch) is None else self.requires)
        # Scorers of other settings collect other numbers: a MetricCollection must not take one's for another's.
        rows = packed(telling_columns(batch, [self]), batch.num_samples, source=self.recipe)
        self.rows.append(rows.to(self.device))
        self.step_id.fill_(step_id)

    def compute(self) -> Tensor:
        """The scores of all collected samples of all ranks together, a group's samples wherever they came from."""
        rows = self.rows if isinstance(self.rows, list) else [self.rows]
        blocks = [block for each in rows for block in unpacked(each)]
        if not sum(block.num_rows for block in blocks):
            return torch.empty(0, device=self.device)
        # A rule of plain code may take no context.
        context = {"remember": False} if self.remembers else {}
        return self.score(RolloutBatch(joined(blocks)), int(self.step_id), **context)

    def plot(self, val: Any = None, ax: Any = None) -> tuple[Any, Any]:
        """A histogram of scores: the figure and its axes, as the `plot` of other Metrics.

        Args:
            val: What `compute` or `score` gave, or several of it. Default: `compute()`.
            ax: Axes to draw on. Default: new ones.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.

        Example:
            >>> from lightning_dataflex import build
            >>> figure, axes = build("scorer", "outcome").plot(torch.tensor([0.0, 1.0, 1.0]))
            >>> [int(bar.get_height()) for bar in axes.patches if bar.get_height()]
            [1, 2]
        """
        return histogram(self.compute() if val is None else val, ax, label=f"score of {type(self).__name__}")

    def set_dtype(self, dst_type: str | torch.dtype) -> Scorer:
        """As `Metric.set_dtype`; what is collected stays exact."""
        rows = self.rows
        super().set_dtype(dst_type)
        self.rows = rows
        return self

    @contextmanager
    def sync_context(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        """As `Metric.sync_context`; where the samples are gathered already, one rank may compute alone."""
        if self._is_synced:
            yield
            return
        with super().sync_context(*args, **kwargs):
            yield

    def unsync(self, should_unsync: bool = True) -> None:
        """As `Metric.unsync`; the next value is computed anew, on every rank."""
        super().unsync(should_unsync)
        self._computed = None

    def _sync_dist(self, dist_sync_fn: Callable[..., Any] = gather_all_tensors, process_group: Any = None) -> None:
        if not self.rows:
            # Every rank gathers the same type of tensor, one that has seen nothing included.
            self.rows = [packed({}, 0).to(self.device)]

        def gathered(state: Tensor, group: Any = None) -> list[Tensor]:
            # NCCL takes nothing from main memory, where a metric may keep its states.
            return [each.to(state.device) for each in dist_sync_fn(state.to(wire(state.device, group)), group=group)]

        super()._sync_dist(gathered, process_group=process_group)


def _on_scorable_rows(score: Callable[..., Any]) -> Callable[..., Tensor]:
    @functools.wraps(score)
    def on_scorable_rows(self: Scorer, batch: Any, step_id: int = 0, **ctx: Any) -> Tensor:
        if isinstance(batch, TidyBatch):  # a subclass that calls its base
            return score(self, batch, step_id, **ctx)
        return scores_on(self, RolloutBatch.of(batch), step_id, **ctx)

    return on_scorable_rows


def scores_on(scorer: Scorer, batch: RolloutBatch, step_id: int, **ctx: Any) -> Tensor:
    """The scores of all rows of a batch, NaN of those that cannot be scored."""
    rows = scorable(batch, fields_screened(scorer))
    tidy = TidyBatch(batch, rows, by_mask=scorer.by_mask)
    if scorer.needs_groups and "uid" in batch and _all_alone(tidy):
        warn_once(
            scorer,
            f"{type(scorer).__name__} compares the samples of a group, but each of the {tidy.num_samples} samples "
            "is alone in its group. Give the samples of one prompt the same uid.",
        )
    if not tidy.num_samples:
        shape = batch.token_mask.shape if scorer.granularity == "token" else (len(rows),)
        return torch.full(shape, torch.nan, device=rows.device)
    return tidy.placed(checked_scores(scorer, scorer.score(tidy, step_id, **ctx), tidy), torch.nan)


def checked_scores(scorer: Scorer, given: Any, batch: TidyBatch) -> Tensor:
    """What an author's `score` gave as scores: of the shape of its granularity, 0 in padding, without gradient."""
    name, granularity = type(scorer).__name__, scorer.granularity
    scores = torch.as_tensor(given).detach()
    if scores.dim() == 0 or len(scores) != batch.num_samples:
        raise ValueError(
            f"{name}.score returned shape {tuple(scores.shape)} for {batch.num_samples} samples. "
            "Return one per row of the batch it was given."
        )
    if granularity != "token" and scores.dim() == 2 and scores.shape[1] == 1:
        scores = scores[:, 0]
    if scores.dim() != (2 if granularity == "token" else 1):
        shape = "(N, L)" if granularity == "token" else "(N,)"
        raise ValueError(
            f"{name}.score returned shape {tuple(scores.shape)}, but scores of a {granularity} "
            f"are {shape}. Return those, or declare another granularity."
        )
    if scores.dim() == 2 and batch.response_mask is not None:
        scores = blank_padding(scores, batch.response_mask)
    return scores if scores.dtype == torch.float64 else scores.float()


def _all_alone(batch: RolloutBatch) -> bool:
    return batch.num_samples > 1 and batch.groups[1] == batch.num_samples
