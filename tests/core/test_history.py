"""What is remembered of prompts: exact, bounded, the same after a checkpoint."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lightning_dataflex.core.history import PromptHistory, Visits

COLUMNS = {"a": 1.0, "b": 0.0}


def test_it_remembers_as_a_dict_would(tmp_path) -> None:
    rng = np.random.default_rng(0)
    history, expected = PromptHistory(COLUMNS), {}
    for step in range(50):
        ids = rng.choice(200, 20, replace=False) * 2**55 - 2**62
        a, b = rng.integers(0, 100, 20), rng.integers(0, 100, 20)
        history.put(torch.tensor(ids), {"a": torch.tensor(a), "b": torch.tensor(b)}, step)
        expected |= {i: (x, y) for i, x, y in zip(ids.tolist(), a.tolist(), b.tolist())}
    asked = torch.tensor(np.arange(210) * 2**55 - 2**62)
    torch.save(history.state_dict(), tmp_path / "state.pt")
    again = PromptHistory(COLUMNS)
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for each in (history, again):
        found = each.look_up(asked)
        want = [expected.get(i, (1.0, 0.0)) for i in asked.tolist()]
        assert list(zip(found["a"].tolist(), found["b"].tolist())) == want
        assert each.seen(asked).tolist() == [i in expected for i in asked.tolist()]
        assert len(each) == len(expected)


def test_a_million_prompts_take_less_than_200_megabytes() -> None:
    history = PromptHistory({"alpha": 1.0, "beta": 1.0})
    ids = torch.from_numpy(np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 1_000_000))
    ones = torch.ones(1_000_000)
    history.put(torch.unique(ids), {"alpha": ones, "beta": ones}, 0)
    assert len(history) == 1_000_000
    assert history.num_bytes < 200e6
    state = history.state_dict()
    assert sum(tensor.numel() * tensor.element_size() for tensor in state.values()) < 200e6


def test_what_was_visited_longest_ago_is_forgotten() -> None:
    history = PromptHistory(COLUMNS, max_prompts=4)
    for step in range(10):
        history.put(torch.tensor([step]), {"a": torch.tensor([step]), "b": torch.tensor([0])}, step)
        history.put(torch.tensor([0]), {"a": torch.tensor([-step]), "b": torch.tensor([0])}, step)
        assert len(history) <= 4
    assert history.seen(torch.tensor([0, 1, 9])).tolist() == [True, False, True]
    assert history.look_up(torch.tensor([0, 1]))["a"].tolist() == [-9, 1]
    last = PromptHistory({}, max_prompts=1)
    last.put(torch.tensor([3, 4, 5]), {}, 0)
    assert last.seen(torch.tensor([3, 4, 5])).tolist() == [False, False, True]
    with pytest.raises(ValueError, match="max_prompts is 0"):
        PromptHistory(COLUMNS, max_prompts=0)


def test_visits_are_those_of_each_prompt() -> None:
    ids = torch.tensor([9, 7, 9, 7, 8, 6])
    outcomes = torch.tensor([1.0, 0.1, 0.0, 0.1, torch.nan, 1.0])
    visits = Visits.of(ids, outcomes)
    assert visits.ids.tolist() == [6, 7, 9]
    assert visits.num.tolist() == [1, 2, 2]
    assert visits.solved.tolist() == [1, 0, 1]
    assert visits.rewards.tolist() == pytest.approx([1, 0.1, 0.5])
    assert visits.has_signal.tolist() == [False, False, True]
    assert not len(Visits.of(torch.tensor([], dtype=torch.int64), torch.tensor([])).ids)
