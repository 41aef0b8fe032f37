"""The scorers of prompts before their rollout: one small class per rule, a thin shell over `functional.visits`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_dataflex.core.actuator import Selector
from lightning_dataflex.core.checks import check_finite, check_range, check_whole
from lightning_dataflex.core.history import Visits
from lightning_dataflex.core.ids import prompt_ids
from lightning_dataflex.core.prompt_scorer import PromptScorer
from lightning_dataflex.core.registry import register_scorer
from lightning_dataflex.functional import visits as rules
from lightning_dataflex.scorers import GroupSolveRate
from lightning_dataflex.selectors import Bernoulli, Nearest, ThresholdBand


@register_scorer("greso")
class GRESO(PromptScorer):
    """Probability with which a prompt is rolled out: less for each visit in a row that was without signal.

    A prompt whose responses were all solved, or all failed, z times in a row is skipped with probability 1 - p^z. There
    is a p for either kind. It falls while more than the target share of a step's prompts are of that kind, and
    rises while fewer are, once prompts come up again.

    Args:
        p_easy: p to start with, for prompts that were all solved.
        p_hard: And for prompts that were all failed.
        target_easy: Share of a step's prompts that may be all solved.
        target_hard: Share that may be all failed.
        explore: Least probability of a rollout.
        success_threshold: A prompt without signal was solved if its mean reward is above this.
        max_prompts: See `PromptScorer`.

    Example:
        >>> scorer = GRESO()
        >>> easy = Visits.of(torch.tensor([7, 7]), torch.tensor([1.0, 1.0]))
        >>> scorer.observe(easy)
        >>> scorer.score({"prompt_id": [7, 8]})
        tensor([0.5000, 1.0000], dtype=torch.float64)
    """

    paper = "GRESO, arXiv:2506.02177"
    columns_remembered = {"run": 0.0, "kind": 0.0}

    def __init__(
        self,
        p_easy: float = 0.5,
        p_hard: float = 0.5,
        target_easy: float = 0.25 / 3,
        target_hard: float = 0.25 * 2 / 3,
        explore: float = 0.01,
        success_threshold: float = 0.5,
        max_prompts: int = 1_000_000,
        **kwargs: Any,
    ) -> None:
        super().__init__(success_threshold, max_prompts, **kwargs)
        for name, value in (("p_easy", p_easy), ("p_hard", p_hard), ("explore", explore)):
            check_range(name, value, 0, 1, open_low=True)
        for name, value in (("target_easy", target_easy), ("target_hard", target_hard)):
            check_range(name, value, 0, 1)
        self.p_easy, self.p_hard, self.explore = p_easy, p_hard, explore
        self.target_easy, self.target_hard = target_easy, target_hard

    def default_selector(self) -> Selector:
        return Bernoulli()

    def score(self, batch: Any, step_id: int = 0, **ctx: Any) -> Tensor:
        known = self.remembered(batch)
        p = torch.where(known["kind"] == 1, self.p_easy, self.p_hard).double()
        return (1 - rules.skip_probability(known["run"], p)).clamp(min=self.explore)

    def observe(self, visits: Visits, step_id: int = 0) -> None:
        known = self.history.look_up(visits.ids)
        seen_again = bool(self.history.seen(visits.ids).any())
        easy = ~visits.has_signal & (visits.rewards > self.success_threshold)
        hard = ~visits.has_signal & ~easy
        kind = (easy.float() + 2 * hard.float()).to(known["kind"])
        run = rules.visit_runs(known["run"], known["kind"], kind)
        self.history.put(visits.ids, {"run": run, "kind": kind}, step_id)
        if seen_again:
            self.p_easy = rules.adjusted(self.p_easy, float(easy.double().mean()), self.target_easy)
            self.p_hard = rules.adjusted(self.p_hard, float(hard.double().mean()), self.target_hard)

    @property
    def settings(self) -> dict[str, float]:
        return {"p_easy": self.p_easy, "p_hard": self.p_hard}

    def get_extra_state(self) -> dict[str, Any]:
        return super().get_extra_state() | self.settings

    def set_extra_state(self, state: dict[str, Any]) -> None:
        super().set_extra_state(state)
        self.p_easy, self.p_hard = state["p_easy"], state["p_hard"]


class _Posterior(PromptScorer):
    """A Beta posterior of each prompt's solve rate.

    Args:
        decay: In [0, 1], how much of what earlier visits have shown still counts at each new one.
    """

    columns_remembered = {"alpha": 1.0, "beta": 1.0}

    def __init__(self, decay: float, success_threshold: float, max_prompts: int, **kwargs: Any) -> None:
        super().__init__(success_threshold, max_prompts, **kwargs)
        check_range("decay", decay, 0, 1)
        self.decay = decay

    def observe(self, visits: Visits, step_id: int = 0) -> None:
        known = {name: values.double() for name, values in self.history.look_up(visits.ids).items()}
        alpha, beta = rules.beta_update(known["alpha"], known["beta"], visits.solved, visits.num, decay=self.decay)
        self.history.put(visits.ids, {"alpha": alpha, "beta": beta}, step_id)


@register_scorer("mopps")
class MoPPS(_Posterior):
    """A solve rate drawn from each prompt's Beta posterior: of a pool of candidates the nearest to 0.5 are rolled out.

    The draws follow from the seed, the step and the candidates; the posterior of a new prompt is uniform.

    Args:
        target: Solve rate to look for.
        pool: Candidates to each prompt that is rolled out; those left over do not come up again in the epoch.
        decay: See `pass_rate_band`. The paper has 1, and 0.5 for two of its tasks.
        seed: Of the draws.
        success_threshold: A response is solved when its reward is above this.
        max_prompts: See `PromptScorer`.

    Example:
        >>> scorer = MoPPS()
        >>> scorer.observe(Visits.of(torch.tensor([7] * 64), torch.ones(64)))
        >>> bool(scorer.score({"prompt_id": [7]}) > 0.8)
        True
    """

    paper = "MoPPS, arXiv:2507.04632"

    def __init__(
        self,
        target: float = 0.5,
        pool: float = 4.0,
        decay: float = 1.0,
        seed: int = 0,
        success_threshold: float = 0.5,
        max_prompts: int = 1_000_000,
        **kwargs: Any,
    ) -> None:
        super().__init__(decay, success_threshold, max_prompts, **kwargs)
        check_range("target", target, 0, 1)
        check_range("pool", pool, 1, math.inf)
        check_finite("pool", pool)
        check_whole("seed", seed, 0)
        self.target, self.pool, self.seed = target, pool, seed

    def default_selector(self) -> Selector:
        return Nearest(self.target)

    def score(self, batch: Any, step_id: int = 0, **ctx: Any) -> Tensor:
        # Drawn in the order of the ids, so that it does not depend on that of the candidates.
        ids, place = torch.unique(prompt_ids(batch), return_inverse=True)
        known = self.history.look_up(ids)
        rng = np.random.Generator(np.random.Philox(np.random.SeedSequence([self.seed, step_id, int(ids[0]) % 2**64])))
        drawn = rng.beta(known["alpha"].double().numpy(), known["beta"].double().numpy())
        return torch.from_numpy(drawn)[place]


@register_scorer("pass_rate_band")
class PassRateBand(_Posterior):
    """Solve rate of each prompt, known or learned: only prompts inside of a band are rolled out.

    It is that of all earlier responses to the prompt and of two more, which were solved at the known rate, or at 0.5.

    Args:
        low: Lower end of the band.
        high: Upper end; see `threshold_band`.
        known: Column of the prompts that holds a known solve rate, 0..1. Default: none is known.
        learned: False goes by what is known alone.
        decay: In [0, 1], how much of what earlier visits have shown still counts at each new one.
        success_threshold: A response is solved when its reward is above this.
        max_prompts: See `PromptScorer`.

    Example:
        >>> scorer = PassRateBand(known="pass_rate")
        >>> scorer.score({"prompt_id": [7, 8], "pass_rate": [0.25, 1.0]})
        tensor([0.2500, 1.0000], dtype=torch.float64)
    """

    paper = "online difficulty filtering, arXiv:2504.03380"

    def __init__(
        self,
        low: float = 0.2,
        high: float = 0.8,
        known: str | None = None,
        learned: bool = True,
        decay: float = 1.0,
        success_threshold: float = 0.5,
        max_prompts: int = 1_000_000,
        **kwargs: Any,
    ) -> None:
        super().__init__(decay, success_threshold, max_prompts, **kwargs)
        if known is None and not learned:
            raise ValueError("learned is False and known is None: nothing says how hard a prompt is. Give known.")
        self.low, self.high, self.known, self.learned = low, high, known, learned
        self.default_selector()
        if known is not None:
            self.requires = ("prompt_id", known)

    def default_selector(self) -> Selector:
        return ThresholdBand(self.low, self.high)

    def score(self, batch: Any, step_id: int = 0, **ctx: Any) -> Tensor:
        before = torch.full((len(batch),), 0.5, dtype=torch.float64)
        if self.known is not None:
            before = batch.tensor(self.known).double().cpu()
            if ((before < 0) | (before > 1)).any():
                raise ValueError(
                    f"{self.known} of a prompt is {float(before[(before < 0) | (before > 1)][0])}. It must be a solve "
                    "rate, from 0 to 1."
                )
        if not self.learned:
            return before
        known = self.remembered(batch)
        return (2 * before + known["alpha"] - 1) / (known["alpha"] + known["beta"])


@register_scorer("speed")
class SPEED(GroupSolveRate):
    """Solve rate of a prompt's first few responses: the rest is generated only for prompts that show a signal.

    The module's rollout method is called with `num_generations`: first for the screening, then for the others.

    Args:
        num_screening: Responses to judge a prompt by.
        success_threshold: A response is solved when its reward is above this.

    Example:
        >>> batch = {"rm_scores": torch.tensor([1.0, 0.0, 1.0, 1.0]), "uid": ["a", "a", "b", "b"]}
        >>> SPEED(num_screening=2).score(batch)
        tensor([0.5000, 0.5000, 1.0000, 1.0000])
    """

    timing = "pre_rollout"
    screens = True
    paper = "SPEED-RL, arXiv:2506.09016"
    score = GroupSolveRate.score
    columns = GroupSolveRate.columns

    def __init__(self, num_screening: int = 4, success_threshold: float = 0.5, **kwargs: Any) -> None:
        super().__init__(success_threshold, **kwargs)
        # One response shows no difference.
        check_whole("num_screening", num_screening, 2)
        self.num_screening = num_screening

    def default_selector(self) -> Selector:
        return ThresholdBand(0.0, 1.0)
