"""DataFlexCallback: when to act, on what, what is logged, what is saved."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_dataflex.asking import check_progress, data_parallel_group, progress, setting, warn_of_schedules
from lightning_dataflex.core.actuator import Actuator
from lightning_dataflex.core.building import ComponentConfig
from lightning_dataflex.core.compat import validate_compat
from lightning_dataflex.core.config import DataFlexConfig, Drop, LogLevel, Mechanism, OnEmpty, RefillConfig, Scope
from lightning_dataflex.core.containers import holds_originals
from lightning_dataflex.core.decision import Decision
from lightning_dataflex.core.figures import logged_numbers, run_so_far
from lightning_dataflex.core.memory import described
from lightning_dataflex.core.mixture import Mixture
from lightning_dataflex.core.pipeline import Pipeline
from lightning_dataflex.core.registry import registered_name
from lightning_dataflex.core.rollout import RolloutBatch
from lightning_dataflex.core.samples import Layout
from lightning_dataflex.core.scorer import Scorer
from lightning_dataflex.deciding import Deciding
from lightning_dataflex.flow import RolloutFlow
from lightning_dataflex.mount import BatchMount, GradientMount, Mount, mount_of
from lightning_dataflex.reading import FirstReading
from lightning_dataflex.saving import saved, take_back, take_flow_back
from lightning_dataflex.steering import Steering
from lightning_dataflex.stopping import StepWatch
from lightning_dataflex.team import Team, check_mount, check_team
from lightning_dataflex.telling import ON_THE_BAR, Telling
from lightning_dataflex.writing import check_places_everywhere

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    # Both namespaces have a Callback of their own, and each Trainer and each CLI asks for its own.
    _installed = {"lightning.pytorch": find_spec("lightning"), "pytorch_lightning": find_spec("pytorch_lightning")}
    _bases = tuple(importlib.import_module(name).Callback for name, found in _installed.items() if found)
    Callback = _bases[0] if len(_bases) == 1 else type("Callback", _bases, {})


class DataFlexCallback(Callback):
    """Selects or weighs the samples of each training step, or mixes the domains of the steps to come.

    Args:
        mechanism: `select` keeps samples, `reweight` weighs samples or tokens, `mix` sets the proportions of the
            domains in a `DomainMixtureSampler`.
        scorer: A Scorer, or its name, or `{name, params}`, or `{class_path, init_args}`. Default: the one that
            the actuator brings, if it does.
        actuator: The same, of a Selector, Reweighter or Mixer.
        domains: For `mix`: the domains, or their weights before the mixer acts. Default: those of the sampler.
        mount: Where to act: `point` (a `DataFlexPoint` in the module), the name of the module's loss,
            `on_train_batch_start` or `on_before_backward`. Default: the point if there is one, else `policy_loss`.
        drop: What becomes of samples that are not kept: `mask` deletes them from the loss, denominators and KL
            included; `rows` takes them out of the batch, so that the policy is not run on them either; `weight` gives
            their policy term a weight of 0 and leaves the rest.
        trim: With `rows`: cut the response tokens that are valid in no kept sample.
        shared_fields: Fields of the batch that have no entry per sample, whatever their length; for `rows` and
            `refill`.
        token_fields: Fields beside `input_ids`, `attention_mask` and `position_ids` whose last L columns are response
            tokens; for `trim` and `refill`.
        refill: `{groups, max_rounds, max_age, rollout}`: roll out fresh prompts until so many groups are kept.
        on_empty: When no sample of a step is kept: `skip` leaves the parameters as they are, `keep` trains on all
            samples, `raise` stops.
        warmup_step: Training steps before the callback acts.
        update_step: A Mixer sets new proportions every so many steps; select and reweight act at every step.
        scope: `global` decides on the samples of all ranks together; `rank` lets each rank decide on its own.
        fields: The batch's own field names, `{"rm_scores": "rewards"}`.
        weights_key: The field that the weights (N, L) are written to, multiplied into what is there.
        enforce: False decides and logs, and changes nothing.
        adv_estimator: The module's advantage estimator. Default: its `adv_estimator` attribute or hyperparameter.
        label: Name in the log and the checkpoint, for several callbacks.
        trace: A path, `.jsonl` or `.parquet`, to which a row is written for each sample and decision.
        trace_every: Only of every so many steps.
        trace_rows: Most rows of a trace, of all ranks together.
        log_level: `info` says a line when a fit starts and one when it ends, through the logger `lightning_dataflex`
            of `logging`; `debug` one of each logged step too; `warning` none.

    Example:
        >>> callback = DataFlexCallback("select", scorer="group_solve_rate",
        ...                             actuator={"name": "threshold_band", "params": {"low": 0.2, "high": 0.8}})
        >>> callback.state_key
        'DataFlexCallback[select.group_solve_rate.threshold_band]'
    """

    def __init__(
        self,
        mechanism: Mechanism,
        scorer: ComponentConfig | Scorer | str | dict[str, Any] | None = None,
        actuator: ComponentConfig | Actuator | str | dict[str, Any] | None = None,
        domains: list[str] | dict[str, float] | None = None,
        mount: str | None = None,
        drop: Drop = "mask",
        trim: bool = False,
        shared_fields: list[str] | None = None,
        token_fields: list[str] | None = None,
        refill: RefillConfig | dict[str, Any] | None = None,
        on_empty: OnEmpty = "skip",
        warmup_step: int = 0,
        update_step: int = 1,
        scope: Scope = "global",
        fields: dict[str, str] | None = None,
        weights_key: str = "rollout_is_weights",
        enforce: bool = True,
        adv_estimator: str | None = None,
        label: str | None = None,
        trace: str | None = None,
        trace_every: int = 1,
        trace_rows: int = 1_000_000,
        log_level: LogLevel = "info",
    ) -> None:
        super().__init__()
        self.config = DataFlexConfig(
            mechanism=mechanism,
            scorer=scorer,
            actuator=actuator,
            domains=domains,
            mount=mount,
            drop=drop,
            trim=trim,
            shared_fields=shared_fields,
            token_fields=token_fields,
            refill=refill,
            on_empty=on_empty,
            warmup_step=warmup_step,
            update_step=update_step,
            scope=scope,
            fields=fields,
            weights_key=weights_key,
            enforce=enforce,
            adv_estimator=adv_estimator,
            label=label,
            trace=trace,
            trace_every=trace_every,
            trace_rows=trace_rows,
            log_level=log_level,
        )
        self.pipeline = (Mixture if mechanism == "mix" else Pipeline).from_config(self.config)
        if isinstance(self.pipeline, Pipeline) and self.pipeline.actuator.changes_advantages:
            # They are to be replaced: a rank that lacks them must say so while the others listen.
            self.pipeline.requires = (*self.pipeline.requires, "advantages")
        if isinstance(self.pipeline, Pipeline) and self.config.refill is not None:
            self.pipeline.requires = (*self.pipeline.requires, "uid")
        self.made_of = self.config.described() | {
            "scorer": described(self.pipeline.scorer),
            "actuator": described(self.pipeline.actuator),
        }
        self.steering = (
            Steering(self.pipeline, self.state_key, enforce=enforce) if isinstance(self.pipeline, Mixture) else None
        )
        self.deciding = Deciding(self.pipeline, self.config, self.name) if isinstance(self.pipeline, Pipeline) else None
        self.layout = Layout.of(shared_fields, [*(token_fields or ()), weights_key])
        self.num_steps = 0
        self.flow: RolloutFlow | None = None
        """Of the callback that leads it: what prompts are rolled out, and how often."""
        self.team: Team | None = None
        self._mount: Mount | None = None
        self._reading: FirstReading | None = None
        self._trainer: Trainer | None = None
        self.watch = StepWatch()
        self._acted = False
        self.telling = Telling(self.name, log_level)

    @property
    def name(self) -> str:
        """`label`, or what the callback is made of."""
        parts = (self.config.mechanism, registered_name(self.pipeline.scorer), registered_name(self.pipeline.actuator))
        return self.config.label or ".".join(parts)

    @property
    def state_key(self) -> str:
        """Under which a checkpoint holds the state; parameters that may be tuned between runs are not in it."""
        return f"DataFlexCallback[{self.name}]"

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs; the same on every rank."""
        return saved(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` gave; a warning says what the run was configured otherwise with."""
        take_back(self, state_dict)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Take the prompts and groups that wait from whichever callback has saved them."""
        take_flow_back(self, checkpoint["callbacks"])

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Bring the trace to where the checkpoint is."""
        if self.deciding is not None and self.deciding.trace is not None:
            self.deciding.trace.flush()

    def plot(self, val: Any = None, ax: Any = None) -> tuple[Any, Any]:
        """A picture of what the run has decided so far, on rank 0: kept fraction and rewards, or proportions.

        Args:
            val: What was logged of each step, `[{"kept_frac": 0.5}, ...]`, or of one. Default: of this run, of which
                a callback remembers up to 2,000 steps evenly spread; a checkpoint holds none of it.
            ax: Axes to draw on. Default: new ones.

        Returns:
            The figure and its axes, as the `plot` of a torchmetrics Metric.

        Raises:
            ValueError: There was no step yet.
            TypeError: `val` is nothing that is logged, or `ax` is no axes.
            ModuleNotFoundError: matplotlib is not installed.

        Example:
            >>> callback = DataFlexCallback("select", "group_solve_rate", "threshold_band")
            >>> figure, axes = callback.plot([{"kept_frac": 0.75}, {"kept_frac": 0.5}])
            >>> [line.get_ydata().tolist() for line in axes.get_lines()]
            [[0.75, 0.5]]
        """
        steps, numbers = self.telling.history.steps, self.telling.history.numbers
        if val is not None:
            numbers = logged_numbers(val)
            steps = list(range(len(numbers)))
        return run_so_far(steps, numbers, ax)

    # -- coming and going ------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse what does not fit the module's estimator, or the other callbacks, before anything is computed."""
        if stage != "fit":
            return
        self.watch.reset()
        self.check(pl_module)
        every = dataflex_callbacks(trainer)
        check_team(every)
        # The first to be set up makes it for all of them.
        self.team, self.flow = Team(every) if self is every[0] else every[0].team, None
        assert self.team is not None
        if self.team.leader is self:
            self.flow = self.team.flow()
        if self.steering is not None:
            self.steering.attach(trainer)
        check_progress(self.pipeline.actuator, trainer, epochs_vary=self.team.leader is not None)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach, now that the module is configured and the strategy has wrapped it."""
        assert self.team is not None
        self.check(pl_module)
        self.watch.check(self.name)
        if self is self.team.members[0]:
            check_places_everywhere(trainer)
        self._trainer = trainer
        self._mount = self._new_mount(pl_module)
        self._mount.attach(pl_module)
        # What a scorer of prompts remembers stays in main memory.
        self.pipeline.scorer.to(pl_module.device)
        self.pipeline.process_group = data_parallel_group(pl_module)
        if self.deciding is not None and self._decides_on_samples:
            self.deciding.attach(trainer, pl_module, self.num_steps)
        if self.flow is not None:
            self.flow.attach(trainer, pl_module, self.pipeline.process_group)
        self.telling.start(trainer, pl_module, self, self._mount)

    def _new_mount(self, pl_module: LightningModule) -> Mount:
        assert self.team is not None
        kind = self.mount_kind(pl_module)
        mount = kind(self._decide, self.pipeline.fields, self.config.drop, self.config.weights_key)
        mount.received = self.team.relay.reading
        if self is not self.team.members[-1]:
            mount.hand_on = self.team.relay.hand_on
        # Of several at the point the last acts last, of several around the training step the first.
        if self is self.team.members[0 if isinstance(mount, BatchMount) else -1]:
            mount.finish = self._finished
            self._reading = None if isinstance(mount, GradientMount) else self.team.first_reading()
            if self._reading is not None:
                mount.watch = self._reading.watched
        return mount

    def mount_kind(self, pl_module: LightningModule) -> Any:
        """Where the callback acts in this module; a ValueError where it cannot."""
        kind = mount_of(pl_module, self.config.mount)
        check_mount(self, kind, pl_module)
        return kind

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say what may not go as planned, now that schedules are there."""
        if self.flow is not None:
            warn_of_schedules(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say what the run has come to."""
        self.telling.end(trainer, self)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave the module as it was found."""
        self._leave()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the module as it was found; the Trainer does not call `teardown` after an exception."""
        self._leave()

    def _leave(self) -> None:
        for part in (self._mount, self.steering, self.flow, self.deciding):
            if part is not None:
                part.detach()
        if self._reading is not None:
            self._reading.stop()
        self._mount = self._reading = self._trainer = self.pipeline.process_group = None

    def check(self, pl_module: LightningModule) -> None:
        """Raise a ValueError if the scorer or the actuator does not fit the module's advantage estimator."""
        estimator = self.config.adv_estimator or setting(pl_module, "adv_estimator")
        validate_compat(self.pipeline.scorer, self.pipeline.actuator, estimator)

    # -- during a step ---------------------------------------------------------------------------------------------

    @property
    def _decides_on_samples(self) -> bool:
        """Whether there is a decision on the samples of each step, and not on prompts or domains."""
        return self.steering is None and (
            self.pipeline.scorer.timing != "pre_rollout" or self.config.refill is not None
        )

    @property
    def _waits_for_the_flow(self) -> bool:
        """Whether the flow of rollouts asks, in place of the mount."""
        assert self.team is not None
        return self.team.leader is not None and (
            self.steering is not None or self.config.refill is not None or not self._decides_on_samples
        )

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Let the mount see the batch of the dataloader."""
        assert self._mount is not None
        self.watch.begin_batch(trainer)
        if self.flow is not None:
            self.flow.begin_step()
        if self.deciding is not None:
            self.deciding.begin_batch(new_step=batch_idx % trainer.accumulate_grad_batches == 0)
        place = self._place_in_epoch(batch_idx)
        if self.steering is not None and place is not None:
            if self.team is not None and self.team.leader is not None:
                self.steering.follow_flow()
            self.steering.begin_step(place)
        self._acted = False
        self._mount.begin(batch)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Check that the decision is in the loss."""
        assert self._mount is not None
        self._mount.before_backward(pl_module)
        # Under manual optimisation another loss may come first; the end of the batch is the check there.
        if pl_module.automatic_optimization:
            self._check_fired(pl_module)
        if self.deciding is not None and not self._waits_for_the_flow:
            self.deciding.check_loss(loss)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log what was decided. The numbers are those of the global batch: there is nothing to reduce over ranks."""
        self._check_fired(pl_module)
        assert self.team is not None
        if self._reading is not None:
            # Under manual optimisation several rollouts may be collected before any is trained on.
            automatic = pl_module.automatic_optimization
            has_trained = bool(outputs) and outputs.get("loss") is not None if automatic else self.team.has_stepped
            self._reading.end_step(has_trained=has_trained)
        metrics: dict[str, Any] = {}
        batch_size = 1
        if self.steering is not None:
            place = self._place_in_epoch(batch_idx)
            self.steering.end_step(
                self.num_steps,
                -1 if place is None else place,
                is_last=trainer.is_last_batch and place is not None,
                progress=progress(trainer, self.num_steps + 1),
            )
            metrics = self.steering.mixture.metrics | {"lag": float(self.steering.lag)}
        elif self.deciding is not None and self._decides_on_samples:
            metrics, batch_size = self.deciding.metrics, max(1, self.deciding.num_samples)
        metrics |= self.team.metrics_of(self)
        if self.flow is not None:
            self.flow.source.end_step()
        prefix = self.team.log_prefix(self)
        for key, value in metrics.items():
            pl_module.log(prefix + key, value, prog_bar=key in ON_THE_BAR, on_step=True, batch_size=batch_size)
        self.telling.step(trainer, self, metrics, prefix, batch_idx)
        self.num_steps += 1
        self.watch.end_batch(trainer, batch_idx)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let the sampler know that another epoch comes next."""
        if self.steering is not None:
            self.steering.end_epoch()

    def _place_in_epoch(self, batch_idx: int) -> int | None:
        """The number in its epoch of the last batch that the loader has given; None if it has given none yet."""
        flow = self.team.leader.flow if self.team is not None and self.team.leader is not None else None
        if flow is None:
            return batch_idx
        num_used = flow.source.num_used
        return num_used - 1 if num_used else None

    def _decide(self, batch: RolloutBatch) -> Decision | None:
        """The decision to put into a batch; None outside of training, and where none is to be enforced."""
        if not self._is_training:
            return None
        assert self.team is not None
        self._acted = True
        self.watch.act()
        if self._waits_for_the_flow:
            return None
        if isinstance(self.pipeline, Mixture):
            self.pipeline.observe(batch, self.num_steps)
            return None
        if len(self.team.members) > 1 and not holds_originals(batch.source):
            raise ValueError(
                f"A {type(batch.source).__name__} has no room for what several callbacks must know of each other. "
                "Use a dict, a TensorDict or a dataclass without slots."
            )
        assert self.deciding is not None
        decision = self.deciding.decide(batch, self.num_steps)
        return decision if self.config.enforce else None

    def _finished(self, batch: Any) -> Any:
        assert self.team is not None
        if not self._is_training:
            return batch
        batch = self.team.finished(batch, self.pipeline.fields)
        return batch if self._reading is None else self._reading.watched_in(batch, self.pipeline.fields)

    @property
    def _is_training(self) -> bool:
        return self._trainer is not None and self._trainer.training

    def _check_fired(self, pl_module: LightningModule) -> None:
        if not self._acted:
            assert self._mount is not None
            raise RuntimeError(
                f"{self.name} did not act in this training step of {type(pl_module).__name__}: "
                f"{self._mount.why_missed}."
            )


def dataflex_callbacks(trainer: Trainer) -> list[DataFlexCallback]:
    """Those of a Trainer, in their order."""
    every: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return [callback for callback in every if isinstance(callback, DataFlexCallback)]
