"""Before the rollout: prompts pass gates in a real Trainer, and are remembered over epochs, ranks and stops."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_dataflex import DataFlexCallback, Scorer
from lightning_dataflex.functional.advantages import rloo_advantages
from tests.flowing import GENERATIONS, LUCK, Prompts, Rolling, as_lists, dapo, fit, gate, names
from tests.launch import run

KINDS = ["mixed", "easy", "hard", "mixed"] * 4


def visits(module: Rolling) -> dict[str, int]:
    """How often each kind of prompt was rolled out."""
    kind = {f"p{i}": kind for i, kind in enumerate(KINDS)}
    rolled_out = [kind[name] for step in module.rolled_out for name, _ in step]
    return {name: rolled_out.count(name) for name in ("mixed", "easy", "hard")}


def test_greso_rolls_prompts_without_signal_out_less_and_less() -> None:
    # Held p's: 8 epochs, and a prompt without signal is rolled out with probability 0.3^z after z visits.
    held = {"p_easy": 0.3, "p_hard": 0.3, "target_easy": 0.25, "target_hard": 0.25, "explore": 1e-9}
    module, logged, _ = fit([gate({"name": "greso", "params": held})], Prompts(KINDS, 4), max_epochs=8)
    counted = visits(module)
    assert counted["mixed"] == 8 * 8
    # Of 4 prompts of either kind each is seen once, and then 0.43 times more on average (sum of 0.3^z without a revisit
    # that fails is at most 0.3 / 0.7 over ever so many epochs).
    assert 4 <= counted["easy"] <= 12
    assert 4 <= counted["hard"] <= 12
    assert sum(row["skipped"] for row in logged) == 8 * 16 - sum(counted.values())
    assert sum(row["passed"] for row in logged) == sum(counted.values())
    # Each step rolls out as many as the loader's batch has, until the epoch ends.
    assert max(len(step) for step in module.rolled_out) == 4
    assert len(module.rolled_out) < 8 * 4


def test_greso_with_refill_needs_fewer_rollouts_than_refill_alone() -> None:
    settings, many = {"max_steps": 40, "max_epochs": -1}, Prompts(KINDS * 4, 4)
    alone, _, _ = fit([dapo(4)], many, **settings)
    both, logged, _ = fit([gate("greso", label="greso"), dapo(4, label="dapo")], many, **settings)
    kept = [sum(len(names(batch)) for batch in module.given) for module in (both, alone)]
    cost = [sum(map(len, module.rolled_out)) for module in (both, alone)]
    # All are of signal, and more of what is rolled out is kept.
    assert {kind for batch in both.given for kind in batch["kind"] if len(names(batch)) == 4} == {"mixed"}
    assert kept[0] / cost[0] > 1.2 * kept[1] / cost[1]
    for batch in both.given:
        assert len(batch["uid"]) == 4 * GENERATIONS
    assert {"greso/skipped", "greso/p_easy", "dapo/rounds", "dapo/carried"} <= set(logged[0])


def test_mopps_rolls_out_what_is_nearest_to_half_of_a_larger_pool() -> None:
    scorer = {"name": "mopps", "params": {"pool": 2.0}}
    module, logged, _ = fit([gate(scorer)], Prompts(KINDS, 4), max_epochs=20)
    assert [len(step) for step in module.rolled_out] == [4] * 40
    assert [row["skipped"] for row in logged] == [4] * 40
    late = [name for step in module.rolled_out[20:] for name, _ in step]
    share = np.mean([KINDS[int(name[1:])] == "mixed" for name in late])
    # Every pool of 8 has 4 of them, and by now their posteriors are sharp.
    assert share > 0.9


def test_a_band_on_known_pass_rates_takes_prompts_from_inside_alone() -> None:
    data = Prompts(KINDS, 4)
    for row in data.rows:
        row["pass_rate"] = {"mixed": 0.5, "easy": 1.0, "hard": 0.0}[row["kind"]]
    scorer = {"name": "pass_rate_band", "params": {"known": "pass_rate", "learned": False}}
    module, _, trainer = fit([gate(scorer)], data, max_epochs=2)
    assert visits(module) == {"mixed": 16, "easy": 0, "hard": 0}
    assert trainer.global_step == 4
    with pytest.raises(ValueError, match=r"A prompt .* has no 'level'\. It has: prompt_id, kind, length, domain"):
        fit([gate({"name": "pass_rate_band", "params": {"known": "level"}})], Prompts(KINDS, 4))


def test_several_gates_let_a_prompt_pass_if_all_of_them_do() -> None:
    data = Prompts(KINDS, 4)
    for i, row in enumerate(data.rows):
        row["pass_rate"] = 0.5 if i < 8 else 1.0
    known = gate({"name": "pass_rate_band", "params": {"known": "pass_rate", "learned": False}}, label="known")
    module, _, _ = fit([known, gate("greso", label="greso")], data, max_epochs=6)
    rolled_out = [int(name[1:]) for step in module.rolled_out for name, _ in step]
    assert max(rolled_out) < 8
    assert rolled_out.count(0) == 6
    assert rolled_out.count(1) < 6


class Long(Scorer):
    """A rule of one's own on a column of the prompts."""

    timing = "pre_rollout"
    requires = ("prompt_id", "length")
    granularity = "prompt"

    def score(self, batch: Any, step_id: int = 0, **ctx: Any) -> torch.Tensor:
        return batch.tensor("length").float()


