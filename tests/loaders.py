"""The classes of loaders as a test has found them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.utils.data import BatchSampler, DataLoader


@contextmanager
def loaders_as_they_were() -> Iterator[None]:
    """Undoes what a Trainer leaves behind whose `train_dataloader` raises.

    Lightning's wrappers then stay on these classes, and each loader that is made later holds all that is set on it:
    torchdata's its iterator, which so outlives the run. An iterator that the garbage collector ends has lost the
    queues by which it would end its workers, and waits five seconds for each.
    """
    kinds = [BatchSampler, DataLoader, *DataLoader.__subclasses__()]
    before = [dict(vars(kind)) for kind in kinds]
    try:
        yield
    finally:
        for kind, attributes in zip(kinds, before):
            for name in vars(kind).keys() - attributes.keys():
                delattr(kind, name)
            for name, value in attributes.items():
                if vars(kind)[name] is not value:
                    setattr(kind, name, value)
