"""Trainings in real processes that wait at a known place for something to happen to them from outside."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import signal
import time
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_dataflex import DataFlexCallback, Mixture, Pipeline
from lightning_dataflex.writing import PROBE
from tests import toy
from tests.flowing import Mixed, Prompts, Rolling, as_lists, dapo, fit, gate
from tests.launch import free_port

SECONDS = 60
"""After which a process that has neither come to its place nor ended counts as a hang."""
KINDS = ["mixed", "easy", "hard", "mixed", "hard", "mixed", "mixed", "easy"] * 4
STEPS = 5

CONTEXT = multiprocessing.get_context("forkserver")
# A process that has imported everything already forks those of the tests.
CONTEXT.set_forkserver_preload(["tests.faults"])


# -- seen from the test ------------------------------------------------------------------------------------------------


class Run:
    """Processes that call `function(place, *args)`, one for each rank.

    Args:
        folder: For their output and what they leave.
        function: What they do.
        args: And with what.
        world: Number of ranks.
    """

    def __init__(self, folder: Path, function: Callable[..., None], *args: Any, world: int = 1) -> None:
        self.folder, port = folder, free_port()
        self.processes = [
            CONTEXT.Process(target=_process, args=(folder, rank, world, port, function, args), daemon=True)
            for rank in range(world)
        ]

    def __enter__(self) -> Run:
        for process in self.processes:
            process.start()
        return self

    def __exit__(self, *args: Any) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    def send(self, signum: int, *ranks: int, place: int = 0) -> None:
        """As soon as these ranks have come to a place, a signal to each; then they may go on."""
        for rank in ranks:
            _wait_for(self.folder / f"here.{rank}.{place}", self.processes[rank].is_alive, self.output)
        for rank in ranks:
            os.kill(self.processes[rank].pid or 0, signum)
        (self.folder / f"go.{place}").touch()

    def ended(self, rank: int = 0) -> int | None:
        """The exit code of a rank."""
        self.processes[rank].join(SECONDS)
        assert not self.processes[rank].is_alive(), f"Rank {rank} hangs.\n{self.output()}"
        return self.processes[rank].exitcode

    def output(self, rank: int = 0) -> str:
        """What a rank has printed."""
        return (self.folder / f"{rank}.log").read_text()

    def left(self, rank: int = 0) -> dict[str, Any]:
        """What a rank has left, once it has ended well."""
        assert self.ended(rank) == 0, self.output(rank)[-4000:]
        return torch.load(self.folder / f"{rank}.pt", weights_only=False)


def _wait_for(path: Path, alive: Callable[[], bool], said: Callable[[], str]) -> None:
    end = time.monotonic() + SECONDS
    while not path.exists():
        assert alive(), f"It ended before it came to {path.name}.\n{said()}"
        assert time.monotonic() < end, f"It does not come to {path.name}.\n{said()}"
        time.sleep(0.02)


# -- in the process ----------------------------------------------------------------------------------------------------


def _process(folder: Path, rank: int, world: int, port: str, function: Callable[..., None], args: Sequence) -> None:
    with (folder / f"{rank}.log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    if world > 1:
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        os.environ |= {name: str(value) for name, value in ranks.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "faults"}
    torch.set_num_threads(1)
    left = function(Place(folder, rank, world), *args)
    torch.save(left, folder / f"{rank}.pt")


class Place:
    """Where a process waits, or fails.

    Args:
        folder: Where it says that it is there.
        rank: Of this process.
        world: Number of processes.
    """

    def __init__(self, folder: Path, rank: int, world: int) -> None:
        self.folder, self.rank, self.world = folder, rank, world
        self.name, self.step, self.fails, self.ranks = "", -1, False, range(world)
        self.num, self.timeout = 0, SECONDS
        self.on_arrival: Callable[[], None] = lambda: None

    def set(self, name: str, step: int = 2, *, fails: bool = False, ranks: Sequence[int] = (0, 1)) -> None:
        """Which place of which step it is, and on which ranks."""
        self.name, self.step, self.fails, self.ranks = name, step, fails, ranks

    def at(self, name: str, step: int) -> None:
        """The process is here now."""
        if (name, step) != (self.name, self.step) or self.rank not in self.ranks:
            return
        self.name = ""
        if self.fails:
            raise ArithmeticError("out of luck")
        self.on_arrival()
        num, self.num = self.num, self.num + 1
        (self.folder / f"here.{self.rank}.{num}").touch()
        while not (self.folder / f"go.{num}").exists():
            time.sleep(0.01)

    @property
    def settings(self) -> dict[str, Any]:
        """For the Trainer."""
        parts = {"strategy": DDPStrategy(timeout=timedelta(seconds=self.timeout)), "devices": self.world}
        return {"max_steps": STEPS, "max_epochs": 3} | (parts if self.world > 1 else {})


class Watched(Rolling):
    """Tells where it is: at a `rollout`, in `more` of it, in a `decision`, in the `loss`, at the `end` of a batch."""

    def __init__(self, place: Place, data: Any = None) -> None:
        super().__init__()
        self.place, self.data = [place], [data]

    def rollout(self, rows: list[dict[str, Any]], num_generations: int | None = None) -> dict[str, Any]:
        self.place[0].at("more" if self.rolled_out[-1] else "rollout", len(self.rates))
        batch = super().rollout(rows, num_generations)
        # Else what is constant in a group leaves no gradient, and a lost batch no trace.
        batch["features"][:, 2] = (batch["features"][:, 0] * torch.arange(len(batch["uid"]))).sin()
        return batch

    def training_step(self, rows: list[dict[str, Any]], batch_idx: int) -> Tensor:
        loss = super().training_step(rows, batch_idx)
        self.place[0].at("loss", len(self.rates))
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        step = len(self.rates)
        super().on_train_batch_end(*args)
        self.place[0].at("end", step)


@contextlib.contextmanager
def watched_decisions(place: Place, module: Watched) -> Any:
    """A rule tells when it reads a batch, inside of its exchange with the other ranks."""
    with pytest.MonkeyPatch.context() as patch:
        for kind in (Pipeline, Mixture):

            def watched(self: Any, batch: Any, read: Any = kind._read) -> Any:
                place.at("decision", len(module.rates))
                return read(self, batch)

            patch.setattr(kind, "_read", watched)
        yield


HALF = {"name": "topk_fraction", "params": {"fraction": 0.5}}
EMA = {"name": "ema", "params": {"scorer": "group_solve_rate"}}
CASES: dict[str, tuple[Callable[[], list[Any]], Callable[[], Any]]] = {
    "plain": (
        lambda: [DataFlexCallback("select", "group_solve_rate", "threshold_band")],
        lambda: Prompts(KINDS, 4, StatefulDataLoader),
    ),
    "ema": (
        lambda: [DataFlexCallback("select", EMA, "threshold_band")],
        lambda: Prompts(KINDS, 4, StatefulDataLoader),
    ),
    "refill": (lambda: [gate("greso"), dapo(2)], lambda: Prompts(KINDS, 4, StatefulDataLoader)),
    "mix": (lambda: [DataFlexCallback("mix", actuator="dump_ucb")], lambda: Mixed(KINDS)),
}
"""Callbacks and data of each kind of memory."""


def train(
    place: Place, case: str, name: str, ranks: Sequence[int], fails: bool = False, timeout: int = SECONDS
) -> None:
    """A training to which something happens on these ranks; after so many seconds they stop waiting for each other."""
    place.timeout = timeout
    module, (callbacks, data) = Watched(place), CASES[case]
    place.set(name, 2, ranks=ranks, fails=fails)
    with watched_decisions(place, module):
        fit(callbacks(), data(), module, **place.settings)


def train_on_a_full_disk(place: Place) -> None:
    """A training that is not to begin, because no file may grow."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (PROBE // 2, resource.RLIM_INFINITY))
    module, (callbacks, data) = Watched(place), CASES["plain"]
    place.on_arrival = (place.folder / f"trained.{place.rank}").touch
    place.set("rollout", 0)
    savers = [ModelCheckpoint(place.folder / "checkpoints")]
    fit([*callbacks(), *savers], data(), module, enable_checkpointing=True, **place.settings)


