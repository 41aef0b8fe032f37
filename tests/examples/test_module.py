from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor

from examples.rlhf import RLHFModule, policy
from examples.rlhf.batches import at_last_token
from examples.rlhf.estimators import value_loss
from examples.rlhf.reward_model import RewardModel, corrupted
from examples.rlhf.tasks import split
from examples.rlhf.tokenizer import CHARACTERS
from lightning_dataflex import DataFlexCallback
from tests.examples.updating import Given, parameters, updated

Train = Callable[..., RLHFModule]


SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}


class Graded(RLHFModule):
    """With rewards that differ before any training."""

    def rewards(self, rows, batch):  # type: ignore[no-untyped-def]
        outcomes = (batch["input_ids"].sum(1) % 5).to(batch["old_log_probs"].dtype)
        return super().rewards(rows, batch) | {"rm_scores": at_last_token(outcomes, batch["response_mask"])}


@pytest.fixture(autouse=True)
def _small_model(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "reward_model" not in request.node.name:
        monkeypatch.setattr(policy, "EMBEDDED", policy.EMBEDDED | SMALL)


def module(cls: type[RLHFModule] = Graded, **settings: object) -> RLHFModule:
    """A module without a warm-up, with small groups."""
    return cls(**{"warmup_steps": 0, "num_generations": 4, "max_new_tokens": 4, "seed": 0, **settings})


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "gae"])
@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
def test_the_micro_batch_cut_leaves_the_update_unchanged(trained: Train, estimator: str, aggregation: str) -> None:
    def updated(micro_batch_size: int | None) -> Tensor:
        # A plain gradient step: Adam would hide a wrong scale. Nothing is clipped.
        model = module(
            adv_estimator=estimator, num_minibatches=2, micro_batch_size=micro_batch_size, aggregation=aggregation,
            entropy_coef=0.1, kl_coef=0.1, max_grad_norm=1e9,
        )  # fmt: skip
        # The eager kernel takes its softmax in single precision, whatever it is given.
        model.policy.model.set_attn_implementation("sdpa")
        model.configure_optimizers = lambda: torch.optim.SGD(model.policy.parameters(), lr=0.1)
        start = parameters(model).double()
        return parameters(trained(model, precision="64-true")) - start

    whole, cut, single = updated(None), updated(5), updated(1)
    assert whole.abs().max() > 1e-4
    torch.testing.assert_close(cut, whole, rtol=0, atol=1e-10)
    torch.testing.assert_close(single, whole, rtol=0, atol=1e-10)


@pytest.mark.parametrize("estimator", ["grpo", "gae"])
def test_the_update_of_several_ranks_is_that_of_one(estimator: str, tmp_path: Path) -> None:
    settings = {"adv_estimator": estimator, "micro_batch_size": 3, "entropy_coef": 0.1, "kl_coef": 0.1}
    updated(1, None, str(tmp_path), **settings)
    batch, alone = torch.load(tmp_path / "batch.pt"), torch.load(tmp_path / "1-0.pt")
    start = parameters(Given(**settings)).double()
    assert (alone["parameters"] - start).abs().max() > 1e-3
    for world in (2, 4) if estimator == "grpo" else (2,):
        updated(world, batch, str(tmp_path), **settings)
        for rank in range(world):
            seen = torch.load(tmp_path / f"{world}-{rank}.pt")
            torch.testing.assert_close(seen["parameters"], alone["parameters"], rtol=0, atol=1e-9)
            assert list(seen["logged"]) == list(alone["logged"])
            assert seen["logged"] == pytest.approx(alone["logged"], abs=1e-6)


