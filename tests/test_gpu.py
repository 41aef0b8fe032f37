"""On a GPU: the decisions and the training of the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_dataflex import DataFlexCallback, Pipeline, build
from tests.launch import SCRIPT, run
from tests.test_ranks import BUILT_IN, pipeline
from tests.test_strategies import assert_trained
from tests.toy import LR, Toy, fit, gradient, kept_rows, policy, rollout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none here"),
]

needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices for NCCL between them")


def on_gpu(batch: dict[str, Any]) -> dict[str, Any]:
    return {key: value.cuda() if isinstance(value, torch.Tensor) else value for key, value in batch.items()}


@pytest.mark.parametrize("name", BUILT_IN)
def test_decisions_are_those_of_the_cpu(name: str) -> None:
    decide: Pipeline = pipeline(name)
    there, here = decide.decide(on_gpu(rollout(0))), decide.decide(rollout(0))
    assert there.weights.is_cuda
    assert torch.equal(there.keep.cpu(), here.keep)
    torch.testing.assert_close(there.weights.cpu(), here.weights, atol=1e-6, rtol=0)


@pytest.mark.parametrize("mount", ["point", "_loss", "on_train_batch_start"])
def test_training_is_that_of_the_closed_form(mount: str) -> None:
    callback = DataFlexCallback("select", "group_solve_rate", "threshold_band", mount=mount)
    fit(module := Toy(), [callback], [rollout(0)], accelerator="gpu")
    keep, mask = kept_rows(rollout(0))[:, None], rollout(0)["response_mask"].numpy()
    start = policy().weight.detach().numpy()
    expected = start - LR * gradient(start, rollout(0), keep * mask, keep * mask)
    np.testing.assert_allclose(module.linear.weight.detach().cpu().numpy(), expected, atol=1e-7)


@needs_two
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "fsdp2", "deepspeed_stage_2"])
def test_strategies_train_as_one_process_does(strategy: str, tmp_path: Path) -> None:
    if strategy.startswith("deepspeed"):
        pytest.importorskip("deepspeed", reason="needs the package deepspeed")
    run([*SCRIPT, strategy, "2", str(tmp_path), "1", "gpu"])
    assert_trained(tmp_path, 2, atol=1e-6)


def test_R058_what_is_collected_in_main_memory_is_gathered_over_nccl(tmp_path: Path) -> None:
    store = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("nccl", store, rank=0, world_size=1)
    try:
        scorer = build("scorer", "metadata", column="num_visits", compute_on_cpu=True).cuda()
        for number in (1, 2):
            scorer.update({"num_visits": torch.tensor([number]), "response_mask": torch.ones(1, 1)})
        assert scorer.rows[0].device.type == "cpu"
        # One process alone does not gather unless it is told to.
        scorer.sync(distributed_available=lambda: True)
        assert scorer.compute().tolist() == [1, 2]
    finally:
        torch.distributed.destroy_process_group()
