"""What becomes of the proportions that a mixer's author gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lightning_dataflex import Mixer
from lightning_dataflex.core.domains import DomainStats, DomainSums

NAN, INF = float("nan"), float("inf")


class Mixes(Mixer):
    """Gives what it is told to."""

    def __init__(self, given: Any) -> None:
        self.given, self.seen = given, []
        self.bind(["a", "b", "c"])

    def act(self, scores: Any, batch: Any, **ctx: Any) -> Any:
        self.seen.append((scores, batch, ctx))
        return self.given


def stats() -> DomainStats:
    found = DomainStats(["a", "b", "c"])
    found.add(0, DomainSums.of(torch.tensor([1.0, 0.0, 0.5]), torch.tensor([0, 0, 2]), 3))
    return found


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([0.5, 0.25, 0.25], [0.5, 0.25, 0.25]),
        ({"c": 0.75, "a": 0.25}, [0.25, 0, 0.75]),
        (torch.tensor([[0.5, 0.5, 0.0]]), [0.5, 0.5, 0]),
        (np.array([0.2, 0.2, 0.6 + 9e-6]), [0.2 / 1.000009, 0.2 / 1.000009, 0.600009 / 1.000009]),
        ([1.0, -9e-10, 0.0], [1, 0, 0]),
    ],
)
def test_proportions_sum_to_one(given: Any, expected: list[float]) -> None:
    mixer = Mixes(given)
    got = mixer.proportions(stats(), step_id=3)
    assert got.dtype == torch.float64
    assert got.tolist() == pytest.approx(expected, abs=1e-15)
    (scores, batch, ctx), *_ = mixer.seen
    assert (scores, batch) == ({"a": 0.5, "c": 0.5}, None)
    assert (ctx["counts"], ctx["step_id"], list(ctx)) == (
        {"a": 2, "b": 0, "c": 1},
        3,
        ["counts", "stats", "step_id"],
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([0.5, 0.5], r"^Mixes\.act returned \[0\.5, 0\.5\] for 3 domains\. Return a proportion >= 0 for each"),
        ([0.5, 0.5, 0.1], "for 3 domains"),
        ([0.5, 0.5, 2e-5], "for 3 domains"),
        ([1.0 - 2e-5, 0.0, 0.0], "for 3 domains"),
        ([1.1, -0.1, 0.0], "for 3 domains"),
        ([1.0, -1e-8, 1e-8], "for 3 domains"),
        ([NAN, 0.5, 0.5], "for 3 domains"),
        ({"a": 0.5, "d": 0.5}, r"^Mixes\.act returned \{'a': 0\.5, 'd': 0\.5\} for 3"),
        ({"a": 1.0, "d": 0.0}, "for 3 domains"),
        ({}, r"^Mixes\.act returned"),
        ("abc", r"^Mixes\.act returned 'abc'\. Return proportions, as an array, a list or a dict"),
        (None, r"^Mixes\.act returned None"),
    ],
)
def test_what_are_no_proportions_is_refused(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Mixes(given).proportions(stats())


def test_a_mixer_is_of_its_domains() -> None:
    mixer = Mixes([])
    mixer.bind(("a", "b", "c"))
    assert mixer.domains == ["a", "b", "c"]
    with pytest.raises(ValueError, match=r"^Mixes was made for the domains a, b, c, but the data has a, c, b\."):
        mixer.bind(["a", "c", "b"])
