"""Every scorer with every actuator that takes its scores, and batches to try them on."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lightning_dataflex import Pipeline, build, components
from lightning_dataflex.core.compat import validate_compat

PARAMS = {"threshold_band": {"low": 0.2, "high": 0.8}, "gfpo": {"k": 2}, "advantage_reweight": {"alpha": 0.7}}
FIELDS = ("rm_scores", "advantages", "old_log_probs")


def pairs(*kinds: str) -> list:
    found = []
    for scorer in components("scorer"):
        if build("scorer", scorer).timing == "pre_rollout":
            continue
        for kind in kinds:
            for name in components(kind):
                try:
                    validate_compat(build("scorer", scorer), build(kind, name))
                except ValueError:
                    continue
                found.append(pytest.param(scorer, kind, name, id=f"{scorer}-{name}"))
    return found


def over(*kinds: str):
    return pytest.mark.parametrize(("scorer", "kind", "actuator"), pairs(*kinds))


def pipeline_of(scorer: str, kind: str, actuator: str, **params) -> Pipeline:
    return Pipeline(build("scorer", scorer), build(kind, actuator, **PARAMS.get(actuator, {}) | params))


def a_batch(seed: int = 0, groups: int = 3, size: int = 4, tokens: int = 5) -> dict:
    """Interleaved groups whose rewards, lengths, advantages and probabilities differ; padding is 0."""
    rng = np.random.default_rng(seed)
    lengths = np.stack([rng.permutation(tokens)[:size] + 1 for _ in range(groups)], 1).flatten()
    mask = torch.tensor(np.arange(tokens) < lengths[:, None])

    def table(values: np.ndarray) -> torch.Tensor:
        return torch.where(mask, torch.tensor(values, dtype=torch.float32), 0.0)

    return {
        "rm_scores": torch.tensor(rng.uniform(size=len(lengths)), dtype=torch.float32),
        "response_mask": mask.long(),
        "uid": ["abcdefg"[i] for i in range(groups)] * size,
        "advantages": table(rng.normal(size=mask.shape)),
        "old_log_probs": table(np.log(rng.uniform(0.05, 1, size=mask.shape))),
    }


def together(*batches: dict) -> dict:
    joined = {k: torch.cat([b[k] for b in batches]) for k in batches[0] if k != "uid"}
    return joined | {"uid": [u for b in batches for u in b["uid"]]}
