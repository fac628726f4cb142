"""Compares the output of the quickstart job with the correct answers.

python jobs/quickstart/score.py OUT        # OUT is the job's output directory
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import polars as pl


def load(out_dir: str | Path) -> pl.DataFrame:
    """Return the job's rows with a column `right`, which is false for failed rows."""
    parts = sorted(Path(out_dir).joinpath("data").glob("*.parquet"))
    if not parts:
        raise FileNotFoundError(f"no finished parts in {out_dir}/data; run the job first")
    matches = pl.col("generated_text").str.strip_chars() == pl.col("answer")
    return pl.read_parquet(parts).with_columns(right=matches.fill_null(False))


def score(out_dir: str | Path) -> dict[str, Any]:
    """Return `rows`, `right`, `accuracy`, and the accuracy per task in `tasks`."""
    return summarize(load(out_dir))


def summarize(rows: pl.DataFrame) -> dict[str, Any]:
    tasks = rows.group_by("task").agg(pl.col("right").mean()).sort("task")
    return {
        "rows": rows.height,
        "right": int(rows["right"].sum()),
        "accuracy": float(rows["right"].sum() / max(1, rows.height)),
        "tasks": dict(tasks.iter_rows()),
    }


def print_samples(rows: pl.DataFrame, count: int) -> None:
    """Print a few rows: correct ones, and a wrong one if there is any."""
    right, wrong = rows.filter(pl.col("right")), rows.filter(~pl.col("right"))
    for row in [*right.head(count).iter_rows(named=True), *wrong.head(1).iter_rows(named=True)]:
        print(f"\n--- {row['id']} ({row['task']}): {'right' if row['right'] else 'WRONG'}")
        print(row["document"])
        print(f"generated: {row['generated_text']}")
        if not row["right"]:
            print(f"expected:  {row['answer']}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Score the output of the quickstart job.")
    parser.add_argument("out", type=Path, help="output directory of the job")
    parser.add_argument("--samples", type=int, default=3, help="rows to show")
    args = parser.parse_args()
    try:
        rows = load(args.out)
    except (OSError, pl.exceptions.PolarsError) as error:
        parser.exit(2, f"score.py: {str(error).splitlines()[0]}\n")
    result = summarize(rows)
    print(f"{result['right']} of {result['rows']} rows are right ({result['accuracy']:.1%})")
    for task, accuracy in result["tasks"].items():
        print(f"  {task:10s} {accuracy:.1%}")
    print_samples(rows, args.samples)


if __name__ == "__main__":
    main()
