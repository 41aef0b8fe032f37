"""What a long run costs: memory, objects, state and time per step over thousands of decisions of changing shape.

    python benchmarks/soak.py

In each step one of the rules that remember something decides and one of those that do not, two mixers and a rule on
prompts, all in turn; prompts, groups, lengths, number types and domains change, and most prompts are new. Then the
callback in a real Trainer: a rule on prompts, a refill, weights and a mixer. Memories are small, so that they are full
early: what the second half of a run adds, it would add for ever. Time is that of the processor.
"""

from __future__ import annotations

import argparse
import gc
import io
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import lightning_dataflex as df
from lightning_dataflex.core.history import Visits
from lightning_dataflex.core.replay import ReplayPool, solved, with_replayed
from lightning_dataflex.core.samples import Layout

POINTS, MEMORY, DOMAINS = 10, 256, ["code", "logic", "math"]
LIMITS = {"RSS MiB": 8.0, "objects": 1000.0, "state KiB": 4.0, "ms per step": 0.5}
"""What the second half of a run may add; to the time, as a share of it."""

EMA = {"name": "ema", "params": {"scorer": "group_solve_rate", "max_entries": MEMORY}}
BY_DOMAIN = {"name": "ema", "params": {"scorer": "outcome", "by": "domain"}}
GFPO = {"name": "gfpo", "params": {"k": 2, "k_by_difficulty": [4, 3, 2, 1]}}
LONG = {"name": "product", "params": {"scorers": [EMA, "response_length"]}}
ANY = {"name": "any_of", "params": {"selectors": [GFPO, "threshold_band"]}}
REMEMBERING = [("select", EMA, "threshold_band"), ("reweight", BY_DOMAIN, "softmax"), ("select", None, GFPO)]
REMEMBERING += [("select", LONG, ANY)]
STATELESS = [("select", "group_solve_rate", "threshold_band"), ("select", "token_entropy", "high_entropy_tokens")]
STATELESS += [("select", "reward_difficulty", "max_variance"), ("reweight", "advantage_magnitude", "softmax")]
GATES = ("greso", "mopps", "pass_rate_band")
MIXERS = {"adarft": {"difficulty": {name: i for i, name in enumerate(DOMAINS)}}}


def rollout(draw: np.random.Generator, step: int) -> dict[str, Any]:
    """A batch of any shape, type and ids; in one step of eight all prompts may have come before."""
    groups, size, tokens = draw.integers(1, 9), draw.integers(2, 7), draw.integers(1, 24)
    num, start = groups * size, 8 * step if step % 8 else 0
    dtype = [torch.float32, torch.float64, torch.bfloat16][draw.integers(3)]
    names = ("advantages", "entropies", "old_log_probs")
    fields = {name: torch.from_numpy(draw.uniform(0.1, 1, (num, tokens))).to(dtype) for name in names}
    ids = np.arange(start, start + groups).repeat(size)
    return fields | {
        "response_mask": torch.from_numpy(np.arange(tokens) < draw.integers(1, tokens + 1, num)[:, None]),
        "rm_scores": torch.from_numpy(draw.integers(0, 2, num)).to(dtype),
        "uid": torch.from_numpy(ids) if step % 5 else [f"prompt {each}" for each in ids],
        "domain": np.array(DOMAINS)[ids % draw.integers(1, 4)].tolist(),
    }


