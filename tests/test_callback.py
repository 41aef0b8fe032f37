"""What the callback does around a decision: when, on what, and what becomes of the step."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from lightning_dataflex import DataFlexCallback, DataFlexPoint, RolloutBatch
from lightning_dataflex.window import _gradient_size
from tests.toy import LR, Toy, fit, gradient, kept_rows, per_token, policy, rollout, softmax_weights, token_mean

BAND = {"name": "threshold_band", "params": {"low": 0.0, "high": 1.0}}


def select(**options: Any) -> DataFlexCallback:
    return DataFlexCallback("select", "group_solve_rate", options.pop("actuator", BAND), **options)


def reweight(**options: Any) -> DataFlexCallback:
    return DataFlexCallback(
        "reweight", "advantage_magnitude", {"name": "softmax", "params": {"temperature": 0.5}}, **options
    )


def hopeless(seed: int = 0) -> dict[str, Any]:
    """A rollout in which every group is failed."""
    batch = rollout(seed)
    return batch | {"rm_scores": torch.zeros_like(batch["rm_scores"])}


def weight_of(module: Toy) -> np.ndarray:
    return module.linear.weight.detach().clone().numpy()


class Recorder(Toy):
    """Keeps the batch that its loss is computed from."""

    def _loss(self, batch: Any) -> Tensor:
        self.seen = batch
        return super()._loss(RolloutBatch.of(batch).replaced({}) if isinstance(batch, dict) else vars(batch))


def test_warmup_leaves_the_first_steps_alone() -> None:
    module, batches, weight = Toy(), [rollout(0), rollout(1)], policy().weight.detach().numpy().copy()
    fit(module, [reweight(warmup_step=1)], batches)
    mask = batches[0]["response_mask"].numpy()
    weight -= LR * gradient(weight, batches[0], mask, mask)
    weight -= LR * gradient(weight, batches[1], softmax_weights(batches[1], 0.5), batches[1]["response_mask"].numpy())
    np.testing.assert_allclose(weight_of(module), weight, atol=1e-7)


def test_enforce_false_decides_and_logs_and_changes_nothing() -> None:
    module, plain = Toy(), Toy()
    trainer = fit(module, [select(enforce=False)], [rollout(0)])
    fit(plain, [], [rollout(0)])
    np.testing.assert_array_equal(weight_of(module), weight_of(plain))
    assert trainer.callback_metrics["dataflex/kept_frac"] == pytest.approx(kept_rows(rollout(0)).mean())


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_without_kept_samples_moves_nothing(accumulate: int) -> None:
    module = Toy(optimizer="AdamW")
    good, batches = [rollout(0)] * accumulate, [hopeless(1)] * 2 * accumulate
    fit(plain := Toy(optimizer="AdamW"), [select()], good, accumulate_grad_batches=accumulate)
    with pytest.warns(UserWarning, match=r"keeps no sample.*threshold_band|group_solve_rate.threshold_band keeps no"):
        fit(module, [select()], good + batches, accumulate_grad_batches=accumulate)
    assert module.losses_seen[-1] == 0.0
    assert np.abs(weight_of(plain) - policy().weight.detach().numpy()).max() > 0.05  # momentum is there to move it
    np.testing.assert_array_equal(weight_of(module), weight_of(plain))


def test_with_drop_weight_other_terms_of_the_loss_do_not_move_an_empty_step() -> None:
    class Regularised(Toy):
        def _loss(self, batch: Any) -> Tensor:
            return super()._loss(batch) + self.linear.weight.square().sum()

    fit(module := Regularised(), [select(drop="weight")], [hopeless()])
    np.testing.assert_array_equal(weight_of(module), policy().weight.detach().numpy())


def test_an_empty_batch_does_not_undo_a_window_with_kept_samples() -> None:
    module, weight = Toy(), policy().weight.detach().numpy().copy()
    fit(module, [select()], [rollout(0), hopeless(1)], accumulate_grad_batches=2)
    keep, mask = kept_rows(rollout(0))[:, None], rollout(0)["response_mask"].numpy()
    weight -= LR * gradient(weight, rollout(0), keep * mask, keep * mask) / 2
    np.testing.assert_allclose(weight_of(module), weight, atol=1e-7)


def test_a_minibatch_without_kept_samples_moves_nothing() -> None:
    batch = rollout(0)
    batch["rm_scores"][:4] = 0.0  # the first of two minibatches holds failed groups alone
    steps = []

    class Steps(Toy):
        def on_before_optimizer_step(self, *_: Any) -> None:
            steps.append(weight_of(self))

    fit(module := Steps(manual=True, optimizer="AdamW"), [select()], [batch])
    steps.append(weight_of(module))
    moved = [bool((a != b).any()) for a, b in itertools.pairwise(steps)]
    assert kept_rows(batch)[4:].any()
    assert moved == [False, True, False, True]


def test_on_empty_keep_trains_on_all() -> None:
    module, plain = Toy(), Toy()
    with pytest.warns(UserWarning, match="trains on all"):
        fit(module, [select(on_empty="keep")], [hopeless()])
    fit(plain, [], [hopeless()])
    np.testing.assert_allclose(weight_of(module), weight_of(plain), atol=1e-12)


def test_on_empty_raise_names_scorer_and_thresholds() -> None:
    with pytest.raises(ValueError, match=r"group_solve_rate.*'low': 0.0, 'high': 1.0"):
        fit(Toy(), [select(on_empty="raise")], [hopeless()])


def test_empty_steps_are_warned_of_once_in_a_while(recwarn: pytest.WarningsRecorder) -> None:
    fit(Toy(), [select()], [hopeless(i) for i in range(30)])
    assert len([w for w in recwarn if "keeps no sample" in str(w.message)]) == 1


def test_a_loss_that_divides_by_nothing_is_an_error() -> None:
    class Careless(Toy):
        def _loss(self, batch: Any) -> Tensor:
            return per_token(self.linear, batch).sum() / batch["response_mask"].sum()

    for manual in (False, True):
        with pytest.raises(ValueError, match=r"clamp\(min=1\)"):
            fit(Careless(manual=manual), [select()], [hopeless()])


def test_an_empty_step_may_be_clipped_by_value() -> None:
    module = Toy(optimizer="AdamW")
    with pytest.warns(UserWarning, match="keeps no sample"):
        fit(module, [select()], [hopeless()], gradient_clip_val=0.1, gradient_clip_algorithm="value")
    np.testing.assert_array_equal(weight_of(module), policy().weight.detach().numpy())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_large_gradients_of_any_precision_are_finite(dtype: torch.dtype) -> None:
    parameter = torch.nn.Parameter(torch.zeros(1000, dtype=dtype))
    parameter.grad = torch.full_like(parameter, 1000.0)
    assert _gradient_size(torch.optim.SGD([parameter], lr=1.0)) == pytest.approx(1e6, rel=1e-2)


def test_another_optimizers_step_does_not_close_the_window() -> None:
    class ActorCritic(Toy):
        def __init__(self) -> None:
            super().__init__(manual=True)
            self.critic = policy()

        def training_step(self, batch: Any, batch_idx: int) -> None:
            actor, critic = self.optimizers()
            self.manual_backward(self._loss(self.dataflex(batch)))
            if batch_idx == 1:
                actor.step()
            critic.zero_grad()
            self.manual_backward(self.critic(batch["features"]).square().mean())
            critic.step()

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(part.parameters(), lr=LR) for part in (self.linear, self.critic)]

    fit(module := ActorCritic(), [select()], [rollout(0), hopeless(1)])
    keep, mask = kept_rows(rollout(0))[:, None], rollout(0)["response_mask"].numpy()
    start = policy().weight.detach().numpy()
    expected = start - LR * gradient(start, rollout(0), keep * mask, keep * mask)
    np.testing.assert_allclose(weight_of(module), expected, atol=1e-7)


def test_enforce_false_does_not_stop_an_empty_step() -> None:
    fit(module := Toy(), [select(enforce=False, on_empty="raise")], [hopeless()])
    fit(plain := Toy(), [], [hopeless()])
    np.testing.assert_array_equal(weight_of(module), weight_of(plain))


def test_weights_in_the_batch_are_multiplied() -> None:
    correction = torch.rand(8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    batch = rollout(0) | {"rollout_is_weights": correction}
    fit(module := Recorder(), [reweight()], [batch])
    np.testing.assert_allclose(
        module.seen["rollout_is_weights"], softmax_weights(batch, 0.5) * correction.numpy(), rtol=1e-6
    )


@pytest.mark.parametrize(
    "mounts", [("point", "point"), ("point", "_loss"), ("on_train_batch_start", "point"), ("on_train_batch_start",) * 2]
)
def test_two_callbacks_in_either_order(mounts: tuple[str, str]) -> None:
    results = []
    for swap in (False, True):
        pair = [select(mount=mounts[0]), reweight(mount=mounts[1])]
        fit(module := Recorder(), pair[::-1] if swap else pair, [rollout(0)])
        results.append((weight_of(module), module.seen["rollout_is_weights"], module.seen["response_mask"]))
    expected = kept_rows(rollout(0))[:, None] * softmax_weights(rollout(0), 0.5)
    for got, other in zip(*results):
        np.testing.assert_allclose(got, other, atol=1e-12)
    np.testing.assert_allclose(results[0][1], expected, rtol=1e-6)


def test_logged_keys(tmp_path: Any) -> None:
    logger = CSVLogger(tmp_path)
    fit(Toy(), [select(), reweight()], [rollout(0), hopeless(1)], logger=logger, log_every_n_steps=1)
    rows = (tmp_path / "lightning_logs/version_0/metrics.csv").read_text().splitlines()
    names = {key.split("/")[-1] for key in rows[0].split(",") if key.startswith("dataflex/select/")}
    assert names == {
        "kept_frac",
        "weight_mean",
        "weight_std",
        "ess",
        "n_nan",
        "frac_zero_std",
        "dropped_solved",
        "dropped_failed",
        "dropped_rule",
        "dropped_nan",
        "reward_all",
        "reward_kept",
    }
    assert {key for key in rows[0].split(",") if key.startswith("dataflex/reweight/")}
    first = dict(zip(rows[0].split(","), rows[1].split(",")))
    assert float(first["dataflex/select/kept_frac"]) == pytest.approx(kept_rows(rollout(0)).mean())
    assert "nan" not in "".join(rows[1:])


TOP_HALF = {"name": "topk_fraction", "params": {"fraction": 0.5}}


@pytest.mark.parametrize(
    "other", [lambda: select(actuator=TOP_HALF), reweight], ids=["two selectors", "two mechanisms"]
)
def test_R054_state_keys_differ_and_state_comes_back(other: Any, tmp_path: Any) -> None:
    callbacks = [select(warmup_step=1), other()]
    trainer = fit(Toy(), callbacks, [rollout(0), rollout(1)])
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    again = [select(warmup_step=1), other()]
    fit_again = fit(Toy(), again, [rollout(0), rollout(1)], max_epochs=1)
    fit_again.fit_loop.max_epochs = 2
    fit_again.fit(Toy(), fit_again.train_dataloader, ckpt_path=tmp_path / "a.ckpt")
    assert len({c.state_key for c in callbacks}) == 2
    assert [c.num_steps for c in callbacks] == [2, 2]
    assert [c.num_steps for c in again] == [4, 4]


@pytest.mark.parametrize("source", ["argument", "attribute", "hparams"])
def test_group_scorer_on_gae_is_refused_before_the_first_step(source: str) -> None:
    module = Toy()
    if source == "attribute":
        module.adv_estimator = "gae"
    if source == "hparams":
        module.save_hyperparameters({"adv_estimator": "gae"})
    with pytest.raises(ValueError, match=r"group_solve_rate.*'gae'"):
        fit(module, [select(adv_estimator="gae" if source == "argument" else None)], [rollout(0)])
    assert module.losses_seen == []


@pytest.mark.parametrize(
    ("mount", "offers", "why"),
    [
        ("point", "batch", "no DataFlexPoint"),
        (None, "batch", "no module or method 'policy_loss'. It has no DataFlexPoint either"),
        ("poli_loss", "point", "no module or method 'poli_loss'. Leave mount out"),
    ],
)
def test_a_mount_that_is_not_there(mount: str | None, offers: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        fit(Toy(offers), [select(mount=mount)], [rollout(0)])


class NeverCalls(Toy):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return token_mean(per_token(self.linear, batch), batch)


@pytest.mark.parametrize(
    ("offers", "mount", "why"),
    [
        ("point", "point", r"Call batch = self.dataflex\(batch\)"),
        ("submodule", "policy_loss", "not its forward"),
        ("method", "my_loss", "not its forward"),
        ("gradient", "on_before_backward", "pg_losses"),
    ],
)
@pytest.mark.parametrize("manual", [False, True])
def test_a_mount_that_does_not_fire(offers: str, mount: str, why: str, manual: bool) -> None:
    module = NeverCalls(offers)
    module.automatic_optimization = not manual
    with pytest.raises(RuntimeError, match=rf"did not act in this training step of NeverCalls.*{why}"):
        fit(module, [select(mount=mount, drop="weight")], [rollout(0)])
    np.testing.assert_array_equal(weight_of(module), policy().weight.detach().numpy())


class Rollout(NamedTuple):
    features: Tensor
    actions: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    response_mask: Tensor
    rm_scores: Tensor
    uid: Tensor
    rollout_is_weights: Tensor | None = None


@dataclass
class RolloutData:
    features: Tensor
    actions: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    response_mask: Tensor
    rm_scores: Tensor
    uid: Tensor


class AnyBatch(Toy):
    """Reads a batch of any type through RolloutBatch."""

    def _loss(self, batch: Any) -> Tensor:
        read = RolloutBatch.of(batch)
        names = ("features", "actions", "old_log_probs", "advantages", "response_mask", "rollout_is_weights")
        return token_mean(per_token(self.linear, as_dict := {n: read.get(n) for n in names}), as_dict)


def _tensordict(batch: dict[str, Any]) -> Any:
    tensordict = pytest.importorskip("tensordict")
    return tensordict.TensorDict(batch, batch_size=[8]).lock_()


@pytest.mark.parametrize("kind", [dict, lambda b: Rollout(**b), lambda b: RolloutData(**b), _tensordict])
@pytest.mark.parametrize("mount", ["on_train_batch_start", "point"])
def test_batch_types(kind: Any, mount: str) -> None:
    fit(module := AnyBatch(), [select(mount=mount)], [kind(rollout(0))])
    keep, mask = kept_rows(rollout(0))[:, None], rollout(0)["response_mask"].numpy()
    start = policy().weight.detach().numpy()
    np.testing.assert_allclose(
        weight_of(module), start - LR * gradient(start, rollout(0), keep * mask, keep * mask), atol=1e-7
    )


def test_a_named_tuple_has_no_room_for_several_callbacks() -> None:
    with pytest.raises(ValueError, match=r"A Rollout has no room.*Use a dict"):
        fit(AnyBatch(), [select(), reweight()], [Rollout(**rollout(0))])


def test_a_loss_of_separate_arguments_has_no_room_for_several_callbacks() -> None:
    with pytest.raises(ValueError, match="has no room"):
        fit(Toy("keyword"), [select(mount="keyword_loss"), reweight(mount="keyword_loss")], [rollout(0)])


@pytest.mark.parametrize("fields", [{"rm_scores": "acuracy"}, {"rm_score": "accuracy"}])
def test_a_misspelt_mapping_is_refused(fields: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"maps 'rm_scores'.*\"accuracy\"|maps 'rm_score'.*Did you mean 'rm_scores'"):
        fit(Toy(), [select(fields=fields)], [rollout(0) | {"accuracy": rollout(0)["rm_scores"]}])


@pytest.mark.parametrize("weights_key", ["", 3, None, "advantages", "prompt_id"])
def test_a_weights_key_that_is_none_is_refused(weights_key: Any) -> None:
    with pytest.raises(ValueError, match="weights_key is"):
        select(weights_key=weights_key)


def test_two_rules_that_change_advantages_are_refused() -> None:
    callbacks = [DataFlexCallback("select", "reward_difficulty", name) for name in ("gfpo", "max_variance")]
    with pytest.raises(ValueError, match=r"gfpo and .*max_variance each normalise"):
        fit(Toy(), callbacks, [rollout(0)])


def test_R064_the_loss_sees_what_is_added_before_the_step_and_a_tuple_is_refused() -> None:
    fit(module := Recorder(), [select(mount="on_train_batch_start")], [rollout(0)])
    mask = rollout(0)["response_mask"].numpy()
    np.testing.assert_array_equal(module.seen["rollout_is_weights"], kept_rows(rollout(0))[:, None] * mask)
    with pytest.raises(TypeError, match=r"cannot be a (tuple|list).*Give a dict"):
        fit(AnyBatch(), [select(mount="on_train_batch_start")], [tuple(rollout(0).values())])


def test_the_batch_of_the_dataloader_stays_as_it_is() -> None:
    batch = rollout(0)
    before = {key: value.clone() for key, value in batch.items()}
    fit(
        Toy("batch"),
        [select(mount="on_train_batch_start"), reweight(mount="on_train_batch_start")],
        [batch],
        max_epochs=2,
    )
    assert batch.keys() == before.keys()
    assert all(torch.equal(torch.nan_to_num(batch[key]), torch.nan_to_num(before[key])) for key in batch)


def test_a_step_that_is_called_several_times_decides_once() -> None:
    calls = []

    class Lbfgs(Toy):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.LBFGS(self.parameters(), max_iter=3, lr=0.01)

        def _loss(self, batch: Any) -> Tensor:
            calls.append(batch["rollout_is_weights"].clone())
            return super()._loss(batch)

    trainer = fit(Lbfgs("batch"), [reweight(mount="on_train_batch_start")], [rollout(0)])
    assert len(calls) > 1
    assert all(torch.equal(calls[0], other) for other in calls)
    assert trainer.callback_metrics["dataflex/weight_mean"] == pytest.approx(1.0)


def test_fields_and_weights_key() -> None:
    batch = rollout(0)
    batch["rewards"], batch["group"] = batch.pop("rm_scores"), batch.pop("uid")
    fields = {"rm_scores": "rewards", "uid": "group"}
    fit(module := Recorder(), [select(fields=fields, weights_key="w", drop="weight")], [batch])
    mask = batch["response_mask"].numpy()
    np.testing.assert_array_equal(module.seen["w"], kept_rows(rollout(0))[:, None] * mask)


def test_gradient_mount_refuses_what_it_cannot_do() -> None:
    with pytest.raises(ValueError, match=r"drop is 'mask'.*denominators"):
        select(mount="on_before_backward")
    with pytest.raises(ValueError, match="gfpo changes advantages"):
        DataFlexCallback("select", "reward_difficulty", "gfpo", mount="on_before_backward", drop="weight")


def test_gfpo_trains_with_the_advantages_of_the_subset() -> None:
    callback = DataFlexCallback("select", "reward_difficulty", {"name": "gfpo", "params": {"k": 1}}, mount="point")
    fit(module := Recorder(), [callback], [rollout(0)])
    assert isinstance(module.dataflex, DataFlexPoint)
    assert module.seen["advantages"].abs().max() == 0  # a kept subset of one has nothing to compare with
    assert torch.equal(module.seen["original_advantages"].nan_to_num(), rollout(0)["advantages"].nan_to_num())


def test_signature_is_that_of_the_block() -> None:
    import inspect

    from lightning_dataflex import DataFlexConfig

    given = {n: p.default for n, p in inspect.signature(DataFlexCallback).parameters.items()}
    assert given == {n: p.default for n, p in inspect.signature(DataFlexConfig).parameters.items()}


def cut_in_two(batch: dict[str, Any]) -> list[dict[str, Any]]:
    return [{name: value[rows] for name, value in batch.items()} for rows in (slice(3), slice(3, None))]


def one_group(rewards: list[float], uid: list[str]) -> dict[str, Any]:
    batch = {name: value[: len(uid)] for name, value in rollout(0).items()}
    batch["rm_scores"] = torch.tensor(rewards)
    return batch | {"uid": uid}


@pytest.mark.parametrize(
    "batches",
    [cut_in_two(rollout(0)), [one_group([1.0, 1.0], ["a"] * 2), one_group([0.0, 0.0], ["a"] * 2)]],
    ids=["at a border", "halves"],
)
@pytest.mark.parametrize("mount", ["point", "on_train_batch_start"])
def test_R019_groups_cut_over_the_batches_of_a_step_are_refused_before_it(batches: list[Any], mount: str) -> None:
    module = Toy("point" if mount == "point" else "batch")
    with pytest.raises(ValueError, match=r"1 groups of this batch have samples in an earlier batch.*whole groups"):
        fit(module, [select(mount=mount)], batches, accumulate_grad_batches=2)
    np.testing.assert_array_equal(weight_of(module), policy().weight.detach().numpy())


class InMinibatches(Toy):
    """Two PPO epochs of minibatches of these rows, or of others in each epoch."""

    def __init__(self, *epochs: list[list[int]], num_generations: int | None = None, offers: str = "method") -> None:
        super().__init__(offers, manual=True)
        self.epochs, self.num_generations = epochs, num_generations

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        optimizer = self.optimizers()
        for rows in [rows for epoch in (self.epochs * 2)[:2] for rows in epoch]:
            optimizer.zero_grad()
            self.manual_backward(self._loss({name: value[rows] for name, value in batch.items()}))
            optimizer.step()


@pytest.mark.parametrize(
    ("epochs", "size"),
    [
        ([[[0, 1, 2], [3, 4, 5, 6, 7]]], None),
        ([[[0, 2, 4, 6], [1, 3, 5, 7]]], 2),
        ([[[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 2, 3, 4], [1, 5, 6, 7]]], None),
    ],
    ids=["at a border", "halves", "shuffled after the first epoch"],
)
def test_groups_that_minibatches_cut_are_warned_of_once(epochs: Any, size: int | None) -> None:
    batch = rollout(0) | {"uid": torch.arange(8) // 2 + 5}
    with pytest.warns(UserWarning, match="groups of this minibatch have samples in an earlier one") as caught:
        fit(InMinibatches(*epochs, num_generations=size), [select(mount="my_loss")], [batch, batch])
    assert sum("of this minibatch" in str(each.message) for each in caught) == 1


@pytest.mark.parametrize("start", [0, 5])
@pytest.mark.parametrize("size", [None, 2])
@pytest.mark.filterwarnings("error:.*of this minibatch")
def test_minibatches_of_whole_groups_may_be_shuffled(start: int, size: int | None) -> None:
    batch = rollout(0) | {"uid": torch.arange(8) // 2 + start}
    epochs = [[0, 1, 2, 3], [4, 5, 6, 7]], [[6, 1, 7, 0], [3, 2, 4, 5]]
    fit(InMinibatches(*epochs, num_generations=size), [select(mount="my_loss")], [batch, batch])


def test_whole_groups_may_be_numbered_anew_in_each_batch() -> None:
    fit(Toy(), [select()], [rollout(0), rollout(1)] * 2, accumulate_grad_batches=2)
    fit(
        Toy(),
        [select()],
        [rollout(0), {name: value[:4] for name, value in rollout(1).items()}],
        accumulate_grad_batches=2,
    )
    fit(Toy(), [reweight()], cut_in_two(rollout(0)), accumulate_grad_batches=2)
    with pytest.warns(UserWarning, match="1 groups of this batch"):
        fit(Toy(), [select(enforce=False)], cut_in_two(rollout(0)), accumulate_grad_batches=2)


def test_whole_groups_may_come_again_where_their_size_is_known() -> None:
    (module := Toy()).num_generations = 2
    again = [one_group([1.0, 0.0, 0.0, 1.0], list(uids)) for uids in ("aabb", "bbcc")]
    fit(module, [select()], again, accumulate_grad_batches=2)
    module.num_generations = 4
    with pytest.raises(ValueError, match="whole groups"):
        fit(module, [select()], again, accumulate_grad_batches=2)


def test_a_prompt_that_comes_again_in_a_later_step_is_warned_of() -> None:
    batches = [one_group([1.0, 0.0, 0.0, 1.0], list(uids)) for uids in ("aabb", "ccdd", "eeff", "ffgg")]
    with pytest.warns(UserWarning, match="1 groups of this batch"):
        fit(Toy(), [select()], batches, accumulate_grad_batches=2)
