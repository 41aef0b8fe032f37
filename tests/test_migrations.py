"""What the pages for those who come from elsewhere promise, against the formulas of where they come from."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
import yaml

from lightning_dataflex import Pipeline, RolloutBatch, components
from tests.pages import ROOT, blocks

VERL = ROOT / "docs" / "from_verl_trl.md"
DATAFLEX_RL = ROOT / "docs" / "from_dataflex_rl.md"
MASK = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1]])


def shown(word: str) -> dict[str, Any]:
    """The block of the page on verl and TRL that holds a word."""
    (text,) = (block.text for block in blocks(VERL, "yaml") if word in block.text)
    return yaml.safe_load(text)["dataflex"]


def batch(**more: Any) -> dict[str, Any]:
    generated = -torch.tensor([[1.0, 0.5, 2.0], [0.1, 0.3, 9.0], [1.0, 9.0, 9.0], [3.0, 1.0, 0.2]])
    off = torch.tensor([[0.02, -0.01, 0.03], [0.5, -0.4, 9.0], [0.05, 9.0, 9.0], [-0.2, 0.0, 0.3]])
    return {
        "response_mask": MASK,
        "uid": [0, 0, 1, 1],
        "rm_scores": torch.tensor([1.0, 0.0, 1.0, 1.0]),
        "rollout_log_probs": generated,
        "old_log_probs": generated + off,
        **more,
    }


def test_rejection_by_k3_is_that_of_verl() -> None:
    given = batch()
    r = given["old_log_probs"] - given["rollout_log_probs"]
    k3 = torch.where(MASK > 0, r.exp() - 1 - r, 0.0).sum(-1) / MASK.sum(-1)
    decision = Pipeline.from_config(shown("estimator: k3")).decide(given)
    torch.testing.assert_close(decision.scores, k3)
    assert decision.keep.tolist() == (k3 < 0.01).tolist() == [True, False, True, False]


def test_truncated_responses_leave_the_loss_and_its_denominator() -> None:
    given = batch(truncated=torch.tensor([0, 1, 0, 1]))
    decision = Pipeline.from_config(shown("truncated")).decide(given)
    assert decision.keep.tolist() == [True, False, True, False]
    mask = decision.updates(RolloutBatch.of(given, {}))["response_mask"]
    assert mask.tolist() == (MASK * torch.tensor([1, 0, 1, 0])[:, None]).tolist()


@pytest.mark.parametrize(("level", "reduce"), [("sequence", torch.sum), ("geometric", None)])
def test_ratios_of_responses_are_verls_sums_and_means(level: str, reduce: Any) -> None:
    given = batch()
    r = torch.where(MASK > 0, given["old_log_probs"] - given["rollout_log_probs"], 0.0).sum(-1)
    ratio = (r if reduce else r / MASK.sum(-1)).exp()
    block = {"mechanism": "reweight", "actuator": {"name": "mis", "params": {"low": 0.0, "high": 1.05}}}
    decision = Pipeline.from_config(block | {"scorer": {"name": "importance_ratio", "params": {"level": level}}})
    weights = decision.decide(given).weights[:, 0]
    torch.testing.assert_close(weights, torch.where(ratio <= 1.05, ratio, 0.0))


def test_names_and_parameters_of_dataflex_rl_are_there() -> None:
    table = DATAFLEX_RL.read_text().split("## Components\n", 1)[1].split("\n## ", 1)[0]
    known: dict[str, type] = {}
    for kind in ("scorer", "selector", "reweighter", "mixer"):
        known |= components(kind)  # type: ignore[arg-type]
    named = []
    for name_cell, same in re.findall(r"^\| (`.*?) \| (.*?) \|", table, re.M):
        for name in re.findall(r"`(\w+)`", name_cell):
            named.append(name)
            assert set(re.findall(r"`(\w+)`", same)) <= set(inspect.signature(known[name]).parameters)
    assert len(named) == 16
