"""What a pipeline makes of ranks, scales, and rules that keep nothing."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from lightning_dataflex import Pipeline, Reweighter, Scorer, Selector
from lightning_dataflex.core.action import Action

NAN = float("nan")


class Given(Scorer):
    """Scores of its own, or those of a field."""

    requires = ("x",)
    granularity = "response"

    def score(self, batch: Any, step_id: int = 0, **ctx: Any) -> Any:
        return batch["x"]


class Asked(Selector):
    """Keeps what is above a half, and notes what it was asked."""

    def __init__(self) -> None:
        self.context: dict[str, Any] = {}

    def act(self, scores: Any, batch: Any, **ctx: Any) -> Any:
        self.context = ctx
        return scores > 0.5


class Weighs(Reweighter):
    def act(self, scores: Any, batch: Any, **ctx: Any) -> Any:
        return scores


MASK = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0], [1, 1, 0]])


def batch(*x: float, **more: Any) -> dict[str, Any]:
    return {"x": torch.tensor(x), "response_mask": MASK} | more


def test_a_rule_is_told_the_step_and_the_progress() -> None:
    rule = Asked()
    pipeline = Pipeline(Given(), rule)
    decision = pipeline.decide(batch(1.0, 0.0, 1.0, NAN), 3, progress=0.5)
    assert rule.context == {"step_id": 3, "progress": 0.5}
    assert decision.keep.tolist() == [True, False, False, False]
    assert (decision.num_kept, decision.fell_back, decision.group_ids) == (1, False, None)
    pipeline.decide(batch(1.0, 0.0, 1.0, NAN))
    assert rule.context == {"step_id": 0, "progress": None}


def test_what_the_rule_reads_leaves_samples_without_a_score() -> None:
    reads = type("Reads", (Asked,), {"requires": ("y",)})()
    y = torch.tensor([NAN, 1.0, 1.0, 1.0])
    with pytest.warns(UserWarning, match=r"^1 samples have no score: their reward, or another field that Given reads"):
        decision = Pipeline(Given(), reads).decide(batch(1.0, 1.0, 1.0, 1.0, y=y))
    assert decision.keep.tolist() == [False, True, False, True]
    assert decision.scores.isnan().tolist() == [True, False, True, False]


@pytest.mark.parametrize("scope", ["global", "rank"])
@pytest.mark.parametrize("row_wise", [True, False])
def test_a_rule_that_keeps_nothing_may_keep_all_that_has_a_score(scope: Any, row_wise: bool) -> None:
    cls = type("Each", (Given,), {"row_wise": row_wise})
    pipeline = Pipeline(cls(), type("Rule", (Asked,), {"row_wise": row_wise})(), scope=scope)
    assert pipeline.row_wise == (row_wise or scope == "rank")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        none, every = (pipeline.decide(batch(0.0, NAN, 0.0, 0.0), keep_all_if_empty=keep) for keep in (False, True))
        some = pipeline.decide(batch(0.0, NAN, 0.0, 1.0), keep_all_if_empty=True)
    assert (none.keep.any().item(), none.fell_back, none.num_kept) == (False, False, 0)
    assert (every.keep.tolist(), every.fell_back, every.num_kept) == ([True, False, False, True], True, 2)
    assert every.weights.tolist() == [[1, 1, 1], [0] * 3, [0] * 3, [1, 1, 0]]
    assert (some.keep.tolist(), some.fell_back) == ([False, False, False, True], False)


@pytest.mark.parametrize("row_wise", [True, False])
@pytest.mark.parametrize(
    ("normalize", "scale"), [("tokens", 6 / 13), ("samples", 3 / 7), ("none", 1), ("abs_advantage", 7 / 15)]
)
def test_weights_are_scaled_by_what_the_rule_says(normalize: Any, scale: float, row_wise: bool) -> None:
    cls = type("Each", (Given,), {"row_wise": row_wise})
    rule = type("Rule", (Weighs,), {"row_wise": row_wise})(normalize)
    data = batch(1.0, 2.0, 9.0, 4.0, advantages=torch.tensor([1.0, 2.0, 9.0, 1.0]))
    decision = Pipeline(cls(), rule).decide(data)
    expected = torch.tensor([1.0, 2.0, 0.0, 4.0])[:, None] * MASK * scale
    torch.testing.assert_close(decision.weights, expected)
    assert decision.metrics["weight_mean"].item() == pytest.approx(13 / 6 * scale)
    assert decision.keep.tolist() == [True, True, False, True]
    assert decision.weights.dtype == torch.float32


@pytest.mark.parametrize("most", [float("inf"), 1e300])
def test_a_weight_that_float32_cannot_hold_takes_everything(most: float) -> None:
    data = {"x": torch.tensor([1.0, 1.0, 9.0, most], dtype=torch.float64), "response_mask": MASK}
    decision = Pipeline(Given(), Weighs("tokens")).decide(data)
    torch.testing.assert_close(decision.weights, torch.tensor([0.0, 0.0, 0.0, 1.0])[:, None] * MASK * 6 / 2)
    with pytest.raises(ValueError, match="infinite"):
        Pipeline(Given(), Weighs("none")).decide(data)


def test_a_rank_that_decides_alone_scales_alone() -> None:
    decision = Pipeline(Given(), Weighs("tokens"), scope="rank").decide(batch(1.0, 2.0, 9.0, 4.0))
    torch.testing.assert_close(decision.weights, torch.tensor([1.0, 2.0, 0.0, 4.0])[:, None] * MASK * 6 / 13)


@pytest.mark.parametrize(("normalize", "expected"), [("tokens", 1.0), ("none", 0.0)])
def test_weights_that_are_all_zero_are_told_of(normalize: Any, expected: float) -> None:
    pipeline = Pipeline(Given(), Weighs(normalize))
    with pytest.warns(UserWarning, match=r"gave every sample a weight of 0"):
        decision = pipeline.decide(batch(0.0, 0.0, 0.0, 0.0))
    assert decision.weights.max() == expected
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quiet = Pipeline(Given(), Weighs(normalize))
        quiet.decide(batch(0.0, 1.0, 0.0, 0.0))
    with pytest.warns(UserWarning) as said:  # noqa: PT030
        Pipeline(Given(), Weighs(normalize)).decide(batch(NAN, NAN, NAN, NAN))
    assert ["have no score" in str(each.message) for each in said] == [True]


def test_a_batch_as_it_is() -> None:
    decision = Pipeline(Given(), Asked()).keep_all(batch(0.0, NAN, 0.0, 0.0))
    assert decision.keep.tolist() == [True, True, False, True]
    assert decision.weights.tolist() == MASK.tolist()
    assert (decision.num_kept, decision.fell_back) == (3, False)
    assert decision.scores.tolist() == [0] * 4


def test_a_batch_has_samples_and_fields_that_something_reads() -> None:
    empty = {"x": torch.ones(0), "response_mask": torch.ones(0, 3)}
    for row_wise in (True, False):
        rule = type("Rule", (Asked,), {"row_wise": row_wise})()
        pipeline = Pipeline(type("Each", (Given,), {"row_wise": row_wise})(), rule)
        with pytest.raises(ValueError, match=r"^The rollout batch has no samples\. Give at least one"):
            pipeline.decide(empty)
    with pytest.raises(ValueError, match=r"no samples"):
        pipeline.keep_all(empty)
    assert pipeline.requires == ("response_mask", "x")
    assert Pipeline(Given(), Weighs("abs_advantage")).requires == ("response_mask", "x", "advantages")
    assert Pipeline(Given(), Asked(), fields={"x": "y", "domain": "d", "prompt_id": "p"}).fields["x"] == "y"
    with pytest.raises(ValueError, match=r"^fields maps 'xx', which nothing reads\. "):
        Pipeline(Given(), Asked(), fields={"xx": "y"})
    for part in (type("R", (Given,), {"remembers": True})(), Given()):
        rule = type("S", (Asked,), {"remembers": not part.remembers})()
        with pytest.raises(ValueError, match=r"^scope is 'rank', but (R|S) remembers earlier groups"):
            Pipeline(part, rule, scope="rank")
        assert Pipeline(part, rule).scope == "global"


def test_an_action_of_some_samples_has_their_width() -> None:
    table, flat = torch.arange(12.0).view(3, 4), torch.arange(3.0)
    part = Action(flat, table > 0, table, flat > 0, flat).of(slice(1, 3), 2)
    assert (part.scores.tolist(), part.weights.tolist()) == ([1, 2], [[4, 5], [8, 9]])
    assert part.advantages.tolist() == [1, 2]  # type: ignore[union-attr]
    wide = Action(flat, table > 0, table, flat > 0).of(slice(0, 1), 6)
    assert (wide.weights.tolist(), wide.keep.shape, wide.advantages) == ([[0, 1, 2, 3, 0, 0]], (1, 6), None)
