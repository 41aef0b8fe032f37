"""The batch as an author's rule sees it, and where what it gives is put."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lightning_dataflex import RolloutBatch, build
from lightning_dataflex.core.tidy import TidyBatch, fields_screened, scorable, scored
from tests.given import BATCH, MASK, Given

NAN, INF = float("nan"), float("inf")


def tidy(rows: list[bool], **more: Any) -> TidyBatch:
    return TidyBatch(RolloutBatch(BATCH | more), torch.tensor(rows))


def test_a_rule_reads_its_rows_of_every_kind_of_field() -> None:
    fields = {
        "array": np.array([1, 2, 3, 4]),
        "listed": ["a", "b", "c", "d"],
        "tupled": (1, 2, 3, 4),
        "scale": torch.tensor(0.5),
        "setting": [1, 2],
        "name": "abcd",
        "half": torch.ones(4, dtype=torch.float16),
        "per_token": torch.full((4, 3), NAN),
    }
    some, every = tidy([True, False, False, True], **fields), tidy([True] * 4, **fields)
    assert (some["array"].tolist(), some["listed"], some["tupled"]) == ([1, 4], ["a", "d"], [1, 4])
    assert (float(some["scale"]), some["setting"], some["name"]) == (0.5, [1, 2], "abcd")
    assert some["half"].dtype == torch.float32
    np.testing.assert_array_equal(some["per_token"], [[NAN, NAN, 0], [NAN] * 3])
    assert every["listed"] == fields["listed"]
    assert (len(some), some.num_tokens.tolist(), some.groups[1]) == (2, [2, 3], 2)
    assert (len(every), every.groups[1]) == (4, 3)
    assert some.group_ids.tolist() == [7, 9]
    assert every.groups is every._whole.groups
    with pytest.raises(KeyError, match=r"no field .*y.* Or the rule does not declare it: add it to requires"):
        some["y"]


def test_values_per_sample_stand_at_tokens_as_verl_has_them() -> None:
    fields = {"rm_scores": torch.tensor([1.0, 2.0, 3.0, 4.0]), "advantages": torch.tensor([1.0, 2.0, 3.0, 4.0])}
    batch = tidy([True] * 4, response_mask=torch.tensor([[1, 0, 1], [1, 0, 0], [0, 0, 0], [0, 1, 1]]), **fields).batch
    assert batch["rm_scores"].tolist() == [[0, 0, 1], [2, 0, 0], [0, 0, 0], [0, 0, 4]]
    assert batch["advantages"].tolist() == [[1, 0, 1], [2, 0, 0], [0, 0, 0], [0, 4, 4]]
    assert batch["x"].tolist() == [1, 2, 3, 4]
    table = tidy([True] * 4, rm_scores=torch.ones(4, 3)).batch["rm_scores"]
    assert table.tolist() == MASK.tolist()
    bare = TidyBatch(RolloutBatch({"rm_scores": torch.ones(2)}), torch.ones(2).bool())
    assert bare.batch["rm_scores"].tolist() == [1, 1]


def test_ids_of_mixed_types_are_read_as_numbers() -> None:
    mixed = tidy([True, True, True, False], uid=["a", 1, "a", 2])["uid"]
    assert (mixed.dtype, len(set(mixed.tolist()))) == (np.int64, 2)
    assert tidy([True, True, True, False], uid=["a", "b", "a", "c"])["uid"] == ["a", "b", "a"]
    assert tidy([True, True, True, False], uid=torch.tensor([1, 2, 1, 3]))["uid"].tolist() == [1, 2, 1]


def test_samples_that_can_be_scored_have_a_token_and_no_nan() -> None:
    of_tokens = torch.tensor([[1.0, 1, NAN], [NAN, 1, 1], [1, 1, 1], [1, 1, INF]])
    batch = RolloutBatch(BATCH | {"rm_scores": torch.tensor([1.0, 2, 3, NAN]), "old_log_probs": of_tokens})
    assert scorable(batch, []).tolist() == [True, True, False, True]
    assert scorable(batch, ["x", "uid", "nowhere"]).tolist() == [True, True, False, True]
    assert scorable(batch, ["rm_scores"]).tolist() == [True, True, False, False]
    assert scorable(batch, ["old_log_probs"]).tolist() == [True, False, False, True]
    other = RolloutBatch(
        BATCH | {"wide": torch.tensor([[1.0, NAN], [1, 1], [1, 1], [1, 1]]), "scale": torch.tensor(NAN)}
    )
    assert scorable(other, ["wide", "scale"]).tolist() == [False, True, False, True]
    floats = RolloutBatch(BATCH | {"uid": torch.tensor([1.0, 1.0, 2.0, 2.0])})
    assert scorable(floats, ["uid"]).tolist() == [True, True, False, True]
    with pytest.raises(ValueError, match=r"^x has 3 rows but"):
        scorable(RolloutBatch(BATCH | {"x": torch.ones(3)}), ["x"])
    assert scored(batch, torch.tensor([NAN, 1, 1, 0])).tolist() == [False, True, False, True]
    assert scored(batch, of_tokens).tolist() == [False, False, False, True]
    assert list(fields_screened(Given())) == ["x"]
    assert list(fields_screened(build("scorer", "weighted_sum", scorers=["outcome"]))) == []


def test_values_are_put_back_in_place() -> None:
    some = tidy([False, True, True, False])
    assert some.placed(torch.tensor([1.0, 2.0]), 7.0).tolist() == [7, 1, 2, 7]
    assert some.placed(torch.ones(2, 2), 0.0).tolist() == [[0, 0], [1, 1], [1, 1], [0, 0]]
    assert some.placed(torch.tensor([True, True]), False).tolist() == [False, True, True, False]
    whole = torch.ones(4)
    assert tidy([True] * 4).placed(whole, 0.0) is whole
