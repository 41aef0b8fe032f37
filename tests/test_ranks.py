"""One global batch: real gloo processes decide what one process decides, however the samples are spread."""

from __future__ import annotations

import functools
import itertools
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from lightning_dataflex import Decision, Mixture, Pipeline, Scorer, Selector, build, components
from lightning_dataflex.functional.loss import loss_denominator
from lightning_dataflex.functional.selection import top_fraction
from lightning_dataflex.sync import exchanged
from tests.laws import FOR_ANY, PARAMS, PER_TOKEN, pairs, scorer_of
from tests.ranks import processes, spread, taken

NAN = float("nan")
WIDE = (*PER_TOKEN, "response_mask")
NUM_SAMPLES = 14


class PlainRate(Scorer):
    """A group mean in plain single-process code."""

    requires = ("rm_scores", "response_mask", "uid")
    needs_groups = True

    def score(self, batch: Any, step_id: int = 0, **ctx: Any) -> torch.Tensor:
        rewards = (batch.batch["rm_scores"] * batch.batch["response_mask"]).sum(-1)
        uid = np.asarray(batch.non_tensor_batch["uid"])
        out = torch.zeros_like(rewards)
        for group in np.unique(uid):
            rows = np.where(uid == group)[0]
            out[rows] = rewards[rows].mean()
        return out


class PlainTop(Selector):
    """Reads a field of strings."""

    requires = ("domain",)

    def act(self, scores: torch.Tensor, batch: Any, **ctx: Any) -> list[int]:
        math = torch.tensor([domain == "math" for domain in batch["domain"]])
        return top_fraction(torch.where(math, scores, -1.0), 0.5).nonzero().flatten().tolist()


class PlainAdvantage(Selector):
    """Reads a field of which the scorer beside it exchanges a number alone."""

    requires = ("advantages",)

    def act(self, scores: torch.Tensor, batch: Any, **ctx: Any) -> torch.Tensor:
        return batch.batch["advantages"].sum(-1) > 0


class PlainIds(Scorer):
    """Reads fields that are wider than the responses, of one and of two dimensions per sample."""

    requires = ("input_ids", "images", "response_mask")

    def score(self, batch: Any, step_id: int = 0, **ctx: Any) -> torch.Tensor:
        return batch["input_ids"].sum(-1) + batch["response_mask"].sum(-1) + batch["images"].sum((-1, -2))


class TopTokens(Selector):
    """The tokens in the upper half of all tokens."""

    granularities = ("token",)
    requires = ("response_mask",)

    def act(self, scores: torch.Tensor, batch: Any, **ctx: Any) -> torch.Tensor:
        mask = batch["response_mask"].bool()
        return (scores > scores[mask].median()) & mask if mask.any() else mask


class FromRate(type(build("scorer", "group_solve_rate"))):
    """Inherits the numbers of its base but reads something else."""

    requires = ("old_log_probs", "response_mask")
    needs_groups = False

    def score(self, batch: Any, step_id: int = 0, **ctx: Any) -> torch.Tensor:
        return batch.batch["old_log_probs"].sum(-1)


class FromToken(type(build("scorer", "advantage_magnitude"))):
    """Inherits from a row-wise scorer, but a sample's score depends on the others."""

    def score(self, batch: Any, step_id: int = 0, **ctx: Any) -> torch.Tensor:
        sizes = batch.batch["advantages"].abs().sum(-1)
        return sizes / sizes.sum()


def Lengths() -> Scorer:
    return build("scorer", "metadata", column="num_tokens")


ADVANTAGES = [
    {"scorer": "advantage", "selector": "topk_fraction"},
    {"scorer": {"name": "advantage_magnitude", "params": {"agg": "max"}}, "selector": "topk_fraction"},
]

