"""Histograms, in the loggers that take them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor


def write_histograms(loggers: Sequence[Any], values: Mapping[str, Tensor], step: int) -> None:
    """Write a histogram of the finite ones of these values to each logger that has a place for one.

    Those are TensorBoard's, and others whose `experiment` has `add_histogram` as its SummaryWriter has, and W&B's. The
    others get none. For the process that logs.

    Args:
        loggers: Of a Trainer.
        values: (N,) each, by name.
        step: As the loggers count them.
    """
    boards: list[Any] = [logger.experiment for logger in loggers if hasattr(logger, "experiment")]
    boards = [board for board in boards if hasattr(board, "add_histogram")]
    wandb_loggers = [each for each in loggers if "WandbLogger" in (cls.__name__ for cls in type(each).__mro__)]
    if not boards and not wandb_loggers:
        return
    found = {name: each.detach().float().cpu().flatten() for name, each in values.items()}
    found = {name: each[each.isfinite()] for name, each in found.items()}
    found = {name: each for name, each in found.items() if len(each)}
    for board in boards:
        for name, each in found.items():
            board.add_histogram(name, each, step)
    for logger in wandb_loggers if found else ():
        import wandb

        logger.log_metrics({name: wandb.Histogram(each.numpy()) for name, each in found.items()}, step)
