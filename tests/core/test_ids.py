"""Ids, what is remembered under them, and what a decision writes."""

from __future__ import annotations

from collections import namedtuple
from decimal import Decimal
from enum import Enum, IntEnum
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from lightning_dataflex import Pipeline, RolloutBatch, Scorer, build
from lightning_dataflex.core import ids
from lightning_dataflex.core.decision import Decision
from lightning_dataflex.core.history import PromptHistory, Visits
from lightning_dataflex.core.ids import prompt_ids, stable_ids, told_apart
from lightning_dataflex.core.prompt_scorer import PromptScorer
from lightning_dataflex.core.summary import REASONS, Summary

NAN = float("nan")
MASK = torch.tensor([[1, 1, 0], [1, 0, 0]])


def read(**fields: Any) -> RolloutBatch:
    return RolloutBatch({"response_mask": MASK} | fields)


# -- ids ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values",
    [
        torch.tensor([1, -2], dtype=torch.int16),
        torch.tensor([1.0, -2.0]),
        np.array([1, -2]),
        np.array([1, -2], ">i4"),
        np.array([1.0, -2.0]),
        np.array([1, -2], object),
        [1, -2],
        (1.0, -2.0),
        [torch.tensor(1), torch.tensor(-2)],
        [1, torch.tensor(-2)],
        [np.int64(1), np.float32(-2)],
    ],
    ids=repr,
)
def test_whole_numbers_are_their_own_ids(values: Any) -> None:
    ids = stable_ids(values)
    assert (ids.tolist(), ids.dtype) == ([1, -2], torch.int64)


def test_other_ids_are_hashes_of_type_and_text() -> None:
    """Fixed for ever: a checkpoint holds them."""
    assert stable_ids(["a", "b"]).tolist() == [int(x) for x in stable_ids(np.array(["a", "b"]))]
    kinds = ["1", 1, 1.5, ("1",), ("1", 2), frozenset({1}), frozenset({1, 2}), b"1", 2**63, -(2**63) - 1, (1, (2, 3))]
    assert len(set(stable_ids(kinds).tolist())) == len(kinds)
    assert stable_ids([True, 1, 1.0, np.bool_(True)]).tolist() == [1, 1, 1, 1]
    assert stable_ids([(True, 2.0)]).tolist() == stable_ids([(1, 2)]).tolist()
    assert stable_ids([frozenset({"a", "b"})]).tolist() == stable_ids([frozenset({"b", "a"})]).tolist()
    assert stable_ids(torch.tensor([2**63 - 1]).to(torch.uint64)).tolist() == [2**63 - 1]
    big = torch.tensor([2**63, 7], dtype=torch.uint64)
    assert stable_ids(big).tolist() == stable_ids([2**63, 7]).tolist() == stable_ids(big.numpy()).tolist()
    assert stable_ids([2**63 - 1, -(2**63)]).tolist() == [2**63 - 1, -(2**63)]
    assert stable_ids([]).tolist() == []
    assert prompt_ids({"prompt_id": [5]}).tolist() == [5]
    assert stable_ids([2**9_999])[0] != 0


WRITTEN: dict[Any, int] = {
    "a": -3022968324607364423,
    "": -2845893350173088044,
    "7": 6196844027868028956,
    "Zoë 7": 6930235259868701907,
    -3: -3,
    2**63 - 1: 9223372036854775807,
    2**63: 3020434083756097943,
    1.5: 1618354400376401803,
    0.1: -5288536188725564612,
    1e300: 8889160572502141375,
    float("inf"): 1249794365305382668,
    (): 3016366035643776341,
    (1, 2): -6043240999638637082,
    ("a", 1.5): 7473249466958027458,
    ("a", (2.0,)): -827491336635259661,
    frozenset({1, "a"}): 8825671140710661184,
    b"a": -9032322830761191115,
    Fraction(1, 3): 6907284996478328352,
}
"""Ids that checkpoints hold."""


@pytest.mark.parametrize("value", WRITTEN, ids=repr)
def test_an_id_is_the_same_in_every_run(value: Any) -> None:
    assert stable_ids([value]).tolist() == [WRITTEN[value]]


class Kind(str, Enum):
    A = "a"


class Named(str):
    def __repr__(self) -> str:
        return "named"

    def __str__(self) -> str:
        return "named"


class Level(IntEnum):
    SEVEN = 7


Pair = namedtuple("Pair", "kind level")


