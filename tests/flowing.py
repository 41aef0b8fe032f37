"""A run whose prompts are known to be easy, hard or of signal; also as a script, for real ranks:

python tests/flowing.py CASE RANKS FOLDER
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler

from lightning_dataflex import RLEP, DataFlexCallback, DataFlexPoint, mixture_dataloader
from lightning_dataflex.functional.advantages import grpo_advantages
from lightning_dataflex.functional.loss import loss_denominator

GENERATIONS = 4
OUTCOMES = {"mixed": [1.0, 0.0, 1.0, 0.0], "easy": [1.0] * 4, "hard": [0.0] * 4, "lost": [float("nan")] * 4}


def prompts(kinds: Sequence[str]) -> list[dict[str, Any]]:
    """Rows with these kinds, and the length of their responses."""
    return [
        {"prompt_id": f"p{i}", "kind": kind, "length": 1 + i % 3, "domain": "abc"[i % 3]}
        for i, kind in enumerate(kinds)
    ]


class Dealt(Sampler[int]):
    """Every rank's part of the rows, place by place, without padding."""

    def __init__(self, size: int, rank: int, world: int) -> None:
        self.indices = range(rank, size - size % world, world)

    def __iter__(self) -> Any:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)


class Prompts(LightningDataModule):
    def __init__(self, kinds: Sequence[str], batch_size: int = 4, loader: Callable[..., Any] = DataLoader) -> None:
        super().__init__()
        self.rows, self.batch_size, self.loader = prompts(kinds), batch_size, loader

    def train_dataloader(self) -> Any:
        world, rank = (self.trainer.world_size, self.trainer.global_rank) if self.trainer else (1, 0)
        dealt = Dealt(len(self.rows), rank, world)
        return self.loader(self.rows, self.batch_size // world, sampler=dealt, collate_fn=list)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.rows[:2], 1, collate_fn=list)


class Rolling(LightningModule):
    """Remembers what it has rolled out, and what its loss was given."""

    def __init__(self, estimator: str = "grpo") -> None:
        super().__init__()
        self.dataflex = DataFlexPoint()
        self.num_generations, self.adv_estimator = GENERATIONS, estimator
        self.weight = nn.Parameter(torch.full((3,), 0.5, dtype=torch.float64))
        self.rolled_out: list[list[tuple[str, int]]] = []
        self.given: list[dict[str, Any]] = []
        self.rates: list[float] = []
        self.validated_after: list[int] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.rolled_out.append([])

    def rollout(self, rows: list[dict[str, Any]], num_generations: int | None = None) -> dict[str, Any]:
        num = num_generations or self.num_generations
        if self.trainer.training:
            self.rolled_out[-1] += [(row["prompt_id"], num) for row in rows]
        lengths = torch.tensor([row["length"] for row in rows for _ in range(num)])
        mask = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
        rewards = torch.tensor([reward for row in rows for reward in OUTCOMES[row["kind"]][:num]]).double()
        uid = [row["prompt_id"] for row in rows for _ in range(num)]
        places = torch.tensor([int(name[1:]) for name in uid]).double()
        features = torch.stack([places.sin(), places.cos(), torch.arange(len(uid)).double().sin()], 1)
        ids = torch.tensor([sum(map(ord, name)) for name in uid])
        return {
            "features": features,
            "response_mask": mask,
            "rm_scores": rewards,
            "advantages": grpo_advantages(torch.nan_to_num(rewards), ids),
            "uid": uid,
            "kind": [row["kind"] for row in rows for _ in range(num)],
            "domain": [row["domain"] for row in rows for _ in range(num)],
            "temperature": 1.0,
        }

    def training_step(self, rows: list[dict[str, Any]], batch_idx: int) -> Tensor:
        batch = self.dataflex(self.rollout(rows))
        self.given.append(batch)
        weights = batch.get("rollout_is_weights", batch["response_mask"])
        per_token = -(batch["features"] @ self.weight * batch["advantages"])[:, None] * weights
        mask = batch["response_mask"].bool()
        return torch.where(mask, per_token, 0.0).sum() / loss_denominator(mask, "token-mean")

    def validation_step(self, rows: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.validated_after.append(self.global_step)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_batch_end(self, *args: Any) -> None:
        self.rates.append(self.optimizers().param_groups[0]["lr"])


class Logged(Callback):
    """What was logged at each step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        values = trainer.logged_metrics
        self.steps.append({k.removeprefix("dataflex/"): float(v) for k, v in values.items()})


class Mixed(Prompts):
    """The same prompts, drawn by the proportions of their domains."""

    def __init__(self, kinds: Sequence[str], batch_size: int = 4, num_workers: int = 0) -> None:
        super().__init__(kinds, batch_size)
        self.num_workers = num_workers

    def train_dataloader(self) -> Any:
        workers = {"num_workers": self.num_workers, "prefetch_factor": 2 if self.num_workers else None}
        return mixture_dataloader(self.rows, self.batch_size, seed=5, collate_fn=list, **workers)


def dapo(groups: int = 4, **changes: Any) -> DataFlexCallback:
    block = {"scorer": "group_solve_rate", "actuator": "threshold_band", "refill": {"groups": groups}}
    return DataFlexCallback("select", **block | changes)


def gate(scorer: Any, **changes: Any) -> DataFlexCallback:
    return DataFlexCallback("select", scorer=scorer, **changes)


def fit(
    callbacks: list[Any], data: Any, module: Rolling | None = None, ckpt_path: Any = None, **settings: Any
) -> tuple[Rolling, list[dict[str, float]], Trainer]:
    module, logged = module or Rolling(), Logged()
    quiet: dict[str, Any] = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    quiet |= {"enable_checkpointing": False, "accelerator": "cpu", "devices": 1, "max_epochs": 1, **settings}
    quiet |= {"num_sanity_val_steps": 0, "use_distributed_sampler": False}
    trainer = Trainer(callbacks=[*callbacks, logged], **quiet)
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return module, logged.steps, trainer


def as_lists(state: Any) -> Any:
    """A state with lists in place of tensors, to be compared."""
    if isinstance(state, Tensor):
        return state.tolist()
    if isinstance(state, dict):
        return {key: as_lists(value) for key, value in state.items()}
    return [as_lists(value) for value in state] if isinstance(state, (list, tuple)) else state


def names(batch: dict[str, Any], kept: bool = True) -> list[str]:
    """The prompts of a batch that the loss was given, each once; those with a valid token."""
    valid = batch["response_mask"].bool().any(1).tolist()
    return list(dict.fromkeys(name for name, v in zip(batch["uid"], valid) if v or not kept))


LUCK = ["mixed" if i % 2 == 0 or i % 16 == 1 else "hard" for i in range(96)]
"""Dealt out to two ranks, one has what it needs in nearly every prompt, and the other in one of eight."""

CASES: dict[str, tuple[Callable[[], list[Any]], list[str], dict[str, Any]]] = {
    "luck": (lambda: [dapo(4)], LUCK, {"max_steps": 4, "max_epochs": -1}),
    "rows": (lambda: [dapo(4, drop="rows")], LUCK, {"max_steps": 4, "max_epochs": -1}),
    "greso": (
        lambda: [gate("greso"), dapo(4)],
        ["mixed", "easy", "hard", "mixed"] * 8,
        {"max_steps": 6, "max_epochs": 3},
    ),
    "nothing": (lambda: [dapo(2)], ["easy", "hard"] * 24, {"max_epochs": 1}),
    "rlep": (
        lambda: [RLEP(num=2, collect=f"{sys.argv[3]}/pool.pt", max_per_prompt=3)],
        ["mixed", "easy", "hard", "mixed", "hard", "mixed", "easy", "hard"],
        {"max_epochs": 3},
    ),
    "speed": (
        lambda: [gate({"name": "speed", "params": {"num_screening": 2}}, refill={"groups": 2})],
        LUCK,
        {"max_steps": 3, "max_epochs": -1},
    ),
}

if __name__ == "__main__":
    case, world, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    make, kinds, settings = CASES[case]
    parts = {"strategy": "ddp", "devices": world} if world > 1 else {}
    module, logged, trainer = fit(make(), Prompts(kinds, 4), **settings, **parts)
    rank = int(os.environ.get("LOCAL_RANK", 0))
    seen = {
        "given": [{"uid": b["uid"], "mask": b["response_mask"], "names": names(b)} for b in module.given],
        "rolled_out": module.rolled_out,
        "logged": logged,
        "weight": module.weight.detach(),
        "steps": trainer.global_step,
        "state": trainer.callbacks[0].state_dict(),
    }
    torch.save(seen, f"{folder}/{rank}.pt")
