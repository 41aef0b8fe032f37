"""Refill: a real Trainer gets full batches of kept groups, whatever luck, ranks, budget and stops there are."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_dataflex import DataFlexCallback
from lightning_dataflex.refill import draw_size
from tests.flowing import GENERATIONS, LUCK, Mixed, Prompts, Rolling, as_lists, dapo, fit, gate, names
from tests.launch import run

SCRIPT = [sys.executable, "tests/flowing.py"]
MIXED_OF_3 = ["hard", "mixed", "easy"] * 40


def test_the_loss_gets_full_batches_of_kept_groups_and_nothing_that_was_kept_is_lost() -> None:
    module, logged, trainer = fit([dapo(4)], Prompts(MIXED_OF_3, 4), max_steps=8, max_epochs=-1)
    assert trainer.global_step == len(module.given) == 8
    used = [name for batch in module.given for name in names(batch)]
    for batch in module.given:
        assert len(batch["uid"]) == 4 * GENERATIONS
        assert len(names(batch)) == 4
        assert set(batch["kind"]) == {"mixed"}
        assert batch["rollout_is_weights"].sum() == batch["response_mask"].sum()
    # The kept groups are used once each, in the order in which they were generated; the rest is in stock.
    rolled_out = [name for step in module.rolled_out for name, _ in step]
    assert len(set(rolled_out)) == len(rolled_out)
    kept = [name for name in rolled_out if int(name[1:]) % 3 == 1]
    carried = [group.columns["uid"][0] for group in trainer.callbacks[0].flow.refill.stock]
    assert used + carried == kept
    for step, (row, out) in enumerate(zip(logged, module.rolled_out)):
        assert row["prompts"] == len(out), step
        assert row["kept"] == sum(int(name[1:]) % 3 == 1 for name, _ in out)
        assert row["dropped_failed"] == sum(int(name[1:]) % 3 == 0 for name, _ in out)
        assert row["dropped_solved"] == sum(int(name[1:]) % 3 == 2 for name, _ in out)
        assert row["kept_frac"] == pytest.approx(row["kept"] / row["prompts"])
        assert row["reward_all"] == pytest.approx((row["kept"] * 0.5 + row["dropped_solved"]) / row["prompts"])
        assert row["reward_kept"] == pytest.approx(0.5)
    # A step of a schedule is a step of the optimiser.
    assert module.rates == pytest.approx([1 / (2 + i) / 10 for i in range(8)])


def test_draws_are_sized_by_what_was_kept_so_far() -> None:
    module, logged, _ = fit(
        [dapo(4, refill={"groups": 4, "max_rounds": 50})], Prompts(MIXED_OF_3, 12), max_steps=6, max_epochs=-1
    )
    rounds = [row["rounds"] for row in logged]
    # At first every prompt is taken for one that is kept; later the draw is about 4 / (1/3) and a quarter more.
    assert len(module.rolled_out[0]) < 20
    assert rounds[0] >= rounds[-1]
    assert max(len(step) for step in module.rolled_out) <= 24
    assert draw_size(4, 1 / 3, most=100, world=1) == 12
    assert draw_size(4, 1 / 3, most=100, world=1, margin=1.25) == 15
    assert draw_size(4, 1 / 3, most=100, world=4, margin=1.25) == 16
    assert draw_size(0, 1 / 3, most=100, world=4) == 4
    assert draw_size(10, 0.0, most=12, world=1) == 12


@pytest.mark.parametrize("drop", ["mask", "rows", "weight"])
def test_a_budget_that_is_used_up_goes_on_with_what_there_is_and_says_so(drop: str) -> None:
    kinds = (["mixed"] + ["hard"] * 23) * 2
    short = dapo(4, refill={"groups": 4, "max_rounds": 3}, drop=drop)
    with pytest.warns(UserWarning, match=r"kept 1 of 4 groups after 3 rounds of rollouts \(12 prompts\)"):
        module, logged, _ = fit([short], Prompts(kinds, 4), max_steps=1)
    (batch,) = module.given
    assert len(batch["uid"]) == (1 if drop == "rows" else 4) * GENERATIONS
    assert names(batch) == ["p0"]
    assert logged[0]["kept"] == 1
    # The gradient is that of the one group.
    alone, _, _ = fit([dapo(1)], Prompts(kinds, 1), max_steps=1)
    assert torch.allclose(module.weight, alone.weight)
    assert not torch.equal(module.weight, Rolling().weight)


def test_prompts_do_not_pile_up_where_little_is_kept() -> None:
    kinds = ["mixed" if i % 24 == 0 else "hard" for i in range(96)]
    short = dapo(8, refill={"groups": 8, "max_rounds": 3})
    module, _, trainer = fit([short], Prompts(kinds, 4), max_steps=30, max_epochs=-1)
    assert trainer.current_epoch > 1
    # A step has a budget of 12 prompts: never does more wait than it and the step before it could use.
    assert len(trainer.callbacks[0].flow.source.queue) < 24
    assert max(len(step) for step in module.rolled_out) <= 12
    per_epoch = [sum(map(len, module.rolled_out[i : i + 8])) for i in (0, 8, 16)]
    assert min(per_epoch) > 60


@pytest.mark.parametrize("drop", ["mask", "rows", "weight"])
def test_a_stream_in_which_nothing_is_ever_kept_ends_and_moves_nothing(drop: str) -> None:
    with pytest.warns(UserWarning, match="keeps no sample"):
        module, logged, trainer = fit([dapo(2, drop=drop)], Prompts(["easy", "hard"] * 24, 4), max_epochs=1)
    assert 1 < len(module.given) == trainer.global_step < 12
    assert torch.equal(module.weight, Rolling().weight)
    assert sum(len(step) for step in module.rolled_out) == 48
    assert all(torch.isfinite(torch.tensor(list(row.values()))).all() for row in logged)
    assert len(module.given[0]["uid"]) == (2 * GENERATIONS if drop != "rows" else 1)


def test_R006_the_end_of_the_data_ends_the_epoch_and_keeps_what_was_accepted() -> None:
    """The case of a rejected group at the end of the data, which took the accepted ones with it elsewhere."""
    (module := Rolling()).num_generations = 2
    _, logged, trainer = fit([dapo(4)], Prompts(["mixed", "easy", "mixed"], 1), module, max_epochs=2)
    assert [row["kept"] for row in logged] == [2, 2]
    assert [int(batch["response_mask"].any(1).sum()) for batch in module.given] == [4, 4]
    assert [sorted(names(batch)) for batch in module.given] == [["p0", "p2"]] * 2
    assert [row["rounds"] for row in logged] == [3, 3]
    assert (trainer.current_epoch, trainer.global_step) == (2, 2)


def test_what_is_left_of_the_data_is_no_step_of_its_own() -> None:
    module, _, _ = fit([dapo(4)], Prompts(MIXED_OF_3[:60], 6), max_epochs=3)
    sizes = [len(names(batch)) for batch in module.given]
    # 8 of 24 prompts have a signal. At the end of an epoch there may be one step that is not full.
    assert sizes.count(4) >= len(sizes) - 3
    assert min(sizes) > 1


def test_validation_comes_at_the_end_of_an_epoch_of_fewer_steps_than_batches() -> None:
    module, _, trainer = fit([dapo(2)], Prompts(MIXED_OF_3[:24], 2), max_epochs=3)
    per_epoch = trainer.global_step / 3
    assert per_epoch < 12
    assert len(module.validated_after) == 3
    assert module.validated_after[-1] == trainer.global_step


def test_groups_that_wait_too_long_expire_and_are_counted() -> None:
    callback = dapo(1, refill={"groups": 1, "max_age": 0})
    module, logged, _ = fit([callback], Prompts(["mixed"] * 40, 4), max_steps=5, max_epochs=-1)
    assert sum(row["expired"] for row in logged) + logged[-1]["carried"] == sum(row["kept"] - 1 for row in logged)
    used = [name for batch in module.given for name in names(batch)]
    assert len(set(used)) == len(used) == 5


def test_dropped_samples_of_kept_groups_leave_with_drop_rows() -> None:
    block = {"scorer": "reward_difficulty", "actuator": {"name": "max_variance", "params": {"keep_fraction": 0.5}}}
    module, _, _ = fit([dapo(4, **block, drop="rows")], Prompts(["mixed"] * 40, 4), max_steps=2, max_epochs=-1)
    assert [len(batch["uid"]) for batch in module.given] == [4 * 2] * 2
    masked, _, _ = fit([dapo(4, **block)], Prompts(["mixed"] * 40, 4), max_steps=2, max_epochs=-1)
    assert [len(batch["uid"]) for batch in masked.given] == [4 * 4] * 2
    torch.testing.assert_close(module.weight, masked.weight)


def test_it_combines_with_reweighting_in_either_order() -> None:
    results = []
    for order in (1, -1):
        weigh = DataFlexCallback("reweight", "advantage_magnitude", {"name": "per_advantage", "params": {"alpha": 1.0}})
        module, _, _ = fit([dapo(4), weigh][::order], Prompts(MIXED_OF_3, 4), max_steps=3, max_epochs=-1)
        results.append(module)
    for one, two in zip(results[0].given, results[1].given):
        assert one["uid"] == two["uid"]
        torch.testing.assert_close(one["rollout_is_weights"], two["rollout_is_weights"])
    torch.testing.assert_close(results[0].weight, results[1].weight)


@pytest.mark.parametrize("stop", [1, 2, 4, 5])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_run_that_was_stopped_in_the_midst_of_a_refill_goes_on_as_if_it_was_not(
    stop: int, num_workers: int, tmp_path: Path
) -> None:
    def data() -> Prompts:
        loader = lambda *args, **kw: StatefulDataLoader(*args, num_workers=num_workers, **kw)  # noqa: E731
        return Prompts(MIXED_OF_3, 5, loader)

    def callbacks() -> list:
        return [gate("greso"), dapo(3)]

    whole, logged, _ = fit(callbacks(), data(), max_steps=8, max_epochs=-1)
    saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    fit([*callbacks(), saver], data(), max_steps=stop, max_epochs=-1, enable_checkpointing=True)
    (path,) = tmp_path.glob(f"step={stop}.ckpt")
    state = torch.load(path, weights_only=True)["callbacks"]
    (flow,) = [each["flow"] for name, each in state.items() if name.startswith("DataFlex") and "flow" in each]
    if stop < 3:
        assert flow["source"]["queue"]["waiting"] or flow["refill"]["stock"]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*is not resumable.*")
        module, rest, _ = fit(callbacks(), data(), ckpt_path=path, max_steps=8, max_epochs=-1)
    assert [batch["uid"] for batch in module.given] == [batch["uid"] for batch in whole.given[stop:]]
    assert module.rolled_out == whole.rolled_out[stop:]
    assert rest == logged[stop:]
    assert torch.equal(module.weight, whole.weight)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_domains_are_mixed_by_all_rollouts_and_a_stopped_run_goes_on(num_workers: int, tmp_path: Path) -> None:
    kinds = [["mixed", "hard", "mixed"][i % 3] for i in range(36)]

    def callbacks() -> list:
        mixer = {"name": "dump_ucb", "params": {"temperature": 0.5}}
        return [DataFlexCallback("mix", actuator=mixer), gate("greso", label="greso"), dapo(3, label="dapo")]

    length = {"max_steps": 14, "max_epochs": -1}
    whole, logged, trainer = fit(callbacks(), Mixed(kinds, 4, num_workers), **length)
    assert trainer.current_epoch > 1
    for row, out in zip(logged, whole.rolled_out):
        assert row["dapo/prompts"] == len(out)
    # All that was rolled out is counted, groups that were dropped included.
    counts = trainer.callbacks[0].pipeline.stats.count
    assert counts.sum() == GENERATIONS * sum(map(len, whole.rolled_out))
    saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    fit([*callbacks(), saver], Mixed(kinds, 4, num_workers), enable_checkpointing=True, **length)
    for stop in range(1, 14):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*is not resumable.*")
            path = tmp_path / f"step={stop}.ckpt"
            module, rest, _ = fit(callbacks(), Mixed(kinds, 4, num_workers), ckpt_path=path, **length)
        assert module.rolled_out == whole.rolled_out[stop:], stop
        same = [{k: v for k, v in row.items() if not k.endswith("lag")} for row in (*rest, *logged[stop:])]
        assert same[: len(rest)] == same[len(rest) :], stop
        assert torch.equal(module.weight, whole.weight)


def seen(case: str, world: int, folder: Path) -> list[dict]:
    run([*SCRIPT, case, str(world), str(folder)])
    return [torch.load(folder / f"{rank}.pt") for rank in range(world)]


@pytest.mark.parametrize("case", ["luck", "rows"])
def test_two_ranks_of_uneven_luck_get_full_batches_of_the_same_shape(case: str, tmp_path: Path) -> None:
    ranks = seen(case, 2, tmp_path)
    for rank, other in zip(ranks, ranks[::-1]):
        assert rank["steps"] == len(rank["given"]) == 4
        assert [len(batch["uid"]) for batch in rank["given"]] == [4 * GENERATIONS] * 4
        assert [len(batch["names"]) for batch in rank["given"]] == [4] * 4
        assert [row["rounds"] for row in rank["logged"]] == [row["rounds"] for row in other["logged"]]
    names_of = [[set(batch["names"]) for batch in rank["given"]] for rank in ranks]
    # One rank had no luck of its own, and trains on what the other had too much of.
    drawn = [{name for step in rank["rolled_out"] for name, _ in step} for rank in ranks]
    assert any(names_of[1][step] & drawn[0] for step in range(4)) or any(
        names_of[0][step] & drawn[1] for step in range(4)
    )
    used = [name for part in names_of for batch in part for name in batch]
    assert len(used) == len(set(used)) == 32
    assert all(LUCK[int(name[1:])] == "mixed" for name in used)
    assert torch.equal(ranks[0]["weight"], ranks[1]["weight"])
    assert as_lists(ranks[0]["state"]) == as_lists(ranks[1]["state"])


@pytest.mark.parametrize("case", ["nothing", "greso", "speed"])
def test_two_ranks_agree_and_come_to_an_end(case: str, tmp_path: Path) -> None:
    one, two = seen(case, 2, tmp_path)
    assert one["steps"] == two["steps"] > 0
    assert torch.equal(one["weight"], two["weight"])
    # What is logged is of all ranks: rounds, prompts, groups, rewards.
    assert one["logged"] == two["logged"]
    assert as_lists(one["state"]) == as_lists(two["state"])


REFUSED = {
    "mechanism": ({"mechanism": "reweight", "actuator": "softmax"}, "mechanism is 'reweight', but refill replaces"),
    "on_empty": ({"on_empty": "keep"}, "on_empty is 'keep', but refill goes on"),
    "enforce": ({"enforce": False}, "enforce is False, but refill cannot"),
    "mount": ({"mount": "on_train_batch_start"}, "mount is 'on_train_batch_start', but refill acts where"),
    "no groups": ({"refill": {"max_rounds": 3}}, "refill lacks 'groups'"),
    "misspelt": ({"refill": {"groups": 3, "max_round": 3}}, "refill has no key 'max_round'. Did you mean 'max_rounds'"),
    "zero": ({"refill": {"groups": 0}}, "refill.groups is 0. It must be a whole number of at least 1"),
    "type": ({"refill": 3}, "refill is 3. Give a mapping"),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=list(REFUSED))
def test_what_cannot_combine_is_refused_before_anything_runs(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataFlexCallback(**{"mechanism": "select", "scorer": "group_solve_rate", "actuator": "threshold_band",
                            "refill": {"groups": 2}} | change)  # fmt: skip


def test_what_does_not_fit_the_module_or_the_others_is_refused_before_the_first_step() -> None:
    class Pointless(Rolling):
        def __init__(self) -> None:
            super().__init__()
            del self.dataflex
            self.policy_loss = lambda batch: batch

    data = Prompts(MIXED_OF_3, 4)
    with pytest.raises(ValueError, match="refill is set, and Pointless has no DataFlexPoint"):
        fit([dapo(2)], data, Pointless())
    with pytest.raises(ValueError, match=r"Rolling has no method 'generate'.*refill: \{rollout: ...\}"):
        fit([dapo(2, refill={"groups": 2, "rollout": "generate"})], data)
    with pytest.raises(ValueError, match="a and b each collect rollouts into a full batch, and only one can"):
        fit([dapo(2, label="a"), dapo(2, label="b")], data)
    speed = gate({"name": "speed", "params": {"num_screening": 4}}, refill={"groups": 2})
    with pytest.raises(ValueError, match="num_generations of Rolling is 4, and 4 responses are to screen"):
        fit([speed], data)


def test_a_run_whose_length_nobody_knows_is_told_so() -> None:
    """Rolling has a schedule that counts steps."""
    with pytest.warns(UserWarning, match="schedule that counts steps may not come to its end. Give the Trainer max_st"):
        fit([dapo(4)], Prompts(MIXED_OF_3, 4), max_epochs=1)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*schedule that counts steps")
        fit([dapo(4)], Prompts(MIXED_OF_3, 4), max_steps=2)
    mixer = DataFlexCallback("mix", actuator="e2h", domains=["a", "b", "c"])
    with pytest.raises(
        ValueError, match=r"e2h follows the progress of the run, but with refill.*Give the Trainer max_"
    ):
        fit([mixer, dapo(4)], Mixed(["mixed"] * 12, 4), max_epochs=1)
    fit([mixer, dapo(4)], Mixed(["mixed"] * 12, 4), max_steps=3, max_epochs=-1)