def stop_and_resume(
    place: Place, case: str, name: str, step: int, checkpoints: Sequence[str], accumulate: int = 1
) -> dict[str, Any]:
    """A training that is stopped at a place, then resumed from checkpoints; beside one that is never stopped."""
    callbacks, data = CASES[case]

    def fitted(module: Watched, more: Sequence[Any] = (), **settings: Any) -> Any:
        settings |= {"accumulate_grad_batches": accumulate, "enable_checkpointing": bool(more), **place.settings}
        return fit([*callbacks(), *more], module.data[0], module, **settings)

    whole, logged, trainer = fitted(Watched(place, data()))
    module = Watched(place, data())
    before, during = traces(module), []
    place.on_arrival = lambda: during.append(traces(module))
    place.set(name, step)
    savers = [ModelCheckpoint(place.folder, "{step}", every_n_train_steps=1, save_top_k=-1)]
    savers += [OnExceptionCheckpoint(place.folder)]
    savers += [ModelCheckpoint(place.folder, "stopped", every_n_train_steps=10**6, save_on_exception=True)]
    with watched_decisions(place, module), contextlib.suppress(SystemExit):
        fitted(module, savers)
    seen: dict[str, Any] = {"traces": (before, *during, traces(module))}
    for checkpoint in checkpoints:
        try:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                rest, rest_logged, again = fitted(Watched(place, data()), ckpt_path=place.folder / checkpoint)
        except ValueError as error:
            seen[checkpoint] = str(error)
            continue
        num = len(rest_logged)
        seen[checkpoint] = {
            "never stopped": [whole.weight.tolist(), whole.rolled_out[-num:], logged[-num:], _states(trainer)],
            "resumed": [rest.weight.tolist(), rest.rolled_out, rest_logged, _states(again)],
            "num": num,
            "said": " ".join(str(each.message) for each in said),
        }
    return seen


