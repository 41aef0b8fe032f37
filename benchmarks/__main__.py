"""Measures what decisions cost and writes `docs/performance.md` with its plots.

    python -m benchmarks [--quick]

Everything in one run on this machine: `decide.py`, `overhead.py` and `scale.py`. Leave the machine alone meanwhile.
"""

from __future__ import annotations

import argparse
import datetime
import warnings
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import torch

from benchmarks import batches, decide, overhead, scale

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = Path(__file__).with_name("performance.template.md")


def growth_plot(figures: list[dict[str, Any]], path: Path) -> None:
    fig, ax = plt.subplots(figsize=(7, 4.5), layout="constrained")
    shown = ("group_solve_rate / threshold_band", "outcome / gfpo", "outcome / max_variance")
    shown += ("advantage_magnitude / softmax", "token_entropy / high_entropy_tokens")
    for row in (row for row in figures if row["name"] in shown):
        sizes, times = zip(*row["growth"])
        ax.loglog(sizes, times, marker="o", label=f"{row['name']}: {row['exponent']:.2f}")
    ax.set(xlabel="samples (16 to a group, 64 tokens each)", ylabel="milliseconds", title="Growth of a decision")
    ax.legend(title="rule: exponent", fontsize="small")
    fig.savefig(path, dpi=150)
    plt.close(fig)


def scale_plot(figures: list[dict[str, Any]], path: Path) -> None:
    fig, ax = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for row in figures:
        ax.loglog(row["sizes"], row["ms"], marker="o", label=row["name"])
    ax.set(
        xlabel="samples (4 to a group, 4 tokens each)",
        ylabel="milliseconds",
        title="From a thousand samples to millions",
    )
    ax.legend(fontsize="small")
    fig.savefig(path, dpi=150)
    plt.close(fig)


def summary(figures: list[dict[str, Any]], times: dict[str, list[float]]) -> str:
    """The goals, and what became of them."""
    small, large = decide.SHAPES[0], decide.SHAPES[-1]
    compared = [row for row in figures if row["plain"]]
    grouped = [row for row in compared if row["memory"] <= 1]
    (of_tokens,) = [row for row in compared if row["memory"] > 1]

    def ratio(row: dict[str, Any], shape: Any) -> float:
        return batches.median(a / b for a, b in zip(row["ms"][shape], row["floor"][shape]))

    faster = [decide.times_faster(row, large) for row in grouped]
    on_samples = [row for row in figures if row["memory"] <= 1]
    shares = {name: batches.median(a / b - 1 for a, b in zip(seen, times["none"])) for name, seen in times.items()}
    steepest = max(figures, key=lambda row: row["exponent"])
    return "\n".join(
        [
            f"- Rules on groups at {' x '.join(map(str, large))}: {min(faster):,.0f} to {max(faster):,.0f} times "
            f"faster than the plain form (the goal was 300), {min(ratio(row, large) for row in grouped):.1f} to "
            f"{max(ratio(row, large) for row in grouped):.1f} times the floor (the goal was 4). One weighs tokens, "
            f"{of_tokens['name']}: {decide.times_faster(of_tokens, large):,.0f} and {ratio(of_tokens, large):.1f}.",
            f"- The same at {' x '.join(map(str, small))}: "
            f"{min(batches.median(row['ms'][small]) for row in grouped):.2f} to "
            f"{max(batches.median(row['ms'][small]) for row in grouped):.2f} ms, and "
            f"{batches.median(of_tokens['ms'][small]):.2f} (the goal was 1).",
            f"- Growth: at most {steepest['exponent']:.2f}, of {steepest['name']} (the goal was 1.1).",
            f"- Memory: at most one table for {len(on_samples)} of {len(figures)} cases; the others are rules on "
            f"tokens, with up to {max(row['memory'] for row in figures):.1f}.",
            f"- A training step: {', '.join(f'{name} {share:+.2%}' for name, share in shares.items() if share)} "
            "(the goal was 1 %).",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small, to see that it runs; writes to a folder `quick`")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    docs = Path("quick") if args.quick else DOCS
    docs.mkdir(exist_ok=True)
    shapes = decide.SHAPES[:2] if args.quick else decide.SHAPES
    decided = list(decide.rows("group_solve_rate" if args.quick else None, 2 if args.quick else 5, "cpu", shapes))
    print("decide.py: done", flush=True)
    prompts = 2 if args.quick else 8
    times = overhead.measured(2 if args.quick else 20, prompts, "cpu")
    print("overhead.py: done", flush=True)
    scaled = list(scale.by_samples(2**16 if args.quick else scale.SAMPLES[-1], 3))
    totals = (2**14,) if args.quick else (2**17, 2**20)
    page = PAGE.read_text().format(
        date=f"{datetime.date.today():%d %B %Y}",
        machine=batches.machine(),
        summary="" if args.quick else summary(decided, times),
        decide=decide.table(decided),
        parameters=sum(each.numel() for each in overhead.module().policy.parameters()) / 1e6,
        samples=8 * prompts,
        overhead=overhead.table(times),
        scale=scale.table(scaled, "samples"),
        domains=scale.table(list(scale.by_domains(3)), "domains"),
        ranks=scale.RANKS,
        of_ranks="\n\n".join(scale.table_of_ranks(total, list(scale.one_of_many(total, 3))) for total in totals),
    )
    growth_plot(decided, docs / "performance_growth.png")
    scale_plot(scaled, docs / "performance_scale.png")
    (docs / "performance.md").write_text(page)
    print(f"Written to {docs / 'performance.md'}.")


if __name__ == "__main__":
    main()
