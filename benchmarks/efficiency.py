"""What selection saves: held-out solve rate against generated tokens, trained tokens and seconds, on the example task.

    python benchmarks/efficiency.py --seeds 0 1 2 3 4 --workers 2

Trains the example by plain GRPO and by rules that save rollouts, or forward and backward passes, each with the same
seeds, and writes the curves (`efficiency.json`), a plot (`efficiency.png`) and a table (`efficiency.md`) to `--out`.
A run has one thread, and its seconds are those that it computed: its wall-clock on a core of its own, whoever else is
busy; `wall` in the curves is the clock's. `--workers` runs go on at the same time. One takes about two minutes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from examples.rlhf import PromptDataModule, RLHFModule  # noqa: E402
from examples.rlhf.report import held_out_rates  # noqa: E402
from lightning_dataflex import DataFlexCallback  # noqa: E402

PROMPTS, STEPS, EVERY = 32, 124, 4
DAPO = {"mechanism": "select", "scorer": "group_solve_rate", "actuator": "threshold_band", "drop": "rows"}
REFILL = {"refill": {"groups": PROMPTS}}
PODS = {
    "mechanism": "select",
    "scorer": "reward_difficulty",
    "actuator": {"name": "max_variance", "params": {"keep_fraction": 0.5}},
    "drop": "rows",
}
GRESO = {"mechanism": "select", "scorer": "greso"}
MOPPS = {"mechanism": "select", "scorer": "mopps"}
SPEED = {"mechanism": "select", "scorer": {"name": "speed", "params": {"num_screening": 4}}, "drop": "rows", **REFILL}

METHODS: dict[str, list[dict[str, Any]]] = {
    "baseline": [],
    "dapo refill": [DAPO | REFILL],
    "pods rows": [PODS],
    "greso + refill": [GRESO, DAPO | REFILL],
    "mopps": [MOPPS],
    "mopps + pods rows": [MOPPS, PODS],
    "speed": [SPEED],
}
DEFAULT = [method for method in METHODS if method != "speed"]

COSTS = {"generated": "generated tokens", "trained": "trained tokens", "seconds": "seconds of one core"}


class Curve(Callback):
    """Held-out solve rate every few steps, with what it has cost until then; the evaluation itself is no cost."""

    def __init__(self) -> None:
        self.points: list[dict[str, float]] = []

    def on_train_start(self, trainer: Trainer, pl_module: RLHFModule) -> None:
        self.start, self.wall = time.process_time(), time.perf_counter()
        self.measure(trainer, pl_module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: RLHFModule, *args: Any) -> None:
        if trainer.global_step % EVERY == 0:
            self.measure(trainer, pl_module)

    def measure(self, trainer: Trainer, module: RLHFModule) -> None:
        now, wall = time.process_time(), time.perf_counter()
        rate = held_out_rates(trainer, module, 160)["overall"]
        costs = vars(module.num_tokens) | {"seconds": now - self.start, "wall": wall - self.wall}
        self.points.append({"step": trainer.global_step, "rate": rate, **costs})
        self.start += time.process_time() - now
        self.wall += time.perf_counter() - wall


def one_run(method: str, seed: int) -> list[dict[str, float]]:
    seed_everything(seed)
    curve = Curve()
    callbacks = [DataFlexCallback(**block, label=f"{i}") for i, block in enumerate(METHODS[method])]
    trainer = Trainer(
        accelerator="cpu", devices=1, max_epochs=-1, max_steps=STEPS, num_sanity_val_steps=0, limit_val_batches=0,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[*callbacks, curve],
    )  # fmt: skip
    trainer.fit(RLHFModule(num_threads=1), datamodule=PromptDataModule(batch_size=PROMPTS))
    return curve.points


def all_runs(methods: list[str], seeds: list[int], workers: int, folder: Path) -> dict[str, list[Any]]:
    """The curve of each method and seed. Runs that the folder has already are not made again: empty it for new code."""

    def runs_of(seed: int) -> None:
        for method in methods:
            file = folder / f"{method.replace(' ', '_')}-{seed}.json"
            if file.exists():
                continue
            command = [sys.executable, __file__, "--one", method, str(seed), str(file)]
            start = time.perf_counter()
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(done.stdout + done.stderr)
            final = json.loads(file.read_text())[-1]
            print(f"seed {seed} {method}: {final} in {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)

    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(runs_of, seeds))
    names = {method: [folder / f"{method.replace(' ', '_')}-{seed}.json" for seed in seeds] for method in methods}
    return {method: [json.loads(file.read_text()) for file in files] for method, files in names.items()}


def smoothed(points: list[dict[str, float]], width: int = 3) -> np.ndarray:
    """Solve rates, each the mean of the last few: one evaluation is of 320 prompts."""
    rates = np.array([point["rate"] for point in points])
    return np.array([rates[max(0, i + 1 - width) : i + 1].mean() for i in range(len(rates))])


def cost_to_reach(points: list[dict[str, float]], target: float, cost: str) -> float:
    """The cost at which the smoothed solve rate first is the target; NaN where it never is."""
    rates, costs = smoothed(points), [point[cost] for point in points]
    reached = np.flatnonzero(rates >= target)
    if not len(reached):
        return float("nan")
    i = int(reached[0])
    if i == 0:
        return costs[0]
    share = (target - rates[i - 1]) / (rates[i] - rates[i - 1])
    return costs[i - 1] + share * (costs[i] - costs[i - 1])


def interval(values: list[float]) -> str:
    """Mean and half the width of its 95 % confidence interval over seeds."""
    sample = np.array(values)
    if np.isnan(sample).any():
        return f"reached by {np.isfinite(sample).sum()} of {len(sample)}"
    return f"{sample.mean():.3f}" + (f" ± {half_width(sample):.3f}" if len(sample) > 1 else "")


def half_width(sample: np.ndarray) -> np.ndarray:
    """Half the 95 % confidence interval of a mean over the first dimension, by Student's t."""
    quantiles = [12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26]
    quantile = quantiles[len(sample) - 2] if len(sample) < 11 else 2.23
    return quantile * sample.std(0, ddof=1) / len(sample) ** 0.5


