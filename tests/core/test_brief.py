"""What rules have to know of a batch: in a few columns where they can say, else the fields that they require."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lightning_dataflex import RolloutBatch
from lightning_dataflex.core.global_batch import (
    global_batch,
    in_brief,
    joint_columns,
    rewards_and_groups,
    telling_columns,
)

MASK = torch.tensor([[1, 1], [1, 0]])
REWARDS = torch.tensor([[0.0, 1.0], [0.5, 9.0]])
BATCH = {"response_mask": MASK, "rm_scores": REWARDS, "uid": ["a", "b"], "temperature": 0.7}


class Part:
    """Reads fields, or says what it has to know in columns."""

    def __init__(self, *requires: str, columns: Any = None, remembers: bool = False) -> None:
        self.requires, self.given, self.remembers = requires, columns, remembers

    def columns(self, batch: RolloutBatch) -> Any:
        return self.given


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values)


def test_columns_of_several_parts_come_together_where_they_mean_the_same() -> None:
    one, other = {"rm_scores": column(1, 2), "x": column(3, 4)}, {"rm_scores": column(1, 2), "y": column(5, 6)}
    assert joint_columns([]) == {}
    assert list(joint_columns([one, other]) or {}) == ["rm_scores", "x", "y"]
    assert joint_columns([one, None]) is None
    assert joint_columns([None, one]) is None
    assert joint_columns([one, {"x": column(3, 4)}]) is None
    assert joint_columns([one, {"num_tokens": column(1, 1)}]) is None
    for name in ("rm_scores", "uid", "prompt_id", "domain"):
        assert joint_columns([{name: column(1)}, {name: column(1)}]) is not None


def test_rules_without_columns_are_told_their_fields() -> None:
    batch = RolloutBatch(BATCH | {"original_rm_scores": column(7, 8), "z": [1, 2]})
    told = telling_columns(batch, [Part("rm_scores", "temperature"), Part("uid", "nowhere"), Part(columns={})])
    assert list(told) == ["num_tokens", "response_mask", "rm_scores", "uid"]
    assert (told["num_tokens"].tolist(), told["num_tokens"].dtype) == ([2, 1], torch.int32)
    assert told["rm_scores"].tolist() == [7, 8]
    told = telling_columns(batch, [Part("rm_scores", columns={"x": column(1, 2)}), Part(columns={})])
    assert list(told) == ["num_tokens", "x"]
    with pytest.raises(ValueError, match=r"^x has 3 rows"):
        telling_columns(RolloutBatch(BATCH | {"x": [1, 2, 3]}), [Part("x")])


def test_rewards_and_groups_are_told_where_there_are_any() -> None:
    assert {name: value.tolist() for name, value in rewards_and_groups(RolloutBatch(BATCH)).items()} == {
        "rm_scores": [1, 0.5],
        "uid": RolloutBatch(BATCH).group_ids.tolist(),
    }
    assert rewards_and_groups(RolloutBatch({"response_mask": MASK})) == {}


def test_a_batch_in_brief_has_what_was_said_and_its_settings() -> None:
    batch = RolloutBatch(BATCH)
    assert in_brief(batch, [Part("rm_scores")]) is batch
    brief = in_brief(batch, [Part("rm_scores", "temperature", "nowhere", columns={"x": column(1, 2)})])
    assert (brief["temperature"], brief["x"].tolist(), brief.num_tokens.tolist()) == (0.7, [1, 2], [2, 1])
    assert brief["rm_scores"].tolist() == [1, 0.5]
    assert brief.groups[0] is batch.told_apart.index
    assert torch.equal(brief["uid"], batch.group_ids)
    alone = in_brief(batch, [Part("rm_scores", columns={})], local_ids=True)
    assert (alone["uid"].tolist(), alone.groups[1]) == ([0, 1], 2)
    lasting = in_brief(batch, [Part(columns={}), Part("rm_scores", columns={}, remembers=True)], local_ids=True)
    assert (lasting["uid"].tolist(), lasting.groups[1]) == (batch.group_ids.tolist(), 2)
    bare = in_brief(RolloutBatch({"response_mask": MASK}), [Part(columns={})])
    assert (bare.keys(), bare.num_samples) == (["num_tokens"], 2)


def test_on_one_process_the_global_batch_is_the_batch() -> None:
    batch, more = RolloutBatch(BATCH), {"place": lambda: column(5, 6)}
    world, rows, further = global_batch(lambda: batch, [Part("rm_scores")], None, "samples", more)
    assert world is batch
    assert (rows, list(further), further["place"].tolist()) == (slice(0, 2), ["place"], [5, 6])
    assert global_batch(lambda: batch, [Part("rm_scores")], None, "samples")[2] == {}


@pytest.mark.parametrize("told", [in_brief, telling_columns])
def test_columns_of_an_author_are_any_of_one_row_per_sample(told: Any) -> None:
    batch = RolloutBatch(BATCH)
    for values in ([1, 2], np.array([1, 2]), ["a", "b"]):
        assert list(told(batch, [Part(columns={"x": values})])["x"]) == list(values)
    for values, shown in ((column(1, 2, 3), "3 rows"), (torch.tensor(1.0), "one value")):
        with pytest.raises(ValueError, match=f"^x has {shown} but the rollout batch has 2 samples"):
            told(batch, [Part(columns={"x": values})])
