"""Proportions of domains: published numbers, and what is true of every input."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dataflex.functional import mixing
from lightning_dataflex.functional.proportions import apportioned, boltzmann, floored, normalised, optimistic
from lightning_dataflex.functional.scoring import reward_variance

NAN = float("nan")
SHARES = st.lists(st.floats(0, 1), min_size=2, max_size=8).map(lambda w: normalised(torch.tensor(w)))


def assert_close(got, want, atol=1e-9):
    np.testing.assert_allclose(np.asarray(got, dtype=float), want, rtol=0, atol=atol)


def test_reward_gap():
    assert_close(
        mixing.reward_gap(torch.tensor([0.9, 0.5, 0.1], dtype=torch.float64), 0.5),
        [0.12227071358930015, 0.27211847744896767, 0.6056108089617321],
    )


def test_dump_basic():
    mean = torch.tensor([0.8, 0.4, 0.1], dtype=torch.float64)
    bound = mixing.upper_confidence_bound(mean, torch.tensor([300, 100, 50]))
    assert_close(bound, [1.001513663081826, 0.7478780752471716, 0.5895563153130089])
    assert_close(boltzmann(bound, 0.1), [0.9129037200215501, 0.07226027577694027, 0.014836004201509557])


def test_dump_cold():
    bound = mixing.upper_confidence_bound(torch.tensor([NAN, NAN]), torch.zeros(2))
    assert_close(bound, [1.1774100225154747] * 2)
    assert_close(boltzmann(bound, 0.1), [0.5, 0.5])


def test_dads_paper():
    ema = torch.tensor([0.30000000000000004, 0.8500000000000001], dtype=torch.float64)
    assert_close(mixing.dads(ema, 0.5, 0.1), [0.7413303114335573, 0.25866968856644257])


def test_tscl_window_slope_is_over_true_steps():
    scores = torch.tensor([0.1, 0.3, 0.35, 0.9], dtype=torch.float64)
    assert mixing.slope(torch.tensor([0, 1, 2, 3]), scores) == pytest.approx(0.24500000000000002)
    gaps = [0, 10, 11, 40]
    assert mixing.slope(torch.tensor(gaps), scores) == pytest.approx(np.polyfit(gaps, scores, 1)[0])
    assert math.isnan(mixing.slope(torch.tensor([3]), torch.tensor([1.0])))
    assert math.isnan(mixing.slope(torch.tensor([]), torch.tensor([])))


def test_odm_eps_and_step():
    eps = [mixing.odm_exploration(3, t) for t in (1, 10, 1000)]
    assert_close(eps, [0.3333333333333333, 0.19136459866514058, 0.01913645986651406])
    assert_close([mixing.odm_exploration(2, t) for t in (0, 1, 2)], [0.5, 0.5, math.sqrt(math.log(2) / 4)])
    gain = mixing.importance_estimate(torch.tensor([0.3, NAN]), torch.tensor([1, 0]), torch.tensor([0.5, 0.5]))
    assert_close(gain, [0.6, 0.0], atol=1e-7)
    estimates = torch.tensor([0.6, 0.0], dtype=torch.float64)
    assert_close(mixing.odm(estimates, mixing.odm_exploration(2, 10), 0.5), [0.5467253537999022, 0.45327464620009783])


def test_doremi_step():
    p, excess = torch.full((3,), 1 / 3, dtype=torch.float64), torch.tensor([0.5, 0.0, -0.2])
    assert_close(mixing.doremi(p, excess, 1.0, 1e-3), [0.4517442324490618, 0.27412788377546915, 0.27412788377546915])
    p = torch.tensor([1e-12, 0.999999999999], dtype=torch.float64)
    assert_close(mixing.doremi(p, torch.zeros(2), 1.0, 1e-3), [0.000500000000999, 0.9994999999990009])


def test_plr():
    scores, staleness = torch.tensor([0.2, 0.9, 0.5]), torch.tensor([4.0, 0.0, 6.0])
    assert_close(
        mixing.rank_prioritised(scores, staleness, 0.1, 0.1),
        [0.04001522645158467, 0.8991067396230022, 0.060878033925413085],
    )
    # The published code sums to 1 - rho here.
    assert_close(
        mixing.rank_prioritised(scores[:2], torch.zeros(2), 1.0, 0.3),
        np.array([0.2333333333333333, 0.4666666666666666]) / 0.7,
    )
    equal = mixing.rank_prioritised(torch.tensor([0.5, 0.5, 0.1]), torch.zeros(3), 0.5, 0.1)
    assert equal[0] == equal[1] > equal[2]


@pytest.mark.parametrize(
    ("t", "want"),
    [
        (0, [0.6069351175541474, 0.22625052216766858, 0.16681436027818394]),
        (25, [0.21992015612626703, 0.5601596877474659, 0.21992015612626703]),
        (50, [0.174104247669161, 0.45479325068015497, 0.371102501650684]),
        (100, [0.16681436027818394, 0.22625052216766858, 0.6069351175541474]),
    ],
)
def test_e2h_gaussian(t, want):
    assert_close(mixing.e2h_gaussian(t / 100, 3, exponent=0.5, sigma=0.5, floor=1 / 6), want)


def test_e2h_cosine_moves_from_easy_to_hard():
    assert_close(mixing.e2h_cosine(0, 3), [2 / 3, 1 / 3, 0])
    assert_close(mixing.e2h_cosine(0.5, 3), [1 / 3] * 3)
    assert_close(mixing.e2h_cosine(1, 3), [0, 1 / 3, 2 / 3])


def test_adarft():
    assert mixing.adarft_target(20, 0.8, eta=50, alpha=2, beta=0.5) == pytest.approx(46.85247834990177)
    levels = torch.tensor([10.0, 40.0, 25.0, 60.0])
    for target in (10.0, 26.4, 33.0, 59.0, 60.0):
        shares = mixing.around(target, levels)
        assert float((shares * levels).sum()) == pytest.approx(target)
        assert (shares > 0).sum() <= 2
    assert float((mixing.around(90.0, levels) * levels).sum()) == 60.0


def test_vcrl_p():
    groups = torch.arange(9).repeat_interleave(8)
    rewards = (torch.arange(8).repeat(9) < groups).float()
    got = reward_variance(rewards, groups, 9)[::8]
    assert_close(got, [0.0, 0.4375, 0.75, 0.9375, 1.0, 0.9375, 0.75, 0.4375, 0.0], atol=1e-6)


def test_floors():
    p = torch.tensor([0.98, 0.01, 0.01], dtype=torch.float64)
    assert_close(floored(p, 0.05, "mixture"), [0.883, 0.0585, 0.0585])
    assert_close(floored(p, 0.05), [0.9, 0.05, 0.05])
    chain = torch.tensor([0.9, 0.06, 0.04], dtype=torch.float64)
    assert_close(floored(chain, 0.055), [0.8859374999999999, 0.0590625, 0.055])
    with pytest.raises(ValueError, match=r"floor is 0.4 for 3 domains, which needs 1.2.*0 to 0.333"):
        floored(p, 0.4)


@given(SHARES, st.floats(0, 1), st.sampled_from(["water_filling", "mixture"]))
@settings(max_examples=200, deadline=None)
def test_no_proportion_is_below_the_floor(shares, part, method):
    floor = part / len(shares)
    got = floored(shares, floor, method)
    assert float(got.sum()) == pytest.approx(1, abs=1e-12)
    assert (got >= floor - 1e-12).all()
    # Nobody overtakes anybody.
    assert ((got[:, None] - got[None, :]) * (shares[:, None] - shares[None, :]) >= -1e-12).all()


@given(SHARES, st.integers(0, 200), st.integers(0, 50))
@settings(max_examples=200, deadline=None)
def test_whole_numbers_are_within_one_of_the_proportions(shares, num, turn):
    got = apportioned(shares, num, turn)
    assert int(got.sum()) == num
    assert ((got - shares * num).abs() < 1 + 1e-6).all()


def test_largest_remainder_and_rotating_ties():
    assert apportioned(torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), 7).tolist() == [4, 2, 1]
    assert apportioned(torch.tensor([0.5, 0.5]), 3).tolist() == [2, 1]
    thirds = torch.full((3,), 1 / 3, dtype=torch.float64)
    turns = [apportioned(thirds, 4, turn).tolist() for turn in range(3)]
    assert turns == [[2, 1, 1], [1, 2, 1], [1, 1, 2]]


def test_who_has_nothing_pays_back_nothing():
    owed = torch.tensor([1.8, -0.9, -0.9], dtype=torch.float64)
    assert apportioned(torch.tensor([1.0, 0.0, 0.0]), 1, owed=owed).tolist() == [1, 0, 0]


def test_what_was_never_seen_is_taken_for_the_best():
    assert optimistic(torch.tensor([0.2, NAN, 0.5])).tolist() == pytest.approx([0.2, 0.5, 0.5])
    assert optimistic(torch.tensor([NAN, NAN]), 1.0).tolist() == [1.0, 1.0]
    assert optimistic(torch.tensor([NAN, NAN])).tolist() == [0.0, 0.0]
