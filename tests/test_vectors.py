"""Small inputs and right outputs of the published rules, `vectors.json`, each with where it comes from.

`paper`: the paper's text. `code`: the authors' code, which agreement proves to be transcribed, not to be the paper.
`note`: third-party notes on the paper. `known`: a textbook. `first`: first principles or brute force. `analogy`: the
weakest.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_dataflex import GFPO, SPEED, Pipeline, ReplayPool, RolloutBatch, build
from lightning_dataflex.core.history import Visits
from lightning_dataflex.core.replay import solved, with_replayed
from lightning_dataflex.core.samples import Layout
from lightning_dataflex.functional import (
    drawing,
    mixing,
    other_mixing,
    proportions,
    scoring,
    subsets,
    visits,
    weighting,
)
from lightning_dataflex.functional.advantages import grpo_advantages
from lightning_dataflex.functional.loss import policy_loss

CASES = json.loads(Path(__file__).with_name("vectors.json").read_text())["cases"]
NAN = float("nan")


def exact(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(got: Any, want: Any, atol: float = 1e-9) -> None:
    np.testing.assert_allclose(np.asarray(got, dtype=float), want, rtol=0, atol=atol)


def flat(groups: dict[str, list[float]]) -> dict[str, Any]:
    uid = [name for name, rewards in groups.items() for _ in rewards]
    return {"uid": uid, "rm_scores": exact([r for rewards in groups.values() for r in rewards])}


def one_group(rewards: list[float], **more: Any) -> dict[str, Any]:
    return flat({"q": rewards}) | more


def decided(kind: str, name: str, params: dict[str, Any], batch: dict[str, Any], scorer: Any = None) -> Any:
    block = {"mechanism": {"selector": "select", "reweighter": "reweight"}[kind], "scorer": scorer}
    batch = {"response_mask": torch.ones(len(next(iter(batch.values()))), 1)} | batch
    return Pipeline.from_config(block | {"actuator": {"name": name, "params": params}}).decide(batch)


def kept(name: str, params: dict[str, Any], batch: dict[str, Any], scorer: Any = None) -> list[int]:
    return decided("selector", name, params, batch, scorer).keep.nonzero().flatten().tolist()


def weights(name: str, params: dict[str, Any], batch: dict[str, Any], scorer: Any = None) -> torch.Tensor:
    return decided("reweighter", name, params, batch, scorer).weights


def kept_groups(name: str, params: dict[str, Any], groups: dict[str, list[float]], scorer: Any = None) -> list[str]:
    batch = flat(groups)
    rows = kept(name, params, batch, scorer)
    names = sorted({batch["uid"][row] for row in rows})
    assert rows == [i for i, uid in enumerate(batch["uid"]) if uid in names]
    return names


def masked(mask: list[list[int]], **fields: Any) -> dict[str, Any]:
    return {"response_mask": torch.tensor(mask)} | {name: exact(value) for name, value in fields.items()}


# -- select ------------------------------------------------------------------------------------------------------------


def dapo(given, want, case):
    assert kept_groups("nonzero_variance", {}, given["groups"]) == want
    assert kept_groups("threshold_band", {}, given["groups"]) == want


def online_difficulty_filter(given, want, case):
    # The paper's own inequality was not seen; the closed band is that of a published recipe.
    assert kept_groups("online_difficulty_filter", {}, given["groups"]) == want
    assert kept_groups("threshold_band", {"low": 0.2, "high": 0.8}, given["groups"]) == ["k2", "k3"]


def gfpo(given, want, case):
    lengths = torch.tensor(given["lengths"])
    batch = one_group(given["rewards"], response_mask=(torch.arange(int(lengths.max())) < lengths[:, None]).long())
    decision = decided("selector", "gfpo", {"k": given["k"], "metric": "short"}, batch)
    assert decision.keep.nonzero().flatten().tolist() == want["kept"]
    # An epsilon of 1e-6 beside the deviation.
    close(decision.advantages, want["advantages"], atol=1e-5)


def gfpo_adaptive(given, want, case):
    buckets = given.get("k_by_bucket", {"very_hard": 8, "hard": 8, "medium": 6, "easy": 4})
    seen = exact([*given["history"], given["group_mean"]])
    ready = {"ready_after": given["ready_after"]} if "ready_after" in given else {}
    k = subsets.k_of_difficulty(seen[-1:], seen, list(buckets.values()), **ready)
    assert int(k) == want
    rule = GFPO(k_by_difficulty=list(buckets.values()), metric="short")
    rule.load_state_dict({"means": exact(given["history"])})
    mean = given["group_mean"]
    batch = one_group([mean] * 16, num_tokens=torch.arange(1, 17))
    assert len(rule.act(torch.zeros(16), batch)) == want


def pods(given, want, case):
    rewards, n = given["rewards"], given["n"]
    decision = decided("selector", "max_variance", {"keep_fraction": n / len(rewards)}, one_group(rewards))
    chosen = np.array(rewards, dtype=float)[decision.keep.numpy()]
    assert np.var(chosen) == pytest.approx(want["variance"], abs=1e-12)
    assert sorted(chosen) in want["optimal_reward_multisets"]
    # As the paper says: normalised within the subset, sample deviation plus 1e-4.
    close(decision.advantages[decision.keep], (chosen - chosen.mean()) / (chosen.std(ddof=1) + 1e-4), atol=1e-6)


def greso(given, want, case):
    if "trace" not in given:
        assert visits.adjusted(given["p_low"], 1.0, 0.0) == want["down"]
        assert visits.adjusted(given["p_high"], 0.0, 1.0) == want["up"]
        return
    rewards = {"easy": [1.0, 1.0], "hard": [0.0, 0.0], "mixed": [0.0, 1.0]}
    for explore, expected in ((1e-9, want["paper"]), (0.01, want["official_with_1pct_floor"])):
        scorer = build("scorer", "greso", explore=explore)
        for kind in given["trace"]:
            scorer.observe(Visits.of(torch.tensor([7, 7]), torch.tensor(rewards[kind])))
            scorer.p_easy, scorer.p_hard = given["p_easy"], given["p_hard"]
        close(1 - scorer.score({"prompt_id": [7]}), [max(expected.values())], atol=1e-8)


def high_entropy_tokens(given, want, case):
    batch = masked(given["mask"], entropies=given["entropy"])
    keep = decided("selector", "high_entropy_tokens", {"fraction": given["keep"]}, batch).keep
    assert keep.long().tolist() == want


def topk_advantage(given, want, case):
    batch = {"advantages": exact(given["advantages"])}
    assert kept("topk_fraction", {"fraction": given["k"] / len(given["advantages"])}, batch) == want


def cppo(given, want, case):
    batch = {"advantages": exact(given["advantages"]), "uid": [7] * len(given["advantages"])}
    for within in ("batch", "group"):
        assert kept("cppo", {"pruning_rate": given["pruning_rate"], "within": within}, batch) == want


def selective_backprop(given, want, case):
    if "points" in given:
        schedule = {key: given[key] for key in ("start", "end", "interrupt")}
        rule = build("selector", "selective_backprop", **schedule)
        for (progress, batch), acts in zip(given["points"], want, strict=True):
            drops = len(rule.act(torch.arange(4.0), {}, step_id=batch, progress=progress)) < 4
            assert drops is acts
        return
    n, keep = given["n"], given["keep"]
    close(drawing.rank_power(n, keep), want["prob_by_loss_rank_ascending"])
    rule = build("selector", "selective_backprop", keep=keep, start=0.0, end=1.0, interrupt=0)
    assert len(rule.act(torch.rand(n), {})) == want["n_select"]


def dots(given, want, case):
    close(drawing.nearness(exact(given["pred"]), given["alpha"], given["tau"]), want)


def speed(given, want, case):
    scorer = SPEED(num_screening=given["n_init"])
    pipeline = Pipeline(scorer, scorer.default_selector())
    batch = flat(given["groups"])
    keep = pipeline.decide(batch | {"response_mask": torch.ones(len(batch["uid"]), 1)}).keep
    assert sorted({uid for uid, k in zip(batch["uid"], keep) if k}) == want


def limr(given, want, case):
    curves = exact(list(given["samples"].values()))
    scores = scoring.trajectory_alignment(curves, exact(given["baseline"]))
    close(scores, list(want.values()))
    assert kept("limr", {}, {"limr_score": scores}) == [i for i, score in enumerate(want.values()) if score > 0.6]


def pcl(given, want, case):
    values = exact(given["values"])
    assert visits_nearest(values, given["tau"], given["m"]) == want
    fraction = given["m"] / len(values)
    scorer = {"name": "metadata", "params": {"column": "values"}}
    assert kept("nearest", {"target": given["tau"], "fraction": fraction}, {"values": values}, scorer) == want


def visits_nearest(scores: torch.Tensor, target: float, num: int) -> list[int]:
    return build("selector", "nearest", target=target).act(scores, {}, num=num)


def mopps(given, want, case):
    if "sampled" in given:
        assert visits_nearest(exact(given["sampled"]), given["target"], given["B"]) == want
        return
    counts = (exact(given[name]) for name in ("alpha", "beta", "successes", "n"))
    close(visits.beta_update(*counts, decay=given["lam"], prior=given["prior"]), want)


def cures(given, want, case):
    solved, num = torch.tensor(given["accepted"]), torch.tensor(given["total"])
    rates = drawing.solve_chance(solved, num)
    close(rates, want["posterior_mean"])
    close(drawing.uncertain_first(rates, (solved + 1) / 0.01), want["probs"])


def vcrl(given, want, case):
    size = given["G"]
    group = torch.arange(size + 1).repeat_interleave(size)
    rewards = (torch.arange(size).repeat(size + 1) < exact(given["k"])[group]).double()
    close(scoring.reward_variance(rewards, group, size + 1)[::size], want)
    groups = {f"k{k}": [1.0] * k + [0.0] * (size - k) for k in given["k"]}
    assert kept_groups("vcrl", {"kappa": 0.75}, groups) == [f"k{k}" for k, p in zip(given["k"], want) if p >= 0.75]


def per(given, want, case):
    errors = exact(given["td"])
    if "beta" not in given:
        close(drawing.prioritized(errors, given["alpha"], by="rank"), want)
        return
    chances = drawing.prioritized(errors, given["alpha"], eps=given["eps"])
    close(chances, want["P"])
    close(drawing.priority_correction(chances, given["beta"]), want["is_weights"])


def rlep(given, want, case):
    rewards = exact(given["fresh"] + given["replayed"])
    close(grpo_advantages(rewards, torch.zeros(len(rewards)).long(), eps=given["eps"]), want)

    def group(outcomes: list[float]) -> RolloutBatch:
        fields = {"response_mask": torch.ones(len(outcomes), 1), "advantages": torch.zeros(len(outcomes))}
        return RolloutBatch(flat({"q": outcomes}) | fields)

    pool = ReplayPool()
    pool.add(solved(group(given["replayed"]), Layout(), 0.5))
    batch, num = with_replayed(group(given["fresh"]), pool, 2, Layout(), "grpo", None, 0)
    close(batch["advantages"], want, atol=1e-6)
    assert num == 2


# -- reweight ----------------------------------------------------------------------------------------------------------


def advantage_reweighting(given, want, case):
    batch = {"old_log_probs": exact([given["logprobs"]]), "response_mask": torch.ones(1, 3)}
    close(weights("advantage_reweight", {"alpha": given["alpha"]}, batch), [want], atol=1e-6)
    scaled = weights("advantage_reweight", {"alpha": given["alpha"], "normalize": "tokens"}, batch)
    close(scaled, [np.array(want) / np.mean(want)], atol=1e-6)


def lopti(given, want, case):
    batch = masked([given["mask"]], old_log_probs=np.log([given["probs"]]))
    for step, (part, name) in enumerate((("low", "first_low"), ("high", "second_high"))):
        rule = {"part": part, "threshold": given["eta"]}
        assert decided("selector", "lopti", rule, batch).keep.long().tolist() == [want[name]]
        block = {"mechanism": "select", "actuator": {"name": "lopti", "params": {"threshold": given["eta"]}}}
        assert Pipeline.from_config(block).decide(batch, step_id=step).keep.long().tolist() == [want[name]]


def pf_ppo(given, want, case):
    got = weights("pf_ppo", {"mode": given["mode"]}, one_group(given["rewards"]))
    close(got[:, 0] / len(want), want, atol=1e-7)


def awr(given, want, case):
    rule = {"temperature": given["temp"], "clip": given["clip"]}
    close(weights("awr", rule, {"advantages": exact(given["adv"])})[:, 0], want, atol=1e-6)


def rwr(given, want, case):
    close(weights("rwr", {"beta": given["beta"]}, one_group(given["rewards"]))[:, 0], want, atol=1e-6)


def grpo_lead(given, want, case):
    if "rho" in given:
        sizes = build("reweighter", "grpo_lead").act(exact(given["rho"]), {"advantages": torch.ones(len(want))})
        close(sizes, want, atol=1e-6)
        return
    batch = one_group(given["rewards"])
    advantages = grpo_advantages(batch["rm_scores"], torch.zeros(len(batch["uid"])).long())
    got = weights("grpo_lead", {}, batch | {"advantages": advantages})[:, 0]
    close(got, want["weights"], atol=1e-6)
    close(got * advantages, want["advantages"], atol=1e-5)


def odsw(given, want, case):
    rule = build("reweighter", "odsw", stage=given["stage"], all_failed=given["all_false_coff"])
    close(rule.act(exact(given["acc"]), {}), want, atol=1e-7)


def gtpo(given, want, case):
    batch = one_group(given["rewards"], entropies=exact(given["entropy"]), response_mask=torch.ones(4, 2))
    got = weights("gtpo", {"amount": given["alpha2"]}, batch)
    sign = exact([1 if r else -1 for r in given["rewards"]])
    close(sign[:, None] * got, want, atol=1e-6)


def grpo_s(given, want, case):
    batch = one_group(given["rewards"], entropies=exact(given["entropy"]), response_mask=torch.ones(4, 2))
    got = weights("grpo_s", {"amount": given["beta2"]}, batch)[:, 0]
    close(exact([1 if r else -1 for r in given["rewards"]]) * got, want, atol=1e-6)


def ratios(given: dict[str, Any]) -> dict[str, Any]:
    return masked(given["mask"], old_log_probs=given["log_ratio"], rollout_log_probs=np.zeros((2, 3)))


def level(name: str) -> dict[str, Any]:
    return {"name": "importance_ratio", "params": {"level": name}}


def tis(given, want, case):
    scorer = level("geometric" if "geometric" in case["name"] else "token")
    close(weights("tis", {"cap": given["cap"]}, ratios(given), scorer), want, atol=1e-6)


def mis(given, want, case):
    got = weights("mis", {"low": given["lo"], "high": given["hi"]}, ratios(given), level("sequence"))
    close(got, want, atol=1e-6)


def gspo(given, want, case):
    if "log_ratio" in given:
        scorer = build("scorer", "importance_ratio", level="geometric")
        close(scorer.score(ratios(given)), want, atol=1e-6)
        return
    # Inside of the band the loss has a gradient, beyond it none.
    for ratio in (want[0] - 1e-4, want[0] + 1e-5, want[1] - 1e-5, want[1] + 1e-4):
        log_probs = exact([[np.log(ratio)]]).requires_grad_()
        advantage = exact([1.0 if ratio > 1 else -1.0])
        clips = {"clip_low": given["eps_low"], "clip_high": given["eps_high"]}
        policy_loss(log_probs, exact([[0.0]]), advantage, torch.ones(1, 1), **clips).loss.backward()
        assert bool(log_probs.grad.any()) is (want[0] < ratio < want[1])


def focal(given, want, case):
    rule = build("reweighter", "focal", gamma=given["gamma"], normalize="none")
    close(rule.act(exact(given["pass_rate"]), {}), want, atol=1e-7)


def normalise(given, want, case):
    mask, by_sample = torch.tensor(given["mask"]), exact(given["w_per_sample"])
    close(weighting.mean_one(by_sample, mask.sum(-1))[:, None] * mask, want)
    close(weighting.mean_one(by_sample[:, None].expand(2, 9), mask), want)
    batch = {"advantages": exact([-0.5, 1.5]), "response_mask": mask}
    close(weights("abs_advantage_power", {"alpha": 1.0}, batch), want, atol=1e-6)


# -- mix ---------------------------------------------------------------------------------------------------------------


def e2h(given, want, case):
    settings = {"exponent": given["mu_exp"], "sigma": given["sigma"], "floor": given["p_min"]}
    close(mixing.e2h_gaussian(given["t"] / given["T"], given["K"], **settings), want)


def adarft(given, want, case):
    if "difficulties" in given:
        assert visits_nearest(exact(given["difficulties"]), given["target"], given["batch"]) == want
        return
    steps = {key: given[key] for key in ("eta", "alpha", "beta")}
    target = mixing.adarft_target(given["target"], given["mean_reward"], **steps)
    assert min(max(target, given["d_min"]), given["d_max"]) == pytest.approx(want)


def dump(given, want, case):
    bound = mixing.upper_confidence_bound(exact(given["abs_adv_mean"]), torch.tensor(given["counts"]))
    close(bound, want["ucb"])
    close(proportions.boltzmann(bound, given["tau"]), want["probs"])


def dads(given, want, case):
    if "buffer_oldest_first" in given:
        # The authors' code, which is not the paper.
        got = other_mixing.harmonic_deficit(given["buffer_oldest_first"], given["tau"])
        assert got == pytest.approx(want)
        return
    ema = given["alpha"] * exact(given["ema"]) + (1 - given["alpha"]) * exact(given["batch_mean"])
    close(ema, want["ema"])
    close(mixing.dads(ema, given["tau"], given["eps"]), want["weights"])


def tscl(given, want, case):
    if "timesteps" in given:
        assert mixing.slope(torch.tensor(given["timesteps"]), exact(given["scores"])) == pytest.approx(want)
    elif "abs_slope" in given:
        close(other_mixing.epsilon_greedy(exact(given["abs_slope"]), given["epsilon"]), want)
    else:
        now = exact([NAN if r is None else r for r in given["reward"]])
        close(other_mixing.tscl_online(exact(given["Q"]), now - exact(given["prev"]), given["lr"]), want)


def odm(given, want, case):
    if "reward" not in given:
        close([mixing.odm_exploration(given["K"], t) for t in given["t"]], want)
        return
    # The vector's reward of 3 is a loss of at most 10.
    signal, count = exact([given["reward"] / 10, NAN]), torch.tensor([1, 0])
    estimates = exact(given["R"]) + mixing.importance_estimate(signal, count, exact(given["probs"]))
    close(estimates, want["R"])
    assert mixing.odm_exploration(2, given["t"]) == pytest.approx(want["eps"])
    close(mixing.odm(estimates, want["eps"], given["prev_eps"]), want["probs"])


def doremi(given, want, case):
    close(mixing.doremi(exact(given["p"]), exact(given["excess"]), given["eta"], given["c"]), want)


def plr(given, want, case):
    got = mixing.rank_prioritised(exact(given["scores"]), exact(given["staleness"]), given["beta"], given["rho"])
    # Where nothing is stale, the authors' code sums to 1 - rho.
    close(got, np.array(want) / sum(want))


def aioli(given, want, case):
    close(other_mixing.aioli(exact(given["w"]), exact(given["A"]), given["eta"]), want)


def ado(given, want, case):
    names = ("mu", "p_hist", "exponent", "loss", "irreducible", "n", "p_avg")
    p, instant = other_mixing.ado(*(exact(given[name]) for name in names))
    close(instant, want["instant"])
    close(p, want["p"])
    close(exact(given["p_avg"]) + (instant - exact(given["p_avg"])) / (given["t"] + 1), want["p_avg"])


def reward_gap(given, want, case):
    close(mixing.reward_gap(exact(given["mean_reward"]), given["temperature"]), want)


def floor(given, want, case):
    p, least = exact(given["p"]), given["floor"]
    if case["name"] == "floor_naive_wrong":
        # What comes of a floor that is lost in renormalisation: no method here gives it.
        for method in ("mixture", "water_filling"):
            got = proportions.floored(p, least, method)
            assert got.min() >= least - 1e-12 > min(want)
        return
    close(proportions.floored(p, least, "mixture" if "mixture" in case["name"] else "water_filling"), want)


def allocate(given, want, case):
    assert proportions.apportioned(exact(given["p"]), given["n"]).tolist() == want


@pytest.mark.parametrize("case", CASES, ids=[f"{case['name']}__{case['provenance']}" for case in CASES])
@pytest.mark.filterwarnings("ignore:k is")
def test_vector(case):
    globals()[case["algorithm"]](case["inputs"], case["expected"], case)


def test_every_vector_is_there():
    assert len(CASES) == len({case["name"] for case in CASES}) == 80
