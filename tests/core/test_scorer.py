"""What a Scorer makes of an author's `score`: rows, shapes, types, what it collects and what it says."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch

from lightning_dataflex import RolloutBatch, Scorer, build
from lightning_dataflex.core.scorer import METRIC_OPTIONS, checked_scores, scores_on
from lightning_dataflex.core.tidy import TidyBatch
from tests.given import BATCH, MASK, Given

NAN, INF = float("nan"), float("inf")


class OfTokens(Given):
    granularity = "token"

    def score(self, batch: Any, step_id: int = 0, **ctx: Any) -> Any:
        return torch.ones(batch.num_samples, 3) if self.given is None else self.given


def test_a_rule_sees_the_rows_that_count_and_the_others_have_no_score() -> None:
    np.testing.assert_array_equal(Given().score(BATCH), [1, 2, NAN, 4])
    np.testing.assert_array_equal(Given().score(BATCH | {"x": torch.tensor([NAN, 2.0, 3.0, INF])}), [NAN, 2, NAN, INF])
    empty = BATCH | {"response_mask": MASK * 0}
    np.testing.assert_array_equal(Given().score(empty), [NAN] * 4)
    np.testing.assert_array_equal(OfTokens().score(empty), np.full((4, 3), NAN))
    np.testing.assert_array_equal(OfTokens().score(BATCH), [[1, 1, 0], [1, 0, 0], [NAN] * 3, [1, 1, 1]])


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        (torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64), torch.float64),
        (torch.tensor([1.0, 2.0, 4.0], dtype=torch.bfloat16), torch.float32),
        (torch.tensor([1, 2, 4]), torch.float32),
        ([1, 2, 4], torch.float32),
        (np.array([1.0, 2.0, 4.0]), torch.float64),
        (torch.tensor([[1.0], [2.0], [4.0]]), torch.float32),
        (torch.tensor([1.0, 2.0, 4.0], requires_grad=True), torch.float32),
    ],
)
def test_scores_are_of_one_kind(given: Any, dtype: torch.dtype) -> None:
    scores = Given(given).score(BATCH)
    np.testing.assert_array_equal(scores, [1, 2, NAN, 4])
    assert (scores.dtype, scores.requires_grad) == (dtype, False)


@pytest.mark.parametrize(
    ("cls", "shape", "message"),
    [
        (Given, (), r"^Given\.score returned shape \(\) for 3 samples\. Return one per row"),
        (Given, (4,), r"^Given\.score returned shape \(4,\) for 3 samples"),
        (Given, (3, 3), r"^Given\.score returned shape \(3, 3\), but scores of a prompt are \(N,\)\. Return those"),
        (Given, (3, 1, 1), r"scores of a prompt are \(N,\)"),
        (OfTokens, (3,), r"^OfTokens\.score returned shape \(3,\), but scores of a token are \(N, L\)"),
        (OfTokens, (2, 3), "for 3 samples"),
    ],
)
def test_scores_of_another_shape_are_refused(cls: type, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cls(torch.zeros(shape)).score(BATCH)


def test_token_scores_of_one_column_stay_a_table() -> None:
    one = {"x": torch.ones(2), "response_mask": torch.ones(2, 1)}
    assert OfTokens(torch.tensor([[1.0], [2.0]])).score(one).tolist() == [[1], [2]]
    unmasked = TidyBatch(RolloutBatch({"x": torch.ones(2)}), torch.ones(2).bool())
    assert checked_scores(OfTokens(), torch.ones(2, 5), unmasked).shape == (2, 5)


def test_a_scorer_of_scorers_may_ask_for_any_rows() -> None:
    tidy = TidyBatch(RolloutBatch(BATCH), torch.tensor([True, False, False, True]))
    assert scores_on(Given(), tidy, 0).tolist() == [1, 4]


# -- alone in a group --------------------------------------------------------------------------------------------------


class OfGroups(Given):
    needs_groups = True


@pytest.mark.parametrize(
    ("uid", "warns"), [([1, 2, 8, 3], True), ([1, 1, 8, 2], False), ([1, 2, 1, 3], True), (None, False)]
)
@pytest.mark.parametrize("needs", [True, False])
def test_samples_that_are_all_alone_are_told_of(uid: Any, warns: bool, needs: bool) -> None:
    batch = BATCH | {"uid": uid} if uid else {k: v for k, v in BATCH.items() if k != "uid"}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        (OfGroups() if needs else Given()).score(batch)
    assert bool(said) == (warns and needs)


# -- as a Metric -------------------------------------------------------------------------------------------------------


def test_what_is_collected_is_scored_together_with_the_last_step() -> None:
    class Step(Given):
        def score(self, batch: Any, step_id: int = 0, **ctx: Any) -> Any:
            assert not ctx
            return batch["x"] + 10 * step_id

    scorer = Step()
    scorer.update(BATCH, 1)
    scorer.update({name: value[:2] for name, value in BATCH.items()}, step_id=2)
    np.testing.assert_array_equal(scorer.compute(), [21, 22, NAN, 24, 21, 22])
    scorer.reset()
    scorer.update(BATCH)
    np.testing.assert_array_equal(scorer.compute(), [1, 2, NAN, 4])


def test_a_scorer_that_remembers_is_asked_not_to_as_a_metric() -> None:
    asked = []

    class Remembering(Given):
        remembers = True

        def score(self, batch: Any, step_id: int = 0, **ctx: Any) -> Any:
            asked.append(ctx)
            return batch["x"]

    scorer = Remembering()
    scorer.update(BATCH)
    scorer.compute()
    assert asked == [{"remember": False}]


def test_a_batch_needs_what_is_collected_of_it() -> None:
    for name in ("x", "response_mask"):
        with pytest.raises(ValueError, match=f"^The rollout batch has no field '{name}'"):
            Given().update({key: value for key, value in BATCH.items() if key != name})

    class Told(Given):
        def columns(self, batch: Any) -> Any:
            return {"x": batch["x"]}

        def score(self, batch: Any, step_id: int = 0, **ctx: Any) -> Any:
            return batch["x"]

    told = Told()
    told.update({"x": torch.ones(2)})
    assert told.compute().tolist() == [1, 1]


def test_states_are_saved_unless_said_otherwise() -> None:
    scorer = Given()
    assert list(scorer.state_dict()) == []
    scorer.add_state("a", torch.tensor(1.0), "sum")
    scorer.add_state("b", torch.tensor(1.0), "sum", persistent=False)
    assert list(scorer.state_dict()) == ["a"]
    assert Given.full_state_update is False


def test_a_recipe_is_what_a_scorer_is_with_its_settings() -> None:
    class Set(Given):
        def __init__(self) -> None:
            super().__init__()
            self.b, self.a, self.c, self._d = 0.5, "x", [1], 3

    assert Set().recipe.startswith(
        "test_a_recipe_is_what_a_scorer_is_with_its_settings.<locals>.Set{'a': 'x', 'b': 0.5"
    )
    assert "'c'" not in Set().recipe
    assert "_d" not in Set().recipe


def test_what_a_scorer_is_unless_it_says_otherwise() -> None:
    said = {
        "timing": "post_reward",
        "granularity": "prompt",
        "needs_groups": False,
        "row_wise": False,
        "by_mask": False,
        "screened": None,
        "remembers": False,
        "signal": "",
        "paper": "",
        "screens": False,
        "pool": 1.0,
        "requires": (),
    }
    assert {name: getattr(Scorer, name) for name in said} == said
    assert Given().default_selector() is None
    assert Given().columns(RolloutBatch(BATCH)) is None


@pytest.mark.parametrize("option", list(METRIC_OPTIONS))
def test_the_options_of_a_metric_reach_it(option: str) -> None:
    values = {"dist_sync_fn": list, "distributed_available_fn": lambda: False, "process_group": 3}
    value = values.get(option, True)
    scorer = Given(**{option: value})
    scorer.update(BATCH)
    assert scorer.compute().numel() == 4
    with pytest.raises(ValueError, match=f"^The scorer 'outcome' has no parameter '{option}_'"):
        build("scorer", "outcome", **{f"{option}_": value})
