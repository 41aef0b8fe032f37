"""`dataflex preview`: saved rollouts through configurations."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from lightning_dataflex.core.checks import check_whole
from lightning_dataflex.core.fields import FIELDS
from lightning_dataflex.core.files import blocks_in, plain_config, within
from lightning_dataflex.core.registry import nearest
from lightning_dataflex.preview.replay import Preview, preview_of
from lightning_dataflex.preview.report import report
from lightning_dataflex.preview.rollouts import NAMES, rollouts_of


def previewed(args: Sequence[str]) -> str:
    """What `dataflex preview` prints."""
    given = _parser().parse_args(args)
    check_whole("--steps", given.steps, 0)
    blocks = [(path, *each) for path in given.config for each in blocks_of(path)]
    rollouts = rollouts_of(given.rollouts, fields_of(given.fields))
    previews = []
    for path, block, estimator in blocks:
        found = preview_of(rollouts, block, given.adv_estimator or estimator)
        previews.append(dataclasses.replace(found, name=f"{path}: {found.name}"))
    for name in rollouts.fields:
        if name not in (*NAMES, *FIELDS, *rollouts.asked):
            raise ValueError(f"--fields maps {name!r}, which nothing reads. {nearest(name, [*NAMES, *FIELDS])}")
    if given.json:
        return _as_json(rollouts.notes, previews)
    return report(rollouts, previews, given.steps)


def blocks_of(path: str) -> list[tuple[dict[str, Any], str | None]]:
    """The `dataflex` blocks of a configuration, and the advantage estimator of its module."""
    content = plain_config(path)
    blocks = blocks_in(content)
    if not blocks or not all(isinstance(block, dict) for block in blocks):
        raise ValueError(f"{path!r} has no dataflex block. Give one with mechanism, scorer and actuator.")
    estimator = within(content, "model", "init_args", "adv_estimator")
    return [(block, estimator) for block in blocks]


def fields_of(text: str | None) -> dict[str, str]:
    """`rm_scores=my_reward,uid=prompt` as a mapping.

    Example:
        >>> fields_of("rm_scores=my_reward,uid=prompt")
        {'rm_scores': 'my_reward', 'uid': 'prompt'}
    """
    pairs = [pair.partition("=") for pair in (text or "").split(",") if pair]
    for name, equals, column in pairs:
        if not (name.strip() and equals and column.strip()):
            raise ValueError(f"--fields is {text!r}. Give our names and your columns: rm_scores=my_reward,uid=prompt.")
    return {name.strip(): column.strip() for name, _, column in pairs}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("dataflex preview", description=__doc__)
    parser.add_argument("rollouts", nargs="+", help="files or folders: .parquet, .jsonl, .csv")
    parser.add_argument("--config", action="append", required=True, help="a configuration; may be given several times")
    parser.add_argument("--fields", help="which column is which field: rm_scores=my_reward,uid=prompt")
    parser.add_argument("--adv_estimator", help="that of the module; default: as the configuration says, else grpo")
    parser.add_argument("--steps", type=int, default=10, help="lines of the table by step; 0 for none (default: 10)")
    parser.add_argument("--json", action="store_true", help="print every step and domain as JSON in place of tables")
    return parser


def _as_json(notes: Sequence[str], previews: Sequence[Preview]) -> str:
    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(each) for key, each in value.items()}
        if isinstance(value, list):
            return [plain(each) for each in value]
        return None if value != value else value

    return json.dumps(plain({"notes": list(notes), "previews": [dataclasses.asdict(each) for each in previews]}))
