"""RolloutBatch over every type of batch that a module may hand to its loss."""

from __future__ import annotations

import copy
import dataclasses
from collections import defaultdict
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from transformers import BatchEncoding
from transformers.modeling_outputs import ModelOutput

from lightning_dataflex import Pipeline, RolloutBatch, build

MASK = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0], [0, 0, 0]])
REWARDS = torch.tensor([1.0, 0.0, 1.0, 9.0])
UID = ["a", "a", "b", "b"]


def fields() -> dict[str, Any]:
    return {"rm_scores": REWARDS.clone(), "response_mask": MASK.clone(), "uid": list(UID), "rollout_is_weights": None}


@dataclasses.dataclass
class Plain:
    rm_scores: Tensor
    response_mask: Tensor
    uid: list[str]
    rollout_is_weights: Tensor | None = None


@dataclasses.dataclass(slots=True)
class Slots:
    rm_scores: Tensor
    response_mask: Tensor
    uid: list[str]
    rollout_is_weights: Tensor | None = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    rm_scores: Tensor
    response_mask: Tensor
    uid: list[str]
    rollout_is_weights: Tensor | None = None


class Named(NamedTuple):
    rm_scores: Tensor
    response_mask: Tensor
    uid: list[str]
    rollout_is_weights: Tensor | None = None


@dataclasses.dataclass
class Output(ModelOutput):
    rm_scores: Tensor | None = None
    response_mask: Tensor | None = None
    uid: list[str] | None = None
    rollout_is_weights: Tensor | None = None


def tensordict() -> TensorDict:
    batch = TensorDict({"rm_scores": REWARDS.clone(), "response_mask": MASK.clone()}, batch_size=[4])
    batch["uid"] = list(UID)
    return batch


def verl(as_dict: bool = False) -> SimpleNamespace:
    tensors = {"token_level_scores": REWARDS.clone(), "response_mask": MASK.clone()}
    return SimpleNamespace(
        batch=tensors if as_dict else TensorDict(tensors, batch_size=[4]),
        non_tensor_batch={"uid": np.array(UID, dtype=object)},
        meta_info={},
    )


WRITABLE = {
    "dict": fields,
    "TensorDict": tensordict,
    "dataclass": lambda: Plain(**fields()),
    "slots": lambda: Slots(**fields()),
    "BatchEncoding": lambda: BatchEncoding(fields()),
    "ModelOutput": lambda: Output(**fields()),
    "attributes": lambda: SimpleNamespace(**fields()),
    "verl": verl,
    "verl of dicts": lambda: verl(as_dict=True),
}
FIXED = {
    "locked TensorDict": lambda: tensordict().lock_(),
    "frozen dataclass": lambda: Frozen(**fields()),
    "NamedTuple": lambda: Named(**fields()),
}
ALL = WRITABLE | FIXED


def each(kinds):
    return pytest.mark.parametrize("make", list(kinds.values()), ids=list(kinds))


@each(ALL)
def test_the_three_ways_read_alike(make):
    batch = RolloutBatch(make())
    for rewards in (batch["rm_scores"], batch.batch["rm_scores"], batch.non_tensor_batch["rm_scores"]):
        assert rewards.tolist() == REWARDS.tolist()
    for uid in (batch["uid"], batch.batch["uid"], batch.non_tensor_batch["uid"]):
        assert list(uid) == UID
    assert isinstance(batch.batch["rm_scores"], Tensor)
    assert isinstance(batch.non_tensor_batch["uid"], np.ndarray)
    assert isinstance(batch.non_tensor_batch["rm_scores"], np.ndarray)


@each(ALL)
def test_names_are_field_names(make):
    batch = RolloutBatch(make())
    assert {"response_mask", "uid"} < set(batch) == set(batch.keys()) == set(batch.batch)
    assert "uid" in batch
    assert "advantages" not in batch
    assert "advantages" not in batch.batch
    assert batch.get("advantages", 3) == 3
    assert len(batch) == 4


@each(ALL)
def test_meaning_is_read_from_the_fields(make):
    batch = RolloutBatch(make())
    assert batch.num_tokens.tolist() == [2, 3, 1, 0]
    np.testing.assert_array_equal(batch.outcomes, [1, 0, 1, np.nan])
    assert (batch.group_ids[:, None] == batch.group_ids).tolist() == [[i == j for j in UID] for i in UID]


@each(ALL)
def test_a_missing_field_is_named_with_what_is_there_and_the_mapping_to_write(make):
    expected = r"no field 'advantage'\. It has: .*response_mask.*\. .*map it: fields=\{\"advantage\": \""
    with pytest.raises(KeyError, match=r"no field .*advantage"):
        RolloutBatch(make())["advantage"]
    with pytest.raises(ValueError, match=expected):
        RolloutBatch(make()).require(["advantage"])


@each(WRITABLE)
def test_writing_reaches_the_very_object(make):
    source = make()
    batch = RolloutBatch(source)
    weights = torch.rand(4, 3)
    batch["rollout_is_weights"] = weights
    batch["uid"] = ["c", "d", "e", "f"]
    for again in (batch, RolloutBatch(source)):
        assert torch.equal(again["rollout_is_weights"], weights)
        assert list(again["uid"]) == ["c", "d", "e", "f"]
    assert len(batch.group_ids.unique()) == 4
    batch["uid"] = torch.tensor([1, 2, 2, 2])
    assert len(batch.group_ids.unique()) == 2
    assert len(batch.keys()) == len(set(batch.keys()))


