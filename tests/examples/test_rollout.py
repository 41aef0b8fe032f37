from __future__ import annotations

import pytest
import torch

from examples.rlhf.batches import minibatches
from examples.rlhf.policy import Policy, built
from examples.rlhf.rollout import Sampling, described, generated, response_mask
from examples.rlhf.tasks import DOMAINS, split
from examples.rlhf.tokenizer import CharTokenizer, Tokenizer

ROWS = split(list(DOMAINS), 2, 0).train
EOS = CharTokenizer.eos_id


@pytest.fixture(scope="module")
def model() -> tuple[Policy, Tokenizer]:
    policy, tokenizer = built(None, value_head=True, seed=0)
    # The eager kernel takes its softmax in single precision, whatever it is given.
    policy.model.set_attn_implementation("sdpa")
    # Random weights say next to nothing; larger ones give distributions that differ from token to token.
    for parameter in policy.double().parameters():
        parameter.data.mul_(3)
    torch.nn.init.normal_(policy.value_head.weight, generator=torch.Generator().manual_seed(0))
    return policy, tokenizer


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_log_probs_under_left_padding_are_those_without(model, temperature: float) -> None:
    policy, tokenizer = model
    sampling = Sampling(num_generations=3, temperature=temperature, max_new_tokens=5)
    batch = generated(policy, tokenizer, ROWS, sampling, seed=1)
    fields = described(policy, batch, temperature, micro_batch_size=7)
    assert (batch["attention_mask"][:, 0] == 0).any()
    width = batch["response_mask"].shape[1]
    for i, row in enumerate(row for row in ROWS for _ in range(3)):
        n = int(batch["response_mask"][i].sum())
        prompt = tokenizer.encode(row["prompt"])
        response = batch["input_ids"][i, -width:][:n].tolist()
        with torch.no_grad():
            out = policy.model(torch.tensor([prompt + response]), output_hidden_states=True)
        log_p = (out.logits[0, len(prompt) - 1 : -1] / temperature).log_softmax(-1)
        values = policy.value_head(out.hidden_states[-1])[0, len(prompt) - 1 : -1, 0]
        torch.testing.assert_close(fields["old_log_probs"][i, :n], log_p[range(n), response], rtol=0, atol=1e-9)
        torch.testing.assert_close(fields["entropies"][i, :n], torch.distributions.Categorical(logits=log_p).entropy())
        torch.testing.assert_close(fields["values"][i, :n], values, rtol=0, atol=1e-9)


def test_responses_are_drawn_from_the_distribution_that_is_described(model) -> None:
    policy, tokenizer = model
    batch = generated(policy, tokenizer, ROWS[:1], Sampling(4000, temperature=0.7, max_new_tokens=1), seed=2)
    with torch.no_grad():
        logits = policy.model(torch.tensor([tokenizer.encode(ROWS[0]["prompt"])])).logits[0, -1]
    expected = (logits / 0.7).softmax(-1)
    drawn = torch.bincount(batch["input_ids"][:, -1], minlength=len(expected)) / 4000
    assert (drawn - expected).abs().sum() / 2 < 0.06


def test_a_small_top_p_leaves_only_the_likeliest_token(model) -> None:
    policy, tokenizer = model
    cut = generated(policy, tokenizer, ROWS, Sampling(top_p=1e-6, max_new_tokens=3), seed=0)
    greedy = generated(policy, tokenizer, ROWS, Sampling(temperature=0.0, max_new_tokens=3), seed=0)
    assert torch.equal(cut["input_ids"], greedy["input_ids"])


def test_draws_depend_on_the_seed_alone(model) -> None:
    policy, tokenizer = model
    before = torch.get_rng_state()
    one, again, other = (generated(policy, tokenizer, ROWS, Sampling(2), seed=s)["input_ids"] for s in (5, 5, 6))
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_the_mask_ends_with_the_first_end_token() -> None:
    responses = torch.tensor([[5, EOS, 0, 0], [EOS, 5, EOS, 5], [5, 5, 5, EOS], [5, 6, 7, 8], [5, 9, 5, 5]])
    assert response_mask(responses, [EOS, 9]).tolist() == [
        [1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 0, 0]
    ]  # fmt: skip


def test_the_text_of_a_response_is_what_stands_before_its_end(model) -> None:
    policy, tokenizer = model
    batch = generated(policy, tokenizer, ROWS, Sampling(50, max_new_tokens=6), seed=3)
    lengths = batch["response_mask"].sum(1)
    ends = (batch["input_ids"][:, -6:] == EOS) & batch["response_mask"].bool()
    assert ends.any(1).float().mean() < 1
    assert (ends.sum(1) <= 1).all()
    texts = [
        "".join(tokenizer.decode([i]) for i in ids[-6:][:n]) for ids, n in zip(batch["input_ids"].tolist(), lengths)
    ]
    assert batch["responses"] == texts


def test_minibatches_hold_whole_groups_and_every_sample_once() -> None:
    uid = ["a", "b", "a", "c", "b", "d", "c", "d", "e"]
    parts = minibatches(uid, 2, torch.Generator().manual_seed(0))
    groups = [{uid[row] for row in part} for part in parts]
    assert sorted(row for part in parts for row in part) == list(range(9))
    assert not groups[0] & groups[1]
    # A rank may have fewer groups left than there are steps to take.
    few = minibatches(["a", "a"], 3, torch.Generator().manual_seed(0))
    assert sorted(map(len, few)) == [0, 0, 2]


@pytest.mark.parametrize(("setting", "value"), [("temperature", -1.0), ("top_p", 0.0), ("num_generations", 0)])
def test_sampling_settings_that_mean_nothing_are_refused(setting: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{setting} is {value}"):
        Sampling(**{setting: value})


def test_groups_of_equal_responses_are_refused() -> None:
    with pytest.raises(ValueError, match=r"temperature is 0, so that all 8 responses"):
        Sampling(num_generations=8, temperature=0.0)
