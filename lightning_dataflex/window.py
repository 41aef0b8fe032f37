"""Steps in which nothing is kept: they are reported, and move nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_dataflex.core.config import OnEmpty
from lightning_dataflex.core.decision import Decision
from lightning_dataflex.core.warn import NowAndThen, warn_once
from lightning_dataflex.sync import mean_over_ranks


class EmptySteps:
    """Says when a rule keeps nothing.

    Args:
        on_empty: `raise` makes an error of it.
    """

    def __init__(self, on_empty: OnEmpty) -> None:
        self.on_empty = on_empty
        self._warnings = NowAndThen()

    def report(self, step: int, name: str, decision: Decision, settings: dict[str, Any]) -> None:
        """Raise a ValueError, or warn now and then, naming the rule, the scores and the thresholds."""
        scores = decision.scores[~decision.scores.isnan()]
        span = f"{scores.min():.4g} to {scores.max():.4g}" if len(scores) else "none"
        fact = f"Step {step}: {name} keeps no sample. Scores: {span}; settings: {settings}."
        if self.on_empty == "raise":
            raise ValueError(f"{fact} Widen the rule, or use on_empty: skip or keep.")
        outcome = "trains on all samples" if decision.fell_back else "learns nothing from this batch"
        self._warnings.warn(lambda count: f"{fact} The step {outcome}. Such steps so far: {count}.")


class StepWindow:
    """What has gone into an optimiser's gradients since the batch in which it made its last step.

    Under gradient accumulation that is several batches; under manual optimisation several steps may share one.

    Args:
        optimizer: The optimiser.
        sharded: Whether each rank holds a part of every gradient.
    """

    def __init__(self, optimizer: Optimizer, *, sharded: bool = False) -> None:
        self._any_kept = self._any_dropped = self.has_stepped = False
        self._sharded = sharded
        self.detach = optimizer.register_step_pre_hook(self._before_step).remove

    def begin_batch(self) -> None:
        """A new training batch: forget what the last step has used."""
        if self.has_stepped:
            self._any_kept = self._any_dropped = self.has_stepped = False

    def add(self, *, any_kept: bool, any_dropped: bool) -> None:
        """Samples are about to be back-propagated, of which some were kept, and some were dropped."""
        self._any_kept |= any_kept
        self._any_dropped |= any_dropped

    def _before_step(self, optimizer: Optimizer, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Protect the parameters once the gradients are what the optimiser would use.

        The Trainer computes and clips them in a closure that it hands to `step`; with a gradient scaler, before.
        """
        _, *rest = args
        closure = rest[0] if rest else kwargs.get("closure")
        if closure is None:
            self.protect(optimizer)
            return args, kwargs

        def protected() -> Any:
            loss = closure()
            self.protect(optimizer)
            return loss

        return (optimizer, protected), {}

    def protect(self, optimizer: Optimizer) -> None:
        """Take the gradients away if no kept sample is in them.

        With gradients of zero, momentum and weight decay would still move the parameters; without any, the
        optimiser leaves them alone. A minibatch may hold no kept sample although its rollout does: its
        gradients are then zero everywhere.
        """
        self.has_stepped = True
        if not self._any_dropped:
            return
        total = _gradient_size(optimizer)
        size = float(mean_over_ranks(total, what="the size of the gradient") if self._sharded else total)
        if not math.isfinite(size):
            raise ValueError(
                "The gradient is not finite in a step in which samples were dropped. Divide the loss by the number of "
                "valid tokens clamped to at least 1, mask.sum().clamp(min=1): all samples of a batch may be dropped. "
                "If it is not that, look for NaN in what the loss reads, such as old_log_probs."
            )
        if not self._any_kept or size == 0:
            for parameter in _parameters(optimizer):
                parameter.grad = None


