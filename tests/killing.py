"""Runs that are killed and go on, in processes of their own; what each batch came to is on disk before the next."""

from __future__ import annotations

import functools
import multiprocessing
import os
import pickle
import signal
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_dataflex import RLEP, DataFlexCallback, DataFlexPoint, components
from lightning_dataflex.core.registry import init_parameters
from tests import flowing, mixing
from tests.launch import free_port
from tests.laws import PARAMS, a_batch, built, pairs, scorer_of

SECONDS = 90
"""After which a run that has not ended counts as a hang."""


class Kill(NamedTuple):
    """Where a run is killed, without a word, by its own hand."""

    epoch: int
    batch: int
    hook: str = "on_train_batch_start"


KILLS = {
    "mid-epoch": Kill(0, 2),
    "mid-accumulation": Kill(0, 5, "on_before_backward"),
    "end of epoch": Kill(1, 0),
}
"""In this order, with two batches to an optimiser step and at least six to an epoch."""


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


def every_rule() -> list[Callback]:
    """Each scorer and each actuator on samples; some that remember change the batch, the others only decide."""
    level = {"name": "ema", "params": {"scorer": {"name": "metadata", "params": {"column": "difficulty"}}}}
    easy = {"scorer": level, "selector": {"name": "threshold_band", "params": {"low": 0.1, "high": 2.0}}}
    adaptive = {"name": "gfpo", "params": {"k_by_difficulty": [4, 3, 2, 1], "advantages": "group"}}
    mean = {"name": "weighted_sum", "params": {"scorers": [level, "group_std"]}}
    either = {"name": "any_of", "params": {"selectors": [adaptive, easy]}}
    acting = [
        DataFlexCallback("reweight", mean, "softmax", label="average"),
        DataFlexCallback("select", "outcome", either, label="either"),
    ]
    kinds = {"selector": "select", "reweighter": "reweight"}
    others: list[Callback] = []
    seen: set[tuple[str, str]] = set()
    for each in pairs(*kinds):
        scorer, kind, name = each.values
        if {("scorer", scorer), (kind, name)} <= seen:
            continue
        seen |= {("scorer", scorer), (kind, name)}
        # Of those that change advantages a batch has room for one.
        options = {"advantages": "group"} if "advantages" in init_parameters(components(kind)[name]) else {}
        rule = built(kind, name, **options)
        others.append(DataFlexCallback(kinds[kind], scorer_of(scorer), rule, label=each.id, enforce=False))
    return acting + others


def _rules(world: int, folder: Path) -> tuple[Any, ...]:
    return Batches(), every_rule(), DataLoader(range(6)), {}


def _mixer(name: str) -> Callable[..., tuple[Any, ...]]:
    def case(world: int, folder: Path) -> tuple[Any, ...]:
        params = PARAMS.get(name, {}) | ({"proportions": dict.fromkeys(mixing.DOMAINS, 1)} if name == "static" else {})
        return mixing.Bandit(), [mixing.mix({"name": name, "params": params})], mixing.Rows(0, 4 // world), {}

    return case


def _prompts(*make: Callable[[], Callback], num: int = 60) -> Callable[..., tuple[Any, ...]]:
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
    **{f"mix: {name}": _mixer(name) for name in components("mixer")},
    "refill": _prompts(DAPO),
    "refill behind greso": _prompts(GRESO, DAPO),
    **{name: _prompts(functools.partial(flowing.gate, name), num=120) for name in ("mopps", "pass_rate_band")},
    "speed": _prompts(functools.partial(flowing.gate, SPEED, refill={"groups": 2})),
    "rlep": _rlep,
}


class Diary(Callback):
    """Writes down what every batch came to, and how the run ended; kills it if told to."""

    def __init__(self, path: Path, kill: Kill | None) -> None:
        self.path, self.kill = path, kill
        self.decisions: list[Any] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        for callback in trainer.callbacks:
            deciding = getattr(callback, "deciding", None)
            if deciding is not None:
                deciding.decide = self._noted(deciding.decide)

    def _noted(self, decide: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            decision = decide(*args, **kwargs)
            self.decisions.append(decision.weights.tolist() if hasattr(decision, "weights") else None)
            return decision

        return noted

    def _write(self, key: Any, value: Any) -> None:
        with self.path.open("ab") as file:
            pickle.dump((key, repr(value)), file)

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        self.decisions = []
        self._die_at("on_train_batch_start", trainer, args[-1])

    def on_before_backward(self, trainer: Trainer, *args: Any) -> None:
        self._die_at("on_before_backward", trainer, trainer.fit_loop.batch_idx)

    def _die_at(self, hook: str, trainer: Trainer, batch_idx: int) -> None:
        if self.kill == (trainer.current_epoch, batch_idx, hook):
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        came = {name: getattr(module, name)[-1] for name in ("seen", "given", "rolled_out") if hasattr(module, name)}
        # How far a loader has drawn ahead is its own affair.
        logged = {k: float(v) for k, v in trainer.logged_metrics.items() if not k.endswith("lag")}
        loss = float(outputs["loss"])
        self._write((trainer.current_epoch, batch_idx), [flowing.as_lists(came), logged, self.decisions, loss])

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        states = [c.state_dict() for c in trainer.callbacks if isinstance(c, (DataFlexCallback, RLEP))]
        parameters = [p.tolist() for p in module.parameters()]
        self._write("end", [trainer.global_step, parameters, flowing.as_lists(states)])


def _note_warning(path: Path, message: Any, *_: Any) -> None:
    with path.open("a") as file:
        file.write(f"{message}\n")


def _run(
    case: str, rank: int, world: int, port: str, folder: Path, diary: str, kill: Kill | None, resume: bool
) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("always")
    warnings.showwarning = functools.partial(_note_warning, folder / f"{diary}.{rank}.warnings")
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_RANK": str(rank), "NODE_RANK": "0"}
    module, callbacks, data, settings = CASES[case](world, folder)
    saved = sorted(folder.glob("step=*.ckpt"), key=lambda path: int(path.stem.partition("=")[2]))
    saver = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
    quiet: dict[str, Any] = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    if world > 1:
        quiet["strategy"] = DDPStrategy(process_group_backend="gloo", timeout=timedelta(seconds=SECONDS))
    trainer = Trainer(
        callbacks=[*callbacks, Diary(folder / f"{diary}.{rank}", kill), saver],
        **{"max_epochs": 2, "accelerator": "cpu", "devices": world, "accumulate_grad_batches": 2, **quiet, **settings},
        num_sanity_val_steps=0,
        limit_val_batches=0,
        use_distributed_sampler=False,
    )
    trainer.fit(module, data, ckpt_path=saved[-1] if resume else None, weights_only=True)


def run(
    case: str, world: int, folder: Path, diary: str, kill: Kill | None = None, resume: bool = False
) -> list[int | None]:
    """One run of a case, every rank a process; how each of them ended."""
    context = multiprocessing.get_context("forkserver")
    # What is imported once need not be by each of a hundred processes.
    context.set_forkserver_preload(["tests.killing"])
    port = free_port()
    ranks = [
        context.Process(target=_run, args=(case, rank, world, port, folder, diary, kill, resume), daemon=True)
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(SECONDS)
    for process in ranks:
        process.kill()
        process.join()
    return [process.exitcode for process in ranks]


def read(folder: Path, diary: str, rank: int) -> dict[Any, str]:
    """What a run has written down, by epoch and batch, and under `end`."""
    found = {}
    with (folder / f"{diary}.{rank}").open("rb") as file:
        while file.peek(1):
            key, text = pickle.load(file)
            found[key] = text
    return found
