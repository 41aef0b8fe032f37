from __future__ import annotations

import sys

import pytest

from examples.rlhf import PromptDataModule, gym


def test_a_missing_library_is_named_with_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ImportError, match=r"pip install lightning_dataflex\[gym\]"):
        PromptDataModule(source="reasoning_gym", domains=["chain_sum"]).setup()


def test_prompts_and_verifiers_of_any_generator() -> None:
    pytest.importorskip("reasoning_gym")
    data = PromptDataModule(
        source="reasoning_gym", domains=["chain_sum", "spell_backward"], num_train=6, num_held_out=3
    )
    data.setup()
    train, held_out = data.prompts.train, data.prompts.held_out
    assert (len(train), len(held_out)) == (12, 6)
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in held_out}
    for row in train:
        assert data.verifier(row, row["answer"]) == 1.0
        assert data.verifier(row, f"Let me think. <answer>{row['answer']}</answer>") == 1.0
        assert data.verifier(row, "I do not know") < 1.0


def test_an_unknown_generator_is_refused() -> None:
    pytest.importorskip("reasoning_gym")
    with pytest.raises(ValueError, match=r"no generator 'chain_sums'\. Use some of .*chain_sum"):
        gym.split(["chain_sums"], 1, 1)


def test_a_run_on_a_generator(trained) -> None:  # type: ignore[no-untyped-def]
    pytest.importorskip("reasoning_gym")
    from examples.rlhf import RLHFModule

    prompts = {"source": "reasoning_gym", "domains": ["chain_sum", "gcd"], "num_train": 8, "batch_size": 4}
    model = trained(RLHFModule(warmup_steps=1, num_generations=2, max_new_tokens=4), 1, prompts=prompts)
    assert model.global_step == 1