def table(curves: dict[str, list[Any]]) -> str:
    """Of each method the final solve rate, and its costs as shares of the baseline's, seed by seed."""
    base = curves["baseline"]
    targets = [smoothed(points)[-1] for points in base]
    lines = [
        "| method | final solve rate | generated | trained | seconds | generated to reach | trained to reach | "
        "seconds to reach |",
        "|" + "---|" * 8,
    ]
    for method, runs in curves.items():
        cells = [interval([float(smoothed(points)[-1]) for points in runs])]
        for cost in COSTS:
            cells.append(interval([points[-1][cost] / ref[-1][cost] for points, ref in zip(runs, base)]))
        for cost in COSTS:
            ratios = [
                cost_to_reach(points, target, cost) / cost_to_reach(ref, target, cost)
                for points, ref, target in zip(runs, base, targets)
            ]
            cells.append(interval(ratios))
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(curves: dict[str, list[Any]]) -> Figure:
    """Solve rate against each cost: mean over seeds, and its 95 % confidence band."""
    figure = Figure(figsize=(15, 5), layout="constrained")
    axes = figure.subplots(1, 3, sharey=True)
    for ax, (cost, title) in zip(axes, COSTS.items()):
        for method, runs in curves.items():
            grid = np.linspace(0, min(points[-1][cost] for points in runs), 60)
            rates = np.stack([np.interp(grid, [p[cost] for p in points], smoothed(points)) for points in runs])
            half = half_width(rates) if len(runs) > 1 else 0 * rates[0]
            (line,) = ax.plot(grid, rates.mean(0), label=method)
            ax.fill_between(grid, rates.mean(0) - half, rates.mean(0) + half, color=line.get_color(), alpha=0.12)
        ax.set_xlabel(title)
        ax.grid(alpha=0.3)
    axes[0].set_ylabel("held-out solve rate")
    axes[-1].legend(loc="lower right")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=DEFAULT, choices=list(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "efficiency")
    parser.add_argument("--one", nargs=3, metavar=("METHOD", "SEED", "FILE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        method, seed, file = args.one
        torch.set_num_threads(1)
        Path(file).write_text(json.dumps(one_run(method, int(seed))))
        return
    curves = all_runs(args.methods, args.seeds, args.workers, args.out / "runs")
    (args.out / "efficiency.json").write_text(json.dumps(curves))
    (args.out / "efficiency.md").write_text(table(curves) + "\n")
    plot(curves).savefig(args.out / "efficiency.png", dpi=110)
    print(table(curves))


if __name__ == "__main__":
    main()
