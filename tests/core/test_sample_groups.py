"""Groups that travel: cut out, named, blank, and put together again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lightning_dataflex import RolloutBatch
from lightning_dataflex.core.sample_group import SampleGroup, filled, groups_of, padding, together
from tests.core.test_pool import LAYOUT, batch_of, response


def test_groups_are_cut_out_in_the_order_in_which_they_come_first() -> None:
    batch = batch_of(*(response(prompt, i + 1) for i, prompt in enumerate([8, 7, 8, 9, 8])))
    groups = groups_of(batch, LAYOUT, 3)
    assert [group.columns["uid"] for group in groups] == [[8, 8, 8], [7], [9]]
    assert [(group.width, group.born) for group in groups] == [(3, 3)] * 3
    assert groups[0].columns["input_ids"][:, 1].tolist() == [1, 3, 5]
    among = torch.tensor([False, False, True, True, False])
    assert [group.columns["uid"] for group in groups_of(batch, LAYOUT, 0, among)] == [[8, 8, 8], [9]]
    assert [group.columns["uid"] for group in groups_of(batch, LAYOUT, 0, size=2)] == [[8, 8], [8], [7], [9]]
    assert groups_of(batch, LAYOUT, 0, ~among & among) == []


@pytest.mark.parametrize(
    ("uids", "expected"),
    [
        ([["a"], ["a"], ["b"], ["a"]], ["a", "a~2", "b", "a~3"]),
        ([["a"], ["a~2"], ["a"]], ["a", "a~2", "a~3"]),
        ([[7], [7], [9], [7]], [7, 10, 9, 11]),
        ([[0.5], [0.5]], [0.5, 1.5]),
        ([[("a", 1)], [("a", 1)]], [("a", 1), (("a", 1), 2)]),
        ([["a"], [3], [3], ["a"]], ["a", 3, 4, "a~2"]),
    ],
)
def test_groups_of_one_name_get_one_of_their_own(uids: list[list[Any]], expected: list[Any]) -> None:
    like = RolloutBatch({"uid": ["x"], "response_mask": torch.ones(1, 1)})
    groups = [SampleGroup({"uid": uid * 2, "response_mask": torch.ones(2, 1)}, 1, 0) for uid in uids]
    whole = together(groups, like, LAYOUT)
    assert whole["uid"] == [uid for uid in expected for _ in range(2)]
    assert [group.columns["uid"] for group in groups] == [uid * 2 for uid in uids]


def test_a_column_is_filled_in_its_own_type() -> None:
    assert filled(torch.tensor([1, 2]), 7).tolist() == [7, 7]
    assert filled(["a", "b", "c"], "d") == ["d"] * 3
    for column, value in ((np.array([1, 2], np.int32), 7), (np.array([0.5]), 1.5), (np.array([1], np.uint8), 3)):
        got = filled(column, value)
        assert (got.dtype, got.tolist()) == (column.dtype, [value] * len(column))
    texts_of = filled(np.array(["a", "b"]), "long")
    assert (texts_of.dtype, texts_of.tolist()) == (np.dtype(object), ["long"] * 2)
    assert filled(np.array([None, None]), (1, 2)).tolist() == [(1, 2)] * 2


def test_padding_is_blank_and_like_the_first_sample() -> None:
    batch = batch_of(response(7, 1, 2), response(8, 3))
    group = padding(batch, LAYOUT, 2, 6)
    assert (group.width, group.born, group.columns["uid"]) == (3, 6, [7, 7])
    assert group.columns["response_mask"].tolist() == [[0, 0, 0]] * 2
    assert group.columns["input_ids"].tolist() == [[7, 1, 2, 0]] * 2


def test_a_group_shares_nothing_with_its_batch() -> None:
    image = torch.ones(1, requires_grad=True)
    group = SampleGroup({"a": image, "b": [image], "c": (image,), "d": {"e": image}, "f": 3}, 2, 4)
    moved = group.on_cpu()
    assert (moved.width, moved.born, moved.columns["f"]) == (2, 4, 3)
    leaves = [moved.columns["a"], moved.columns["b"][0], moved.columns["c"][0], moved.columns["d"]["e"]]
    assert not any(leaf.requires_grad for leaf in leaves)
    assert (type(moved.columns["b"]), type(moved.columns["c"])) == (list, tuple)
    back = SampleGroup.of_state(moved.state_dict())
    assert (back.width, back.born, list(back.columns)) == (2, 4, list("abcdf"))
