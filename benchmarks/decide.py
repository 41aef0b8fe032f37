"""What a decision costs: from a rollout batch to the batch with `rollout_is_weights` in it, for every component.

    python benchmarks/decide.py [--only gfpo] [--device cuda]

Beside it, in the same process and in turn: the floor, reading each field that the rule requires once (`sum`); and for
rules on groups the plain form, a Python loop over `np.unique(uid)`, whose loop is timed over a part of the groups.
Growth is the exponent of the time over N at 16 samples of 64 tokens per group. Memory is what lives at most at a
time beside the batch and the fields written, in tables (N, L) of float32.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import lightning_dataflex as df
from benchmarks import batches, plain
from benchmarks.memory import peak_bytes
from lightning_dataflex.core.compat import validate_compat
from lightning_dataflex.core.history import Visits

SHAPES = [(64, 8, 512), (512, 8, 512), (1024, 16, 512), (4096, 8, 256), (8192, 16, 64)]
GROWTH = [512, 1024, 2048, 4096, 8192]
HALF = {"name": "topk_fraction", "params": {"fraction": 0.5}}
SETTINGS: dict[str, dict[str, Any]] = {
    "threshold_band": {"low": 0.2, "high": 0.8},
    "gfpo": {"k": 4},
    "cppo": {"pruning_rate": 0.5},
    "advantage_reweight": {"alpha": 0.7},
    "metadata": {"column": "difficulty"},
    "weighted_sum": {"scorers": ["outcome", "response_length"], "weights": [1.0, -0.1]},
    "product": {"scorers": ["group_std", "advantage_magnitude"]},
    "rank": {"scorer": "outcome"},
    "zscore": {"scorer": "outcome"},
    "ema": {"scorer": "sequence_entropy"},
    "domain_weight": {"weights": {"math": 2.0, "code": 0.5}},
    "selective_backprop": {"start": 0.0, "end": 1.0, "interrupt": 0},
    "lopti": {"part": "low"},
    "all_of": {"selectors": [HALF, {"scorer": "outcome", "selector": HALF}]},
    "any_of": {"selectors": [HALF, {"scorer": "outcome", "selector": HALF}]},
    "not_": {"selector": HALF},
    "adarft": {"difficulty": {"code": 1.0, "logic": 1.5, "math": 2.0}},
}
Work = Callable[[dict[str, Any]], object]


def spec(name: Any) -> Any:
    return {"name": name, "params": SETTINGS[name]} if isinstance(name, str) and name in SETTINGS else name


def built(scorer: str) -> df.Scorer:
    return df.build("scorer", scorer, **SETTINGS.get(scorer, {}))


def cases() -> Iterator[tuple[str, str]]:
    """Scorer and actuator: each actuator with a scorer of its paper or one it takes, each scorer with one actuator."""
    for kind in ("selector", "reweighter"):
        for name, cls in df.components(kind).items():
            choices = ("advantage_magnitude", "group_reward_variance", "reward_difficulty")
            fitting = [each for each in choices if built(each).granularity in cls.granularities]
            yield cls.default_scorer if isinstance(cls.default_scorer, str) and cls.default_scorer else fitting[0], name
    for name in df.components("scorer"):
        made = built(name)
        if made.timing != "pre_rollout":
            yield name, "high_entropy_tokens" if made.granularity == "token" else "softmax"


def decision(scorer: str, actuator: str) -> tuple[Work, tuple[str, ...]]:
    """What is timed, and the fields that it requires."""
    mechanism = "select" if actuator in df.components("selector") else "reweight"
    paper = df.components("selector" if mechanism == "select" else "reweighter")[actuator].default_scorer
    block = {
        "mechanism": mechanism,
        "actuator": spec(actuator),
        "scorer": spec(scorer) if isinstance(paper, str) else paper,
    }
    pipeline = df.Pipeline.from_config(block)
    validate_compat(pipeline.scorer, pipeline.actuator, "grpo")

    def work(batch: dict[str, Any]) -> object:
        local = df.RolloutBatch.of(batch)
        made = pipeline.decide(local, progress=0.5)
        return local.replaced(made.updates(local))

    return work, pipeline.requires


def mixing(mixer: str) -> tuple[Work, tuple[str, ...]]:
    mixture = df.Mixture.from_config({"mechanism": "mix", "actuator": spec(mixer), "domains": list(batches.DOMAINS)})
    steps = iter(range(10**9))

    def work(batch: dict[str, Any]) -> object:
        step = next(steps)
        mixture.observe(batch, step)
        mixture.end_step(step, progress=0.5)
        return mixture.proportions

    return work, (*mixture.scorer.requires, "domain")


def gate(scorer: str) -> tuple[Work, tuple[str, ...]]:
    """A rule on prompts: it scores those of the batch, then sees what became of them."""
    rule = df.build("scorer", scorer)
    steps = iter(range(10**9))

    def work(batch: dict[str, Any]) -> object:
        local, step = df.RolloutBatch.of(batch), next(steps)
        visits = Visits.of(local.group_ids, local.outcomes.double())
        rule.score({"prompt_id": visits.ids}, step)
        return rule.observe(visits, step)

    return work, ("response_mask", "rm_scores", "uid")


def every_case() -> dict[str, tuple[Callable[[], tuple[Work, tuple[str, ...]]], plain.Rule | None]]:
    found: dict[str, Any] = {}
    for scorer, actuator in dict.fromkeys(cases()):
        found[f"{scorer} / {actuator}"] = partial(decision, scorer, actuator), plain.RULES.get((scorer, actuator))
    for mixer in df.components("mixer"):
        found[f"{mixer} (mixer)"] = partial(mixing, mixer), None
    for scorer in ("greso", "mopps", "pass_rate_band"):
        found[f"{scorer} (prompts)"] = partial(gate, scorer), None
    return found


def rows(only: str | None, rounds: int, device: str, shapes: list[tuple[int, int, int]]) -> Iterator[dict[str, Any]]:
    """The figures of each case: by shape the milliseconds of the rule and the floor in each round, and the rest."""
    every = {name: case for name, case in every_case().items() if only is None or only in name}
    found: dict[str, dict[str, Any]] = {name: {"name": name, "ms": {}, "floor": {}, "plain": {}} for name in every}
    growth: dict[str, list[float]] = {name: [] for name in every}
    for shape in shapes:
        batch = batches.rollout(*shape, device=device)
        for name, (make, loop) in every.items():
            work, fields = make()
            floor = partial(batches.read_once, batch, dict.fromkeys(("response_mask", *fields)))
            works: dict[str, Callable[[], object]] = {"ms": partial(work, batch), "floor": floor}
            if loop is not None and device == "cpu":
                works["plain"] = partial(plain.milliseconds, loop, batch, most=32)
            for what, times in batches.in_turn(works, rounds, device).items():
                found[name][what][shape] = times
            if shape == shapes[-1] and device == "cpu":
                table = 4 * batch["response_mask"].numel()
                found[name]["memory"] = peak_bytes(partial(work, batch)) / table
    for groups in GROWTH:
        batch = batches.rollout(groups, 16, 64, device=device)
        for name, (make, _) in every.items():
            work, _ = make()
            times = batches.in_turn({"ms": partial(work, batch)}, max(3, rounds // 2), device)
            growth[name].append(min(times["ms"]))
    for name, figures in found.items():
        figures["growth"] = list(zip([16 * groups for groups in GROWTH], growth[name]))
        figures["exponent"] = batches.exponent(GROWTH, growth[name])
        yield figures


def times_faster(row: dict[str, Any], shape: tuple[int, int, int]) -> float:
    """How much faster than the plain form a rule is."""
    return batches.median(slow / fast for slow, fast in zip(row["plain"][shape], row["ms"][shape]))


def table(figures: list[dict[str, Any]]) -> str:
    """Markdown."""
    shapes = list(figures[0]["ms"])
    heads = [" x ".join(map(str, shape)) for shape in shapes]
    lines = [
        f"| rule | {' | '.join(heads)} | times faster than plain | growth | memory |",
        f"|---|{'--:|' * len(shapes)}--:|--:|--:|",
    ]
    for row in figures:
        cells = []
        for shape in shapes:
            ratio = batches.median(a / b for a, b in zip(row["ms"][shape], row["floor"][shape]))
            cells.append(f"{batches.median(row['ms'][shape]):.3g} ({ratio:.1f})")
        faster = f"{times_faster(row, shapes[-1]):,.0f}" if row["plain"] else ""
        memory = f"{row['memory']:.1f}" if "memory" in row else ""
        lines.append(f"| {row['name']} | {' | '.join(cells)} | {faster} | {row['exponent']:.2f} | {memory} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="part of the name of a rule")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print(f"{batches.machine()}\n\nMilliseconds (times the floor), medians of {args.rounds} rounds.\n")
    print(table(list(rows(args.only, args.rounds, args.device, SHAPES))))


if __name__ == "__main__":
    main()
