"""Runs vLLM's clients on batchinfer, and compares their results with transformers.

    python -m tests.clients [--folder out/clients]

The clients are lm-eval, EvalPlus's decoder and distilabel's ``vLLM``, unchanged, in a virtual
environment of their own. They run on a copy of the model of ``jobs/quickstart``, in float32.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from tests.clients.environment import OPTIONAL, ROOT, has, python_of_clients

HERE = Path(__file__).parent
TASKS = ("clients_choice", "clients_generation", "clients_rolling")
NUM_ROWS = 16
NUM_CHOICES = 4
MAX_TOKENS = 48
TOLERANCE = 1e-3
"""Largest accepted difference of two log-likelihoods, relative to the larger one or to 1."""
_ALIAS = ("-m", "batchinfer.vllm")


def main() -> int:
    """Run all clients; return the number of differences from transformers."""
    parser = argparse.ArgumentParser(prog="python -m tests.clients")
    parser.add_argument("--folder", type=Path, default=ROOT / "out" / "clients")
    folder = parser.parse_args().folder.resolve()
    python = python_of_clients(folder / "venv")
    work = folder / "work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    model = make_model(work / "model")
    rows = make_rows(work / "rows.jsonl")
    clients = Clients(python, work, model)
    differences = [*clients.lm_eval()]
    installed = [name for name in OPTIONAL if has(python, name)]
    for name in OPTIONAL:
        if name not in installed:
            print(f"{name}: skipped, because it is not installed in {folder / 'venv'}")
    if installed:
        differences += clients.texts(installed, [row["question"] for row in rows[:8]])
    for difference in differences:
        print(difference)
    print(f"{len(differences)} differences from transformers")
    return min(len(differences), 1)


def make_model(target: Path) -> Path:
    """Copy the quickstart's model, with the 2,048 positions that EvalPlus asks for."""
    shutil.copytree(ROOT / "jobs" / "quickstart" / "model", target)
    config = json.loads((target / "config.json").read_text())
    config["max_position_embeddings"] = 2048
    (target / "config.json").write_text(json.dumps(config))
    return target


def make_rows(target: Path) -> list[dict[str, Any]]:
    """Write questions with their answers, and with the answers of other rows as choices."""
    table = pq.read_table(ROOT / "jobs" / "quickstart" / "prompts.parquet").to_pylist()
    rows = []
    for row in table[:NUM_ROWS]:
        answers = [other["answer"] for other in table if other["task"] == row["task"]]
        choices = sorted({row["answer"], *answers[: NUM_CHOICES - 1]})
        question = f"{row['instruction']}\n{row['document']}"
        rows.append({"question": question, "answer": row["answer"], "choices": choices})
    target.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return rows


class Clients:
    """Runs the clients in a work folder."""

    def __init__(self, python: Path, work: Path, model: Path) -> None:
        self._python = python
        self._work = work
        self._model = model

    def lm_eval(self) -> Iterator[str]:
        """Run the tasks with both back ends; yield the differences of their samples."""
        arguments = ["-m", "lm_eval", "run", "--tasks", ",".join(TASKS), "--log_samples"]
        arguments += ["--include_path", str(HERE / "tasks"), "--apply_chat_template"]
        arguments += ["--model_args", f"pretrained={self._model},dtype=float32"]
        # A folder with the name of a package would be imported in its place.
        here, there = self._work / "lm-eval-batchinfer", self._work / "lm-eval-transformers"
        vllm = ["--model", "vllm", "--output_path", str(here), "--batch_size", "auto"]
        self._run("lm-eval", [*_ALIAS, *arguments, *vllm])
        device = ["--device", "cpu", "--batch_size", "8"]
        hf = ["--model", "hf", "--output_path", str(there), *device]
        self._run("lm-eval, transformers", [*arguments, *hf])
        for task in TASKS:
            ours, theirs = samples(here, task), samples(there, task)
            print(f"lm-eval: {task}: {len(ours)} samples")
            if not len(ours) == len(theirs) == NUM_ROWS:
                yield f"{task}: {len(ours)} and {len(theirs)} samples"
            for at, pair in enumerate(zip(ours, theirs, strict=False)):
                if not same(*pair):
                    yield f"{task}, sample {at}: {pair[0]!r}, but transformers: {pair[1]!r}"

    def texts(self, names: Sequence[str], prompts: Sequence[str]) -> Iterator[str]:
        """Run clients that write texts; yield the differences from transformers' texts."""
        asked = self._work / "prompts.json"
        asked.write_text(json.dumps({"prompts": prompts, "max_tokens": MAX_TOKENS}))
        files = {
            name: [
                self._work / f"{name}-{engine}.json" for engine in ("batchinfer", "transformers")
            ]
            for name in names
        }
        for name, (ours, _) in files.items():
            [script] = HERE.glob(f"{name}_*.py")
            self._run(name, [*_ALIAS, *map(str, (script, self._model, asked, ours))])
        pairs = [str(path) for pair in files.values() for path in pair]
        script = HERE / "transformers_texts.py"
        self._run("the same prompts, transformers", [str(script), str(self._model), *pairs])
        for name, pair in files.items():
            ours, theirs = (json.loads(path.read_text())["texts"] for path in pair)
            print(f"{name}: {len(ours)} texts")
            for at, (our, their) in enumerate(zip(ours, theirs, strict=True)):
                if our != their:
                    yield f"{name}, text {at}: {our!r}, but transformers: {their!r}"

    def _run(self, title: str, arguments: Sequence[str]) -> None:
        """Run Python in the work folder; end this program if it fails."""
        began = time.monotonic()
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(self._work)}
        done = subprocess.run(
            [self._python, *arguments],
            cwd=self._work,
            env={**os.environ, **offline},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode:
            sys.exit(f"{done.stdout}\n{title} failed with exit code {done.returncode}")
        print(f"{title}: {time.monotonic() - began:.0f} s", flush=True)


def samples(folder: Path, task: str) -> list[Any]:
    """Return the responses to each document of a task, in the order of documents."""
    [file] = folder.rglob(f"samples_{task}_*.jsonl")
    found = [json.loads(line) for line in file.read_text().splitlines()]
    return [sample["resps"] for sample in sorted(found, key=lambda sample: sample["doc_id"])]


def same(ours: Any, theirs: Any) -> bool:
    """Return True if two responses are the same; numbers, which may be texts, may differ a bit."""
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    try:
        return math.isclose(float(ours), float(theirs), rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    except (TypeError, ValueError):
        return bool(ours == theirs)


if __name__ == "__main__":
    sys.exit(main())
