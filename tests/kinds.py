"""What tests of kinds of faults have in common: every pair of components, and decisions of theirs."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st

from lightning_dataflex import Decision, Pipeline
from tests.laws import built, pairs, scorer_of

PAIRS = [parameter.values for parameter in pairs("selector", "reweighter")]
SEEDS = st.integers(0, 10_000)
# Without shrinking, which would try every pair again a hundred times.
few = settings(max_examples=2, deadline=None, derandomize=True, phases=[Phase.generate])
some = settings(max_examples=25, deadline=None, derandomize=True)


def decided(pair: Any, batch: Any, **options: Any) -> Decision:
    scorer, kind, actuator = pair
    return Pipeline(scorer_of(scorer), built(kind, actuator), **options).decide(batch)


def assert_decides(pair: Any, batch: Any, want: Decision, rows: Any = slice(None)) -> None:
    """The decision on a batch is the one that is wanted, on these of its rows."""
    got = decided(pair, batch)
    for name in ("scores", "keep", "weights"):
        here, there = getattr(got, name)[rows], getattr(want, name)
        assert torch.allclose(here.double(), there.double(), rtol=1e-4, atol=1e-5, equal_nan=True), (pair, name)
    assert got.num_kept == want.num_kept, pair


def select(batch: dict[str, Any], actuator: Any, scorer: str = "outcome", **options: Any) -> Decision:
    return Pipeline.from_config({"mechanism": "select", "scorer": scorer, "actuator": actuator, **options}).decide(
        batch
    )


def rows(rewards: Any, uid: Any, lengths: Any = None) -> dict[str, Any]:
    lengths = torch.ones(len(uid)) if lengths is None else torch.as_tensor(lengths)
    mask = torch.arange(int(lengths.max()) or 1) < lengths[:, None]
    return {"rm_scores": torch.as_tensor(rewards), "uid": uid, "response_mask": mask.long()}
