"""dataflex report: what the page says, read back from it, is what the files of the run hold."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from lightning.pytorch.loggers import CSVLogger

from lightning_dataflex.cli import main
from lightning_dataflex.report.agreement import doubts
from lightning_dataflex.report.folder import run_in
from lightning_dataflex.report.metrics import Series, metrics_of
from lightning_dataflex.report.page import DARK
from lightning_dataflex.report.trace import StepOfTrace, rates_of
from tests.test_cli import error
from tests.test_telling import outcomes, solving
from tests.toy import Toy, fit, kept_rows, rollout

BATCHES = [rollout(seed) for seed in (0, 10, 2)]
HOSTILE = '</text></title></pre>"><script src="http://x.invalid/a.js">alert(1)</script><b a=\'&amp;$x_1$\x00\u202e'
MARK = "<script"
ALONE = {"meta", "br", "path", "use", "rect", "image"}
TAGS = {
    *(
        "html",
        "head",
        "meta",
        "title",
        "style",
        "body",
        "main",
        "h1",
        "h2",
        "h3",
        "p",
        "strong",
        "div",
        "figure",
        "figcaption",
    ),
    *("table", "tr", "th", "td", "details", "summary", "pre"),
    *("svg", "g", "path", "text", "defs", "use", "clippath", "rect", "image"),
}


class Page(HTMLParser):
    """The tables, texts, tags and attributes of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.source, self.tags, self.attributes = text, list[str](), list[tuple[str, str, str]]()
        self.tables: dict[str, list[list[str]]] = {}
        self.texts: list[str] = []
        self._rows: list[list[str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag == "table":
            self._rows = self.tables[dict(attrs)["data-name"]] = []
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("td", "th"):
            self._rows[-1].append("")

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        if self._rows and self._rows[-1] and self.get_starttag_text().startswith(("<td", "<th")):
            self._rows[-1][-1] += data.rstrip("\n")

    def column(self, table: str, name: str) -> list[float]:
        header, *rows = self.tables[table]
        return [float(row[header.index(name)] or "nan") for row in rows]

    def row(self, table: str, name: str) -> dict[str, str]:
        header, *rows = self.tables[table]
        return dict(zip(header[1:], next(row[1:] for row in rows if row[0] == name)))


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """For what is said beside the pictures: drawing takes most of the time."""
    monkeypatch.setattr("lightning_dataflex.report.drawing.pictures", lambda *args: ("<svg />", b""))


def page_in(folder: Path, *args: str) -> Page:
    main(["report", str(folder), "--out", str(folder / "page.html"), *args])
    return Page((folder / "page.html").read_text("utf-8"))


def write(folder: Path, columns: dict[str, list[Any]]) -> Path:
    """A metrics.csv with these columns, and steps."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "metrics.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["epoch", "step", *columns])
        table.writerows([0, step, *row] for step, row in enumerate(zip(*columns.values())))
    return folder


def write_trace(file: Path, rows: list[dict[str, Any]]) -> None:
    default = {"domain": None, "score": 0.5, "weight": 1.0, "label": "rule"}
    file.write_text("".join(json.dumps(default | row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a short run."""
    folder = tmp_path_factory.mktemp("run")
    logger = CSVLogger(folder, name="", version="only")
    fit(Toy(), [solving(log_level="warning")], BATCHES, logger=logger, log_every_n_steps=1)
    return folder


@pytest.fixture(scope="module")
def page(trained: Path) -> Page:
    return page_in(trained)


def test_the_numbers_are_those_of_the_metrics_file(trained: Path, page: Page) -> None:
    with (trained / "only" / "metrics.csv").open() as file:
        logged = list(csv.DictReader(file))
    assert page.column("kept", "step") == [float(row["step"]) for row in logged] == [0, 1, 2]
    for name, table, column in (
        ("kept_frac", "kept", "kept fraction"),
        ("reward_all", "reward", "before (all samples)"),
        ("reward_kept", "reward", "after (kept samples)"),
        ("dropped_solved", "drops", "solved"),
        ("weight_std", "weights", "standard deviation"),
        ("ess", "ess", "effective sample size"),
    ):
        values = [float(row[f"dataflex/{name}"]) for row in logged]
        assert page.column(table, column) == pytest.approx(values, rel=1e-5), name
        final = {key: float(text) for key, text in page.row("numbers", name).items()}
        expected = [3, values[0], values[-1], np.mean(values), min(values), max(values)]
        assert list(final.values()) == pytest.approx(expected, rel=1e-3), name


def test_pictures_lie_beside_the_page(trained: Path, page: Page) -> None:
    names = {file.name for file in trained.glob("page-*.png")}
    assert names == {f"page-{name}.png" for name in page.tables if name != "numbers"}
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in trained.glob("page-*.png"))
    assert page.tags.count("svg") == len(names) == 5


def test_every_picture_says_what_it_shows(trained: Path, page: Page) -> None:
    said = [value for tag, name, value in page.attributes if (tag, name) == ("svg", "aria-label")]
    with (trained / "only" / "metrics.csv").open() as file:
        ess = [float(row["dataflex/ess"]) for row in csv.DictReader(file)]
    assert len(said) == 5
    assert f"steps 0 to 2: effective sample size from {ess[0]:.3g} to {ess[-1]:.3g}." in said[-1]


def test_by_default_the_page_is_in_the_folder_of_the_run(
    trained: Path, undrawn: None, capsys: pytest.CaptureFixture
) -> None:
    main(["report", str(trained / "only")])
    assert (trained / "only" / "dataflex-report.html").is_file()
    assert f"{trained / 'only' / 'dataflex-report.html'} and 5 pictures" in capsys.readouterr().out


def test_light_and_dark_and_the_width_of_a_phone(page: Page) -> None:
    style = page.source.split("<style>")[1].split("</style>")[0]
    dark = style.split("@media (prefers-color-scheme: dark)")[1]
    for name in ("--ground", "--ink", "--rule", "--c0"):
        light, darker = (re.search(rf"{name}: (#\w+)", part)[1] for part in (style, dark))
        assert light != darker
        assert f"var({name})" in page.source
        assert page.source.count(light) == 1, "a picture has it as its own"
    assert "svg { display: block; stroke-linejoin: round; width: 100%" in style
    assert ("meta", "content", "width=device-width, initial-scale=1") in page.attributes


def test_series_are_legible_on_the_dark_ground() -> None:
    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    ground = luminance("#14171b")
    assert all((luminance(colour) + 0.05) / (ground + 0.05) >= 4.5 for colour in DARK)


def loads_of(page: Page) -> list[tuple[str, str, str]]:
    """What a browser would ask for."""
    kinds = ("src", "href", "xlink:href", "srcset", "data", "action", "poster", "background")
    return [each for each in page.attributes if each[1] in kinds and not each[2].startswith(("#", "data:image/png;"))]


def test_nothing_is_loaded_and_nothing_runs(page: Page) -> None:
    assert set(page.tags) <= TAGS
    assert loads_of(page) == []
    assert not re.search(r"@import|url\((?!#)|javascript:", page.source)
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]


