"""Scorers as torchmetrics Metrics: what torchmetrics promises of a Metric is true of each of them."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torchmetrics import MetricCollection

from lightning_dataflex import Scorer, build, components
from tests.laws import a_batch, built, together
from tests.ranks import processes, taken

SCORERS = components("scorer")


class Moving(Scorer):
    """Remembers a moving average of the rewards."""

    requires = ("rm_scores",)
    average: torch.Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("average", default=torch.tensor(0.0), dist_reduce_fx="mean")

    def score(self, batch: Any, step_id: int = 0, **ctx: Any) -> torch.Tensor:
        self.average.mul_(0.9).add_(0.1 * batch["rm_scores"].mean())
        return batch["rm_scores"] - self.average


def assert_scores(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, equal_nan=True)


def halves() -> tuple[dict, dict]:
    """Every group is in both."""
    return taken(a_batch(), [0, 1, 2, 3, 4]), taken(a_batch(), [5, 6, 7, 8, 9, 10, 11])


@pytest.mark.parametrize("name", SCORERS)
def test_updates_add_up_to_the_whole(name: str) -> None:
    scorer = built("scorer", name)
    for half in halves():
        scorer.update(half)
    assert_scores(scorer.compute(), built("scorer", name).score(a_batch()))
    scorer.reset()
    assert scorer.compute().numel() == 0
    scorer.update(halves()[0])
    assert_scores(scorer.compute(), built("scorer", name).score(halves()[0]))


@pytest.mark.parametrize("name", SCORERS)
def test_forward_gives_the_scores_of_the_batch_and_collects_it(name: str) -> None:
    scorer = built("scorer", name)
    for half in halves():
        assert_scores(scorer(half), built("scorer", name).score(half))
    assert_scores(scorer.compute(), built("scorer", name).score(a_batch()))


@pytest.mark.parametrize("name", SCORERS)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: m.clone(), lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_go_their_own_way(name: str, copied: Any) -> None:
    scorer = built("scorer", name)
    scorer.update(halves()[0])
    twin = copied(scorer)
    twin.update(halves()[1])
    assert_scores(twin.compute(), scorer.score(a_batch()))
    assert_scores(scorer.compute(), scorer.score(halves()[0]))


def test_in_a_collection_scorers_share_what_they_collect() -> None:
    names = {"rate": ("group_solve_rate", 0.5), "strict": ("group_solve_rate", 0.9)}
    rates = {key: build("scorer", name, success_threshold=least) for key, (name, least) in names.items()}
    collection = MetricCollection(rates | {"reward": build("scorer", "reward_difficulty")})
    for half in halves():
        collection.update(half)
    for name, scores in collection.compute().items():
        assert_scores(scores, collection[name].score(a_batch()))
    collection.reset()
    assert all(scores.numel() == 0 for scores in collection.compute().values())


@pytest.mark.parametrize("name", SCORERS)
def test_a_move_takes_what_was_collected_along(name: str) -> None:
    scorer = built("scorer", name)
    scorer.update(halves()[0])
    before = scorer.compute()
    assert scorer.to("meta").rows[0].is_meta
    scorer = built("scorer", name)
    scorer.update(halves()[0])
    assert_scores(scorer.half().double().set_dtype(torch.bfloat16).compute(), before)


def test_what_a_scorer_remembers_is_saved_and_what_it_collects_is_not() -> None:
    scorer = Moving()
    scorer.update(a_batch())
    scorer.score(a_batch())
    state = scorer.state_dict()
    assert list(state) == ["average"]
    (other := Moving()).load_state_dict(state)
    assert other.average == scorer.average != 0
    scorer.reset()
    assert scorer.average == 0


def test_deciding_collects_nothing() -> None:
    scorer = build("scorer", "group_solve_rate")
    sizes = []
    for _ in range(3):
        scorer.score(a_batch())
        sizes.append(len(pickle.dumps(scorer)))
    assert sizes[0] == sizes[1] == sizes[2]
    assert scorer.rows == []


def test_a_batch_without_a_required_field_is_refused() -> None:
    with pytest.raises(ValueError, match="The rollout batch has no field 'uid'"):
        build("scorer", "group_solve_rate").update({"rm_scores": torch.ones(2), "response_mask": torch.ones(2, 1)})


# -- over ranks --------------------------------------------------------------------------------------------------------


def scored_over_ranks(parts: list[dict]) -> dict[str, list[torch.Tensor]]:
    """Each scorer's value, twice, of batches of which this rank has seen some or none."""
    values = {}
    for name in SCORERS:
        scorer = built("scorer", name)
        for part in parts:
            scorer.update(part)
        values[name] = [scorer.compute(), scorer.compute()]
        assert len(scorer.rows) == len(parts)
    return values


@pytest.mark.parametrize("rows_of", [[[0, 2, 4], [1, 3]], [[], [0, 1, 2, 3, 4]], [[0], [], [1, 2, 3], [4]]], ids=str)
def test_compute_is_over_all_ranks_also_those_that_have_seen_nothing(rows_of: list[list[int]]) -> None:
    batches = [taken(a_batch(), [2 * i, 2 * i + 1]) for i in range(5)]
    ranks = processes(len(rows_of)).run(scored_over_ranks, [[batches[i] for i in rows] for rows in rows_of])
    order = together(*(batches[i] for rows in rows_of for i in rows))
    for values in ranks:
        for name, (value, again) in values.items():
            want = built("scorer", name).score(order)
            assert_scores(value, want)
            assert_scores(again, want)


def computed_on_rank_0_alone(part: dict) -> list[torch.Tensor]:
    scorer = build("scorer", "group_solve_rate")
    scorer.update(part)
    values = []
    scorer.sync()
    if dist.get_rank() == 0:
        values.append(scorer.compute())
    scorer.unsync()
    values.append(scorer.compute())
    if dist.get_rank() == 1:
        values.append(scorer.compute())
    return values


def test_one_rank_may_compute_alone_after_a_gather() -> None:
    ranks = processes(2).run(computed_on_rank_0_alone, list(halves()))
    want = build("scorer", "group_solve_rate").score(a_batch())
    assert [len(values) for values in ranks] == [2, 2]
    for value in (value for values in ranks for value in values):
        np.testing.assert_allclose(value, want)
