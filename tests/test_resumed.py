"""A checkpoint of another configuration: what it remembers is found by name, and nothing is dropped without a word."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_dataflex import RLEP, DataFlexCallback, DomainMixtureSampler, Pipeline, Scorer, Selector, build
from lightning_dataflex.core.memory import described, recall
from tests import mixing
from tests.flowing import Prompts, as_lists, dapo, fit, gate
from tests.laws import a_batch
from tests.mixing import Rows, mix
from tests.toy import Toy, rollout
from tests.toy import fit as toy_fit


def average(scorer: Any, decay: float = 0.5) -> dict[str, Any]:
    return {"name": "ema", "params": {"scorer": scorer, "decay": decay}}


def adaptive(metric: str) -> dict[str, Any]:
    params = {"k": 2, "metric": metric, "k_by_difficulty": [4, 3, 2, 1], "advantages": "group"}
    return {"name": "gfpo", "params": params}


PARTS = [average("sequence_entropy"), average("group_std"), "response_length"]


@pytest.mark.parametrize("order", [[0, 1, 2], [1, 0, 2], [2, 1, 0]])
def test_the_parts_of_a_scorer_find_their_memories_in_any_order(order: list[int]) -> None:
    weights = [1.0, 0.1, 0.01]
    first = build("scorer", "weighted_sum", scorers=PARTS, weights=weights)
    first.score(a_batch(0), 0)
    second = build("scorer", "weighted_sum", scorers=[PARTS[i] for i in order], weights=[weights[i] for i in order])
    second.load_state_dict(first.state_dict(), strict=True)
    torch.testing.assert_close(second.score(a_batch(1), 1), first.score(a_batch(1), 1))


def pipeline(*selectors: Any) -> Pipeline:
    return Pipeline(build("scorer", "outcome"), build("selector", "all_of", selectors=list(selectors)))


def test_the_conditions_of_a_selector_find_their_memories_in_any_order() -> None:
    own = [
        {"scorer": average("group_std"), "selector": {"name": "topk_fraction", "params": {"fraction": f}}}
        for f in (0.9, 0.8)
    ]
    own[1]["scorer"] = average("sequence_entropy")
    first, second = pipeline(adaptive("short"), *own), pipeline(own[1], own[0], adaptive("short"))
    for step in range(3):
        first.decide(a_batch(step), step)
    second.load_state_dict(first.state_dict())
    for step in range(3, 6):
        assert torch.equal(second.decide(a_batch(step), step).keep, first.decide(a_batch(step), step).keep)


def test_a_part_that_is_gone_and_one_that_is_new_are_named() -> None:
    first = Pipeline(build("scorer", "weighted_sum", scorers=PARTS), build("reweighter", "softmax"))
    others = [average("outcome"), average("group_std")]
    second = Pipeline(build("scorer", "weighted_sum", scorers=others), build("reweighter", "softmax"))
    first.decide(a_batch(0))
    message = "remembers of ema(sequence_entropy()) is dropped; ema(outcome()) start without a memory"
    with pytest.warns(UserWarning, match=re.escape(message)):
        second.load_state_dict(first.state_dict())
    saved, loaded = first.state_dict(), second.state_dict()
    key = "parts.ema(group_std())._extra_state"
    assert as_lists(loaded["scorer"]["state"][key]) == as_lists(saved["scorer"]["state"][key])


def test_the_memory_of_another_component_is_not_read() -> None:
    first = Pipeline(build("scorer", "ema", scorer="outcome"), build("selector", "topk_fraction", fraction=0.5))
    second = Pipeline(build("scorer", "group_std"), build("selector", "topk_fraction", fraction=0.5))
    first.decide(a_batch(0))
    with pytest.warns(UserWarning, match="has the memory of ema. group_std starts without one"):
        second.load_state_dict(first.state_dict())


def test_parts_of_one_name_find_their_memories_by_their_settings() -> None:
    parts = [average("outcome", 0.1), average("outcome", 0.9)]
    first, second = (build("scorer", "weighted_sum", scorers=each) for each in (parts, parts[::-1]))
    for step in range(2):
        first.score(a_batch(step), step)
    second.load_state_dict(first.state_dict(), strict=True)
    torch.testing.assert_close(second.score(a_batch(2), 2), first.score(a_batch(2), 2))


def test_an_average_of_another_score_is_not_read() -> None:
    first, second = (
        Pipeline(build("scorer", "ema", scorer=name), build("selector", "topk_fraction", fraction=0.5))
        for name in ("outcome", "response_length")
    )
    first.decide(a_batch(0))
    with pytest.warns(UserWarning, match=re.escape("has the memory of ema(outcome()). ema(response_length()) starts")):
        second.load_state_dict(first.state_dict())
    assert not second.state_dict()["scorer"]["state"]["_extra_state"]["memory"]["ids"].numel()


class Counts(Selector):
    """A rule of one's own that remembers something."""

    def __init__(self, seen: Any) -> None:
        self.seen = seen

    def act(self, scores: torch.Tensor, batch: Any, **ctx: Any) -> torch.Tensor:
        return scores > 0

    def state_dict(self) -> Any:
        return self.seen

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state