def test_a_scorer_of_ones_own_on_a_column_of_the_prompts() -> None:
    band = {"name": "threshold_band", "params": {"low": 1.5, "high": 9.0}}
    module, _, _ = fit([DataFlexCallback("select", scorer=Long(), actuator=band)], Prompts(KINDS, 4))
    assert {int(name[1:]) % 3 for step in module.rolled_out for name, _ in step} == {1, 2}
    with pytest.raises(ValueError, match="lacks 'actuator'"):
        DataFlexCallback("select", scorer=Long())


def test_prompts_may_come_as_columns() -> None:
    class Columns(Rolling):
        def rollout(self, rows: Any, num_generations: int | None = None) -> dict[str, Any]:
            assert isinstance(rows["length"], torch.Tensor)
            keys = ("prompt_id", "kind", "length", "domain")
            return super().rollout([dict(zip(keys, row)) for row in zip(*(rows[key] for key in keys))], num_generations)

    data = Prompts(KINDS, 4, lambda rows, size, sampler, collate_fn: DataLoader(rows, size, sampler=sampler))
    module, _, _ = fit([gate("greso", label="g"), dapo(4)], data, Columns(), max_steps=4, max_epochs=-1)
    # The prompts from p4 to p7 were drawn for the step after it.
    assert names(module.given[0]) == ["p0", "p3", "p8", "p11"]


