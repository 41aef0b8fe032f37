"""What a configuration does to saved rollouts, step by step."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from lightning_dataflex.core.config import DataFlexConfig
from lightning_dataflex.core.mixture import Mixture
from lightning_dataflex.core.pipeline import Pipeline
from lightning_dataflex.core.registry import registered_name
from lightning_dataflex.core.summary import REASONS
from lightning_dataflex.preview.batches import Batches
from lightning_dataflex.preview.rollouts import Rollouts

STEP_SUMS = ("dropped_solved", "dropped_failed", "dropped_rule", "dropped_nan", "n_nan")


@dataclass
class Preview:
    """What became of the samples under one block of a configuration.

    Attributes:
        name: Of the block.
        totals: Of all samples; see `docs/preview.md`.
        steps: The same of each step.
        domains: The same of each domain.
        proportions: Of a mixer, after the last step, by domain.
        notes: What had to be assumed.
    """

    name: str
    totals: dict[str, float] = field(default_factory=dict)
    steps: list[dict[str, float]] = field(default_factory=list)
    domains: dict[str, dict[str, float]] = field(default_factory=dict)
    proportions: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def preview_of(rollouts: Rollouts, block: Mapping[str, Any], adv_estimator: str | None = None) -> Preview:
    """Put saved rollouts through a `dataflex` block, in the order of their steps.

    Args:
        rollouts: What was saved.
        block: With mechanism, scorer and actuator; what is for a Trainer alone is not read.
        adv_estimator: That of the module, where the block does not name one.

    Raises:
        ValueError: The block is none, decides before rollouts, or reads what is not there.
    """
    unread = {"fields": None, "mount": None, "trace": None, "drop": "mask", "trim": False}
    config = DataFlexConfig.of({**block, **{key: value for key, value in unread.items() if key in block}})
    estimator = config.adv_estimator or adv_estimator
    if config.mechanism == "mix":
        return _mixed(rollouts, config, estimator)
    pipeline = Pipeline.from_config(config, adv_estimator=estimator)
    name = config.label or f"{registered_name(pipeline.scorer)}.{registered_name(pipeline.actuator)}"
    if pipeline.scorer.timing == "pre_rollout":
        raise ValueError(f"{name} decides before a rollout, and rollouts are all there is. Preview another block.")
    batches = Batches(rollouts, (pipeline.scorer, pipeline.actuator), estimator)
    found = _decided(rollouts, batches, pipeline, config)
    return replace(found, name=f"{config.mechanism} {name}", notes=[*batches.notes, *found.notes])


def _decided(rollouts: Rollouts, batches: Batches, pipeline: Pipeline, config: DataFlexConfig) -> Preview:
    columns: list[dict[str, np.ndarray]] = []
    result = Preview("")
    places = list(rollouts.steps())
    with warnings.catch_warnings(record=True) as caught:
        for i, (step, rows) in enumerate(places):
            batch = batches.batch(rows)
            if i < config.warmup_step:
                decision = pipeline.keep_all(batch)
            else:
                share, keep_all = i / len(places), config.on_empty == "keep"
                decision = pipeline.decide(batch, i, progress=share, keep_all_if_empty=keep_all)
            columns.append({key: column.numpy() for key, column in decision.columns(batch).items()})
            of_step = {"step": step, **_sums(columns[-1])}
            metrics = decision.metrics
            of_step |= {key: float(metrics[key]) for key in (*STEP_SUMS, "ess", "weight_std") if key in metrics}
            result.steps.append(of_step)
    result.notes += dict.fromkeys(str(each.message) for each in caught)
    whole = {key: np.concatenate([each[key] for each in columns]) for key in columns[0]}
    result.totals = _sums(whole) | {key: sum(each[key] for each in result.steps) for key in STEP_SUMS if key in of_step}
    result.totals |= {key: float(np.mean([each[key] for each in result.steps])) for key in ("ess", "weight_std")}
    for code, name in enumerate(rollouts.domains):
        of_domain = rollouts.columns["domain"] == code
        result.domains[name] = _sums({key: column[of_domain] for key, column in whole.items()})
    return result


def _sums(columns: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Samples and tokens, and those that are kept; samples by reason; mean reward before and after, of what weight."""
    length, kept = columns["length"], columns["kept"]
    valid = length > 0
    rewarded = valid & np.isfinite(columns["reward"])
    weight = columns["weight"] * rewarded
    counts = np.bincount(columns["reason"][valid], minlength=len(REASONS))
    return {
        "samples": int(valid.sum()),
        "tokens": int(length.sum()),
        "samples_kept": int(kept.sum()),
        "tokens_kept": int(length[kept].sum()),
        **{f"samples_{name}": int(num) for name, num in zip(REASONS[1:], counts[1:])},
        "rewarded": int(rewarded.sum()),
        "reward": _mean(columns["reward"], rewarded),
        "weight": float(weight.sum(dtype=float)),
        "reward_after": _mean(columns["reward"], weight),
    }


def _mean(values: np.ndarray, weights: np.ndarray) -> float:
    total = float(weights.sum(dtype=float))
    return float(np.sum(values * weights, where=weights > 0, dtype=float)) / total if total else float("nan")


def _mixed(rollouts: Rollouts, config: DataFlexConfig, estimator: str | None) -> Preview:
    mixture = Mixture.from_config(replace(config, domains=config.domains or rollouts.domains), adv_estimator=estimator)
    name = config.label or f"{registered_name(mixture.scorer)}.{registered_name(mixture.actuator)}"
    batches = Batches(rollouts, (mixture.scorer,), estimator, more=("domain",))
    result = Preview(f"mix {name}", notes=batches.notes)
    places = list(rollouts.steps())
    for i, (step, rows) in enumerate(places):
        batch = batches.batch(rows)
        mixture.observe(batch, i)
        mixture.end_step(i, progress=(i + 1) / len(places))
        result.steps.append({"step": step, "samples": batch.num_samples} | mixture.metrics)
    result.proportions = mixture.proportions
    result.totals = {"samples": rollouts.num_samples}
    counts = np.bincount(rollouts.columns["domain"], minlength=len(rollouts.domains))
    result.domains = {name: {"samples": int(num)} for name, num in zip(rollouts.domains, counts)}
    result.notes.append("its proportions would have changed the rollouts themselves; these are as they were saved")
    return result
