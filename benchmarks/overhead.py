"""What the callback adds to a training step: the example's module with and without it, in turn in one run.

    python benchmarks/overhead.py [--device cuda]

The policy has 10 million parameters. One Trainer per mechanism; in every round each of them trains one step on the same
prompts, so that all have the same neighbours. What is printed are medians and quartiles of the differences within a
round: in milliseconds, which hold for larger policies too, and as a share of the step without a callback. The callbacks
weigh and leave the batch whole (`drop: weight`), because a batch with fewer samples would make the step shorter. On a
CPU the time is the processor's, of the one thread in which a Trainer runs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import lightning_dataflex as df
from benchmarks import batches
from examples.rlhf import PromptDataModule, RLHFModule
from examples.rlhf.policy import embedded_model

SELECT: dict[str, Any] = {
    "mechanism": "select",
    "drop": "weight",
    "on_empty": "keep",
    "scorer": "group_solve_rate",
    "actuator": {"name": "threshold_band", "params": {"low": 0.2, "high": 0.8}},
}
REWEIGHT: dict[str, Any] = {
    "mechanism": "reweight",
    "scorer": "advantage_magnitude",
    "actuator": "softmax",
    "drop": "weight",
}
MIX: dict[str, Any] = {"mechanism": "mix", "scorer": "reward_difficulty", "actuator": "reward_gap"}
ARRANGEMENTS = {
    "none": [],
    "select": [SELECT],
    "reweight": [REWEIGHT],
    "mix": [MIX],
    "all three": [SELECT, REWEIGHT, MIX],
}
SIZES = {"hidden_size": 384, "intermediate_size": 1280, "num_hidden_layers": 5, "num_attention_heads": 6}


class Turn(Callback):
    """Lets one Trainer after the other take a step, and notes how long it takes, logging included."""

    def __init__(self, place: int, gates: list[threading.Semaphore], rounds: int, clock: Callable[[], float]) -> None:
        self.place, self.gates, self.rounds, self.clock = place, gates, rounds, clock
        self.times: list[float] = []
        self._start = 0.0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._start:
            self.stop()
        if not self.gates[self.place].acquire(timeout=120):
            raise TimeoutError("Another Trainer does not take its turn.")
        self._start = self.clock()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.stop()

    def stop(self) -> None:
        self.times.append(self.clock() - self._start)
        self.gates[(self.place + 1) % len(self.gates)].release()


def module() -> RLHFModule:
    made = RLHFModule(num_generations=8, lr=0.0, warmup_steps=0, num_threads=1, seed=0)
    made.policy.model = embedded_model(0, **SIZES)
    return made


def fit(turn: Turn, blocks: list[dict[str, Any]], prompts: int, folder: str, device: str) -> None:
    """Train with these callbacks; the policy stays as it is, so that all roll out the same."""
    callbacks = [df.DataFlexCallback(**block) for block in blocks]
    trainer = Trainer(
        accelerator="gpu" if device == "cuda" else "cpu",
        devices=1,
        max_steps=turn.rounds,
        logger=CSVLogger(folder, name=str(turn.place)),
        log_every_n_steps=1,
        callbacks=[turn, *callbacks],
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
    )
    trainer.fit(module(), datamodule=PromptDataModule(batch_size=prompts, num_train=100, mixed=True))


def measured(rounds: int, prompts: int, device: str) -> dict[str, list[float]]:
    """Seconds of each step with each arrangement, the first two left out."""
    gates = [threading.Semaphore(int(i == 0)) for i in range(len(ARRANGEMENTS))]
    clock = time.thread_time if device == "cpu" else time.perf_counter
    turns = [Turn(i, gates, rounds + 2, clock) for i in range(len(gates))]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(turns)) as pool:
        list(pool.map(lambda each: fit(each[0], each[1], prompts, folder, device), zip(turns, ARRANGEMENTS.values())))
    return {name: turn.times[2:] for name, turn in zip(ARRANGEMENTS, turns)}


def table(times: dict[str, list[float]]) -> str:
    """Markdown."""
    plain = times["none"]
    lines = ["| callbacks | ms per step | added ms | quartiles | share of the step |", "|---|--:|--:|--:|--:|"]
    for name, seen in times.items():
        step, added = 1e3 * batches.median(seen), [1e3 * (a - b) for a, b in zip(seen, plain)]
        share = batches.median(a / b - 1 for a, b in zip(seen, plain))
        lines.append(
            f"| {name} | {step:.0f} | {batches.median(added):.1f} | {batches.quartiles(added)} | {share:.2%} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=8, help="8 samples each")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    num = sum(each.numel() for each in module().policy.parameters())
    print(f"{batches.machine()}\n\n{num / 1e6:.1f} million parameters, {8 * args.prompts} samples per step.\n")
    print(table(measured(args.rounds, args.prompts, args.device)))


if __name__ == "__main__":
    main()
