"""Where a run will write to, tried before anything is computed."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_dataflex.sync import exchanged

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

PROBE = 1 << 16
"""Bytes that must fit."""


def check_places(trainer: Trainer) -> None:
    """Raise a ValueError if a logger, a checkpoint callback or a trace of this Trainer cannot write to its folder.

    For the process that writes. Nothing is left behind, and folders that are yet to be made are not made.
    """
    for writer, folder in places(trainer):
        check_folder(folder, writer)


def check_places_everywhere(trainer: Trainer) -> None:
    """`check_places` on the process that writes; if it raises, every rank does. A collective."""

    def checked() -> tuple[dict[str, Any], int]:
        if trainer.is_global_zero:
            check_places(trainer)
        return {}, 0

    exchanged(checked, what="whether the run can be written")


def places(trainer: Trainer) -> list[tuple[str, str]]:
    """Who writes, and to which folder, as far as they say; remote folders are left out."""
    found = [
        (type(callback).__name__, getattr(callback, "dirpath", None) or trainer.default_root_dir)
        for callback in trainer.checkpoint_callbacks
    ]
    traces = [(callback, getattr(getattr(callback, "config", None), "trace", None)) for callback in trainer.callbacks]  # type: ignore[attr-defined]
    found += [(type(callback).__name__, Path(trace).parent) for callback, trace in traces if trace]
    found += [(type(logger).__name__, getattr(logger, "save_dir", None)) for logger in trainer.loggers]
    return [(writer, str(folder)) for writer, folder in found if folder and "://" not in str(folder)]


def check_folder(folder: str | Path, writer: str) -> None:
    """Raise a ValueError if nothing can be written to this folder, or where it would be made.

    Example:
        >>> check_folder(".", "CSVLogger")
    """
    path = Path(folder).absolute()
    there = path
    try:
        while not there.exists():
            there = there.parent
        with tempfile.TemporaryFile(dir=there) as probe:
            probe.write(bytes(PROBE))
            probe.flush()
            # Some file systems say only now that they are full.
            os.fsync(probe.fileno())
    except OSError as error:
        raise ValueError(
            f"{writer} is to write to {path}, and cannot: {error.strerror} ({there}). Free space there, allow it, or "
            "give another folder."
        ) from error
