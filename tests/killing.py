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

from lightning_dataflex import RLEP, DataFlexCallback
from tests import flowing
from tests.killing_cases import CASES, Mixtures, Rules
from tests.launch import free_port

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
        notes = ("seen", "shares", "given", "rolled_out")
        came = {name: getattr(module, name)[-1] for name in notes if hasattr(module, name)}
        # How far a loader has drawn ahead is its own affair.
        logged = {k: float(v) for k, v in trainer.logged_metrics.items() if not k.endswith("lag")}
        decisions = [*self.decisions, *getattr(module, "decided", [[]])[-1]]
        loss = float(outputs["loss"])
        self._write((trainer.current_epoch, batch_idx), [flowing.as_lists(came), logged, decisions, loss])

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        states = [c.state_dict() for c in trainer.callbacks if isinstance(c, (DataFlexCallback, Mixtures, RLEP, Rules))]
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


def started(
    case: str, world: int, folder: Path, diary: str, kill: Kill | None = None, resume: bool = False
) -> list[Any]:
    """The processes of a run of a case, one for each rank."""
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
    return ranks


def ended(ranks: list[Any]) -> list[int]:
    """How each process of a run has ended; what hangs is killed."""
    for process in ranks:
        process.join(SECONDS)
    for process in ranks:
        process.kill()
        process.join()
    return [process.exitcode for process in ranks]


def run(*args: Any, **options: Any) -> list[int]:
    """One run of a case, and how each of its processes has ended."""
    return ended(started(*args, **options))


def read(folder: Path, diary: str, rank: int) -> dict[Any, str]:
    """What a run has written down, by epoch and batch, and under `end`."""
    found = {}
    with (folder / f"{diary}.{rank}").open("rb") as file:
        while file.peek(1):
            key, text = pickle.load(file)
            found[key] = text
    return found
