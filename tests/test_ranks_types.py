"""What a rule reads is of the type that it has on one process, whatever travels; and odd batches are no trap."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from torchmetrics import MetricCollection

from lightning_dataflex import Pipeline, Scorer, Selector, build
from lightning_dataflex.core.ids import stable_ids
from tests.ranks import processes, taken


class Plain(Scorer):
    """Plain code on one field."""

    granularity = "response"

    def __init__(self, field: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.field = field
        self.requires = (field, "response_mask")

    def score(self, batch: Any, step_id: int = 0, **ctx: Any) -> torch.Tensor:
        values = batch[self.field]
        if self.field in ("uid", "numbers"):
            places = defaultdict(list)
            for i, value in enumerate(values):
                places[value].append(i)
            return torch.tensor([float(len(places[value])) for value in values])
        if self.field == "ragged":
            return torch.tensor([float(len(value)) for value in values])
        if self.field == "objects":
            return torch.as_tensor((values == "math").astype(np.float32))
        if self.field == "temperature":
            return torch.full((batch.num_samples,), values)
        return torch.tensor([float(value - 1.7e9) for value in values])


def whole() -> dict[str, Any]:
    return {
        "response_mask": torch.ones(6, 3),
        "uid": [7, 7, 8, 8, 8, 9],
        "numbers": np.array([7, 7, 8, 8, 8, 9]),
        "ragged": [[1, 2], [1, 2], [3, 4], [1, 2, 3], [1, 2, 3], [4, 5, 6]],
        "objects": np.array(["math", "code", "math", "code", "math", "code"], dtype=object),
        "times": [1.7e9 + i for i in range(6)],
    }


FIELDS = ("uid", "numbers", "ragged", "objects", "times", "temperature")


def scores_of(batch: dict[str, Any]) -> dict[str, list[float]]:
    batch = batch | {"temperature": 0.5}
    top = {"mechanism": "select", "actuator": "topk_fraction"}
    return {name: Pipeline.from_config(top | {"scorer": Plain(name)}).decide(batch).scores.tolist() for name in FIELDS}


SPREADS = [[[0, 1, 2], [3, 4, 5]], [[], [0, 1, 2, 3, 4, 5]], [[0], [1, 2], [], [3, 4, 5]]]


@pytest.mark.parametrize("rows_of", SPREADS, ids=str)
def test_plain_code_reads_the_types_of_one_process(rows_of: list[list[int]]) -> None:
    batch = whole()

    def part(rows: list[int]) -> dict[str, Any]:
        arrays = {name: value[rows] for name, value in batch.items() if isinstance(value, np.ndarray)}
        return taken({name: value for name, value in batch.items() if name not in arrays}, rows) | arrays

    alone = scores_of(batch)
    ranks = processes(len(rows_of)).run(scores_of, [part(rows) for rows in rows_of])
    for name in FIELDS:
        assert [score for rank in ranks for score in rank[name]] == alone[name], name


def test_a_metric_reads_them_too() -> None:
    scorer = Plain("uid")
    for rows in ([0, 1, 2], [3, 4, 5]):
        scorer.update({name: whole()[name][rows[0] : rows[-1] + 1] for name in ("uid", "response_mask")})
    assert scorer.compute().tolist() == [2, 2, 3, 3, 3, 1]


def band(batch: dict[str, Any]) -> list[float]:
    block = {"mechanism": "select", "scorer": "group_solve_rate", "actuator": "threshold_band"}
    return Pipeline.from_config(block).decide(batch).scores.tolist()


def rewarded(uid: Any, rewards: list[float]) -> dict[str, Any]:
    return {"uid": uid, "rm_scores": torch.tensor(rewards), "response_mask": torch.ones(len(rewards), 2)}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([frozenset("abc")], [frozenset("cba")]),
        ([np.int64(3)], [3]),
        ([("m", np.int64(1))], [("m", 1)]),
        ([np.str_("x")], ["x"]),
        ([torch.tensor(3)], [3]),
        ([True], [1]),
        (torch.tensor([3.0]), torch.tensor([3])),
        (np.array([3], dtype=np.uint64), np.array([3])),
        ([2**70], [2**70]),
        (np.array(["a"], dtype=object), ["a"]),
        (np.arange(4)[3:], np.array([[3, 9]])[:, 0]),
    ],
    ids=str,
)
def test_equal_ids_are_one_group_wherever_they_are(first: Any, second: Any) -> None:
    ranks = processes(2).run(band, [rewarded(first, [1.0]), rewarded(second, [0.0])])
    assert ranks == [[0.5], [0.5]]


def test_ids_are_the_same_in_every_run() -> None:
    code = "from lightning_dataflex.core.ids import stable_ids; "
    code += "print(stable_ids([frozenset('abc'), 'a', ('b', 1)]).tolist())"
    runs = {
        subprocess.run(
            [sys.executable, "-c", code], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, text=True
        ).stdout
        for seed in ("1", "2")
    }
    assert runs == {f"{stable_ids([frozenset('abc'), 'a', ('b', 1)]).tolist()}\n"}


class Own:
    pass


def test_ids_without_a_text_of_their_own_are_refused() -> None:
    with pytest.raises(ValueError, match="which has another text on every rank"):
        stable_ids([Own()])


class RowWise(Scorer):
    """Fails on no rows."""

    requires = ("rm_scores", "response_mask")
    granularity = "response"
    row_wise = True

    def score(self, batch: Any, step_id: int = 0, **ctx: Any) -> torch.Tensor:
        return torch.stack([row.sum() for row in batch.batch["rm_scores"]])


class Tokens(Selector):
    """Of all ranks' tokens, those above the median."""

    granularities = ("token",)
    requires = ("response_mask",)

    def act(self, scores: torch.Tensor, batch: Any, **ctx: Any) -> torch.Tensor:
        return scores > scores.median()