def test_what_a_rule_remembers_in_arrays_can_be_read_with_weights_only(tmp_path: Path) -> None:
    seen = {"count": np.int64(3), "table": np.array([1.0, 2.0])}
    torch.save(Pipeline(build("scorer", "outcome"), Counts(seen)).state_dict(), tmp_path / "state.pt")
    rule = Counts(None)
    recall(rule, torch.load(tmp_path / "state.pt", weights_only=True)["actuator"])
    assert rule.seen["count"] == 3
    assert isinstance(rule.seen["table"], np.ndarray)
    assert rule.seen["table"].tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("seen", "message"),
    [
        (None, "state_dict of Counts returned None. Return a dict"),
        ({"a": object()}, "What Counts remembers.a holds a object, which a checkpoint cannot hold. Use tensors"),
    ],
)
def test_what_a_checkpoint_cannot_hold_is_refused(seen: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Pipeline(build("scorer", "outcome"), Counts(seen)).state_dict()


# -- of a Trainer ------------------------------------------------------------------------------------------------------


def said(caught: list[warnings.WarningMessage]) -> str:
    return "\n".join(str(each.message) for each in caught)


def resumed(callbacks: list[Any], path: Path) -> str:
    """What a run that goes on warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        toy_fit(Toy(), callbacks, [rollout(0), rollout(1)], max_epochs=2, ckpt_path=path)
    return said(caught)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of a run with one selector, after an epoch."""
    toy_fit(Toy(), [DataFlexCallback("select", "outcome", "topk_fraction")], [rollout(0), rollout(1)]).save_checkpoint(
        tmp_path / "saved.ckpt"
    )
    return tmp_path / "saved.ckpt"


def test_nothing_is_said_where_nothing_has_changed(saved: Path) -> None:
    assert "checkpoint" not in resumed([DataFlexCallback("select", "outcome", "topk_fraction")], saved)


def test_other_settings_are_named(saved: Path) -> None:
    rule = {"name": "topk_fraction", "params": {"fraction": 0.25}}
    text = resumed([DataFlexCallback("select", "outcome", rule, drop="weight")], saved)
    assert "drop: mask, now weight; actuator: topk_fraction(fraction=0.5, largest=True), now topk_" in text


def test_other_settings_of_a_part_are_named(tmp_path: Path) -> None:
    first, second = (
        {"name": "weighted_sum", "params": {"scorers": [average("outcome", decay), "group_std"]}}
        for decay in (0.5, 0.9)
    )
    callback = DataFlexCallback("select", first, "topk_fraction")
    toy_fit(Toy(), [callback], [rollout(0)]).save_checkpoint(tmp_path / "parts.ckpt")
    text = resumed([DataFlexCallback("select", second, "topk_fraction")], tmp_path / "parts.ckpt")
    assert "ema(outcome(success_threshold=None), decay=0.5" in text
    assert "ema(outcome(success_threshold=None), decay=0.9" in text


def without(key: str, *path: str) -> Any:
    def changed(state: dict[str, Any]) -> None:
        for name in path:
            state = state[name]
        del state[key]

    return changed


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (without("made_of"), "KeyError: 'made_of'"),
        (without("scorer", "pipeline"), "KeyError: 'scorer'"),
        (lambda state: state.update(num_steps=None), "ValueError: num_steps is None"),
    ],
)
def test_a_state_that_cannot_be_read_names_itself_and_a_cure(change: Any, what: str, saved: Path) -> None:
    checkpoint = torch.load(saved, weights_only=True)
    ((key, state),) = ((k, v) for k, v in checkpoint["callbacks"].items() if k.startswith("DataFlexCallback"))
    change(state)
    torch.save(checkpoint, saved)
    callback = DataFlexCallback("select", "outcome", "topk_fraction")
    with pytest.raises(ValueError, match=re.escape(f"state of {key} cannot be read ({what}")) as error:
        resumed([callback], saved)
    assert f"del checkpoint['callbacks'][{key!r}]" in str(error.value)


