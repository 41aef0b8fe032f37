"""Scorers of prompts: the published vectors, their memory, and what they say after a stop."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from lightning_dataflex import Pipeline, build
from lightning_dataflex.core.history import Visits
from lightning_dataflex.functional import visits as rules
from lightning_dataflex.functional.subsets import k_of_difficulty, pruned

KINDS = {"easy": [1.0, 1.0], "hard": [0.0, 0.0], "mixed": [0.0, 1.0]}


def seen(trace: list[str], prompt: int = 7) -> Visits:
    return Visits.of(torch.full((2 * len(trace),), prompt), torch.tensor([r for kind in trace for r in KINDS[kind]]))


def greso_after(trace: list[str], **params):
    # Held p's, as in the vectors: nothing is adjusted on the way.
    scorer = build("scorer", "greso", **params)
    for kind in trace:
        scorer.observe(seen([kind]))
        scorer.p_easy = scorer.p_hard = 0.5
    return scorer


# The vectors give the probability to skip; the authors' code keeps at least 1 in 100.
@pytest.mark.parametrize(
    ("trace", "skip"),
    [
        ([], 0.0),
        (["mixed", "easy", "easy"], 0.75),
        (["easy"] * 12, 0.99),
        (["hard"] * 2, 0.75),
        (["easy", "hard"], 0.5),
    ],
    ids=str,
)
def test_greso__code(trace, skip):
    assert float(greso_after(trace).score({"prompt_id": [7]})) == pytest.approx(1 - skip)
    assert float(greso_after(trace).score({"prompt_id": [8]})) == 1


def test_greso_without_a_floor__paper():
    scorer = greso_after(["easy"] * 12, explore=1e-9)
    assert float(1 - scorer.score({"prompt_id": [7]})) == pytest.approx(0.999755859375)


def test_greso_has_a_p_for_either_kind():
    scorer = build("scorer", "greso", p_easy=0.9, p_hard=0.2)
    scorer.observe(seen(["easy"], 1))
    scorer.observe(seen(["hard"], 2))
    assert scorer.score({"prompt_id": [1, 2]}).tolist() == pytest.approx([0.9, 0.2])


def test_greso_controller_bounds__code():
    assert rules.adjusted(0.05, observed=1.0, target=0.1) == 0.05
    assert rules.adjusted(0.95, observed=0.0, target=0.1) == 0.95


def test_greso_adjusts_itself_to_the_target_share_once_prompts_come_again():
    scorer = build("scorer", "greso", target_easy=0.5, target_hard=0.1)
    ids = torch.tensor([1, 1, 2, 2, 3, 3, 4, 4])
    step = Visits.of(ids, torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0]))  # 1/4 easy, 1/4 hard
    scorer.observe(step)
    assert scorer.settings == {"p_easy": 0.5, "p_hard": 0.5}
    scorer.observe(step)
    assert scorer.settings == pytest.approx({"p_easy": 0.51, "p_hard": 0.49})


def test_mopps_update__paper():
    a, b = rules.beta_update(*(torch.tensor(x) for x in (3.0, 2.0, 6.0, 8.0)), decay=0.5, prior=(1, 1))
    assert (float(a), float(b)) == (8.0, 3.5)


def test_mopps_topB__paper():
    keep = build("selector", "nearest", target=0.5).keep(torch.tensor([0.9, 0.55, 0.2, 0.48, 0.5]), {}, num=3)
    assert keep.nonzero().flatten().tolist() == [1, 3, 4]


def test_mopps_draws_from_the_posterior_of_each_prompt():
    scorer = build("scorer", "mopps")
    scorer.observe(Visits.of(torch.tensor([7] * 10), torch.tensor([1.0] * 8 + [0.0] * 2)))
    drawn = np.array([scorer.score({"prompt_id": [7, 8]}, step_id=i).tolist() for i in range(4000)])
    # Beta(9, 3) and the uniform prior, by their means and variances.
    assert drawn.mean(0) == pytest.approx([0.75, 0.5], abs=0.02)
    assert drawn.var(0) == pytest.approx([0.75 * 0.25 / 13, 1 / 12], rel=0.1)


def test_mopps_draws_the_same_in_any_order_and_again():
    scorer, ids = build("scorer", "mopps"), [f"p{i}" for i in range(20)]
    once = scorer.score({"prompt_id": ids}, step_id=3)
    order = np.random.default_rng(0).permutation(20)
    assert torch.equal(scorer.score({"prompt_id": [ids[i] for i in order]}, step_id=3), once[order])
    assert not torch.equal(scorer.score({"prompt_id": ids}, step_id=4), once)
    assert not torch.equal(build("scorer", "mopps", seed=1).score({"prompt_id": ids}, step_id=3), once)


def test_speed_screen__code():
    groups = {"a": [0, 0, 0, 0], "b": [1, 0, 0, 0], "c": [1, 1, 1, 1]}
    batch = {
        "rm_scores": torch.tensor([float(r) for rewards in groups.values() for r in rewards]),
        "uid": [name for name in groups for _ in range(4)],
    }
    scorer = build("scorer", "speed", num_screening=4)
    keep = scorer.default_selector().keep(scorer.score(batch), batch)
    assert {name for name, k in zip(batch["uid"], keep.tolist()) if k} == {"b"}


def test_a_band_on_known_and_on_learned_pass_rates():
    prompts = {"prompt_id": [1, 2, 3], "rate": [0.1, 0.5, 0.9]}
    known = build("scorer", "pass_rate_band", known="rate", learned=False)
    assert known.default_selector().keep(known.score(prompts), prompts).tolist() == [False, True, False]
    learned = build("scorer", "pass_rate_band")
    learned.observe(Visits.of(torch.tensor([1] * 8 + [2] * 8), torch.tensor([1.0] * 8 + [1.0, 0.0] * 4)))
    assert learned.score(prompts).tolist() == pytest.approx([9 / 10, 5 / 10, 1 / 2])
    both = build("scorer", "pass_rate_band", known="rate")
    both.observe(Visits.of(torch.tensor([1] * 8), torch.tensor([1.0] * 8)))
    assert both.score(prompts).tolist() == pytest.approx([8.2 / 10, 0.5, 0.9])
    with pytest.raises(ValueError, match=r"rate of a prompt is 2\.0.*from 0 to 1"):
        known.score(prompts | {"rate": [0.5, 2.0, 0.1]})
    with pytest.raises(ValueError, match="learned is False and known is None"):
        build("scorer", "pass_rate_band", learned=False)


@pytest.mark.parametrize("name", ["greso", "mopps", "pass_rate_band"])
def test_the_memory_of_a_scorer_comes_back(name, tmp_path):
    def steps(scorer, numbers) -> list[float]:
        said = []
        for step in numbers:
            rng = np.random.default_rng(step)
            ids = torch.tensor(rng.integers(0, 12, 24))
            said += scorer.score({"prompt_id": ids}, step_id=step).tolist()
            scorer.observe(Visits.of(ids, torch.tensor(rng.integers(0, 2, 24)).float()), step)
        return said + list(scorer.settings.values())

    whole = steps(build("scorer", name), range(10))
    first = build("scorer", name)
    before = steps(first, range(5))
    torch.save(dict(first.state_dict()), tmp_path / "scorer.pt")
    second = build("scorer", name)
    second.load_state_dict(torch.load(tmp_path / "scorer.pt", weights_only=True), strict=False)
    num = len(first.settings)
    assert before[: len(before) - num] + steps(second, range(5, 10)) == whole


def test_the_draw_of_bernoulli_is_that_of_the_prompt():
    ids = torch.arange(20_000)
    u = rules.uniform(ids, 0, 5)
    assert torch.equal(rules.uniform(ids.flip(0), 0, 5), u.flip(0))
    assert u.min() >= 0
    assert u.max() < 1
    # Uniform: mean 1/2 and variance 1/12 to within five standard errors, and no two keys alike.
    assert float(u.mean()) == pytest.approx(0.5, abs=5 * (1 / 12 / 20_000) ** 0.5)
    assert float(u.var()) == pytest.approx(1 / 12, rel=0.05)
    others = [rules.uniform(ids, 0, 6), rules.uniform(ids, 1, 5), rules.uniform(ids, 5, 0), u]
    for one, two in itertools.combinations(others, 2):
        assert abs(np.corrcoef(one, two)[0, 1]) < 0.03
    keep = build("selector", "bernoulli").keep(torch.full((20_000,), 0.3), {"prompt_id": ids}, step_id=5)
    assert torch.equal(keep, u < 0.3)


@pytest.mark.parametrize(("mean", "k"), [(0.1, 8), (0.6, 6)])
def test_gfpo_adaptive__paper(mean, k):
    seen_means = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0, mean])
    assert k_of_difficulty(torch.tensor([mean]), seen_means, [8, 8, 6, 4]).tolist() == [k]


def test_gfpo_adaptive_cold__paper():
    assert k_of_difficulty(torch.tensor([0.9]), torch.tensor([0.9]), [8, 8, 6, 4]).tolist() == [8]


def test_gfpo_keeps_fewer_of_easy_groups_and_remembers_them():
    def batch(first: int) -> dict:
        solved = [0, 2, 4, 6, 8]
        rewards = [float(i < s) for s in solved for i in range(8)]
        return {"rm_scores": torch.tensor(rewards), "uid": [first + g for g in range(5) for _ in range(8)]}

    selector = build("selector", "gfpo", k_by_difficulty=[4, 3, 2, 1])
    counts = selector.keep(torch.zeros(40), batch(0)).reshape(5, 8).sum(1).tolist()
    # Quartiles 1/4, 1/2 and 3/4 of the five means: a mean on one lies above it.
    assert counts == [4, 3, 2, 1, 1]
    again = build("selector", "gfpo", k_by_difficulty=[4, 3, 2, 1])
    again.load_state_dict(selector.state_dict())
    hard = {"rm_scores": torch.zeros(8), "uid": [9] * 8}
    assert again.keep(torch.zeros(8), hard).sum() == selector.keep(torch.zeros(8), hard).sum() == 4
    with pytest.raises(ValueError, match="k_by_difficulty is"):
        build("selector", "gfpo", k_by_difficulty=[1, 2, 3])


def test_a_group_without_rewards_does_not_spoil_what_gfpo_remembers():
    selector = build("selector", "gfpo", k_by_difficulty=[4, 3, 2, 1])
    rewards = torch.tensor([torch.nan] * 4 + [1.0] * 4 + [0.0] * 4 + [0.0, 1.0, 0.0, 1.0] + [1.0, 1.0, 0.0, 1.0])
    batch = {"rm_scores": rewards, "uid": [g for g in range(5) for _ in range(4)]}
    for _ in range(2):
        counts = selector.keep(torch.zeros(20), batch).reshape(5, 4).sum(1).tolist()
    # Of means 1, 0, 1/2 and 3/4 the quartiles are 3/8, 5/8 and 13/16.
    assert counts == [0, 1, 4, 3, 2]
    with pytest.raises(ValueError, match="scope is 'rank', but gfpo remembers earlier groups"):
        Pipeline(build("scorer", "reward_difficulty"), selector, scope="rank")


@pytest.mark.parametrize(("advantages", "kept"), [([1.2, -0.3, 0.7, -1.1], [0, 3]), ([3, 1, 2], [0, 2])])
def test_cppo__code(advantages, kept):
    scores = torch.tensor(advantages, dtype=torch.float32).abs()
    assert build("selector", "cppo", within="batch").act(scores, {}) == kept


def test_cppo_prunes_each_group():
    scores, uid = torch.tensor([0.1, 0.2, 0.3, 5.0, 6.0, 7.0, 8.0, 9.0]), [0, 0, 0, 1, 1, 1, 1, 1]
    # int(3 / 2) = 1 and int(5 / 2) = 2 go.
    assert build("selector", "cppo").act(scores, {"uid": uid}) == [1, 2, 5, 6, 7]
    assert pruned(torch.tensor([torch.nan, 1.0, 2.0]), torch.zeros(3).long(), 0.5).tolist() == [False, False, True]
