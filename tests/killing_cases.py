"""Runs to be killed: every component, sampler, refill and rule on prompts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_dataflex import RLEP, DataFlexCallback, DataFlexPoint, Pipeline, components
from lightning_dataflex.core.mixture import Mixture
from lightning_dataflex.core.registry import registered_name
from tests import flowing, mixing
from tests.laws import PARAMS, a_batch, pairs, pipeline_of


class Batches(LightningModule):
    """Every field that a rule reads, in each step others; each rank has every other sample."""

    def __init__(self) -> None:
        super().__init__()
        self.dataflex = DataFlexPoint()
        self.weight = nn.Parameter(torch.zeros(5))

    def training_step(self, _: Any, batch_idx: int) -> Tensor:
        whole = a_batch(100 * self.current_epoch + batch_idx)
        mine = slice(self.global_rank, None, self.trainer.world_size)
        batch = self.dataflex({name: value[mine] for name, value in whole.items()})
        losses = (self.weight * batch["advantages"] * batch.get("rollout_is_weights", 1.0)).sum(-1)
        return losses.mean() + self.weight.square().sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.1)


def remembering() -> list[Callback]:
    """Callbacks whose rules remember, as parts of others too."""
    level = {"name": "ema", "params": {"scorer": {"name": "metadata", "params": {"column": "difficulty"}}}}
    easy = {"scorer": level, "selector": {"name": "threshold_band", "params": {"low": 0.1, "high": 2.0}}}
    adaptive = {"name": "gfpo", "params": {"k_by_difficulty": [4, 3, 2, 1], "advantages": "group"}}
    mean = {"name": "weighted_sum", "params": {"scorers": [level, "group_std"]}}
    either = {"name": "any_of", "params": {"selectors": [adaptive, easy]}}
    return [DataFlexCallback("reweight", mean, "softmax"), DataFlexCallback("select", "outcome", either)]


class Rules(Callback):
    """Each scorer and each actuator on the same samples, beside the callbacks that act."""

    def __init__(self) -> None:
        self.pipelines: dict[str, Pipeline] = {}
        seen: set[tuple[str, str]] = set()
        for each in pairs("selector", "reweighter"):
            scorer, kind, name = each.values
            if not {("scorer", scorer), (kind, name)} <= seen:
                seen |= {("scorer", scorer), (kind, name)}
                self.pipelines[str(each.id)] = pipeline_of(scorer, kind, name)

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        pl_module.decided = []
        pl_module.dataflex.register_forward_pre_hook(functools.partial(self._decide, pl_module))

    def _decide(self, module: Any, point: Any, args: tuple[Any]) -> None:
        step = 6 * module.current_epoch + module.trainer.fit_loop.batch_idx
        decisions = [pipeline.decide(*args, step, progress=step / 12) for pipeline in self.pipelines.values()]
        module.decided.append([[each.scores.tolist(), each.weights.tolist()] for each in decisions])

    def state_dict(self) -> dict[str, Any]:
        return {name: pipeline.state_dict() for name, pipeline in self.pipelines.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, pipeline in self.pipelines.items():
            pipeline.load_state_dict(state[name])


def _rules(world: int, folder: Path) -> tuple[Any, ...]:
    return Batches(), [*remembering(), Rules()], DataLoader(range(6)), {"max_steps": 4}


class Mixtures(Callback):
    """Every mixer on the same samples. A sampler follows one alone."""

    def __init__(self) -> None:
        more = {"adarft": PARAMS["adarft"], "static": {"proportions": dict.fromkeys(mixing.DOMAINS, 1)}}
        actuators = [{"name": name, "params": more.get(name, {})} for name in components("mixer")]
        block = {"mechanism": "mix", "domains": mixing.DOMAINS}
        self.mixtures = [Mixture.from_config(block | {"actuator": each}) for each in actuators]

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        pl_module.shares = []
        pl_module.dataflex.register_forward_hook(self._observe)

    def _observe(self, point: Any, args: tuple[Any], batch: Any) -> None:
        for each in self.mixtures:
            each.observe(batch)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
        step = 15 * trainer.current_epoch + args[-1]
        for each in self.mixtures:
            each.end_step(step, progress=step / 30)
        pl_module.shares.append([each.metrics | each.proportions for each in self.mixtures])

    def state_dict(self) -> dict[str, Any]:
        return {registered_name(each.actuator): each.state_dict() for each in self.mixtures}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for each in self.mixtures:
            each.load_state_dict(state[registered_name(each.actuator)])


def _mixers(world: int, folder: Path) -> tuple[Any, ...]:
    return mixing.Bandit(), [mixing.mix(), Mixtures()], mixing.Rows(0, 4 // world), {}


def _prompts(*make: Callable[[], Callback], num: int = 40) -> Callable[..., tuple[Any, ...]]:
    def case(world: int, folder: Path) -> tuple[Any, ...]:
        loader = flowing.Prompts(kinds(num), 4, StatefulDataLoader)
        return flowing.Rolling(), [each() for each in make], loader, {}

    return case


def kinds(num: int) -> list[str]:
    return [["mixed", "easy", "mixed", "hard", "mixed", "mixed"][i % 6] for i in range(num)]


class Placed(flowing.Rolling):
    """Its prompts follow from the place in the epoch, whatever the loader gives."""

    def training_step(self, _: Any, batch_idx: int) -> Tensor:
        world, rows = self.trainer.world_size, flowing.prompts(kinds(24))
        return super().training_step(rows[4 * batch_idx : 4 * batch_idx + 4][self.global_rank :: world], batch_idx)


def _rlep(world: int, folder: Path) -> tuple[Any, ...]:
    replay = RLEP(num=2, collect=str(folder / "pool.pt"), max_per_prompt=3)
    return Placed(), [replay], DataLoader(range(6)), {}


GRESO, DAPO = functools.partial(flowing.gate, "greso"), functools.partial(flowing.dapo, 2)
SPEED = {"name": "speed", "params": {"num_screening": 2}}
CASES: dict[str, Callable[[int, Path], tuple[Any, ...]]] = {
    "every scorer, selector and reweighter": _rules,
    "every mixer, and the sampler": _mixers,
    "refill": _prompts(DAPO),
    "refill behind greso": _prompts(GRESO, DAPO),
    **{name: _prompts(functools.partial(flowing.gate, name), num=100) for name in ("mopps", "pass_rate_band")},
    "speed": _prompts(functools.partial(flowing.gate, SPEED, refill={"groups": 2})),
    "rlep": _rlep,
}