@each(WRITABLE)
def test_what_was_read_before_a_write_is_read_anew(make):
    batch = RolloutBatch(make())
    first = batch.outcomes, batch.num_tokens
    batch["rm_scores"] = np.array([5.0, 5.0, 5.0, 5.0], dtype=np.float32)
    batch["response_mask"] = torch.ones(4, 3)
    assert first[0][0] == 1
    assert batch.outcomes.tolist() == [5, 5, 5, 5]
    assert batch.num_tokens.tolist() == [3, 3, 3, 3]


@each(FIXED)
def test_a_fixed_type_says_that_it_cannot_be_written(make):
    with pytest.raises(TypeError, match=r"rollout_is_weights cannot be written into a .*(`replaced`|dict)"):
        RolloutBatch(make())["rollout_is_weights"] = torch.ones(4, 3)


@each(ALL)
def test_replaced_is_a_copy_of_the_same_type_and_leaves_the_source(make):
    source = make()
    before = copy.copy(source) if isinstance(source, dict) else source
    new = RolloutBatch(source).replaced({"rollout_is_weights": torch.ones(4, 3), "response_mask": MASK * 0})
    assert type(new) is type(source)
    assert RolloutBatch(new)["rollout_is_weights"].sum() == 12
    assert RolloutBatch(new)["response_mask"].sum() == 0
    assert RolloutBatch(new)["rm_scores"].tolist() == REWARDS.tolist()
    assert list(RolloutBatch(new)["uid"]) == UID
    assert RolloutBatch(source).get("rollout_is_weights") is None
    assert torch.equal(RolloutBatch(before)["response_mask"], MASK)


@each(ALL)
def test_a_decision_can_be_put_into_a_copy(make):
    pipeline = Pipeline(build("scorer", "group_solve_rate"), build("selector", "threshold_band"))
    batch = RolloutBatch(make())
    new = RolloutBatch(batch.replaced(pipeline.decide(batch.source).updates(batch)))
    assert new["response_mask"].sum(-1).tolist() == [2, 3, 0, 0]
    assert new["rollout_is_weights"].sum(-1).tolist() == [2, 3, 0, 0]


def test_names_map_both_ways():
    source = {"rewards": REWARDS, "mask": MASK, "uid": UID}
    batch = RolloutBatch(source, fields={"rm_scores": "rewards", "response_mask": "mask"})
    batch["rm_scores"] = REWARDS + 1
    new = batch.replaced({"response_mask": MASK * 0})
    assert source["rewards"].tolist() == (REWARDS + 1).tolist() == batch.batch["rm_scores"].tolist()
    assert new["mask"].sum() == 0
    assert batch["rewards"] is source["rewards"]


def test_an_undeclared_field_of_a_named_tuple_or_slots_is_refused():
    for source in (Named(**fields()), Slots(**fields())):
        with pytest.raises(TypeError, match=r"no field 'extra' to write into\. Declare it with a default of None"):
            RolloutBatch(source).replaced({"extra": 1})


def test_a_verl_batch_may_have_no_tensors():
    source = SimpleNamespace(batch=None, non_tensor_batch={"uid": np.array(UID, dtype=object)}, meta_info={})
    new = RolloutBatch(source).replaced({"rollout_is_weights": torch.ones(4, 3)})
    assert list(RolloutBatch(new)) == ["uid", "rollout_is_weights"]
    assert list(RolloutBatch(source)) == ["uid"]


def test_undeclared_entries_of_a_model_output_are_copied():
    source = Output(**fields())
    source["extra"] = torch.ones(4)
    new = RolloutBatch(source).replaced({"rollout_is_weights": torch.ones(4, 3)})
    assert torch.equal(new["extra"], torch.ones(4))
    assert new.rollout_is_weights is new["rollout_is_weights"]


def test_a_batch_of_nothing_has_no_samples():
    assert len(RolloutBatch({})) == 0
    assert RolloutBatch({"uid": []}).group_ids.tolist() == []


def test_asking_a_defaultdict_adds_nothing():
    source = defaultdict(list, rm_scores=REWARDS)
    assert RolloutBatch(source).get("uid") is None
    assert list(source) == ["rm_scores"]


@pytest.mark.parametrize("source", [torch.ones(2), [REWARDS], (REWARDS, MASK), "text", None, 3])
def test_what_cannot_be_a_batch_is_refused(source):
    with pytest.raises(TypeError, match=f"cannot be a {type(source).__name__}. Give a dict"):
        RolloutBatch(source)


def test_arrays_of_any_content_have_one_row_per_sample():
    batch = RolloutBatch(
        {"messages": [[1, 2], [3, 4]], "tables": [[1.0, 2.0], [3.0, 4.0]], "ragged": [[1.0], [2.0, 3.0]]}
    )
    assert batch.non_tensor_batch["messages"].shape == (2,)
    assert torch.equal(batch.batch["tables"], torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert batch.batch["ragged"] == [[1.0], [2.0, 3.0]]
    mixed = RolloutBatch({"labels": ["a", 1], "nothing": []}).non_tensor_batch
    assert mixed["labels"].tolist() == ["a", 1]
    assert mixed["nothing"].shape == (0,)
    assert RolloutBatch({"x": torch.ones(2, dtype=torch.bfloat16)}).non_tensor_batch["x"].tolist() == [1, 1]