def test_every_text_of_the_run_is_escaped(tmp_path: Path) -> None:
    folder = tmp_path / "a<script>b"
    columns = {
        f"dataflex/{HOSTILE.replace(chr(0), '')}/prop_{HOSTILE.replace(chr(0), '')}{i}": [0.5, 0.5] for i in "ab"
    }
    write(folder, columns)
    (folder / "config.yaml").write_text(f"a: {HOSTILE}")
    row = {"step": 0, "uid": HOSTILE, "kept": True, "reason": HOSTILE, "reward": 1.0, "length": 3, "label": HOSTILE}
    write_trace(folder / "trace.jsonl", [row])
    page = page_in(folder)
    assert set(page.tags) <= TAGS
    assert loads_of(page) == []
    assert "\x00" not in page.source
    assert "\u202e" not in page.source
    assert sum(MARK in text for text in page.texts) >= 6
    seen = HOSTILE.replace("\x00", "").replace("\u202e", "\ufffd")
    assert f"prop_{seen}a" in [row[0] for rows in page.tables.values() for row in rows]


def test_names_that_matplotlib_reads_otherwise_are_shown_as_they_are(tmp_path: Path) -> None:
    names = ["_a", "$x_1$", "数学", "d" * 50 + "1", "d" * 50 + "2"]
    page = page_in(write(tmp_path, {f"dataflex/prop_{name}": [0.2, 0.2] for name in names}))
    assert page.tables["proportions"][0] == ["step", *names]
    # In the legend and in the head of its table.
    assert [page.texts.count(name) for name in names[:3]] == [2, 2, 2]
    assert len([text for text in page.texts if text.startswith("ddd") and "…" in text]) == 2


