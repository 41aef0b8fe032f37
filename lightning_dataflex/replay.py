"""RLEP: solved responses of a saved pool enter the groups of a run."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torchmetrics.utilities import rank_zero_warn

from lightning_dataflex.asking import data_parallel_group, setting
from lightning_dataflex.callback import Callback, DataFlexCallback
from lightning_dataflex.calls import check_passed
from lightning_dataflex.core.checks import check_finite, check_whole
from lightning_dataflex.core.compat import chooses_prompts
from lightning_dataflex.core.memory import changes, reading
from lightning_dataflex.core.replay import MOST_POOL_BYTES, ReplayPool, solved, with_replayed
from lightning_dataflex.core.rollout import RolloutBatch
from lightning_dataflex.core.samples import Layout
from lightning_dataflex.core.warn import warn_once
from lightning_dataflex.functional.advantages import group_advantages
from lightning_dataflex.functional.choices import shown
from lightning_dataflex.mount import forget_compiled_code, points_of
from lightning_dataflex.stopping import StepWatch
from lightning_dataflex.sync import exchanged

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class RLEP(Callback):
    """Puts solved responses of a pool into the group of their prompt, with the log-probabilities that they came with.

    At the module's `DataFlexPoint` each group of G fresh responses gets at most `num` more of its prompt, behind its
    own; the advantages of all are then those of the G + num. A group that failed as a whole has a signal again. The
    `old_log_probs` of a replayed response are those of the policy that generated it, so that the loss's ratio is off
    policy, as in the paper. Prompts must have the same `prompt_id`, or else `uid`, at every visit and in the pool's
    run.

    Source: RLEP, Zhang et al. 2025, arXiv:2507.07451.

    Args:
        pool: A file that a run with `collect` wrote, or a `ReplayPool`. Default: none yet, what `collect` gathers.
        num: Responses to put into each group; 2 beside 16 in the paper. 0 to collect alone.
        collect: A file to write this run's solved responses to at its end, those of `pool` included.
        max_per_prompt: Responses that are kept of each prompt, the first ones; a `ReplayPool` has a number of its own.
        success_threshold: A response is solved when its reward is above this.
        seed: Of the draws.
        adv_estimator: How the advantages of a group are computed: grpo, dr_grpo or rloo. Default: as the module says.
        fields: The batch's own field names, `{"rm_scores": "rewards"}`.
        token_fields: Fields beside `input_ids`, `attention_mask` and `position_ids` whose last L columns are response
            tokens.
        shared_fields: Fields of the batch that have no entry per sample.
        max_bytes: The largest file to read a pool from.

    Example:
        >>> RLEP(num=0, collect="solved.pt").num
        0
    """

    def __init__(
        self,
        pool: str | Path | ReplayPool | None = None,
        num: int = 2,
        collect: str | None = None,
        max_per_prompt: int = 8,
        success_threshold: float = 0.5,
        seed: int = 0,
        adv_estimator: str | None = None,
        fields: dict[str, str] | None = None,
        token_fields: list[str] | None = None,
        shared_fields: list[str] | None = None,
        max_bytes: int = MOST_POOL_BYTES,
    ) -> None:
        super().__init__()
        for name, value in (("num", num), ("seed", seed)):
            check_whole(name, value, 0)
        check_whole("max_bytes", max_bytes, 1)
        check_finite("success_threshold", success_threshold)
        if pool is None and collect is None:
            raise ValueError("RLEP has neither a pool nor collect. Give a file to read from, or one to write to.")
        if pool is None:
            pool = ReplayPool(max_per_prompt)
        if not isinstance(pool, (str, Path, ReplayPool)):
            raise ValueError(f"pool is {shown(pool)}. Give a file that a run with collect wrote, or a ReplayPool.")
        self.pool = pool if isinstance(pool, ReplayPool) else ReplayPool.load(pool, max_per_prompt, max_bytes)
        self.num, self.collect, self.seed = num, collect, seed
        self.success_threshold, self.adv_estimator = success_threshold, adv_estimator
        self.fields = dict(fields or {})
        self.layout = Layout.of(shared_fields, token_fields)
        self.num_steps = self.num_replayed = 0
        named: dict[str, Any] = {"pool": pool if isinstance(pool, (str, Path)) else None, "num": num, "seed": seed}
        named |= {"max_per_prompt": self.pool.max_per_prompt, "success_threshold": success_threshold}
        self._made_of = {name: str(value) for name, value in named.items()}
        self._watch = StepWatch()
        self._acted = False
        self._restore: list[Callable[[], None]] = []

    @property
    def state_key(self) -> str:
        """Under which a checkpoint holds the state."""
        return "RLEP"

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs; the same on every rank."""
        state: dict[str, Any] = {"num_steps": self.num_steps, "made_of": dict(self._made_of)}
        state |= self._watch.marks(remembers=self.collect is not None)
        return state | ({"pool": self.pool.state_dict()} if self.collect is not None else {})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        with reading(self.state_key):
            self.num_steps = state_dict["num_steps"]
            self._watch.load(state_dict)
            changed = changes(state_dict["made_of"], self._made_of)
            if changed:
                goes_on = "; the pool is the one in it" if "pool" in state_dict and self.collect is not None else ""
                warn_once(self, f"RLEP goes on from a checkpoint with other settings{goes_on}: {changed}.")
            if "pool" in state_dict and self.collect is not None:
                self.pool.load_state_dict(state_dict["pool"])

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse what cannot work together before anything is computed."""
        if stage != "fit":
            return
        self._watch.reset()
        # Said now, and not after the first rollout.
        group_advantages(torch.zeros(2), torch.zeros(2).long(), self._estimator(pl_module))
        self._check_others(list(trainer.callbacks))  # type: ignore[attr-defined]
        if self.collect is not None:
            self._check_writable(Path(self.collect))

    def _check_others(self, callbacks: list[Any]) -> None:
        place = callbacks.index(self)
        for i, other in enumerate(callbacks):
            if not isinstance(other, DataFlexCallback):
                continue
            if other.config.mechanism == "mix" or (i < place and chooses_prompts(other.pipeline.scorer)):
                raise ValueError(
                    f"{other.name} learns from what prompts are answered, and would take replayed responses for fresh "
                    f"ones. {'Leave one of them out.' if other.config.mechanism == 'mix' else 'List RLEP before it.'}"
                )
            if other.config.refill is not None:
                raise ValueError(
                    f"{other.name} has refill, which drops groups that failed as a whole before RLEP could put "
                    "solved responses into them. Use one or the other."
                )

    def _check_writable(self, path: Path) -> None:
        """Said now, and not after the run."""
        probe = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
        try:
            if path.is_dir():
                raise IsADirectoryError("it is a folder")
            path.parent.mkdir(parents=True, exist_ok=True)
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise ValueError(
                f"collect is {str(path)!r}, which cannot be written: {error}. Give another file."
            ) from error

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Be there when the module's point is called, before the callbacks that decide on its batch."""
        self._watch.check("RLEP")
        points = points_of(pl_module)
        if not points:
            raise ValueError(
                f"RLEP acts at a DataFlexPoint, and {type(pl_module).__name__} has none. Write self.dataflex = "
                "DataFlexPoint() in its __init__ and batch = self.dataflex(batch) after the advantages."
            )
        if len(points) > 1:
            raise ValueError(
                f"{type(pl_module).__name__} has {len(points)} DataFlexPoints, and RLEP would extend the batch at "
                "each. Use one."
            )
        group, estimator = data_parallel_group(pl_module), self._estimator(pl_module)

        @torch.compiler.disable(recursive=True)
        def hook(point: Any, _args: Any, source: Any) -> Any:
            if not trainer.training:
                return None
            check_passed(source, pl_module, point)
            self._acted = True
            self._watch.act()
            return self._extended(RolloutBatch.of(source, self.fields), estimator, group)

        self._restore = [point.register_forward_hook(hook, prepend=True).remove for point in points]
        forget_compiled_code()

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        """Another batch, whose point is still to be called."""
        self._watch.begin_batch(trainer)
        self._acted = False

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log what was replayed."""
        if not self._acted:
            raise RuntimeError(
                f"RLEP did not act in this training step of {type(pl_module).__name__}: its DataFlexPoint was not "
                "called. Call batch = self.dataflex(batch) in every training_step."
            )
        metrics = {"dataflex/replayed": float(self.num_replayed), "dataflex/pool_size": float(len(self.pool))}
        pl_module.log_dict(metrics, on_step=True, batch_size=1)
        self.num_steps, self.num_replayed = self.num_steps + 1, 0
        self._watch.end_batch(trainer, batch_idx)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write what was collected."""
        if self.collect is not None and trainer.is_global_zero:
            self.pool.save(self.collect)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave the module as it was found."""
        self._leave()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the module as it was found, and write what was collected: after an exception nobody else does."""
        is_there = bool(self._restore)
        self._leave()
        try:
            if is_there:
                self.on_train_end(trainer, pl_module)
        except OSError as error:
            # The other callbacks are yet to hear of the first error.
            rank_zero_warn(f"RLEP cannot write its pool to {self.collect}: {error}.", UserWarning)

    def _leave(self) -> None:
        while self._restore:
            self._restore.pop()()
        forget_compiled_code()

    def _estimator(self, pl_module: LightningModule) -> str | None:
        return self.adv_estimator or setting(pl_module, "adv_estimator")

    def _extended(self, batch: RolloutBatch, estimator: str | None, group: Any) -> Any:
        batch.require(("response_mask", "rm_scores", "uid", "advantages"))
        found: list[Any] = []
        if self.collect is not None:
            # Every rank keeps what any has found, so that all draw from one pool.
            everyone, _ = exchanged(lambda: ({"found": [self._found(batch)]}, 1), group, "solved responses")
            found = [each for part in everyone["found"] for each in part]
        source, num = batch.source, 0
        if self.num:
            key = (self.seed, self.num_steps)
            source, num = with_replayed(batch, self.pool, self.num, self.layout, estimator, group, *key)
        self.pool.add(found, self.fields.get("response_mask", "response_mask"))
        self.num_replayed += num
        return source

    def _found(self, batch: RolloutBatch) -> list[Any]:
        found = solved(batch, self.layout, self.success_threshold, self.num_steps, self.pool.has_room)
        if found:
            # Said now, and not when the pool is to be written.
            found[0][1].state_dict()
        return [(prompt, sample.on_cpu()) for prompt, sample in found]
