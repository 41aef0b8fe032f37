"""What components remember: what they are called, what is theirs in a checkpoint, and what is told of the rest."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch

from lightning_dataflex import Scorer, Selector, build
from lightning_dataflex.core.memory import (
    changes,
    described,
    distinct,
    matched_parts,
    memory_of,
    reading,
    recall,
    title,
)
from lightning_dataflex.core.plain import plain, restored


def told(work: Any, *args: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        work(*args)
    return [str(each.message) for each in said]


class Counting(Scorer):
    """Counts its batches."""

    seen: torch.Tensor

    def __init__(self, start: int = 0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.start = start
        self.add_state("seen", torch.tensor(start), dist_reduce_fx="sum")

    def score(self, batch: Any, step_id: int = 0, **ctx: Any) -> torch.Tensor:
        return batch["rm_scores"]


class Other(Counting):
    pass


class Stock(Selector):
    """Remembers a list, and is no Metric."""

    def __init__(self, stock: Any = ()) -> None:
        self.stock = list(stock)

    def act(self, scores: Any, batch: Any, **ctx: Any) -> list[int]:
        return []

    def state_dict(self) -> dict[str, Any]:
        return {"stock": self.stock}

    def load_state_dict(self, state: Any) -> None:
        self.stock = state["stock"]


def test_a_component_gets_its_own_memory_back() -> None:
    again = Counting()
    assert told(recall, again, memory_of(Counting(5))) == []
    assert int(again.seen) == 5
    stock = Stock()
    assert told(recall, stock, memory_of(Stock([1, "a", np.int64(2)]))) == []
    assert stock.stock == [1, "a", 2]
    assert memory_of(Stock([3])) == {"name": "Stock()", "state": {"stock": [3]}}


def test_the_memory_of_another_component_is_left_and_told_of() -> None:
    other = Other()
    assert told(recall, other, memory_of(Counting(5))) == [
        "The checkpoint has the memory of Counting. Other starts without one."
    ]
    assert int(other.seen) == 0
    # One that remembers nothing leaves nothing.
    assert told(recall, Other(), {"name": "Counting()", "state": {}}) == []


def test_what_is_no_mapping_is_no_memory() -> None:
    listed = Stock()
    listed.state_dict = lambda: [1, 2]  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(
        ValueError, match=r"^state_dict of Stock returned \[1, 2\]\. Return a dict of what it remembers"
    ):
        memory_of(listed)
    with pytest.raises(ValueError, match=r"^What Stock remembers\.stock holds a set"):
        memory_of(Stock([{1}]))


def ema(scorer: Any, decay: float = 0.9) -> Any:
    return build("scorer", "ema", scorer=scorer, decay=decay)


ROWS = {"rm_scores": torch.tensor([2.0]), "advantages": torch.tensor([3.0]), "uid": [7]}


def of_two(*names: str) -> Any:
    whole = build("scorer", "weighted_sum", scorers=[ema(name) for name in names])
    whole.score(ROWS)
    return whole


def averages(component: Any) -> dict[str, list[float]]:
    """What each average at any depth remembers, by title."""
    return {title(part): part._memory.state_dict()["average"].tolist() for part in component.parts.values()}


def test_parts_get_their_own_by_title() -> None:
    state = memory_of(of_two("outcome", "advantage"))
    swapped = build("scorer", "weighted_sum", scorers=[ema("advantage"), ema("outcome")])
    # The same parts in another order are another component of the same parts: each finds its own.
    assert told(recall, swapped, state) == []
    assert averages(swapped) == {"ema(advantage())": [3], "ema(outcome())": [2]}
    fewer = build("scorer", "weighted_sum", scorers=[ema("outcome"), ema("response_length")])
    assert told(recall, fewer, state) == [
        "The checkpoint was written by another weighted_sum. What it remembers of ema(advantage()) is dropped; "
        "ema(response_length()) start without a memory."
    ]
    assert averages(fewer) == {"ema(outcome())": [2], "ema(response_length())": []}


def test_what_is_remembered_of_other_scores_is_not_read_and_the_parts_are() -> None:
    whole, same = ema(of_two("outcome", "advantage")), ema(of_two("outcome", "advantage"))
    whole.score(ROWS)
    assert told(recall, same, memory_of(whole)) == []
    assert same._memory.state_dict()["average"].tolist() == [5]
    other = ema(build("scorer", "weighted_sum", scorers=[ema("outcome")]))
    assert told(recall, other, memory_of(whole))[0] == (
        f"The checkpoint has the memory of {title(whole)}. {title(other)} starts without one."
    )
    assert other._memory.state_dict()["average"].tolist() == []


def test_what_has_no_part_is_told_of() -> None:
    saved = {"parts.a()._extra_state": 1, "parts.b()._extra_state": 2}
    component = build("scorer", "outcome")
    found: list[Any] = []
    messages = told(
        lambda: found.append(matched_parts(component, saved, ["parts.b()._extra_state", "parts.c()._extra_state"]))
    )
    assert found == [{"parts.b()._extra_state": 2}]
    said = (
        "The checkpoint was written by another outcome. What it remembers of {} is dropped; c() start without a memory."
    )
    assert messages == [said.format("a()")]
    only_new = build("scorer", "outcome")
    assert told(matched_parts, only_new, {}, ["parts.c()._extra_state"]) == [said.format("none")]
    assert told(matched_parts, build("scorer", "outcome"), saved, list(saved)) == []


def test_titles_and_descriptions() -> None:
    assert title(Counting()) == "Counting()"
    assert title(ema("outcome")) == "ema(outcome())"
    assert described(Counting(3)) == "Counting(start=3)"
    assert described(build("selector", "gfpo", k=3)).startswith("gfpo(k=3, ")
    assert "dist_sync_on_step" not in described(Counting())
    assert described(ema("outcome", 0.5)).startswith("ema(outcome(")
    assert described(Stock([1, (2.5, None), {"a": "b"}])) == "Stock(stock=[1, (2.5, None), {'a': 'b'}])"
    assert described(Stock([{"a": object()}])) == "Stock(stock=list)"
    assert described(Stock([{object(): 1}])) == "Stock(stock=list)"
    assert described(Stock([object(), 1])) == "Stock(stock=list)"


def test_titles_that_come_again_are_numbered_by_their_descriptions() -> None:
    assert distinct(["a", "a", "a"], ["2", "1", "3"]) == ["a#2", "a", "a#3"]
    assert distinct(["a", "b", "a", "b"], ["", "y", "", "x"]) == ["a", "b#2", "a#2", "b"]
    assert distinct([], []) == []


def test_a_state_that_cannot_be_read_is_named() -> None:
    with reading("mine"):
        pass
    with (
        pytest.raises(
            ValueError, match=r"^The checkpoint's state of mine cannot be read \(KeyError: 'x'\): .*\['mine'\]"
        ) as caught,
        reading("mine"),
    ):
        {}["x"]
    assert isinstance(caught.value.__cause__, KeyError)


def test_changes_are_told_by_key() -> None:
    assert changes({"a": "1", "b": "2"}, {"a": "1", "b": "2"}) == ""
    assert (
        changes({"a": "1", "b": "2"}, {"b": "3", "c": "4"}) == "a: 1, now not there; b: 2, now 3; c: not there, now 4"
    )


# -- plain values ----------------------------------------------------------------------------------------------------


VALUES = {
    "texts and numbers": ["a", 1, 2.5, True, None, b"x"],
    "nested": {"a": (1, [2, {"b": "c"}])},
    "empty": {"a": [], "b": {}, "c": ()},
}


@pytest.mark.parametrize("kind", list(VALUES))
def test_plain_values_are_themselves(kind: str) -> None:
    value = VALUES[kind]
    assert plain(value, "x") == value == restored(value) == restored(plain(value, "x"))


def test_arrays_come_back_as_arrays() -> None:
    for array in (np.array([1, 2]), np.array([True, False]), np.array([0.5], np.float32), np.array([3], np.uint8)):
        back = restored(plain({"a": array}, "x"))["a"]
        assert (back.dtype, back.tolist()) == (array.dtype, array.tolist())
    objects = np.empty(2, dtype=object)
    objects[:] = ["a", [1, 2]]
    back = restored(plain(objects, "x"))
    assert (back.dtype, back.shape, list(back)) == (np.dtype(object), (2,), ["a", [1, 2]])
    texts = restored(plain(np.array(["a", "bc"]), "x"))
    assert texts.tolist() == ["a", "bc"]
    assert [plain(each, "x") for each in (np.int64(3), np.float32(0.5), np.bool_(True))] == [3, 0.5, True]


@pytest.mark.parametrize("copy", [True, False])
def test_tensors_and_arrays_are_copied_unless_one_only_looks(copy: bool) -> None:
    tensor, array = torch.ones(2, requires_grad=True), np.ones(2)
    there = plain({"t": tensor, "a": array}, "x", copy=copy)
    assert (there["t"] is tensor) == (not copy)
    assert there["t"].requires_grad == (not copy)
    there["a"]["__array__"][0] = 5
    assert array[0] == (1 if copy else 5)
    assert (plain(tensor, "x").data_ptr() == tensor.data_ptr()) is False


def test_what_a_checkpoint_cannot_hold_is_named_with_its_place() -> None:
    class Names(list):
        pass

    assert plain(Names([1, 2]), "x") == [1, 2]
    for value, place in (
        ({"a": {"b": {1}}}, r"x\.a\.b holds a set"),
        ([object()], "x holds a object"),
        ((1, range(2)), "x holds a range"),
    ):
        with pytest.raises(ValueError, match=rf"^{place}, which a checkpoint cannot hold. Use tensors"):
            plain(value, "x")