def _states(trainer: Any) -> list[Any]:
    return [as_lists(each.state_dict()) for each in trainer.callbacks if isinstance(each, DataFlexCallback)]


def traces(module: nn.Module) -> dict[str, Any]:
    """The hooks, and the methods that are an instance's own, of all that a callback gets at."""
    trainer: Any = getattr(module, "_trainer", None)
    things: dict[str, Any] = dict(module.named_modules())
    things |= {f"data {i}": each for i, each in enumerate(getattr(module, "data", []))}
    if trainer is not None:
        things |= {"fit_loop": trainer.fit_loop, "epoch_loop": trainer.fit_loop.epoch_loop}
        loaders = trainer.fit_loop._combined_loader
        things |= {f"loader {i}": each for i, each in enumerate(loaders.flattened if loaders is not None else [])}
        things |= {f"optimizer {i}": each for i, each in enumerate(trainer.optimizers)}
    found = {}
    for place, thing in things.items():
        for name, value in (vars(thing) if thing is not None else {}).items():
            # The Trainer wraps an optimiser's step, and a strategy the module's forward.
            if "hook" in name and value:
                found[f"{place}.{name}"] = len(value)
            elif callable(value) and hasattr(type(thing), name) and name not in ("step", "forward"):
                found[f"{place}.{name}"] = "its own"
    return found


class WatchedToy(toy.Toy):
    """Tells when it has a loss."""

    def __init__(self, place: Place, offers: str) -> None:
        super().__init__(offers)
        self.place = [place]

    def _loss(self, batch: dict[str, Any]) -> Tensor:
        loss = super()._loss(batch)
        self.place[0].at("loss", self.global_step)
        return loss


def interrupted_mounts(place: Place) -> dict[str, Any]:
    """One training for each mount, interrupted in its loss."""
    seen = {}
    for offers, mount in toy.MOUNTS.items():
        module = WatchedToy(place, offers)
        before, during = traces(module), []
        place.on_arrival = lambda module=module, during=during: during.append(traces(module))
        place.set("loss", 1)
        callback = DataFlexCallback("select", "advantage_magnitude", HALF, mount=mount, drop="weight")
        try:
            toy.fit(module, [callback], [toy.rollout(seed) for seed in range(3)])
        except SystemExit:
            # As the Trainer leaves it.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            seen[offers] = (before, during[0], traces(module))
    return seen
