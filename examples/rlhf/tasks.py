"""Prompts with a verifier, in five domains of clearly different difficulty.

A prompt and its answer are short enough that a small model on two cores can learn them, and every answer is
exact, so that the reward needs no judge. With each prompt comes a demonstration, to imitate before reinforcement
learning starts. As with people's, not every one is right: each domain has a mistake of its own, and its own share
of it. A policy that imitates them knows right from wrong but has not been told which is wanted.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypedDict

LETTERS = "abcdefgh"


class Row(TypedDict):
    """A prompt to answer; a plain dict, so that a data loader of any kind can hand it over.

    Attributes:
        prompt: What the policy reads.
        answer: The right answer.
        demonstration: What the warm-up imitates: the answer, or a mistake.
        domain: The source the prompt comes from.
        prompt_id: Names the prompt, the same in every run, such as "addition:37+45".
        entry: What a verifier needs to know beside the answer; empty for the embedded tasks.
    """

    prompt: str
    answer: str
    demonstration: str
    domain: str
    prompt_id: str
    entry: dict[str, Any]


class Question(NamedTuple):
    """A question, its answer, and the answer of someone who makes the domain's mistake."""

    text: str
    answer: str
    mistake: str


class Domain(NamedTuple):
    """How to draw a question, and the share of its demonstrations that are right."""

    draw: Callable[[random.Random], Question]
    right: float


@dataclass(frozen=True)
class PromptSplit:
    """Train and held-out prompts; none is in both."""

    train: list[Row]
    held_out: list[Row]


def verified(row: Row, response: str) -> float:
    """1.0 for the right answer, 0.0 for any other; blanks around a response do not count.

    Example:
        >>> row = split(["addition"], num_train=1, num_held_out=0).train[0]
        >>> verified(row, f" {row['answer']}"), verified(row, "no idea")
        (1.0, 0.0)
    """
    return float(response.strip() == row["answer"])


def split(domains: Sequence[str], num_train: int, num_held_out: int, seed: int = 0) -> PromptSplit:
    """`num_train` and `num_held_out` different prompts of each domain, the domains interleaved.

    The held-out prompts of a domain do not depend on `num_train`, nor on which other domains are asked for.

    Example:
        >>> prompts = split(["addition"], num_train=2, num_held_out=1)
        >>> len(prompts.train), len(prompts.held_out)
        (2, 1)
    """
    return divided([_distinct(domain, num_held_out + num_train, seed) for domain in domains], num_held_out)


def divided(per_domain: Sequence[Sequence[Row]], num_held_out: int) -> PromptSplit:
    """The first `num_held_out` rows of each domain against the rest, the domains interleaved."""
    held_out = [row for rows in zip(*(rows[:num_held_out] for rows in per_domain)) for row in rows]
    train = [row for rows in zip(*(rows[num_held_out:] for rows in per_domain)) for row in rows]
    return PromptSplit(train, held_out)


def _distinct(name: str, num_rows: int, seed: int) -> list[Row]:
    if name not in DOMAINS:
        raise ValueError(f"There is no domain {name!r}. Use some of {', '.join(DOMAINS)}.")
    domain, rng = DOMAINS[name], random.Random(f"{name}-{seed}")
    rows: dict[str, Row] = {}
    for _ in range(100 * num_rows):
        if len(rows) == num_rows:
            break
        question = domain.draw(rng)
        demonstration = question.answer if rng.random() < domain.right else question.mistake
        row = Row(
            prompt=f"{question.text}=",
            answer=question.answer,
            demonstration=demonstration,
            domain=name,
            prompt_id=f"{name}:{question.text.split()[-1]}",
            entry={},
        )
        rows.setdefault(row["prompt_id"], row)
    if len(rows) < num_rows:
        raise ValueError(f"Domain {name!r} has {len(rows)} prompts and {num_rows} are asked for. Ask for fewer.")
    return list(rows.values())


def _copy(rng: random.Random) -> Question:
    word = "".join(rng.choices(LETTERS, k=3))
    return Question(f"copy {word}", word, mistake=word[:-1])


def _maximum(rng: random.Random) -> Question:
    numbers = rng.sample(range(10, 100), 2)
    return Question(f"max {numbers[0]},{numbers[1]}", str(max(numbers)), mistake=str(min(numbers)))


def _sorting(rng: random.Random) -> Question:
    digits = sorted(rng.sample("0123456789", k=3))
    shown = "".join(rng.sample(digits, k=3))
    return Question(f"sort {shown}", "".join(digits), mistake="".join(reversed(digits)))


def _reverse(rng: random.Random) -> Question:
    word = "".join(rng.choices(LETTERS, k=3))
    return Question(f"rev {word}", word[::-1], mistake=word)


def _addition(rng: random.Random) -> Question:
    a, b = rng.randint(10, 99), rng.randint(1, 9)
    without_carry = f"{a // 10}{(a + b) % 10}"
    return Question(f"{a}+{b}", str(a + b), mistake=without_carry if (a % 10 + b) > 9 else str(a + b + 1))


DOMAINS = {
    "copy": Domain(_copy, right=0.8),
    "maximum": Domain(_maximum, right=0.6),
    "sorting": Domain(_sorting, right=0.5),
    "reverse": Domain(_reverse, right=0.4),
    "addition": Domain(_addition, right=0.3),
}
"""From easy to hard."""
