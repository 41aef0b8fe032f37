"""How long `dataflex preview` takes: one configuration of each kind, on rollouts made up in a file of each format.

python benchmarks/preview.py [--rows 1000000] [--per_step 1024]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import yaml

BLOCKS = {
    "select": {"mechanism": "select", "scorer": "group_solve_rate", "actuator": "threshold_band"},
    "in groups": {"mechanism": "select", "scorer": "outcome", "actuator": {"name": "gfpo", "params": {"k": 4}}},
    "reweight": {"mechanism": "reweight", "scorer": "advantage_magnitude", "actuator": "softmax"},
    "mix": {"mechanism": "mix", "actuator": "dump_ucb"},
}


def made_up(num_rows: int, per_step: int) -> pa.Table:
    """Groups of 8 whose solve rates differ, in three domains, with prompts and responses of some hundred characters."""
    draw = np.random.default_rng(0)
    group = np.arange(num_rows) // 8
    rate = draw.choice([0.0, 0.2, 0.5, 0.9, 1.0], num_rows // 8 + 1)[group]
    return pa.table(
        {
            "step": np.arange(num_rows) // per_step,
            "prompt": [f"Question {each}. " * 12 for each in group],
            "completion": ["Because it is so. " * size for size in draw.integers(1, 40, num_rows)],
            "reward": (draw.random(num_rows) < rate).astype(float),
            "domain": np.array(["math", "code", "logic"])[group % 3],
            "length": draw.integers(10, 4000, num_rows),
        }
    )


def write_jsonl(table: pa.Table, path: Path) -> None:
    with path.open("w") as file:
        file.writelines(json.dumps(row) + "\n" for batch in table.to_batches(10_000) for row in batch.to_pylist())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--per_step", type=int, default=1024)
    given = parser.parse_args()
    writers = {
        "parquet": pyarrow.parquet.write_table,
        "jsonl": write_jsonl,
        "csv": pyarrow.csv.write_csv,
    }
    print(f"{given.rows:,} rows, {given.per_step:,} a step, {os.cpu_count()} cores; seconds of the whole command")
    print("| format | MB | " + " | ".join(BLOCKS) + " | all four |\n|---|---|" + "---|" * (len(BLOCKS) + 1))
    with tempfile.TemporaryDirectory() as folder:
        configs = {name: Path(folder, f"{name}.yaml") for name in BLOCKS}
        for name, block in BLOCKS.items():
            configs[name].write_text(yaml.safe_dump(block))
        table = made_up(given.rows, given.per_step)
        for suffix, write in writers.items():
            path = Path(folder, f"rows.{suffix}")
            write(table, path)
            seconds = [elapsed(path, [config]) for config in configs.values()]
            seconds.append(elapsed(path, list(configs.values())))
            size = f"{path.stat().st_size / 1e6:.0f}"
            print(f"| {suffix} | {size} | " + " | ".join(f"{each:.1f}" for each in seconds) + " |", flush=True)


def elapsed(path: Path, configs: list[Path]) -> float:
    """Of one run in a process of its own."""
    options = [option for config in configs for option in ("--config", str(config))]
    start = time.perf_counter()
    command = [sys.executable, "-m", "lightning_dataflex", "preview", str(path), *options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
