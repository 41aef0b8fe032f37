"""The numbers of a decision against loops in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lightning_dataflex import RolloutBatch
from lightning_dataflex.core.summary import REASONS as PLACES
from lightning_dataflex.core.summary import Summary, counting_alike, merged, reasons, row_numbers, scaled, summary

NAN = float("nan")
MASK = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 1, 1], [0, 0, 0]])
WEIGHTS = torch.tensor([[1.0, 2.0, 6.0], [4.0, NAN, NAN], [NAN, 0.0, 3.0], [NAN, NAN, NAN]])
ALL = torch.ones(4, dtype=torch.bool)


def batch(**more: Any) -> RolloutBatch:
    return RolloutBatch({"response_mask": MASK} | more)


def as_lists(numbers: dict[str, torch.Tensor]) -> dict[str, list[float]]:
    return {name: value.tolist() for name, value in numbers.items()}


@pytest.mark.parametrize("keep", ["samples", "tokens"])
def test_rows_of_token_weights_have_their_mean_and_deviation(keep: str) -> None:
    tokens = [[1, 2, 6], [4], [0, 3], []]
    kept = torch.tensor([True, False, True, True]) if keep == "samples" else torch.tensor([[True, False, True]] * 4)
    numbers = as_lists(row_numbers(batch(), kept, WEIGHTS, torch.tensor([True, True, False, False])))
    assert list(numbers) == ["num_tokens", "num_kept", "weight_mean", "weight_std", "scored"]
    assert numbers["num_tokens"] == [3, 1, 2, 0]
    assert numbers["num_kept"] == ([1, 0, 1, 0] if keep == "samples" else [2, 1, 1, 0])
    assert numbers["weight_mean"] == pytest.approx([np.mean(row) if row else 0 for row in tokens])
    assert numbers["weight_std"] == pytest.approx([np.std(row) if row else 0 for row in tokens])
    assert numbers["scored"] == [True, True, False, False]


def test_rows_of_sample_weights_are_the_weights() -> None:
    numbers = row_numbers(batch(), ALL, torch.tensor([0.5, 2.0, 0.0, 7.0]), ALL)
    assert as_lists(numbers) == {
        "num_tokens": [3, 1, 2, 0],
        "num_kept": [1, 1, 1, 0],
        "weight_mean": [0.5, 2, 0, 7],
        "weight_std": [0] * 4,
        "scored": [True] * 4,
    }
    kinds = {name: value.dtype for name, value in numbers.items()}
    assert kinds == {
        "num_tokens": torch.int32,
        "num_kept": torch.int32,
        "weight_mean": torch.float32,
        "weight_std": torch.float32,
        "scored": torch.bool,
    }


def test_a_batch_that_knows_lengths_alone_has_one_column_for_weights_and_all_its_tokens() -> None:
    lengths = RolloutBatch({"num_tokens": torch.tensor([5, 1, 0])})
    alone = row_numbers(lengths, torch.ones(3).bool(), torch.ones(3), torch.ones(3).bool())
    table = row_numbers(lengths, torch.ones(3).bool(), torch.ones(3, 1), torch.ones(3).bool())
    kept = row_numbers(lengths, torch.ones(3, 1).bool(), torch.ones(3), torch.ones(3).bool())
    assert alone["num_tokens"].tolist() == [5, 1, 0]
    assert table["num_tokens"].tolist() == kept["num_tokens"].tolist() == [1, 1, 0]


def test_rewards_groups_and_a_measure_are_of_each_row_where_there_are_any() -> None:
    rewards, measure = (
        torch.tensor([1.0, 0.0, NAN, 1.0]),
        torch.tensor([[1.0, 3.0, 0.0], [2.0, 0, 0], [0, 0, 0], [0] * 3]),
    )
    numbers = row_numbers(batch(rm_scores=rewards, uid=[7, 8, 7, 8]), ALL, WEIGHTS.nan_to_num(0.0), ALL, measure)
    np.testing.assert_array_equal(numbers["rm_scores"], [1, 0, NAN, NAN])
    assert numbers["rm_scores"].dtype == torch.float32
    assert numbers["uid"].tolist() == [7, 8, 7, 8]
    assert numbers["measure"].tolist() == [4, 2, 0, 0]
    assert numbers["measured"].tolist() == [(1 + 3 * 2) / 4, 4, 0, 0]
    assert numbers["measured"].dtype == numbers["measure"].dtype == torch.float32


def test_scaling_scales_what_is_a_weight_and_nothing_else() -> None:
    numbers = {
        "num_tokens": torch.tensor([2, 4]),
        "num_kept": torch.tensor([1, 0]),
        "weight_mean": torch.tensor([2.0, 3.0]),
        "weight_std": torch.tensor([1.0, 0.5]),
        "scored": torch.tensor([True, False]),
    }
    twice = scaled(numbers, torch.tensor(2.0))
    assert as_lists(twice) == as_lists(numbers) | {"weight_mean": [4, 6], "weight_std": [2, 1]}
    more = numbers | {"measured": torch.tensor([5.0, 1.0]), "measure": torch.tensor([1.0, 1.0])}
    assert scaled(more, torch.tensor(2.0))["measured"].tolist() == [10, 2]
    assert scaled(more, torch.tensor(2.0))["measure"].tolist() == [1, 1]
    alike = as_lists(counting_alike(numbers))
    assert alike == as_lists(numbers) | {"num_kept": [1, 0], "weight_mean": [1, 0], "weight_std": [0, 0]}


def token_by_token(mask: np.ndarray, weights: np.ndarray, keep: np.ndarray, scored: np.ndarray) -> dict[str, float]:
    tokens = weights[mask]
    means = np.array([row[ok].mean() for row, ok in zip(weights, mask) if ok.any()])
    valid = mask.any(1)
    kept = (keep & mask).sum() / mask.sum() if keep.ndim == 2 else (keep & valid).sum() / valid.sum()
    return {
        "kept_frac": kept,
        "weight_mean": tokens.mean(),
        "weight_std": tokens.std(),
        "ess": means.sum() ** 2 / (means**2).sum(),
        "n_nan": (valid & ~scored).sum(),
    }


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("of_tokens", [False, True])
def test_a_summary_is_that_of_all_tokens(seed: int, of_tokens: bool) -> None:
    rng = np.random.default_rng(seed)
    mask = np.arange(5) < rng.integers(0, 6, 8)[:, None]
    mask[0, 0] = True
    weights, scored = rng.exponential(size=mask.shape) * (rng.random(mask.shape) < 0.7), rng.random(8) < 0.6
    keep = rng.random((8, 5) if of_tokens else 8) < 0.5
    read = RolloutBatch({"response_mask": torch.tensor(mask)})
    numbers = row_numbers(read, torch.tensor(keep), torch.tensor(weights), torch.tensor(scored))
    got = summary(numbers, of_tokens=of_tokens)
    expected = token_by_token(mask, weights, keep, scored)
    assert list(got) == list(expected)
    assert {name: value.item() for name, value in got.items()} == pytest.approx(expected, abs=1e-6)
    assert all(value.dtype == torch.float32 and value.dim() == 0 for value in got.values())


def test_a_summary_of_nothing_is_zero() -> None:
    read = batch(response_mask=MASK * 0, rm_scores=torch.ones(4), uid=[1, 1, 2, 2])
    metrics = summary(row_numbers(read, ~ALL, torch.zeros(4), ~ALL), of_tokens=False)
    assert not any(value.item() for value in metrics.values())


# Of each group: rewards, which samples are kept, and which have a score; a reward of None is a sample without a token.
GROUPS = {
    "solved": ([1.0, 1.0], [0, 0], [1, 1]),
    "solved by a little": ([0.5001, 0.5001], [0, 0], [1, 0]),
    "failed at a half": ([0.5, 0.5], [0, 0], [1, 1]),
    "failed": ([0.0, 0.0], [0, 0], [1, 1]),
    "failed, and padding": ([0.0, None], [0, 1], [1, 1]),
    "rule": ([1.0, 0.0], [0, 0], [0, 1]),
    "no score": ([1.0, 0.0], [0, 0], [0, 0]),
    "no score, all alike": ([1.0, 1.0], [0, 0], [0, 0]),
    "no reward": ([NAN, NAN], [0, 0], [0, 0]),
    "kept": ([1.0, 0.0], [0, 1], [1, 1]),
    "kept, all alike": ([1.0, 1.0], [1, 1], [1, 1]),
    "nothing but padding": ([None, None], [0, 0], [0, 0]),
}
REASONS = {
    "dropped_solved": ["solved", "solved by a little"],
    "dropped_failed": ["failed at a half", "failed", "failed, and padding"],
    "dropped_rule": ["rule"],
    "dropped_nan": ["no score", "no score, all alike", "no reward"],
}


def of_groups(names: list[str]) -> dict[str, torch.Tensor]:
    rows = [(i, *row) for i, name in enumerate(names) for row in zip(*GROUPS[name])]
    uid, rewards, kept, has_score = zip(*rows)
    return {
        "num_tokens": torch.tensor([0 if reward is None else 2 for reward in rewards]),
        "num_kept": torch.tensor(kept),
        "weight_mean": torch.tensor(kept).float(),
        "weight_std": torch.zeros(len(rows)),
        "scored": torch.tensor(has_score).bool(),
        "rm_scores": torch.tensor([NAN if reward is None else reward for reward in rewards]),
        "uid": torch.tensor(uid) * 10,
    }


def test_dropped_groups_are_counted_by_reason() -> None:
    metrics = summary(of_groups(list(GROUPS)), of_tokens=False)
    for reason, names in REASONS.items():
        assert metrics[reason] == len(names)
    for name in GROUPS:
        alone = summary(of_groups([name]), of_tokens=False)
        assert {reason for reason in REASONS if alone[reason]} == {r for r, names in REASONS.items() if name in names}
    quiet = [name for name in GROUPS if summary(of_groups([name]), of_tokens=False)["frac_zero_std"] == 1]
    assert quiet == [
        "solved",
        "solved by a little",
        "failed at a half",
        "failed",
        "failed, and padding",
        "no score, all alike",
        "no reward",
        "kept, all alike",
    ]
    assert metrics["frac_zero_std"].item() == pytest.approx(len(quiet) / (len(GROUPS) - 1))


def test_each_sample_has_the_reason_of_its_group_or_its_own() -> None:
    """A dropped sample that has a score: that of its group if all of it is dropped without a signal; else the rule."""
    for name, (rewards, kept, has_score) in GROUPS.items():
        whole = {row: reason for reason, row in (("solved", "dropped_solved"), ("failed", "dropped_failed"))}
        of_group = next((whole[row] for row in whole if name in REASONS[row]), "rule")
        expected = [
            "kept" if k else "nan" if not s else "rule" if reward is None else of_group
            for reward, k, s in zip(rewards, kept, has_score)
        ]
        assert [PLACES[i] for i in reasons(of_groups([name]))] == expected, name
    apart = torch.cat([reasons(of_groups([name])) for name in GROUPS])
    assert reasons(of_groups(list(GROUPS))).tolist() == apart.tolist()
    without = {name: value for name, value in of_groups(["solved", "no score"]).items() if name != "uid"}
    assert [PLACES[i] for i in reasons(without)] == ["rule", "rule", "nan", "nan"]


def test_rewards_are_averaged_over_those_that_have_one_and_those_that_stay() -> None:
    metrics = summary(of_groups(list(GROUPS)), of_tokens=False)
    rows = [row for name in GROUPS for row in zip(*GROUPS[name]) if row[0] is not None and row[0] == row[0]]
    assert metrics["reward_all"].item() == pytest.approx(np.mean([row[0] for row in rows]))
    assert metrics["reward_kept"].item() == pytest.approx(np.mean([row[0] for row in rows if row[1]]))
    # Without groups there are rewards still.
    ungrouped = {name: value for name, value in of_groups(["rule", "kept"]).items() if name != "uid"}
    assert list(summary(ungrouped, of_tokens=False))[5:] == ["reward_all", "reward_kept"]


def test_decisions_of_a_step_are_one_on_all_their_samples() -> None:
    solved, failed = of_groups(["solved", "kept"]), of_groups(["failed", "kept", "rule"])
    together = merged([Summary(solved, False), Summary(failed, False)])
    apart = of_groups(["solved", "kept", "failed", "kept", "rule"])
    assert {k: v.item() for k, v in together.items()} == {
        k: v.item() for k, v in summary(apart, of_tokens=False).items()
    }
    assert merged([]) == {}
    without = {name: value for name, value in failed.items() if name not in ("uid", "rm_scores")}
    assert list(merged([Summary(solved, False), Summary(without, False)])) == list(summary(without, of_tokens=False))
    half = {name: value.repeat(2) for name, value in without.items()} | {"num_kept": torch.tensor([1] * 12)}
    assert merged([Summary(half, True)])["kept_frac"].item() == pytest.approx(12 / 24)
    assert merged([Summary(half, True), Summary(half, True)])["kept_frac"].item() == pytest.approx(12 / 24)


@pytest.mark.parametrize(
    ("uid", "kept", "size", "expected"),
    [
        ([7, 7, 8, 8], [0, 1, 0, 0], None, 1),
        ([7, 7, 8, 8], [0, 2, 1, 1], None, 2),
        ([7, 7, 7, 7, 8, 8], [0, 0, 0, 1, 0, 0], 2, 2),
        ([7, 7, 7, 7, 8, 8], [0, 0, 0, 1, 0, 1], 2, 3),
        ([7, 7], [0, 0], 2, 0),
    ],
)
def test_groups_that_are_kept_are_counted(uid: list[int], kept: list[int], size: int | None, expected: int) -> None:
    numbers = {"uid": torch.tensor(uid), "num_kept": torch.tensor(kept)}
    num = Summary(numbers, of_tokens=False).num_groups_kept(size)
    assert (num, type(num)) == (expected, int)


def test_kept_tokens_are_their_own_weights() -> None:
    keep = torch.tensor([[True, False, True]] * 4)
    numbers = as_lists(row_numbers(batch(), keep, keep, ALL))
    weights = as_lists(row_numbers(batch(), keep, keep.float(), ALL))
    assert numbers["weight_mean"] == pytest.approx([2 / 3, 1, 1 / 2, 0])
    assert numbers["weight_std"] == pytest.approx([np.std([1, 0, 1]), 0, 0.5, 0])
    assert numbers == {name: pytest.approx(values) for name, values in weights.items()}
