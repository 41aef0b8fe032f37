from __future__ import annotations

import random

import pytest
import torch

from examples.rlhf.data import PromptDataModule
from examples.rlhf.solving import SolveRates
from examples.rlhf.tasks import DOMAINS, split, verified

ANSWERS = {
    "copy:hab": "hab",
    "maximum:41,39": "41",
    "maximum:19,91": "91",
    "sorting:802": "028",
    "reverse:abh": "hba",
    "addition:37+5": "42",
    "addition:99+9": "108",
}
MISTAKES = {
    "copy:hab": "ha",
    "maximum:41,39": "39",
    "maximum:19,91": "19",
    "sorting:802": "820",
    "reverse:abh": "abh",
    "addition:37+5": "32",
    "addition:99+9": "98",
}


class Fixed(random.Random):
    """Draws what the question of a prompt id asks for."""

    def __init__(self, domain: str, question: str) -> None:
        super().__init__(0)
        numbers = [int(n) for n in question.replace("+", ",").split(",")] if domain in ("maximum", "addition") else []
        self.given = list(numbers) or list(question)
        self.numbers = iter(numbers)

    def choices(self, population, k):  # type: ignore[no-untyped-def]
        return self.given

    def sample(self, population, k):  # type: ignore[no-untyped-def]
        return self.given

    def randint(self, a, b):  # type: ignore[no-untyped-def]
        return next(self.numbers)


@pytest.mark.parametrize("prompt_id", ANSWERS)
def test_answers_and_mistakes_made_by_hand(prompt_id: str) -> None:
    domain, question = prompt_id.split(":")
    drawn = DOMAINS[domain].draw(Fixed(domain, question))
    assert drawn.text.endswith(question)
    assert (drawn.answer, drawn.mistake) == (ANSWERS[prompt_id], MISTAKES[prompt_id])


def test_only_the_right_answer_is_verified() -> None:
    row = split(["addition"], 1, 0).train[0]
    a, b = row["prompt_id"].removeprefix("addition:").split("+")
    right = str(int(a) + int(b))
    assert [verified(row, text) for text in (right, f" {right}\n", f"{right}0", right[:-1], "", f"={right}")] == [
        1.0, 1.0, 0.0, 0.0, 0.0, 0.0
    ]  # fmt: skip


def test_prompts_and_answers_are_short_and_a_mistake_is_never_right() -> None:
    rng = random.Random(1)
    for domain in DOMAINS.values():
        for drawn in (domain.draw(rng) for _ in range(300)):
            assert len(drawn.text) < 16
            assert len(drawn.answer) <= 8
    for name in ("copy", "maximum", "sorting", "addition"):
        assert all(q.answer != q.mistake for q in (DOMAINS[name].draw(rng) for _ in range(300)))


def test_train_and_held_out_prompts_differ_in_every_domain() -> None:
    prompts = split(list(DOMAINS), 400, 64)
    train, held_out = ({row["prompt"] for row in rows} for rows in (prompts.train, prompts.held_out))
    assert not train & held_out
    assert len(train) == 400 * len(DOMAINS)
    assert len(held_out) == 64 * len(DOMAINS)
    assert len({row["prompt_id"] for row in prompts.train + prompts.held_out}) == 464 * len(DOMAINS)


def test_held_out_prompts_depend_on_the_seed_alone() -> None:
    some = split(["copy", "addition"], 10, 5, seed=3)
    more = split(["addition"], 20, 5, seed=3)
    other = split(["addition"], 20, 5, seed=4)
    assert [row for row in some.held_out if row["domain"] == "addition"] == more.held_out
    assert other.held_out != more.held_out


def test_prompts_are_the_same_on_every_machine() -> None:
    train = split(["copy", "sorting"], 2, 1).train
    assert [row["prompt_id"] for row in train] == ["copy:cbf", "sorting:628", "copy:fhg", "sorting:056"]


def test_the_share_of_right_demonstrations_is_the_domains() -> None:
    rows = split(["maximum"], 1000, 0).train
    share = sum(row["demonstration"] == row["answer"] for row in rows) / 1000
    assert share == pytest.approx(DOMAINS["maximum"].right, abs=0.05)


def test_mistakes_of_the_user_are_named() -> None:
    with pytest.raises(ValueError, match=r"no domain 'sort'\. Use some of copy"):
        split(["sort"], 1, 1)
    with pytest.raises(ValueError, match=r"'addition' has 810 prompts and 1001 are asked for"):
        split(["addition"], 1000, 1)
    with pytest.raises(ValueError, match=r"domains is None with source 'reasoning_gym'"):
        PromptDataModule(source="reasoning_gym")


def test_every_train_prompt_comes_once_an_epoch() -> None:
    data = PromptDataModule(num_train=10, num_held_out=2, batch_size=5)
    data.setup()
    batches = list(data.train_dataloader())
    seen = [row["prompt_id"] for batch in batches for row in batch]
    assert sorted(seen) == sorted(row["prompt_id"] for row in data.prompts.train)
    assert seen != [row["prompt_id"] for row in data.prompts.train]


def test_solve_rates_add_up_per_domain() -> None:
    domains = ["copy", "sorting", "addition"]
    one = SolveRates.of(domains, ["copy", "sorting", "copy"], torch.tensor([1.0, 1.0, 0.0]))
    two = SolveRates.of(domains, ["sorting"], torch.tensor([0.0]))
    assert (one + two).per_domain == {"copy": 0.5, "sorting": 0.5}
    assert (one + two).overall == 0.5
