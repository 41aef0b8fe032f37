"""Held-out solve rate of several configurations over several seeds, from whole runs of the command line.

    python benchmarks/seeds.py --configs baseline select --seeds 0 1 2 3 4

Prints a table of mean and standard deviation over seeds. One run takes about two minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run(config: str, seed: int, options: list[str]) -> dict[str, dict[str, float]]:
    """The report of one run: solve rates per domain, before and after."""
    with tempfile.TemporaryDirectory() as folder:
        logger = ["--trainer.logger=lightning.pytorch.loggers.CSVLogger", f"--trainer.logger.save_dir={folder}"]
        command = [sys.executable, "-m", "lightning_dataflex", "fit", f"--config=configs/{config}.yaml"]
        command += [f"--seed_everything={seed}", *logger, *options]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stdout + done.stderr)
        (report,) = Path(folder).rglob("report.json")
        return json.loads(report.read_text())


def row(config: str, reports: list[dict[str, dict[str, float]]], domains: list[str]) -> str:
    columns = [("before", "overall"), ("after", "overall"), *(("after", domain) for domain in domains)]
    cells = [spread([report[when][domain] for report in reports]) for when, domain in columns]
    return f"| {config} | {' | '.join(cells)} |"


def spread(values: list[float]) -> str:
    return f"{statistics.mean(values):.3f} ± {statistics.stdev(values) if len(values) > 1 else 0:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", nargs="+", default=["baseline", "select"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    args, options = parser.parse_known_args()
    reports: dict[str, list[dict[str, dict[str, float]]]] = {config: [] for config in args.configs}
    for seed in args.seeds:
        for config in args.configs:  # side by side, so that a busy machine is shared alike
            start = time.perf_counter()
            reports[config].append(run(config, seed, options))
            overall = {when: round(reports[config][-1][when]["overall"], 3) for when in ("before", "after")}
            print(
                f"seed {seed} {config}: {overall} in {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True
            )
    domains = [name for name in reports[args.configs[0]][0]["after"] if name != "overall"]
    print(f"| configuration | before | after | {' | '.join(domains)} |")
    print("|" + "---|" * (3 + len(domains)))
    for config in args.configs:
        print(row(config, reports[config], domains))


if __name__ == "__main__":
    main()