OWN: dict[str, tuple[Any, Any, str]] = {
    "plain": (PlainRate, PlainTop, "select"),
    "plain actuator": ("advantage_magnitude", PlainAdvantage, "select"),
    "plain scorer": (PlainRate, ("gfpo", {"k": 1, "advantages": "group"}), "select"),
    "wide fields": (PlainIds, ("topk_fraction", {}), "select"),
    "tokens of all ranks": ("token_prob", TopTokens, "select"),
    "subclass": (FromRate, ("softmax", {}), "reweight"),
    "reward_difficulty-threshold_band": ("reward_difficulty", ("threshold_band", {}), "select"),
    "scaled by advantages": ("token_entropy", ("gtpo", {"normalize": "abs_advantage"}), "reweight"),
    "row-wise, scaled by advantages": (
        "token_prob",
        ("advantage_reweight", {"normalize": "abs_advantage"}),
        "reweight",
    ),
    "two meanings of one name": ("advantage_magnitude", ("all_of", {"selectors": ADVANTAGES}), "select"),
    "a column of our name": (Lengths, ("softmax", {"temperature": 100.0}), "reweight"),
    "no longer row-wise": (FromToken, ("per_advantage", {}), "reweight"),
}
BUILT_IN: dict[str, tuple[Any, Any, str]] = {
    parameter.id: (scorer, (actuator, PARAMS.get(actuator, {})), {"selector": "select", "reweighter": "reweight"}[kind])
    for parameter in pairs("selector", "reweighter")
    for scorer, kind, actuator in [parameter.values]
}
COMPONENTS = BUILT_IN | OWN


MIXER_PARAMS = {"adarft": {"difficulty": {"logic": 1.0, "math": 2.0}}}


def pipeline(name: str, **config: Any) -> Pipeline:
    scorer, actuator, mechanism = COMPONENTS[name]
    parts = {"scorer": scorer_of(scorer) if isinstance(scorer, str) else scorer()}
    parts["actuator"] = actuator() if isinstance(actuator, type) else {"name": actuator[0], "params": actuator[1]}
    return Pipeline.from_config({"mechanism": mechanism, **parts, **config})


def whole(seed: int = 0) -> dict[str, Any]:
    """Groups of unequal size, ragged lengths, one sample without a valid token and one without a reward."""
    draw = np.random.default_rng(seed)
    lengths = draw.integers(1, 7, NUM_SAMPLES)
    lengths[draw.integers(NUM_SAMPLES)] = 0
    mask = torch.tensor(np.arange(6) < lengths[:, None])
    rewards = draw.choice([0.0, 0.25, 1.0], NUM_SAMPLES)
    rewards[draw.integers(NUM_SAMPLES)] = NAN
    groups = draw.integers(0, 4, NUM_SAMPLES)

    def table(values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        return torch.where(mask, torch.tensor(values, dtype=dtype), NAN)

    return {
        "rm_scores": torch.tensor(rewards),
        "response_mask": mask.long(),
        "uid": [("prompt", int(g)) if g % 2 else f"prompt-{g}" for g in groups],
        "domain": ["math" if i % 3 else "logic" for i in groups],
        "advantages": table(draw.normal(size=mask.shape), torch.float32),
        "old_log_probs": table(np.log(draw.uniform(0.05, 1, mask.shape)), torch.float64),
        **{name: table(np.log(draw.uniform(0.05, 1, mask.shape)), torch.float32) for name in PER_TOKEN[3:]},
        "entropies": table(draw.uniform(0, 3, mask.shape), torch.bfloat16),
        "difficulty": draw.integers(0, 3, NUM_SAMPLES).tolist(),
        "num_tokens": torch.tensor(draw.integers(5, 500, NUM_SAMPLES)),
        "limr_score": draw.uniform(size=NUM_SAMPLES),
        "rollout_step": torch.tensor(-draw.integers(0, 5, NUM_SAMPLES)),
        "input_ids": torch.tensor(draw.integers(0, 9, (NUM_SAMPLES, 9))),
        "images": torch.tensor(draw.normal(size=(NUM_SAMPLES, 2, 3))),
    }


def told(decision: Decision) -> dict[str, Any]:
    return {name: value for name, value in vars(decision).items() if name != "summary"} | {"metrics": decision.metrics}


def decided(batch: dict[str, Any], scope: str = "global") -> dict[str, Any]:
    """The decision of every pair of components, and of nobody, on this rank's samples."""
    decisions = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in [name for name in COMPONENTS if not (scope == "rank" and name.startswith("ema"))]:
            decisions[name] = told(pipeline(name, scope=scope).decide(batch))
        for name in ("reward_difficulty-threshold_band", "group_solve_rate-threshold_band"):
            above = pipeline(name, scope=scope)
            above.actuator.low, above.actuator.high = 5.0, 6.0
            decisions[f"{name}, or all"] = told(above.decide(batch, keep_all_if_empty=True))
        decisions["all"] = told(above.keep_all(batch))
    return decisions


def decided_by_rank(batch: dict[str, Any]) -> dict[str, Any]:
    return decided(batch, "rank")


def spreads(world: int) -> st.SearchStrategy[list[list[int]]]:
    """Every sample on some rank, in some order; ranks may have none."""
    rows = st.permutations(range(NUM_SAMPLES))
    owners = st.lists(st.integers(0, world - 1), min_size=NUM_SAMPLES, max_size=NUM_SAMPLES)
    return st.builds(
        lambda order, owner: [[row for row, own in zip(order, owner) if own == rank] for rank in range(world)],
        rows,
        owners,
    )


def assert_same(got: dict[str, Any], want: dict[str, Any], rows: slice, name: str) -> None:
    width = got["weights"].shape[1]

    def here(value: torch.Tensor) -> torch.Tensor:
        return value[rows] if value.dim() == 1 else value[rows, :width]

    scores, expected = got["scores"].double(), here(want["scores"]).double()
    torch.testing.assert_close(scores, expected, atol=1e-6, rtol=1e-6, equal_nan=True, msg=name)
    assert torch.equal(got["keep"], here(want["keep"])), name
    torch.testing.assert_close(got["weights"], here(want["weights"]), atol=1e-6, rtol=0)
    assert (got["advantages"] is None) == (want["advantages"] is None), name
    if got["advantages"] is not None:
        expected = want["advantages"][rows]
        torch.testing.assert_close(got["advantages"], expected, atol=1e-6, rtol=0, check_dtype=False)
    assert (got["num_kept"], got["fell_back"]) == (want["num_kept"], want["fell_back"]), name
    assert list(got["metrics"]) == list(want["metrics"])
    for key, value in got["metrics"].items():
        assert float(value) == pytest.approx(float(want["metrics"][key]), abs=1e-6), (name, key)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("world", [2, 4])
@given(data=st.data(), seed=st.integers(0, 1000))
@settings(
    max_examples=4, deadline=None, phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck)
)
def test_law_1_decisions_are_those_of_one_process(world: int, data: Any, seed: int) -> None:
    rows_of = data.draw(spreads(world))
    assert_decided_alike(world, seed, rows_of)


