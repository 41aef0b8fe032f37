"""`dataflex preview` on files as this project, TRL and verl write them: counts by hand, rules as in training."""

from __future__ import annotations

import codecs
import csv
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml

from lightning_dataflex import DataFlexCallback, Mixture, Pipeline, Scorer
from lightning_dataflex.cli import main
from lightning_dataflex.core.global_batch import joint_columns
from lightning_dataflex.core.rollout import RolloutBatch
from lightning_dataflex.preview.batches import SampleBatch
from lightning_dataflex.preview.replay import preview_of
from lightning_dataflex.preview.rollouts import rollouts_of
from tests.laws import a_batch, pairs, pipeline_of
from tests.toy import Toy, fit, rollout

BAND = {"mechanism": "select", "scorer": "group_solve_rate", "actuator": "threshold_band"}
TOP = {"mechanism": "select", "scorer": "outcome", "actuator": {"name": "topk_fraction", "params": {"fraction": 0.5}}}
ROWS: list[dict[str, Any]] = [
    {"step": step, "prompt": prompt, "reward": reward, "domain": domain, "length": length}
    for step, prompt, reward, domain, length in (
        # Two steps with a prompt in common; p is mixed in the first and solved in the second.
        *((0, "p", 1.0, "math", 10), (0, "p", 0.0, "math", 20)),
        *((0, "q", 0.0, "code", 3), (0, "q", 0.0, "code", 4)),
        *((1, "p", 1.0, "math", 5), (1, "p", 1.0, "math", 6)),
        *((1, "r", 1.0, "code", 7), (1, "r", 0.0, "code", 8)),
    )
]
BY_HAND = {
    "samples": 8,
    "tokens": 63,
    "samples_kept": 4,
    "tokens_kept": 45,
    "samples_solved": 2,
    "samples_failed": 2,
    "samples_rule": 0,
    "samples_nan": 0,
    "reward": 4 / 8,
    "reward_after": 2 / 4,
    "dropped_solved": 1,
    "dropped_failed": 1,
    "dropped_rule": 0,
    "dropped_nan": 0,
    "n_nan": 0,
    "ess": 2.0,
}


def jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def parquet(path: Path, rows: list[dict[str, Any]]) -> str:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def of_csv(path: Path, rows: list[dict[str, Any]]) -> str:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


def previewed(path: str, block: dict[str, Any] = BAND, fields: dict[str, str] | None = None) -> Any:
    return preview_of(rollouts_of([path], fields), block)


def assert_by_hand(totals: dict[str, float], **other: float) -> None:
    assert {name: totals[name] for name in BY_HAND} == pytest.approx(BY_HAND | other)


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("write", "suffix"), [(jsonl, ".jsonl"), (parquet, ".parquet"), (of_csv, ".csv")])
def test_counts_by_hand_whatever_the_format(write: Any, suffix: str, tmp_path: Path) -> None:
    found = previewed(write(tmp_path / f"rows{suffix}", ROWS))
    assert_by_hand(found.totals)
    assert {name: (sums["samples_kept"], sums["tokens_kept"]) for name, sums in found.domains.items()} == {
        "math": (2, 30),
        "code": (2, 15),
    }
    assert [(step["step"], step["samples_kept"], step["dropped_solved"]) for step in found.steps] == [
        (0, 2, 0),
        (1, 2, 1),
    ]


def test_rows_in_any_order_and_in_several_files(tmp_path: Path) -> None:
    jsonl(tmp_path / "10.jsonl", ROWS[:3:-1])
    jsonl(tmp_path / "9.jsonl", ROWS[3::-1])
    assert_by_hand(previewed(str(tmp_path)).totals)


def test_columns_of_other_names(tmp_path: Path) -> None:
    names = {"step": "iteration", "reward": "mine", "prompt": "question_text", "length": "n", "domain": "source"}
    path = jsonl(tmp_path / "rows.jsonl", [{names[key]: value for key, value in row.items()} for row in ROWS])
    fields = {"step": "iteration", "rm_scores": "mine", "uid": "question_text", "length": "n", "domain": "source"}
    assert_by_hand(previewed(path, fields=fields).totals)