@pytest.mark.parametrize("weight", [0.0, 2.0])
def test_the_loss_takes_the_weights_that_the_point_gives(trained: Train, weight: float) -> None:
    def updated(weight: float | None) -> Tensor:
        model = module(max_grad_norm=1e9)
        model.configure_optimizers = lambda: torch.optim.SGD(model.policy.parameters(), lr=0.1)
        if weight is not None:
            weights = lambda batch: {"rollout_is_weights": torch.full_like(batch["old_log_probs"], weight)}  # noqa: E731
            model.dataflex.register_forward_hook(lambda point, args, batch: batch | weights(batch))
        start = parameters(model)
        return parameters(trained(model)) - start

    plain = updated(None)
    assert plain.abs().max() > 1e-4
    torch.testing.assert_close(updated(weight), weight * plain, rtol=1e-3, atol=1e-6)


def test_the_callback_acts_through_the_point(trained: Train) -> None:
    seen: dict[str, float] = {}

    class Watch(Callback):
        def on_train_batch_start(self, trainer: Trainer, *args: object) -> None:
            seen.update({name: float(value) for name, value in trainer.callback_metrics.items()})

    scheduler = DataFlexCallback(
        mechanism="select",
        scorer={"name": "group_solve_rate", "params": {"success_threshold": 100.0}},
        actuator={"name": "threshold_band", "params": {"low": 0.0, "high": 1.0}},
    )
    model = module()
    start = parameters(model)
    trained(model, 2, callbacks=[scheduler, Watch()])
    assert seen["dataflex/kept_frac"] == 0.0
    assert torch.equal(parameters(model), start)


def test_gae_trains_policy_and_value_head(trained: Train) -> None:
    model = module(adv_estimator="gae", num_generations=1, ppo_epochs=2, num_minibatches=2, value_clip=0.2)
    before = copy.deepcopy(model.state_dict())
    trained(model, 2)
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert {"policy.value_head.weight", "policy.value_head.bias"} <= moved
    assert len(moved) == len(before)
    assert model.global_step == 2 * 2 * 2


def test_the_value_loss_is_that_of_a_loop_over_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    new, old, returns = torch.randn(3, 2, 3, generator=generator)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    batch = {"values": old, "returns": returns, "response_mask": mask}
    total = 0.0
    for i, t in [(0, 0), (0, 1), (1, 0)]:
        near = min(max(float(new[i, t]), float(old[i, t]) - 0.2), float(old[i, t]) + 0.2)
        total += 0.5 * max((float(new[i, t]) - float(returns[i, t])) ** 2, (near - float(returns[i, t])) ** 2)
    loss = value_loss(new, batch, aggregation="token-mean", denominator=mask.sum(), clip=0.2)
    assert float(loss) == pytest.approx(total / 3, rel=1e-5)


def test_the_reference_is_frozen_and_no_part_of_the_module(trained: Train) -> None:
    model = module(kl_coef=0.1, warmup_steps=3)
    trained(model, 3)
    assert not any("reference" in name for name in model.state_dict())
    assert sum(len(group["params"]) for group in model.optimizers().param_groups) == len(
        list(model.policy.parameters())
    )
    reference = torch.cat([p.flatten() for p in model.reference.policy.parameters()])
    twin = module(kl_coef=0.1, warmup_steps=3)
    trained(twin, 0)
    assert torch.equal(reference, parameters(twin))
    assert not torch.equal(reference, parameters(model))


def test_without_a_kl_term_there_is_no_reference(trained: Train) -> None:
    assert trained(module()).reference is None


def test_a_resumed_run_ends_where_the_one_without_a_stop_does(trained: Train, tmp_path: Path) -> None:
    settings = {"kl_coef": 0.1, "warmup_steps": 5, "adv_estimator": "rloo"}
    straight = trained(module(**settings), 2, max_epochs=2)
    stopped = trained(module(**settings), 2, max_epochs=1)
    stopped.trainer.save_checkpoint(tmp_path / "run.ckpt")
    resumed = module(**settings)
    trained(resumed, 2, max_epochs=2, ckpt_path=tmp_path / "run.ckpt")
    torch.testing.assert_close(parameters(resumed), parameters(straight), rtol=0, atol=1e-6)
    assert not torch.equal(parameters(stopped), parameters(straight))


