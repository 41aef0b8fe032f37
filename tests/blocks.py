"""Blocks that work, with values in them that may not."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import strategies as st

from lightning_dataflex import DataFlexConfig, components
from lightning_dataflex.core.registry import init_parameters
from tests.hostile import JUNK, TEXTS
from tests.laws import PARAMS, pairs

PAIRS = [pair.values for pair in pairs("selector", "reweighter")]
MIXERS, GATES = list(components("mixer")), ["greso", "mopps", "pass_rate_band"]


def spec(kind: str, name: str) -> dict[str, Any]:
    if name.startswith("of "):
        default = components(name.split()[1])[name.split()[2]].default_scorer
        return {"name": default} if isinstance(default, str) else copy.deepcopy(default)
    return {"name": name, "params": copy.deepcopy(PARAMS.get(name, {}))}


@st.composite
def blocks(draw: Any) -> dict[str, Any]:
    """A block that works, with one to three values in it that may not."""
    mechanism = draw(st.sampled_from(["select", "reweight", "mix", "gate"]))
    if mechanism == "mix":
        block: dict[str, Any] = {"mechanism": "mix", "actuator": spec("mixer", draw(st.sampled_from(MIXERS)))}
        block["domains"] = ["code", "logic", "math"]
    elif mechanism == "gate":
        block = {"mechanism": "select", "scorer": spec("scorer", draw(st.sampled_from(GATES)))}
    else:
        kind = {"select": "selector", "reweight": "reweighter"}[mechanism]
        scorer, kind, actuator = draw(st.sampled_from([pair for pair in PAIRS if pair[1] == kind]))
        block = {"mechanism": mechanism, "scorer": spec("scorer", scorer), "actuator": spec(kind, actuator)}
    for _ in range(draw(st.integers(1, 3))):
        _spoil(draw, block)
    return block


def _spoil(draw: Any, block: dict[str, Any]) -> None:
    part = draw(st.sampled_from(["scorer", "actuator", None]))
    where = block.get(part)
    if not isinstance(where, dict) or "name" not in where or not isinstance(where.get("params"), dict):
        keys = [*DataFlexConfig.__dataclass_fields__, *TEXTS[:3], 3, None]
        block[draw(st.sampled_from(keys))] = draw(JUNK)
        return
    name = str(type(where["name"])) if not isinstance(where["name"], str) else where["name"]
    kinds = ["scorer"] if part == "scorer" else ["selector", "reweighter", "mixer"]
    known = [key for kind in kinds if name in components(kind) for key in init_parameters(components(kind)[name])]
    key = draw(st.sampled_from([*known, *known, "name", "class_path", "init_args", "params", "x"]))
    (where["params"] if key in [*known, "x"] else where)[key] = draw(JUNK)
