"""Laws that every mixer keeps, and what each does in the situations that it was made for."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dataflex import Mixer, Mixture, build, components
from lightning_dataflex.core.domains import DomainStats, DomainSums
from tests import laws

NAN = float("nan")
DOMAINS = ["a", "b", "c"]
PARAMS = {"adarft": {"difficulty": {"a": 1.0, "b": 2.0, "c": 4.0}}, "static": {"proportions": {"a": 2, "b": 1, "c": 1}}}
LEAST = {"reward_gap": 0.05, "dump_ucb": 0.05, "tscl": 0.05, "vcrl": 0.05, "adarft": 0.05, "e2h": 2 / 12}
LEAST |= {"exp3": 0.1 / 3, "doremi": 0.001 / 3}
NAMES = list(components("mixer"))
SIGNALS = {"static": "reward", "e2h": "reward"}
STEPS = st.lists(st.lists(st.one_of(st.just(NAN), st.floats(0, 1)), min_size=3, max_size=3), max_size=6)


def mixer_of(name: str, domains=DOMAINS, **params) -> Mixer:
    mixer = build("mixer", name, **PARAMS.get(name, {}) | params)
    mixer.bind(list(domains))
    return mixer


def sums_of(means, count=8.0) -> DomainSums:
    means = torch.tensor(means, dtype=torch.float64)
    counts = torch.where(means.isnan(), 0.0, count)
    total = torch.nan_to_num(means) * counts
    return DomainSums(counts, total, torch.nan_to_num(means).square() * counts)


def after(mixer: Mixer, steps, start=0, stats=None) -> list[torch.Tensor]:
    """The proportions after each step."""
    stats = stats or DomainStats(mixer.domains, mixer.window)
    found, shares = [], torch.full((len(mixer.domains),), 1 / len(mixer.domains), dtype=torch.float64)
    for i, means in enumerate(steps, start):
        stats.add(i, sums_of(means))
        mixer.observe(sums_of(means), shares)
        shares = mixer.proportions(stats, step_id=i + 1, progress=min((i + 1) / 10, 1.0))
        found.append(shares)
    return found


@pytest.mark.parametrize("name", NAMES)
@given(steps=STEPS)
@settings(max_examples=25, deadline=None)
@pytest.mark.filterwarnings("ignore")
def test_law_7_proportions_sum_to_one_and_keep_the_floor(name, steps):
    for shares in after(mixer_of(name), steps):
        assert shares.dtype == torch.float64
        assert abs(float(shares.sum()) - 1) < 1e-12
        assert (shares >= LEAST.get(name, 0.0) - 1e-12).all()
        # NumPy refuses what does not sum to 1 to its own tolerance (R044).
        np.random.default_rng(0).choice(3, p=shares.tolist())


@pytest.mark.parametrize("name", [name for name in NAMES if name != "e2h"])
@given(steps=STEPS)
@settings(max_examples=15, deadline=None)
def test_law_4_domains_may_come_in_any_order(name, steps):
    order = [2, 0, 1]
    here = after(mixer_of(name), steps)
    there = after(mixer_of(name, [DOMAINS[i] for i in order]), [[means[i] for i in order] for means in steps])
    for one, other in zip(here, there):
        torch.testing.assert_close(one[order], other, atol=1e-9, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_law_8_a_state_goes_on_where_it_was_taken(name):
    draw = np.random.default_rng(0)
    steps = draw.uniform(size=(9, 3)).tolist()
    whole = after(mixer_of(name), steps)
    first, second = mixer_of(name), mixer_of(name)
    before, behind = DomainStats(DOMAINS, first.window), DomainStats(DOMAINS, first.window)
    after(first, steps[:4], stats=before)
    behind.load_state_dict(before.state_dict())
    second.load_state_dict(first.state_dict())
    stats = behind
    shares = whole[3]
    for i, means in enumerate(steps[4:], 4):
        stats.add(i, sums_of(means))
        second.observe(sums_of(means), shares)
        shares = second.proportions(stats, step_id=i + 1, progress=min((i + 1) / 10, 1.0))
        torch.testing.assert_close(shares, whole[i], atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_each_has_its_papers_signal_by_default_and_refuses_others(name):
    cls = components("mixer")[name]
    block = {"mechanism": "mix", "domains": DOMAINS, "actuator": {"name": name, "params": PARAMS.get(name, {})}}
    mixture = Mixture.from_config(block)
    assert not cls.signals or mixture.scorer.signal in cls.signals
    for scorer, scorer_cls in components("scorer").items():
        spec = {"name": scorer, "params": laws.PARAMS.get(scorer, {})}
        if scorer_cls.timing == "pre_rollout":
            with pytest.raises(ValueError, match=f"{scorer} scores prompts before their rollout, but mech"):
                Mixture.from_config(block | {"scorer": spec})
        elif cls.signals and scorer_cls.signal and scorer_cls.signal not in cls.signals:
            with pytest.raises(ValueError, match=f"{name} follows the .* of a domain, but {scorer} measures"):
                Mixture.from_config(block | {"scorer": spec})
        else:
            Mixture.from_config(block | {"scorer": spec})


SOLVED_LEARNING_IMPOSSIBLE = {
    "reward": [[1.0, min(0.05 * i, 1.0), 0.0] for i in range(12)],
    "advantage": [[0.02, 0.7, 0.0]] * 12,
    "variance": [[0.05, 0.9, 0.0]] * 12,
}


@pytest.mark.parametrize("name", ["dump_ucb", "tscl", "vcrl", "plr", "exp3", "odm"])
def test_what_is_being_learned_gets_most(name):
    signal = components("mixer")[name].signals[0]
    shares = after(mixer_of(name), SOLVED_LEARNING_IMPOSSIBLE[signal])[-1]
    assert shares.argmax() == 1
    assert shares[1] > 1 / 3 + 1e-3


@pytest.mark.parametrize("name", ["reward_gap", "dads", "doremi"])
def test_rules_on_the_deficit_favour_what_is_impossible(name):
    shares = after(mixer_of(name), SOLVED_LEARNING_IMPOSSIBLE["reward"])[-1]
    assert shares[2] > shares[1] > shares[0]


def test_tscl_sees_forgetting_unless_signed():
    steps = [[0.9 - 0.05 * i, 0.5, 0.5] for i in range(10)]
    assert after(mixer_of("tscl"), steps)[-1].argmax() == 0
    assert after(mixer_of("tscl", signed=True), steps)[-1].argmin() == 0


def test_adarft_rises_with_the_reward():
    mixer = mixer_of("adarft")
    assert after(mixer, [[1.0, 1.0, 1.0]] * 8)[-1].argmax() == 2
    assert mixer.target == 4.0
    assert after(mixer, [[0.0, 0.0, 0.0]] * 8)[-1].argmax() == 0


def test_doremi_may_use_the_average():
    steps = [[0.9, 0.5, 0.1]] * 4
    last, mean = after(mixer_of("doremi"), steps), after(mixer_of("doremi", averaged=True), steps)
    torch.testing.assert_close(mean[-1], torch.stack(last).mean(0))


def test_dads_is_an_average_of_its_rewards():
    mixer = mixer_of("dads")
    after(mixer, [[0.2, 0.8, 0.5], [0.4, NAN, 0.9]])
    assert mixer.ema == pytest.approx({"a": 0.3, "b": 0.8, "c": 0.7})
    with pytest.warns(UserWarning, match=r"DADS takes rewards of 0 to 1, but a domain's mean is -1"):
        mixer.observe(sums_of([-1.0, 0.5, 0.5]), torch.ones(3) / 3)


def test_odm_explores_by_exactly_its_share():
    shares = after(mixer_of("odm"), [[1.0, 0.0, 0.0]] * 30)
    for turn, share in enumerate(shares, 1):
        least = min(1 / 3, np.sqrt(np.log(3) / (3 * turn)))
        assert share.min() >= least - 1e-12
    assert shares[-1].argmax() == 0


def test_R043_a_domain_of_rewards_of_zero_keeps_its_floor():
    mixer = mixer_of("reward_gap", ["a", "b"])
    shares = after(mixer, [[0.0, 10.0]])[-1]
    torch.testing.assert_close(shares, torch.tensor([0.95, 0.05], dtype=torch.float64), atol=1e-12, rtol=0)


def test_R059_a_window_holds_so_many_steps_and_no_more():
    stats = DomainStats(["a", "b"], 50)
    for step in range(1000):
        stats.add(step, sums_of([step / 1000, NAN if step % 2 else 0.5]))
    assert [len(history) for history in stats.history.values()] == [50, 50]
    assert float(stats.mean[0]) == pytest.approx(np.mean(np.arange(950, 1000) / 1000))
    assert stats.slope.tolist() == pytest.approx([0.001, 0.0], abs=1e-12)
    assert stats.count.tolist() == [8000.0, 4000.0]
    assert stats.staleness.tolist() == [0.0, 1.0]


def test_statistics_are_those_of_the_samples():
    draw = np.random.default_rng(0)
    stats, seen = DomainStats(["a", "b"], 3), []
    for step in range(4):
        scores, domain = draw.normal(size=10), draw.integers(0, 2, 10)
        scores[0] = NAN
        seen.append((scores, domain))
        halves = [DomainSums.of(torch.tensor(scores[s]), torch.tensor(domain[s]), 2) for s in (slice(4), slice(4, 10))]
        stats.add(step, halves[0])
        stats.add(step, halves[1])
    for i in range(2):
        rows = np.concatenate([scores[(domain == i) & ~np.isnan(scores)] for scores, domain in seen[1:]])
        assert float(stats.mean[i]) == pytest.approx(rows.mean())
        assert float(stats.variance[i]) == pytest.approx(rows.var())


def named(name: str, **params) -> dict:
    return {"name": name, "params": params}


def static(proportions) -> dict:
    return named("static", proportions=proportions)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"domains": ["a"]}, "A mixture needs at least two"),
        ({"domains": {"a": -1, "b": 1}}, r"domains is \[-1, 1\]. Give numbers >= 0"),
        ({"domains": {"a": 0, "b": 0}}, "not all 0"),
        ({"domains": {"a": "x", "b": 0}}, r"domains is \['x', 0\]"),
        ({"domains": "ab"}, "Give a list of names"),
        (
            {"domains": DOMAINS, "actuator": {"name": "e2h", "params": {"order": ["a", "a", "b", "c"]}}},
            "a domain twice",
        ),
        ({"domains": DOMAINS, "actuator": {"name": "e2h", "params": {"total_steps": 0}}}, "total_steps is 0"),
        ({"domains": DOMAINS, "actuator": {"name": "doremi", "params": {"target": NAN}}}, "target is nan"),
        (
            {"domains": ["a", "b"], "actuator": {"name": "static", "params": {"proportions": {"a": 1, "x": 1}}}},
            "x unknown",
        ),
        ({"domains": ["a", "b"], "actuator": {"name": "static", "params": {"proportions": [1.0]}}}, "1 numbers for 2"),
        ({"actuator": {"name": "reward_gap", "params": {"floor": 0.4}}, "domains": DOMAINS}, "floor is 0.4 for 3 dom"),
        ({"actuator": {"name": "reward_gap", "params": {"flor": 0.4}}}, "Did you mean 'floor'"),
        ({"scope": "rank"}, "all ranks draw by the same proportions"),
        ({"drop": "weight"}, "drop is 'weight', which mechanism: mix does not read"),
        ({"actuator": {"class_path": "tests.test_mixers.Tutorial"}}, r"Name them in the block: domains: \[...\]"),
        (
            {"mechanism": "select", "scorer": "group_solve_rate", "actuator": "threshold_band", "domains": ["a"]},
            "only mech",
        ),
        (
            {"domains": ["a", "b", "c"], "actuator": {"name": "adarft", "params": {"difficulty": {"a": 1.0}}}},
            "lacks b, c",
        ),
    ],
)
def test_bad_blocks_are_refused(block, message):
    with pytest.raises(ValueError, match=message):
        Mixture.from_config({"mechanism": "mix", "actuator": "reward_gap", **block})


def batch(domain, rewards) -> dict:
    return {"domain": domain, "rm_scores": torch.tensor(rewards), "response_mask": torch.ones(len(rewards), 2)}


def test_bad_batches_are_refused():
    mixture = Mixture.from_config({"mechanism": "mix", "actuator": "reward_gap", "domains": ["a", "b"]})
    with pytest.raises(ValueError, match=r"samples of the domains x, which are none of a, b"):
        mixture.observe(batch(["a", "x"], [1.0, 0.0]))
    with pytest.raises(ValueError, match="no field 'domain'"):
        mixture.observe({"rm_scores": torch.ones(2), "response_mask": torch.ones(2, 1)})


def test_domains_that_are_absent_are_absent_and_nan_is_no_data():
    mixture = Mixture.from_config({"mechanism": "mix", "actuator": "reward_gap", "domains": ["a", "b", "c"]})
    mixture.observe(batch(["a", "a", "b"], [1.0, 0.0, NAN]))
    mixture.end_step(0)
    assert mixture.stats.scores() == {"a": 0.5}
    assert list(mixture.metrics) == ["prop_a", "prop_b", "prop_c", "score_a", "score_b", "score_c", "n_nan"]
    assert mixture.metrics["n_nan"] == 1
    assert np.isnan(mixture.metrics["score_c"])


def test_a_score_of_tokens_is_a_sample_by_its_mean():
    block = {"mechanism": "mix", "scorer": "token_prob", "actuator": Given([0.5, 0.5]), "domains": ["a", "b"]}
    probs, mask = torch.tensor([[0.1, 0.3, 0.8], [0.5, NAN, NAN]]), torch.tensor([[1, 1, 1], [1, 0, 0]])
    mixture = Mixture.from_config(block)
    mixture.observe({"domain": ["a", "b"], "old_log_probs": probs.log(), "response_mask": mask})
    mixture.end_step(0)
    assert mixture.stats.mean.tolist() == pytest.approx([0.4, 0.5])


def test_warm_up_and_update_steps():
    block = {
        "mechanism": "mix",
        "actuator": "reward_gap",
        "domains": {"a": 3, "b": 1},
        "warmup_step": 3,
        "update_step": 2,
    }
    mixture, seen = Mixture.from_config(block), []
    for step in range(8):
        seen.append(mixture.proportions["a"])
        mixture.observe(batch(["a", "b"], [step / 10, 1.0]), step)
        mixture.end_step(step)
    assert seen[:3] == [0.75] * 3
    changes = [step for step in range(1, 8) if seen[step] != seen[step - 1]]
    assert changes == [3, 5, 7]


def test_R055_a_saved_mixture_is_matched_by_name():
    block = {"mechanism": "mix", "actuator": "reward_gap"}
    saved = Mixture.from_config(block | {"domains": ["a", "b"]})
    saved.observe(batch(["a", "b"], [0.2, 0.8]))
    saved.end_step(0)
    loaded = Mixture.from_config(block | {"domains": ["b", "c"]})
    with pytest.warns(UserWarning, match=r"What it knows of a is dropped; c start without data"):
        loaded.load_state_dict(saved.state_dict())
    assert loaded.stats.scores() == pytest.approx({"b": 0.8})
    assert sum(loaded.proportions.values()) == pytest.approx(1)


class Tutorial(Mixer):
    """As a component for DataFlex-RL is written."""

    def __init__(self, domains, temperature=1.0, floor=0.05, **kw):
        super().__init__(**kw)
        self.domains = list(domains)
        self.temperature, self.floor = temperature, floor

    def act(self, scores, batch, **ctx) -> np.ndarray:
        means = np.array([scores.get(d, 0.0) for d in self.domains])
        z = (means.max() - means) / max(self.temperature, 1e-6)
        p = np.exp(z - z.max())
        p = np.maximum(p / p.sum(), self.floor)
        return p / p.sum()


def test_a_mixer_of_the_ancestors_tutorial_runs():
    block = {"mechanism": "mix", "domains": ["a", "b"], "actuator": {"class_path": "tests.test_mixers.Tutorial"}}
    mixture = Mixture.from_config(block)
    mixture.observe(batch(["a", "b"], [1.0, 0.0]))
    mixture.end_step(0)
    assert mixture.proportions["b"] == pytest.approx(1 / (1 + np.exp(-1)))
    mixture = Mixture(build("scorer", "reward_difficulty"), Tutorial(["b", "a"]))
    mixture.bind(["a", "b"])
    assert mixture.domains == ["b", "a"]


def test_a_field_of_any_name_is_the_users_own():
    block = {"mechanism": "mix", "actuator": "reward_gap", "scorer": "group_solve_rate", "domains": ["a", "b"]}
    mixture = Mixture.from_config(block)
    more = {"uid": [0, 0, 1, 1], "domain_index": torch.tensor([1, 1, 0, 0]), "domain index": torch.tensor([1, 1, 0, 0])}
    mixture.observe(batch(["a", "a", "b", "b"], [1.0, 1.0, 0.0, 0.0]) | more)
    mixture.end_step(0)
    assert mixture.stats.scores() == {"a": 1.0, "b": 0.0}


def test_rules_without_need_of_data_act_before_the_first_step():
    mixture = Mixture.from_config({"mechanism": "mix", "domains": ["a", "b"], "actuator": static({"a": 3, "b": 1})})
    assert mixture.proportions == {"a": 0.75, "b": 0.25}


def test_the_memory_of_another_mixer_is_not_read():
    saved = Mixture.from_config({"mechanism": "mix", "domains": ["a", "b"], "actuator": "exp3"})
    loaded = Mixture.from_config({"mechanism": "mix", "domains": ["a", "b"], "actuator": "dads"})
    with pytest.warns(UserWarning, match="The checkpoint has the memory of exp3. dads starts without one"):
        loaded.load_state_dict(saved.state_dict())


def test_dads_of_a_small_temperature_is_the_limit():
    shares = after(mixer_of("dads", temperature=1e-3), [[0.0, 0.5, 1.0]])[-1]
    torch.testing.assert_close(shares, torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64))


class Given(Mixer):
    def __init__(self, shares) -> None:
        self.shares = shares

    def act(self, scores, batch, **ctx):
        return self.shares


def test_before_the_first_step_no_domain_is_stale():
    assert DomainStats(["a", "b"]).staleness.tolist() == [0, 0]


def test_sums_of_two_batches_are_those_of_both():
    scores, domain = torch.tensor([1.0, 0.25, NAN, 0.5, 2.0]), torch.tensor([0, 0, 1, 1, 0])
    parts = [DomainSums.of(scores[rows], domain[rows], 2) for rows in (slice(2), slice(2, None))]
    both, whole = parts[0] + parts[1], DomainSums.of(scores, domain, 2)
    for name in ("count", "total", "squares"):
        assert getattr(both, name).tolist() == getattr(whole, name).tolist()


@pytest.mark.parametrize(
    "shares", [[0.7, 0.7], [0.5, 0.5, 0.0], [1.5, -0.5], [NAN, 1.0], [1.0], {"a": 1.0, "c": 0.0}, {"a": 0.5}, "half"]
)
def test_what_is_no_mixture_is_refused(shares):
    mixer = Given(shares)
    mixer.bind(["a", "b"])
    with pytest.raises(ValueError, match=f"Given.act returned {re.escape(repr(shares))}( for 2 domains)?. Return"):
        mixer.proportions(DomainStats(["a", "b"]))


@pytest.mark.parametrize("shares", [{"a": 1.0}, [1.0, -1e-12], torch.tensor([1.000001, 0.0]), np.array([1, 0])])
def test_a_domain_that_is_not_named_gets_nothing_and_rounding_is_forgiven(shares):
    mixer = Given(shares)
    mixer.bind(["a", "b"])
    assert mixer.proportions(DomainStats(["a", "b"])).tolist() == [1, 0]


def test_a_warning_of_many_domains_lists_the_first() -> None:
    said = " and 246 others for the way from easy to hard."
    with pytest.warns(UserWarning, match=f"^e2h takes d0, d1, .*, d9{said}"):
        build("mixer", "e2h", total_steps=10).bind([f"d{i}" for i in range(256)])


@pytest.mark.parametrize("change", ["unknown", "twice", "missing"])
def test_an_error_of_many_domains_is_no_list_of_all(change: str) -> None:
    domains = [f"d{i}" for i in range(256)]
    order = {"unknown": [f"e{i}" for i in range(256)], "twice": domains * 2, "missing": ["d0"]}[change]
    with pytest.raises(ValueError, match=r"^order ") as caught:
        build("mixer", "e2h", order=order).bind(domains)
    assert len(str(caught.value)) < 400
