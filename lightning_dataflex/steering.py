"""How a mixture gets at the sampler of a Trainer's data loader: when the loader is made, at each step, after a stop."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from lightning_dataflex.core.memory import reading
from lightning_dataflex.core.mixture import Mixture
from lightning_dataflex.mount import replaced_attribute
from lightning_dataflex.sampler import DomainMixtureSampler

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

HOW_TO = (
    "Make the training loader by lightning_dataflex.mixture_dataloader(dataset, batch_size), or give a DataLoader "
    "sampler=DomainMixtureSampler(domains_of_the_prompts, batch_size)."
)


class Steering:
    """Puts a mixture's proportions into the sampler of the training loader.

    The loader's first batches are drawn as soon as it exists, before training starts: the sampler is told the
    proportions, and where a resumed run goes on, when the loader is made.

    Args:
        mixture: Whose proportions they are.
        state_key: Under which a checkpoint holds the state.
        enforce: False leaves the sampler's own proportions as they are.
    """

    def __init__(self, mixture: Mixture, state_key: str = "DataFlexCallback", *, enforce: bool = True) -> None:
        self.mixture, self.state_key, self.enforce = mixture, state_key, enforce
        self.sampler: DomainMixtureSampler | None = None
        self._saved: dict[str, Any] = {}
        self._start: dict[str, Any] = {}
        """Where the sampler of the next loader that is made goes on."""
        self._num_batches = 0
        self._saved_offset = 0
        self._offset: int | None = None
        """Batches that the Trainer counts in the epoch and the sampler does not; None before the first step."""
        self._epoch_over: int | None = None
        self._restore: list[Callable[[], None]] = []

    def attach(self, trainer: Trainer) -> None:
        """Be there when the training loader is made, or take the one that was given to `fit`."""
        self._epoch_over = self._offset = None
        source: Any = trainer.fit_loop._data_source.instance
        if not hasattr(source, "train_dataloader"):
            self.adopt(source, trainer)
            return
        make = source.train_dataloader

        @functools.wraps(make)
        def train_dataloader(*args: Any, **kwargs: Any) -> Any:
            loaders = make(*args, **kwargs)
            self.adopt(loaders, trainer)
            return loaders

        self._restore.append(replaced_attribute(source, "train_dataloader", train_dataloader))

    def detach(self) -> None:
        """Leave the loader and what makes it as they were found."""
        while self._restore:
            self._restore.pop()()
        if self.sampler is not None:
            self.sampler.counts_epochs = False

    def follow_flow(self) -> None:
        """Batches are counted as the flow of rollouts has pulled them, and not as the Trainer does."""
        self._offset = 0

    def begin_step(self, batch_idx: int) -> None:
        """A batch of the epoch is about to be trained on; a RuntimeError if it is not the sampler's."""
        assert self.sampler is not None
        if self._offset is None:
            # Of an epoch that was begun without it, the sampler has drawn nothing.
            self._offset = self._saved_offset if self._start else batch_idx
        batch_idx -= self._offset
        if batch_idx >= self.sampler.num_batches:
            raise RuntimeError(
                f"Batch {batch_idx} of the epoch was not drawn by the DomainMixtureSampler, which has drawn "
                f"{self.sampler.num_batches}: the Trainer has replaced it (overfit_batches), or goes through the "
                "loader more than once an epoch (several loaders of unequal length). Leave that out to mix domains."
            )
        self.sampler.use()

    def end_step(self, step_id: int, batch_idx: int, *, is_last: bool, progress: float | None) -> None:
        """The step with this batch of the epoch is over: let the mixer act, and the next batch follow it."""
        assert self.sampler is not None
        batch_idx -= self._offset or 0
        drawn_by = self.sampler.proportions_at(batch_idx)
        self.mixture.end_step(step_id, progress=progress, drawn_by=drawn_by)
        self._num_batches = batch_idx + 1
        self._epoch_over = self.sampler.epoch if is_last else None
        self.sampler.forget_before(self._num_batches)
        self._put_in_force()

    def end_epoch(self) -> None:
        """Of a loader that is made anew, the sampler begins with the next epoch."""
        # The Trainer also ends an epoch in which nothing is left to train on, after a stop.
        if self.sampler is not None and self._num_batches:
            self._start = self.sampler.start_of_next_epoch()
        self._num_batches = self._offset = self._saved_offset = 0

    @property
    def lag(self) -> int:
        """Batches that the data loader has drawn ahead: new proportions are those of the batches after them."""
        return 0 if self.sampler is None else self.sampler.num_batches - self._num_batches

    def state_dict(self) -> dict[str, Any]:
        """The mixture and the sampler, after the last step; the same on every rank."""
        # What was loaded waits until the loader is made.
        offset = self._saved_offset if self._offset is None else self._offset
        is_over = self.sampler is not None and self._epoch_over == self.sampler.epoch
        place = {"sampler": self._sampler_state(), "offset": 0 if is_over else offset}
        return {"mixture": self._saved or self.mixture.state_dict()} | place

    def _sampler_state(self) -> dict[str, Any]:
        if self.sampler is None:
            return self._start
        if self._epoch_over == self.sampler.epoch:
            # Which it may be before all that was drawn ahead was trained on.
            return self.sampler.start_of_next_epoch()
        return self.sampler.state_dict(self._num_batches)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave: now, or when the loader is made."""
        self._saved, self._start = dict(state["mixture"]), dict(state["sampler"])
        self._saved_offset = state["offset"]
        if self.sampler is not None:
            self._go_on(self.sampler)

    def adopt(self, loaders: Any, trainer: Trainer | None = None) -> None:
        """Take the sampler of these training loaders for the one to steer.

        Raises:
            ValueError: They have none or several, it was made for other ranks or another batch size, or the mixture
                cannot serve its domains.
        """
        found = list(_samplers(loaders))
        if len(found) != 1:
            kinds = ", ".join(sorted({type(loader).__name__ for loader in _loaders(loaders)})) or type(loaders).__name__
            raise ValueError(
                f"mechanism: mix steers one DomainMixtureSampler, but the training loader ({kinds}) has {len(found)}. "
                f"{HOW_TO}"
            )
        loader, sampler = found[0]
        if loader.batch_size != sampler.batch_size:
            raise ValueError(
                f"The DataLoader has batch_size {loader.batch_size} but its DomainMixtureSampler {sampler.batch_size}. "
                "Give both the same, and no batch_sampler."
            )
        if trainer is not None:
            _check_ranks(sampler, trainer)
        if hasattr(loader, "load_state_dict"):
            # A loader that resumes by itself (torchdata's) would take the sampler back to where it had drawn ahead.
            self._restore.append(replaced_attribute(loader, "load_state_dict", lambda state: None))
        self.mixture.bind([name for name, rows in zip(sampler.domains, sampler.rows) if len(rows)])
        self.sampler = sampler
        with reading(self.state_key):
            self._go_on(sampler)

    def _go_on(self, sampler: DomainMixtureSampler) -> None:
        saved, self._saved = self._saved, {}
        self.mixture.load_state_dict(saved)
        if self._start:
            sampler.load_state_dict(self._start)
            self._num_batches = sampler.num_batches
        self._put_in_force()
        # The Trainer's count of epochs is another one after a stop.
        sampler.counts_epochs = True

    def _put_in_force(self) -> None:
        if self.enforce and self.sampler is not None:
            self.sampler.set_proportions(self.mixture.proportions)


def _check_ranks(sampler: DomainMixtureSampler, trainer: Trainer) -> None:
    there = trainer.distributed_sampler_kwargs or {}
    num_replicas, rank = there.get("num_replicas", 1), there.get("rank", 0)
    if (sampler.num_replicas, sampler.rank) != (num_replicas, rank):
        raise ValueError(
            f"The DomainMixtureSampler deals for rank {sampler.rank} of {sampler.num_replicas}, but this is rank "
            f"{rank} of {num_replicas}: it was made before the processes were. Make the loader in train_dataloader, or "
            "give num_replicas and rank."
        )


def _samplers(loaders: Any) -> Iterator[tuple[DataLoader, DomainMixtureSampler]]:
    for loader in _loaders(loaders):
        for sampler in {id(s): s for s in (loader.sampler, getattr(loader.batch_sampler, "sampler", None))}.values():
            if isinstance(sampler, DomainMixtureSampler):
                yield loader, sampler


def _loaders(loaders: Any) -> Iterator[DataLoader]:
    """The DataLoaders in what a Trainer takes for them."""
    if isinstance(loaders, DataLoader):
        yield loaders
    elif hasattr(loaders, "flattened"):
        yield from _loaders(loaders.flattened)
    elif isinstance(loaders, Mapping):
        yield from _loaders(list(loaders.values()))
    elif isinstance(loaders, (list, tuple)):
        for each in loaders:
            yield from _loaders(each)
