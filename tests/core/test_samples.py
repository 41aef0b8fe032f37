"""Samples leave a batch, and batches come together: every per-sample field, of every type of batch."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from transformers import BatchEncoding

from lightning_dataflex import RolloutBatch
from lightning_dataflex.core.sample_group import SampleGroup, groups_of, padding, together
from lightning_dataflex.core.samples import Layout, blanked, compacted, joined, per_sample, taken, trimmed

ROWS = torch.tensor([1, 3])
MASK = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 0]])


def fields() -> dict[str, Any]:
    return {
        "response_mask": MASK,
        "rewards": torch.tensor([0.1, 0.2, 0.3, 0.4]),
        "lengths": np.array([3, 1, 2, 2]),
        "texts": ["a", "b", "c", "d"],
    }


@dataclasses.dataclass
class Data:
    response_mask: torch.Tensor
    rewards: torch.Tensor
    lengths: np.ndarray
    texts: list[str]
    step: int = 3


class Named(NamedTuple):
    response_mask: torch.Tensor
    rewards: torch.Tensor
    lengths: np.ndarray
    texts: list[str]


class Verl:
    def __init__(self) -> None:
        given = fields()
        tensors = {k: v for k, v in given.items() if isinstance(v, torch.Tensor)}
        self.batch = TensorDict(tensors, batch_size=[4])
        self.non_tensor_batch = {"lengths": given["lengths"], "texts": np.array(given["texts"], dtype=object)}
        self.meta_info = {"temperature": 1.0}


BATCHES = {
    "dict": fields,
    "BatchEncoding": lambda: BatchEncoding(fields()),
    "TensorDict": lambda: TensorDict(fields(), batch_size=[4]),
    "dataclass": lambda: Data(**fields()),
    "NamedTuple": lambda: Named(**fields()),
    "verl": Verl,
}


@pytest.mark.parametrize("kind", list(BATCHES))
def test_R042_every_field_has_the_rows_that_stay(kind: str) -> None:
    source = BATCHES[kind]()
    result = taken(RolloutBatch(source), ROWS, Layout())
    assert type(result) is type(source)
    read = RolloutBatch(result)
    assert read["rewards"].tolist() == pytest.approx([0.2, 0.4])
    assert read["response_mask"].tolist() == [[1, 0, 0], [1, 1, 0]]
    assert np.asarray(read["lengths"]).tolist() == [1, 2]
    assert list(read["texts"]) == ["b", "d"]
    assert RolloutBatch(source)["rewards"].shape == (4,)
    assert len(list(RolloutBatch(source)["texts"])) == 4


def test_scalars_texts_none_and_nested_fields() -> None:
    batch = fields() | {"step": 3, "name": "run", "extra": None, "scale": torch.tensor(2.0)}
    batch["images"] = {"pixels": torch.arange(4), "format": "rgb", "scale": torch.tensor(2.0)}
    result = taken(RolloutBatch(batch), ROWS, Layout())
    assert (result["step"], result["name"], result["extra"], float(result["scale"])) == (3, "run", None, 2.0)
    assert result["images"]["pixels"].tolist() == [1, 3]
    assert (result["images"]["format"], float(result["images"]["scale"])) == ("rgb", 2.0)


def test_what_is_shared_is_a_matter_of_declaration() -> None:
    batch = fields() | {"class_weights": torch.ones(4), "stop_ids": [2, 7]}
    with pytest.raises(ValueError, match=r"stop_ids has 2 entries but .* 4 samples.*shared_fields: \[stop_ids\]"):
        taken(RolloutBatch(batch), ROWS, Layout.of(shared=["class_weights"]))
    result = taken(RolloutBatch(batch), ROWS, Layout.of(shared=["class_weights", "stop_ids"]))
    assert len(result["class_weights"]) == 4
    assert result["stop_ids"] == [2, 7]
    assert len(taken(RolloutBatch(fields() | {"class_weights": torch.ones(4)}), ROWS, Layout())["class_weights"]) == 2


def test_rows_without_a_valid_token_leave_and_one_stays_where_none_has_any() -> None:
    batch = fields() | {"response_mask": MASK * torch.tensor([[0], [1], [0], [1]])}
    assert compacted(RolloutBatch(batch), Layout())["texts"] == ["b", "d"]
    empty = fields() | {"response_mask": MASK * 0}
    one = compacted(RolloutBatch(empty), Layout())
    assert one["texts"] == ["a"]
    assert not one["response_mask"].any()
    whole = fields()
    assert compacted(RolloutBatch(whole), Layout()) is whole
    nobody = {"response_mask": torch.zeros(0, 3), "texts": []}
    assert compacted(RolloutBatch(nobody), Layout(), trim=True)["texts"] == []


def test_trimming_cuts_the_columns_that_nobody_needs() -> None:
    batch = fields() | {"response_mask": MASK[1:2].expand(4, 3), "input_ids": torch.arange(20).reshape(4, 5)}
    result = trimmed(RolloutBatch(batch), Layout())
    assert result["response_mask"].tolist() == [[1]] * 4
    assert result["input_ids"].tolist() == [[0, 1, 2], [5, 6, 7], [10, 11, 12], [15, 16, 17]]
    with pytest.raises(ValueError, match=r"values has 3 columns.*token_fields"):
        trimmed(RolloutBatch(batch | {"values": torch.ones(4, 3)}), Layout())
    layout = Layout.of(token_fields=["values"])
    assert trimmed(RolloutBatch(batch | {"values": torch.ones(4, 3)}), layout)["values"].shape == (4, 1)
    holes = {"response_mask": torch.tensor([[0, 1, 0], [0, 0, 0]])}
    assert trimmed(RolloutBatch(holes), Layout())["response_mask"].shape == (2, 2)
    blank = {"response_mask": torch.zeros(2, 3)}
    assert trimmed(RolloutBatch(blank), Layout())["response_mask"].shape == (2, 1)


def rollout(prompt: int, response: int, num: int, first: int) -> tuple[dict[str, Any], int]:
    """Token ids 100 + sample for a prompt, 200 + sample for a response, with padding of 0 on either side."""
    ids = torch.arange(first, first + num)[:, None]
    return {
        "input_ids": torch.cat([(100 + ids).expand(num, prompt), (200 + ids).expand(num, response)], 1),
        "response_mask": torch.ones(num, response, dtype=torch.int64),
        "uid": [f"{i}" for i in ids.flatten().tolist()],
        "hidden": torch.zeros(num, 7),
    }, response


def test_batches_of_other_widths_are_padded_where_prompts_and_responses_are() -> None:
    a, b = rollout(2, 3, 2, 0), rollout(4, 1, 1, 2)
    result = joined([a, b], Layout())
    assert result["input_ids"].tolist() == [
        [0, 0, 100, 100, 200, 200, 200],
        [0, 0, 101, 101, 201, 201, 201],
        [102, 102, 102, 102, 202, 0, 0],
    ]
    assert result["response_mask"].tolist() == [[1, 1, 1], [1, 1, 1], [1, 0, 0]]
    assert result["uid"] == ["0", "1", "2"]
    assert result["hidden"].shape == (3, 7)


def test_widths_that_nobody_has_explained_are_refused() -> None:
    a, b = rollout(2, 3, 2, 0), rollout(4, 1, 1, 2)
    for columns, _ in (a, b):
        columns["tokens"] = columns.pop("input_ids")
    widths = joined([a, b], Layout.of(token_fields=["tokens"]))["tokens"].shape
    assert widths == (3, 7)
    b[0]["tokens"] = b[0]["tokens"][:, 1:]
    with pytest.raises(ValueError, match=r"tokens has 4 and 5 columns.*token_fields"):
        joined([a, b], Layout())
    del b[0]["tokens"]
    with pytest.raises(ValueError, match="different fields: tokens is not in all"):
        joined([a, b], Layout())


def test_fields_of_a_mapping_are_joined() -> None:
    def part(num: int) -> tuple[dict[str, Any], int]:
        images = {"pixels": torch.full((num, 4), num), "sizes": torch.full((num,), num), "names": ["i"] * num}
        return {"response_mask": torch.ones(num, num), "images": images}, num

    whole = joined([part(2), part(1)], Layout())["images"]
    assert whole["pixels"][:, 0].tolist() == whole["sizes"].tolist() == [2, 2, 1]
    assert whole["names"] == ["i"] * 3


def test_layouts_add_up() -> None:
    both = Layout.of(shared=["a"], token_fields=["x"]) | Layout.of(shared=["b"], token_fields=["y"])
    assert both == Layout.of(shared=["a", "b"], token_fields=["x", "y"])


@pytest.mark.parametrize("kind", ["dict", "TensorDict", "dataclass", "verl", "BatchEncoding"])
def test_groups_that_were_cut_out_make_the_batch_again(kind: str) -> None:
    source = BATCHES[kind]()
    batch = RolloutBatch(source, {"uid": "texts"})
    whole = RolloutBatch(together(groups_of(batch, Layout(), 0), batch, Layout()), batch.fields)
    assert type(whole.source) is type(source)
    assert whole["rewards"].tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert list(whole["texts"]) == ["a", "b", "c", "d"]


def test_a_group_is_the_same_after_a_checkpoint(tmp_path) -> None:
    batch = RolloutBatch(fields() | {"uid": [7, 8, 7, 8], "tags": [{"level": np.int64(1)}, {}, {"level": 2}, {}]})
    group = groups_of(batch, Layout(), 5)[0].on_cpu()
    torch.save(group.state_dict(), tmp_path / "group.pt")
    back = SampleGroup.of_state(torch.load(tmp_path / "group.pt", weights_only=True))
    assert (back.width, back.born) == (3, 5)
    assert back.columns["texts"] == ["a", "c"]
    assert back.columns["tags"] == [{"level": 1}, {"level": 2}]
    assert isinstance(back.columns["lengths"], np.ndarray)
    assert torch.equal(back.columns["response_mask"], MASK[[0, 2]])
    with pytest.raises(ValueError, match=r"A rollout batch\.texts holds a set, which a checkpoint cannot hold"):
        SampleGroup({"texts": [{1}]}, 1, 0).state_dict()


def test_groups_in_stock_go_to_the_device_of_their_batch() -> None:
    """Stock lies in main memory; `meta` stands for the device of the batch."""
    batch = RolloutBatch(fields() | {"uid": [7, 8, 7, 8], "images": [torch.ones(2)] * 4})
    stock = groups_of(batch, Layout(), 0)
    there = RolloutBatch({k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in batch.source.items()})
    here = [
        SampleGroup({k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in stock[0].columns.items()}, 3, 0)
    ]
    whole = together([*here, stock[1]], there, Layout())
    assert whole["rewards"].device.type == whole["response_mask"].device.type == "meta"
    assert whole["uid"] == [7, 7, 8, 8]
    grown = RolloutBatch(fields() | {"uid": [7] * 4, "images": [torch.ones(2, requires_grad=True)] * 4})
    assert not any(image.requires_grad for image in groups_of(grown, Layout(), 0)[0].columns["images"])


def test_padding_counts_nowhere() -> None:
    batch = RolloutBatch(fields() | {"uid": [7, 8, 7, 8], "rm_scores": torch.ones(4)})
    blank = RolloutBatch(blanked(batch))
    assert not blank.num_tokens.any()
    assert blank.outcomes.isnan().all()
    group = padding(batch, Layout(), 3, 0)
    assert not group.columns["response_mask"].any()
    assert len(group.columns["texts"]) == 3


def test_the_columns_of_a_batch_are_named() -> None:
    assert list(per_sample(RolloutBatch(fields() | {"step": 1}), Layout())) == list(fields())


def test_a_field_of_endless_mappings_is_refused_and_not_followed():
    deep: dict = {}
    for _ in range(5000):
        deep = {"inner": deep}
    with pytest.raises(ValueError, match=r"^extra.inner.* is a mapping within 32 others. Give what is of samples as"):
        per_sample(RolloutBatch({"uid": [0, 1], "extra": deep}), Layout.of())
