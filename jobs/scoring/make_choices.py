"""Writes ``choices.parquet``: quickstart rows, each with four answers, of which one is correct.

python jobs/scoring/make_choices.py
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

HERE = Path(__file__).resolve().parent
NUM_ROWS = 200
NUM_CHOICES = 4


def with_choices(rows: list[dict[str, str]]) -> pa.Table:
    """Return rows with choices: the wrong ones are the correct answers of later rows of the same
    task, and the position of the correct one varies."""
    by_task: dict[str, list[str]] = {}
    for row in rows:
        by_task.setdefault(row["task"], []).append(row["answer"])
    seen = dict.fromkeys(by_task, 0)
    choices, places = [], []
    for at, row in enumerate(rows[:NUM_ROWS]):
        answers = by_task[row["task"]]
        seen[row["task"]] += 1
        others = [one for one in answers[seen[row["task"]] :] if one != row["answer"]]
        wrong = list(dict.fromkeys(others))[: NUM_CHOICES - 1]
        place = (at * 7 + at // NUM_CHOICES) % NUM_CHOICES
        choices.append([*wrong[:place], row["answer"], *wrong[place:]])
        places.append(place)
    columns = {name: [row[name] for row in rows[:NUM_ROWS]] for name in ("id", "instruction")}
    columns["document"] = [row["document"] for row in rows[:NUM_ROWS]]
    return pa.table({**columns, "choices": choices, "right": pa.array(places, pa.int32())})


if __name__ == "__main__":
    source = pq.read_table(HERE.parent / "quickstart" / "prompts.parquet")
    pq.write_table(with_choices(source.to_pylist()), HERE / "choices.parquet", compression="zstd")
