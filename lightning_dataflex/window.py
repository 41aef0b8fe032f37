"""What an optimiser step has seen of the decisions, so that one that saw no kept sample moves nothing."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor
from torch.optim import Optimizer

from lightning_dataflex.core.pipeline import Decision
from lightning_dataflex.sync import any_rank


class StepWindow:
    """The decisions since the batch in which the last optimiser step was made.

    Under gradient accumulation that is several batches; under manual optimisation several steps may share one.
    """

    def __init__(self) -> None:
        self._decisions: list[tuple[int, bool]] = []
        self._stepped = False

    def begin_batch(self) -> None:
        """A new training batch: forget what the last optimiser step has used."""
        if self._stepped:
            self._decisions, self._stepped = [], False

    def add(self, decision: Decision) -> None:
        self._decisions.append((decision.num_kept, bool(decision.metrics["kept_frac"] < 1)))

    def protect(self, optimizer: Optimizer) -> None:
        """Before an optimiser step: take away the gradients if no kept sample is in them.

        With gradients of zero, momentum and weight decay would still move the parameters; without any, the
        optimiser leaves them alone. A minibatch may hold no kept sample although its rollout does: its
        gradients are then zero everywhere.
        """
        self._stepped = True
        if not self._decisions:
            return
        none_kept = not any(num_kept for num_kept, _ in self._decisions)
        any_dropped = any(dropped for _, dropped in self._decisions)
        if none_kept or (any_dropped and not _any_gradient(optimizer)):
            for parameter in _parameters(optimizer):
                parameter.grad = None


def _any_gradient(optimizer: Optimizer) -> bool:
    """Whether some gradient is not zero, on some rank: sharded strategies hold a part each."""
    gradients = [p.grad for p in _parameters(optimizer) if p.grad is not None]
    local = [g.to_local() if hasattr(g, "to_local") else g for g in gradients]
    device = local[0].device if local else None
    return any_rank(any(bool(g.any()) for g in local), device)


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
