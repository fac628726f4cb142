"""Compares the output of the labels job with the printed order numbers.

python jobs/labels/score.py OUT        # OUT is the job's output directory

It exits with code 1 if fewer than 95 % of the numbers are right, and with 2 if there is no output.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import polars as pl

REQUIRED = 0.95


def load(out_dir: str | Path) -> pl.DataFrame:
    """Return the job's rows with a column `right`, which is false for failed rows."""
    parts = sorted(Path(out_dir).joinpath("data").glob("*.parquet"))
    if not parts:
        raise FileNotFoundError(f"no finished parts in {out_dir}/data; run the job first")
    columns = ["id", "order_number", "generated_text"]
    matches = pl.col("generated_text").str.strip_chars() == pl.col("order_number")
    return pl.read_parquet(parts, columns=columns).with_columns(right=matches.fill_null(False))


def main() -> None:
    parser = argparse.ArgumentParser(description="Score the output of the labels job.")
    parser.add_argument("out", type=Path, help="output directory of the job")
    args = parser.parse_args()
    try:
        rows = load(args.out)
    except (OSError, pl.exceptions.PolarsError) as error:
        parser.exit(2, f"score.py: {str(error).splitlines()[0]}\n")
    right = int(rows["right"].sum())
    for row in rows.filter(~pl.col("right")).iter_rows(named=True):
        print(f"{row['id']}: {row['order_number']} was read as {row['generated_text']}")
    print(f"exact match: {right} of {rows.height} labels ({right / max(1, rows.height):.1%})")
    sys.exit(right < REQUIRED * rows.height)


if __name__ == "__main__":
    main()