def _gradient_size(optimizer: Optimizer) -> Tensor:
    """Sum of |gradient| over what this rank holds of it."""
    gradients = [p.grad for p in _parameters(optimizer) if p.grad is not None]
    local = [g.to_local() if hasattr(g, "to_local") else g for g in gradients]
    dense = [g.coalesce().values() if g.is_sparse else g for g in local]
    # In at least float32, because the sum of many half-precision numbers leaves their range.
    sums = [g.abs().sum(dtype=torch.promote_types(g.dtype, torch.float32)).float() for g in dense]
    return torch.stack([each.to(sums[0].device) for each in sums]).sum() if sums else torch.zeros(())


class WholeGroups:
    """Watches that no group is cut over the batches of one optimiser step, or over minibatches of one batch.

    Each part would be judged by itself. Without the size of a group it is a guess: batches of several groups that
    number them 0, 1, ... anew, or that all have the same groups, are taken for whole.

    Args:
        name: What compares the samples of a group.
        group_size: Samples of a group, where it is known.
        strict: Whether the first step of several batches may be refused; else it is a warning, too.
    """

    def __init__(self, name: str, group_size: int | None, *, strict: bool = True) -> None:
        self.name, self.group_size = name, group_size
        self._first = strict
        self._earlier: list[Tensor] = []
        self._here: list[Tensor] = []
        self._num_compared, self._sizes = 0, dict[int, int]()

    def begin_batch(self, *, new_step: bool) -> None:
        """A new training batch, the first of an optimiser step or one more of it."""
        if new_step:
            self._first = self._first and not self._earlier
            self._earlier = []
        else:
            self._earlier = self._earlier + self._here
        self._here, self._num_compared, self._sizes = [], 0, {}

    def add(self, group_ids: Tensor) -> None:
        """The groups (N,) of a decision in this batch.

        Raises:
            ValueError: In the first step of several batches. Later on it is a warning, because a prompt that was drawn
                a second time looks the same.
        """
        self._here.append(group_ids)
        cut = self._num_cut(group_ids) if self._earlier else 0
        if not cut:
            return
        fact = (
            f"{self.name} compares the samples of a group, but {cut} groups of this batch have samples in an earlier "
            "batch of the same optimiser step (accumulate_grad_batches). Batches must hold whole groups: use a batch "
            "size that is a multiple of the group size, or decide on the whole rollout with a DataFlexPoint. If they "
            "are whole, set num_generations on the module, the size of a group, or give each group an id of its own."
        )
        if self._first:
            raise ValueError(fact)
        warn_once(self, fact)

    def compare(self, decisions: Sequence[Tensor]) -> None:
        """The groups (N,) of each decision in this batch so far: warn once of those that minibatches have cut.

        PPO epochs decide on the same groups again, all of them, and of as many samples.
        """
        for group_ids in decisions[self._num_compared :]:
            distinct, sizes = torch.unique(group_ids, return_counts=True)
            found, earlier = dict(zip(distinct.tolist(), sizes.tolist())), self._sizes
            self._sizes = earlier | found
            again = found.keys() & earlier.keys()
            if self.group_size is not None:
                cut = [group for group in again if found[group] < self.group_size]
            elif earlier.keys() == set(range(len(earlier))) and _counts_from_0(distinct):
                cut = []
            else:
                cut = [group for group in again if len(again) < len(found) or found[group] != earlier[group]]
            if cut:
                warn_once(
                    self,
                    f"{self.name} compares the samples of a group, but {len(cut)} groups of this minibatch have "
                    "samples in an earlier one of the same training batch: each part was judged by itself. Cut "
                    "minibatches between groups, or decide on the whole rollout with a DataFlexPoint.",
                )
        self._num_compared = len(decisions)

    def _num_cut(self, group_ids: Tensor) -> int:
        distinct, sizes = torch.unique(group_ids, return_counts=True)
        earlier = torch.unique(torch.cat(self._earlier))
        again = torch.isin(distinct, earlier)
        if self.group_size is not None:
            return int((again & (sizes < self.group_size)).sum())
        anew = torch.equal(distinct, earlier) or (_counts_from_0(distinct) and _counts_from_0(earlier))
        return 0 if anew and len(earlier) > 1 else int(again.sum())


def _counts_from_0(ids: Tensor) -> bool:
    return torch.equal(ids, torch.arange(len(ids), device=ids.device))


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