@pytest.mark.parametrize(
    "values",
    [
        ["a", Kind.A, Named("a"), np.str_("a")],
        [7, 7.0, Decimal(7), Decimal("7.00"), Fraction(7), 7 + 0j, Level.SEVEN, np.int8(7), np.longdouble(7)],
        [2**70, 2.0**70, Decimal(2**70), Fraction(2**70)],
        [1.5, Decimal("1.5"), Decimal("1.50"), Fraction(3, 2), 1.5 + 0j, np.float32(1.5), np.longdouble(1.5)],
        [Decimal("0.1"), Decimal("0.10"), Fraction(1, 10)],
        [float("inf"), Decimal("inf"), np.float16("inf")],
        [("a", 7), (Kind.A, Decimal(7)), Pair(Named("a"), 7.0)],
        [frozenset({"a", 7}), frozenset({Kind.A, Fraction(7)})],
    ],
    ids=repr,
)
def test_equal_values_have_one_id_on_ranks_that_never_meet(values: list[Any]) -> None:
    assert len(set(values)) == 1
    assert len({stable_ids([value]).item() for value in values}) == 1
    assert len({stable_ids(["b", value])[1].item() for value in values}) == 1


def test_numbers_that_differ_have_different_ids() -> None:
    values = [0.1, Decimal("0.1"), np.float32(0.1), 1j, 2j, 1 + 1j, 1, Fraction(1, 3), 1 / 3, 2**53 + 1, 2.0**53, "1"]
    assert len(set(stable_ids(values).tolist())) == len(set(values)) == len(values)


TEXTS = ["b", "b", "a", "b", "c", "c", "a"]


@pytest.mark.parametrize("values", [TEXTS, np.array(TEXTS, dtype=object), np.array(TEXTS), tuple(TEXTS)], ids=type)
def test_texts_are_told_apart_in_the_order_in_which_they_come_first(values: Any) -> None:
    told = told_apart(values)
    assert (list(told.values), told.index.tolist(), told.groups[1]) == (["b", "a", "c"], [0, 0, 1, 0, 2, 2, 1], 3)
    assert told.ids.tolist() == [stable_ids([text]).item() for text in TEXTS]


def test_arrays_of_anything_are_told_apart_as_lists_are() -> None:
    mixed: list[Any] = ["a", 7, 7.0, ("x", 1), ("x", 1), "a", True, 1, torch.tensor(7)]
    array = np.empty(len(mixed), dtype=object)
    array[:] = mixed
    told, expected = told_apart(array), told_apart(mixed)
    assert (told.ids.tolist(), told.index.tolist()) == (expected.ids.tolist(), expected.index.tolist())
    assert told_apart(np.empty(0, dtype=object)).ids.tolist() == []
    array[3] = np.ones(2)
    with pytest.raises(ValueError, match="uid holds values that cannot be compared"):
        told_apart(array)


class Unlike:
    """Is different from everything but itself, and does not say so."""

    def __ne__(self, other: object) -> bool:
        return False

    def __repr__(self) -> str:
        return "unlike"


class Code(str):
    """Goes with other texts alone."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, str)
        return str.__eq__(self, other)


@pytest.mark.parametrize("values", [["a", Unlike(), "b"], [Code("a"), Code("a"), "b"]], ids=["ne", "eq"])
def test_ids_that_compare_in_their_own_way_are_told_apart_in_an_array_as_in_a_list(values: list[Any]) -> None:
    array = np.empty(len(values), dtype=object)
    array[:] = values
    assert told_apart(array).index.tolist() == told_apart(values).index.tolist()
    assert len(told_apart(array).ids.unique()) == len(set(values))


class LastVisit(Scorer):
    """1 for a group that an earlier batch had, too: a rule of an author that says in columns what it reads."""

    requires = ("uid",)
    remembers = True

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def score(self, batch: Any, step_id: int = 0, **ctx: Any) -> torch.Tensor:
        names = batch.group_ids.tolist()
        scores = torch.tensor([float(name in self.seen) for name in names])
        self.seen |= set(names)
        return scores

    def columns(self, batch: RolloutBatch) -> dict[str, torch.Tensor]:
        return {"uid": batch.group_ids}


def test_what_is_remembered_under_the_id_of_a_group_is_found_under_no_other() -> None:
    pipeline = Pipeline(LastVisit(), build("selector", "threshold_band", low=0.5, high=2.0))
    keeps = [pipeline.decide(read(uid=uid)).keep.tolist() for uid in (["a", "b"], ["c", "a"], ["d", "c"])]
    assert keeps == [[False, False], [False, True], [False, True]]


def test_texts_are_hashed_when_somebody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ids, "_digest", lambda kind, item: pytest.fail(f"{item} is hashed."))
    batch = {"rm_scores": torch.tensor([1.0, 0.0]), "uid": ["a", "a"], "response_mask": MASK}
    decision = build_pipeline().decide(batch)
    assert (decision.keep.tolist(), decision.metrics["frac_zero_std"]) == ([True, True], 0)
    with pytest.raises(pytest.fail.Exception, match="a is hashed"):
        decision.group_ids  # noqa: B018


def build_pipeline() -> Pipeline:
    return Pipeline.from_config({"mechanism": "select", "actuator": "threshold_band"}, adv_estimator="grpo")


def test_groups_that_are_numbered_are_those_of_one_batch() -> None:
    batch = read(uid=["b", "a"])
    assert batch.with_local_ids().group_ids.tolist() == [0, 1]
    assert batch.group_ids.tolist() == stable_ids(["b", "a"]).tolist()
    for same in (read(uid=torch.tensor([7, 8])), read()):
        assert same.with_local_ids() is same


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (torch.ones(2, 2), r"^uid has shape \(2, 2\)\. It must be \(samples,\)"),
        (np.ones(()), r"^uid has shape \(\)"),
        (["a", None], "^uid of sample 1 is None. Give every sample the id of its group"),
        ([1.0, NAN], "^uid holds NaN"),
        (torch.tensor([1.0, NAN]), "^uid holds NaN"),
        ([["a"]], "^uid holds values that cannot be compared: unhashable"),
        ([2**10_000], "^uid holds a number of 10001 bits. Use shorter ones, or texts"),
        ([Decimal("1e999999999")], "^uid holds a number of 3333333330 bits. Use shorter ones, or texts"),
        ([(Fraction(1, 2**10_000),)], "^uid holds a number of 10001 bits. Use shorter ones, or texts"),
        ([1, torch.tensor([2, 3])], r"^uid holds a tensor of shape \(2,\). Give one number or text per sample"),
        ([(1, object())], "^uid holds <object object.*, which has another text on every rank"),
    ],
)
def test_what_is_no_id(values: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stable_ids(values)
    with pytest.raises(ValueError, match=r"^prompt_id "):
        prompt_ids({"prompt_id": values})


def test_ids_of_one_text_are_one_group_on_one_rank_as_on_several() -> None:
    batch = read(uid=[("a", float("nan")), ("a", float("nan"))])
    assert batch.group_ids.unique().numel() == 1
    assert (batch.groups[0].tolist(), batch.groups[1]) == ([0, 0], 1)


# -- what is remembered ------------------------------------------------------------------------------------------------


def test_histories_look_up_put_and_forget() -> None:
    history = PromptHistory({"a": 0.5}, max_prompts=32)
    assert history.look_up(torch.tensor([3]))["a"].tolist() == [0.5]
    assert history.seen(torch.tensor([3])).tolist() == [False]
    history.put(torch.arange(32).flip(0), {"a": torch.arange(32.0).flip(0)}, 0)
    assert (len(history), history.num_bytes) == (32, 32 * (8 + 8 + 4))
    assert history.look_up(torch.tensor([31, 0, 99]))["a"].tolist() == [31, 0, 0.5]
    history.put(torch.tensor([0, 40]), {"a": torch.tensor([7.0, 8.0])}, 1)
    # One too many, and a sixteenth of 32 more: those of the first step with the smallest ids.
    assert len(history) == 30
    assert history.seen(torch.tensor([0, 1, 2, 3, 4, 40])).tolist() == [True, False, False, False, True, True]
    assert history.look_up(torch.tensor([0, 40]))["a"].tolist() == [7, 8]
    with pytest.raises(ValueError, match=r"^The history has the columns a, but was given b\. Name them"):
        history.put(torch.tensor([1]), {"b": torch.ones(1)}, 2)
    state = history.state_dict()
    again = PromptHistory({"a": 0.5})
    again.load_state_dict(state)
    assert len(again) == 30
    with pytest.raises(ValueError, match=r"^The history has columns of 29 to 30 prompts\. Each has one of all"):
        again.load_state_dict(state | {"a": state["a"][1:]})
    assert PromptHistory({}).max_prompts == 1_000_000


def test_a_scorer_of_prompts_remembers_a_million_and_solves_above_a_half_unless_said() -> None:
    class Remembers(PromptScorer):
        columns_remembered: ClassVar = {"a": 0.25}

        def score(self, batch: Any, step_id: int = 0, **ctx: Any) -> Any:
            return self.remembered(batch)["a"]

    scorer = Remembers()
    assert (scorer.success_threshold, scorer.history.max_prompts, scorer.settings) == (0.5, 1_000_000, {})
    assert (scorer.timing, scorer.granularity, scorer.requires) == ("pre_rollout", "prompt", ("prompt_id",))
    assert Remembers(0.75, 3).history.max_prompts == 3
    assert scorer.observe(Visits.of(torch.tensor([5]), torch.ones(1))) is None
    scorer.history.put(torch.tensor([5]), {"a": torch.ones(1)}, 0)
    assert scorer.score({"prompt_id": [5, 6]}).tolist() == [1, 0.25]
    (again := Remembers()).set_extra_state(scorer.get_extra_state())
    assert again.score({"prompt_id": [5, 6]}).dtype == torch.float64
    assert again.score({"prompt_id": [5, 6]}).tolist() == [1, 0.25]
    with pytest.raises(ValueError, match=r"^success_threshold is nan"):
        Remembers(NAN)


def test_visits_count_above_a_threshold() -> None:
    ids, outcomes = torch.tensor([5, 5, 3]), torch.tensor([0.4, 0.8, 0.5])
    assert Visits.of(ids, outcomes).solved.tolist() == [0, 1]
    assert Visits.of(ids, outcomes, 0.3).solved.tolist() == [1, 2]


# -- what a decision writes --------------------------------------------------------------------------------------------


def decision(keep: Any, weights: Any, advantages: Any = None) -> Decision:
    kept, weighed, nothing = torch.tensor(keep), torch.tensor(weights), Summary({}, False)
    return Decision(torch.zeros(2), kept, weighed, advantages, nothing, rows=slice(0, 2), num_kept=1)


@pytest.mark.parametrize(("drop", "of_tokens"), [(d, t) for d in ("mask", "rows", "weight") for t in (True, False)])
def test_updates_of_a_decision(drop: Any, of_tokens: bool) -> None:
    keep = [[True, False, False], [True, False, False]] if of_tokens else [True, False]
    weights = [[2.0, 0, 0], [3.0, 0, 0]] if of_tokens else [[2.0, 2.0, 0], [0, 0, 0]]
    there = torch.tensor([[0.5, NAN, NAN], [0.5, NAN, NAN]])
    got = decision(keep, weights).updates(read(rollout_is_weights=there), drop=drop)
    assert got["rollout_is_weights"][:, 0].tolist() == ([1, 1.5] if of_tokens else [1, 0])
    masked = ["rollout_is_weights", "response_mask", "original_response_mask"]
    assert list(got) == (["rollout_is_weights"] if drop == "weight" else masked)
    if drop != "weight":
        assert got["response_mask"].tolist() == ([[1, 0, 0], [1, 0, 0]] if of_tokens else [[1, 1, 0], [0, 0, 0]])
        assert got["original_response_mask"] is MASK


def test_updates_go_where_they_are_told_to_and_multiply_what_is_there() -> None:
    made = decision([True, True], [[2.0, 3.0, 0], [4.0, 0, 0]])
    assert made.updates(read(), weights_key="w")["w"].tolist() == [[2, 3, 0], [4, 0, 0]]
    assert made.updates(read(w=torch.tensor([10.0, 0.5])), weights_key="w")["w"].tolist() == [[20, 30, 0], [2, 0, 0]]
    assert (made.group_ids, made.fell_back) == (None, False)
    changed = decision([True, True], [[1.0] * 3] * 2, torch.tensor([5.0, 6.0]))
    got = changed.updates(read(advantages=torch.tensor([1.0, 2.0])))
    assert (got["advantages"].tolist(), got["original_advantages"].tolist()) == ([5, 6], [1, 2])
    with pytest.raises(ValueError, match=r"no field 'advantages'"):
        changed.updates(read())


@pytest.mark.parametrize("of_tokens", [True, False])
def test_columns_of_a_decision_are_those_of_this_rank(of_tokens: bool) -> None:
    """The second and third of four samples of all ranks."""
    numbers = {
        "num_tokens": torch.tensor([9, 2, 1, 9]),
        "num_kept": torch.tensor([1, 0, 2, 1]),
        "weight_mean": torch.tensor([9.0, 0.0, 1.5, 9.0]),
        "scored": torch.tensor([True, False, True, True]),
    }
    scores = torch.tensor([[1.0, NAN, 7.0], [3.0, 7.0, 7.0]]) if of_tokens else torch.tensor([NAN, 3.0])
    rewards = {"rm_scores": torch.tensor([9.0, 0.25, 0.5, 9.0])} if of_tokens else {}
    made = Decision(scores, MASK > 0, MASK.float(), None, Summary(numbers | rewards, of_tokens), slice(1, 3), 3)
    got = made.columns(read())
    np.testing.assert_array_equal(got["score"], [1.0 if of_tokens else NAN, 3.0])
    np.testing.assert_array_equal(got["reward"], [0.25, 0.5] if of_tokens else [NAN, NAN])
    assert list(got) == ["score", "kept", "weight", "reason", "reward", "length"]
    assert (got["kept"].tolist(), got["weight"].tolist(), got["length"].tolist()) == ([False, True], [0, 1.5], [2, 1])
    assert [REASONS[i] for i in got["reason"]] == ["nan", "kept"]
