"""The typed `dataflex` block, and what it builds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from lightning_dataflex.core.actuator import Actuator, Selector
from lightning_dataflex.core.block import Drop, LogLevel, Mechanism, OnEmpty, Scope, check_keys, check_values, is_path
from lightning_dataflex.core.building import ComponentConfig, component
from lightning_dataflex.core.checks import check_whole
from lightning_dataflex.core.compat import chooses_prompts, validate_compat
from lightning_dataflex.core.registry import Kind, registered_name
from lightning_dataflex.core.scorer import Scorer
from lightning_dataflex.functional.choices import shown

MOST_GROUPS = 1_000_000
"""More groups, rounds or steps than a refill can have a use for."""

OF_SAMPLES = ("drop", "trim", "refill", "trace")
"""Keys that only a rule on samples reads."""
REPORTING = ("trace", "trace_every", "trace_rows", "log_level")
"""Keys that change what is written of a run, and nothing of the run."""

ACTUATOR_KINDS: dict[str, Kind] = {"select": "selector", "reweight": "reweighter", "mix": "mixer"}


@dataclass
class RefillConfig:
    """Rollouts are repeated with fresh prompts until enough groups are kept.

    Args:
        groups: Groups that the loss gets in each step, on each rank.
        max_rounds: Rollouts after which a step goes on with what it has.
        max_age: Steps for which a kept group that was one too many may wait.
        rollout: The module's method that takes prompts and returns a rollout batch.

    Raises:
        ValueError: A number is too small or too large, or no whole number, or `rollout` is no name.

    Example:
        >>> RefillConfig.of({"groups": 32}).max_rounds
        10
    """

    groups: int
    max_rounds: int = 10
    max_age: int = 1
    rollout: str = "rollout"

    def __post_init__(self) -> None:
        for name, least in (("groups", 1), ("max_rounds", 1), ("max_age", 0)):
            check_whole(f"refill.{name}", getattr(self, name), least, MOST_GROUPS)
        if not is_path(self.rollout) or "." in self.rollout:
            raise ValueError(f"refill.rollout is {shown(self.rollout)}. Give the name of the module's method, as text.")

    @classmethod
    def of(cls, block: RefillConfig | Mapping[str, Any] | None) -> RefillConfig | None:
        """A block that was read from YAML, one that is typed already, or None."""
        if block is None or isinstance(block, cls):
            return block
        if not isinstance(block, Mapping):
            raise ValueError(f"refill is {shown(block)}. Give a mapping, refill: {{groups: 32}}.")
        check_keys("refill", block, cls)
        if "groups" not in block:
            raise ValueError("refill lacks 'groups'. Say how many groups the loss gets in each step on each rank.")
        return cls(**block)


@dataclass
class DataFlexConfig:
    """One `dataflex` block.

    Args:
        mechanism: `select` keeps samples, `reweight` weighs samples or tokens, `mix` steers the domains to come.
        scorer: `{name, params}` of a registered Scorer, or `{class_path, init_args}`. Default: the one that
            the actuator brings, if it does.
        actuator: The same, of a Selector, Reweighter or Mixer, as `mechanism` says.
        domains: For `mix`: the domains, or their weights before the mixer acts. Default: those of the sampler.
        mount: Where the callback acts: `point` (a `DataFlexPoint` in the module), the name of the module's loss,
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
        fields: The batch's own field names, `{rm_scores: rewards}`.
        weights_key: The field that the weights are written to.
        enforce: False decides and logs, and changes nothing.
        adv_estimator: The module's advantage estimator. Default: its `adv_estimator` attribute or hyperparameter.
        label: Name in the log and the checkpoint, for several callbacks.
        trace: A path, `.jsonl` or `.parquet`, to which a row is written for each sample and decision.
        trace_every: Only of every so many steps.
        trace_rows: Most rows of a trace, of all ranks together.
        log_level: `info` says a line when a fit starts and one when it ends, through the logger `lightning_dataflex`
            of `logging`; `debug` one of each logged step too; `warning` none.
    """

    mechanism: Mechanism
    scorer: ComponentConfig | Scorer | str | dict[str, Any] | None = None
    actuator: ComponentConfig | Actuator | str | dict[str, Any] | None = None
    domains: list[str] | dict[str, float] | None = None
    mount: str | None = None
    drop: Drop = "mask"
    trim: bool = False
    shared_fields: list[str] | None = None
    token_fields: list[str] | None = None
    refill: RefillConfig | dict[str, Any] | None = None
    on_empty: OnEmpty = "skip"
    warmup_step: int = 0
    update_step: int = 1
    scope: Scope = "global"
    fields: dict[str, str] | None = None
    weights_key: str = "rollout_is_weights"
    enforce: bool = True
    adv_estimator: str | None = None
    label: str | None = None
    trace: str | None = None
    trace_every: int = 1
    trace_rows: int = 1_000_000
    log_level: LogLevel = "info"

    def __post_init__(self) -> None:
        check_values(vars(self))
        self.refill = RefillConfig.of(self.refill)
        if self.scorer is None and self.actuator is None:
            raise ValueError("The dataflex block lacks 'actuator'. Give mechanism, scorer and actuator.")
        if self.refill is not None:
            self._check_refill()
        if self.mechanism == "mix" and self.scope == "rank":
            raise ValueError("scope is 'rank', but all ranks draw by the same proportions. Use scope: global.")
        if self.mechanism == "mix":
            for name in ("drop", "trim", "on_empty", "weights_key", "trace"):
                if getattr(self, name) != getattr(DataFlexConfig, name):
                    raise ValueError(
                        f"{name} is {getattr(self, name)!r}, which mechanism: mix does not read. Leave it out."
                    )
        if self.mechanism != "mix" and self.domains is not None:
            raise ValueError(f"domains is {self.domains!r}, which only mechanism: mix reads. Leave it out.")

    def _check_refill(self) -> None:
        for name, wanted, why in (
            ("mechanism", "select", "refill replaces what a selector drops"),
            ("on_empty", "skip", "refill goes on until something is kept"),
            ("enforce", True, "refill cannot try without doing"),
            ("mount", self.mount if self.mount in (None, "point") else "point", "refill acts where rollouts arrive"),
        ):
            if getattr(self, name) != wanted:
                raise ValueError(f"{name} is {getattr(self, name)!r}, but {why}. Use {name}: {wanted}, or no refill.")

    @classmethod
    def of(cls, block: DataFlexConfig | Mapping[str, Any]) -> DataFlexConfig:
        """A block that was read from YAML, or one that is typed already.

        Example:
            >>> DataFlexConfig.of({"mechanism": "selct", "scorer": "group_solve_rate", "actuator": "threshold_band"})
            Traceback (most recent call last):
            ValueError: mechanism is 'selct'. Did you mean 'select'? Known: select, reweight, mix.
        """
        if isinstance(block, cls):
            return block
        if not isinstance(block, Mapping):
            raise ValueError(f"A dataflex block is {shown(block)}. Give a mapping with mechanism, scorer and actuator.")
        check_keys("The dataflex block", block, cls)
        check_values(block)
        if "mechanism" not in block:
            raise ValueError("The dataflex block lacks 'mechanism'. Give mechanism, scorer and actuator.")
        return cls(**block)

    def described(self) -> dict[str, str]:
        """Each setting that says what is done, as text, without the components."""
        names = (each.name for each in fields(self) if each.name not in ("scorer", "actuator", *REPORTING))
        return {name: str(getattr(self, name)) for name in names}

    def components(self) -> tuple[Scorer, Actuator]:
        """The scorer and the actuator, built and checked against each other, the estimator and the mount."""
        scorer = None if self.scorer is None else component("scorer", self.scorer)
        actuator = self._actuator(scorer)
        if scorer is None and not actuator.default_scorer:
            raise ValueError(
                f"The dataflex block lacks 'scorer', and {registered_name(actuator)} acts on any score. Give "
                "mechanism, scorer and actuator."
            )
        scorer = scorer or component("scorer", actuator.default_scorer)
        if scorer.timing == "pre_rollout":
            self._check_before_rollout(scorer)
        validate_compat(scorer, actuator, self.adv_estimator)
        if isinstance(actuator, Selector):
            self._check_mount(actuator)
        return scorer, actuator

    def _check_before_rollout(self, scorer: Scorer) -> None:
        name = registered_name(scorer)
        if self.mechanism != "select":
            raise ValueError(
                f"{name} scores prompts before their rollout, but mechanism is {self.mechanism!r}. "
                "Use mechanism: select."
            )
        screens = not chooses_prompts(scorer)
        unread = ("on_empty", "weights_key", "scope", *(() if screens else OF_SAMPLES))
        for key in unread:
            if getattr(self, key) != getattr(DataFlexConfig, key):
                elsewhere = ", or give it to the block of a selector" if key in OF_SAMPLES else ""
                raise ValueError(
                    f"{key} is {getattr(self, key)!r}, but {name} decides before there are samples. Leave it "
                    f"out{elsewhere}."
                )
        if self.mount not in (None, "point"):
            raise ValueError(
                f"mount is {self.mount!r}, but {name} learns from what passes through a DataFlexPoint. Leave mount out."
            )
        if screens and self.refill is None:
            raise ValueError(
                f"{name} generates the rest of promising groups only, so that a step has fewer groups than prompts. "
                "Say how many it is to train on: refill: {groups: ...}."
            )

    def _actuator(self, scorer: Any) -> Any:
        kind, spec = ACTUATOR_KINDS[self.mechanism], self.actuator
        if spec is None:
            # A rule on prompts brings what its paper does with its scores.
            default = scorer.default_selector() if kind == "selector" and scorer is not None else None
            if default is None:
                raise ValueError("The dataflex block lacks 'actuator'. Give mechanism, scorer and actuator.")
            return default
        if kind != "mixer":
            return component(kind, spec)
        if self.domains is None:
            try:
                return component(kind, spec)
            except ValueError as error:
                if "needs domains" not in str(error):
                    raise
                raise ValueError(
                    "The mixer needs to be made for its domains. Name them in the block: domains: [...]."
                ) from error
        # A mixer that is to be made for its domains gets those of the block.
        return component(kind, spec, domains=[str(name) for name in self.domains])

    def _check_mount(self, selector: Selector) -> None:
        if self.drop == "rows" and self.mount not in (None, "point", "on_train_batch_start"):
            raise ValueError(
                f"drop is 'rows', but at mount {self.mount!r} the policy has seen the dropped samples already. "
                "Use a DataFlexPoint before the policy's forward pass, or drop: mask."
            )
        if self.mount != "on_before_backward":
            return
        too_late = "but at mount 'on_before_backward' the loss is computed already"
        if self.drop == "mask":
            raise ValueError(
                f"drop is 'mask', {too_late}: dropped samples stay in its denominators. "
                "Use drop: weight, or another mount."
            )
        if selector.changes_advantages:
            raise ValueError(
                f"{registered_name(selector)} changes advantages, {too_late}. Use advantages: group, or another mount."
            )
