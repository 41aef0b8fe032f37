"""Faults reported of several ranks, each with the identifier under which it was collected; on real processes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from examples.rlhf import PromptDataModule, policy
from examples.rlhf.batches import Batch, sliced
from lightning_dataflex import DataFlexCallback, DomainMixtureSampler, Mixture, Pipeline, build
from tests.examples.updating import Given, parameters
from tests.launch import free_port
from tests.ranks import processes

QUIET: dict[str, Any] = dict.fromkeys(
    ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
)


@contextlib.contextmanager
def launched(port: str) -> Iterator[None]:
    """As if a launcher had started this process: the Trainer takes the process group that is there."""
    known = {"LOCAL_RANK": str(dist.get_rank()), "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    before = dict(os.environ)
    os.environ |= known
    try:
        yield
    finally:
        os.environ.clear()
        os.environ |= before


def fit(port: str, module: LightningModule, **settings: Any) -> Trainer:
    """Two ranks in the processes at hand, with the Trainer's own ideas of samplers."""
    data = {name: settings.pop(name) for name in ("datamodule", "train_dataloaders") if name in settings}
    with launched(port):
        trainer = Trainer(
            accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, limit_val_batches=0, num_sanity_val_steps=0,
            **QUIET, **settings,
        )  # fmt: skip
        trainer.fit(module, **data)
    return trainer


# -- decisions ---------------------------------------------------------------------------------------------------------


def top_half_of_tokens(entropies: list[float]) -> list[list[bool]]:
    values = torch.tensor([entropies])
    batch = {"entropies": values, "response_mask": torch.ones_like(values)}
    pipeline = Pipeline(build("scorer", "token_entropy"), build("selector", "high_entropy_tokens", fraction=0.5))
    return pipeline.decide(batch).keep.tolist()


def test_R036_a_quantile_over_tokens_is_that_of_all_ranks() -> None:
    few, many = processes(2).run(top_half_of_tokens, [[1.0, 2, 3], [4.0, 5, 6, 7, 8]])
    # The median of 1 to 8 is 4.5.
    assert few == [[False] * 3]
    assert many == [[False, True, True, True, True]]


def logged_of_domains(part: tuple[str, float]) -> dict[str, float]:
    name, reward = part
    mixture = Mixture.from_config({"mechanism": "mix", "actuator": "reward_gap", "domains": ["a", "b"]})
    mixture.observe({"rm_scores": torch.tensor([reward]), "domain": [name], "response_mask": torch.ones(1, 2)})
    mixture.end_step(0)
    return mixture.metrics


def test_R038_every_rank_logs_every_domain_in_one_order() -> None:
    first, second = processes(2).run(logged_of_domains, [("a", 0.0), ("b", 1.0)])
    assert list(first.items()) == list(second.items())
    assert (first["score_a"], first["score_b"]) == (0.0, 1.0)
    assert [name for name in first if name.startswith("prop_")] == ["prop_a", "prop_b"]


def share_kept(rewards: list[float]) -> float:
    batch = {"rm_scores": torch.tensor(rewards), "response_mask": torch.ones(len(rewards), 2)}
    pipeline = Pipeline(build("scorer", "outcome"), build("selector", "threshold_band", low=0.5, high=2.0))
    return float(pipeline.decide(batch).metrics["kept_frac"])


def test_R061_a_share_over_ranks_is_that_of_the_samples() -> None:
    assert processes(2).run(share_kept, [[1.0, 0.0], [1.0] * 6]) == [0.875] * 2


def collected(numbers: list[int]) -> list[float]:
    scorer = build("scorer", "metadata", column="num_visits")
    if numbers:
        scorer.update({"num_visits": torch.tensor(numbers), "response_mask": torch.ones(len(numbers), 1)})
    return scorer.compute().tolist()


def test_R057_a_rank_that_has_seen_nothing_gathers_what_the_other_has_seen() -> None:
    assert processes(2).run(collected, [[1, 2], []]) == [[1, 2]] * 2


def test_R058_states_in_main_memory_are_gathered_where_the_backend_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    scorer = build("scorer", "metadata", column="num_visits", compute_on_cpu=True)
    for number in (1, 2):
        scorer.update({"num_visits": torch.tensor([number]), "response_mask": torch.ones(1, 1)})
    kept, devices = torch.cat(scorer.rows), []
    assert kept.device.type == "cpu"

    def gather(state: Tensor, group: Any = None) -> list[Tensor]:
        devices.append(state.device.type)
        return [kept if state.dtype == torch.uint8 else torch.tensor(0)]

    # A device that is there on every machine stands for the one that NCCL would have.
    monkeypatch.setattr("lightning_dataflex.core.scorer.wire", lambda device, group: torch.device("meta"))
    scorer.sync(gather, distributed_available=lambda: True)
    assert devices == ["meta"] * 2
    assert scorer.rows.device.type == "cpu"
    assert scorer.compute().tolist() == [1, 2]


# -- training ----------------------------------------------------------------------------------------------------------


