"""A run whose prompts come from domains, with rewards that follow from the prompt and the step; also as a script:

python tests/mixing.py FOLDER [RANKS [STOP_AFTER]]
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_dataflex import DataFlexCallback, DataFlexPoint, mixture_dataloader

DOMAINS = ["code", "logic", "math"]
ROWS = [{"row": i, "domain": DOMAINS[i % 3]} for i in range(60)]
BATCH = 4


class Rows(LightningDataModule):
    """Batches of 4 prompts of 60, 15 an epoch."""

    def __init__(self, num_workers: int = 0, batch_size: int = BATCH, **options: Any) -> None:
        super().__init__()
        self.num_workers, self.batch_size, self.options = num_workers, batch_size, options

    def train_dataloader(self) -> DataLoader:
        workers = {"num_workers": self.num_workers, "prefetch_factor": 2 if self.num_workers else None}
        return mixture_dataloader(ROWS, self.batch_size, seed=5, **workers, **self.options)


class Bandit(LightningModule):
    """Two samples for each prompt; what they are rewarded with depends on the prompt and on the step."""

    def __init__(self) -> None:
        super().__init__()
        self.dataflex = DataFlexPoint()
        self.weight = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.seen: list[list[int]] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        self.seen.append(batch["row"].tolist())
        rows = batch["row"].repeat_interleave(2)
        sample = torch.arange(len(rows)) % 2
        level = torch.tensor([DOMAINS.index(name) for name in batch["domain"]]).repeat_interleave(2)
        draw = torch.sin((rows * 7 + sample * 3 + self.global_step * 5 + 1).double()).abs()
        rewards = (draw > 0.3 * level).double()
        out = self.dataflex(
            {
                "rm_scores": rewards,
                "advantages": (rewards - 0.5) * draw,
                "response_mask": torch.ones(len(rows), 3),
                "uid": [f"{self.global_step}-{row}" for row in rows.tolist()],
                "domain": [name for name in batch["domain"] for _ in range(2)],
            }
        )
        weights = out.get("rollout_is_weights", torch.ones(len(rows), 3))
        # A plain gradient step moves by the kept samples' mean reward.
        return -self.weight * (weights[:, 0] * rewards).sum() / len(rows)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Record(Callback):
    """What was logged at each step."""

    def __init__(self, die_after: int | None = None) -> None:
        self.logged: list[dict[str, float]] = []
        self.die_after = die_after

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == self.die_after:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        values = trainer.logged_metrics
        self.logged.append({k: float(v) for k, v in values.items() if k.startswith("dataflex")})


def mix(actuator: Any = None, **options: Any) -> DataFlexCallback:
    return DataFlexCallback("mix", actuator=actuator or {"name": "dump_ucb", "params": {"temperature": 0.1}}, **options)


def fit(
    callbacks: list[Any], data: Any = None, ckpt_path: Any = None, module: Bandit | None = None, **settings: Any
) -> tuple[Bandit, Record]:
    """Three epochs of 15 steps, unless told otherwise."""
    module, record = module or Bandit(), next((c for c in callbacks if isinstance(c, Record)), Record())
    others = [c for c in callbacks if c is not record]
    quiet: dict[str, Any] = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    quiet |= {"accelerator": "cpu", "devices": 1, "max_epochs": 3, "num_sanity_val_steps": 0, **settings}
    quiet.setdefault("enable_checkpointing", any(isinstance(c, ModelCheckpoint) for c in callbacks))
    trainer = Trainer(callbacks=[*others, record], **quiet)
    data = Rows() if data is None else data
    source: dict[str, Any] = (
        {"datamodule": data} if isinstance(data, LightningDataModule) else {"train_dataloaders": data}
    )
    # False is for a module that makes its own loader.
    trainer.fit(module, **(source if data else {}), ckpt_path=ckpt_path)
    return module, record


if __name__ == "__main__":
    folder, world = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 1
    stop_after = int(sys.argv[3]) if len(sys.argv) > 3 else None
    torch.set_num_threads(1)
    saver = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
    parts = {"strategy": "ddp", "devices": world} if world > 1 else {}
    result = fit([mix(), saver, Record(stop_after)], Rows(2, BATCH // world), **parts)
    rank = int(os.environ.get("LOCAL_RANK", 0))
    torch.save({"seen": result[0].seen, "logged": result[1].logged}, f"{folder}/{rank}.pt")
