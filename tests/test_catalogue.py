"""What the rules of the catalogue do beyond their vectors: combinations, state, and losses that they are equal to."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_dataflex import DataFlexCallback, Pipeline, build, components
from lightning_dataflex.core.config import DataFlexConfig
from lightning_dataflex.core.registry import settings_of
from lightning_dataflex.functional import combining
from lightning_dataflex.functional.loss import policy_loss
from tests.flowing import Prompts, Rolling, as_lists, fit
from tests.laws import a_batch, built
from tests.ranks import taken

NAN = float("nan")
EASY = {"name": "threshold_band", "params": {"low": 0.5, "high": 2.0}}
LONG = {"scorer": "response_length", "selector": {"name": "threshold_band", "params": {"low": 2.5, "high": 99.0}}}


def decide(kind: str, actuator, batch: dict, scorer=None, step: int = 0, **settings):
    mechanism = {"selector": "select", "reweighter": "reweight"}[kind]
    block = {"mechanism": mechanism, "scorer": scorer, "actuator": actuator}
    return Pipeline.from_config(block | settings).decide(batch, step_id=step)


def keep(actuator, batch: dict, scorer=None) -> list[bool]:
    return decide("selector", actuator, batch, scorer).keep.tolist()


# -- scorers -----------------------------------------------------------------------------------------------------------


def test_scores_of_tables_against_numpy():
    batch = a_batch(2)
    mask = batch["response_mask"].bool().numpy()
    table = {name: batch[name].double().numpy() for name in batch if name not in ("uid", "domain")}

    def mean(values: np.ndarray) -> list[float]:
        return [row[ok].mean() for row, ok in zip(values, mask)]

    def total(values: np.ndarray) -> list[float]:
        return [row[ok].sum() for row, ok in zip(values, mask)]

    ratio = table["old_log_probs"] - table["rollout_log_probs"]
    away = table["old_log_probs"] - table["ref_log_probs"]
    gap = table["teacher_log_probs"] - table["old_log_probs"]
    expected = {
        ("response_length", ()): mask.sum(1),
        ("efficiency", ()): table["rm_scores"] / mask.sum(1),
        ("advantage", ()): mean(table["advantages"]),
        ("sequence_entropy", ()): mean(table["entropies"]),
        ("sequence_entropy", (("level", "sum"),)): total(table["entropies"]),
        ("sequence_logprob", ()): total(table["old_log_probs"]),
        ("importance_ratio", (("level", "sequence"),)): np.exp(total(ratio)),
        ("importance_ratio", (("level", "geometric"),)): np.exp(mean(ratio)),
        ("ref_kl", (("level", "sequence"), ("estimator", "k1"))): total(away),
        ("ref_kl", (("level", "mean"), ("estimator", "k2"))): mean(away**2 / 2),
        ("ref_kl", (("level", "mean"),)): mean(np.exp(-away) - 1 + away),
        ("distill_gap", (("level", "mean"),)): mean(gap),
        ("metadata", (("column", "difficulty"),)): table["difficulty"],
        ("metadata", (("column", "entropies"),)): mean(table["entropies"]),
    }
    for (name, params), want in expected.items():
        np.testing.assert_allclose(
            build("scorer", name, **dict(params)).score(batch), want, rtol=1e-5, atol=1e-6, err_msg=name
        )
    for name, values in (
        ("importance_ratio", np.exp(ratio)),
        ("distill_gap", gap),
        ("token_entropy", table["entropies"]),
    ):
        np.testing.assert_allclose(build("scorer", name).score(batch), np.where(mask, values, 0), rtol=1e-5)


def test_ratios_far_apart_are_clamped_before_they_overflow():
    batch = {"old_log_probs": torch.tensor([[1e4, -1e4]]), "rollout_log_probs": torch.zeros(1, 2)}
    batch["response_mask"] = torch.ones(1, 2)
    weights = decide("reweighter", {"name": "tis", "params": {"cap": 1e12}}, batch).weights
    np.testing.assert_allclose(weights, np.exp([[20.0, -20.0]]), rtol=1e-6)


def test_staleness_counts_steps_since_the_policy_that_generated():
    batch = {"rollout_step": torch.tensor([3, 7, 9]), "response_mask": torch.ones(3, 1)}
    fresh = {"name": "threshold_band", "params": {"low": -9.0, "high": 4.0}}
    decision = decide("selector", fresh, batch, "staleness", step=7)
    assert decision.scores.tolist() == [4, 0, -2]
    assert decision.keep.tolist() == [False, True, True]


def test_sums_and_products_of_scores_are_those_of_their_parts():
    batch = a_batch(4)
    parts = [build("scorer", name).score(batch) for name in ("outcome", "group_std", "token_prob")]
    mask = batch["response_mask"].float()
    scorers = ["outcome", "group_std", "token_prob"]
    total = build("scorer", "weighted_sum", scorers=scorers, weights=[1.0, -2.0, 0.5])
    assert (total.granularity, total.needs_groups, total.timing) == ("token", True, "post_advantage")
    want = (parts[0][:, None] - 2 * parts[1][:, None] + 0.5 * parts[2]) * mask
    torch.testing.assert_close(total.score(batch), want)
    want = parts[0][:, None] * parts[1][:, None] * parts[2] * mask
    torch.testing.assert_close(build("scorer", "product", scorers=scorers).score(batch), want)
    nested = build("scorer", "rank", scorer={"name": "product", "params": {"scorers": ["outcome", "efficiency"]}})
    values = (parts[0] * build("scorer", "efficiency").score(batch)).numpy()
    np.testing.assert_allclose(nested.score(batch), np.argsort(np.argsort(values)) / 11, atol=1e-6)


def test_a_criterion_of_two_signals_needs_no_code():
    batch = a_batch(5)
    scorer = {
        "name": "weighted_sum",
        "params": {"scorers": [{"name": "rank", "params": {"scorer": "outcome"}}, "group_solve_rate"]},
    }
    decision = decide("selector", {"name": "topk_fraction", "params": {"fraction": 0.25}}, batch, scorer)
    rank = np.argsort(np.argsort(batch["rm_scores"].numpy())) / 11
    uid = np.array(batch["uid"])
    rate = [(batch["rm_scores"].numpy()[uid == u] > 0.5).mean() for u in uid]
    best = np.argsort(-(rank + rate), kind="stable")[:3]
    assert sorted(decision.keep.nonzero().flatten().tolist()) == sorted(best.tolist())


def test_an_average_is_over_visits_and_saved():
    def step(scorer, rewards: list[float], number: int) -> list[float]:
        uid = [i // 2 for i in range(len(rewards))]
        batch = {"rm_scores": torch.tensor(rewards), "uid": uid, "response_mask": torch.ones(len(rewards), 1)}
        return scorer.score(batch, number).tolist()

    scorer = build("scorer", "ema", scorer="outcome", decay=0.75)
    assert step(scorer, [1.0, 0.0, 1.0, 1.0], 0) == [0.5, 0.5, 1.0, 1.0]
    assert step(scorer, [1.0, 1.0], 1) == [0.625, 0.625]
    saved = io.BytesIO()
    torch.save(scorer.state_dict(), saved)
    saved.seek(0)
    again = build("scorer", "ema", scorer="outcome", decay=0.75)
    again.load_state_dict(torch.load(saved, weights_only=True))
    for each in (scorer, again):
        assert step(each, [0.0, 0.0, NAN, 0.0], 2) == pytest.approx([0.46875, 0.46875, NAN, 0.75], nan_ok=True)


def test_as_a_metric_an_average_remembers_nothing():
    scorer = build("scorer", "ema", scorer="outcome")
    batch = {"rm_scores": torch.tensor([1.0]), "uid": [7], "response_mask": torch.ones(1, 1)}
    scorer.update(batch)
    scorer.compute()
    assert scorer.score(batch | {"rm_scores": torch.tensor([0.0])}).tolist() == [0]


def test_an_average_over_domains():
    scorer = build("scorer", "ema", scorer="outcome", decay=0.5, by="domain")
    batch = {"rm_scores": torch.tensor([1.0, 0.0]), "domain": ["math", "code"], "response_mask": torch.ones(2, 1)}
    scorer.score(batch, 0)
    assert scorer.score(batch | {"rm_scores": torch.tensor([0.0, 0.0])}, 1).tolist() == [0.5, 0]


def test_what_remembers_is_refused_where_ranks_would_remember_apart():
    average = {"name": "ema", "params": {"scorer": "outcome"}}
    for scorer in (average, {"name": "product", "params": {"scorers": [average, "outcome"]}}):
        with pytest.raises(ValueError, match=r"scope is 'rank', but (ema|product) remembers"):
            decide("selector", "topk_fraction", a_batch(), scorer, scope="rank")


# -- selectors ---------------------------------------------------------------------------------------------------------


def test_conditions_are_sets():
    batch = a_batch(6)
    easy = (batch["rm_scores"] > 0.5).numpy()
    long = (batch["response_mask"].sum(1) > 2.5).numpy()
    assert {(a, b) for a, b in zip(easy, long)} == {(True, True), (True, False), (False, True), (False, False)}
    both, either = ({"name": name, "params": {"selectors": [EASY, LONG]}} for name in ("all_of", "any_of"))
    assert keep(both, batch, "outcome") == (easy & long).tolist()
    assert keep(either, batch, "outcome") == (easy | long).tolist()
    neither = {"name": "not_", "params": {"selector": either}}
    assert keep(neither, batch, "outcome") == (~(easy | long)).tolist()
    nested = {"name": "all_of", "params": {"selectors": [either, {"name": "not_", "params": {"selector": both}}]}}
    assert keep(nested, batch, "outcome") == (easy ^ long).tolist()


def test_a_condition_on_tokens_meets_one_on_samples():
    batch = a_batch(6)
    tokens = {"scorer": "token_prob", "selector": {"name": "lopti", "params": {"part": "low"}}}
    got = decide("selector", {"name": "all_of", "params": {"selectors": [EASY, tokens]}}, batch, "outcome").keep
    low = (batch["old_log_probs"].exp() < 0.5) & batch["response_mask"].bool()
    assert torch.equal(got, low & (batch["rm_scores"] > 0.5)[:, None])


def test_what_has_no_score_is_not_kept_by_its_opposite():
    batch = {"rm_scores": torch.tensor([0.1, 0.9, NAN]), "response_mask": torch.ones(3, 1)}
    assert keep({"name": "not_", "params": {"selector": EASY}}, batch, "outcome") == [True, False, False]
    inside = {"scorer": "outcome", "selector": EASY}
    assert keep({"name": "not_", "params": {"selector": inside}}, batch, "response_length") == [True, False, False]


def test_advantages_of_a_condition_are_those_of_what_is_kept_in_the_end():
    rewards = torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0])
    mask = (torch.arange(5) < torch.tensor([5, 1, 2, 3, 4])[:, None]).long()
    batch = {"rm_scores": rewards, "uid": [7] * 5, "response_mask": mask, "advantages": torch.zeros(5)}
    short = {"name": "gfpo", "params": {"k": 4}}
    long = {"scorer": "response_length", "selector": {"name": "threshold_band", "params": {"low": 1.5, "high": 9.0}}}
    decision = decide("selector", {"name": "all_of", "params": {"selectors": [short, long]}}, batch, "outcome")
    assert decision.keep.tolist() == [False, False, True, True, True]
    rest = np.array([0.0, 0.0, 1.0])
    np.testing.assert_allclose(decision.advantages[2:], (rest - rest.mean()) / rest.std(), atol=1e-5)


def test_the_memory_of_a_condition_is_saved():
    def rule():
        adaptive = {"name": "gfpo", "params": {"k_by_difficulty": [4, 3, 2, 1], "advantages": "group"}}
        average = {"scorer": {"name": "ema", "params": {"scorer": "outcome"}}, "selector": EASY}
        return build("selector", "any_of", selectors=[adaptive, average])

    first, second = rule(), rule()
    scores = build("scorer", "outcome")
    for seed in range(3):
        first.act(scores.score(a_batch(seed)), a_batch(seed), step_id=seed)
    assert first.remembers
    saved = io.BytesIO()
    torch.save(first.state_dict(), saved)
    saved.seek(0)
    second.load_state_dict(torch.load(saved, weights_only=True))
    batch = a_batch(9)
    assert first.act(scores.score(batch), batch) == second.act(scores.score(batch), batch)
    assert rule().act(scores.score(batch), batch) != first.act(scores.score(batch), batch)


def column(low: float, high: float) -> dict:
    band = {"name": "threshold_band", "params": {"low": low, "high": high}}
    return {"scorer": {"name": "metadata", "params": {"column": "x"}}, "selector": band}


def test_opposites_of_opposites_and_of_what_some_samples_lack():
    batch = {"rm_scores": torch.tensor([1.0, 0.0, 1.0, 1.0]), "uid": list("aabb"), "response_mask": torch.ones(4, 1)}
    batch["x"] = torch.tensor([1.0, NAN, 2.0, 3.0])
    high = column(1.5, 9.0)

    def opposite(selector) -> dict:
        return {"name": "not_", "params": {"selector": selector}}

    assert keep(opposite(high), batch, "outcome") == [True, False, False, False]
    assert keep(opposite({"name": "all_of", "params": {"selectors": [high]}}), batch, "outcome") == [True] + [False] * 3
    assert keep(opposite(opposite(high)), batch, "outcome") == [False, False, True, True]
    lost = batch | {"rm_scores": torch.tensor([1.0, NAN, 0.0, 1.0])}
    best = {"name": "gfpo", "params": {"k": 1, "advantages": "group", "metric": "reward"}}
    assert keep(opposite(best), lost, "response_length") == [False, False, True, False]


def test_conditions_and_parts_compare_all_samples_that_they_can():
    batch = {"rm_scores": torch.tensor([1.0, 0.0, 1.0, 1.0]), "uid": list("aabb"), "response_mask": torch.ones(4, 1)}
    batch["x"] = torch.tensor([1.0, NAN, 2.0, 3.0])
    half = {"scorer": "group_solve_rate", "selector": {"name": "threshold_band", "params": {"low": 0.2, "high": 0.8}}}
    both = {"name": "all_of", "params": {"selectors": [half]}}
    # What the block has no score of is not kept, but counts in the rate of the first.
    assert keep(both, batch, {"name": "metadata", "params": {"column": "x"}}) == [True, False, False, False]
    parts = ["group_solve_rate", {"name": "metadata", "params": {"column": "x"}}]
    scores = build("scorer", "weighted_sum", scorers=parts, weights=[1.0, 0.0]).score(batch)
    np.testing.assert_array_equal(scores, [0.5, NAN, 1.0, 1.0])


def test_parts_may_be_given_by_their_class_path():
    band = {"class_path": "lightning_dataflex.ThresholdBand", "init_args": {"low": 0.5, "high": 2.0}}
    own = {"scorer": {"class_path": "lightning_dataflex.Outcome"}, "selector": band}
    for selectors in ([band], [own]):
        assert (
            keep({"name": "all_of", "params": {"selectors": selectors}}, a_batch(), "outcome")
            == (a_batch()["rm_scores"] > 0.5).tolist()
        )
    scorer = {"name": "rank", "params": {"scorer": {"class_path": "lightning_dataflex.Outcome"}}}
    assert decide("selector", "topk_fraction", a_batch(), scorer).scores.max() == 1


def test_a_rule_on_tokens_has_their_shape_also_where_nothing_has_a_score():
    tokens = {"scorer": "token_prob", "selector": "high_entropy_tokens"}
    rule = {"name": "all_of", "params": {"selectors": [{"name": "not_", "params": {"selector": tokens}}]}}
    for rewards in (torch.rand(12), torch.full((12,), NAN)):
        assert decide("selector", rule, a_batch() | {"rm_scores": rewards}, "outcome").keep.shape == (12, 5)
    empty = a_batch() | {"response_mask": torch.zeros(12, 5)}
    assert decide("selector", rule, empty, "outcome").keep.shape == (12, 5)


def test_padding_is_not_kept_by_the_opposite_of_a_rule_on_tokens():
    nowhere = {"name": "threshold_band", "params": {"low": 1e4, "high": 2e4}}
    batch = a_batch()
    decision = decide("selector", {"name": "not_", "params": {"selector": nowhere}}, batch, "token_entropy")
    assert torch.equal(decision.keep, batch["response_mask"].bool())


def test_conditions_that_all_have_a_scorer_need_none_of_the_block():
    rule = {"name": "all_of", "params": {"selectors": [LONG, LONG]}}
    assert decide("selector", rule, a_batch()).num_kept == decide("selector", rule, a_batch(), "outcome").num_kept > 0


def test_a_condition_may_bring_the_scorer_of_its_paper():
    batch = a_batch()
    rule = {"name": "all_of", "params": {"selectors": [{"selector": "limr"}]}}
    assert keep(rule, batch) == (batch["limr_score"] > 0.6).tolist()
    with pytest.raises(ValueError, match="bernoulli acts on any score"):
        build("selector", "all_of", selectors=[{"selector": "bernoulli"}])


def test_resampling_of_groups_goes_with_ppo():
    assert decide("reweighter", "pf_ppo", a_batch(), adv_estimator="gae").weights.any()
    with pytest.raises(ValueError, match="adv_estimator 'gae' has no groups"):
        decide("reweighter", "grpo_s", a_batch(), adv_estimator="gae")


def test_a_field_of_another_policy_is_not_said_to_be_that_of_this_one():
    batch = {k: v for k, v in a_batch().items() if k != "rollout_log_probs"}
    with pytest.raises(ValueError, match=r'fields=\{"rollout_log_probs": "\.\.\."\}'):
        decide("reweighter", "tis", batch)


def test_a_warning_tells_the_settings_of_each_condition():
    rule = build("selector", "all_of", selectors=[EASY, LONG])
    shown = str(settings_of(rule))
    assert shown == (
        "{'conditions': [threshold_band(low=0.5, high=2.0, closed=False), "
        "response_length: threshold_band(low=2.5, high=99.0, closed=False)]}"
    )


def test_columns_feed_rules_on_prompts():
    batch = a_batch() | {"rate": [0.5, 0.9, 0.1] * 4}
    column = {"name": "metadata", "params": {"column": "rate", "granularity": "prompt"}}
    rule = {"name": "dots", "params": {"fraction": 0.3}}
    assert decide("selector", rule, batch, column).keep.nonzero().flatten().tolist() == [0, 3, 6, 9]


@pytest.mark.parametrize(
    ("actuator", "scorer"),
    [("tis", "advantage"), ("odsw", "group_std"), ("gtpo", "token_prob"), ("advantage_reweight", "sequence_logprob")],
)
def test_a_score_of_another_kind_is_refused(actuator, scorer):
    with pytest.raises(ValueError, match=f"{actuator} follows the .*, but {scorer} measures the"):
        decide("reweighter", actuator, a_batch(), scorer)


def test_a_small_signal_has_a_zscore_as_a_large_one():
    for scale in (1e-7, 1.0, 1e20):
        scores = combining.standardised(torch.tensor([0.0, 1.0, 3.0]) * scale)
        np.testing.assert_allclose(scores, [-1.0690, -0.2673, 1.3363], atol=1e-4)


def test_a_field_that_an_actuator_cannot_read_leaves_the_sample_out():
    batch = {"rm_scores": torch.tensor([1.0, NAN, 0.0, 0.0]), "uid": [1] * 4, "response_mask": torch.ones(4, 1)}
    batch["entropies"] = torch.tensor([[1.0], [1.0], [2.0], [3.0]])
    with pytest.warns(UserWarning, match="1 samples have no score"):
        decision = decide("reweighter", "gtpo", batch)
    rest = {name: [row for i, row in enumerate(value) if i != 1] for name, value in batch.items()}
    rest = {name: torch.stack(value) if name != "uid" else value for name, value in rest.items()}
    assert decision.weights[[0, 2, 3]].tolist() == decide("reweighter", "gtpo", rest).weights.tolist()
    assert decision.weights[1] == 0
    assert not decision.keep[1]


def test_difficulty_is_that_of_the_rewards_and_not_of_their_order():
    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0]):
        rewards = np.array([0.1, 0.2, 0.3])[order].tolist() + [0.1, 0.2, 0.3] * 3
        batch = {"rm_scores": np.array(rewards), "uid": np.repeat(np.arange(4), 3), "response_mask": np.ones((12, 1))}
        rule = {"name": "gfpo", "params": {"k_by_difficulty": [3, 3, 3, 1], "advantages": "group"}}
        assert decide("selector", rule, batch).num_kept == 4


def test_as_near_is_as_near_whatever_the_rounding():
    for dtype in (torch.float32, torch.float64):
        rewards = torch.tensor([1, 1, 1, 0, 0, 1, 1, 0, 0, 0], dtype=dtype)
        batch = {"rm_scores": rewards, "uid": [1] * 5 + [2] * 5, "response_mask": torch.ones(10, 1)}
        assert keep("nearest", batch) == [True] * 5 + [False] * 5


def test_a_prompt_that_was_drawn_twice_is_drawn_once_by_its_mean():
    batch = {"rm_scores": torch.tensor([1, 0, 0, 0, 1, 1, 1, 1.0]), "uid": [1, 1, 2, 2, 3, 3, 4, 4]}
    batch |= {"prompt_id": [7] * 4 + [8] * 4, "response_mask": torch.ones(8, 1)}
    for order in (list(range(8)), [3, 2, 1, 0, 4, 5, 6, 7]):
        index = torch.tensor(order)
        some = {k: v[index] if isinstance(v, torch.Tensor) else [v[i] for i in order] for k, v in batch.items()}
        assert keep("dots", some) == [True] * 4 + [False] * 4


@pytest.mark.parametrize("scorer", ["token_prob", "ref_kl", "importance_ratio", "distill_gap", "token_entropy"])
def test_one_number_per_response_is_no_table_of_tokens(scorer):
    batch = a_batch(tokens=12, size=4)
    field = build("scorer", scorer).requires[0]
    with pytest.raises(ValueError, match=rf"{field} has shape \(12,\). It must have a number for each response token"):
        build("scorer", scorer).score(batch | {field: torch.zeros(12)})


def test_infinite_advantages_and_rewards_take_everything():
    batch = {"rm_scores": torch.tensor([torch.inf, 0.0, 1.0]), "response_mask": torch.ones(3, 1)}
    assert decide("reweighter", "rwr", batch).weights[:, 0].tolist() == [3, 0, 0]
    weights = decide("reweighter", "awr", {"advantages": batch["rm_scores"], "response_mask": torch.ones(3, 1)}).weights
    assert weights[0] > 1 > weights[1] == weights[2] > 0
    average = build("scorer", "ema", scorer="outcome", decay=0.5)
    batch |= {"uid": [1, 2, 3]}
    average.score(batch, 0)
    assert average.score(batch | {"rm_scores": torch.ones(3)}, 1).tolist() == [1.0, 0.5, 1.0]


def test_a_column_called_as_our_own_numbers_is_a_column():
    batch = a_batch() | {"num_tokens": torch.arange(100, 112)}
    decision = decide("reweighter", "softmax", batch, {"name": "metadata", "params": {"column": "num_tokens"}})
    assert decision.scores.tolist() == list(range(100, 112))
    assert float(decision.weights[batch["response_mask"] > 0].mean()) == pytest.approx(1)


def test_domains_that_are_numbers_have_the_weights_of_their_texts():
    batch = {"domain": torch.tensor([0, 1]), "response_mask": torch.ones(2, 1)}
    rule = {"name": "domain_weight", "params": {"weights": {"0": 3.0}, "normalize": "none"}}
    assert decide("reweighter", rule, batch).weights[:, 0].tolist() == [3, 1]


@pytest.mark.parametrize(
    ("kind", "name", "params", "message"),
    [
        ("scorer", "weighted_sum", {"scorers": "outcome"}, "scorers .*'outcome'"),
        ("scorer", "weighted_sum", {"scorers": []}, r"scorers is \[\]. Give a list"),
        (
            "scorer",
            "weighted_sum",
            {"scorers": ["outcome"], "weights": [1.0, 2.0]},
            "weights has 2 numbers for 1 sc",
        ),
        ("scorer", "weighted_sum", {"scorers": ["outcome"], "weights": [NAN]}, "weights is nan"),
        ("scorer", "weighted_sum", {"scorers": ["outcom"]}, "no scorer 'outcom'. Did you mean 'outcome'"),
        ("scorer", "rank", {"scorer": {"name": "outcome", "params": {"threshold": 1}}}, "'outcome' has no parameter"),
        ("scorer", "rank", {"scorer": "mopps"}, "mopps scores prompts before their rollout"),
        ("scorer", "ema", {"scorer": "outcome", "decay": 1.0}, "decay is 1"),
        ("scorer", "ema", {"scorer": "outcome", "by": "group"}, "by .*'group'"),
        ("scorer", "importance_ratio", {"level": "sum"}, "level .*'sum'"),
        ("scorer", "group_std", {"correction": 2}, "correction is 2"),
        ("scorer", "metadata", {"column": ""}, "column is ''"),
        ("selector", "all_of", {"selectors": ["threshold_bnd"]}, "no selector 'threshold_bnd'"),
        ("selector", "all_of", {"selectors": [{"scorer": "outcome"}]}, r"A condition is .* Give \{scorer, selector\}"),
        ("selector", "all_of", {"selectors": [{"scorer": "mopps", "selector": "dots"}]}, "mopps scores prompts before"),
        ("selector", "gfpo", {"k": 2**40}, "fewer than 2"),
        ("scorer", "ema", {"scorer": "outcome", "max_entries": 0}, "max_entries is 0"),
        ("scorer", "weighted_sum", {"scorers": ["outcome"], "weights": [1e39]}, "weights is 1e"),
        ("reweighter", "tis", {"cap": 1e308}, "cap is 1e"),
        (
            "selector",
            "all_of",
            {"selectors": [{"scorer": "outcome", "selector": "dots"}]},
            "dots takes scores of a",
        ),
        ("selector", "all_of", {"selectors": ["dots", "lopti"]}, "No score suits all of dots, lopti"),
        ("selector", "all_of", {"selectors": ["gfpo", "max_variance"]}, "gfpo and max_variance both change advantages"),
        ("selector", "not_", {"selector": "gfpo"}, "gfpo gives advantages to what it keeps"),
        ("selector", "selective_backprop", {"keep": 0.0}, "keep is 0.0"),
        ("selector", "selective_backprop", {"start": 0.9, "end": 0.5}, "end is 0.5"),
        ("selector", "dots", {"temperature": 0.0}, "temperature is 0.0"),
        ("selector", "variance_top_p", {"shares": "log"}, "shares .*'log'"),
        ("selector", "lopti", {"part": "both"}, "part .*'both'"),
        ("reweighter", "pf_ppo", {"mode": "best"}, "mode .*'best'"),
        ("reweighter", "odsw", {"stage": "late"}, "stage .*'late'"),
        ("reweighter", "domain_weight", {"weights": {}}, r"weights is \{\}"),
        ("reweighter", "domain_weight", {"weights": {"math": -1.0}}, "the weight of math is -1.0"),
        ("reweighter", "mis", {"low": 2.0, "high": 1.0}, "high is 1.0"),
        ("reweighter", "tis", {"cap": float("inf")}, "cap is inf"),
    ],
)
def test_bad_settings_are_refused_with_their_value(kind, name, params, message):
    with pytest.raises(ValueError, match=message):
        build(kind, name, **params)


def test_a_rule_that_needs_the_progress_of_the_run_says_so():
    rule = build("selector", "selective_backprop")
    assert rule.needs_progress
    with pytest.raises(ValueError, match="nobody says how long that is"):
        rule.act(torch.rand(4), {})
    by_steps = build("selector", "selective_backprop", total_steps=10, interrupt=0)
    assert not by_steps.needs_progress
    sizes = [len(by_steps.act(torch.rand(4), {}, step_id=step)) for step in range(10)]
    assert sizes == [4] * 5 + [2] * 4 + [4]


def test_selective_backprop_prefers_large_losses_by_the_rules_own_chances():
    rule = build("selector", "selective_backprop", keep=0.25, start=0.0, end=1.0, interrupt=0)
    scores, turns = torch.tensor([3.0, 0.0, 1.0, 2.0]), 3000
    seen = np.zeros(4)
    for step in range(turns):
        seen[rule.act(scores, {}, step_id=step)] += 1
    expected = (np.array([3.5, 0.5, 1.5, 2.5]) / 4) ** 3
    np.testing.assert_allclose(seen / turns, expected / expected.sum(), atol=0.045)


class Changing(Rolling):
    """A column of its batch is another at each visit."""

    def rollout(self, rows, num_generations=None):
        batch = super().rollout(rows, num_generations)
        places = torch.arange(len(batch["uid"]))
        return batch | {"level": torch.sin(places * (self.global_step + 1.0)).abs()}


@pytest.mark.parametrize("stop", [1, 3, 5])
def test_law_8_what_combined_rules_remember_goes_on_where_it_was_stopped(tmp_path, stop):
    level = {"name": "metadata", "params": {"column": "level"}}
    average = {"name": "ema", "params": {"scorer": level, "decay": 0.5}}
    mean = {"name": "weighted_sum", "params": {"scorers": [average, "group_std"]}}
    adaptive = {"name": "gfpo", "params": {"k_by_difficulty": [4, 3, 2, 1], "advantages": "group"}}
    easy = {"scorer": average, "selector": {"name": "threshold_band", "params": {"low": 0.3, "high": 2.0}}}

    def callbacks() -> list:
        rule = {"name": "any_of", "params": {"selectors": [adaptive, easy]}}
        weigh = DataFlexCallback("reweight", mean, "softmax")
        return [DataFlexCallback("select", "outcome", rule), weigh]

    data = Prompts(["mixed", "easy", "hard", "mixed", "mixed", "hard", "easy", "mixed"], 2, StatefulDataLoader)
    length = {"max_steps": 8, "max_epochs": -1}
    whole, _, _ = fit(callbacks(), data, Changing(), **length)
    saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    fit([*callbacks(), saver], data, Changing(), enable_checkpointing=True, max_steps=stop, max_epochs=-1)
    path = tmp_path / f"step={stop}.ckpt"
    resumed, _, _ = fit(callbacks(), data, Changing(), ckpt_path=path, **length)
    assert as_lists(resumed.given) == as_lists(whole.given[stop:])
    assert torch.equal(resumed.weight, whole.weight)
    # It matters: with what they remember left out of the checkpoint, the rest is decided otherwise.
    state = torch.load(path, weights_only=True)
    for each in state["callbacks"].values():
        for memory in each.get("pipeline", {}).values():
            memory["state"] = {}
    torch.save(state, path)
    forgetful, _, _ = fit(callbacks(), data, Changing(), ckpt_path=path, **length)
    assert as_lists(forgetful.given) != as_lists(whole.given[stop:])


# -- reweighters -------------------------------------------------------------------------------------------------------


def loss_of(batch: dict, weights: torch.Tensor, aggregation: str) -> float:
    log_probs = batch["old_log_probs"] + 0.1
    mask, advantages = batch["response_mask"], batch["advantages"]
    return float(
        policy_loss(
            log_probs, batch["old_log_probs"], advantages, mask, rollout_is_weights=weights, aggregation=aggregation
        ).loss
    )


def test_length_weights_turn_one_aggregation_into_another():
    batch = a_batch(7)
    ones = batch["response_mask"].float()
    by_length = decide("reweighter", "length_debias", batch).weights
    assert loss_of(batch, by_length, "seq-mean-token-mean") == pytest.approx(loss_of(batch, ones, "token-mean"))
    rule = {"name": "length_debias", "params": {"power": -1.0, "normalize": "tokens"}}
    alike = decide("reweighter", rule, batch).weights
    assert loss_of(batch, alike, "token-mean") == pytest.approx(loss_of(batch, ones, "seq-mean-token-mean"))


def test_pf_ppo_weighs_as_the_batch_that_is_drawn():
    # Groups of 4, 3 and 2: each is drawn anew with as many as it has.
    batch = taken(a_batch(8), [row for row in range(12) if row not in (4, 5, 8)])
    weights = decide("reweighter", {"name": "pf_ppo", "params": {"mode": "bw"}}, batch).weights
    uid, rewards = np.array(batch["uid"]), batch["rm_scores"].numpy()
    rows = []
    for name in sorted(set(batch["uid"])):
        members = np.flatnonzero(uid == name)
        rows += [members[rewards[members].argmax()], members[rewards[members].argmin()]] * len(members)
    index = torch.tensor(np.array(rows))
    drawn = {k: v[index] for k, v in batch.items() if isinstance(v, torch.Tensor)}
    want = loss_of(drawn, drawn["response_mask"].float(), "token-mean")
    assert loss_of(batch, weights, "token-mean") == pytest.approx(want)


@pytest.mark.parametrize("normalize", ["tokens", "samples", "abs_advantage", "none"])
@pytest.mark.parametrize("name", components("reweighter"))
def test_a_reweighter_called_alone_gives_the_weights_of_a_decision(name, normalize):
    rule, batch = built("reweighter", name, normalize=normalize), a_batch(11)
    scorer, _ = DataFlexConfig.of(
        {"mechanism": "reweight", "actuator": rule, "scorer": None if rule.default_scorer else "outcome"}
    ).components()
    alone = rule.act(scorer.score(batch), batch)
    alone = alone if alone.dim() == 2 else alone[:, None] * batch["response_mask"]
    torch.testing.assert_close(Pipeline(scorer, rule).decide(batch).weights, alone.float())


def test_weights_that_are_scaled_by_advantages_leave_the_size_of_the_gradient():
    batch = a_batch(3)
    rule = {"name": "advantage_reweight", "params": {"alpha": 0.9, "normalize": "abs_advantage"}}
    weights = decide("reweighter", rule, batch).weights
    sizes = batch["advantages"].abs()
    assert float((weights * sizes).sum()) == pytest.approx(float(sizes.sum()), rel=1e-6)
    plain = decide("reweighter", {"name": "advantage_reweight", "params": {"alpha": 0.9}}, batch).weights
    ratio = (weights / plain)[batch["response_mask"] > 0]
    torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio))
    with pytest.raises(ValueError, match="no field 'advantages'"):
        decide("reweighter", rule, {k: v for k, v in batch.items() if k != "advantages"})
    # Without any advantage there is nothing to leave as it is, and the mean over the tokens is 1.
    weights = decide("reweighter", rule, batch | {"advantages": torch.zeros(12)}).weights
    assert float(weights[batch["response_mask"] > 0].mean()) == pytest.approx(1)


def test_domains_have_their_weights_whatever_type_names_them():
    batch = {"domain": np.array(["math", "code", "chat"]), "response_mask": torch.ones(3, 2)}
    rule = {"name": "domain_weight", "params": {"weights": {"math": 2.0, "chat": 0.0}, "normalize": "none"}}
    assert decide("reweighter", rule, batch).weights[:, 0].tolist() == [2, 1, 0]


def test_every_actuator_of_a_paper_runs_without_being_told_its_scorer():
    for kind, mechanism in (("selector", "select"), ("reweighter", "reweight")):
        for name, cls in components(kind).items():
            if cls.default_scorer:
                actuator = built(kind, name)
                scorer, _ = DataFlexConfig.of({"mechanism": mechanism, "actuator": actuator}).components()
                assert Pipeline(scorer, actuator).decide(a_batch()).weights.isfinite().all()
