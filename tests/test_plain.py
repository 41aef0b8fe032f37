"""Rules on groups decide what their plain form does, a loop over the groups that shares no line with them."""

from __future__ import annotations

import pytest
import torch

from benchmarks import batches, decide, plain


def a_batch(rewards: str):
    batch = batches.rollout(24, 7, 16)
    # Samples of a group do not stand together, and lengths and rewards have ties.
    order = torch.randperm(24 * 7, generator=torch.Generator().manual_seed(1))
    batch = {name: batch[name][order] for name in ("response_mask", "rm_scores", "advantages", "entropies", "uid")}
    if rewards == "graded":
        batch["rm_scores"] *= torch.randint(1, 5, (24 * 7, 1), generator=torch.Generator().manual_seed(2)) / 4
    if rewards == "real":
        batch["rm_scores"] = torch.randn(24 * 7, 16, generator=torch.Generator().manual_seed(3))
    return batch


@pytest.mark.parametrize("rewards", ["binary", "graded", "real"])
@pytest.mark.parametrize("pair", plain.RULES, ids=" / ".join)
def test_a_rule_is_its_plain_form(pair, rewards):
    batch = a_batch(rewards)
    expected, _ = plain.decided(plain.RULES[pair], batch)

    work, _ = decide.decision(*pair)
    found = work(batch)

    for name, values in expected.items():
        torch.testing.assert_close(found[name], torch.from_numpy(values), rtol=1e-5, atol=1e-6)
    # Rules that do nothing would be equal too. Of real rewards no two are equal, in any group, and a rule may keep all.
    assert rewards == "real" or len(found["rollout_is_weights"][batch["response_mask"] > 0].unique()) > 1
