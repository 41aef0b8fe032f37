"""RLEP: what enters a group, with which advantages, over ranks, after a stop, and in a run that trains."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_dataflex import RLEP, DataFlexCallback, ReplayPool, RolloutBatch
from lightning_dataflex.core.replay import solved, with_replayed
from lightning_dataflex.core.samples import Layout
from tests import launch
from tests.flowing import GENERATIONS, Mixed, Prompts, Rolling, as_lists, fit, prompts
from tests.ranks import processes, taken

LAYOUT = Layout.of(token_fields=["responses"])


def rollout(outcomes: dict[int, list[float]], width: int, seed: int = 0, prompt: int = 2) -> dict[str, Any]:
    """Responses of up to `width` tokens after prompts of `prompt` tokens, with log-probabilities of their own."""
    rng = np.random.default_rng(seed)
    uid = [name for name, rewards in outcomes.items() for _ in rewards]
    lengths = rng.integers(1, width + 1, len(uid))
    lengths[0] = width
    mask = torch.tensor(np.arange(width) < lengths[:, None]).long()
    responses = torch.tensor(rng.integers(1, 9, (len(uid), width))) * mask
    return {
        "input_ids": torch.cat([torch.tensor([[name] * prompt for name in uid]), responses], 1),
        "responses": responses,
        "response_mask": mask,
        "rm_scores": torch.tensor([r for rewards in outcomes.values() for r in rewards]),
        "old_log_probs": -torch.tensor(rng.uniform(0.1, 1, mask.shape)) * mask,
        "advantages": torch.full(mask.shape, 9.0),
        "uid": torch.tensor(uid),
        "text": [f"{name}-{seed}-{i}" for i, name in enumerate(uid)],
    }


def a_pool(outcomes: dict[int, list[float]], width: int = 3, seed: int = 1, **settings: Any) -> ReplayPool:
    pool = ReplayPool(**settings)
    pool.add(solved(RolloutBatch(rollout(outcomes, width, seed, prompt=4)), LAYOUT, 0.5))
    return pool


def extended(batch: dict[str, Any], pool: ReplayPool, num: int = 2, estimator: str = "grpo") -> dict[str, Any]:
    return with_replayed(RolloutBatch(batch), pool, num, LAYOUT, estimator, None, 0, 0)[0]


def test_a_group_that_failed_is_rescued_with_the_advantages_of_the_whole():
    fresh = rollout({7: [0.0, 0.0, 0.0], 8: [1.0, 0.0], 9: [1.0, 1.0]}, width=2)
    pool = a_pool({7: [1.0, 1.0, 0.0], 9: [1.0]})
    batch = extended(fresh, pool)
    assert batch["uid"].tolist() == [7, 7, 7, 7, 7, 8, 8, 9, 9, 9]
    assert batch["rm_scores"].tolist() == [0, 0, 0, 1, 1, 1, 0, 1, 1, 1]
    got = (batch["advantages"] * batch["response_mask"]).sum(1) / batch["response_mask"].sum(1)
    rewards = np.array([0.0, 0, 0, 1, 1])
    np.testing.assert_allclose(got[:5], (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6), atol=1e-5)
    # A group without a replayed response keeps what the module gave it.
    assert got[5:7].tolist() == [9, 9]
    # What is solved as a whole stays without a signal.
    assert got[7:].tolist() == [0, 0, 0]


def test_replayed_responses_bring_their_own_fields_whatever_their_width():
    fresh = rollout({7: [0.0, 0.0]}, width=2)
    source = rollout({7: [1.0]}, width=3, seed=1, prompt=4)
    batch = extended(fresh, a_pool({7: [1.0]}))
    # Prompts of 2 and 4 tokens on the left, responses of 2 and 3 on the right.
    assert batch["input_ids"].shape == (3, 7)
    assert batch["input_ids"][2].tolist() == source["input_ids"][0].tolist()
    assert batch["input_ids"][0].tolist() == [0, 0, *fresh["input_ids"][0].tolist(), 0]
    assert torch.equal(batch["old_log_probs"][2], source["old_log_probs"][0])
    assert batch["text"] == [*fresh["text"], *source["text"]]


def test_the_estimator_is_that_of_the_run():
    fresh = rollout({7: [0.0, 0.0]}, width=1)
    fresh["advantages"] = torch.zeros(2)
    expected = {
        "grpo": [-0.5773502, -0.5773502, 1.1547005],
        "dr_grpo": [-1 / 3, -1 / 3, 2 / 3],
        "rloo": [-0.5, -0.5, 1.0],
    }
    pool = ReplayPool()
    pool.add(solved(RolloutBatch(rollout({7: [1.0]}, 1, 1) | {"advantages": torch.zeros(1)}), LAYOUT, 0.5))
    for estimator, want in expected.items():
        np.testing.assert_allclose(extended(fresh, pool, estimator=estimator)["advantages"], want, atol=1e-5)


def test_no_more_than_asked_and_none_of_other_prompts():
    fresh, pool = rollout({7: [0.0], 8: [0.0], 9: [0.0]}, width=2), a_pool({7: [1.0] * 6, 9: [1.0], 5: [1.0]})
    batch = extended(fresh, pool, num=4)
    assert batch["uid"].tolist() == [7] * 5 + [8] + [9] * 2
    assert len(set(batch["text"])) == 8
    assert extended(rollout({3: [0.0, 1.0]}, width=2), pool)["advantages"].eq(9).all()


def test_draws_follow_from_the_key_and_reach_every_response():
    pool = a_pool({7: [1.0] * 6})
    drawn = [tuple(each.columns["text"][0] for each in pool.drawn(7, 2, 0, step)) for step in range(60)]
    assert drawn == [tuple(each.columns["text"][0] for each in pool.drawn(7, 2, 0, step)) for step in range(60)]
    assert {name for names in drawn for name in names} == {f"7-1-{i}" for i in range(6)}
    assert all(len(set(names)) == 2 for names in drawn)


def test_a_pool_keeps_the_first_and_no_response_twice(tmp_path: Path):
    pool = a_pool({7: [1.0] * 6, 8: [0.0, 1.0]}, max_per_prompt=3)
    assert len(pool) == 4
    assert [each.columns["text"][0] for each in pool.drawn(8, 9)] == ["8-1-7"]
    assert pool.add(solved(RolloutBatch(rollout({8: [0.0, 1.0]}, 3, 5)), LAYOUT, 0.5)) == 1
    again = solved(RolloutBatch(rollout({8: [0.0, 1.0]}, 3, 5, prompt=6)), LAYOUT, 0.5)
    assert pool.add(again) == 0
    pool.save(tmp_path / "made" / "anew" / "pool.pt")
    loaded = ReplayPool.load(tmp_path / "made" / "anew" / "pool.pt")
    assert [p.name for p in (tmp_path / "made" / "anew").iterdir()] == ["pool.pt"]
    fresh = rollout({7: [0.0, 0.0], 8: [0.0]}, width=2)
    assert as_lists(extended(fresh, loaded)) == as_lists(extended(fresh, pool))


def test_what_is_no_pool_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"There is no file .*Collect a pool first"):
        RLEP(tmp_path / "none.pt")
    torch.save({"a": 1}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match="is no pool of responses"):
        RLEP(tmp_path / "other.pt")
    (tmp_path / "text.pt").write_text("pool")
    with pytest.raises(ValueError, match="cannot be read as a pool"):
        RLEP(tmp_path / "text.pt")
    with pytest.raises(ValueError, match="neither a pool nor collect"):
        RLEP()
    with pytest.raises(ValueError, match="num is -1"):
        RLEP(ReplayPool(), num=-1)
    with pytest.raises(ValueError, match="text is not a field of both"):
        extended({k: v for k, v in rollout({7: [0.0]}, 2).items() if k != "text"}, a_pool({7: [1.0]}))


def on_ranks(given: tuple[dict[str, Any], ReplayPool]) -> dict[str, Any]:
    return extended(*given)


@pytest.mark.parametrize(
    "rows_of", [[[0, 2, 4, 5], [1, 3]], [[], [0, 1, 2, 3, 4, 5]], [[5, 1], [], [0, 4], [2, 3]]], ids=str
)
def test_groups_over_ranks_get_each_response_once_and_the_advantages_of_all(rows_of: list[list[int]]):
    batch = rollout({7: [0.0, 0.0, 1.0], 8: [0.0, 0.0], 9: [1.0]}, width=3)
    pool = a_pool({7: [1.0, 1.0, 1.0], 8: [1.0]})
    ranks = processes(len(rows_of)).run(on_ranks, [(taken(batch, rows), pool) for rows in rows_of])
    alone = extended(batch, pool)
    advantage = {text: float(row[0]) for text, row in zip(alone["text"], alone["advantages"])}
    found = {text: float(row[0]) for part in ranks for text, row in zip(part["text"], part["advantages"])}
    assert sum(len(part["text"]) for part in ranks) == len(alone["text"]) == 9
    assert found == pytest.approx(advantage)


# -- in a run ----------------------------------------------------------------------------------------------------------


def run(
    callbacks: list[Any], kinds: list[str], steps: int = 3, **settings: Any
) -> tuple[Rolling, list[dict[str, float]]]:
    data = Prompts(kinds, 2, StatefulDataLoader)
    module, logged, _ = fit(callbacks, data, max_steps=steps, max_epochs=-1, **settings)
    return module, logged


def of_failed(count: int) -> ReplayPool:
    """A pool for a run in which every prompt fails."""
    module = Rolling()
    module.trainer = type("Idle", (), {"training": False})()
    pool = ReplayPool()
    easy = module.rollout(prompts(["easy"] * count)) | {"kind": ["hard"] * (4 * count)}
    pool.add(solved(RolloutBatch(easy), Layout(), 0.5))
    return pool


def test_a_run_that_only_fails_learns_from_the_pool_and_from_nothing_without_it(tmp_path: Path):
    module, logged = run([RLEP(of_failed(6))], ["hard"] * 6)
    assert [len(batch["uid"]) for batch in module.given] == [2 * (GENERATIONS + 2)] * 3
    assert [step["replayed"] for step in logged] == [4.0] * 3
    assert not torch.equal(module.weight, Rolling().weight)
    assert not [point._forward_hooks for point in (module.dataflex,) if point._forward_hooks]
    without, _ = run([], ["hard"] * 6)
    assert torch.equal(without.weight, Rolling().weight)


def test_selection_sees_the_groups_with_what_was_replayed(tmp_path: Path):
    select = DataFlexCallback("select", actuator="nonzero_variance")
    for callbacks in ([RLEP(of_failed(3)), select], [select, RLEP(of_failed(3))]):
        module, _ = run(callbacks, ["hard"] * 6)
        kept = [bool(batch["response_mask"].any()) for batch in module.given]
        # Of six prompts the pool knows the first three: both of the first step, one of the second, none of the third.
        assert kept == [True, True, False]
        assert (module.given[1]["response_mask"].sum(1) > 0).sum() == GENERATIONS + 2


def test_what_a_run_collects_is_there_for_the_next(tmp_path: Path):
    file = tmp_path / "made" / "solved.pt"
    run([RLEP(num=0, collect=str(file), max_per_prompt=3)], ["mixed", "easy", "hard", "mixed"], steps=2)
    pool = ReplayPool.load(file)
    assert len(pool) == 2 + 3 + 0 + 2
    module, _ = run([RLEP(file)], ["mixed", "easy", "hard", "mixed"], steps=2)
    assert [len(batch["uid"]) for batch in module.given] == [8 + 4, 8 + 2]


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_stop_and_resume_equals_never_stopping(tmp_path: Path, stop: int):
    def callbacks(folder: str) -> list[Any]:
        return [RLEP(of_failed(2), num=1, collect=str(tmp_path / folder / "pool.pt"), max_per_prompt=2)]

    kinds = ["hard", "mixed", "easy", "mixed", "mixed", "hard", "mixed", "easy"]
    whole, _ = run(callbacks("whole"), kinds, steps=6)
    saving = ModelCheckpoint(tmp_path / "first", every_n_train_steps=stop, save_top_k=-1, filename="{step}")
    run([*callbacks("first"), saving], kinds, steps=stop, enable_checkpointing=True)
    file = str(tmp_path / "first" / f"step={stop}.ckpt")
    resumed, _ = run(callbacks("second"), kinds, steps=6, ckpt_path=file)
    assert as_lists(resumed.given) == as_lists(whole.given[stop:])
    assert torch.equal(resumed.weight, whole.weight)
    pools = [ReplayPool.load(tmp_path / name / "pool.pt").state_dict() for name in ("whole", "second")]
    assert as_lists(pools[0]) == as_lists(pools[1])


def test_two_ranks_collect_one_pool_and_replay_what_one_process_does(tmp_path: Path):
    parts = {}
    for world in (1, 2):
        folder = tmp_path / str(world)
        folder.mkdir()
        launch.run([sys.executable, "tests/flowing.py", "rlep", str(world), str(folder)])
        parts[world] = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world)]
    (alone,), ranks = parts[1], parts[2]
    for step, batch in enumerate(alone["given"]):
        everyone = [uid for rank in ranks for uid in rank["given"][step]["uid"]]
        assert sorted(everyone) == sorted(batch["uid"])
    # In the second and third epoch every solved prompt has two replayed beside its four.
    assert len(alone["given"][2]["uid"]) == 4 * GENERATIONS + 3 * 2
    pools = [as_lists(rank["state"]["pool"]) for rank in (*ranks, alone)]
    assert pools[0] == pools[1]
    assert {key: len(value) for key, value in pools[0]["samples"].items()} == {
        key: len(value) for key, value in pools[2]["samples"].items()
    }
    assert torch.equal(ranks[0]["weight"], ranks[1]["weight"])
    assert len(ReplayPool.load(tmp_path / "2" / "pool.pt")) == len(ReplayPool.load(tmp_path / "1" / "pool.pt")) == 15


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda module: setattr(module, "adv_estimator", "gae"), "adv_estimator is 'gae'"),
        (lambda module: delattr(module, "dataflex"), "RLEP acts at a DataFlexPoint, and Rolling has none"),
    ],
)
def test_a_module_that_cannot_use_it_is_refused_before_the_first_step(tmp_path: Path, change: Any, message: str):
    module = Rolling()
    change(module)
    trainer = Trainer(
        max_steps=1, accelerator="cpu", logger=False, default_root_dir=tmp_path, callbacks=[RLEP(of_failed(1))]
    )
    with pytest.raises(ValueError, match=message):
        trainer.fit(module, datamodule=Prompts(["hard"] * 2, batch_size=2))
    assert not module.rolled_out


def test_fields_have_the_types_of_the_batch_that_they_enter():
    fresh = rollout({7: [0.0, 0.0]}, width=2)
    fresh |= {"old_log_probs": fresh["old_log_probs"].bfloat16(), "response_mask": fresh["response_mask"].bool()}
    fresh |= {"uid": ["seven", "seven"], "prompt_id": [7, 7]}
    source = rollout({7: [1.0]}, width=3, seed=1) | {"prompt_id": [7]}
    pool = ReplayPool()
    pool.add(solved(RolloutBatch(source), LAYOUT, 0.5))
    batch = extended(fresh, pool)
    assert batch["uid"] == ["seven"] * 3
    assert (batch["old_log_probs"].dtype, batch["response_mask"].dtype) == (torch.bfloat16, torch.bool)


def test_a_pool_knows_a_response_under_any_name_of_its_mask_and_holds_as_many_as_it_may(tmp_path: Path):
    batch = rollout({7: [1.0, 1.0]}, width=3)
    batch["loss_mask"] = batch.pop("response_mask")
    read = RolloutBatch(batch, {"response_mask": "loss_mask"})
    pool = ReplayPool()
    assert [pool.add(solved(read, LAYOUT, 0.5), "loss_mask") for _ in range(2)] == [2, 0]
    pool.save(tmp_path / "pool.pt")
    assert len(ReplayPool.load(tmp_path / "pool.pt", max_per_prompt=1)) == 1


def test_tokens_along_another_dimension_are_refused():
    batch = rollout({7: [1.0, 1.0]}, width=4) | {"position_ids": torch.zeros(2, 3, 6)}
    with pytest.raises(ValueError, match=r"position_ids has shape .* along its second dimension"):
        solved(RolloutBatch(batch), LAYOUT, 0.5)
    fresh = rollout({7: [0.0]}, width=2)
    nested = fresh | {"enc": {"ids": fresh["input_ids"]}}
    other = rollout({7: [1.0]}, 3, 1, prompt=4)
    pool = ReplayPool()
    pool.add(solved(RolloutBatch(other | {"enc": {"ids": other["input_ids"]}}), LAYOUT, 0.5))
    with pytest.raises(ValueError, match=r"enc\.ids has other widths"):
        extended(nested, pool)


class Failing(Callback):
    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == 2:
            raise RuntimeError("stopped")


def test_what_was_collected_outlives_the_run_that_is_stopped(tmp_path: Path):
    file = tmp_path / "pool.pt"
    with pytest.raises(RuntimeError, match="stopped"):
        run([RLEP(num=0, collect=str(file)), Failing()], ["mixed", "easy", "hard", "mixed"] * 2, steps=4)
    assert len(ReplayPool.load(file)) == 2 + 4 + 0 + 2


def test_a_point_that_is_not_called_is_told(tmp_path: Path):
    class Silent(Rolling):
        def training_step(self, rows: Any, batch_idx: int) -> torch.Tensor:
            return self.weight.sum()

    with pytest.raises(RuntimeError, match="RLEP did not act in this training step of Silent"):
        fit([RLEP(of_failed(1))], Prompts(["hard"] * 2, 2), Silent())


def test_what_cannot_be_written_is_refused_before_the_run(tmp_path: Path):
    for path in (tmp_path, tmp_path / "file" / "pool.pt"):
        (tmp_path / "file").write_text("")
        with pytest.raises(ValueError, match="which cannot be written"):
            run([RLEP(num=0, collect=str(path))], ["hard"] * 2)


def test_what_it_cannot_work_with_is_refused(tmp_path: Path):
    refill = DataFlexCallback("select", actuator="nonzero_variance", refill={"groups": 1})
    with pytest.raises(ValueError, match=r"nonzero_variance has refill, which drops groups that failed"):
        run([RLEP(of_failed(1)), refill], ["hard"] * 6)
    mix = DataFlexCallback("mix", actuator="reward_gap")
    with pytest.raises(ValueError, match="would take replayed responses for fresh"):
        fit([RLEP(of_failed(1)), mix], Mixed(["hard"] * 6))
    gate = DataFlexCallback("select", scorer="mopps")
    with pytest.raises(ValueError, match="List RLEP before it"):
        run([gate, RLEP(of_failed(1))], ["hard"] * 6)
    module, _ = run([RLEP(of_failed(6)), gate], ["hard"] * 6, steps=1)
    assert len(module.given[0]["uid"]) == 2 * (GENERATIONS + 2)


class FullThen(Rolling):
    """Its run fails, after the folder that the pool is to go to has become a file."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        self.folder.rmdir()
        self.folder.write_text("")
        raise RuntimeError("the run fails")


def test_a_pool_that_cannot_be_written_hides_no_error_and_leaves_no_hook(tmp_path: Path):
    module = FullThen(tmp_path / "pool")
    with (
        pytest.raises(RuntimeError, match="the run fails"),
        pytest.warns(UserWarning, match="RLEP cannot write its pool to"),
    ):
        fit([RLEP(num=1, collect=str(tmp_path / "pool" / "pool.pt"))], Prompts(["mixed"] * 8), module)
    assert not module.dataflex._forward_hooks
