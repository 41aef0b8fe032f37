"""Mixture: when the mixer acts, on what, and what is told and saved."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch

from lightning_dataflex import Mixer, Mixture, Scorer, build

NAN = float("nan")


class Rewards(Scorer):
    requires = ("rm_scores",)
    granularity = "response"

    def score(self, batch: Any, step_id: int = 0, **ctx: Any) -> Any:
        return batch["rm_scores"] + 100 * step_id


class Tokens(Scorer):
    requires = ("old_log_probs", "response_mask")
    granularity = "token"

    def score(self, batch: Any, step_id: int = 0, **ctx: Any) -> Any:
        return batch["old_log_probs"]


class Told(Mixer):
    """Gives the next of what it is told to, and notes what it was asked."""

    needs_data = True

    def __init__(self, *shares: list[float], domains: Any = None) -> None:
        self.shares, self.asked, self.observed = list(shares), [], []
        if domains:
            self.bind(domains)

    def act(self, scores: Any, batch: Any, **ctx: Any) -> Any:
        self.asked.append((scores, ctx))
        return self.shares[min(len(self.asked), len(self.shares)) - 1]

    def observe(self, sums: Any, proportions: Any) -> None:
        self.observed.append((sums.count.tolist(), proportions.tolist()))


class Eager(Told):
    needs_data = False


def a_mixture(mixer: Any = None, scorer: Any = None, **settings: Any) -> Mixture:
    return Mixture(scorer or Rewards(), mixer or Told([0.25, 0.75]), **{"domains": ["a", "b"], **settings})


def batch(rewards: list[float], domain: Any, **more: Any) -> dict[str, Any]:
    ones = torch.ones(len(rewards), 2)
    return {"rm_scores": torch.tensor(rewards), "domain": domain, "response_mask": ones} | more


def test_a_step_is_observed_then_the_mixer_acts() -> None:
    mixer = Told([0.25, 0.75], [0.5, 0.5])
    mixture = a_mixture(mixer)
    assert mixture.proportions == {"a": 0.5, "b": 0.5}
    assert mixture.metrics == {}
    mixture.observe(batch([1.0, 0.0], ["a", "b"]))
    mixture.observe(batch([0.0, NAN], np.array(["a", "b"])))
    mixture.end_step(0, progress=0.5)
    assert mixture.proportions == {"a": 0.25, "b": 0.75}
    assert mixture.metrics == {"prop_a": 0.5, "prop_b": 0.5, "score_a": 0.5, "score_b": 0, "n_nan": 1}
    (scores, context), *_ = mixer.asked
    assert scores == {"a": 0.5, "b": 0}
    assert (context["step_id"], context["progress"], context["proportions"]) == (1, 0.5, {"a": 0.5, "b": 0.5})
    assert (context["counts"], context["stats"]) == ({"a": 2, "b": 1}, mixture.stats)
    mixture.observe(batch([3.0], ["b"]), step_id=1)
    mixture.end_step(1, drawn_by={"a": 1, "b": 3})
    assert mixture.metrics == {"prop_a": 0.25, "prop_b": 0.75, "score_a": 0.5, "score_b": 51.5, "n_nan": 0}
    assert mixer.observed == [([2, 1], [0.5, 0.5]), ([0, 1], [0.25, 0.75])]
    # A step in which nothing was seen is none to the mixer's memory.
    mixture.end_step(2)
    assert (len(mixer.observed), len(mixer.asked)) == (2, 3)
    assert mixture.metrics["prop_a"] == 0.5
    mixture.metrics["prop_a"] = 9
    assert mixture.metrics["prop_a"] == 0.5


@pytest.mark.parametrize(
    ("warmup", "every", "steps"),
    [(0, 1, [0, 1, 2, 3, 4, 5]), (2, 1, [1, 2, 3, 4, 5]), (0, 3, [2, 5]), (1, 2, [0, 2, 4]), (3, 2, [2, 4])],
)
def test_the_mixer_acts_after_its_warmup_every_so_many_steps(warmup: int, every: int, steps: list[int]) -> None:
    mixer = Told([0.5, 0.5])
    mixture = a_mixture(mixer, warmup_step=warmup, update_step=every)
    acted = []
    for step in range(6):
        before = len(mixer.asked)
        mixture.end_step(step)
        acted += [step] * (len(mixer.asked) - before)
    assert acted == steps


def test_a_mixer_that_needs_no_data_acts_before_the_first_step() -> None:
    mixer = Eager([0.25, 0.75])
    assert a_mixture(mixer).proportions == {"a": 0.25, "b": 0.75}
    assert (mixer.asked[0][1]["step_id"], mixer.asked[0][1]["progress"]) == (0, 0.0)
    # Not in a warmup, nor where the block has weights, nor where it needs data.
    assert a_mixture(Eager([0.25, 0.75]), warmup_step=1).proportions == {"a": 0.5, "b": 0.5}
    assert a_mixture(Eager([0.25, 0.75]), domains={"a": 3, "b": 1}).proportions == {"a": 0.75, "b": 0.25}
    assert a_mixture().proportions == {"a": 0.5, "b": 0.5}


def test_progress_is_what_was_said() -> None:
    mixer = Told([0.5, 0.5])
    mixture = a_mixture(mixer)
    mixture.end_step(0)
    mixture.end_step(1, progress=0.25)
    assert [context["progress"] for _, context in mixer.asked] == [None, 0.25]


def test_scores_of_tokens_are_their_mean_and_blank_samples_none() -> None:
    mixture = a_mixture(scorer=Tokens())
    mask = torch.tensor([[1, 1], [1, 0], [0, 0]])
    log_probs = torch.tensor([[1.0, 3.0], [5.0, NAN], [NAN, NAN]])
    mixture.observe(
        {"old_log_probs": log_probs, "response_mask": mask, "domain": torch.tensor([0, 1, 1])}
        | {"domain": ["a", "b", "b"]}
    )
    mixture.end_step(0)
    assert mixture.metrics == {"prop_a": 0.5, "prop_b": 0.5, "score_a": 2, "score_b": 5, "n_nan": 0}
    blank = a_mixture()
    blank.observe(batch([NAN, 1.0], ["a", "b"], response_mask=torch.tensor([[0, 0], [1, 0]])))
    blank.end_step(0)
    assert blank.metrics["n_nan"] == 0


@pytest.mark.parametrize("row_wise", [True, False])
def test_scorers_of_rows_and_of_batches_say_the_same(row_wise: bool) -> None:
    scorer = type("Each", (Rewards,), {"row_wise": row_wise})()
    mixture = a_mixture(scorer=scorer)
    mixture.observe(batch([1.0, NAN, 0.5], ["b", "a", "b"]), step_id=2)
    mixture.end_step(0)
    np.testing.assert_equal(mixture.metrics["score_b"], 200.75)
    assert np.isnan(mixture.metrics["score_a"])
    assert mixture.metrics["n_nan"] == 1


def test_domains_are_named_once_and_are_two_at_least() -> None:
    for names in ([], ["a"], ["a", "b", "a"]):
        with pytest.raises(ValueError, match=r"^The domains are .*\. A mixture needs at least two, each named once"):
            Mixture(Rewards(), Told(), domains=names)
    free = Mixture(Rewards(), Told([0.5, 0.5]))
    assert (free.domains, free.state_dict(), free.load_state_dict({})) == ([], {}, None)
    with pytest.raises(ValueError, match=r"^The mixture does not know its domains"):
        free.observe(batch([1.0], ["a"]))
    free.bind(["b", "a"])
    free.bind(["a", "b"])
    assert (free.domains, free.actuator.domains) == (["b", "a"], ["b", "a"])
    with pytest.raises(ValueError, match=r"^domains names b, a, but the data has a, c\. Name those"):
        free.bind(["a", "c"])
    made = Mixture(Rewards(), Told([0.5, 0.5], domains=["x", "y"]), domains=["y", "x"])
    assert made.domains == ["x", "y"]
    numbers = Mixture(Rewards(), Told([0.5, 0.5]), domains={1: 1, 2: 3})  # type: ignore[dict-item]
    assert numbers.proportions == {"1": 0.25, "2": 0.75}
    numbers.observe(batch([1.0, 0.0], torch.tensor([1, 2])))
    numbers.end_step(0)
    assert numbers.metrics["score_1"] == 1


def test_samples_are_of_the_domains() -> None:
    with pytest.raises(ValueError, match=r"^The rollout batch has samples of the domains c, d, which are none of a"):
        a_mixture().observe(batch([1.0] * 4, ["c", "a", "d", "c"]))
    with pytest.raises(ValueError, match=r"^domain has 1 rows but"):
        a_mixture().observe(batch([1.0, 2.0], ["a"]))
    with pytest.raises(ValueError, match=r"no field 'domain'"):
        a_mixture().observe({"rm_scores": torch.ones(1), "response_mask": torch.ones(1, 1)})
    mapped = a_mixture(fields={"rm_scores": "r"})
    mapped.observe({"r": torch.ones(1), "domain": ["a"], "response_mask": torch.ones(1, 1)})


def told(work: Any, *args: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        work(*args)
    return [str(each.message) for each in said]


def test_a_state_goes_to_the_same_domains() -> None:
    mixture = a_mixture(Told([0.25, 0.75]))
    mixture.observe(batch([1.0, 0.0], ["a", "b"]))
    mixture.end_step(0)
    state = mixture.state_dict()
    assert list(state) == ["stats", "proportions", "scorer", "actuator"]
    again = a_mixture()
    assert told(again.load_state_dict, state) == []
    assert (again.proportions, again.stats.scores()) == ({"a": 0.25, "b": 0.75}, {"a": 1, "b": 0})
    other = a_mixture(domains=["b", "c"])
    assert len(told(other.load_state_dict, state)) == 1
    assert (other.proportions, other.stats.scores()) == ({"b": 0.5, "c": 0.5}, {"b": 0})
    anew = a_mixture(scorer=Tokens())
    assert told(anew.load_state_dict, state)[0] == (
        "The checkpoint has the domains' scores of Rewards(). The statistics of Tokens() begin anew."
    )
    assert (anew.proportions, anew.stats.scores()) == ({"a": 0.25, "b": 0.75}, {})


def test_a_mixture_is_built_of_a_block_for_mix() -> None:
    block = {"mechanism": "mix", "actuator": "reward_gap", "domains": ["a", "b"], "warmup_step": 2, "update_step": 3}
    made = Mixture.from_config(block | {"fields": {"rm_scores": "r"}})
    assert (made.warmup_step, made.update_step, made.fields) == (2, 3, {"rm_scores": "r"})
    assert made.domains == ["a", "b"]
    with pytest.raises(ValueError, match=r"^mechanism is 'select', which is for a Pipeline\. A Mixture is for mix"):
        Mixture.from_config({"mechanism": "select", "actuator": "threshold_band"})
    grouped = block | {"scorer": "group_solve_rate"}
    with pytest.raises(ValueError, match=r"'gae' has no groups"):
        Mixture.from_config(grouped | {"adv_estimator": "gae"})
    with pytest.raises(ValueError, match=r"'gae' has no groups"):
        Mixture.from_config(grouped, adv_estimator="gae")
    assert build("mixer", "reward_gap").domains == ()
