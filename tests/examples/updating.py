"""One update of the example on a rollout that is spread over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from examples.rlhf import PromptDataModule, RLHFModule, policy
from examples.rlhf.batches import at_last_token, sliced
from lightning_dataflex import DataFlexCallback

ROWS = {
    1: [range(32)],
    2: [range(0, 32, 3), [row for row in range(32) if row % 3]],
    4: [range(5), range(5, 26), [], range(26, 32)],
}
"""Who holds which of 32 samples in 8 groups of 4."""


class Given(RLHFModule):
    """Is given its rollout; a plain gradient step, because Adam would hide a wrong scale."""

    def __init__(self, batch: dict[str, Any] | None = None, folder: str = "", **settings: Any) -> None:
        super().__init__(**{"warmup_steps": 0, "num_generations": 4, "max_new_tokens": 4, "seed": 0, **settings})
        # The eager kernel takes its softmax in single precision, whatever it is given.
        self.policy.model.set_attn_implementation("sdpa")
        self.batch, self.folder = batch, folder

    def rollout(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        if self.batch is None:
            torch.save(batch := super().rollout(rows), f"{self.folder}/batch.pt")
            return batch
        return sliced(self.batch, list(ROWS[self.trainer.world_size][self.global_rank]))

    def rewards(self, rows: Sequence[dict[str, Any]], batch: dict[str, Any]) -> dict[str, Any]:
        # Those of the verifier are all 0 before any training.
        outcomes = (batch["input_ids"].sum(1) % 5).double()
        return super().rewards(rows, batch) | {"rm_scores": at_last_token(outcomes, batch["response_mask"])}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.policy.parameters(), lr=0.1)

    def on_train_end(self) -> None:
        logged = {name: float(value) for name, value in self.trainer.logged_metrics.items()}
        # What is given is not generated.
        del logged["generated"]
        result = {"parameters": parameters(self), "logged": logged}
        torch.save(result, f"{self.folder}/{self.trainer.world_size}-{self.global_rank}.pt")


def parameters(module: RLHFModule) -> Tensor:
    return torch.cat([p.detach().flatten() for p in module.policy.parameters()])


def trainer(world: int) -> Trainer:
    quiet: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    return Trainer(
        accelerator="cpu", devices=world, strategy="ddp_spawn" if world > 1 else "auto", precision="64-true",
        callbacks=[DataFlexCallback("reweight", "advantage_magnitude", "softmax")], max_epochs=1,
        limit_train_batches=1, limit_val_batches=0, num_sanity_val_steps=0, **quiet,
    )  # fmt: skip


def updated(world: int, batch: dict[str, Any] | None, folder: str, **settings: Any) -> None:
    """Every rank leaves its parameters and its log in the folder."""
    policy.EMBEDDED |= {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    torch.set_num_threads(1)
    prompts = PromptDataModule(num_train=40, num_held_out=8, batch_size=8)
    trainer(world).fit(Given(batch, folder, **settings), datamodule=prompts)