def test_trl_logs_of_completions(tmp_path: Path) -> None:
    """As GRPOTrainer writes them with log_completions: a column for each reward function, named after it."""
    folder = tmp_path / "completions"
    folder.mkdir()
    for step in (0, 1):
        rows = [
            {
                "step": step,
                "prompt": row["prompt"],
                "completion": "x" * row["length"],
                "accuracy_reward": row["reward"],
                "format_reward": None if row["prompt"] == "q" else 0.0,
                "advantage": row["reward"] - 0.5,
            }
            for row in ROWS
            if row["step"] == step
        ]
        parquet(folder / f"completions_{step:05d}.parquet", rows)
    rollouts = rollouts_of([str(folder)])
    assert_by_hand(preview_of(rollouts, BAND).totals)
    assert any(note.startswith("rm_scores from the sum of accuracy_reward + format_reward") for note in rollouts.notes)
    assert any("number of characters of completion" in note for note in rollouts.notes)
    weights = preview_of(rollouts, {"mechanism": "reweight", "scorer": "advantage_magnitude", "actuator": "softmax"})
    # Every |advantage| is 0.5.
    assert weights.totals["ess"] == pytest.approx(4)
    assert not weights.notes


def test_verl_dumps_of_rollouts(tmp_path: Path) -> None:
    """As rollout_data_dir gets them: the score is the reward, whatever else the reward function has returned."""
    for step in (0, 1):
        rows = [
            {
                "input": f"user\n{row['prompt']}",
                "output": "é" * row["length"],
                "gts": "42",
                "score": row["reward"],
                "step": step,
                "reward": 99.0,
                "acc": row["reward"] > 0,
                "pred": None,
            }
            for row in ROWS
            if row["step"] == step
        ]
        jsonl(tmp_path / f"{step}.jsonl", rows)
    assert_by_hand(previewed(str(tmp_path)).totals)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_trace_gives_the_decisions_that_were_made(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"trace{suffix}"
    fit(Toy(), [DataFlexCallback(**BAND, trace=str(path))], [rollout(seed) for seed in range(3)])
    table = pq.read_table(path) if suffix == ".parquet" else None
    rows = table.to_pylist() if table else [json.loads(line) for line in path.read_text().splitlines()]
    found = previewed(str(path))
    assert found.totals["samples_kept"] == sum(row["kept"] for row in rows) == 16
    assert [found.totals[f"samples_{name}"] for name in ("solved", "failed")] == [
        sum(row["reason"] == name for row in rows) for name in ("solved", "failed")
    ]


def test_the_parts_of_other_ranks_are_read_too(tmp_path: Path) -> None:
    jsonl(tmp_path / "trace.jsonl", ROWS[::2])
    jsonl(tmp_path / "trace.rank1.jsonl", ROWS[1::2])
    jsonl(tmp_path / "trace2.jsonl", ROWS)
    assert_by_hand(previewed(str(tmp_path / "trace.jsonl")).totals)


def test_where_a_callback_acts_is_not_read(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows.jsonl", ROWS)
    assert_by_hand(previewed(path, BAND | {"mount": "on_before_backward", "drop": "weight"}).totals)


@pytest.mark.parametrize("prompt", [[{"role": "user", "content": "p"}], "2026-01-01", 3])
def test_prompts_of_any_type_name_groups(prompt: Any, tmp_path: Path) -> None:
    rows = [
        row | {"prompt": prompt if row["prompt"] == "p" else [] if isinstance(prompt, list) else None} for row in ROWS
    ]
    for row in rows[2:4]:
        row["prompt"] = [{"role": "user", "content": "q"}] if isinstance(prompt, list) else None
    assert_by_hand(previewed(jsonl(tmp_path / "rows.jsonl", rows)).totals)


def test_lengths_are_those_of_token_ids_where_there_are_some(tmp_path: Path) -> None:
    rows = [{k: v for k, v in row.items() if k != "length"} | {"completion_ids": [7] * row["length"]} for row in ROWS]
    assert_by_hand(previewed(jsonl(tmp_path / "rows.jsonl", rows)).totals)


# -- what a rule reads -------------------------------------------------------------------------------------------------


def test_advantages_that_are_not_there_are_those_of_the_group(tmp_path: Path) -> None:
    block = {"mechanism": "reweight", "scorer": "advantage_magnitude", "actuator": "softmax"}
    found = previewed(jsonl(tmp_path / "rows.jsonl", ROWS), block)
    assert found.notes == ["advantages are not there, and computed as grpo does, within each group"]
    # Of rewards 1 and 0, (r - 1/2) / std with std sqrt(1/2): those weigh e^0.7071, those of a quiet group 1.
    big = np.exp(np.sqrt(0.5))
    expected = (2 * big + 2) ** 2 / (2 * big**2 + 2)
    assert found.totals["ess"] == pytest.approx(expected, rel=1e-5)


def test_rewards_of_no_number_are_counted(tmp_path: Path) -> None:
    rows = [row | {"reward": None if i < 3 else row["reward"]} for i, row in enumerate(ROWS)]
    totals = previewed(parquet(tmp_path / "rows.parquet", rows)).totals
    assert (totals["samples_nan"], totals["n_nan"], totals["dropped_nan"]) == (3, 3, 1)
    assert totals["reward"] == 3 / 5


def test_columns_of_tokens_are_read_by_rules_on_tokens(tmp_path: Path) -> None:
    entropies = [[1.0, 3.0], [2.0], [4.0, 4.0, 0.5], [5.0]]
    rows = [{"entropies": each, "length": len(each), "reward": 1.0, "uid": "a"} for each in entropies]
    block = {"mechanism": "select", "scorer": "token_entropy"}
    block["actuator"] = {"name": "high_entropy_tokens", "params": {"fraction": 3 / 7}}
    found = previewed(parquet(tmp_path / "rows.parquet", rows), block)
    assert found.totals["samples_kept"] == 2


class Plain(Scorer):
    """As an author writes one, on tables of tokens."""

    requires = ["rm_scores", "response_mask", "uid"]
    granularity = "prompt"
    needs_groups = True

    def score(self, batch: Any, step_id: int, **ctx: Any) -> torch.Tensor:
        per_sequence = (batch.batch["rm_scores"] * batch.batch["response_mask"]).sum(-1)
        uid = np.asarray(batch.non_tensor_batch["uid"])
        return torch.stack([per_sequence[torch.from_numpy(uid == each)].mean() for each in uid])


def test_a_scorer_of_ones_own_sees_tables_of_tokens(tmp_path: Path) -> None:
    assert_by_hand(previewed(jsonl(tmp_path / "rows.jsonl", ROWS), BAND | {"scorer": Plain()}).totals)


def samples_alone(batch: dict[str, Any]) -> dict[str, Any]:
    columns = {name: value for name, value in batch.items() if isinstance(value, list) or value.dim() == 1}
    return columns | {"num_tokens": batch["response_mask"].sum(-1)}


def differing() -> dict[str, Any]:
    """Samples whose advantages are no two of one size, so that no rounding decides between them."""
    batch = a_batch(1, groups=4)
    return batch | {"advantages": torch.linspace(-1, 2, 16), "prompt_id": batch["uid"]}


def needs_tokens(parts: tuple[str, str, str]) -> bool:
    pipeline, columns = pipeline_of(*parts), samples_alone(differing())
    if {*pipeline.requires} - {"response_mask", *columns}:
        return True
    return joint_columns([part.columns(SampleBatch(columns)) for part in (pipeline.scorer, pipeline.actuator)]) is None


BY_SAMPLES = [each for each in pairs("selector", "reweighter") if not needs_tokens(each.values)]


@pytest.mark.parametrize(("scorer", "kind", "actuator"), BY_SAMPLES)
def test_rules_decide_without_tokens_as_with_them(scorer: str, kind: str, actuator: str) -> None:
    full, alone = RolloutBatch(differing()), SampleBatch(samples_alone(differing()))
    expected, found = (
        pipeline_of(scorer, kind, actuator).decide(batch, 3, progress=0.5).columns(batch) for batch in (full, alone)
    )
    for name, column in expected.items():
        torch.testing.assert_close(found[name], column, equal_nan=True, check_dtype=False)


def test_most_rules_need_no_tokens() -> None:
    assert len(BY_SAMPLES) > 35


def test_a_mixer_sets_the_proportions_that_a_mixture_sets(tmp_path: Path) -> None:
    block = {"mechanism": "mix", "actuator": {"name": "reward_gap", "params": {"temperature": 0.5, "floor": 0.0}}}
    found = previewed(jsonl(tmp_path / "rows.jsonl", ROWS), block)
    # Of math 3 of 4 are solved, of code 1 of 4: the gaps are 0 and 1/2.
    share = 1 / (1 + np.e)
    assert found.proportions == pytest.approx({"math": share, "code": 1 - share})
    assert found.steps[0]["prop_math"] == 0.5
    mixture = Mixture.from_config(block | {"domains": ["math", "code"]})
    for step in (0, 1):
        rows = [row for row in ROWS if row["step"] == step]
        rewards, domains = ([row[name] for row in rows] for name in ("reward", "domain"))
        mixture.observe({"rm_scores": rewards, "domain": domains, "response_mask": torch.ones(4, 1)}, step)
        mixture.end_step(step)
    assert found.proportions == pytest.approx(mixture.proportions)


def test_state_is_carried_from_step_to_step_and_warm_up_keeps_all(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows.jsonl", ROWS)
    assert [step["samples_kept"] for step in previewed(path, BAND | {"warmup_step": 1}).steps] == [4, 2]
    average = {"name": "ema", "params": {"scorer": "outcome", "decay": 0.5}}
    block = TOP | {"scorer": average}
    found = previewed(path, block)
    pipeline = Pipeline.from_config(block)
    for step, seen in enumerate(found.steps):
        rows = [row for row in ROWS if row["step"] == step]
        batch = {"rm_scores": torch.tensor([row["reward"] for row in rows]), "response_mask": torch.ones(4, 1)}
        keep = pipeline.decide(batch | {"uid": [row["prompt"] for row in rows]}, step).keep
        assert seen["reward_after"] == pytest.approx(float(batch["rm_scores"][keep].mean()))


@pytest.mark.parametrize(
    ("column", "value", "says"),
    [
        ("step", 1e300, r"step has 1e\+300\. Give whole numbers below 2\^53"),
        ("step", 0.5, r"step has 0\.5\. Give whole numbers"),
        ("length", 2**40, r"length has 1\.09951e\+12\. Give numbers below 2\^31"),
        ("length", float("inf"), "length has inf"),
        ("entropies", ["a"], "entropies holds lists of string. Give lists of numbers"),
    ],
)
def test_numbers_that_are_none_of_a_step_or_a_length_are_refused(
    column: str, value: Any, says: str, tmp_path: Path
) -> None:
    path = jsonl(tmp_path / "rows.jsonl", [{**row, "length": 1, column: value} for row in ROWS])
    with pytest.raises(ValueError, match=says):
        previewed(path, {"mechanism": "select", "scorer": "token_entropy", "actuator": "high_entropy_tokens"})


def test_categories_that_each_part_of_a_file_numbers_anew(tmp_path: Path) -> None:
    def chunks(*parts: list[str]) -> pa.ChunkedArray:
        return pa.chunked_array([pa.array(part).dictionary_encode() for part in parts])

    uid, domain = chunks(["a", "a", "b"], ["b", "b", "a"]), chunks(["x", "y", "x"], ["y", "y", "z"])
    table = pa.table({"uid": uid, "domain": domain, "reward": [1.0, 0, 1, 1, 1, 0]})
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=3)
    found = previewed(str(tmp_path / "rows.parquet"))
    assert found.totals["samples_kept"] == found.totals["samples_solved"] == 3
    assert {name: each["samples"] for name, each in found.domains.items()} == {"x": 2, "y": 3, "z": 1}


# -- the command -------------------------------------------------------------------------------------------------------


def configured(path: Path, content: Any) -> str:
    path.write_text(yaml.safe_dump(content))
    return str(path)


def test_several_configurations_in_one_table(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    rows = parquet(tmp_path / "rows.parquet", ROWS)
    model = {"class_path": "my.Module", "init_args": {"adv_estimator": "rloo"}}
    one = configured(tmp_path / "a.yaml", {"dataflex": BAND | {"label": "easy and hard"}, "model": model})
    weigh = {"mechanism": "reweight", "scorer": "advantage_magnitude", "actuator": "softmax"}
    callback = {"class_path": "lightning_dataflex.DataFlexCallback", "init_args": TOP}
    two = configured(tmp_path / "b.yaml", {"dataflex": [weigh], "trainer": {"callbacks": [callback]}, "model": model})
    main(["preview", rows, "--config", one, "--config", two])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "8 samples, 4 groups, 2 steps, 63 tokens, 2 domains"
    by_name = {
        name: line.split()[-13:]
        for line in lines
        for name in ("easy and hard", "softmax", "topk_fraction")
        if name in line and "%" in line
    }
    assert " ".join(by_name["easy and hard"]) == "50.0% 71.4% 2 2 0 0 0.5000 0.5000 1 1 0 0 2.0"
    assert by_name["softmax"][:2] == ["100.0%", "100.0%"]
    assert by_name["topk_fraction"][:2] == ["50.0%", f"{41 / 63:.1%}"]
    assert any("computed as rloo does" in line for line in lines)


def test_a_line_of_several_steps_is_their_sum_and_their_mean(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    rows = jsonl(tmp_path / "rows.jsonl", [*ROWS, {**ROWS[0], "step": 2, "prompt": "s", "reward": None}])
    weigh = {"mechanism": "reweight", "scorer": "advantage_magnitude", "actuator": "softmax"}
    main(["preview", rows, "--config", configured(tmp_path / "a.yaml", weigh), "--steps", "1"])
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("0-2"))
    assert line.split() == ["0-2", "9", "100.0%", "100.0%", "0", "0", "0", "0", "0.5000", f"{MEAN_AFTER:.4f}"]


def weights_of_softmax(lengths: list[int], sizes: list[float]) -> np.ndarray:
    weights = np.exp(sizes)
    return weights * np.sum(lengths) / np.sum(weights * lengths)


SIZE = np.sqrt(0.5)
WEIGHTS = np.concatenate(
    [weights_of_softmax([10, 20, 3, 4], [SIZE, SIZE, 0, 0]), weights_of_softmax([5, 6, 7, 8], [0, 0, SIZE, SIZE])]
)
MEAN_AFTER = float((WEIGHTS * [row["reward"] for row in ROWS]).sum() / WEIGHTS.sum())


def test_as_json(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    rows = jsonl(tmp_path / "rows.jsonl", [row | {"reward": None} if row["step"] else row for row in ROWS])
    main(["preview", rows, "--config", configured(tmp_path / "a.yaml", BAND), "--json"])
    (found,) = json.loads(capsys.readouterr().out)["previews"]
    assert found["totals"]["samples_nan"] == 4
    assert [step["reward"] for step in found["steps"]] == [0.25, None]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["no.jsonl"], "There is no file 'no.jsonl'"),
        (["a.yaml"], "'a.yaml' is of no format that is read here. Give a file, or a folder"),
        (["broken.jsonl"], "'broken.jsonl' cannot be read as json"),
        (["broken.parquet"], "'broken.parquet' cannot be read as parquet"),
        (["empty"], "The folder 'empty' holds no rollouts"),
        (
            ["rows.jsonl", "--config", "b.yaml"],
            "token_entropy reads entropies, and the rollouts have no column of that",
        ),
        (["rows.jsonl", "--config", "b.yaml"], "They have: step, prompt, reward, domain, length. If it is there"),
        (["rows.jsonl", "--config", "b.yaml"], "--fields entropies=COLUMN"),
        (["rows.jsonl", "--config", "c.yaml"], "'c.yaml' has no dataflex block"),
        (["rows.jsonl", "--config", "d.yaml"], "decides before a rollout"),
        (["rows.jsonl", "--config", "f.yaml"], "decides before a rollout"),
        (["rows.jsonl", "--fields", "uid=promt"], "maps uid to 'promt', and the rollouts have no such column. Did you"),
        (["rows.jsonl", "--fields", "uid"], "--fields is 'uid'. Give our names and your columns"),
        (["rows.jsonl", "--fields", "rm_scores=prompt"], "The column for rm_scores holds string. Give one of numbers."),
        (
            ["rows.jsonl", "--fields", "rm_score=reward"],
            "'rm_score', which nothing reads. Did you mean 'rm_scores'",
        ),
        (["rows.jsonl", "--config", "e.yaml"], "'e.yaml' holds what is no plain value: could not determine a construc"),
        (["rows.jsonl", "--steps", "-1"], "--steps is -1"),
    ],
)
def test_what_is_missing_is_said(
    args: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    jsonl(Path("rows.jsonl"), ROWS)
    for name in ("broken.jsonl", "broken.parquet"):
        Path(name).write_text('{"a" 1}')
    Path("empty").mkdir()
    tokens = {"mechanism": "select", "scorer": "token_entropy", "actuator": "high_entropy_tokens"}
    before = {"mechanism": "select", "scorer": "mopps"}
    screening = {"mechanism": "select", "scorer": "speed", "refill": {"groups": 4}}
    for name, content in zip("abcdf", (BAND, tokens, {}, before, screening)):
        configured(Path(f"{name}.yaml"), content)
    Path("e.yaml").write_text("!!python/object:os.system {}")
    with pytest.raises(SystemExit):
        main(["preview", *args, *([] if "--config" in args else ["--config", "a.yaml"])])
    assert says in capsys.readouterr().err


def test_more_than_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = parquet(tmp_path / "rows.parquet", ROWS * 1000)
    monkeypatch.setattr("lightning_dataflex.preview.tables.MOST_BYTES", Path(path).stat().st_size)
    with pytest.raises(ValueError, match=r"unpacked, has .* bytes, and at most"):
        rollouts_of([path])
    monkeypatch.setattr("lightning_dataflex.preview.tables.MOST_BYTES", 2**34)
    monkeypatch.setattr("lightning_dataflex.preview.tables.MOST_ROWS", 7999)
    with pytest.raises(ValueError, match="There are 8,000 rows, and at most 7,999 are read"):
        rollouts_of([path])


@pytest.mark.parametrize("opening", ["[", '{"a": '])
def test_what_is_nested_deep_is_refused_and_does_not_end_the_process(opening: str, tmp_path: Path) -> None:
    closing = {"[": "]"}.get(opening, "}")
    for depth in (600, 100_000):
        (tmp_path / "rows.jsonl").write_text('{"a": ' + opening * depth + "1" + closing * depth + "}\n")
        with pytest.raises(ValueError, match=r"^Line 1 of .*Write it flatter"):
            rollouts_of([str(tmp_path / "rows.jsonl")])


def test_objects_of_several_lines_are_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"step": 1}\n{"step":\n 2}\n')
    with pytest.raises(ValueError, match=r"^Line 2 of .* is no JSON object"):
        rollouts_of([str(tmp_path / "rows.jsonl")])


def test_a_last_line_that_is_half_written_is_called_so(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows.jsonl", ROWS)
    with open(path, "a") as file:
        file.write('{"step": 2, "prompt": "p')
    with pytest.raises(ValueError, match=rf"^Line {len(ROWS) + 1} of .* is only half written, .*Delete that line"):
        rollouts_of([path])


def test_a_last_line_without_an_end_of_line_counts(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    assert_by_hand(previewed(str(tmp_path / "rows.jsonl")).totals)


@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_a_mark_of_the_encoding_is_left_out(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"rows{suffix}"
    if suffix == ".jsonl":
        jsonl(path, ROWS)
    else:
        pa.csv.write_csv(pa.Table.from_pylist(ROWS), path)
    path.write_bytes(codecs.BOM_UTF8 + path.read_bytes())
    assert_by_hand(previewed(str(path)).totals)


@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be"])
def test_another_encoding_is_named(suffix: str, encoding: str, tmp_path: Path) -> None:
    mark = codecs.BOM_UTF16_BE if encoding == "utf-16-be" else b""
    (tmp_path / f"rows{suffix}").write_bytes(mark + '{"a": 1}\n{"a": 1}\n'.encode(encoding))
    with pytest.raises(ValueError, match=r"is written in UTF-16\. Save it in UTF-8\."):
        rollouts_of([str(tmp_path / f"rows{suffix}")])


def test_a_folder_of_several_formats_is_refused(tmp_path: Path) -> None:
    """As that of a run, with its metrics beside its trace."""
    jsonl(tmp_path / "trace.jsonl", ROWS)
    (tmp_path / "notes.txt").write_text("no rollouts")
    assert_by_hand(previewed(str(tmp_path)).totals)
    (tmp_path / "metrics.csv").write_text("step,loss\n0,1\n")
    with pytest.raises(ValueError, match=r"holds files of several formats, metrics\.csv, trace\.jsonl\. Give those"):
        rollouts_of([str(tmp_path)])


def test_a_line_may_be_long(tmp_path: Path) -> None:
    rows = [row | {"output": "[" * 3_000_000} for row in ROWS]
    assert_by_hand(previewed(jsonl(tmp_path / "rows.jsonl", rows)).totals)


def test_pyarrow_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_dataflex.preview.tables.find_spec", lambda name: None)
    for name in [each for each in sys.modules if each.split(".")[0] == "pyarrow"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match=r"pyarrow.*not installed\. Install lightning_dataflex\[see\]"):
        rollouts_of(["rows.jsonl"])
