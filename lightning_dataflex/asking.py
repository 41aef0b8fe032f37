"""What a Trainer and its module say of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchmetrics.utilities import rank_zero_warn

from lightning_dataflex.core.actuator import Actuator
from lightning_dataflex.core.registry import registered_name

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


def check_progress(actuator: Actuator, trainer: Trainer, *, epochs_vary: bool = False) -> None:
    """Raise a ValueError if a rule needs to know how long the run is, and nobody says.

    Args:
        epochs_vary: Whether it is not known how many steps an epoch has.
    """
    if not actuator.needs_progress or (trainer.max_steps or -1) >= 0:
        return
    name = registered_name(actuator)
    if epochs_vary:
        raise ValueError(
            f"{name} follows the progress of the run, but with refill or rules on prompts nobody knows how many "
            "steps an epoch has. Give the Trainer max_steps, or total_steps to the rule."
        )
    if (trainer.max_epochs or -1) < 0:
        raise ValueError(
            f"{name} follows the progress of the run, but the Trainer has no max_steps and no max_epochs. Give one, or "
            "total_steps to the rule."
        )


def warn_of_schedules(trainer: Trainer) -> None:
    """Warn if a learning rate schedule counts steps, and nobody knows how many there will be."""
    by_step = any(config.interval == "step" for config in trainer.lr_scheduler_configs)
    if by_step and (trainer.max_steps or -1) < 0:
        rank_zero_warn(
            "With refill or rules on prompts an epoch has not as many steps as the loader has batches, and a learning "
            "rate schedule that counts steps may not come to its end. Give the Trainer max_steps.",
            UserWarning,
        )


def progress(trainer: Trainer, num_steps: int) -> float | None:
    """Share of the run that is over after so many batches; None where its length is not known."""
    shares = [trainer.global_step / trainer.max_steps] if trainer.max_steps and trainer.max_steps > 0 else []
    per_epoch, epochs = trainer.num_training_batches, trainer.max_epochs
    if epochs is not None and epochs > 0 and per_epoch != float("inf"):
        shares.append(num_steps / (epochs * per_epoch))
    return max(shares, default=None)


def setting(pl_module: LightningModule, name: str) -> Any:
    """An attribute or hyperparameter of the module; None where it has none of that name."""
    value = getattr(pl_module, name, None)
    return (getattr(pl_module, "hparams", None) or {}).get(name) if value is None else value


def data_parallel_group(pl_module: LightningModule) -> Any:
    """The ranks that hold different samples; None for all. Tensor-parallel ranks hold the same."""
    mesh = getattr(pl_module, "device_mesh", None)
    return mesh["data_parallel"].get_group() if mesh and "data_parallel" in (mesh.mesh_dim_names or ()) else None


def holds_first_copy(pl_module: LightningModule) -> bool:
    """Whether no rank before this one holds the same samples, as tensor-parallel ranks do."""
    mesh = getattr(pl_module, "device_mesh", None)
    names = (mesh.mesh_dim_names or ()) if mesh else ()
    return all(mesh.get_local_rank(name) == 0 for name in names if name != "data_parallel") if mesh else True