@pytest.mark.parametrize("sizes", [[14, 0], [0, 14], [1, 13], [0, 5, 0, 9]], ids=str)
def test_law_1_with_ranks_that_have_few_samples_or_none(sizes: list[int]) -> None:
    ends = np.cumsum([0, *sizes])
    assert_decided_alike(len(sizes), 3, [list(range(a, b)) for a, b in itertools.pairwise(ends)])


def assert_decided_alike(world: int, seed: int, rows_of: list[list[int]]) -> None:
    batch = whole(seed)
    ranks = processes(world).run(decided, spread(batch, rows_of, WIDE))
    alone = decided(taken(batch, [row for rows in rows_of for row in rows]))
    start = 0
    for rows, decisions in zip(rows_of, ranks):
        for name, want in alone.items():
            assert_same(decisions[name], want, slice(start, start + len(rows)), name)
        start += len(rows)


def test_with_scope_rank_each_rank_decides_alone_and_the_log_counts_all() -> None:
    rows_of = [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9, 10, 11, 12, 13]]
    parts = spread(whole(5), rows_of, WIDE)
    ranks, alone = processes(2).run(decided_by_rank, parts), [decided(part) for part in parts]
    for name in [name for name in ranks[0] if name in COMPONENTS]:
        for got, want in zip(ranks, alone):
            assert torch.equal(got[name]["keep"], want[name]["keep"]), name
            torch.testing.assert_close(got[name]["weights"], want[name]["weights"], atol=1e-6, rtol=1e-6)
            assert got[name]["num_kept"] == sum(each[name]["num_kept"] for each in alone)
        totals = [float(part["response_mask"].sum()) for part in parts]
        means = [float(each[name]["metrics"]["weight_mean"]) for each in alone]
        assert float(ranks[0][name]["metrics"]["weight_mean"]) == pytest.approx(np.average(means, weights=totals))
        assert ranks[0][name]["metrics"] == ranks[1][name]["metrics"]


