"""Small runs of the example."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from examples.rlhf import PromptDataModule, RLHFModule


@pytest.fixture(autouse=True)
def _one_thread(_two_cores: None) -> None:
    # Models this small gain nothing from a second thread, and lose much when the cores are shared.
    torch.set_num_threads(1)


@pytest.fixture
def trained(tmp_path: Path) -> Callable[..., RLHFModule]:
    """Trains a module, for one step unless told otherwise."""

    def train(
        module: RLHFModule,
        num_steps: int = 1,
        *,
        prompts: dict[str, Any] | None = None,
        ckpt_path: Path | None = None,
        **trainer: Any,
    ) -> Any:
        settings: dict[str, Any] = {
            "accelerator": "cpu",
            "devices": 1,
            "max_epochs": 1,
            "limit_train_batches": num_steps,
            "limit_val_batches": 0,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": tmp_path,
            "num_sanity_val_steps": 0,
        }
        data = PromptDataModule(**{"num_train": 40, "num_held_out": 8, "batch_size": 8, **(prompts or {})})
        Trainer(**{**settings, **trainer}).fit(module, datamodule=data, ckpt_path=ckpt_path)
        return module

    return train
