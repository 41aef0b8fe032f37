"""What becomes of what an author's `act` gives: places, types, scale, and what is refused."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch

from lightning_dataflex import Mixer, Reweighter, RolloutBatch, Selector
from lightning_dataflex.core.actuator import Actuator
from lightning_dataflex.core.rows import check_length, checked_index, measure_of, scored_rows, tokens_of

NAN, INF = float("nan"), float("inf")
MASK = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0], [1, 1, 0]])
BATCH = {"response_mask": MASK, "x": torch.tensor([1.0, NAN, 1.0, 1.0])}
SCORES = torch.tensor([1.0, 2.0, 3.0, 4.0])


class Keeps(Selector):
    """Gives what it is told to."""

    def __init__(self, given: Any) -> None:
        self.given = given

    def act(self, scores: Any, batch: Any, **ctx: Any) -> Any:
        return self.given


class Weighs(Reweighter):
    """Gives what it is told to, or the scores."""

    def __init__(self, given: Any = None, normalize: Any = None) -> None:
        super().__init__(normalize)
        self.given = given

    def act(self, scores: Any, batch: Any, **ctx: Any) -> Any:
        return scores if self.given is None else self.given


def test_an_actuator_is_what_it_says_and_nothing_else_of_itself() -> None:
    said = {
        "requires": (),
        "granularities": ("prompt", "response", "token"),
        "needs_groups": False,
        "any_estimator": False,
        "row_wise": False,
        "changes_advantages": False,
        "signals": (),
        "screened": None,
        "remembers": False,
        "needs_progress": False,
        "default_scorer": "",
        "paper": "",
    }
    assert {name: getattr(Actuator, name) for name in said} == said
    of_domains = {"granularities": ("domain", "prompt", "response", "token"), "needs_data": True, "window": 50}
    of_domains |= {"domains": (), "default_scorer": "reward_difficulty"}
    assert {name: getattr(Mixer, name) for name in of_domains} == of_domains
    assert Reweighter.normalize == "tokens"
    rule, batch = Keeps([]), RolloutBatch(BATCH)
    assert (rule.columns(batch), rule.state_dict(), rule.load_state_dict({})) == ({}, {}, None)
    assert rule.advantages(torch.ones(4).bool(), batch) is None
    assert type("Reads", (Keeps,), {"requires": ("x",)})([]).columns(batch) is None


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([0, 2], [0, 3]),
        ([], []),
        (torch.tensor([1]), [1]),
        (np.array([2, 0]), [0, 3]),
        (torch.tensor([True, False, True]), [0, 3]),
        ([True, True, True], [0, 1, 3]),
    ],
)
def test_what_is_kept_stands_at_its_place_in_the_whole_batch(given: Any, expected: list[int]) -> None:
    assert Keeps(given).act(SCORES, BATCH) == expected
    assert Keeps(given).keep(SCORES, BATCH).nonzero().flatten().tolist() == expected


def test_a_rule_keeps_its_name_and_its_text() -> None:
    class Says(Selector):
        def act(self, scores: Any, batch: Any, **ctx: Any) -> Any:
            """What it does."""
            return []

    assert (Says.act.__name__, Says.act.__doc__) == ("act", "What it does.")


def test_what_is_kept_of_tokens_is_a_mask_without_padding() -> None:
    every = torch.ones(3, 3, dtype=torch.bool)
    table = torch.ones(4, 3)
    assert Keeps(every).act(table, BATCH).tolist() == MASK.bool().tolist()
    assert Keeps(every[:, :1]).keep(table[:3, :1], {"x": torch.ones(3)}).tolist() == [[True]] * 3
    nobody = Keeps(every).keep(torch.full((4, 3), NAN), BATCH)
    assert (nobody.any().item(), nobody.dtype, nobody.shape) == (False, torch.bool, (4, 3))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([0, 0], r"^Keeps\.act returned \[0, 0\]\. Return each index to keep once"),
        ([0.0, 1.0], r"^Keeps\.act returned \[0\.0, 1\.0\]\. Return each index"),
        (1.0, r"^Keeps\.act returned 1\.0\. Return the indices to keep, or a boolean mask"),
        ([3], r"^Keeps\.act returned indices 3 to 3 of 3 samples"),
        ([-1, 2], "returned indices -1 to 2 of 3 samples"),
        (torch.ones(4).bool(), r"^Keeps\.act returned shape \(4,\) for 3 samples"),
        (torch.tensor(True), r"^Keeps\.act returned shape \(\) for 3 samples"),
    ],
)
def test_what_cannot_be_kept_is_refused(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Keeps(given).act(SCORES, BATCH)
    assert checked_index(Keeps([]), torch.tensor([2, 0], dtype=torch.int32), 3).dtype == torch.int64
    assert checked_index(Keeps([]), torch.tensor([]), 0).tolist() == []
    assert check_length(Keeps([]), torch.ones(4, 1), RolloutBatch(BATCH)) is None


def test_scores_are_one_for_each_sample_and_nothing_in_padding() -> None:
    batch, scores, rows = scored_rows(None, [1.0, NAN])
    assert (batch.num_samples, scores.shape, rows.tolist()) == (2, (2,), [True, False])
    table = torch.tensor([[1.0, 1, 1], [1, NAN, NAN], [NAN] * 3, [NAN, 1, 1]])
    _, cleaned, rows = scored_rows(BATCH, table)
    assert cleaned[:3].tolist() == [[1, 1, 1], [1, 0, 0], [0, 0, 0]]
    assert rows.tolist() == [True, True, False, False]
    assert scored_rows(BATCH, SCORES, ["x"])[2].tolist() == [True, False, False, True]
    assert scored_rows(BATCH, SCORES)[2].tolist() == [True, True, False, True]
    with pytest.raises(ValueError, match=r"^There are 3 scores for 4 samples\. Give one per sample"):
        scored_rows(BATCH, SCORES[:3])


def test_tokens_that_a_weight_stands_for() -> None:
    batch, bare = RolloutBatch(BATCH), RolloutBatch({"x": torch.ones(2)})
    assert tokens_of(batch, torch.ones(4)).tolist() == [3, 1, 0, 2]
    assert tokens_of(batch, torch.ones(4, 3)).tolist() == MASK.tolist()
    assert tokens_of(bare, torch.zeros(2, 5)).tolist() == [[1] * 5] * 2


def test_what_counts_in_a_mean_that_is_to_be_one() -> None:
    read = RolloutBatch(BATCH | {"advantages": torch.tensor([[-2.0, 1, NAN], [3, NAN, NAN], [NAN] * 3, [INF, 1, 1]])})
    assert measure_of(read, torch.ones(4), "tokens") is None
    assert measure_of(read, torch.ones(4), "none") is None
    assert measure_of(read, torch.ones(4), "samples").tolist() == [1, 1, 0, 1]  # type: ignore[union-attr]
    samples = measure_of(read, torch.ones(4, 3), "samples")
    np.testing.assert_allclose(samples, [[1 / 3] * 3, [1, 0, 0], [0, 0, 0], [0.5, 0.5, 0]])
    of_tokens = [[2, 1, 0], [3, 0, 0], [0, 0, 0], [0, 1, 0]]
    assert measure_of(read, torch.ones(4, 3), "abs_advantage").tolist() == of_tokens  # type: ignore[union-attr]
    assert measure_of(read, torch.ones(4), "abs_advantage").tolist() == [3, 3, 0, 1]  # type: ignore[union-attr]
    each = RolloutBatch(BATCH | {"advantages": torch.tensor([-2.0, 1, 5, 3])})
    assert measure_of(each, torch.ones(4), "abs_advantage").tolist() == [6, 1, 0, 6]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("normalize", "expected"),
    [
        ("tokens", [6 / 13, 12 / 13, 0, 24 / 13]),
        ("samples", [3 / 7, 6 / 7, 0, 12 / 7]),
        ("none", [1, 2, 0, 4]),
        ("abs_advantage", [7 / 15, 14 / 15, 0, 28 / 15]),
    ],
)
def test_weights_are_scaled_over_what_is_asked_for(normalize: str, expected: list[float]) -> None:
    # Three, one and two tokens of weights 1, 2 and 4; advantages of 1, 2, 9 and 1.
    batch = BATCH | {"advantages": torch.tensor([1.0, 2.0, 9.0, 1.0])}
    np.testing.assert_allclose(Weighs(normalize=normalize).act(SCORES, batch), expected, rtol=1e-6)
    assert Weighs(normalize=normalize).weighed(*scored_rows(batch, SCORES)).tolist() == [1, 2, 0, 4]


def test_a_scale_is_one_of_those_that_there_are() -> None:
    assert Weighs().normalize == "tokens"
    with pytest.raises(ValueError, match=r"^normalize is 'rows'\. Use one of tokens, samples, abs_advantage, none"):
        Weighs(normalize="rows")
    with pytest.raises(ValueError, match=r"^Own\.normalize is 'rows'"):
        type("Own", (Weighs,), {"normalize": "rows"})


def test_weights_of_tokens_are_nothing_in_padding_and_nan_is_nothing() -> None:
    given = torch.tensor([[1.0, NAN, 3.0], [2.0, NAN, INF], [1.0, 1.0, 9.0]])
    rule = Weighs(given, "none")
    assert rule.act(torch.ones(4, 3), BATCH).tolist() == [[1, 0, 3], [2, 0, 0], [0, 0, 0], [1, 1, 0]]
    scaled = Weighs(given).act(torch.ones(4, 3), BATCH)
    np.testing.assert_allclose(scaled, np.array([[1, 0, 3], [2, 0, 0], [0, 0, 0], [1, 1, 0]]) * 6 / 8)


@pytest.mark.parametrize(
    ("given", "normalize", "message"),
    [
        ([1.0, -0.5, 1.0], None, r"^Weighs\.act gave a weight of -0\.5\. Weights must be >= 0"),
        ([1.0, INF, 1.0], "none", r"^Weighs gave an infinite weight\. Weights must be finite"),
        (np.array([1, 1e300, 1]), "none", r"^Weighs gave a weight of 1e\+300, infinite in float32\. Weights must be"),
        ([1.0, 1.0], None, r"^Weighs\.act returned shape \(2,\) for 3 samples"),
        ([[1.0, 1.0]] * 3, None, r"^Weighs\.act returned shape \(3, 2\) for 3 samples"),
        ([[[1.0]]] * 3, None, r"^Weighs\.act returned shape \(3, 1, 1\) for 3 samples"),
        (1.0, None, r"^Weighs\.act returned shape \(\) for 3 samples"),
    ],
)
def test_what_is_no_weight_is_refused(given: Any, normalize: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Weighs(given, normalize).act(SCORES, BATCH)


def test_an_infinite_weight_takes_everything_and_no_weight_at_all_is_told_of() -> None:
    np.testing.assert_allclose(Weighs([1.0, INF, 1.0]).act(SCORES, BATCH), [0, 6, 0, 0], atol=1e-37)
    for zeros, none in (([0.0] * 3, False), ([0.0] * 3, True)):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            got = Weighs(zeros, "none" if none else None).act(SCORES, BATCH)
        assert got.tolist() == ([0] * 4 if none else [1, 1, 0, 1])
        assert len(said) == (0 if none else 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Weighs().act(torch.full((4,), NAN), BATCH).tolist() == [0] * 4
        assert Weighs().act(torch.full((4, 3), NAN), BATCH).tolist() == [[0] * 3] * 4