def test_a_line_that_is_half_written_is_left_out(tmp_path: Path, undrawn: None) -> None:
    write(tmp_path, {"dataflex/kept_frac": [0.25, 0.5]})
    rows = [{"step": 0, "uid": "a", "kept": True, "reason": "kept", "reward": 1.0, "length": 3}] * 2
    write_trace(tmp_path / "trace.jsonl", rows)
    before = page_in(tmp_path).tables
    for name, half in (("metrics.csv", "0,2,0.7"), ("trace.jsonl", '{"step": 1, "ui')):
        with (tmp_path / name).open("a") as file:
            file.write(half)
    assert page_in(tmp_path).tables == before
    assert metrics_of(tmp_path / "metrics.csv") == {"": {"kept_frac": Series([0, 1], [0.25, 0.5])}}


def test_other_rows_of_the_file_leave_the_numbers_alone(tmp_path: Path, undrawn: None) -> None:
    columns = {"dataflex/kept_frac": [0.25, "", "nan"], "val_loss": ["", 3.0, ""], "dataflex/ess": [2, "", 3]}
    page = page_in(write(tmp_path, columns))
    assert page.column("ess", "step") == [0, 2]
    assert page.row("numbers", "kept_frac")["mean"] == "0.25"
    assert "val_loss" not in page.source


@pytest.mark.parametrize("values", [[0, 0], [0], ["nan", "inf"], [1e308, -1e308]])
def test_numbers_of_any_size_can_be_drawn(values: list[Any], tmp_path: Path) -> None:
    names = ("kept_frac", "dropped_rule", "dropped_nan", "prop_a", "score_a")
    page = page_in(write(tmp_path, {f"dataflex/{name}": values for name in names}))
    drawn = [float(value) if abs(float(value)) < 1e15 else np.nan for value in values]
    for table, column in (("drops", "by the rule"), ("kept", "kept fraction"), ("proportions", "a"), ("scores", "a")):
        assert page.column(table, column) == pytest.approx(drawn, nan_ok=True)


def test_a_long_run_is_shown_in_means(tmp_path: Path, undrawn: None) -> None:
    values = np.random.default_rng(0).random(1000)
    page = page_in(write(tmp_path, {"dataflex/kept_frac": values.tolist()}))
    assert page.column("kept", "step") == list(range(0, 1000, 4))
    assert page.column("kept", "kept fraction") == pytest.approx(values.reshape(-1, 4).mean(1), rel=1e-5)
    assert "Each point is the mean of 4 steps." in page.texts
    assert float(page.row("numbers", "kept_frac")["most"]) == pytest.approx(values.max(), rel=1e-3)


def test_many_domains_are_the_largest_and_the_others(tmp_path: Path, undrawn: None) -> None:
    shares = np.arange(1, 10) / 45
    page = page_in(write(tmp_path, {f"dataflex/prop_{i}": [share] * 2 for i, share in enumerate(shares)}))
    assert page.tables["proportions"][0] == ["step", "8", "7", "6", "5", "4", "4 others"]
    assert page.column("proportions", "4 others") == pytest.approx([shares[:4].sum()] * 2, rel=1e-5)


