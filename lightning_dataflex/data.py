"""A data loader whose domains are mixed, from any map-style dataset."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from torch.utils.data import DataLoader, Dataset

from lightning_dataflex.dealing import Draw
from lightning_dataflex.sampler import DomainMixtureSampler


def mixture_dataloader(
    dataset: Dataset | Sequence[Any],
    batch_size: int,
    *,
    domain_key: str = "domain",
    domains: Sequence[str] | None = None,
    proportions: Mapping[str, float] | None = None,
    draw: Draw = "largest_remainder",
    replacement: bool = True,
    num_samples: int | None = None,
    seed: int = 0,
    num_replicas: int | None = None,
    rank: int | None = None,
    **loader: Any,
) -> DataLoader:
    """A DataLoader with a `DomainMixtureSampler`, to be made in `train_dataloader` of a LightningDataModule.

    There the processes of the run exist, so that each rank's sampler deals its own part.

    Args:
        dataset: Map-style; each row a mapping, or an object, with its domain. Of a Hugging Face dataset the column is
            read at once, of others row by row.
        batch_size: Prompts per batch of one rank.
        domain_key: What the domain is called.
        domains: See `DomainMixtureSampler`, as the rest.
        loader: For the DataLoader: `num_workers`, `collate_fn` and so on.

    Raises:
        ValueError: There is no such column, or what `DomainMixtureSampler` refuses.

    Example:
        >>> rows = [{"prompt": "1 + 1", "domain": "math"}, {"prompt": "print", "domain": "code"}] * 4
        >>> loader = mixture_dataloader(rows, 4, proportions={"math": 0.75, "code": 0.25})
        >>> [sorted(batch["domain"]) for batch in loader]
        [['code', 'math', 'math', 'math'], ['code', 'math', 'math', 'math']]
    """
    sampler = DomainMixtureSampler(
        domain_column(dataset, domain_key),
        batch_size,
        proportions=proportions,
        domains=domains,
        draw=draw,
        replacement=replacement,
        num_samples=num_samples,
        seed=seed,
        num_replicas=num_replicas,
        rank=rank,
    )
    return DataLoader(dataset, batch_size, sampler=sampler, **loader)  # type: ignore[arg-type]


def domain_column(dataset: Any, key: str = "domain") -> Sequence[Hashable]:
    """The domain of each row of a dataset.

    Example:
        >>> domain_column([{"domain": "math"}, {"domain": "code"}])
        ['math', 'code']
    """
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise ValueError(
            f"A {type(dataset).__name__} cannot be drawn from by index. Give a map-style dataset, with len() and [i]."
        )
    columns = getattr(dataset, "column_names", None)
    if isinstance(columns, (list, tuple)):
        if key not in columns:
            raise ValueError(_no_column(key, columns))
        return list(dataset[key])
    if not len(dataset):
        return []
    first = dataset[0]
    if not _has(first, key):
        names = first if isinstance(first, Mapping) else getattr(first, "_fields", getattr(first, "__dict__", {}))
        raise ValueError(_no_column(key, list(names)))
    rows = (dataset[i] for i in range(len(dataset)))
    return [row[key] if isinstance(row, Mapping) else getattr(row, key) for row in rows]


def _has(row: Any, key: str) -> bool:
    return key in row if isinstance(row, Mapping) else hasattr(row, key)


def _no_column(key: str, columns: Sequence[str]) -> str:
    return (
        f"The dataset has no column {key!r}. It has: {', '.join(map(str, columns)) or 'none'}. "
        "Give domain_key the name of the column that holds each prompt's domain."
    )