def decided(batch: dict[str, Any]) -> list[tuple[list, list]]:
    gfpo = {"name": "gfpo", "params": {"k": 1, "advantages": "group"}}
    blocks = [
        {"mechanism": "select", "scorer": "reward_difficulty", "actuator": gfpo, "scope": "rank"},
        {"mechanism": "select", "scorer": RowWise(), "actuator": "threshold_band"},
        {"mechanism": "select", "scorer": "token_prob", "actuator": Tokens()},
        {"mechanism": "reweight", "scorer": "group_reward_variance", "actuator": "softmax"},
    ]
    decisions = [Pipeline.from_config(block).decide(batch) for block in blocks]
    return [(decision.keep.tolist(), decision.weights.tolist()) for decision in decisions]


def test_a_rank_without_samples_may_be_wider_and_its_arrays_empty() -> None:
    full = rewarded(["a", "a", "b"], [1.0, 0.0, 0.5]) | {"old_log_probs": -torch.rand(3, 2)}
    empty = {
        "uid": np.array([], dtype=np.int64),
        "rm_scores": torch.from_numpy(np.zeros(0, dtype=np.float32)),
        "response_mask": torch.zeros(0, 7),
        "old_log_probs": torch.zeros(0, 7),
    }
    first, second = processes(2).run(decided, [full, empty])
    assert first == decided(full)
    assert all(keep == [] and weights == [] for keep, weights in second)


def test_a_field_of_another_length_is_refused_on_every_rank() -> None:
    # 2 and 4 rows for 3 and 3 samples: together they would fit.
    parts = [{"response_mask": torch.ones(3, 1), "uid": ["a"] * n} for n in (2, 4, 3, 3)]
    short, long, *others = processes(4).run(refusal, parts)
    assert short.startswith("uid has 2 rows but the rollout batch has 3 samples")
    assert long.startswith("uid has 4 rows but the rollout batch has 3 samples")
    assert all(text.startswith("Rank 0 could not give its part of the global batch.") for text in others)


def refusal(batch: dict[str, Any]) -> str:
    try:
        Pipeline.from_config({"mechanism": "select", "scorer": Plain("uid"), "actuator": "topk_fraction"}).decide(batch)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "none"


def test_a_collection_does_not_take_one_scorer_for_another() -> None:
    both = MetricCollection({agg: build("scorer", "advantage_magnitude", agg=agg) for agg in ("mean", "sum")})
    for size in (0.0, 1.0):
        both.update({"advantages": torch.full((2, 3), size), "response_mask": torch.ones(2, 3)})
    scores = {name: value.tolist() for name, value in both.compute().items()}
    assert scores == {"mean": [0, 0, 1, 1], "sum": [0, 0, 3, 3]}


def test_a_rule_that_reads_what_it_does_not_declare_is_told_so() -> None:
    class Undeclared(Scorer):
        requires = ("response_mask",)

        def score(self, batch: Any, step_id: int = 0, **ctx: Any) -> torch.Tensor:
            return batch["scoers"]

    with pytest.raises(KeyError, match="add it to requires"):
        Undeclared().score({"response_mask": torch.ones(1, 1)})