def test_several_callbacks_are_told_apart(tmp_path: Path, undrawn: None) -> None:
    columns = {f"dataflex/{label}/kept_frac": [0.5, value] for label, value in (("a", 0.1), ("a/b", 0.2), ("a-b", 0.3))}
    page = page_in(write(tmp_path, columns))
    assert {"a", "a/b", "a-b"} <= set(page.texts)
    last = {name: page.column(name, "kept fraction")[-1] for name in page.tables if name.endswith("kept")}
    assert last == {"a-kept": 0.1, "a-b-kept": 0.2, "a-b2-kept": 0.3}


def test_a_label_may_begin_as_the_numbers_of_a_domain_do(tmp_path: Path) -> None:
    for label in ("score_filter", "prop_a/b", "select"):
        columns = {f"dataflex/{label}/{name}": [1] for name in ("kept_frac", "n_nan")}
        mixing = {f"dataflex/mix/{name}": [1] for name in ("prop_x/n_nan", "score_x/n_nan", "n_nan", "lag")}
        found = metrics_of(write(tmp_path, columns | mixing) / "metrics.csv")
        names = {key: set(series) for key, series in found.items()}
        assert names == {label: {"kept_frac", "n_nan"}, "mix": {"prop_x/n_nan", "score_x/n_nan", "n_nan", "lag"}}


def test_a_domain_may_be_called_as_a_label_is(tmp_path: Path) -> None:
    columns = {f"dataflex/{name}": [1] for name in ("n_nan", "prop_a/n_nan", "prop_b/kept_frac")}
    found = metrics_of(write(tmp_path, columns) / "metrics.csv")
    assert {key: set(series) for key, series in found.items()} == {"": {"n_nan", "prop_a/n_nan", "prop_b/kept_frac"}}


# -- the trace ---------------------------------------------------------------------------------------------------------


def rows_of_trace() -> list[dict[str, Any]]:
    """Groups of four over two steps, of which those with signal are kept."""
    outcomes = {(0, "a"): [1, 1, 1, 1], (0, "b"): [0, 1, 0, 0], (1, "a"): [1, 0, 1, 1], (1, "c"): [0, 0, 0, 0]}
    reasons = {(0, "a"): "solved", (0, "b"): "kept", (1, "a"): "kept", (1, "c"): "failed"}
    return [
        {"step": key[0], "uid": key[1], "kept": reasons[key] == "kept", "reason": reasons[key], "reward": float(x)}
        | {"length": 10 * i + 5}
        for key, group in outcomes.items()
        for i, x in enumerate(group)
    ]


def check_trace(page: Page) -> None:
    assert page.column("trace-rule-tokens", "generated") == [160, 160]
    assert page.column("trace-rule-tokens", "trained on") == [80, 80]
    assert page.column("trace-rule-reasons", "kept") == [4, 4]
    assert page.column("trace-rule-reasons", "solved") == [4, 0]
    assert page.column("trace-rule-reasons", "failed") == [0, 4]
    assert page.tables["trace-rule-rates"] == [
        ["step", "0", "0.25", "0.5", "0.75", "1"],
        ["0", "0", "1", "0", "0", "1"],
        ["1", "1", "0", "0", "1", "0"],
    ]
    assert "no-trace" not in page.source


def test_a_trace_says_what_became_of_the_samples(tmp_path: Path) -> None:
    write_trace(write(tmp_path, {"dataflex/kept_frac": [0.5, 0.5]}) / "t.jsonl", rows_of_trace())
    check_trace(page_in(tmp_path))


def test_a_folder_of_other_tables_is_no_trace(tmp_path: Path, undrawn: None) -> None:
    write(tmp_path, {"dataflex/kept_frac": [0.5]})
    (tmp_path / "prompts.parquet").mkdir()
    (tmp_path / "prompts.parquet" / "part-0.parquet").write_bytes(b"of somebody else")

    assert run_in(tmp_path).trace == {}


def test_two_traces_of_one_callback_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    row = {"step": 0, "uid": "a", "kept": True, "reason": "kept", "reward": 1.0, "length": 3}
    for name in ("first.jsonl", "second.jsonl"):
        write_trace(tmp_path / name, [row])

    with pytest.raises(SystemExit):
        page_in(tmp_path)

    assert "has two traces of 'rule', one of them 'second.jsonl'" in capsys.readouterr().err