@pytest.mark.parametrize("scorer", ["greso", "mopps", "pass_rate_band"])
def test_a_stopped_run_remembers_its_prompts(scorer: str, tmp_path: Path) -> None:
    whole, logged, _ = fit([gate(scorer)], Prompts(KINDS, 4), max_epochs=4)
    saver = ModelCheckpoint(tmp_path, "{epoch}", every_n_epochs=1, save_top_k=-1)
    first, _, _ = fit([gate(scorer), saver], Prompts(KINDS, 4), max_epochs=2, enable_checkpointing=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*is not resumable.*")
        module, rest, _ = fit([gate(scorer)], Prompts(KINDS, 4), ckpt_path=tmp_path / "epoch=1.ckpt", max_epochs=4)
    done = len(first.rolled_out)
    assert module.rolled_out == whole.rolled_out[done:]
    assert rest == logged[done:]


def test_it_waits_for_the_warm_up_and_only_counts_if_not_enforced() -> None:
    everything = [[f"p{i}" for i in range(4 * step, 4 * step + 4)] for step in range(4)]
    for changes in ({"warmup_step": 8}, {"enforce": False}):
        module, logged, _ = fit([gate("greso", **changes)], Prompts(KINDS, 4), max_epochs=2)
        assert [[name for name, _ in step] for step in module.rolled_out] == everything * 2
        assert (sum(row["skipped"] for row in logged) > 0) == ("enforce" in changes)


def test_where_no_prompt_passes_the_first_are_rolled_out_all_the_same() -> None:
    known = {"name": "pass_rate_band", "params": {"known": "length", "learned": False, "low": 0.1, "high": 0.2}}
    data = Prompts(KINDS, 4)
    for row in data.rows:
        row["length"] = 1
    with pytest.warns(UserWarning, match="Of 16 prompts 0 passed pass_rate_band, and each of 1 ranks needs one"):
        module, _, trainer = fit([gate(known)], data)
    assert [len(step) for step in module.rolled_out] == [1]
    assert trainer.global_step == 1


def test_dots_draws_the_prompts_of_a_step_by_its_seed() -> None:
    def rolled_out(seed: int) -> list[list[tuple[str, int]]]:
        dots = {"name": "dots", "params": {"temperature": 0.1, "seed": seed}}
        module, _, _ = fit(
            [gate("mopps", actuator=dots)], Prompts(["mixed", "easy", "hard", "mixed"] * 8, 4), max_epochs=2
        )
        return module.rolled_out

    first = rolled_out(0)
    assert [len(set(step)) for step in first] == [4] * len(first)
    assert rolled_out(0) == first != rolled_out(1)


def test_speed_generates_the_rest_for_promising_prompts_alone() -> None:
    speed = gate({"name": "speed", "params": {"num_screening": 2}}, refill={"groups": 3})
    kinds = ["mixed", "easy", "hard"] * 12
    module, logged, _ = fit([speed], Prompts(kinds, 6), Rolling("rloo"), max_steps=3, max_epochs=-1)
    calls = [call for step in module.rolled_out for call in step]
    assert all(num == 2 for _, num in calls)
    for name, _ in set(calls):
        assert calls.count((name, 2)) == (2 if kinds[int(name[1:])] == "mixed" else 1)
    for batch in module.given:
        assert set(batch["kind"]) == {"mixed"}
        assert len(batch["uid"]) == 3 * GENERATIONS
        group = torch.tensor([int(name[1:]) for name in batch["uid"]])
        torch.testing.assert_close(batch["advantages"], rloo_advantages(batch["rm_scores"], group))
        # The first two and the other two responses of a group, side by side.
        assert batch["rm_scores"].tolist() == [1.0, 0.0] * 6
    screened = {name for name, _ in module.rolled_out[0]}
    assert logged[0]["prompts"] == len(screened)
    assert logged[0]["kept"] == sum(kinds[int(name[1:])] == "mixed" for name in screened)


def test_speed_pads_a_step_that_finds_too_few_promising_prompts() -> None:
    refill = {"groups": 3, "max_rounds": 2}
    speed = gate({"name": "speed", "params": {"num_screening": 2}}, refill=refill)
    with pytest.warns(UserWarning, match="kept 1 of 3 groups after 2 rounds"):
        module, _, _ = fit([speed], Prompts(["easy", "mixed", *["hard"] * 10], 3), max_steps=1)
    (batch,) = module.given
    assert len(batch["uid"]) == 3 * GENERATIONS
    assert names(batch) == ["p1"]


def test_speed_goes_on_after_a_round_without_a_promising_prompt() -> None:
    speed = gate({"name": "speed", "params": {"num_screening": 2}}, refill={"groups": 2})
    module, _, _ = fit([speed], Prompts(["hard"] * 4 + ["easy"] * 2 + ["mixed", *["hard"] * 9], 2), max_steps=1)
    (batch,) = module.given
    assert len(batch["uid"]) == 2 * GENERATIONS
    assert names(batch) == ["p6"]
    assert batch["rollout_is_weights"].sum() == batch["response_mask"].sum() > 0


class Heedless(Rolling):
    def rollout(self, rows: Any, num_generations: int | None = None) -> dict[str, Any]:
        return super().rollout(rows)


class Elsewhere(Rolling):
    def generated(self, rows: Any) -> dict[str, Any]:
        return Rolling.rollout(self, rows)

    def training_step(self, rows: Any, batch_idx: int) -> Any:
        return self.dataflex(self.generated(rows))


@pytest.mark.parametrize("module", [Heedless, Elsewhere])
def test_speed_notices_a_rollout_of_other_sizes_than_it_asked_for(module: Any) -> None:
    speed = gate({"name": "speed", "params": {"num_screening": 2}}, refill={"groups": 2})
    with pytest.raises(ValueError, match=r"rollout of 2 prompts has 8 samples, and 2 of each were asked for"):
        fit([speed], Prompts(["mixed"] * 8, 4), module(), max_steps=1)


def test_speed_joins_the_parts_of_a_group_by_prompt() -> None:
    class Numbered(Rolling):
        def rollout(self, rows: Any, num_generations: int | None = None) -> dict[str, Any]:
            batch = super().rollout(rows, num_generations)
            num = num_generations or self.num_generations
            return batch | {"prompt_id": batch["uid"], "uid": torch.arange(len(rows)).repeat_interleave(num)}

    speed = gate({"name": "speed", "params": {"num_screening": 2}}, refill={"groups": 3})
    module, _, _ = fit([speed], Prompts(["hard", "mixed", "mixed"] * 8, 6), Numbered(), max_steps=2, max_epochs=-1)
    for batch in module.given:
        pairs = list(zip(batch["uid"].tolist(), batch["prompt_id"]))
        assert len(set(pairs)) == len({uid for uid, _ in pairs}) == 3
        assert [pairs.count(pair) for pair in set(pairs)] == [GENERATIONS] * 3


def test_speed_of_a_prompt_that_comes_twice() -> None:
    data = Prompts(["mixed"] * 8, 4)
    data.rows = [data.rows[i] for i in (0, 0, 1, 2, 3, 4, 5, 6)]
    speed = gate({"name": "speed", "params": {"num_screening": 2}}, refill={"groups": 3})
    module, _, _ = fit([speed], data, max_steps=1)
    (batch,) = module.given
    assert len(batch["uid"]) == 3 * GENERATIONS
    assert [batch["uid"].count(name) for name in dict.fromkeys(batch["uid"])] == [GENERATIONS] * 3


def test_the_warm_up_ends_with_the_step_that_it_names() -> None:
    data = Prompts(["easy", "mixed", "mixed", "mixed"] * 8, 4)
    for row in data.rows:
        row["rate"] = 0.5 if row["kind"] == "mixed" else 1.0
    known = {"name": "pass_rate_band", "params": {"known": "rate", "learned": False}}
    module, _, _ = fit([gate(known, warmup_step=3)], data)
    easy = [any(int(name[1:]) % 4 == 0 for name, _ in step) for step in module.rolled_out]
    assert easy[:3] == [True] * 3
    assert not any(easy[3:])


@pytest.mark.parametrize("case", ["greso"])
def test_two_ranks_roll_out_what_one_does(case: str, tmp_path: Path) -> None:
    """The same stream of prompts, dealt out to two: the same ones pass, and are kept."""
    results = []
    for world in (1, 2):
        folder = tmp_path / str(world)
        folder.mkdir()
        run([sys.executable, "tests/flowing.py", case, str(world), str(folder)])
        results.append([torch.load(folder / f"{rank}.pt") for rank in range(world)])
    (one,), two = results
    # `groups` is per rank: two ranks take twice as many in a step, out of the same stream.
    first = [name for step in one["rolled_out"][:1] for name, _ in step]
    both = [name for rank in two for step in rank["rolled_out"][:1] for name, _ in step]
    assert set(first) <= set(both)
    assert len(both) == len(set(both))
    assert as_lists(two[0]["state"]) == as_lists(two[1]["state"])


REFUSED = {
    "reweight": (
        {"mechanism": "reweight", "actuator": "softmax"},
        "greso scores prompts before their roll.*Use mechanism: select",
    ),
    "drop": ({"drop": "rows"}, "drop is 'rows', but greso decides before there are samples.*block of a selector"),
    "refill": ({"refill": {"groups": 3}}, "refill is .*, but greso decides before there are samples"),
    "mount": (
        {"mount": "policy_loss"},
        "mount is 'policy_loss', but greso learns from what passes through a DataFlexPoint",
    ),
    "rewards": ({"actuator": "max_variance"}, "greso scores prompts before.*, but max_variance reads rm_scores, uid"),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=list(REFUSED))
def test_what_cannot_combine_with_a_rule_on_prompts_is_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataFlexCallback(**{"mechanism": "select", "scorer": "greso"} | change)


def test_speed_must_know_how_many_groups_to_train_on() -> None:
    with pytest.raises(ValueError, match=r"speed generates the rest.*refill: \{groups: ...\}"):
        DataFlexCallback("select", scorer="speed")
    speed = gate({"name": "speed", "params": {"num_screening": 2}}, refill={"groups": 2})
    with pytest.raises(ValueError, match=r"adv_estimator is 'gpg'\. Advantages of a group that is put together"):
        fit([speed], Prompts(LUCK, 4), Rolling("gpg"))
