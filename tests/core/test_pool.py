"""A pool of responses: what it takes, gives, and refuses, and what enters a group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_dataflex import ReplayPool, RolloutBatch
from lightning_dataflex.core.replay import solved, with_replayed
from lightning_dataflex.core.sample_group import SampleGroup
from lightning_dataflex.core.samples import Layout, joined

LAYOUT = Layout()


def response(prompt: int, *tokens: int, reward: float = 1.0, **more: Any) -> dict[str, Any]:
    """One response after a prompt of one token, in a batch of width 3."""
    ids = torch.zeros(1, 4, dtype=torch.int64)
    ids[0, : 1 + len(tokens)] = torch.tensor([prompt, *tokens])
    return {
        "input_ids": ids,
        "response_mask": (torch.arange(3) < len(tokens)).long()[None],
        "rm_scores": torch.tensor([reward]),
        "uid": [prompt],
        "advantages": torch.tensor([9.0]),
    } | more


def batch_of(*rows: dict[str, Any]) -> RolloutBatch:
    return RolloutBatch(joined([(row, 3) for row in rows], LAYOUT))


def found(*rows: dict[str, Any], threshold: float = 0.5, **settings: Any) -> list[tuple[int, SampleGroup]]:
    return solved(batch_of(*rows), LAYOUT, threshold, **settings)


def texts(samples: list[SampleGroup]) -> list[list[int]]:
    return [sample.columns["input_ids"][0].tolist() for sample in samples]


def test_solved_responses_are_those_above_the_threshold_each_without_what_it_does_not_need() -> None:
    rows = [response(7, 1, 2), response(7, 3, reward=0.5), response(8, 4, reward=float("nan")), response(9, 5, 6, 1)]
    got = found(*rows, step=4)
    assert [prompt for prompt, _ in got] == [7, 9]
    assert texts([sample for _, sample in got]) == [[7, 1, 2], [9, 5, 6, 1]]
    assert [(sample.width, sample.born) for _, sample in got] == [(2, 4), (3, 4)]
    assert found(response(7, 1))[0][1].born == 0
    assert [prompt for prompt, _ in found(*rows, threshold=0.4)] == [7, 7, 9]
    assert [prompt for prompt, _ in found(*rows, wanted=lambda prompt: prompt == 9)] == [9]
    named = [row | {"prompt_id": [row["uid"][0] + 100]} for row in rows]
    assert [prompt for prompt, _ in found(*named)] == [107, 109]


def test_a_pool_takes_what_is_new_as_long_as_there_is_room() -> None:
    pool = ReplayPool(max_per_prompt=2)
    assert pool.has_room(7)
    assert pool.add(found(response(7, 1), response(7, 1), response(8, 1))) == 2
    assert pool.has_room(7)
    assert pool.add(found(response(7, 1), response(7, 2), response(7, 3))) == 1
    assert (pool.has_room(7), pool.has_room(8), pool.has_room(9)) == (False, True, True)
    assert len(pool) == 3
    assert sorted(texts(pool.drawn(7, 9))) == [[7, 1], [7, 2]]
    assert [len(pool.drawn(7, num)) for num in (0, 1, 2, 3)] == [0, 1, 2, 2]
    assert pool.drawn(5, 3) == []
    assert ReplayPool().max_per_prompt == 8
    assert ReplayPool(1).max_per_prompt == 1
    with pytest.raises(ValueError, match="max_per_prompt is 0"):
        ReplayPool(0)


def test_responses_are_the_same_by_their_valid_tokens_alone() -> None:
    pool = ReplayPool()
    assert pool.add(found(response(7, 1, 2))) == 1
    other_prompt = response(7, 1, 2) | {"input_ids": torch.tensor([[3, 1, 2, 0]])}
    assert pool.add(found(other_prompt)) == 0
    assert pool.add(found(response(7, 1))) == pool.add(found(response(7, 2, 1))) == 1
    hole = response(7, 1, 2) | {"response_mask": torch.tensor([[1, 0, 1]])}
    assert pool.add(found(hole)) == 1
    # What stands in a hole of the mask is none of its tokens.
    assert pool.add(found(hole | {"input_ids": torch.tensor([[7, 1, 8, 0]])})) == 0
    # Without tokens nobody can say which are the same.
    untold = {name: value for name, value in response(8, 1).items() if name != "input_ids"}
    assert [pool.add(found(untold)) for _ in range(2)] == [1, 1]
    unmasked = ReplayPool()
    assert [unmasked.add(found(response(7, 1)), "mask") for _ in range(2)] == [1, 1]
    listed = response(8, 1) | {"input_ids": [[1, 2]]}
    assert [unmasked.add(found(listed)) for _ in range(2)] == [1, 1]


def test_a_state_is_taken_back_and_nothing_else(tmp_path: Path) -> None:
    pool = ReplayPool()
    pool.add(found(response(7, 1), response(7, 2), response(8, 3), step=5))
    again, small = ReplayPool(), ReplayPool(max_per_prompt=1)
    again.load_state_dict(pool.state_dict())
    small.load_state_dict(pool.state_dict())
    assert (len(again), len(small)) == (3, 2)
    assert texts(again.drawn(7, 2)) == texts(pool.drawn(7, 2))
    assert (again.drawn(8, 1)[0].born, again.drawn(8, 1)[0].width) == (5, 1)
    for state in (None, {}, {"format": "x", "samples": {}}):
        with pytest.raises(ValueError, match=r"^The state is .*\. Give one of lightning_dataflex\.ReplayPool"):
            again.load_state_dict(state)  # type: ignore[arg-type]
    good = pool.state_dict()["samples"][8][0]
    bad = (
        (8.0, good),
        (8, good | {"width": 1.0}),
        (8, good | {"columns": {"uid": [8, 8]}}),
        (8, good | {"columns": {"a": {"b": torch.ones(2)}}}),
    )
    for prompt, sample in bad:
        with pytest.raises(
            ValueError, match=rf"^What the state has of prompt {prompt} is no response. Collect it anew"
        ):
            again.load_state_dict(pool.state_dict() | {"samples": {7: [good], prompt: [sample]}})
    again.load_state_dict(
        pool.state_dict() | {"samples": {8: [good | {"columns": {"a": {"b": torch.ones(1)}, "c": 3}}]}}
    )
    assert len(again) == 1


def test_a_file_is_read_up_to_its_size(tmp_path: Path) -> None:
    pool, path = ReplayPool(), tmp_path / "a" / "b" / "pool.pt"
    images = {"pixels": torch.ones(1, 50_000), "array": np.ones((1, 1000)), "names": ["x"]}
    pool.add(found(response(7, 1)))
    pool.add([(8, SampleGroup({"images": images, "text": ["a"]}, 1, 0))])
    pool.save(path)
    pool.save(path)
    assert [each.name for each in path.parent.iterdir()] == ["pool.pt"]
    of_tensors = 2 * 8 + 4 + 4 + 8 + 50_000 * 4 + 1000 * 8
    assert pool._num_bytes() == of_tensors
    size = path.stat().st_size
    assert len(ReplayPool.load(path, max_bytes=size)) == 2
    with pytest.raises(ValueError, match=rf"has {size:,} bytes, and at most {size - 1:,} are read"):
        ReplayPool.load(path, max_bytes=size - 1)
    assert len(ReplayPool.load(path, 1)) == 2
    assert ReplayPool.load(path).max_per_prompt == 8


# -- what enters a group ---------------------------------------------------------------------------------------------


def replayed(batch: RolloutBatch, pool: ReplayPool, num: int = 2, estimator: str = "rloo") -> tuple[Any, int]:
    return with_replayed(batch, pool, num, LAYOUT, estimator, None, 0, 0)


def test_responses_stand_behind_the_last_of_their_group() -> None:
    pool = ReplayPool()
    pool.add(found(response(7, 5, 6), response(8, 5), response(6, 1)))
    fresh = batch_of(
        *(response(prompt, 1, reward=reward) for prompt, reward in ((7, 0.0), (8, 0.0), (7, 0.0), (9, 0.0)))
    )
    batch, num = replayed(fresh, pool)
    assert (num, batch["uid"]) == (2, [7, 8, 8, 7, 7, 9])
    assert batch["input_ids"][:, 1].tolist() == [1, 1, 5, 1, 5, 1]
    assert batch["rm_scores"].tolist() == [0, 0, 1, 0, 1, 0]
    assert batch["advantages"].tolist() == [-0.5, -1, 1, -0.5, 1, 9]
    assert replayed(fresh, pool, num=0) == (fresh.source, 0)
    assert replayed(fresh, ReplayPool())[0] is fresh.source


def test_advantages_of_tokens_are_replaced_where_the_group_has_grown() -> None:
    pool, per_token = ReplayPool(), {"advantages": torch.full((1, 3), 9.0)}
    pool.add(found(response(7, 5, 6, **per_token)))
    fresh = batch_of(response(7, 1, reward=0.0, **per_token), response(9, 1, 2, **per_token))
    batch, num = replayed(fresh, pool)
    assert (num, batch["uid"]) == (1, [7, 7, 9])
    assert batch["advantages"].tolist() == [[-1, 0, 0], [1, 1, 0], [9, 9, 9]]


def test_what_is_replayed_has_the_fields_of_the_batch() -> None:
    pool = ReplayPool()
    pool.add(found(response(7, 5, image={"a": torch.ones(1), "b": torch.ones(1)})))
    fresh = batch_of(response(7, 1, reward=0.0)).source | {"image": {"a": torch.ones(1).half(), "b": torch.ones(1)}}
    batch, _ = replayed(RolloutBatch(fresh), pool)
    assert batch["image"]["a"].dtype == torch.float16
    with pytest.raises(ValueError, match=r"^extra, image is not a field of both the pool's responses and the"):
        replayed(batch_of(response(7, 1, reward=0.0, extra=["a"])), pool)
