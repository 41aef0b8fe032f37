"""Chances, draws and means over tokens against loops in NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lightning_dataflex.functional import drawing, tokens, visits

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("num", [0, 1, 2, 3, 9])
def test_so_many_are_drawn_as_there_are_and_never_what_has_no_chance(num: int) -> None:
    chances = torch.tensor([0.0, -INF, NAN, 1.0, 0.5])
    keep = drawing.drawn(chances, num, torch.arange(5), 3)
    assert (keep.dtype, int(keep.sum())) == (torch.bool, min(num, 3))
    assert not keep[1:3].any()


def test_a_draw_follows_from_ids_and_key_and_not_from_the_order() -> None:
    ids, chances = torch.arange(40) * 7, torch.linspace(-1, 1, 40)
    keep, order = drawing.drawn(chances, 10, ids, 5, 2), torch.randperm(40, generator=torch.Generator().manual_seed(0))
    assert torch.equal(drawing.drawn(chances[order], 10, ids[order], 5, 2), keep[order])
    assert not torch.equal(drawing.drawn(chances, 10, ids, 5, 3), keep)
    assert not torch.equal(drawing.drawn(chances, 10, ids, 6, 2), keep)


def test_draws_come_in_proportion_to_their_chances() -> None:
    ids, chances = torch.arange(4), torch.tensor([0.1, 0.2, 0.3, 0.4])
    first, pair = torch.zeros(4), torch.zeros(4)
    for step in range(1000):
        first += drawing.drawn(chances.log(), 1, ids, step)
        pair += drawing.drawn(chances.log(), 2, ids, step)
    np.testing.assert_allclose(first / 1000, chances, atol=0.04)
    p = chances.numpy()
    # Without replacement: first, or second after any other.
    both = [p[i] + sum(p[j] * p[i] / (1 - p[j]) for j in range(4) if j != i) for i in range(4)]
    np.testing.assert_allclose(pair / 1000, both, atol=0.04)


def test_uniform_numbers_are_those_of_splitmix64() -> None:
    """The published generator, seeded with 0, gives 0xE220A8397B1DCDAF first."""
    assert visits.uniform(torch.tensor([0])).item() == (0xE220A8397B1DCDAF >> 11) / 2**53

    def mixed(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    def expected(number: int, *key: int) -> float:
        x = number % 2**64
        for part in (0, *key):
            x = mixed((x + (part * 2 + 1) * 0x9E3779B97F4A7C15) % 2**64)
        return (x >> 11) / 2**53

    ids = [0, 1, -1, 2**62, -(2**63)]
    for key in ((), (0,), (3,), (3, 4)):
        assert visits.uniform(torch.tensor(ids), *key).tolist() == [expected(i, *key) for i in ids]


@pytest.mark.parametrize(("num", "keep"), [(4, 0.5), (5, 0.25), (1, 0.9)])
def test_chances_by_rank_are_the_power_of_the_middle_of_each(num: int, keep: float) -> None:
    powers = [((rank + 0.5) / num) ** (1 / keep - 1) for rank in range(num)]
    np.testing.assert_allclose(drawing.rank_power(num, keep), np.array(powers) / sum(powers))
    # The last of many by a high power: neither overflows.
    assert drawing.rank_power(10_000, 0.005)[-1].item() == pytest.approx(200 / 10_000, rel=0.02)


def test_a_schedule_has_a_start_an_end_and_batches_between() -> None:
    acts = [drawing.in_schedule(progress, 0, 0.2, 0.8, 0) for progress in (0.19, 0.2, 0.5, 0.79, 0.8, 0.9)]
    assert acts == [False, True, True, True, False, False]
    assert [drawing.in_schedule(0.5, batch, 0.2, 0.8, 3) for batch in range(7)] == [True, True, False] * 2 + [True]
    assert not any(drawing.in_schedule(0.5, batch, 0.2, 0.8, 1) for batch in range(3))


def test_nearness_is_a_softmax_of_distances() -> None:
    rates = np.array([0.0, 0.3, 0.5, 0.9])
    for target, temperature in ((0.5, 0.1), (0.3, 2.0)):
        sizes = np.exp(-abs(rates - target) / temperature)
        np.testing.assert_allclose(drawing.nearness(torch.tensor(rates), target, temperature), sizes / sizes.sum())
    np.testing.assert_allclose(
        drawing.nearness(torch.tensor([0.501, NAN, 0.5])), [1 / (1 + math.e), 0, 1 / (1 + 1 / math.e)], rtol=1e-4
    )
    assert drawing.nearness(torch.tensor([NAN, NAN])).tolist() == [0, 0]
    assert drawing.log_nearness(torch.tensor([0.25, NAN]), 0.75, 0.5).tolist() == [-1, -INF]


def test_priorities_are_powers_of_errors_or_of_ranks() -> None:
    errors = np.array([0.5, -2.0, 2.0, 0.0, 1.0])
    sizes = (abs(errors) + 1e-6) ** 0.7
    np.testing.assert_allclose(drawing.prioritized(torch.tensor(errors), 0.7), sizes / sizes.sum())
    np.testing.assert_allclose(
        drawing.prioritized(torch.tensor(errors), 0.7, eps=0.1),
        (abs(errors) + 0.1) ** 0.7 / ((abs(errors) + 0.1) ** 0.7).sum(),
    )
    # Of equal errors the earlier ranks first.
    ranks = 1 / np.array([4.0, 1, 2, 5, 3]) ** 0.5
    np.testing.assert_allclose(drawing.prioritized(torch.tensor(errors), 0.5, by="rank"), ranks / ranks.sum())


def test_the_correction_is_one_for_the_rarest() -> None:
    p = np.array([0.1, 0.2, 0.7])
    expected = (3 * p) ** -0.4 / ((3 * p) ** -0.4).max()
    np.testing.assert_allclose(drawing.priority_correction(torch.tensor(p), 0.4), expected)
    # Rounding aside, only the ratio of chances counts, and the number of samples cancels.
    assert drawing.priority_correction(torch.tensor(p), 0.4).max() == 1


def test_solve_chances_and_what_is_uncertain() -> None:
    np.testing.assert_allclose(
        drawing.solve_chance(torch.tensor([0, 3, 5]), torch.tensor([4, 4, 5])), [1 / 6, 4 / 6, 6 / 7]
    )
    rates = np.array([0.1, 0.5, 0.8])
    for temperature in (0.1, 0.5):
        sizes = np.exp(np.sqrt(rates * (1 - rates)) / temperature)
        np.testing.assert_allclose(drawing.uncertain_first(torch.tensor(rates), temperature), sizes / sizes.sum())
    # A rate that rounding put above 1 is one that is sure.
    np.testing.assert_allclose(drawing.uncertain_first(torch.tensor([1 + 1e-7, 0.0]), 0.1), [0.5, 0.5])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_means_and_sums_over_tokens(dtype: torch.dtype) -> None:
    values = torch.tensor([[1.0, 3.0, NAN], [2.0, NAN, NAN], [NAN] * 3], dtype=dtype)
    mask, wide = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]]), dtype if dtype == torch.float64 else torch.float32
    for got, expected in (
        (tokens.token_mean(values, mask), [2, 2, NAN]),
        (tokens.token_sum(values, mask), [4, 2, NAN]),
        (tokens.token_mean(torch.ones(3, dtype=dtype), mask), [1, 1, NAN]),
        (tokens.token_mean(torch.tensor([[1, 3], [2, 6]], dtype=dtype)), [2, 4]),
        (tokens.token_mean(torch.tensor([1, 3], dtype=dtype)), [1, 3]),
        (tokens.token_sum(torch.tensor([[1, 3], [2, 6]], dtype=dtype)), [4, 8]),
    ):
        np.testing.assert_array_equal(got, expected)
        assert got.dtype == wide


def test_runs_of_visits_and_what_is_skipped() -> None:
    np.testing.assert_allclose(visits.skip_probability(torch.tensor([0.0, 1, 3]), 0.9), [0, 0.1, 1 - 0.9**3], rtol=1e-6)
    run, kind, now = torch.tensor([[3, b, n] for b in range(3) for n in range(3)]).T
    assert visits.visit_runs(run, kind, now).tolist() == [0, 1, 1, 0, 4, 1, 0, 1, 4]
    assert [visits.adjusted(0.5, observed, 0.25) for observed in (0.24, 0.25, 0.26)] == [0.51, 0.49, 0.49]
    assert visits.adjusted(0.05, 1.0, 0.25) == 0.05
    assert visits.adjusted(0.9, 0.0, 0.25, step=0.2, high=0.97) == 0.97
    assert visits.adjusted(0.3, 1.0, 0.25, step=0.2, low=0.2) == 0.2


@pytest.mark.parametrize(("decay", "prior"), [(1.0, (1, 1)), (0.5, (1, 1)), (0.25, (3, 5))])
def test_a_posterior_forgets_towards_the_prior(decay: float, prior: tuple[int, int]) -> None:
    alpha, beta = visits.beta_update(
        torch.tensor([4.0]), torch.tensor([6.0]), torch.tensor([3.0]), torch.tensor([8.0]), decay=decay, prior=prior
    )
    assert alpha.item() == decay * 4 + (1 - decay) * prior[0] + 3
    assert beta.item() == decay * 6 + (1 - decay) * prior[1] + 5


def test_a_posterior_forgets_nothing_unless_said() -> None:
    one = torch.ones(1)
    assert [each.item() for each in visits.beta_update(one * 2, one * 3, one, one * 4)] == [3, 6]
    halves = visits.beta_update(one * 2, one * 3, one * 0, one * 0, decay=0.0)
    assert [each.item() for each in halves] == [1, 1]