class Everything:
    """All that decides, remembers or draws, outside of a Trainer."""

    def __init__(self) -> None:
        keys = ("mechanism", "scorer", "actuator")
        made = [df.Pipeline.from_config(dict(zip(keys, block))) for block in REMEMBERING + STATELESS]
        self.remembering, self.stateless = made[: len(REMEMBERING)], made[len(REMEMBERING) :]
        mixers = [{"name": name, "params": MIXERS.get(name, {})} for name in df.components("mixer")]
        block = {"mechanism": "mix", "domains": DOMAINS}
        self.mixtures = [df.Mixture.from_config(block | {"actuator": mixer}) for mixer in mixers]
        self.gates = [df.build("scorer", name, max_prompts=MEMORY) for name in GATES]
        self.pool, self.sampler = ReplayPool(max_per_prompt=2), df.DomainMixtureSampler(DOMAINS * 8, 4)
        self.indices: Iterator[int] = iter(())

    def step(self, batch: dict[str, Any], step: int, progress: float) -> None:
        for pipeline in (self.remembering[step % 4], self.stateless[step // 4 % 4]):
            pipeline.decide(batch, step, progress=progress)
        for mixture in self.mixtures[step % 6 :: 6]:
            mixture.observe(batch, step)
            mixture.end_step(step, progress=progress)
        local = df.RolloutBatch.of(batch)
        visits = Visits.of(local.group_ids, local.outcomes.double())
        gate = self.gates[step % 3]
        gate.score({"prompt_id": visits.ids}, step)
        gate.observe(visits, step)
        if step % 8 == 0:
            self.pool.add(solved(local, Layout(), 0.5, step))
            with_replayed(local, self.pool, 1, Layout(), "grpo", None, step)
        self.sampler.set_proportions(self.mixtures[0].proportions)
        if next(self.indices, None) is None:
            self.indices = iter(self.sampler)
        self.sampler.forget_before(self.sampler.num_batches)

    def state(self) -> Any:
        parts = [part for pipeline in self.remembering for part in (pipeline.scorer, pipeline.actuator)]
        return [part.state_dict() for part in (*parts, *self.mixtures, *self.gates, self.pool, self.sampler)]


class Answering(LightningModule):
    """A policy of three numbers, whose responses are of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.dataflex, self.num_generations, self.adv_estimator = df.DataFlexPoint(), 4, "grpo"
        self.weight, self.draw = torch.nn.Parameter(torch.zeros(3)), np.random.default_rng(1)

    def rollout(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        num = 4 * len(rows)
        rewards = torch.from_numpy(self.draw.integers(0, 2, num)).float()
        ids = {name: [row[name] for row in rows for _ in range(4)] for name in ("uid", "domain")}
        return ids | {
            "features": torch.from_numpy(self.draw.normal(size=(num, 3))).float(),
            "response_mask": torch.ones(num, int(self.draw.integers(1, 24))),
            "rm_scores": rewards,
            "advantages": rewards - rewards.mean(),
        }

    def training_step(self, rows: list[dict[str, Any]], batch_idx: int) -> Tensor:
        batch = self.dataflex(self.rollout(rows))
        losses = -(batch["features"] @ self.weight * batch["advantages"])[:, None] * batch["rollout_is_weights"]
        return torch.where(batch["response_mask"] > 0, losses, 0.0).mean()

    def train_dataloader(self) -> Any:
        rows = [{"uid": f"p{i}", "domain": DOMAINS[i % 3]} for i in range(4 * MEMORY)]
        return df.mixture_dataloader(rows, 4, seed=1, collate_fn=list)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Table(Callback):
    """Measures a run at its points, and prints what it sees."""

    def __init__(self, title: str, steps: int) -> None:
        self.every, self.rows, self.start = max(1, steps // POINTS), [], time.process_time()
        print(f"\n{title}\n" + "".join(f"{name:>14}" for name in ("step", *LIMITS)))

    def measure(self, step: int, state: Callable[[], Any]) -> None:
        if step % self.every:
            return
        spent = 1000 * (time.process_time() - self.start) / self.every
        torch.save(state(), file := io.BytesIO())
        gc.collect()
        memory = int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20
        self.rows.append((memory, sys.getallocatedblocks(), file.tell() / 1024, spent))
        print(f"{step:>14,}" + "".join(f"{value:>14,.2f}" for value in self.rows[-1]), flush=True)
        self.start = time.process_time()

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.measure(trainer.global_step, lambda: [each.state_dict() for each in trainer.callbacks])

    def is_flat(self) -> bool:
        """Whether the second half added no more than it may."""
        half = np.array(self.rows[len(self.rows) // 2 - 1 :])
        added = np.polyfit(np.arange(len(half)), half, 1)[0] * (len(half) - 1)
        added[-1] /= np.median(half[:, -1])
        flat = added <= list(LIMITS.values())
        for name, value, limit, is_flat in zip(LIMITS, added, LIMITS.values(), flat):
            verdict = "flat" if is_flat else "grows"
            print(f"{name:>14}: {verdict}, {value:+.2f} over the second half (at most {limit:g})")
        return bool(flat.all())


def decisions(steps: int) -> bool:
    everything, draw, table = Everything(), np.random.default_rng(0), Table("decisions", steps)
    for step in range(steps):
        everything.step(rollout(draw, step), step, step / steps)
        table.measure(step + 1, everything.state)
    return table.is_flat()


def training(steps: int) -> bool:
    greso = {"name": "greso", "params": {"max_prompts": MEMORY}}
    pick = [df.DataFlexCallback("select", greso, fields={"prompt_id": "uid"})]
    pick += [df.DataFlexCallback("select", EMA, "threshold_band", refill={"groups": 4})]
    pick += [df.DataFlexCallback("reweight", BY_DOMAIN, "softmax"), df.DataFlexCallback("mix", actuator="dump_ucb")]
    table = Table("training steps", steps)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = Trainer("cpu", callbacks=[*pick, table], max_steps=steps, max_epochs=-1, **quiet)
    trainer.fit(Answering())
    return table.is_flat()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000, help="decisions; the Trainer makes a tenth as many steps")
    num = parser.parse_args().steps
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    flat = [decisions(num), training(max(POINTS, num // 10))]
    sys.exit(0 if all(flat) else 1)