def test_groups_of_several_sizes_are_counted_at_the_nearest_of_eleven_rates() -> None:
    step = StepOfTrace(outcomes={"a": [True], "b": [True, False, False], "c": [False] * 30 + [True]})
    rates, counts = rates_of([step, StepOfTrace()])
    assert rates == pytest.approx(np.linspace(0, 1, 11))
    assert counts == [[1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1], [0] * 11]


def test_parts_of_a_trace_belong_together(tmp_path: Path, undrawn: None) -> None:
    """Groups are spread over ranks, and there need be no metrics."""
    write_trace(tmp_path / "t.jsonl", rows_of_trace()[::2])
    write_trace(tmp_path / "t.rank1.jsonl", rows_of_trace()[1::2])
    check_trace(page_in(tmp_path))


def test_a_trace_in_parquet(tmp_path: Path, undrawn: None) -> None:
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install lightning_dataflex[see]")
    import pyarrow.parquet as pq

    (tmp_path / "t.parquet").mkdir()
    rows = [row | {"label": "rule"} for row in rows_of_trace()]
    for number, part in enumerate((rows[:6], rows[6:])):
        pq.write_table(pa.Table.from_pylist(part), tmp_path / f"t.parquet/rank0-{number:06d}.parquet")
    (tmp_path / "t.parquet" / ".rank0-000002.parquet").write_bytes(b"half")
    check_trace(page_in(tmp_path))


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.parquet"])
def test_the_trace_that_a_run_has_written(name: str, tmp_path: Path, undrawn: None) -> None:
    callback = solving(log_level="warning", trace=str(tmp_path / name))
    fit(Toy(), [callback], BATCHES, logger=CSVLogger(tmp_path, name="", version="only"), log_every_n_steps=1)
    page = page_in(tmp_path)
    lengths = [batch["response_mask"].numpy().sum(-1) for batch in BATCHES]
    kept = [kept_rows(batch) > 0 for batch in BATCHES]
    prefix = "trace-select-group_solve_rate-threshold_band"
    assert page.column(f"{prefix}-tokens", "generated") == [num.sum() for num in lengths]
    assert page.column(f"{prefix}-tokens", "trained on") == [num[k].sum() for num, k in zip(lengths, kept)]
    assert page.column(f"{prefix}-reasons", "kept") == [k.sum() for k in kept]
    rates = [outcomes(batch).reshape(-1, 2).mean(1) for batch in BATCHES]
    assert page.column(f"{prefix}-rates", "0.5") == [(rate == 0.5).sum() for rate in rates]
    assert page.row(f"{prefix}-numbers", "samples: kept")["in all"] == str(np.sum(kept))


def test_a_trace_elsewhere_is_named(tmp_path: Path, undrawn: None) -> None:
    write_trace(tmp_path / "t.jsonl", rows_of_trace())
    check_trace(page_in(write(tmp_path / "run", {"dataflex/ess": [1, 2]}), "--trace", str(tmp_path / "t.jsonl")))


def test_without_a_trace_it_says_what_to_turn_on(page: Page) -> None:
    assert any("Give the dataflex block trace: PATH" in text for text in page.texts)


def test_the_configuration_is_shown(tmp_path: Path, undrawn: None) -> None:
    write(tmp_path, {"dataflex/ess": [1, 2]})
    (tmp_path / "config.yaml").write_text("seed: 3\nname: a < b\n")
    (tmp_path / "hparams.yaml").write_text("{}\n")
    page = page_in(tmp_path)
    assert "".join(page.texts).count("seed: 3\nname: a < b\n") == 1
    assert "hparams.yaml" not in page.source