def test_a_callback_that_the_checkpoint_does_not_know_says_that_it_starts_anew(saved: Path) -> None:
    text = resumed([DataFlexCallback("select", "group_std", "topk_fraction")], saved)
    assert "no state of DataFlexCallback[select.group_std.topk_fraction], which starts as in a new run" in text
    assert "DataFlexCallback[select.outcome.topk_fraction]" in text


MIXED = ["easy", "hard", "mixed", "easy"] * 3 + ["mixed"] * 40
LENGTH = {"max_steps": 8, "max_epochs": -1}


@pytest.fixture
def waiting(tmp_path: Path) -> Path:
    """A checkpoint in the midst of a refill, with prompts that wait and groups in stock."""
    saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    data = Prompts(MIXED, 5, StatefulDataLoader)
    fit([gate("greso"), dapo(3), saver], data, enable_checkpointing=True, **LENGTH | {"max_steps": 3})
    state = torch.load(tmp_path / "step=3.ckpt", weights_only=True)["callbacks"]
    (flow,) = [each["flow"] for each in state.values() if "flow" in each]
    assert flow["source"]["queue"]["waiting"]
    assert flow["refill"]["stock"]
    return tmp_path / "step=3.ckpt"


def test_callbacks_may_come_in_another_order(waiting: Path) -> None:
    data = [Prompts(MIXED, 5, StatefulDataLoader) for _ in range(2)]
    whole, _, _ = fit([gate("greso"), dapo(3)], data[0], **LENGTH)
    module, _, _ = fit([dapo(3), gate("greso")], data[1], ckpt_path=waiting, **LENGTH)
    assert module.rolled_out == whole.rolled_out[3:]
    assert torch.equal(module.weight, whole.weight)


@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        (lambda: [gate("greso")], "has groups in stock for a refill, and here is none: they are dropped"),
        (lambda: [DataFlexCallback("select", "outcome", "topk_fraction")], "here is neither: they are dropped"),
    ],
)
def test_what_waits_for_a_rule_that_is_gone_is_dropped_with_a_word(callbacks: Any, message: str, waiting: Path) -> None:
    with pytest.warns(UserWarning, match=message):
        fit(callbacks(), Prompts(MIXED, 5, StatefulDataLoader), ckpt_path=waiting, **LENGTH)


def test_another_pool_than_the_one_that_goes_on_is_named(tmp_path: Path) -> None:
    def replaying(**options: Any) -> RLEP:
        return RLEP(collect=str(tmp_path / "pool.pt"), **options)

    data = Prompts(MIXED, 5, StatefulDataLoader)
    _, _, trainer = fit([replaying()], data, **LENGTH | {"max_steps": 2})
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    with pytest.warns(UserWarning, match="RLEP goes on.*the pool is the one in it: pool: None, now .*pool.pt"):
        fit([replaying(pool=tmp_path / "pool.pt")], data, ckpt_path=tmp_path / "saved.ckpt", **LENGTH)


def test_groups_in_stock_of_other_fields_are_dropped_with_a_word(waiting: Path) -> None:
    with pytest.warns(UserWarning, match="have the fields of drop: mask.*has drop: weight.*they are dropped"):
        fit([gate("greso"), dapo(3, drop="weight")], Prompts(MIXED, 5, StatefulDataLoader), ckpt_path=waiting, **LENGTH)


def test_a_refill_that_the_checkpoint_does_not_know_says_so(tmp_path: Path) -> None:
    plain = DataFlexCallback("select", "outcome", "topk_fraction", label="same")
    _, _, trainer = fit([plain], Prompts(MIXED, 5, StatefulDataLoader), **LENGTH | {"max_steps": 2})
    trainer.save_checkpoint(tmp_path / "plain.ckpt")
    with pytest.warns(UserWarning, match="was written without refill and rules on prompts: same begins the epoch"):
        fit([dapo(3, label="same")], Prompts(MIXED, 5, StatefulDataLoader), ckpt_path=tmp_path / "plain.ckpt", **LENGTH)


# -- of another mechanism ----------------------------------------------------------------------------------------------


def saved_at(callbacks: list[Any], step: int, folder: Path) -> Path:
    """A checkpoint in the midst of an epoch of 15 steps."""
    saver = ModelCheckpoint(folder, "{step}", every_n_train_steps=step, save_top_k=-1)
    mixing.fit([*callbacks, saver], Rows(), max_steps=step)
    return folder / f"step={step}.ckpt"


def test_scores_of_another_scorer_are_no_statistics_of_a_domain(tmp_path: Path) -> None:
    path, callback = saved_at([mix(label="same")], 5, tmp_path), mix("reward_gap", label="same")
    with pytest.warns(UserWarning, match=re.escape("the domains' scores of advantage_magnitude(). The statistics of")):
        mixing.fit([callback], Rows(), ckpt_path=path, max_steps=6)
    rows = [row for name in mixing.DOMAINS for row in callback.pipeline.stats.history[name]]
    assert {step for step, *_ in rows} == {5}