def test_the_warm_up_depends_on_the_seed_alone(trained: Train) -> None:
    one, again, other = (parameters(trained(module(warmup_steps=2, seed=seed, lr=0.0), 1)) for seed in (0, 0, 1))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_a_local_checkpoint_is_loaded_with_its_tokenizer(trained: Train, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import PreTrainedTokenizerFast

    vocabulary = {c: i for i, c in enumerate(["<pad>", "<s>", "</s>", "<unk>", *CHARACTERS])}
    characters = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    characters.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    characters.decoder = tokenizers.decoders.Fuse()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=characters, **special).save_pretrained(tmp_path / "model")
    saved = policy.embedded_model(seed=7)
    saved.save_pretrained(tmp_path / "model")

    model = module(model_path=str(tmp_path / "model"), warmup_steps=None)
    loaded = dict(model.policy.model.named_parameters())
    assert all(torch.equal(value, loaded[name]) for name, value in saved.named_parameters())
    assert model.tokenizer.decode(model.tokenizer.encode("37+5=")) == "37+5="
    assert model.tokenizer.encode_answer("42")[-1] == 2
    assert model.policy.stop_ids == [2]
    before = parameters(model).clone()
    trained(model, 1)
    assert torch.isfinite(parameters(model)).all()
    # No warm-up of its own accord: what moved is one optimiser step at most.
    assert (parameters(model) - before).abs().max() <= model.hparams.lr * 1.01


def test_a_checkpoint_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model_path is '/no/such', which is no folder"):
        module(model_path="/no/such")


def test_a_checkpoints_own_generation_settings_do_not_bend_the_draws(tmp_path: Path) -> None:
    saved = policy.embedded_model(seed=7)
    saved.generation_config.update(repetition_penalty=5.0, eos_token_id=[2, 9], top_k=1, do_sample=True)
    saved.save_pretrained(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy, "HFTokenizer", lambda path: type("T", (), {"eos_id": 2})())
        loaded, _ = policy.built(str(tmp_path), value_head=False, seed=0)
    assert loaded.stop_ids == [2, 9]
    assert loaded.model.generation_config.repetition_penalty in (None, 1.0)


def test_a_reward_model_ranks_held_out_pairs_and_the_verifier_judges_elsewhere() -> None:
    prompts = split(["sorting", "copy"], 400, 64)
    model = RewardModel("sorting", seed=0)
    model.fit(prompts.train)
    rows = [row for row in prompts.held_out if row["domain"] == "sorting"] * 4
    rng = random.Random(1)
    right = model(rows, [row["answer"] for row in rows])
    wrong = model(rows, [corrupted(row["answer"], rng) for row in rows])
    assert (right > wrong).float().mean() > 0.9

    mixed = prompts.held_out[:6]
    responses = [row["answer"] for row in mixed]
    rewards = model.rewards(mixed, responses, torch.full((6,), -3.0))
    is_sorting = torch.tensor([row["domain"] == "sorting" for row in mixed])
    assert (rewards[~is_sorting] == -3.0).all()
    torch.testing.assert_close(rewards[is_sorting], model(mixed, responses)[is_sorting].sigmoid())


def test_a_corrupted_answer_is_never_right() -> None:
    rng = random.Random(0)
    assert all(corrupted(answer, rng) != answer for answer in ("7", "11", "abc", "0123") for _ in range(200))


def test_a_reward_model_without_prompts_of_its_domain_is_refused() -> None:
    with pytest.raises(ValueError, match=r"No train prompt is of domain 'sorting'"):
        RewardModel("sorting").fit(split(["copy"], 3, 0).train)


def test_training_uses_the_learned_reward(trained: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(RewardModel, "fit", lambda self, rows: calls.append(len(rows)))
    model = trained(module(RLHFModule, reward="model"))
    assert len(calls) == 1
    assert not any("reward_model" in name for name in model.state_dict())