def over_steps(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The decisions of a rule that remembers, on one batch after the other."""
    average = {"name": "ema", "params": {"scorer": "outcome", "decay": 0.5}}
    block = {
        "mechanism": "select",
        "scorer": average,
        "actuator": {"name": "gfpo", "params": {"k_by_difficulty": [4, 3, 2, 1]}},
    }
    pipeline = Pipeline.from_config(block)
    return [told(pipeline.decide(part, step)) for step, part in enumerate(parts)]


def test_law_1_what_is_remembered_is_that_of_one_process() -> None:
    batches, rows_of = [whole(seed) for seed in range(4)], [[0, 3, 5, 7, 9], [1, 2, 4, 6, 8, 10, 11, 12, 13]]
    order = [row for rows in rows_of for row in rows]
    alone = over_steps([taken(batch, order) for batch in batches])
    parts = [spread(batch, rows_of, WIDE) for batch in batches]
    ranks = processes(2).run(over_steps, [[part[rank] for part in parts] for rank in range(2)])
    for step, want in enumerate(alone):
        assert_same(ranks[0][step], want, slice(0, 5), f"rank 0, step {step}")
        assert_same(ranks[1][step], want, slice(5, 14), f"rank 1, step {step}")


MIXERS = {
    f"{scorer}-{mixer}": (scorer, {"name": mixer, "params": MIXER_PARAMS.get(mixer, {})})
    for mixer, mixer_class in components("mixer").items()
    for scorer, scorer_class in components("scorer").items()
    if scorer_class.timing != "pre_rollout"
    if scorer in FOR_ANY or scorer_class.signal in mixer_class.signals
    if not mixer_class.signals or scorer_class.signal in mixer_class.signals
}


def mixed(batches: list[dict[str, Any]]) -> dict[str, list[dict[str, float]]]:
    """The metrics of every mixer with every scorer that it takes, after each batch."""
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, (scorer, mixer) in MIXERS.items():
            block = {"mechanism": "mix", "domains": ["logic", "math"], "scorer": scorer, "actuator": mixer}
            mixture = Mixture.from_config(block)
            found[name] = []
            for step, batch in enumerate(batches):
                mixture.observe(batch, step)
                mixture.end_step(step, progress=step / len(batches))
                found[name].append({**mixture.metrics, **mixture.proportions})
    return found


@pytest.mark.parametrize("sizes", [[9, 5], [0, 14], [3, 0, 10, 1]], ids=str)
def test_law_1_proportions_are_those_of_one_process(sizes: list[int]) -> None:
    ends = np.cumsum([0, *sizes])
    rows_of = [list(range(a, b)) for a, b in itertools.pairwise(ends)]
    batches = [whole(seed) for seed in (1, 2, 3)]
    parts = [spread(batch, rows_of, WIDE) for batch in batches]
    ranks = processes(len(sizes)).run(mixed, [[part[rank] for part in parts] for rank in range(len(sizes))])
    for name, alone in mixed(batches).items():
        for rank in ranks:
            for got, want in zip(rank[name], alone):
                assert list(got) == list(want)
                assert got == pytest.approx(want, abs=1e-6, nan_ok=True), name


# -- the exchange ------------------------------------------------------------------------------------------------------

COLLECTIVES = [
    name
    for name in vars(dist)
    if name.startswith(
        ("all_", "reduce", "gather", "scatter", "broadcast", "barrier", "monitored", "send", "recv", "is", "ir")
    )
    and callable(getattr(dist, name))
    and not name.startswith("is_")
]


ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"


def counted(batch: dict[str, Any]) -> dict[str, list[tuple[str, int]]]:
    """The collectives of each pair's decision, with the bytes that this rank put into each."""
    calls: dict[str, list[tuple[str, int]]] = {}
    with pytest.MonkeyPatch.context() as patch:
        for name in COLLECTIVES:

            def noted(*args: Any, _name: str, _real: Any, **kwargs: Any) -> Any:
                sent = args[-1] if isinstance(args[-1], torch.Tensor) else torch.empty(0)
                seen.append((_name, sent.numel() * sent.element_size()))
                return _real(*args, **kwargs)

            patch.setattr(dist, name, functools.partial(noted, _name=name, _real=getattr(dist, name)))
        for pair in COMPONENTS:
            seen: list[tuple[str, int]] = []
            pipeline(pair).decide(batch)
            calls[pair] = seen
    return calls


def many(num_samples: int) -> dict[str, Any]:
    mask = torch.ones(num_samples, 50)
    table = torch.rand(mask.shape, dtype=torch.float64)
    texts = [str(i // 4) for i in range(num_samples)]
    return {
        "rm_scores": table.round(),
        "response_mask": mask,
        "uid": texts,
        "domain": texts,
        "advantages": table,
        **dict.fromkeys(PER_TOKEN[1:], -table),
        "entropies": table,
        **dict.fromkeys(("difficulty", "limr_score", "rollout_step", "num_tokens"), torch.rand(num_samples)),
        "input_ids": torch.ones(num_samples, 60),
        "images": torch.ones(num_samples, 2, 2),
    }


def test_two_collectives_whatever_the_component_and_at_most_32_bytes_a_sample() -> None:
    ranks = processes(2).run(counted, [many(400), many(1000)])
    for name in COMPONENTS:
        (kinds, sizes), (other_kinds, other_sizes) = (list(zip(*rank[name])) for rank in ranks)
        assert kinds == other_kinds == (ALL_GATHER, ALL_GATHER), name
        assert sizes == other_sizes, name
        whole_tables = pipeline(name).scorer.granularity == "token" or name == "advantage_magnitude-any_of"
        if name in BUILT_IN and (pipeline(name).row_wise or not whole_tables):
            header = 400
            # What remembers by prompt sends its id beside that of its group.
            each = 40 if name.startswith("ema") else 32
            assert sum(sizes) <= each * 1000 + header, (name, sizes)


def failing(batch: dict[str, Any]) -> str:
    try:
        pipeline("group_solve_rate-threshold_band").decide(batch)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_an_error_on_one_rank_is_raised_on_every_rank() -> None:
    batch = whole()
    broken = {key: value for key, value in batch.items() if key != "uid"}
    first, second = processes(2).run(failing, [batch, broken])
    assert first.startswith("RuntimeError: Rank 1 could not give its part of the global batch. ValueError: The rollout")
    assert second.startswith("ValueError: The rollout batch has no field 'uid'. It has: ")
    assert processes(2).run(failing, [batch, batch]) == ["no error"] * 2


def test_no_samples_on_any_rank_is_an_error_on_every_rank() -> None:
    empty = taken(whole(), [])
    for text in processes(2).run(failing, [empty, empty]):
        assert text == "ValueError: The rollout batch has no samples. Give at least one."


def joined(columns: dict[str, Any]) -> Any:
    return exchanged(lambda: (columns, len(columns["a"])))


def test_ranks_may_differ_in_types_and_widths() -> None:
    one = {"a": torch.tensor([1.5, 2.5]), "b": [7, 8], "c": torch.ones(2, 1, dtype=torch.int32), "d": torch.ones(2)}
    two = {"c": torch.full((1, 3), 2), "b": ["x"], "a": torch.tensor([3])}
    none = {"a": [], "b": torch.empty(0, 4), "c": []}
    for rank, (columns, rows) in enumerate(processes(4).run(joined, [one, none, two, none])):
        assert list(columns) == ["a", "b", "c"]
        assert columns["a"].tolist() == [1.5, 2.5, 3.0]
        assert columns["b"] == [7, 8, "x"]
        assert columns["c"].tolist() == [[1, 0, 0], [1, 0, 0], [2, 2, 2]]
        assert rows == [slice(0, 2), slice(2, 2), slice(2, 3), slice(3, 3)][rank]


def denominators(mask: torch.Tensor) -> list[float]:
    return [float(loss_denominator(mask, each)) for each in ("token-mean", "seq-mean-token-sum")]


def test_the_denominator_of_the_loss_is_that_of_the_global_batch() -> None:
    masks = [torch.tensor([[1, 1, 0], [0, 0, 0]]), torch.ones(3, 3), torch.zeros(0, 1), torch.zeros(2, 2)]
    assert processes(4).run(denominators, masks) == [[11 / 4, 4 / 4]] * 4
