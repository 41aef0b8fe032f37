"""Every scorer with an actuator, every actuator with the scorer of its paper, and batches to try them on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lightning_dataflex import Pipeline, Scorer, build, components
from lightning_dataflex.core.building import component
from lightning_dataflex.core.compat import validate_compat

HALF = {"name": "topk_fraction", "params": {"fraction": 0.5}}
PARAMS: dict[str, dict[str, Any]] = {
    "threshold_band": {"low": 0.2, "high": 0.8},
    "gfpo": {"k": 2},
    "advantage_reweight": {"alpha": 0.7},
    "metadata": {"column": "difficulty"},
    "weighted_sum": {"scorers": ["outcome", "response_length", "token_entropy"], "weights": [1.0, -0.1, 0.5]},
    "product": {"scorers": ["group_std", "advantage_magnitude"]},
    "rank": {"scorer": "outcome"},
    "zscore": {"scorer": "token_entropy"},
    "ema": {"scorer": "sequence_entropy"},
    "domain_weight": {"weights": {"math": 2.0, "code": 0.5}},
    "selective_backprop": {"start": 0.0, "end": 1.0, "interrupt": 0},
    "lopti": {"part": "low"},
    "all_of": {"selectors": [HALF, {"scorer": "outcome", "selector": HALF}]},
    "any_of": {"selectors": [HALF, {"scorer": "token_prob", "selector": "high_entropy_tokens"}]},
    "not_": {"selector": HALF},
    "adarft": {"difficulty": {"code": 1.0, "logic": 1.0, "math": 2.0}},
}
"""Of components that do not build without, or do nothing by default."""

FIELDS = (
    "rm_scores",
    "advantages",
    "old_log_probs",
    "entropies",
    "ref_log_probs",
    "rollout_log_probs",
    "teacher_log_probs",
    "difficulty",
    "limr_score",
    "rollout_step",
)
"""What scorers read; all but the `response_length` read one of them."""
PER_TOKEN = FIELDS[1:7]

FOR_ANY = ("advantage_magnitude", "group_reward_variance", "reward_difficulty")
ON_ANY_SCORE = {
    ("selector", "token"): "high_entropy_tokens",
    ("selector", "response"): "topk_fraction",
    ("reweighter", "token"): "abs_advantage_power",
    ("reweighter", "response"): "softmax",
}


def built(kind: str, name: str, **params: Any) -> Any:
    return build(kind, name, **PARAMS.get(name, {}) | params)


def scorer_of(label: str) -> Scorer:
    """A scorer by its name, or `of NAME`: that of the paper of an actuator."""
    if not label.startswith("of "):
        return built("scorer", label)
    kind, name = label.split()[1:]
    spec = components(kind)[name].default_scorer
    return built("scorer", spec) if isinstance(spec, str) else component("scorer", spec)


def pairs(*kinds: str) -> list:
    """Each actuator with the scorer of its paper or, if it takes any, with three; and each scorer with one actuator."""
    found = {}
    for kind in kinds:
        for name, cls in components(kind).items():
            scorers = [name for name in FOR_ANY if built("scorer", name).granularity in cls.granularities]
            if name in ("all_of", "any_of", "not_"):
                scorers = scorers[:1]
            if cls.default_scorer:
                scorers = [cls.default_scorer if isinstance(cls.default_scorer, str) else f"of {kind} {name}"]
            for scorer in scorers:
                found[scorer, kind, name] = None
        for scorer in components("scorer"):
            made = built("scorer", scorer)
            if made.timing != "pre_rollout":
                granularity = "token" if made.granularity == "token" else "response"
                found[scorer, kind, ON_ANY_SCORE[kind, granularity]] = None
    for scorer, kind, name in found:
        validate_compat(scorer_of(scorer), built(kind, name))
    return [pytest.param(*pair, id=f"{pair[0].replace(' ', '_')}-{pair[2]}") for pair in found]


def over(*kinds: str):
    return pytest.mark.parametrize(("scorer", "kind", "actuator"), pairs(*kinds))


def pipeline_of(scorer: str, kind: str, actuator: str, **params) -> Pipeline:
    return Pipeline(scorer_of(scorer), built(kind, actuator, **params))


def scores_everything(scorer: str) -> bool:
    """Whether no NaN in any field leaves a sample without a score."""
    return not {*scorer_of(scorer).requires} & {*FIELDS}


def a_batch(seed: int = 0, groups: int = 3, size: int = 4, tokens: int = 5) -> dict:
    """Interleaved groups whose rewards, lengths, advantages and probabilities differ; padding is 0."""
    rng = np.random.default_rng(seed)
    lengths = np.stack([rng.permutation(tokens)[:size] + 1 for _ in range(groups)], 1).flatten()
    mask = torch.tensor(np.arange(tokens) < lengths[:, None])

    def table(values: np.ndarray) -> torch.Tensor:
        return torch.where(mask, torch.tensor(values, dtype=torch.float32), 0.0)

    def row(values: np.ndarray) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32)

    batch = {
        "rm_scores": row(rng.uniform(size=len(lengths))),
        "response_mask": mask.long(),
        "uid": ["abcdefg"[i] for i in range(groups)] * size,
        "advantages": table(rng.normal(size=mask.shape)),
        "old_log_probs": table(np.log(rng.uniform(0.05, 1, size=mask.shape))),
    }
    more = np.random.default_rng(seed + 10_000)
    batch |= {name: table(np.log(more.uniform(0.05, 1, size=mask.shape))) for name in PER_TOKEN[3:]}
    batch["entropies"] = table(more.uniform(0.1, 3, size=mask.shape))
    batch["domain"] = [["code", "logic", "math"][i % 3] for i in range(len(lengths))]
    batch |= {name: row(more.uniform(0, 1, size=len(lengths))) for name in ("difficulty", "limr_score")}
    batch["rollout_step"] = row(-more.integers(0, 5, size=len(lengths)).astype(float))
    return batch


def together(*batches: dict) -> dict:
    names = ("uid", "domain")
    joined = {k: torch.cat([b[k] for b in batches]) for k in batches[0] if k not in names}
    return joined | {k: [u for b in batches for u in b[k]] for k in names}
