"""Real launchers and strategies train as one process does; groups are cut over ranks, some ranks have nothing."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_dataflex import Pipeline
from tests.launch import SCRIPT, TORCHRUN, free_port, run
from tests.toy import LR, gradient, kept_rows, policy
from tests.training import batches


def closed_form() -> np.ndarray:
    weight = policy().weight.detach().numpy().copy()
    for batch in batches():
        keep, mask = _kept(batch), batch["response_mask"].numpy()
        weight -= LR * gradient(weight, batch, keep * mask, keep * mask)
    return weight


def _kept(batch: dict) -> np.ndarray:
    index = {uid: i for i, uid in enumerate(dict.fromkeys(batch["uid"]))}
    return kept_rows(batch | {"uid": torch.tensor([index[uid] for uid in batch["uid"]])})[:, None]


def assert_trained(folder: Path, world: int, atol: float = 1e-9) -> None:
    block = {"mechanism": "select", "scorer": "group_solve_rate", "actuator": "threshold_band"}
    metrics = [Pipeline.from_config(block).decide(batch).metrics for batch in batches()]
    for rank in range(world):
        seen = torch.load(folder / f"{rank}.pt")
        np.testing.assert_allclose(seen["weight"].numpy(), closed_form(), rtol=0, atol=atol)
        for logged, expected in zip(seen["logged"], metrics, strict=True):
            assert list(logged) == [f"dataflex/{name}" for name in expected]
            for name, value in expected.items():
                assert logged[f"dataflex/{name}"] == pytest.approx(float(value), abs=1e-6)
    assert_traced(folder, world)


def assert_traced(folder: Path, world: int) -> None:
    """Each sample of each step once, whichever rank held it, and as its group says."""
    parts = [folder / "trace.jsonl", *(folder / f"trace.rank{rank}.jsonl" for rank in range(1, world))]
    found = Counter(line for part in parts if part.exists() for line in part.read_text().splitlines())
    assert Counter(tuple(json.loads(line)[name] for name in TRACED) for line in found.elements()) == Counter(traced())


TRACED = ("step", "uid", "score", "kept", "weight", "reason", "reward", "length", "label")


def traced() -> list[tuple]:
    rows = []
    for step, batch in enumerate(batches()):
        lengths = batch["response_mask"].sum(-1).tolist()
        rewards = torch.where(batch["response_mask"] > 0, batch["rm_scores"], 0.0).sum(-1).tolist()
        for uid, reward, length in zip(batch["uid"], rewards, lengths):
            rate = np.mean([r for r, other in zip(rewards, batch["uid"]) if other == uid])
            reason = {0.0: "failed", 1.0: "solved"}.get(rate, "kept")
            kept = reason == "kept"
            rows.append((step, uid, rate, kept, float(kept), reason, reward, length, "band"))
    return rows


def test_the_batches_are_what_they_are_meant_to_be() -> None:
    kept = [_kept(batch).sum() for batch in batches()]
    assert kept == [6, 2, 6]
    assert _kept(batches()[1])[:4].sum() == 0
    assert np.abs(closed_form() - policy().weight.detach().numpy()).max() > 0.05


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn"])
def test_data_parallel(strategy: str, world: int, tmp_path: Path) -> None:
    run([*SCRIPT, strategy, str(world), str(tmp_path)])
    assert_trained(tmp_path, world)


def test_sharded_parameters(tmp_path: Path) -> None:
    run([*SCRIPT, "fsdp2", "2", str(tmp_path)])
    assert_trained(tmp_path, 2)


def test_torchrun(tmp_path: Path) -> None:
    run([*TORCHRUN, "tests/training.py", "ddp", "2", str(tmp_path)])
    assert_trained(tmp_path, 2)


def test_two_nodes(tmp_path: Path) -> None:
    node = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "--nnodes", "2"]
    node += ["--master-addr", "127.0.0.1", "--master-port", free_port()]
    script = ["tests/training.py", "ddp", "1", str(tmp_path), "2"]
    run(*([*node, "--node-rank", rank, *script] for rank in ("0", "1")))
    assert_trained(tmp_path, 2)


def test_the_command_line_under_torchrun(tmp_path: Path) -> None:
    fit = ["-m", "lightning_dataflex", "fit", "--config=configs/select.yaml", "--trainer.strategy=ddp"]
    fit += ["--trainer.devices=2", "--trainer.max_epochs=1", "--trainer.limit_train_batches=2", "--data.num_train=40"]
    fit += ["--trainer.limit_val_batches=1", "--model.warmup_steps=2", "--trainer.use_distributed_sampler=false"]
    fit += ["--trainer.logger=lightning.pytorch.loggers.CSVLogger", f"--trainer.logger.save_dir={tmp_path}"]
    run([*TORCHRUN, *fit])
    (metrics,) = tmp_path.rglob("metrics.csv")
    assert "dataflex/kept_frac" in metrics.read_text().splitlines()[0]
