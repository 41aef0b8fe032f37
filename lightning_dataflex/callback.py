"""DataFlexCallback: when to act, on what, what is logged, what is saved."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_dataflex.asking import check_progress, data_parallel_group, progress, setting
from lightning_dataflex.core.actuator import Actuator
from lightning_dataflex.core.building import ComponentConfig
from lightning_dataflex.core.compat import validate_compat
from lightning_dataflex.core.config import DataFlexConfig, Drop, Mechanism, OnEmpty, Scope
from lightning_dataflex.core.containers import holds_originals
from lightning_dataflex.core.decision import Decision
from lightning_dataflex.core.mixture import Mixture
from lightning_dataflex.core.pipeline import Pipeline
from lightning_dataflex.core.registry import registered_name
from lightning_dataflex.core.rollout import RolloutBatch
from lightning_dataflex.core.scorer import Scorer
from lightning_dataflex.core.summary import merged
from lightning_dataflex.mount import Mount, mount_of
from lightning_dataflex.steering import Steering
from lightning_dataflex.window import EmptySteps, StepWindow, WholeGroups

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
        scorer: A Scorer, or its name, or `{name, params}`, or `{class_path, init_args}`. Default for `mix`: the one
            that the mixer's paper uses.
        actuator: The same, of a Selector, Reweighter or Mixer.
        domains: For `mix`: the domains, or their weights before the mixer acts. Default: those of the sampler.
        mount: Where to act: `point` (a `DataFlexPoint` in the module), the name of the module's loss,
            `on_train_batch_start` or `on_before_backward`. Default: the point if there is one, else `policy_loss`.
        drop: What becomes of samples that are not kept: `mask` deletes them from the loss, denominators and KL
            included; `weight` gives their policy term a weight of 0 and leaves the rest.
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
        on_empty: OnEmpty = "skip",
        warmup_step: int = 0,
        update_step: int = 1,
        scope: Scope = "global",
        fields: dict[str, str] | None = None,
        weights_key: str = "rollout_is_weights",
        enforce: bool = True,
        adv_estimator: str | None = None,
        label: str | None = None,
    ) -> None:
        super().__init__()
        self.config = DataFlexConfig(
            mechanism=mechanism,
            scorer=scorer,
            actuator=actuator,
            domains=domains,
            mount=mount,
            drop=drop,
            on_empty=on_empty,
            warmup_step=warmup_step,
            update_step=update_step,
            scope=scope,
            fields=fields,
            weights_key=weights_key,
            enforce=enforce,
            adv_estimator=adv_estimator,
            label=label,
        )
        self.pipeline = (Mixture if mechanism == "mix" else Pipeline).from_config(self.config)
        if isinstance(self.pipeline, Pipeline) and self.pipeline.actuator.changes_advantages:
            # They are to be replaced: a rank that lacks them must say so while the others listen.
            self.pipeline.requires = (*self.pipeline.requires, "advantages")
        self.steering = Steering(self.pipeline, enforce=enforce) if isinstance(self.pipeline, Mixture) else None
        if self.pipeline.scorer.timing == "pre_rollout":
            raise ValueError(
                f"{registered_name(self.pipeline.scorer)} scores prompts before their rollout, where nothing acts yet. "
                "Use a scorer of another timing."
            )
        self.num_steps = 0
        self._empty_steps = EmptySteps(on_empty if enforce else "skip")
        self._windows: list[StepWindow] = []
        self._whole_groups: WholeGroups | None = None
        self._mount: Mount | None = None
        self._trainer: Trainer | None = None
        self._decisions: list[Decision] = []
        self._acted = False

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
        state = {"num_steps": self.num_steps, "scorer": dict(self.pipeline.scorer.state_dict())}
        if self.steering is not None:
            return state | self.steering.state_dict()
        return state | {"actuator": self.pipeline.actuator.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self.num_steps = state_dict["num_steps"]
        self.pipeline.scorer.load_state_dict(state_dict["scorer"], strict=False)
        if self.steering is not None:
            self.steering.load_state_dict(state_dict)
        else:
            self.pipeline.actuator.load_state_dict(state_dict["actuator"])

    # -- coming and going ------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse what does not fit the module's estimator, or the other callbacks, before anything is computed."""
        if stage != "fit":
            return
        self.check(pl_module)
        if self.steering is not None:
            if sum(each.steering is not None for each in dataflex_callbacks(trainer)) > 1:
                raise ValueError(
                    "Two callbacks have mechanism: mix, and only one can steer the sampler. Leave one out."
                )
            self.steering.attach(trainer)
            check_progress(self.pipeline.actuator, trainer)
        changing = [c.name for c in dataflex_callbacks(trainer) if c.pipeline.actuator.changes_advantages]
        if len(changing) > 1:
            raise ValueError(
                f"{' and '.join(changing)} each normalise the advantages of their own kept samples, and only one can. "
                "Give the others advantages: group."
            )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach, now that the module is configured and the strategy has wrapped it."""
        self.check(pl_module)
        self._trainer = trainer
        kind = mount_of(pl_module, self.config.mount)
        self._mount = kind(self._decide, self.pipeline.fields, self.config.drop, self.config.weights_key)
        self._mount.attach(pl_module)
        self.pipeline.scorer.to(pl_module.device)
        self.pipeline.process_group = data_parallel_group(pl_module)
        if self.config.enforce and self.steering is None:
            sharded = trainer.world_size > 1 and not isinstance(trainer.strategy.model, DistributedDataParallel)
            self._windows = [StepWindow(optimizer, sharded=sharded) for optimizer in trainer.optimizers]
        comparing = [part for part in (self.pipeline.scorer, self.pipeline.actuator) if part.needs_groups]
        if comparing and self.steering is None and pl_module.automatic_optimization:
            size = setting(pl_module, "num_generations")
            known = size if isinstance(size, int) else None
            self._whole_groups = WholeGroups(registered_name(comparing[0]), known, strict=self.config.enforce)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave the module as it was found."""
        self._leave()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the module as it was found; the Trainer does not call `teardown` after an exception."""
        self._leave()

    def _leave(self) -> None:
        if self._mount is not None:
            self._mount.detach()
        for window in self._windows:
            window.detach()
        if self.steering is not None:
            self.steering.detach()
        self._windows = []
        self._mount = self._trainer = self._whole_groups = self.pipeline.process_group = None
        self._decisions = []

    def check(self, pl_module: LightningModule) -> None:
        """Raise a ValueError if the scorer or the actuator does not fit the module's advantage estimator."""
        estimator = self.config.adv_estimator or setting(pl_module, "adv_estimator")
        validate_compat(self.pipeline.scorer, self.pipeline.actuator, estimator)

    # -- during a step ---------------------------------------------------------------------------------------------

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Let the mount see the batch of the dataloader."""
        assert self._mount is not None
        for window in self._windows:
            window.begin_batch()
        if self._whole_groups is not None:
            self._whole_groups.begin_batch(new_step=batch_idx % trainer.accumulate_grad_batches == 0)
        if self.steering is not None:
            self.steering.begin_step(batch_idx)
        self._decisions, self._acted = [], False
        self._mount.begin(batch)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Check that the decision is in the loss."""
        assert self._mount is not None
        self._mount.before_backward(pl_module)
        # Under manual optimisation another loss may come first; the end of the batch is the check there.
        if pl_module.automatic_optimization:
            self._check_fired(pl_module)
        self._check_empty_loss(loss)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log what was decided. The numbers are those of the global batch: there is nothing to reduce over ranks."""
        self._check_fired(pl_module)
        prefix = _log_prefix(self, dataflex_callbacks(trainer))
        if self.steering is None:
            batch_size = max(1, sum(len(decision.keep) for decision in self._decisions))
            metrics: dict[str, Any] = merged([decision.metrics for decision in self._decisions])
        else:
            self.steering.end_step(
                self.num_steps,
                batch_idx,
                is_last=trainer.is_last_batch,
                progress=progress(trainer, self.num_steps + 1),
            )
            batch_size, metrics = 1, self.steering.mixture.metrics | {"lag": float(self.steering.lag)}
        for key, value in metrics.items():
            pl_module.log(prefix + key, value, prog_bar=key == "kept_frac", on_step=True, batch_size=batch_size)
        self.num_steps += 1
        self._decisions = []

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let the sampler know that another epoch comes next."""
        if self.steering is not None:
            self.steering.end_epoch()

    def _decide(self, batch: RolloutBatch) -> Decision | None:
        """The decision to put into a batch; None outside of training, and where none is to be enforced."""
        trainer = self._trainer
        if trainer is None or not trainer.training or trainer.sanity_checking:
            return None
        self._acted = True
        if isinstance(self.pipeline, Mixture):
            self.pipeline.observe(batch, self.num_steps)
            return None
        if len(dataflex_callbacks(trainer)) > 1 and not holds_originals(batch.source):
            raise ValueError(
                f"A {type(batch.source).__name__} has no room for what several callbacks must know of each other. "
                "Use a dict, a TensorDict or a dataclass without slots."
            )
        if self.num_steps < self.config.warmup_step:
            decision = self.pipeline.keep_all(batch)
        else:
            keep_all = self.config.on_empty == "keep"
            decision = self.pipeline.decide(batch, self.num_steps, keep_all_if_empty=keep_all)
            if decision.fell_back or not decision.num_kept:
                settings = {key: value for key, value in vars(self.pipeline.actuator).items() if key[0] != "_"}
                self._empty_steps.report(self.num_steps, self.name, decision, settings)
        self._decisions.append(decision)
        for window in self._windows:
            window.add(decision)
        if self._whole_groups is not None and decision.group_ids is not None:
            self._whole_groups.add(decision.group_ids)
        return decision if self.config.enforce else None

    def _check_fired(self, pl_module: LightningModule) -> None:
        if not self._acted:
            assert self._mount is not None
            raise RuntimeError(
                f"{self.name} did not act in this training step of {type(pl_module).__name__}: "
                f"{self._mount.why_missed}."
            )

    def _check_empty_loss(self, loss: Tensor) -> None:
        nothing_kept_here = self._decisions and not any(bool(decision.weights.any()) for decision in self._decisions)
        if self.config.enforce and nothing_kept_here and not loss.isfinite():
            raise ValueError(
                f"The loss is {loss.item()} on a batch of which no sample is kept. "
                "Divide by the number of valid tokens clamped to at least 1: mask.sum().clamp(min=1)."
            )


def dataflex_callbacks(trainer: Trainer) -> list[DataFlexCallback]:
    """Those of a Trainer, in their order."""
    every: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return [callback for callback in every if isinstance(callback, DataFlexCallback)]


def _log_prefix(callback: DataFlexCallback, several: list[DataFlexCallback]) -> str:
    """`dataflex/`, and a label only where several callbacks log: the mechanism, if that says which."""
    if len(several) == 1:
        return "dataflex/"
    alike = [c for c in several if c.config.mechanism == callback.config.mechanism]
    return f"dataflex/{callback.config.label or (callback.config.mechanism if len(alike) == 1 else callback.name)}/"
