"""DomainMixtureSampler: an index stream whose proportions can change at any batch, and that resumes at any batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DistributedSampler

from lightning_dataflex.core.checks import check_whole, listed
from lightning_dataflex.core.warn import warn_once
from lightning_dataflex.dealing import Dealer, Draw, Position, rows_by_domain
from lightning_dataflex.functional.choices import check_choice, shown
from lightning_dataflex.functional.proportions import matched

MOST_AHEAD = 4096
"""More batches than a data loader draws ahead."""


class DomainMixtureSampler(DistributedSampler):
    """Draws the domains of each batch by proportions that may change, then prompts within the domains.

    Every batch has the proportions to within a prompt or so: 4 prompts at 0.5 / 0.5 are 2 and 2. What rounding takes
    from a domain, later batches give back, so that small proportions come up too. Every rank draws the same global
    batch and takes its part: ranks agree without a word, and no place of the stream is dealt twice. What is drawn
    follows from the seed, the epoch and the proportions that its batches have had, and from nothing else.

    It derives from `DistributedSampler` because Lightning leaves those as they are, where it would replace or
    freeze another one. `DataLoader(dataset, batch_size, sampler=sampler)`, with the same batch size.

    Args:
        labels: The domain of each prompt of the dataset.
        batch_size: Prompts per batch of one rank.
        proportions: By domain, summing to 1. Default: each domain's share of the dataset. Later by `set_proportions`.
        domains: The domains, in order. Default: those of the labels, sorted.
        draw: `largest_remainder` rounds each batch to the proportions, `multinomial` draws by them.
        replacement: True starts a domain anew, in another order, when all its prompts were drawn. False draws each
            prompt at most once an epoch; the share of a domain that is used up goes to the others in proportion.
        num_samples: Prompts per epoch, over all ranks. Default: those of the dataset.
        seed: Decides all draws; the same on every rank.
        num_replicas: Number of ranks. Default: that of the process group, 1 without one.
        rank: This one. Default: as in the process group.

    Raises:
        ValueError: There are no prompts, a domain or a proportion is not valid, or an epoch is shorter than a batch.

    Example:
        >>> labels = ["math"] * 6 + ["code"] * 2
        >>> sampler = DomainMixtureSampler(labels, batch_size=4, proportions={"math": 0.5, "code": 0.5})
        >>> drawn = [labels[i] for i in sampler]
        >>> drawn[:4].count("math"), drawn[4:].count("math")
        (2, 2)
    """

    def __init__(
        self,
        labels: Sequence[Hashable] | np.ndarray | torch.Tensor,
        batch_size: int,
        *,
        proportions: Mapping[str, float] | Sequence[float] | None = None,
        domains: Sequence[str] | None = None,
        draw: Draw = "largest_remainder",
        replacement: bool = True,
        num_samples: int | None = None,
        seed: int = 0,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        check_choice("draw", draw, Draw)
        check_whole("batch_size", batch_size, 1)
        check_whole("seed", seed, 0)
        if num_samples is not None:
            check_whole("num_samples", num_samples, 1)
        if (num_replicas is None) != (rank is None):
            raise ValueError(f"num_replicas is {num_replicas} and rank is {rank}. Give both or neither.")
        if num_replicas is None and not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            num_replicas, rank = 1, 0
        super().__init__(range(len(labels)), num_replicas, rank, shuffle=True, seed=seed, drop_last=True)  # type: ignore[arg-type]
        self.rows, self.domains = rows_by_domain(labels, domains)
        self.batch_size, self.replacement = batch_size, replacement
        self._dealer = Dealer(self.rows, self.domains, draw=draw, replacement=replacement, seed=seed)
        self.total_size = len(labels) if num_samples is None else num_samples
        self.num_samples = self.total_size // self.num_replicas
        if not self.num_samples:
            raise ValueError(
                f"An epoch of {self.total_size} prompts is none for each of {self.num_replicas} ranks. Use more."
            )
        share = {name: len(rows) / len(labels) for name, rows in zip(self.domains, self.rows)}
        self.set_proportions(share if proportions is None else proportions)
        self.counts_epochs = False
        """Whether `set_epoch` is ignored, because each iteration follows the one before."""
        self._next_epoch: int | None = 0
        self._restored = False
        self._start(Position(0))

    # -- proportions -----------------------------------------------------------------------------------------------

    @property
    def proportions(self) -> dict[str, float]:
        """Those in force for the next batch that is drawn."""
        return dict(zip(self.domains, self._proportions))

    def set_proportions(self, proportions: Mapping[str, float] | Sequence[float]) -> None:
        """Put proportions, by domain or in their order, in force from the next batch on that is drawn."""
        if not isinstance(proportions, Mapping):
            if len(proportions) != len(self.domains):
                raise ValueError(
                    f"There are {len(proportions)} proportions for {len(self.domains)} domains. Give each one."
                )
            proportions = dict(zip(self.domains, proportions))
        unknown = proportions.keys() - set(self.domains)
        values = [float(proportions.get(name, 0.0)) for name in self.domains]
        if unknown or not all(np.isfinite(values)) or min(values) < 0 or abs(sum(values) - 1) > 1e-5:
            raise ValueError(
                f"The proportions are {shown(dict(proportions))}. Give numbers >= 0 that sum to 1, for the domains "
                f"{listed(self.domains)}."
            )
        if not any(value > 0 and len(rows) for value, rows in zip(values, self.rows)):
            raise ValueError(
                f"The proportions {shown(dict(proportions))} are all of domains without prompts. Change them."
            )
        total = sum(values)
        self._proportions = [value / total for value in values]

    # -- iteration -------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Prompts of this rank in an epoch.

        Without replacement no more than there are in the domains that are in the mixture when the epoch begins; if
        these run out because the proportions change, the other domains fill up what was announced.
        """
        return self._length if self._has_drawn else self._length_now()

    def _length_now(self) -> int:
        if self.replacement:
            return self.num_samples
        there = sum(len(rows) for rows, share in zip(self.rows, self._proportions) if share > 0)
        return min(self.num_samples, there // self.num_replicas)

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be of this epoch. Without it, each is of the epoch after the last."""
        if not self.counts_epochs:
            self._next_epoch = epoch

    def __iter__(self) -> Iterator[int]:
        # A data loader may ask twice, and throw away what it has drawn ahead: that is drawn again.
        is_over = self._in_use if self.counts_epochs else self._has_drawn or self._next_epoch is not None
        if self._restored or not is_over:
            self._start(*self._origin)
        else:
            epoch = self.epoch + 1 if self._next_epoch is None else self._next_epoch
            self._start(Position(epoch, owed=self._position.owed if epoch == self.epoch + 1 else []))
        self._next_epoch = None
        return self._indices(self._log)

    def _indices(self, log: object) -> Iterator[int]:
        while batch := self._next_batch(log):
            yield from batch[self.rank :: self.num_replicas]

    def _start(
        self, position: Position, planned: Sequence[tuple[int, list[float]]] = (), length: int | None = None
    ) -> None:
        self.epoch = position.epoch
        num = len(self.domains)
        self._position = Position(
            position.epoch, position.batch, position.drawn or [0] * num, position.owed or [0.0] * num
        )
        self._has_drawn = self._in_use = False
        self._origin = (position, list(planned), length)
        self._length = 0  # said at the first draw
        # What was in force at batches that were drawn before a stop, but not trained on: they are drawn again.
        self._planned = list(planned)
        self._log: deque[tuple[Position, list[float]]] = deque(maxlen=MOST_AHEAD)

    def _next_batch(self, log: object) -> list[int]:
        """The rows of the next global batch; none at the end of the epoch."""
        if log is not self._log:
            raise RuntimeError(
                "The DomainMixtureSampler was iterated over again while an epoch was under way, and it has one place. "
                "To look at examples, read the dataset or make another loader."
            )
        if not self._has_drawn:
            *_, announced = self._origin
            self._length = self._length_now() if announced is None else announced
        self._has_drawn, self._restored = True, False
        here = self._position
        left = self._length * self.num_replicas - here.batch * self.global_batch
        if left <= 0:
            return []
        proportions = self._proportions
        if self._planned and self._planned[0][0] <= here.batch:
            proportions = self._planned.pop(0)[1]
        self._log.append((here, proportions))
        rows, self._position = self._dealer.batch(here, proportions, min(self.global_batch, left))
        return rows

    # -- state -----------------------------------------------------------------------------------------------------

    def state_dict(self, num_batches: int | None = None) -> dict[str, Any]:
        """What an equal sampler needs to go on; the same on every rank.

        Args:
            num_batches: Batches of this epoch that were trained on. The data loader may have drawn more ahead: the
                proportions that were in force for those are part of the state. Default: all that were drawn.
        """
        here = self._position
        ahead: list[tuple[int, list[float]]] = []
        if num_batches is not None:
            later = [(position, shares) for position, shares in self._log if position.batch >= num_batches]
            if later:
                here = later[0][0]
                ahead = [(position.batch, list(shares)) for position, shares in later]
        ahead += self._planned
        length = self._length if self._has_drawn else self._origin[-1]
        return {
            "epoch": here.epoch,
            "batch": here.batch,
            "global_batch": self.global_batch,
            "drawn": dict(zip(self.domains, here.drawn)),
            "owed": dict(zip(self.domains, here.owed)),
            "ahead": [{"batch": batch, "proportions": dict(zip(self.domains, shares))} for batch, shares in ahead],
            "proportions": self.proportions,
            "length": None if length is None else length * self.num_replicas,
        }

    def start_of_next_epoch(self) -> dict[str, Any]:
        """The state with which the epoch after this one starts."""
        owed = dict(zip(self.domains, self._position.owed))
        drawn = dict.fromkeys(self.domains, 0)
        start = {"epoch": self.epoch + 1, "batch": 0, "global_batch": self.global_batch, "drawn": drawn, "owed": owed}
        return start | {"ahead": [], "proportions": self.proportions, "length": None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken, at the next iteration.

        Domains are matched by name. If a batch of all ranks is another number of prompts than when the state was
        saved, the epoch goes on with the prompts that it has not drawn, and ends after as many batches as an epoch now
        has, those before the stop included; a warning says so.
        """
        drawn = [state["drawn"].get(name, 0) for name in self.domains]
        # What is owed sums to 0 over all domains, and of others it would not.
        same = set(state["owed"]) == set(self.domains)
        owed = [state["owed"][name] if same else 0.0 for name in self.domains]
        position = Position(state["epoch"], state["batch"], drawn, owed)
        ahead = [(each["batch"], list(matched(each["proportions"], self.domains).values())) for each in state["ahead"]]
        if not np.isfinite(owed).all():
            raise ValueError(f"What is owed to the domains is {state['owed']}. It must be numbers.")
        self.set_proportions(matched(state["proportions"], self.domains))
        length = state["length"] // self.num_replicas if same and state["length"] is not None else None
        if position.batch and self.global_batch != state["global_batch"]:
            warn_once(
                self,
                f"The checkpoint was written with {state['global_batch']} prompts in a batch of all ranks, and here "
                f"are {self.global_batch}: epoch {position.epoch} goes on with what it has not drawn, and ends after "
                "as many batches as an epoch now has, those before the stop included.",
            )
            length = None
        if position.batch * self.batch_size >= (self._length_now() if length is None else length):
            position, ahead, length = Position(position.epoch + 1, owed=owed), [], None
        self._start(position, ahead, length)
        self._restored = True

    @property
    def global_batch(self) -> int:
        """Prompts in a batch of all ranks."""
        return self.batch_size * self.num_replicas

    @property
    def num_batches(self) -> int:
        """Batches drawn in this epoch."""
        return self._position.batch

    def proportions_at(self, batch: int) -> dict[str, float]:
        """Those that a batch of this epoch was drawn by, as long as it is not forgotten; else those in force."""
        shares = next((shares for position, shares in self._log if position.batch == batch), self._proportions)
        return dict(zip(self.domains, shares))

    def use(self) -> None:
        """A batch of this iteration is trained on: the next iteration is of the next epoch."""
        self._in_use = True

    def forget_before(self, num_batches: int) -> None:
        """Batches of this epoch before this one were trained on, and no state will go back to them."""
        while self._log and self._log[0][0].batch < num_batches:
            self._log.popleft()
