"""A fit whose batches are spread over ranks, for real launchers.

python tests/training.py STRATEGY RANKS FOLDER [NODES [ACCELERATOR [DROP]]]
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.utils.data import DataLoader

from lightning_dataflex import DataFlexCallback
from lightning_dataflex.functional.loss import loss_denominator
from tests.ranks import spread
from tests.toy import Toy, as_it_is, fit, per_token, rollout

WIDE = ("advantages", "old_log_probs", "response_mask", "rm_scores", "actions", "features")
ROWS = {
    2: [[[0, 2, 4], [1, 3, 5, 6, 7]], [[0, 1, 2, 3], [4, 5, 6, 7]], [[], [0, 1, 2, 3, 4, 5, 6, 7]]],
    4: [[[0, 2], [4, 1], [3], [5, 6, 7]], [[0, 1], [2, 3], [4, 5, 6], [7]], [[], [0, 1, 2, 3, 4, 5], [], [6, 7]]],
}
"""Who holds which samples of each of three batches: groups are split; some ranks keep nothing; some have none."""


def batches() -> list[dict[str, Any]]:
    """Of the second, the first four samples are of groups without signal."""
    three = [rollout(seed) for seed in (0, 10, 2)]
    three[1]["rm_scores"][:4] = 0.0
    return [batch | {"uid": [f"{i}-{uid}" for uid in batch["uid"].tolist()]} for i, batch in enumerate(three)]


class GlobalToy(Toy):
    """Divides by the tokens of all ranks."""

    num_rows = 0

    def _loss(self, batch: dict[str, Any]) -> torch.Tensor:
        self.num_rows += len(batch["uid"])
        losses = per_token(self.linear, batch) * batch["rollout_is_weights"]
        return losses.sum() / loss_denominator(batch["response_mask"], "token-mean")


class ShardedToy(GlobalToy):
    """Each rank holds a part of the parameters."""

    def configure_model(self) -> None:
        fully_shard(self.linear, mesh=self.device_mesh["data_parallel"])


class Parts(LightningDataModule):
    """This rank's part of each batch, in this precision."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def train_dataloader(self) -> DataLoader:
        world, rank = self.trainer.world_size, self.trainer.global_rank
        parts = batches()
        if world > 1:
            parts = [spread(batch, rows, WIDE)[rank] for batch, rows in zip(parts, ROWS[world])]
        for part in parts:
            part |= {k: v.to(self.dtype) for k, v in part.items() if k != "uid" and v.is_floating_point()}
        return DataLoader(parts, batch_size=None, collate_fn=as_it_is)


class Record(Callback):
    """What each rank has logged at each step, and the parameters at the end."""

    def __init__(self, folder: str) -> None:
        self.folder, self.logged = folder, []

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.logged.append({name: float(value) for name, value in trainer.logged_metrics.items()})

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        model = trainer.strategy.model
        sharded = isinstance(model, FullyShardedDataParallel)
        with FullyShardedDataParallel.summon_full_params(model) if sharded else nullcontext():
            weight = pl_module.linear.weight.detach().clone()
        weight = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
        seen = {"weight": weight.cpu(), "logged": self.logged, "num_rows": pl_module.num_rows}
        torch.save(seen, f"{self.folder}/{trainer.global_rank}.pt")


def train(strategy: Any, world: int, folder: str, **settings: Any) -> None:
    """Three steps; every rank leaves what it has seen in the folder."""
    # DeepSpeed knows no double precision.
    dtype = torch.float32 if str(strategy).startswith("deepspeed") else torch.float64
    module = (ShardedToy if settings.pop("sharded", False) else GlobalToy)().to(dtype)
    drop = settings.pop("drop", "mask")
    dataflex = DataFlexCallback(
        "select", "group_solve_rate", "threshold_band", drop=drop, trace=f"{folder}/trace.jsonl", label="band"
    )
    callbacks = [dataflex, Record(folder)]
    fit(module, callbacks, Parts(dtype), strategy=strategy, devices=world, use_distributed_sampler=False, **settings)


if __name__ == "__main__":
    name, world, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    num_nodes = int(sys.argv[4]) if len(sys.argv) > 4 else 1
    accelerator = sys.argv[5] if len(sys.argv) > 5 else "cpu"
    drop = sys.argv[6] if len(sys.argv) > 6 else "mask"
    torch.set_num_threads(1)
    strategy: Any = name
    if name == "fsdp2":
        from lightning.pytorch.strategies import ModelParallelStrategy

        backend = "gloo" if accelerator == "cpu" else "nccl"
        strategy = ModelParallelStrategy(world, tensor_parallel_size=1, process_group_backend=backend)
    train(strategy, world, folder, sharded=name == "fsdp2", num_nodes=num_nodes, accelerator=accelerator, drop=drop)