class Uneven(Given):
    """The example's module, on 10 samples that its callback keeps and 2 that it does not."""

    def __init__(self, rows: list[int], **settings: Any) -> None:
        super().__init__(aggregation="seq-mean-token-sum", max_grad_norm=1e9, **settings)
        self.rows = rows
        self.denominators: list[float] = []
        self.losses: list[Tensor] = []
        self.connected = True

    def rollout(self, rows: Any) -> Batch:
        draw = np.random.default_rng(0)
        ids = torch.tensor(draw.integers(5, 15, (12, 6)))
        rewards = torch.tensor([1.0, 0.0] * 6).double()
        batch = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "response_mask": torch.ones(12, 3, dtype=torch.int64),
            "old_log_probs": torch.tensor(draw.normal(-3, 0.1, (12, 3))),
            "entropies": torch.ones(12, 3).double(),
            "rm_scores": rewards[:, None] * torch.tensor([0, 0, 1]),
            "advantages": (rewards[:, None] - 0.5).expand(12, 3).contiguous(),
            "kept": torch.tensor([1.0] * 10 + [0.0] * 2),
            "uid": [f"p{i // 2}" for i in range(12)],
            "domain": ["sorting"] * 12,
            "solved": rewards.float(),
        }
        return sliced(batch, self.rows)

    def log_rollout(self, batch: Batch) -> None:
        pass

    def loss(self, batch: Batch, denominator: Tensor) -> Any:
        out = super().loss(batch, denominator)
        self.denominators.append(float(denominator))
        self.losses.append(out.loss.detach())
        self.connected &= out.loss.grad_fn is not None
        return out

    def on_train_end(self) -> None:
        pass


def trained(part: tuple[str, list[int], str | None]) -> dict[str, Any]:
    port, rows, strategy = part
    policy.EMBEDDED |= {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    module = Uneven(rows, micro_batch_size=2)
    kept = {"name": "metadata", "params": {"column": "kept"}}
    band = {"name": "threshold_band", "params": {"low": 0.5, "high": 2.0}}
    prompts = PromptDataModule(num_train=40, num_held_out=8, batch_size=2)
    settings: dict[str, Any] = {"callbacks": [DataFlexCallback("select", kept, band, drop="rows")]}
    settings |= {"precision": "64-true", "limit_train_batches": 1, "datamodule": prompts}
    start = parameters(module).double()
    if strategy:
        fit(port, module, **settings)
    else:
        data = settings.pop("datamodule")
        alone = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "limit_val_batches": 0, "num_sanity_val_steps": 0}
        Trainer(**QUIET, **alone, **settings).fit(module, datamodule=data)
    return {
        "moved": parameters(module).double() - start,
        "denominators": module.denominators,
        "losses": [float(loss) for loss in module.losses],
        "connected": module.connected,
    }


def test_R039_ranks_that_keep_other_numbers_make_as_many_backward_passes() -> None:
    alone, port = trained(("", list(range(12)), None)), free_port()
    six_and_four = [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    ranks = processes(2).run(trained, [(port, rows, "ddp") for rows in six_and_four])
    # 6 samples and 4, in pieces of 2; 10 of two ranks are 5 for each, because DDP takes the mean of the gradients.
    assert [rank["denominators"] for rank in ranks] == [[5.0] * 3] * 2
    assert alone["denominators"] == [10.0] * 5
    assert alone["moved"].abs().max() > 1e-5
    for rank in ranks:
        torch.testing.assert_close(rank["moved"], alone["moved"], rtol=0, atol=1e-9)


def test_R037_a_rank_that_keeps_nothing_takes_part_with_a_connected_zero() -> None:
    alone, port = trained(("", list(range(12)), None)), free_port()
    ranks = processes(2).run(trained, [(port, rows, "ddp") for rows in ([10, 11], list(range(10)))])
    nothing, everything = ranks
    assert nothing["losses"] == [0.0] * len(everything["losses"])
    assert nothing["connected"]
    for rank in ranks:
        torch.testing.assert_close(rank["moved"], alone["moved"], rtol=0, atol=1e-9)


# -- the sampler -------------------------------------------------------------------------------------------------------


class Prompts(LightningModule):
    """Turns to the other domain after its first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[list[str]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append(list(batch))
        self.trainer.train_dataloader.sampler.set_proportions({"a": 0.0, "b": 1.0})
        return self.layer(torch.ones(1)).sum()

    def train_dataloader(self) -> DataLoader:
        labels = ["a"] * 4 + ["b"] * 4
        return DataLoader(labels, 1, sampler=DomainMixtureSampler(labels, 1, proportions={"a": 1.0, "b": 0.0}))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def drawn(port: str) -> tuple[list[list[str]], str]:
    trainer = fit(port, module := Prompts())
    return module.seen, type(trainer.train_dataloader.sampler).__name__


def test_R048_a_default_trainer_of_two_ranks_leaves_the_sampler_and_its_changes_alone() -> None:
    for seen, kept in processes(2).run(drawn, [free_port()] * 2):
        assert kept == "DomainMixtureSampler"
        assert seen == [["a"], ["b"], ["b"], ["b"]]
