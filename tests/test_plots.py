"""The plot of callbacks and of scorers, as torchmetrics has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

from lightning_dataflex import DataFlexCallback, build
from lightning_dataflex.telling import History
from tests import flowing
from tests.test_telling import BATCHES, outcomes, solving
from tests.toy import Toy, fit, kept_rows


@pytest.fixture(autouse=True)
def _no_window() -> Any:
    before = matplotlib.get_backend()
    plt.switch_backend("agg")
    yield
    plt.close("all")
    plt.switch_backend(before)


def labels(ax: Any) -> list[str]:
    return [text.get_text() for text in ax.get_legend().get_texts()]


def test_a_callback_plots_what_it_has_decided() -> None:
    callback = solving(log_level="warning")
    fit(Toy(), [callback], BATCHES)
    fig, ax = callback.plot()
    assert ax.get_figure() is fig
    kept, rewards, of_kept = ax.get_lines()
    assert labels(ax) == ["kept fraction", "reward, all", "reward, kept"]
    assert kept.get_xdata().tolist() == [0, 1, 2, 3]
    assert kept.get_ydata() == pytest.approx([kept_rows(batch).mean() for batch in BATCHES])
    assert rewards.get_ydata() == pytest.approx([outcomes(batch).mean() for batch in BATCHES])
    assert of_kept.get_ydata().tolist() == [row["reward_kept"] for row in callback.telling.history.numbers]


def test_a_mixer_plots_its_proportions() -> None:
    callback = DataFlexCallback("mix", actuator={"name": "reward_gap", "params": {"temperature": 0.5}})
    _, logged, _ = flowing.fit([callback], flowing.Mixed(["easy", "hard", "mixed"] * 4))
    _, ax = callback.plot()
    assert labels(ax) == ["a", "b", "c"]
    top = ax.collections[0].get_paths()[0].vertices[:, 1].max()
    assert top == pytest.approx(max(row["prop_a"] for row in logged))


def test_values_and_axes_of_ones_own() -> None:
    given = plt.figure().add_subplot()
    fig, ax = solving().plot([{"kept_frac": 0.25}, {"kept_frac": 0.75}], ax=given)
    assert ax is given
    assert fig is given.get_figure()
    assert ax.get_lines()[0].get_ydata().tolist() == [0.25, 0.75]
    assert solving().plot({"kept_frac": 0.5})[1].get_lines()[0].get_ydata().tolist() == [0.5]


def test_nothing_can_be_plotted_before_a_step() -> None:
    with pytest.raises(ValueError, match=r"Nothing was decided yet.*Plot after a training step\."):
        solving().plot()


@pytest.mark.parametrize("val", [0.5, [0.5], "kept_frac", {"kept_frac": "much"}, {"kept_frac": torch.ones(2)}, [None]])
def test_what_was_not_logged_is_no_plot_of_a_run(val: Any) -> None:
    with pytest.raises(TypeError, match=r"^val is .*Give what was logged of each step"):
        solving().plot(val)


@pytest.mark.parametrize("val", [0.5, [0.5], "scores", [torch.ones(1), None], {"a": 1}])
def test_what_is_no_score_is_no_plot_of_a_scorer(val: Any) -> None:
    with pytest.raises(TypeError, match=r"^val is .*Give the tensor of scores"):
        build("scorer", "outcome").plot(val)


@pytest.mark.parametrize("ax", [3, "left", np.array([1, 2])])
def test_what_is_no_axes_is_refused(ax: Any) -> None:
    for plot, val in ((solving().plot, {"ess": 1}), (build("scorer", "outcome").plot, torch.ones(1))):
        with pytest.raises(TypeError, match=r"^ax is .*Give the axes of one picture"):
            plot(val, ax)


@pytest.mark.parametrize("val", [[], {}, [{}, {}]])
def test_steps_without_a_number_are_nothing_to_plot(val: Any) -> None:
    with pytest.raises(ValueError, match="so there is nothing to plot"):
        solving().plot(val)


def test_what_is_remembered_for_a_plot_is_not_saved(tmp_path: Path) -> None:
    callback = solving(log_level="warning")
    fresh = callback.state_dict()
    fit(Toy(), [callback], BATCHES)
    assert set(callback.state_dict()) - set(fresh) <= {"unfinished"}
    assert "kept_frac" not in str(callback.state_dict())


def test_a_long_run_is_remembered_evenly() -> None:
    history = History(most=10)
    for step in range(5, 1000):
        history.add(step, {"x": float(step)})
    assert 5 < len(history.steps) <= 10
    assert history.steps[0] == 5
    assert len(set(np.diff(history.steps))) == 1
    assert history.steps[-1] > 1000 - 2 * (history.steps[1] - history.steps[0])
    assert [row["x"] for row in history.numbers] == history.steps


def test_another_fit_begins_anew() -> None:
    callback = solving(log_level="warning")
    for _ in range(2):
        fit(Toy(), [callback], BATCHES[:2])
    assert len(callback.telling.history.steps) == 2


def test_a_scorer_plots_its_scores() -> None:
    scorer = build("scorer", "group_solve_rate")
    scorer.update(BATCHES[0])
    fig, ax = scorer.plot()
    assert ax.get_figure() is fig
    rates = outcomes(BATCHES[0]).reshape(-1, 2).mean(1).repeat(2)
    heights, edges = [bar.get_height() for bar in ax.patches], [bar.get_x() for bar in ax.patches]
    expected, bins = np.histogram(rates, 30)
    assert heights == expected.tolist()
    assert edges == pytest.approx(bins[:-1].tolist())
    assert ax.get_xlabel() == "score of GroupSolveRate"


def test_a_scorer_plots_values_that_are_given_without_those_that_are_none() -> None:
    given = plt.figure().add_subplot()
    _, ax = build("scorer", "outcome").plot(
        [torch.tensor([0.0, torch.nan]), torch.tensor([[1.0, torch.inf]])], ax=given
    )
    assert ax is given
    assert sum(bar.get_height() for bar in ax.patches) == 2
    assert ax.get_title() == "2 of 4 have one"


@pytest.mark.parametrize(
    "plot", [lambda: solving().plot({"kept_frac": 1.0}), lambda: build("scorer", "outcome").plot(torch.ones(2))]
)
def test_without_matplotlib_it_says_what_to_install(plot: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_dataflex.core.figures.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"Install lightning_dataflex\[see\]\."):
        plot()