def test_the_configuration_says_where_the_trace_is(
    tmp_path: Path, undrawn: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under `dataflex` or as a callback of the Trainer; what lies in the folder is not looked for then."""
    folder = write(tmp_path / "run", {"dataflex/ess": [1, 2]})
    (tmp_path / "elsewhere").mkdir()
    write_trace(tmp_path / "elsewhere" / "t.jsonl", rows_of_trace())
    write_trace(folder / "other.jsonl", rows_of_trace()[:4])
    monkeypatch.chdir(tmp_path)
    block = {"mechanism": "select", "trace": "elsewhere/t.jsonl"}
    callback = {"class_path": "lightning_dataflex.DataFlexCallback", "init_args": block}
    for config in ({"dataflex": [{"mechanism": "mix"}, block]}, {"trainer": {"callbacks": [callback]}}):
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        check_trace(page_in(folder))
        assert run_in(folder).notes == []


def test_a_trace_that_is_not_where_the_configuration_says_is_missed(tmp_path: Path, undrawn: None) -> None:
    folder = write(tmp_path, {"dataflex/ess": [1]})
    (folder / "config.yaml").write_text("dataflex: {mechanism: select, trace: gone/t.jsonl}")
    assert run_in(folder).notes[0].startswith("config.yaml has trace: gone/t.jsonl, and there is none.")
    write_trace(folder / "other.jsonl", rows_of_trace())
    assert "other.jsonl is not named in config.yaml and may be of another run." in run_in(folder).notes[-1]


def test_a_trace_that_the_configuration_does_not_name_is_doubted(tmp_path: Path, undrawn: None) -> None:
    folder = write(tmp_path, {"dataflex/ess": [1]})
    write_trace(folder / "t.jsonl", rows_of_trace())
    (folder / "config.yaml").write_text("dataflex: {mechanism: select, trace: null}")
    assert run_in(folder).notes[0].startswith("t.jsonl is not named in config.yaml and may be of another run.")
    assert run_in(folder, folder / "t.jsonl").notes == []


@pytest.mark.parametrize("config", ["a: !!python/name:os.system", "[1, 2]", "dataflex: 3", "{", "dataflex: {trace: 3}"])
def test_a_configuration_of_another_kind_says_nothing_of_a_trace(config: str, tmp_path: Path, undrawn: None) -> None:
    folder = write(tmp_path, {"dataflex/ess": [1]})
    (folder / "config.yaml").write_text(config)
    assert run_in(folder).trace == {}
    assert run_in(folder).configs == {"config.yaml": config}


# -- whether they belong together --------------------------------------------------------------------------------------


def logged_and_traced(folder: Path, seeds: Sequence[int], every: int = 1, **settings: Any) -> None:
    callback = solving(log_level="warning", trace=str(folder / "trace.jsonl"))
    logger = CSVLogger(folder, name="", version="only")
    batches = [rollout(seed) for seed in seeds]
    fit(Toy(), [callback], batches, logger=logger, log_every_n_steps=every, **settings)


def test_a_trace_of_the_same_run_is_not_doubted(tmp_path: Path) -> None:
    logged_and_traced(tmp_path, range(7), every=2)
    assert run_in(tmp_path).notes == []


@pytest.mark.parametrize("is_known", [True, False])
def test_batches_of_one_optimiser_step_are_not_taken_for_another_run(is_known: bool, tmp_path: Path) -> None:
    """Of nine batches in two epochs the last of each is an optimiser step of its own."""
    logged_and_traced(tmp_path, range(9), accumulate_grad_batches=4, max_epochs=2)
    if is_known:
        (tmp_path / "only" / "config.yaml").write_text("trainer: {accumulate_grad_batches: 4}")
    assert run_in(tmp_path).notes == []


@pytest.mark.parametrize(("num", "is_known"), [(3, False), (6, False), (12, True)])
def test_a_trace_of_another_run_is_said_to_be_one(
    num: int, is_known: bool, tmp_path: Path, undrawn: None, capsys: pytest.CaptureFixture
) -> None:
    """A shorter one, one as long and a longer one."""
    logged_and_traced(tmp_path / "this", range(6))
    logged_and_traced(tmp_path / "other", range(20, 20 + num))
    if is_known:
        (tmp_path / "this" / "only" / "config.yaml").write_text("trainer: {accumulate_grad_batches: 1}")
    page = page_in(tmp_path / "this" / "only", "--trace", str(tmp_path / "other" / "trace.jsonl"))
    said = "The trace of 'select.group_solve_rate.threshold_band' is of another run, or part of it is missing: reward_"
    assert f"warning: {said}" in capsys.readouterr().out
    assert any(text.startswith(said) for text in page.texts)


@pytest.mark.parametrize(("value", "num_doubts"), [(0.07, 0), (0.075, 1)])
def test_where_nobody_says_how_many_batches_a_step_has_the_first_is_one_of_them(value: float, num_doubts: int) -> None:
    steps = {i: StepOfTrace(rewards=[float(i), 100]) for i in range(12)}
    assert len(doubts({"": {"reward_all": Series([1, 2], [value, 0.9])}}, {"rule": steps})) == num_doubts


@pytest.mark.parametrize(
    ("logged", "traced", "expected"),
    [
        ([""], ["select.a.b", "reweight.c.d"], ["The trace is of 2 callbacks"]),
        (["mix", "select"], ["select.a.b"], []),
        (["mine", "mix"], ["mine"], []),
        (["mine", "mix"], ["mine", "select.a.b"], ["The trace is of 'select.a.b', and metrics.csv of 'mine', 'mix'."]),
        (list("ab"), ["h"], ["The trace is of 'h', and metrics.csv of 'a', 'b'."]),
        ([], ["select.a.b"], []),
    ],
)
def test_callbacks_of_a_trace_are_those_that_have_logged(
    logged: list[str], traced: list[str], expected: list[str]
) -> None:
    series = {"kept_frac": Series([0], [0.5])}
    found = doubts(dict.fromkeys(logged, series), {label: {0: StepOfTrace()} for label in traced})
    assert [text[: len(start)] for text, start in zip(found, expected, strict=True)] == expected


# -- what cannot be ---------------------------------------------------------------------------------------------------

CASES: dict[str, tuple[Callable[[Path], Any], list[str], str]] = {
    "nothing there": (
        lambda f: f.rmdir(),
        [],
        r"The run's folder '.*' is not there\. Give the folder with metrics\.csv",
    ),
    "a file": (lambda f: (f.rmdir(), f.write_text("x")), [], r"'.*' is a file\. Give the folder"),
    "empty": (lambda f: None, [], r"There is no metrics\.csv in '.*' or below it, and no trace\. Give the folder"),
    "several": (
        lambda f: [write(f / name, {"dataflex/ess": [1]}) for name in "ab"],
        [],
        r"There are 2 runs in '.*'\. Give the folder of one: \S+/a, \S+/b\.",
    ),
    "no whole line": (lambda f: (f / "metrics.csv").write_text("epoch,st"), [], r"has no whole line yet\. Wait"),
    "another table": (lambda f: (f / "metrics.csv").write_text("a,b\n1,2\n"), [], r"has no column 'step'\."),
    "no callback": (lambda f: write(f, {"loss": [1]}), [], r"has no number under dataflex/\. Train with"),
    "no number": (lambda f: write(f, {"dataflex/ess": ["many"]}), [], r"has 'many' for a number at line 2\. Correct"),
    "a step of words": (lambda f: (f / "metrics.csv").write_text("step,dataflex/ess\nx,1\n"), [], r"has 'x' for a num"),
    "no CSV": (lambda f: write(f, {"dataflex/ess": ["9" * 200_000]}), [], r"is no CSV at line 2: field larger"),
    "no trace": (lambda f: write(f, {"dataflex/ess": [1]}), ["--trace", "nowhere"], r"There is no trace at 'nowhere'"),
    "no row": (
        lambda f: (f / "t.jsonl").write_text('{"step": 1, "kept": 1, "reason": "", "length": 1}\n{"step": 1}\n'),
        [],
        r"Line 2 of '.*' is no row of a trace: \{'step': 1\}\. Give",
    ),
    "no step": (
        lambda f: (f / "t.jsonl").write_text('{"step": -1, "kept": 1, "reason": "", "length": 1}\n'),
        [],
        r"Line 1 of '.*' is no row of a trace: \{'step': -1,",
    ),
    "no JSON": (
        lambda f: (f / "t.jsonl").write_text('{"step": 1, "kept": 1, "reason": "", "length": 1}\n{"step": 1\n'),
        [],
        r"Line 2 of '.*' is no JSON: ",
    ),
    "folders": (
        lambda f: [(f / name).mkdir() for name in ("metrics.csv", "t.jsonl")],
        [],
        r"There is no metrics\.csv in",
    ),
    "a folder in its place": (
        lambda f: (write(f, {"dataflex/ess": [1]}), (f / "dataflex-report.html").mkdir()),
        [],
        r"'.*dataflex-report\.html' is a folder\. Give the file",
    ),
    "no page": (lambda f: write(f, {"dataflex/ess": [1]}), ["--out", "a.txt"], r"--out is 'a\.txt'\. Give the file"),
    "no place": (lambda f: write(f, {"dataflex/ess": [1]}), ["--out", "/dev/null/a.html"], r"cannot be written: "),
}


@pytest.mark.parametrize("case", CASES)
def test_an_error_says_what_is_wrong(case: str, tmp_path: Path, undrawn: None, capsys: pytest.CaptureFixture) -> None:
    arrange, args, expected = CASES[case]
    folder = tmp_path / "run"
    folder.mkdir()
    arrange(folder)
    said = error(capsys, "report", str(folder), *args)
    assert re.search(expected, said), said
    assert said.startswith("error: dataflex: ")


def test_without_matplotlib_it_says_what_to_install(
    trained: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_dataflex.core.figures.find_spec", lambda name: None)
    said = error(capsys, "report", str(trained))
    assert "matplotlib, which draws, is not installed. Install lightning_dataflex[see]." in said


def test_a_page_that_is_open_is_replaced_whole(
    trained: Path, page: Page, undrawn: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (trained / "page.html").read_text()

    def fails(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(SystemExit):
        page_in(trained)
    assert (trained / "page.html").read_text() == before


def test_the_run_is_dated_by_its_last_file(trained: Path) -> None:
    os.utime(trained / "only" / "metrics.csv", (86_400 * 366, 86_400 * 366))
    assert run_in(trained).written.startswith("1971-01-0")


# -- in a browser -----------------------------------------------------------------------------------------------------

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = os.environ.get("DATAFLEX_TEST_BROWSER") or next(filter(None, map(shutil.which, NAMES)), None)
MEASURE = """<!doctype html><iframe src="page.html" width="360" height="800" onload="
  const page = this.contentDocument, all = [...page.querySelectorAll('svg text')];
  const size = text => text.getBoundingClientRect();
  document.body.textContent = JSON.stringify({
    width: page.documentElement.scrollWidth,
    pictures: [...page.querySelectorAll('svg')].map(each => Math.round(size(each).width)),
    least: Math.min(...all.map(each => parseFloat(getComputedStyle(each).fontSize) * size(each.ownerSVGElement).width
      / each.ownerSVGElement.viewBox.baseVal.width)),
    ground: this.contentWindow.getComputedStyle(page.body).backgroundColor,
    ink: this.contentWindow.getComputedStyle(all[0]).fill,
  })"></iframe>"""


@pytest.mark.skipif(BROWSER is None, reason=f"no browser is installed: {', '.join(NAMES)}, or DATAFLEX_TEST_BROWSER")
@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_a_browser_shows_it_on_a_phone(scheme: str, trained: Path, page: Page) -> None:
    (trained / "measure.html").write_text(MEASURE)
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--allow-file-access-from-files",
        f"--user-data-dir={trained}/{scheme}",
    ]
    options += [f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}", "--virtual-time-budget=5000"]
    command = [BROWSER, *options, "--dump-dom", (trained / "measure.html").as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    seen = json.loads(re.search(r"\{.*\}", shown)[0])
    assert seen["width"] <= 360
    assert len(seen["pictures"]) == 5
    assert all(300 <= width <= 360 for width in seen["pictures"])
    assert seen["least"] >= 9
    assert seen["ground"] == ("rgb(20, 23, 27)" if scheme == "dark" else "rgb(255, 255, 255)")
    assert seen["ink"] == ("rgb(231, 234, 238)" if scheme == "dark" else "rgb(22, 25, 29)")
