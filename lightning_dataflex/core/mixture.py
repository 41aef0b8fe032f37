"""Mixture: from the scores of each step's samples to the proportions of the domains to come."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_dataflex.core.checks import listed
from lightning_dataflex.core.compat import validate_compat
from lightning_dataflex.core.config import DataFlexConfig
from lightning_dataflex.core.domains import DomainStats, DomainSums, prior, warn_of_other_domains
from lightning_dataflex.core.global_batch import global_batch, in_brief
from lightning_dataflex.core.memory import memory_of, recall, title
from lightning_dataflex.core.mixer import Mixer
from lightning_dataflex.core.registry import registered_name
from lightning_dataflex.core.rollout import RolloutBatch
from lightning_dataflex.core.scorer import Scorer
from lightning_dataflex.core.warn import warn_once
from lightning_dataflex.functional.proportions import matched
from lightning_dataflex.functional.tokens import token_mean
from lightning_dataflex.sync import Group, exchanged, num_ranks


class Mixture:
    """A scorer, a mixer, and the proportions in force; it knows no Trainer.

    In every step `observe` the rollout batches, then `end_step`. Under a process group every rank calls both, and all
    have the same proportions afterwards.

    Args:
        scorer: What scores samples.
        actuator: The Mixer.
        domains: The domains in order, or their weights before the mixer acts. Default: told to `bind`, all alike.
        warmup_step: Steps before the mixer acts.
        update_step: Steps from one act to the next.
        fields: The batch's own field names.
        adv_estimator: The advantage estimator, where it is known.
        process_group: The ranks that hold different samples. Default: all.

    Example:
        >>> mixture = Mixture.from_config({"mechanism": "mix", "domains": ["math", "code"],
        ...     "actuator": {"name": "reward_gap", "params": {"temperature": 0.5}}})
        >>> batch = {"rm_scores": torch.tensor([1.0, 0.0]), "domain": ["math", "code"],
        ...          "response_mask": torch.ones(2, 3)}
        >>> mixture.observe(batch)
        >>> mixture.end_step(0)
        >>> {name: round(share, 4) for name, share in mixture.proportions.items()}
        {'math': 0.1192, 'code': 0.8808}
    """

    stats: DomainStats

    def __init__(
        self,
        scorer: Scorer,
        actuator: Mixer,
        *,
        domains: Sequence[str] | Mapping[str, float] | None = None,
        warmup_step: int = 0,
        update_step: int = 1,
        fields: Mapping[str, str] | None = None,
        adv_estimator: str | None = None,
        process_group: Group = None,
    ) -> None:
        validate_compat(scorer, actuator, adv_estimator)
        self.scorer, self.actuator = scorer, actuator
        self.warmup_step, self.update_step = warmup_step, update_step
        self.fields, self.process_group = dict(fields or {}), process_group
        self.weights = {str(k): v for k, v in domains.items()} if isinstance(domains, Mapping) else None
        self.domains: list[str] = []
        self._sums: DomainSums | None = None
        self._num_nan = 0
        self._metrics: dict[str, float] = {}
        if domains is not None:
            self.bind([str(name) for name in domains])

    @classmethod
    def from_config(cls, block: DataFlexConfig | Mapping[str, Any], *, adv_estimator: str | None = None) -> Mixture:
        """The mixture of a `dataflex` block."""
        config = DataFlexConfig.of(block)
        scorer, mixer = config.components()
        if not isinstance(mixer, Mixer):
            raise ValueError(f"mechanism is {config.mechanism!r}, which is for a Pipeline. A Mixture is for mix.")
        return cls(
            scorer,
            mixer,
            domains=config.domains,
            warmup_step=config.warmup_step,
            update_step=config.update_step,
            fields=config.fields,
            adv_estimator=adv_estimator or config.adv_estimator,
        )

    def bind(self, domains: Sequence[str]) -> None:
        """Say which domains there are; those that were named already must be the same.

        Raises:
            ValueError: They are not, there is one alone, or the mixer cannot serve them.
        """
        if self.domains:
            if sorted(self.domains) != sorted(domains):
                raise ValueError(
                    f"domains names {listed(self.domains)}, but the data has {listed(domains)}. Name those."
                )
            return
        if len(domains) < 2 or len(set(domains)) < len(domains):
            raise ValueError(f"The domains are {listed(domains)}. A mixture needs at least two, each named once.")
        if sorted(self.actuator.domains) == sorted(domains):
            # A mixer that was made for them in another order keeps its own.
            domains = self.actuator.domains
        self.actuator.bind(domains)
        self.domains = list(domains)
        self.stats = DomainStats(self.domains, self.actuator.window)
        self._shares = prior(self.domains, self.weights, "domains")
        if self.weights is None and not self.warmup_step and not self.actuator.needs_data:
            self._act(0, None)

    @property
    def proportions(self) -> dict[str, float]:
        """Those in force, by domain; they sum to 1."""
        return dict(zip(self.domains, self._shares.tolist()))

    @torch.no_grad()
    def observe(self, batch: Any, step_id: int = 0) -> None:
        """Score a rollout batch of any type. Under a process group a collective."""
        local = functools.cache(lambda: self._read(batch))
        domain = functools.cache(lambda: self._domain_index(local()))
        if self.scorer.row_wise:
            scores, valid, domains = self._exchanged_scores(local, domain, step_id)
        else:
            own = {"domain index": domain}
            world, _, more = global_batch(local, [self.scorer], self.process_group, self._what, own)
            scores, valid = self._scores(world, step_id)
            domains = more["domain index"]
        sums = DomainSums.of(torch.where(valid, scores, torch.nan), domains, len(self.domains))
        self._num_nan += int((valid & ~scores.isfinite()).sum())
        self._sums = sums if self._sums is None else self._sums + sums

    @torch.no_grad()
    def end_step(
        self, step_id: int, *, progress: float | None = None, drawn_by: Mapping[str, float] | None = None
    ) -> None:
        """Take what was observed in a step into account, and let the mixer act if it is its turn.

        Args:
            step_id: Of the step, counted from 0.
            progress: Share of the run that is over, where it is known.
            drawn_by: The proportions that the step's prompts were drawn by. Default: those in force.
        """
        shares = prior(self.domains, self.proportions if drawn_by is None else drawn_by)
        if self._sums is not None:
            self.stats.add(step_id, self._sums)
            self.actuator.observe(self._sums, shares)
        self._metrics = {f"prop_{name}": share for name, share in zip(self.domains, shares.tolist())}
        self._metrics |= {f"score_{name}": score for name, score in zip(self.domains, self.stats.mean.tolist())}
        self._metrics["n_nan"] = float(self._num_nan)
        self._sums, self._num_nan = None, 0
        done = step_id + 1 - self.warmup_step
        if done >= 0 and done % self.update_step == 0:
            self._act(step_id + 1, progress)

    def _act(self, step_id: int, progress: float | None) -> None:
        context = {"step_id": step_id, "progress": progress if step_id else 0.0, "proportions": self.proportions}
        self._shares = self.actuator.proportions(self.stats, **context)

    @property
    def metrics(self) -> dict[str, float]:
        """Of the last step, the same keys in the same order at every step and rank.

        `prop_<domain>`, by which its prompts were drawn, `score_<domain>`, the mean over the window up to it (NaN
        without data), and `n_nan`, its samples without a score.
        """
        return dict(self._metrics)

    def state_dict(self) -> dict[str, Any]:
        """The statistics, the proportions and what scorer and mixer remember, by domain; the same on every rank."""
        if not self.domains:
            return {}
        memories = {"scorer": memory_of(self.scorer), "actuator": memory_of(self.actuator)}
        return {"stats": self.stats.state_dict(), "proportions": self.proportions} | memories

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave. Domains are matched by name; a new one gets an equal share.

        What another scorer or mixer has remembered is not read, with a warning.
        """
        if not state:
            return
        warn_of_other_domains(self, state["proportions"], self.domains)
        before = state["scorer"]["name"]
        if before == title(self.scorer):
            self.stats.load_state_dict(state["stats"])
        else:
            warn_once(
                self,
                f"The checkpoint has the domains' scores of {before}. The statistics of {title(self.scorer)} begin "
                "anew.",
            )
        shares = matched(state["proportions"], self.domains)
        self._shares = torch.tensor(list(shares.values()), dtype=torch.float64)
        recall(self.scorer, state["scorer"])
        recall(self.actuator, state["actuator"])

    def _read(self, batch: Any) -> RolloutBatch:
        if not self.domains:
            raise ValueError("The mixture does not know its domains. Name them, or bind them first.")
        local = RolloutBatch.of(batch, self.fields)
        local.require(dict.fromkeys(("response_mask", "domain", *self.scorer.requires)))
        return local

    @property
    def _what(self) -> str:
        return f"scores for {registered_name(self.scorer)} and {registered_name(self.actuator)}"

    def _domain_index(self, batch: RolloutBatch) -> Tensor:
        """(N,) int16 place of each sample's domain."""
        given = batch.original("domain")
        names = [str(name) for name in (given.tolist() if hasattr(given, "tolist") else given)]
        if len(names) != batch.num_samples:
            raise ValueError(
                f"domain has {len(names)} rows but the batch has {batch.num_samples}. Give one per sample."
            )
        place = {name: i for i, name in enumerate(self.domains)}
        unknown = [name for name in dict.fromkeys(names) if name not in place]
        if unknown:
            raise ValueError(
                f"The rollout batch has samples of the domains {listed(unknown)}, which are none of "
                f"{listed(self.domains)}. Name all domains, or correct the field."
            )
        return torch.tensor([place[name] for name in names], dtype=torch.int16)

    def _scores(self, batch: RolloutBatch, step_id: int) -> tuple[Tensor, Tensor]:
        """A score of each sample, (N,), and which samples have a valid token."""
        scores = self.scorer.score(batch, step_id).cpu()
        if scores.dim() == 2:
            scores = token_mean(scores, batch.token_mask.cpu())
        return scores, batch.has_tokens.cpu()

    def _exchanged_scores(
        self, local: Callable[[], RolloutBatch], domain: Callable[[], Tensor], step_id: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        def own() -> tuple[dict[str, Tensor], int]:
            scores, valid = self._scores(
                in_brief(local(), [self.scorer], local_ids=num_ranks(self.process_group) == 1), step_id
            )
            return {"score": scores, "valid": valid, "domain": domain()}, local().num_samples

        columns, _ = exchanged(own, self.process_group, self._what)
        return columns["score"], columns["valid"], columns["domain"]
