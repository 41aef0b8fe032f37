"""What a callback tells of a run while it goes: a line at its start and its end, histograms, its numbers so far."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, stack

from lightning_dataflex.core.checks import listed
from lightning_dataflex.core.mixture import Mixture
from lightning_dataflex.histograms import write_histograms
from lightning_dataflex.mount import BatchMount, GradientMount, LossMount, Mount, PointMount, points_of

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from lightning_dataflex.callback import DataFlexCallback

LOGGER = logging.getLogger("lightning_dataflex")
MOST_STEPS = 2_000
"""Steps whose numbers are remembered; of a longer run every second, every fourth, and so on."""
ON_THE_BAR = ("kept_frac", "reward_all")
"""What a progress bar shows; the mean reward is the solve rate where rewards are 0 and 1."""


class Telling:
    """Tells of one callback; nothing of it is saved, and nothing travels between ranks.

    Args:
        name: What the callback is called.
        log_level: `info` says a line when a fit starts and one when it ends, `debug` one of each logged step too,
            `warning` none.
    """

    def __init__(self, name: str, log_level: str) -> None:
        self.name, self.level = name, getattr(logging, log_level.upper())
        self.history = History()
        self._totals: dict[str, float] = {}
        self._num_steps = 0

    def start(self, trainer: Trainer, pl_module: LightningModule, callback: DataFlexCallback, mount: Mount) -> None:
        """A fit starts, or goes on."""
        self.history, self._totals, self._num_steps = History(), {}, 0
        config, pipeline = callback.config, callback.pipeline
        read = [f"{name} (as {pipeline.fields[name]})" if name in pipeline.fields else name for name in reads(pipeline)]
        parts = [f"acts {place(mount, pl_module)}", f"reads {', '.join(read)}"]
        if isinstance(pipeline, Mixture):
            # Those that only the sampler names are known once there is a loader.
            parts.append(f"mixes {listed(pipeline.domains) if pipeline.domains else 'the domains of the sampler'}")
        elif config.mechanism == "select":
            parts.append(f"drop: {config.drop}")
        if config.refill is not None:
            parts.append(f"refills to {config.refill.groups} groups")  # type: ignore[union-attr]
        if callback.num_steps:
            parts.append(f"goes on at step {callback.num_steps}")
        if not config.enforce:
            parts.append("enforces nothing")
        self._say(trainer, logging.INFO, "; ".join(parts))

    def step(
        self, trainer: Trainer, callback: DataFlexCallback, metrics: Mapping[str, Any], prefix: str, batch_idx: int
    ) -> None:
        """A training step is over, and these are its numbers."""
        if not trainer.is_global_zero:
            return
        deciding = callback.deciding
        counted = floats({**metrics, **(deciding.counts if deciding is not None else {})})
        numbers = {name: counted[name] for name in metrics}
        self.history.add(callback.num_steps, numbers)
        self._num_steps += 1
        for name, value in counted.items():
            self._totals[name] = self._totals.get(name, 0.0) + value
        # Where the loggers are told: at the same steps, and under the same numbers of steps.
        step, every = trainer.fit_loop.epoch_loop._batches_that_stepped, trainer.log_every_n_steps  # type: ignore[attr-defined]
        has_stepped = (batch_idx + 1) % trainer.accumulate_grad_batches == 0 or trainer.is_last_batch
        if not every or (step + 1) % every or not has_stepped:
            return
        shown = ", ".join(f"{name} {value:.4g}" for name, value in numbers.items())
        self._say(trainer, logging.DEBUG, f"step {callback.num_steps}: {shown}")
        if deciding is not None and deciding.counts and trainer.loggers:
            values = {"weights": deciding.weights}
            if callback.num_steps >= callback.config.warmup_step:
                values["scores"] = deciding.scores
            write_histograms(trainer.loggers, {prefix + name: value for name, value in values.items()}, step)

    def end(self, trainer: Trainer, callback: DataFlexCallback) -> None:
        """A fit has come to its end."""
        if not trainer.is_global_zero:
            return
        parts = [f"{self._num_steps} steps"]
        mean = {name: total / max(self._num_steps, 1) for name, total in self._totals.items()}
        if isinstance(callback.pipeline, Mixture):
            shares = callback.pipeline.proportions.items()
            parts.append("proportions " + listed(f"{name} {share:.3f}" for name, share in shares))
        if "num_samples" in mean:
            kept, every = self._totals["num_kept"], self._totals["num_samples"]
            parts.append(f"{kept:,.0f} of {every:,.0f} samples kept")
            parts.append(f"mean kept fraction {mean['kept_frac']:.3f}")
        if "reward_all" in mean:
            parts.append(f"mean reward {mean['reward_all']:.3f}, of the kept {mean['reward_kept']:.3f}")
        if callback.config.mechanism == "reweight" and "ess" in mean:
            parts.append(f"mean ess {mean['ess']:.1f}")
        self._say(trainer, logging.INFO, "; ".join(parts))

    def _say(self, trainer: Trainer, level: int, text: str) -> None:
        if trainer.is_global_zero and level >= self.level:
            _let_speak(self.level)
            LOGGER.log(level, "dataflex %s: %s.", self.name, text)


class History:
    """The numbers of the steps so far, of a long run of every second, every fourth, and so on.

    Example:
        >>> history = History(most=4)
        >>> for step in range(9):
        ...     history.add(step, {"kept_frac": step / 10})
        >>> history.steps
        [0, 4, 8]
    """

    def __init__(self, most: int = MOST_STEPS) -> None:
        self.most, self.steps = most, list[int]()
        self.numbers: list[dict[str, float]] = []
        self._every = 1

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        """The numbers of one more step."""
        if self.steps and (step - self.steps[0]) % self._every:
            return
        self.steps.append(step)
        self.numbers.append(dict(numbers))
        if len(self.steps) > self.most:
            self.steps, self.numbers, self._every = self.steps[::2], self.numbers[::2], 2 * self._every


def floats(numbers: Mapping[str, Any]) -> dict[str, float]:
    """Scalars as numbers of Python, with one transfer from the device that they are on."""
    tensors = {name: value for name, value in numbers.items() if isinstance(value, Tensor)}
    known = dict(zip(tensors, stack([value.double() for value in tensors.values()]).tolist())) if tensors else {}
    return {name: known[name] if name in known else float(value) for name, value in numbers.items()}


def reads(pipeline: Any) -> list[str]:
    """The fields of the batch that a pipeline or a mixture reads."""
    own = ("response_mask", "domain", *pipeline.scorer.requires) if isinstance(pipeline, Mixture) else pipeline.requires
    return list(dict.fromkeys(own))


def place(mount: Mount, module: Any) -> str:
    """Where a mount acts, in words."""
    if isinstance(mount, PointMount):
        points = points_of(module)
        names = [name.replace("_orig_mod.", "") for name, part in module.named_modules() if part in points]
        return f"at {', '.join(names)} (DataFlexPoint)"
    if isinstance(mount, LossMount):
        return f"around {mount.name}"
    return {BatchMount: "on the batch of the loader", GradientMount: "on the gradient of pg_losses"}.get(
        type(mount), type(mount).__name__
    )


def _let_speak(level: int) -> None:
    """Give the logger the level and the handler that Lightning gives its own, unless somebody has given it one."""
    if LOGGER.level == logging.NOTSET:
        LOGGER.setLevel(min(level, logging.INFO))
    if not LOGGER.hasHandlers():
        LOGGER.addHandler(logging.StreamHandler())
        LOGGER.propagate = False
