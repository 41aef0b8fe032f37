"""What a RolloutBatch reads from fields of every shape, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lightning_dataflex import Pipeline, RolloutBatch
from lightning_dataflex.core.fields import is_per_sample
from lightning_dataflex.core.rollout import by_prompt

NAN = float("nan")
MASK = torch.tensor([[1, 1, 0], [1, 0, 0]])


def batch(**more: Any) -> RolloutBatch:
    return RolloutBatch({"response_mask": MASK} | more)


def test_fields_go_by_their_mapped_name_or_by_a_second_one() -> None:
    assert RolloutBatch({"token_level_scores": [1.0]})["rm_scores"] == [1.0]
    assert RolloutBatch({"token_level_scores": [1.0], "rm_scores": [2.0]})["rm_scores"] == [2.0]
    assert RolloutBatch({"ref_log_prob": [1.0]})["ref_log_probs"] == [1.0]
    assert RolloutBatch({"uid": ["a"]})["prompt_id"] == ["a"]
    # Where a name is mapped, the field of that name is another.
    mapped = RolloutBatch({"rm_scores": [1.0], "token_level_scores": [1.0]}, {"rm_scores": "rewards"})
    assert "rm_scores" not in mapped
    assert mapped.get("rm_scores", 5) == 5
    assert 3 not in mapped
    assert RolloutBatch.of(mapped) is mapped
    assert RolloutBatch.of({"a": 1}, {"uid": "a"}).fields == {"uid": "a"}
    assert bool(RolloutBatch({}))


def test_the_prompts_of_a_batch_have_their_mapped_name_or_their_own() -> None:
    fields = {"prompt_id": "index", "uid": "group"}
    assert by_prompt(RolloutBatch({"index": [1], "group": [2]}, fields))["prompt_id"] == [1]
    other = by_prompt(RolloutBatch({"prompt_id": [3], "group": [2]}, fields))
    assert (other["prompt_id"], other["uid"]) == ([3], [2])


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (MASK, [[True, True, False], [True, False, False]]),
        (MASK.bool(), [[True, True, False], [True, False, False]]),
        (MASK * 0.5, [[True, True, False], [True, False, False]]),
        (torch.zeros(0), []),
        (torch.zeros(0, 4), []),
        ([[1, 0], [0, 2]], [[True, False], [False, True]]),
    ],
)
def test_masks(mask: Any, expected: list[list[bool]]) -> None:
    read = RolloutBatch({"response_mask": mask}).response_mask
    assert read is not None
    assert (read.tolist(), read.dim()) == (expected, 2)


def test_a_mask_of_nothing_has_one_column() -> None:
    assert RolloutBatch({"response_mask": []}).token_mask.shape == (0, 1)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(2), r"^response_mask has shape \(2,\)\. It must be \(samples, response tokens\)"),
        (torch.ones(1, 2, 3), r"shape \(1, 2, 3\)"),
        (torch.tensor([[1, -1]]), "^response_mask holds -1. Give 1 for a valid token and 0 for any other"),
        (torch.tensor([[1, 0, -2]]), "^response_mask holds -2"),
        (torch.tensor([[1, NAN]]), "^response_mask holds nan"),
    ],
)
def test_what_is_no_mask(mask: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RolloutBatch({"response_mask": mask}).response_mask  # noqa: B018


def test_a_batch_without_a_mask_counts_by_what_it_has() -> None:
    lengths = RolloutBatch({"num_tokens": torch.tensor([3.0, 0.0])})
    assert (lengths.num_tokens.tolist(), lengths.num_tokens.dtype) == ([3, 0], torch.int64)
    assert lengths.token_mask.tolist() == [[True], [False]]
    bare = RolloutBatch({"scale": 3, "uid": ["a", "b", "c"], "x": [1]})
    assert (bare.num_samples, bare.num_tokens.tolist()) == (3, [1, 1, 1])
    assert RolloutBatch({"response_mask": None, "x": [1, 2]}).num_samples == 2
    assert RolloutBatch({"x": 3}).num_samples == 0
    for name in ("num_tokens", "uid", "rm_scores", "advantages", "old_log_probs"):
        assert RolloutBatch({"setting": [1, 2, 3], name: [1, 2]}).num_samples == 2


def test_a_mask_that_was_refused_is_refused_again() -> None:
    read = RolloutBatch({"response_mask": torch.tensor([[1, -1]]), "rm_scores": torch.ones(1), "uid": ["a"]})
    pipeline = Pipeline.from_config({"mechanism": "select", "actuator": "threshold_band"})
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^response_mask holds -1"):
            pipeline.decide(read)


def test_a_replaced_field_is_read_as_it_was() -> None:
    read = batch(original_response_mask=MASK * 0 + 1, advantages=[5, 5], original_advantages=[1, 2], rm_scores=[1, 0])
    assert read.num_tokens.tolist() == [3, 3]
    assert read.tensor("advantages").tolist() == [1, 2]
    assert read["advantages"] == [5, 5]
    assert read.original("rm_scores") == [1, 0]
    assert read.original("entropies") is None


def test_what_was_read_is_read_anew_after_each_write() -> None:
    read = batch(rm_scores=torch.tensor([1.0, 0.0]), uid=[7, 8])
    assert (read.outcomes.tolist(), read.group_ids.tolist(), read.groups[1]) == ([1, 0], [7, 8], 2)
    read["uid"] = [7, 7]
    assert (read.group_ids.tolist(), read.groups[1]) == ([7, 7], 1)
    read["rm_scores"] = torch.tensor([3.0, 4.0])
    assert read.outcomes.tolist() == [3, 4]
    read["response_mask"] = torch.ones(2, 1)
    assert (read.num_tokens.tolist(), read.token_mask.shape) == ([1, 1], (2, 1))
    three = RolloutBatch({"uid": [1, 2]})
    assert len(three) == 2
    three["uid"] = [1, 2, 3]
    assert (len(three), three.num_tokens.tolist()) == (3, [1, 1, 1])


def test_fields_of_numbers_are_of_samples_or_of_tokens() -> None:
    read = batch(a=[1, 2], b=torch.ones(2, 3, requires_grad=True), c=torch.ones(2, 2), d=torch.ones(2, 3, 1), e=[1])
    assert read.tensor("a").tolist() == [1, 2]
    assert not read.tensor("b").requires_grad
    assert read.tokens("b").shape == (2, 3)
    with pytest.raises(
        ValueError, match=r"^c has shape \(2, 2\)\. It must be \(samples,\) or .*, here \(2,\) or \(2, 3\)"
    ):
        read.tensor("c")
    with pytest.raises(ValueError, match=r"^d has shape \(2, 3, 1\)"):
        read.tensor("d")
    with pytest.raises(ValueError, match=r"^e has 1 rows but the rollout batch has 2 samples. Give one row per sample"):
        read.tensor("e")
    with pytest.raises(ValueError, match=r"^The rollout batch has no field 'f'"):
        read.tensor("f")
    with pytest.raises(
        ValueError, match=r"^a has shape \(2,\)\. It must have a number for each response token, \(2, 3\)"
    ):
        read.tokens("a")
    bare = RolloutBatch({"a": torch.ones(2, 5), "b": torch.ones(2), "c": torch.ones(2, 3, 1)})
    assert (bare.tensor("a").shape, bare.tokens("b").shape) == ((2, 5), (2,))
    with pytest.raises(ValueError, match=r"here \(2,\) or \(2, response tokens\)"):
        bare.tensor("c")


def test_advantages_are_spread_as_those_of_the_batch_are() -> None:
    values = torch.tensor([0.5, 2.0], dtype=torch.float64)
    table = batch(advantages=torch.ones(2, 3, dtype=torch.float16)).spread_advantages(values)
    assert (table.tolist(), table.dtype) == ([[0.5, 0.5, 0], [2, 0, 0]], torch.float16)
    assert batch(advantages=torch.ones(2)).spread_advantages(values).tolist() == [0.5, 2]
    assert batch(advantages=[1, 2]).spread_advantages(values).dtype == torch.float32


def test_requirements() -> None:
    read = batch(a=[1, 2], b=3, c=[1])
    assert read.require(["a", "b", "response_mask"]) is None
    with pytest.raises(ValueError, match=r"^c has 1 rows"):
        read.require(["a", "c"])
    with pytest.raises(ValueError, match=r"no field 'd'"):
        read.require(["d", "c"])
    for value in (3, "ab", None, {1: 2}):
        with pytest.raises(ValueError, match=r"^x has one value but the rollout batch has 2 samples"):
            read.check_rows("x", value)
    assert read.check_rows("x", range(2)) is None
    assert [is_per_sample(value) for value in ([], (1,), torch.ones(1), np.ones(1))] == [True] * 4
    assert [is_per_sample(value) for value in (torch.tensor(1), np.array(1), "a", {}, 3)] == [False] * 5


def test_a_field_that_is_missing_is_looked_for_under_other_names() -> None:
    read = RolloutBatch({"advantages": [1], "reward": [1], "original_uid": [1]})
    assert read.missing("rewards") == (
        "The rollout batch has no field 'rewards'. It has: advantages, reward. If it carries it under another name, "
        'map it: fields={"rewards": "reward"}.'
    )
    # What has a meaning of its own is not what is missing.
    assert 'fields={"advantage": "..."}' in RolloutBatch({"advantages": [1]}).missing("advantage")
    assert "It has: no fields." in RolloutBatch({}).missing("uid")


def test_a_mapping_to_a_field_that_is_not_there_is_named() -> None:
    read = RolloutBatch({"rm_scores": [1], "acc": [1]}, fields={"rm_scores": "accu", "uid": "zzz"})
    assert read.missing("rm_scores") == (
        "The rollout batch has no field 'accu', to which fields maps 'rm_scores'. It has: rm_scores, acc. "
        'Correct the mapping: fields={"rm_scores": "acc"}.'
    )
    assert read.missing("uid").endswith('Correct the mapping: fields={"uid": "..."}.')


def test_views_write_into_the_batch_and_count_its_fields() -> None:
    read = batch(uid=["a", "b"])
    read.batch["x"] = torch.ones(2)
    read.non_tensor_batch["y"] = ["c", "d"]
    assert read.keys() == ["response_mask", "uid", "x", "y"] == list(read.batch)
    assert len(read.batch) == 4
    assert "uid" in read.batch
    assert "z" not in read.non_tensor_batch
    assert repr(read) == "RolloutBatch(response_mask, uid, x, y)"
    read["step"] = 3
    assert type(read.batch["step"]) is int


def test_groups_need_ids_of_each_sample() -> None:
    with pytest.raises(ValueError, match=r"no field 'uid'"):
        batch().group_ids  # noqa: B018
    with pytest.raises(ValueError, match=r"^uid has 3 rows but"):
        batch(uid=[1, 2, 3]).group_ids  # noqa: B018
    with pytest.raises(ValueError, match=r"^uid has one value but"):
        batch(uid="ab").group_ids  # noqa: B018


@pytest.mark.parametrize(
    ("name", "has", "hint"),
    [
        ("response_mask", "response_ids", "..."),
        ("response_mask", "attention_mask", "..."),
        ("response_mask", "completion_mask", "completion_mask"),
        ("response_mask", "response_masks", "response_masks"),
        ("old_log_probs", "log_probs", "..."),
        ("old_log_probs", "old_per_token_logps", "old_per_token_logps"),
        ("old_log_probs", "ref_log_probs", "..."),
        ("uid", "prompt_id", "prompt_id"),
        ("rm_scores", "rewards", "rewards"),
    ],
)
def test_a_hint_names_what_is_likely_alone(name: str, has: str, hint: str) -> None:
    assert f'map it: fields={{"{name}": "{hint}"}}.' in RolloutBatch({has: [1]}).missing(name)


def test_a_mask_that_nobody_has_checked_is_unchecked_in_later_readings_too() -> None:
    batch = RolloutBatch({"response_mask": torch.tensor([[1, -1]]), "uid": ["a"]})
    batch.lowest_in_mask()

    later = batch.after(batch.source)

    assert later.lowest_in_mask() == -1
    with pytest.raises(ValueError, match="response_mask holds -1"):
        later.check_mask(later.lowest_in_mask())
    with pytest.raises(ValueError, match="response_mask holds -1"):
        _ = later.response_mask
