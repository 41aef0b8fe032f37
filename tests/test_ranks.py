"""One global batch: real gloo processes decide what one process decides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from lightning_dataflex import DataFlexCallback, Pipeline, Scorer, Selector, build
from lightning_dataflex.functional.loss import loss_denominator
from lightning_dataflex.functional.selection import top_fraction
from tests.toy import LR, Toy, fit, gradient, kept_rows, policy, rollout

NUM_SAMPLES = 12


class PlainRate(Scorer):
    """A group mean in plain single-process code."""

    requires = ("rm_scores", "response_mask", "uid")
    needs_groups = True

    def score(self, batch: Any, step_id: int = 0, **ctx: Any) -> torch.Tensor:
        rewards = (batch.batch["rm_scores"] * batch.batch["response_mask"]).sum(-1)
        uid = np.asarray(batch.non_tensor_batch["uid"])
        out = torch.zeros_like(rewards)
        for group in np.unique(uid):
            rows = np.where(uid == group)[0]
            out[rows] = rewards[rows].mean()
        return out


class PlainTop(Selector):
    """Reads a field of strings."""

    requires = ("domain",)

    def act(self, scores: torch.Tensor, batch: Any, **ctx: Any) -> list[int]:
        math = torch.tensor([domain == "math" for domain in batch["domain"]])
        return top_fraction(torch.where(math, scores, -1.0), 0.5).nonzero().flatten().tolist()


class PlainAdvantage(Selector):
    """Reads a field of which the scorer beside it exchanges a number alone."""

    requires = ("advantages",)

    def act(self, scores: torch.Tensor, batch: Any, **ctx: Any) -> torch.Tensor:
        return batch.batch["advantages"].sum(-1) > 0


class PlainIds(Scorer):
    """Reads a field that is wider than the responses."""

    requires = ("input_ids", "response_mask")

    def score(self, batch: Any, step_id: int = 0, **ctx: Any) -> torch.Tensor:
        return batch["input_ids"].sum(-1) + batch["response_mask"].sum(-1)


class FromRate(type(build("scorer", "group_solve_rate"))):
    """Inherits the numbers of its base but reads something else."""

    requires = ("old_log_probs", "response_mask")
    needs_groups = False

    def score(self, batch: Any, step_id: int = 0, **ctx: Any) -> torch.Tensor:
        return batch.batch["old_log_probs"].sum(-1)


def whole() -> dict[str, Any]:
    batch = rollout(7, NUM_SAMPLES)
    order = torch.tensor([0, 5, 2, 9, 4, 1, 6, 11, 8, 3, 10, 7])  # groups are spread over ranks
    batch = {key: value[order] for key, value in batch.items()}
    names = [f"prompt-{i}" for i in batch["uid"].tolist()]
    ids = torch.arange(NUM_SAMPLES)[:, None] * torch.arange(9) % 7
    return batch | {
        "input_ids": ids,
        "uid": names,
        "domain": ["math" if i % 3 else "logic" for i in range(NUM_SAMPLES)],
    }


PAIRS: dict[str, tuple[Any, Any, str]] = {
    "band": ("group_solve_rate", "threshold_band", "select"),
    "top": ("advantage_magnitude", "topk_fraction", "select"),
    "gfpo": ("reward_difficulty", {"name": "gfpo", "params": {"k": 1}}, "select"),
    "variance": ("reward_difficulty", "max_variance", "select"),
    "softmax": ("advantage_magnitude", "softmax", "reweight"),
    "quantiles": ("advantage_magnitude", "difficulty_band", "reweight"),
    "tokens": ("token_prob", "advantage_reweight", "reweight"),
    "power": ("advantage_magnitude", "per_advantage", "reweight"),
    "plain": (PlainRate(), PlainTop(), "select"),
    "plain actuator": ("advantage_magnitude", PlainAdvantage(), "select"),
    "plain scorer": (PlainRate(), {"name": "gfpo", "params": {"k": 1, "advantages": "group"}}, "select"),
    "wide field": (PlainIds(), "topk_fraction", "select"),
    "subclass": (FromRate(), "softmax", "reweight"),
}


def pipeline(name: str) -> Pipeline:
    scorer, actuator, mechanism = PAIRS[name]
    return Pipeline.from_config({"mechanism": mechanism, "scorer": scorer, "actuator": actuator})


def part_of(batch: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
    """Some rows, cut to the longest response among them, as a rank would hold them."""
    rows = {key: value[start:stop] for key, value in batch.items()}
    width = max(int(rows["response_mask"].sum(-1).max()) if stop > start else 1, 1)
    wide = ("advantages", "old_log_probs", "response_mask", "rm_scores", "actions", "features")
    return {key: value[:, :width] if key in wide else value for key, value in rows.items()}


def _decide(rank: int, world: int, cuts: list[int], folder: str) -> None:
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=world)
    mine = part_of(whole(), cuts[rank], cuts[rank + 1])
    decisions = {name: pipeline(name).decide(mine) for name in PAIRS}
    decisions |= {"all": pipeline("band").keep_all(mine)}
    result = {name: (d.scores, d.keep, d.weights, d.advantages, d.metrics, d.num_kept) for name, d in decisions.items()}
    result["denominator"] = loss_denominator(mine["response_mask"], "token-mean")
    torch.save(result, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("cuts", [[0, 6, 12], [0, 1, 12], [0, 0, 12], [0, 3, 3, 7, 12]], ids=str)
def test_decisions_are_those_of_one_process(cuts: list[int], tmp_path: Path) -> None:
    world = len(cuts) - 1
    mp.spawn(_decide, (world, cuts, str(tmp_path)), nprocs=world)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(world)]
    for name in (*PAIRS, "all"):
        alone = pipeline("band").keep_all(whole()) if name == "all" else pipeline(name).decide(whole())
        for rank, (scores, keep, weights, advantages, metrics, num_kept) in enumerate(r[name] for r in ranks):
            rows, width = slice(cuts[rank], cuts[rank + 1]), weights.shape[1]
            expected = alone.scores[rows] if scores.dim() == 1 else alone.scores[rows, :width]
            torch.testing.assert_close(scores.double(), expected.double(), atol=1e-6, rtol=0, equal_nan=True, msg=name)
            assert torch.equal(keep, alone.keep[rows]), name
            torch.testing.assert_close(weights, alone.weights[rows, :width], atol=1e-6, rtol=0)
            if advantages is not None:
                torch.testing.assert_close(advantages, alone.advantages[rows], atol=1e-6, rtol=0, check_dtype=False)
            assert num_kept == alone.num_kept
            assert list(metrics) == list(alone.metrics)
            for key, value in metrics.items():
                assert float(value) == pytest.approx(float(alone.metrics[key]), abs=1e-6), (name, key)
    assert [float(r["denominator"]) for r in ranks] == [float(whole()["response_mask"].sum()) / world] * world


class GlobalToy(Toy):
    """Divides by the tokens of all ranks."""

    def _loss(self, batch: dict[str, Any]) -> torch.Tensor:
        from tests.toy import per_token

        losses = per_token(self.linear, batch) * batch["rollout_is_weights"]
        return losses.sum() / loss_denominator(batch["response_mask"], "token-mean")


class OneBatchPerRank(torch.utils.data.Dataset):
    def __init__(self, parts: list[dict[str, Any]]) -> None:
        self.parts = parts

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.parts[index]


def _fit(rank: int, folder: str, solved: bool) -> None:
    import os

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29541", "WORLD_SIZE": "2", "NODE_RANK": "0"}
    os.environ |= {"LOCAL_RANK": str(rank), "RANK": str(rank), "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    os.environ["TORCHELASTIC_RUN_ID"] = "test"
    module = GlobalToy()
    callback = DataFlexCallback("select", "group_solve_rate", "threshold_band")
    parts = two_parts(solved)
    fit(module, [callback], [parts[rank]] * 2, strategy="ddp", devices=2, use_distributed_sampler=False)
    torch.save(module.linear.weight.detach(), f"{folder}/{rank}.pt")


def two_parts(solved: bool) -> list[dict[str, Any]]:
    """A group is spread over the ranks; or the first rank has failed groups alone and keeps nothing."""
    batch = rollout(0)
    if solved:
        batch["rm_scores"][:4] = 0.0
        return [{k: v[:4] for k, v in batch.items()}, {k: v[4:] for k, v in batch.items()}]
    return [{k: v[:3] for k, v in batch.items()}, {k: v[3:] for k, v in batch.items()}]


@pytest.mark.parametrize("solved", [False, True], ids=["split group", "one rank keeps nothing"])
def test_ddp_trains_as_one_process_does(solved: bool, tmp_path: Path) -> None:
    mp.spawn(_fit, (str(tmp_path), solved), nprocs=2)
    parts = two_parts(solved)
    batch = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
    keep, mask = kept_rows(batch)[:, None], batch["response_mask"].numpy()
    weight = policy().weight.detach().numpy().copy()
    for _ in range(2):
        weight -= LR * gradient(weight, batch, keep * mask, keep * mask)
    for rank in range(2):
        np.testing.assert_allclose(torch.load(tmp_path / f"{rank}.pt").numpy(), weight, atol=1e-6)
