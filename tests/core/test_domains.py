"""What is known of each domain, against loops over all that was added."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from lightning_dataflex.core.domains import DomainStats, DomainSums, check_names, prior, warn_of_other_domains

NAN = float("nan")
DOMAINS = ["math", "code", "chat"]


def sums(scores: list[float], domain: list[int]) -> DomainSums:
    return DomainSums.of(torch.tensor(scores), torch.tensor(domain), len(DOMAINS))


def filled(window: int = 50) -> DomainStats:
    """Two steps of math, three of code, none of chat; the second of code in two batches."""
    stats = DomainStats(DOMAINS, window)
    stats.add(0, sums([1.0, 0.0, 0.5], [0, 0, 1]))
    stats.add(2, sums([4.0, NAN], [1, 0]))
    stats.add(2, sums([2.0, 3.0], [1, 1]))
    stats.add(5, sums([1.0, 1.0, 8.0], [0, 0, 1]))
    return stats


def test_sums_are_of_the_scores_that_are_numbers() -> None:
    got = sums([2.0, NAN, 3.0, float("inf"), -1.0], [1, 1, 1, 0, 2])
    assert (got.count.tolist(), got.total.tolist(), got.squares.tolist()) == ([0, 2, 1], [0, 5, -1], [0, 13, 1])
    np.testing.assert_array_equal(got.mean, [NAN, 2.5, -1])
    twice = got + sums([1.0, 1.0], [0, 1])
    assert (twice.count.tolist(), twice.total.tolist(), twice.squares.tolist()) == ([1, 3, 1], [1, 6, -1], [1, 14, 1])


def test_the_window_has_what_was_seen_of_each_domain() -> None:
    stats = filled()
    math, code = [1, 0, 1, 1], [0.5, 4, 2, 3, 8]
    np.testing.assert_allclose(stats.mean, [np.mean(math), np.mean(code), NAN])
    np.testing.assert_allclose(stats.variance, [np.var(math), np.var(code), NAN])
    np.testing.assert_allclose(
        stats.slope, [np.polyfit([0, 5], [0.5, 1], 1)[0], np.polyfit([0, 2, 5], [0.5, 3, 8], 1)[0], NAN]
    )
    assert stats.count.tolist() == [4, 5, 0]
    assert stats.last_seen.tolist() == [5, 5, -1]
    assert stats.staleness.tolist() == [0, 0, 6]
    assert stats.scores() == pytest.approx({"math": 0.75, "code": 3.5})
    assert [len(stats.history[name]) for name in DOMAINS] == [2, 3, 0]


def test_only_the_last_steps_of_a_domain_are_in_its_window() -> None:
    stats = filled(window=2)
    np.testing.assert_allclose(stats.mean, [0.75, np.mean([4, 2, 3, 8]), NAN])
    assert stats.count.tolist() == [4, 5, 0]
    stats.add(6, sums([0.0], [2]))
    assert stats.staleness.tolist() == [1, 1, 0]
    assert stats.mean[2] == 0
    with pytest.raises(ValueError, match=r"window is 0. It must be a whole number of at least 1"):
        DomainStats(DOMAINS, 0)
    assert DomainStats(DOMAINS, 1).window == 1
    assert (DomainStats(DOMAINS).window, DomainStats(DOMAINS).step) == (50, -1)
    assert DomainStats(DOMAINS).staleness.tolist() == [0, 0, 0]


def test_a_late_batch_belongs_to_its_own_step_and_leaves_the_clock_alone() -> None:
    stats = filled()
    stats.add(3, sums([7.0], [2]))
    assert (stats.step, stats.staleness.tolist()) == (5, [0, 0, 2])


def test_equal_scores_have_no_variance_whatever_rounding_says() -> None:
    stats = DomainStats(["a"])
    stats.add(0, DomainSums.of(torch.tensor([0.1] * 10, dtype=torch.float64), torch.zeros(10), 1))
    assert 0 <= stats.variance.item() < 1e-16
    sure = DomainSums(torch.tensor([3.0]), torch.tensor([3.0]), torch.tensor([2.999]))
    less = DomainStats(["a"])
    less.add(0, sure)
    assert less.variance.item() == 0


def test_a_state_is_taken_back_by_name() -> None:
    stats, again, other = filled(), DomainStats(DOMAINS), DomainStats(["new", "code"], window=2)
    again.load_state_dict(stats.state_dict())
    other.load_state_dict(stats.state_dict())
    for name in ("mean", "variance", "slope", "count", "last_seen", "staleness"):
        np.testing.assert_array_equal(getattr(again, name), getattr(stats, name))
    assert again.history == stats.history
    assert again.step == other.step == 5
    assert (other.count.tolist(), other.last_seen.tolist()) == ([0, 5], [-1, 5])
    np.testing.assert_allclose(other.mean, [NAN, np.mean([4, 2, 3, 8])])
    for each in (again, other):
        each.add(6, DomainSums.of(torch.tensor([1.0]), torch.tensor([1]), len(each.domains)))
    assert (len(again.history["code"]), len(other.history["code"])) == (4, 2)


def test_domains_that_come_and_go_are_told_of() -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        warn_of_other_domains(stats := DomainStats(DOMAINS), {"math": 1, "law": 1}, ["math", "code"])
        warn_of_other_domains(DomainStats(DOMAINS), {"math": 1, "law": 1}, ["math"])
        warn_of_other_domains(DomainStats(DOMAINS), {"math": 1}, ["math", "code"])
        warn_of_other_domains(stats, {"math": 1, "code": 1}, ["code", "math"])
    assert [str(each.message) for each in said] == [
        f"The checkpoint has the domains {there}. What it knows of {gone} is dropped; {new} start without data."
        for there, gone, new in (("math, law", "law", "code"), ("math, law", "law", "none"), ("math", "none", "code"))
    ]


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        (None, [1 / 3] * 3),
        ({"chat": 1, "math": 3, "code": 0}, [0.75, 0, 0.25]),
        ([0, 0, 2], [0, 0, 1]),
        ((1.0, 2.0, 5.0), [1 / 8, 2 / 8, 5 / 8]),
    ],
)
def test_weights_become_proportions_in_the_order_of_the_domains(weights: object, expected: list[float]) -> None:
    got = prior(DOMAINS, weights)  # type: ignore[arg-type]
    assert got.dtype == torch.float64
    assert got.tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1, 2], r"^shares has 2 numbers for 3 domains \(math, code, chat\)\. Give one for each, or name them"),
        ([1, 2, 3, 4], "has 4 numbers for 3"),
        ([0, 0, 0], r"^shares is \[0, 0, 0\]\. Give numbers >= 0 that are not all 0"),
        ([1, -1e-9, 1], "Give numbers >= 0"),
        ([1, NAN, 1], "Give numbers >= 0"),
        ([1, True, 1], "Give numbers >= 0"),
        (
            {"math": 1},
            "^shares names no unknown and lacks code, chat of the domains. They are math, code, chat: name each",
        ),
        ({"math": 1, "code": 1, "chat": 1, "law": 1}, "names law unknown and lacks none of the domains"),
    ],
)
def test_what_are_no_weights_of_the_domains_is_refused(weights: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prior(DOMAINS, weights, "shares")  # type: ignore[arg-type]


def test_a_domain_is_named_once_and_the_names_are_those_of_the_domains() -> None:
    assert check_names("order", ["code", "chat", "math"], DOMAINS) is None
    with pytest.raises(
        ValueError, match=r"^order is code, chat, math, code, which names a domain twice. Name each once"
    ):
        check_names("order", ["code", "chat", "math", "code"], DOMAINS)
    with pytest.raises(ValueError, match=r"^proportions is"):
        prior(DOMAINS, [0, 0, 0])
