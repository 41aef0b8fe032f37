"""Samples that leave a batch or come together: columns, widths, types."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lightning_dataflex import RolloutBatch
from lightning_dataflex.core.samples import Layout, blanked, compacted, joined, per_sample, rebuilt, taken, trimmed

NAN = float("nan")
MASK = torch.tensor([[1, 1, 0], [1, 0, 0]])


def read(**fields: Any) -> RolloutBatch:
    return RolloutBatch({"response_mask": MASK} | fields)


def test_layouts_know_the_usual_token_fields() -> None:
    assert Layout() == Layout.of() == Layout.of([], [])
    assert Layout().shared == frozenset()
    assert Layout().token_fields == {"input_ids", "attention_mask", "position_ids"}
    assert Layout.of(["a"], ["b"]).token_fields == {"input_ids", "attention_mask", "position_ids", "b"}


def test_rows_of_every_type_of_field() -> None:
    fields = {
        "array": np.arange(4).reshape(2, 2),
        "listed": [1, 2],
        "tupled": (1, 2),
        "nested": {"a": {"b": torch.tensor([1, 2]), "c": "text", "d": 3}},
        "scalar": torch.tensor(5),
        "shared": [1, 2, 3],
    }
    layout = Layout.of(["shared"])
    got = taken(read(**fields), torch.tensor([1, 1, 0]), layout)
    assert got["array"].tolist() == [[2, 3], [2, 3], [0, 1]]
    assert (got["listed"], got["tupled"], type(got["tupled"])) == ([2, 2, 1], (2, 2, 1), tuple)
    assert got["nested"]["a"]["b"].tolist() == [2, 2, 1]
    assert (got["nested"]["a"]["c"], got["nested"]["a"]["d"], int(got["scalar"])) == ("text", 3, 5)
    assert got["shared"] == [1, 2, 3]
    assert list(per_sample(read(**fields), layout)) == ["response_mask", "array", "listed", "tupled", "nested"]
    with pytest.raises(ValueError, match=r"^nested\.a\.b has 3 entries but .* name it in shared_fields: \[nested"):
        per_sample(read(nested={"a": {"b": [1, 2, 3]}}), layout)
    with pytest.raises(ValueError, match=r"^x is a sparse or nested tensor"):
        per_sample(read(x=torch.eye(2).to_sparse()), layout)


def test_mappings_may_be_nested_up_to_32_deep() -> None:
    def nested(depth: int) -> Any:
        value: Any = [1, 2]
        for _ in range(depth):
            value = {"a": value}
        return value

    assert "x" in per_sample(read(x=nested(32)), Layout())
    with pytest.raises(ValueError, match=r"is a mapping within 32 others"):
        per_sample(read(x=nested(33)), Layout())


def part(width: int, prompt: int, rows: int, **more: Any) -> tuple[dict[str, Any], int]:
    ids = torch.full((rows, prompt + width), 7)
    return {"input_ids": ids, "response_mask": torch.ones(rows, width), "uid": list(range(rows))} | more, width


def test_one_batch_stays_as_it_is_and_several_are_padded() -> None:
    alone = part(2, 1, 1)
    assert joined([alone], Layout()) is alone[0]
    got = joined([part(1, 3, 1), part(2, 1, 2)], Layout())
    assert got["input_ids"].tolist() == [[7, 7, 7, 7, 0], [0, 0, 7, 7, 7], [0, 0, 7, 7, 7]]
    assert got["response_mask"].tolist() == [[1, 0], [1, 1], [1, 1]]
    assert got["uid"] == [0, 0, 1]


def test_fields_of_tokens_go_by_their_mapped_names() -> None:
    def renamed(width: int, prompt: int) -> tuple[dict[str, Any], int]:
        columns, _ = part(width, prompt, 1)
        return {
            "mask": columns["response_mask"],
            "adv": torch.ones(1, width),
            "ref_log_prob": torch.ones(1, width),
        }, width

    names = {"response_mask": "mask", "advantages": "adv"}
    got = joined([renamed(1, 2), renamed(3, 2)], Layout(), names)
    assert [got[name].shape for name in ("mask", "adv", "ref_log_prob")] == [(2, 3)] * 3
    # Ids and domains are no tokens, however wide.
    wide = [part(1, 1, 1, uid=torch.ones(1, 4)), part(2, 1, 1, uid=torch.ones(1, 5))]
    with pytest.raises(ValueError, match=r"^uid has 4 and 5 columns in different rollouts"):
        joined(wide, Layout())


def test_widths_are_those_of_the_responses_or_the_same() -> None:
    same = [part(1, 1, 1, x=torch.ones(1, 4)), part(2, 1, 1, x=torch.ones(1, 4))]
    assert joined(same, Layout())["x"].shape == (2, 4)
    as_tokens = [part(1, 1, 1, x=np.ones((1, 1))), part(2, 1, 1, x=np.ones((1, 2)))]
    assert joined(as_tokens, Layout())["x"].tolist() == [[1, 0], [1, 1]]
    narrow = [part(2, 1, 1, position_ids=torch.ones(1, 1)), part(2, 1, 1, position_ids=torch.ones(1, 1))]
    with pytest.raises(ValueError, match=r"^position_ids has shape \(1, 1\), and there are 2 response tokens"):
        joined(narrow, Layout())
    flat = [part(1, 1, 1, input_ids=torch.ones(1)), part(2, 1, 1, input_ids=torch.ones(1))]
    assert joined(flat, Layout())["input_ids"].tolist() == [1, 1]
    lacking = [part(1, 1, 1, x=[1]), part(1, 1, 1, y=[1])]
    with pytest.raises(ValueError, match=r"different fields: x, y is not in all"):
        joined(lacking, Layout())
    deep = [part(1, 1, 1, x={"a": np.ones((1, 2))}), part(1, 1, 1, x={"a": np.ones((1, 3))})]
    with pytest.raises(ValueError, match=r"^x\.a has other widths in different rollouts"):
        joined(deep, Layout())
    images = [part(1, 1, n, x={"a": torch.ones(n, 2), "b": torch.ones(n), "c": "rgb"}) for n in (1, 2)]
    got = joined(images, Layout())["x"]
    assert (got["a"].shape, got["b"].shape, got["c"]) == ((3, 2), (3,), "rgb")


def test_columns_that_no_sample_needs_are_cut() -> None:
    fields = {
        "input_ids": torch.arange(10).view(2, 5),
        "wide": torch.ones(2, 4),
        "flat": torch.ones(2),
        "names": ["a", "b"],
    }
    got = trimmed(read(**fields), Layout())
    assert got["response_mask"].tolist() == [[1, 1], [1, 0]]
    assert got["input_ids"].tolist() == [[0, 1, 2, 3], [5, 6, 7, 8]]
    assert (got["wide"].shape, got["flat"].shape, got["names"]) == ((2, 4), (2,), ["a", "b"])
    full = read(response_mask=torch.ones(2, 3))
    assert trimmed(full, Layout()) is full.source
    assert trimmed(read(response_mask=MASK * 0), Layout())["response_mask"].shape == (2, 1)
    assert trimmed(read(response_mask=torch.ones(2, 0)), Layout())["response_mask"].shape == (2, 0)
    array = read(advantages=np.ones((2, 3)))
    assert trimmed(array, Layout())["advantages"].shape == (2, 2)
    for kind in (torch.ones(2, 3), np.ones((2, 3))):
        with pytest.raises(ValueError, match=r"^x has 3 columns, as the response mask has\. .* turn trim off"):
            trimmed(read(x=kind), Layout())
        assert trimmed(read(x=kind), Layout(), strict=False)["x"].shape == (2, 3)
    with pytest.raises(ValueError, match=r"^input_ids has shape \(2, 2\), and there are 3 response tokens"):
        trimmed(read(input_ids=torch.ones(2, 2)), Layout())


def test_samples_without_a_token_leave() -> None:
    three = RolloutBatch({"response_mask": torch.tensor([[0, 0], [1, 0], [0, 0]]), "x": ["a", "b", "c"]})
    assert compacted(three, Layout())["x"] == ["b"]
    assert compacted(three, Layout())["response_mask"].shape == (1, 2)
    assert compacted(three, Layout(), trim=True)["response_mask"].shape == (1, 1)
    blank = RolloutBatch({"response_mask": torch.zeros(2, 2), "x": ["a", "b"]})
    assert compacted(blank, Layout(), trim=True) == {"response_mask": torch.zeros(1, 1), "x": ["a"]}
    whole = RolloutBatch({"response_mask": torch.ones(2, 2)})
    assert compacted(whole, Layout()) is whole.source
    nobody = RolloutBatch({"response_mask": torch.zeros(0, 2), "x": []})
    assert compacted(nobody, Layout(), trim=True) is nobody.source


def test_a_batch_is_blanked_with_what_was_there_before() -> None:
    once = blanked(read(x=[1, 2]))
    assert list(once) == ["response_mask", "x"]
    twice = blanked(read(original_response_mask=torch.ones(2, 3)))
    assert not twice["original_response_mask"].any()
    assert not twice["response_mask"].any()
    assert MASK.any()


def test_a_batch_is_built_again_around_its_columns() -> None:
    source = {"response_mask": MASK, "x": [1, 2], "step": 3}
    assert rebuilt(source, {"x": [5]})["step"] == 3
    assert source["x"] == [1, 2]
