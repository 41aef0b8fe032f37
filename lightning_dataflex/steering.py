"""How a mixture gets at the sampler of a Trainer's data loader: when the loader is made, at each step, after a stop."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from lightning_dataflex.core.mixture import Mixture
from lightning_dataflex.mount import replaced_attribute
from lightning_dataflex.sampler import DomainMixtureSampler

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

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
        enforce: False leaves the sampler's own proportions as they are.
    """

    def __init__(self, mixture: Mixture, *, enforce: bool = True) -> None:
        self.mixture, self.enforce = mixture, enforce
        self.sampler: DomainMixtureSampler | None = None
        self._saved: dict[str, Any] = {}
        self._num_batches, self._epoch_is_over = 0, False
        self.detach: Callable[[], None] = lambda: None

    def attach(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Be there when the training loader is made, or take the one that was given to `fit`."""
        source: Any = trainer.fit_loop._data_source.instance
        if not hasattr(source, "train_dataloader"):
            self._adopt(source)
            return
        make = source.train_dataloader

        @functools.wraps(make)
        def train_dataloader(*args: Any, **kwargs: Any) -> Any:
            loaders = make(*args, **kwargs)
            self._adopt(loaders)
            return loaders

        self.detach = replaced_attribute(source, "train_dataloader", train_dataloader)

    def end_step(self, step_id: int, batch_idx: int, *, is_last: bool, progress: float | None) -> None:
        """The step with this batch of the epoch is over: let the mixer act, and the next batch follow it."""
        assert self.sampler is not None
        drawn_by = self.sampler.proportions_at(batch_idx)
        self.mixture.end_step(step_id, progress=progress, drawn_by=drawn_by)
        self._num_batches, self._epoch_is_over = batch_idx + 1, is_last
        self.sampler.forget_before(self._num_batches)
        self._put_in_force()

    def end_epoch(self, next_epoch: int) -> None:
        """The next epoch is this one, whatever the Trainer says or forgets to say."""
        self._num_batches = 0
        if self.sampler is not None:
            self.sampler.set_epoch(next_epoch)

    @property
    def lag(self) -> int:
        """Batches that the data loader has drawn ahead: new proportions are those of the batches after them."""
        return 0 if self.sampler is None else self.sampler.num_batches - self._num_batches

    def state_dict(self) -> dict[str, Any]:
        """The mixture and the sampler, after the last step; the same on every rank."""
        state = {"mixture": self.mixture.state_dict(), "actuator": self.mixture.actuator.state_dict()}
        if self.sampler is None:
            return state | {"sampler": {}}
        if self._epoch_is_over:
            # Which it may be before all that was drawn ahead was trained on.
            return state | {"sampler": self.sampler.start_of_next_epoch()}
        return state | {"sampler": self.sampler.state_dict(self._num_batches)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave: now, or when the loader is made."""
        self._saved = dict(state)
        if self.sampler is not None:
            self._restore()

    def _adopt(self, loaders: Any) -> None:
        found = [(loader, sampler) for loader, sampler in _samplers(loaders)]
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
                "Give both the same."
            )
        if hasattr(loader, "load_state_dict"):
            # A loader that resumes by itself (torchdata's) would take the sampler back to where it had drawn ahead.
            vars(loader)["load_state_dict"] = _ignored
        self.mixture.bind(sampler.domains)
        self.sampler = sampler
        if self._saved:
            self._restore()
        self._put_in_force()

    def _restore(self) -> None:
        assert self.sampler is not None
        saved, self._saved = self._saved, {}
        self.mixture.load_state_dict(saved["mixture"])
        self.mixture.actuator.load_state_dict(saved["actuator"])
        if saved["sampler"]:
            self.sampler.load_state_dict(saved["sampler"])
            self._num_batches = self.sampler.num_batches
        self._put_in_force()

    def _put_in_force(self) -> None:
        if self.enforce and self.sampler is not None:
            self.sampler.set_proportions(self.mixture.proportions)


def _ignored(state: Any) -> None:
    pass


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
