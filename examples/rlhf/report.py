"""What a run did: held-out solve rates before and after it, as a table, a CSV, a JSON and a plot."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities import rank_zero_only
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from examples.rlhf.module import RLHFModule
from examples.rlhf.solving import SolveRates

SCHEDULER = "dataflex/"
"""What the names of a data scheduler's metrics start with."""


class Report(Callback):
    """Evaluates before and after training; writes `report.csv`, `report.json` and `report.png` beside the logs.

    Args:
        batch_size: Held-out prompts per evaluation step.
    """

    def __init__(self, batch_size: int = 160) -> None:
        self.batch_size = batch_size
        self.before: dict[str, float] = {}
        self.after: dict[str, float] = {}
        self.curves: dict[str, list[list[float]]] = {}

    def on_train_start(self, trainer: Trainer, pl_module: RLHFModule) -> None:
        # A resumed run has read it from the checkpoint.
        self.before = self.before or held_out_rates(trainer, pl_module, self.batch_size)

    def on_train_batch_start(self, trainer: Trainer, *args: object) -> None:
        # The step before this one: by now every callback has logged what it has to say of it.
        self.record(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: RLHFModule) -> None:
        self.record(trainer)
        self.after = held_out_rates(trainer, pl_module, self.batch_size)
        # Asking for the folder is a collective; what follows is for one rank.
        self.write(Path(trainer.log_dir or trainer.default_root_dir))

    def record(self, trainer: Trainer) -> None:
        for name, value in trainer.callback_metrics.items():
            if name == "solve_rate" or (name.startswith(SCHEDULER) and ("kept_frac" in name or "/prop_" in name)):
                self.curves.setdefault(name, []).append([trainer.global_step, float(value)])

    def state_dict(self) -> dict[str, Any]:
        return {"before": self.before, "curves": self.curves}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.before, self.curves = state_dict["before"], state_dict["curves"]

    @rank_zero_only
    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        rows = [(name, self.before[name], self.after[name]) for name in self.before]
        with (folder / "report.csv").open("w", newline="") as file:
            csv.writer(file).writerows([("domain", "before", "after"), *rows])
        result = {"before": self.before, "after": self.after, "curves": self.curves}
        (folder / "report.json").write_text(json.dumps(result, indent=2))
        plot(self.curves).savefig(folder / "report.png", dpi=120)
        console = Console()
        console.print(table(rows))
        console.print(f"Report and plot: {folder}")


def held_out_rates(trainer: Trainer, module: RLHFModule, batch_size: int) -> dict[str, float]:
    """Solve rate of each domain, and "overall", of greedy responses. A collective: every rank must call it."""
    domains = trainer.datamodule.domains
    module.policy.eval()
    rates = SolveRates(domains, torch.zeros(2, len(domains), device=module.device))
    rows = trainer.datamodule.prompts.held_out[trainer.global_rank :: trainer.world_size]
    with trainer.precision_plugin.val_step_context():
        for start in range(0, len(rows), batch_size):
            rates += module.solve_rates(rows[start : start + batch_size])
    rates = rates.over_ranks(trainer.strategy)
    return {**rates.per_domain, "overall": rates.overall}


def table(rows: list[tuple[str, float, float]]) -> Table:
    """Before and after of each domain; the last row is the total."""
    shown = Table(title="Held-out solve rate", show_footer=False)
    for column in ("domain", "before", "after", "change"):
        shown.add_column(column, justify="left" if column == "domain" else "right")
    for name, before, after in rows:
        shown.add_row(name, f"{before:.3f}", f"{after:.3f}", f"{after - before:+.3f}", end_section=name == rows[-2][0])
    return shown


def plot(curves: Mapping[str, Sequence[Sequence[float]]]) -> Figure:
    """Solve rate and kept fraction of the rollouts over optimiser steps; below, if domains are mixed, their shares."""
    shares = {name.split("/prop_")[1]: points for name, points in curves.items() if "/prop_" in name}
    figure = Figure(figsize=(7, 7 if shares else 4), layout="constrained")
    axes = figure.add_subplot(2 if shares else 1, 1, 1, xlabel="optimiser step", ylabel="fraction", ylim=(0, 1.02))
    for name, points in curves.items():
        if "/prop_" not in name:
            axes.plot(*zip(*points), label=name.removeprefix(SCHEDULER).replace("kept_frac", "kept fraction"))
    axes.grid(alpha=0.3)
    if curves:
        axes.legend()
    if shares:
        below = figure.add_subplot(2, 1, 2, xlabel="optimiser step", ylabel="share of the prompts", ylim=(0, 1))
        steps = [step for step, _ in next(iter(shares.values()))]
        below.stackplot(steps, [[share for _, share in points] for points in shares.values()], labels=shares)
        below.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure
