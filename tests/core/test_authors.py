"""What an author may leave out of a component, and is told of what is wrong with it."""

from __future__ import annotations

import warnings

import pytest
import torch

from lightning_dataflex import build
from lightning_dataflex.core.actuator import Actuator, Reweighter, Selector
from lightning_dataflex.core.ids import stable_ids
from lightning_dataflex.core.registry import components
from lightning_dataflex.core.scorer import Scorer
from lightning_dataflex.core.warn import NowAndThen, warn_once

BATCH = {"rm_scores": torch.tensor([1.0, 0.0]), "uid": ["a", "b"], "response_mask": torch.ones(2, 3)}
FLAGS = ("row_wise", "by_mask")
FLAGGED = [
    (cls, flag)
    for kind in ("scorer", "selector", "reweighter")
    for cls in components(kind).values()
    for flag in FLAGS
    if getattr(cls, flag)
]


class Step(Scorer):
    requires = ("uid",)

    def score(self, batch, step_id=0, **ctx):
        """The step, for every sample."""
        assert batch["uid"] == ["a", "b"]
        return torch.full((batch.num_samples, 1), float(step_id))


def test_a_score_may_be_a_column_and_the_step_is_0_unless_said() -> None:
    assert Step().score(BATCH).tolist() == [0, 0]
    assert Step().score(BATCH, 3).tolist() == [3, 3]
    assert int(Step().step_id) == 0
    assert (Step.score.__name__, Step.score.__doc__) == ("score", "The step, for every sample.")


@pytest.mark.parametrize(("cls", "flag"), FLAGGED, ids=[f"{cls.__name__}-{flag}" for cls, flag in FLAGGED])
def test_a_rule_of_ones_own_is_of_whole_batches_whatever_its_base_is(cls: type, flag: str) -> None:
    name = "score" if issubclass(cls, Scorer) else "act"
    own = type("Own", (cls,), {name: lambda self, *args, **ctx: None})
    assert not getattr(own, flag)
    assert own.columns is (Scorer if name == "score" else Actuator).columns
    same = type("Same", (cls,), {})
    assert getattr(same, flag)
    assert same.columns is cls.columns
    said = type("Said", (cls,), {name: own.__dict__[name], flag: True, "columns": cls.columns})
    assert getattr(said, flag)
    assert said.columns is cls.columns


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("name", ["weighted_sum", "product"])
def test_a_combination_of_ones_own_is_of_whole_batches_whatever_its_parts_are(name: str, flag: str) -> None:
    cls = components("scorer")[name]
    own = type("Own", (cls,), {"score": lambda self, *args, **ctx: None})
    assert getattr(cls(["token_entropy"]), flag)
    assert not getattr(cls(["token_entropy", "group_std"]), flag)
    assert not getattr(own(["token_entropy"]), flag)


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        (Scorer, {"timing": "later"}, "Own.timing is 'later'. Use one of pre_rollout"),
        (Scorer, {"granularity": "word"}, "Own.granularity is 'word'. Use one of domain"),
        (Scorer, {"requires": "uid"}, "Own.requires is 'uid'. Give a list"),
        (Selector, {"requires": "uid"}, "Own.requires is 'uid'. Give a list"),
        (Selector, {"granularities": "token"}, "Own.granularities is 'token'. Give a list"),
        (Reweighter, {"normalize": "rows"}, "Own.normalize is 'rows'"),
    ],
)
def test_a_class_that_says_what_cannot_be_is_refused(base: type, changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        type("Own", (base,), changes)


@pytest.mark.parametrize("base", [Scorer, Selector, Reweighter])
def test_one_number_for_all_samples_is_refused(base: type) -> None:
    name = "score" if base is Scorer else "act"
    own = type("Own", (base,), {name: lambda self, *args, **ctx: torch.tensor(True)})()
    with pytest.raises(ValueError, match=r"Own\.\w+ returned shape \(\) for 2 samples"):
        own.score(BATCH) if base is Scorer else own.act(torch.ones(2), BATCH)


def test_one_sample_is_no_group_without_others() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build("scorer", "group_solve_rate").score({"rm_scores": torch.ones(1), "uid": ["a"]})
    with pytest.warns(UserWarning, match="each of the 2 samples is alone in its group"):
        build("scorer", "group_solve_rate").score(BATCH)


def test_a_warning_is_said_once_or_every_hundredth_time() -> None:
    class Owner:
        pass

    owner, steps = Owner(), NowAndThen()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(1, 202):
            warn_once(owner, f"step {step}")
            steps.warn(lambda num: f"{num} such steps")
        warn_once(owner, "another")
    assert [str(each.message) for each in said] == [
        "step 1",
        "1 such steps",
        "101 such steps",
        "201 such steps",
        "another",
    ]


def test_ids_beyond_64_bits_are_ids() -> None:
    ends, beyond = [-(2**63), 2**63 - 1], [-(2**63) - 1, 2**63]
    ids = stable_ids([*ends, *beyond]).tolist()
    assert ids[:2] == ends
    assert len(set(ids)) == 4
