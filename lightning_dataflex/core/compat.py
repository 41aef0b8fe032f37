"""What fits what: a scorer, an actuator and an advantage estimator."""

from __future__ import annotations

from lightning_dataflex.core.actuator import Actuator, Selector
from lightning_dataflex.core.mixer import Mixer
from lightning_dataflex.core.registry import nearest, registered_name
from lightning_dataflex.core.scorer import Scorer
from lightning_dataflex.functional.choices import shown

GROUP_ESTIMATORS = frozenset(
    [
        "grpo",
        "grpo_vectorized",
        "grpo_passk",
        "dr_grpo",
        "gspo",
        "rloo",
        "rloo_vectorized",
        "opo",
        "gpg",
        "gdpo",
        "reinforce_plus_plus_baseline",
    ]
)
"""Advantage estimators that compare the samples of one prompt."""

OTHER_ESTIMATORS = frozenset(["gae", "reinforce", "reinforce_plus_plus", "remax"])
"""Advantage estimators that do not."""


def check_estimator(adv_estimator: str) -> None:
    """Raise a ValueError for an estimator whose use of groups is not known."""
    known = sorted(GROUP_ESTIMATORS | OTHER_ESTIMATORS)
    if not isinstance(adv_estimator, str) or adv_estimator not in known:
        raise ValueError(f"adv_estimator is {shown(adv_estimator)}. {nearest(adv_estimator, known)}")


def chooses_prompts(scorer: Scorer) -> bool:
    """Whether a scorer decides which prompts are rolled out at all; one that screens looks at a few responses."""
    return scorer.timing == "pre_rollout" and not scorer.screens


def check_after_rollout(scorer: Scorer) -> None:
    """Raise a ValueError for a scorer of prompts where scores of responses are combined."""
    if scorer.timing == "pre_rollout":
        raise ValueError(
            f"{registered_name(scorer)} scores prompts before their rollout, where nothing else is known. Give it a "
            "block of its own."
        )


def validate_compat(scorer: Scorer, actuator: Actuator, adv_estimator: str | None = None) -> None:
    """Raise a ValueError for parts that do not fit each other, or not the advantage estimator.

    Args:
        adv_estimator: None where it is not known; groups are then not checked.
    """
    if chooses_prompts(scorer):
        reads = [name for name in actuator.requires if name != "prompt_id"]
        if reads or not isinstance(actuator, Selector):
            raise ValueError(
                f"{registered_name(scorer)} scores prompts before their rollout, but {registered_name(actuator)} "
                f"{'reads ' + ', '.join(reads) if reads else 'selects nothing'}. Leave the actuator out to use the "
                "rule of its paper."
            )
    if scorer.granularity not in actuator.granularities:
        raise ValueError(
            f"{registered_name(actuator)} takes scores of a {' or '.join(actuator.granularities)}, but "
            f"{registered_name(scorer)} scores each {scorer.granularity}. Choose another scorer or actuator."
        )
    signals, of_domain = actuator.signals, isinstance(actuator, Mixer)
    if signals and scorer.signal and scorer.signal not in signals:
        raise ValueError(
            f"{registered_name(actuator)} follows the {' or '.join(signals)}{' of a domain' if of_domain else ''}, but "
            f"{registered_name(scorer)} measures the {scorer.signal}. Leave the scorer out to use that of its paper."
        )
    if adv_estimator is None:
        return
    check_estimator(adv_estimator)
    for part in (scorer, actuator):
        if part.needs_groups and adv_estimator in OTHER_ESTIMATORS and not getattr(part, "any_estimator", False):
            raise ValueError(
                f"{registered_name(part)} compares the samples of a group, but adv_estimator {adv_estimator!r} has no "
                f"groups. Use a group estimator ({', '.join(sorted(GROUP_ESTIMATORS))}), or a part without groups."
            )
