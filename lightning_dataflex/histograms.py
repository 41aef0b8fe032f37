"""Histograms, in the loggers that take them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor


def write_histograms(loggers: Iterable[Any], values: Mapping[str, Tensor], step: int) -> None:
    """Write a histogram of the finite ones of these values to each logger that has a place for one.

    Those are TensorBoard's, and others whose `experiment` has `add_histogram` as its SummaryWriter has, and W&B's. The
    others get none: they are told the same numbers' means and deviations as metrics. For the process that logs.

    Args:
        loggers: Of a Trainer.
        values: (N,) each, by name.
        step: As the loggers count them.
    """
    found = {name: each.detach().float().cpu().flatten() for name, each in values.items()}
    found = {name: each[each.isfinite()] for name, each in found.items()}
    found = {name: each for name, each in found.items() if len(each)}
    for logger in loggers:
        experiment: Any = getattr(logger, "experiment", None)
        if hasattr(experiment, "add_histogram"):
            for name, each in found.items():
                experiment.add_histogram(name, each, step)
        elif found and "WandbLogger" in (cls.__name__ for cls in type(logger).__mro__):
            import wandb

            logger.log_metrics({name: wandb.Histogram(each.numpy()) for name, each in found.items()}, step)