@pytest.mark.parametrize("order", [1, -1])
def test_a_mixer_and_a_selector_under_one_label_start_without_a_memory(order: int, tmp_path: Path) -> None:
    callbacks = [DataFlexCallback("select", "outcome", "topk_fraction", label="same"), mix(label="same")][::order]
    path = saved_at(callbacks[:1], 5, tmp_path)
    with pytest.warns(UserWarning, match="What same remembers is of another mechanism: it starts without a memory"):
        module, _ = mixing.fit(callbacks[1:], Rows(), ckpt_path=path, max_epochs=2)
    assert len(module.seen) == 25


def test_a_mixer_that_the_checkpoint_does_not_know_begins_in_the_midst_of_an_epoch(tmp_path: Path) -> None:
    path = saved_at([DataFlexCallback("select", "outcome", "topk_fraction")], 5, tmp_path)
    saver = ModelCheckpoint(tmp_path / "again", "{step}", every_n_train_steps=1, save_top_k=-1)
    with pytest.warns(UserWarning, match=r"no state of DataFlexCallback\[mix"):
        whole, record = mixing.fit([mix(), saver], Rows(2), ckpt_path=path, max_epochs=2)
    assert (len(whole.seen), len(record.logged)) == (25, 25)
    for step in (8, 15, 17):
        module, _ = mixing.fit([mix()], Rows(2), ckpt_path=tmp_path / "again" / f"step={step}.ckpt", max_epochs=2)
        assert module.seen == whole.seen[step - 5 :]
        assert torch.equal(module.weight, whole.weight)


# -- of other ranks ----------------------------------------------------------------------------------------------------


def test_a_mixture_with_other_batches_goes_on_with_its_statistics_where_it_was(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    whole, _ = mixing.fit([mix(), saver], Rows(), max_steps=7)
    state = torch.load(tmp_path / "step=7.ckpt", weights_only=True)["callbacks"]
    (before,) = [each for name, each in state.items() if name.startswith("DataFlex")]
    callback = mix()
    message = "4 prompts in a batch of all ranks, and here are 6: epoch 0 goes on with what it has not drawn"
    with pytest.warns(UserWarning, match=message):
        module, record = mixing.fit([callback], Rows(batch_size=6), ckpt_path=tmp_path / "step=7.ckpt")
    shares = {f"dataflex/prop_{name}": value for name, value in before["mixture"]["proportions"].items()}
    assert {name: record.logged[0][name] for name in shares} == pytest.approx(shares)
    # Of ten batches, as an epoch now has, the Trainer has counted seven: 28 prompts, and 18 more.
    rows = [row for batch in (*whole.seen, *module.seen[:3]) for row in batch]
    assert len(rows) == 46
    assert Counter(rows).most_common(1)[0][1] <= 2
    assert callback.pipeline.stats.count.sum() > sum(
        each["count"] for each in before["mixture"]["stats"]["domains"].values()
    )


def stream(batch_size: int, num_replicas: int) -> list[DomainMixtureSampler]:
    labels = [row["domain"] for row in mixing.ROWS]
    return [
        DomainMixtureSampler(labels, batch_size, num_replicas=num_replicas, rank=rank) for rank in range(num_replicas)
    ]


def test_two_ranks_that_become_one_of_larger_batches_go_on_in_the_epoch() -> None:
    (whole,), two, (one,) = stream(4, 1), stream(2, 2), stream(4, 1)
    expected = [*whole, *whole]
    parts = [iter(sampler) for sampler in two]
    for _ in range(2 * 7):
        for part in parts:
            next(part)
    one.load_state_dict(two[0].state_dict())
    assert len(one) == 60
    assert [*one, *one] == expected[28:]


def test_a_rule_that_remembers_nothing_saves_nothing() -> None:
    plain = DataFlexCallback("select", "outcome", {"name": "gfpo", "params": {"k": 2}})
    assert plain.state_dict()["pipeline"]["actuator"]["state"] == {}


def test_settings_have_the_same_text_in_every_process() -> None:
    class Tuned(Scorer):
        requires = ["rm_scores"]

        def __init__(self, tuner: Any = None, factor: float = 1.0, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.tuner, self.factor = tuner, factor

        def score(self, batch: Any, step_id: int = 0, **ctx: Any) -> torch.Tensor:
            return batch["rm_scores"]

    assert described(Tuned(object(), 2.0)) == "Tuned(tuner=object, factor=2.0)"
