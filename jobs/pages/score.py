"""Compares the output of the notes job or of the captions job with the column `expected`.

python jobs/pages/score.py OUT        # OUT is the job's output directory

It exits with code 1 if fewer than 95 % of the rows are right, and with 2 if there is no output.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import polars as pl

REQUIRED = 0.95


def is_right(expected: str, text: str | None) -> bool:
    """Return True if a text is as expected, or is equal JSON."""
    if text is None:
        return False
    try:
        return bool(json.loads(text) == json.loads(expected))
    except ValueError:
        return text.strip() == expected


def main() -> None:
    parser = argparse.ArgumentParser(description="Score the output of the notes or captions job.")
    parser.add_argument("out", type=Path, help="output directory of the job")
    args = parser.parse_args()
    parts = sorted(args.out.joinpath("data").glob("*.parquet"))
    if not parts:
        parser.exit(2, f"score.py: no finished parts in {args.out}/data; run the job first\n")
    rows = pl.read_parquet(parts, columns=["id", "expected", "generated_text"]).rows()
    wrong = [row for row in rows if not is_right(*row[1:])]
    for name, expected, text in wrong:
        print(f"{name}: expected {expected}, got {text}")
    right = len(rows) - len(wrong)
    print(f"right: {right} of {len(rows)} rows ({right / max(1, len(rows)):.1%})")
    sys.exit(right < REQUIRED * len(rows))


if __name__ == "__main__":
    main()
