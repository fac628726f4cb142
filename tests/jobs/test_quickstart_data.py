"""The quickstart's rows, tokenizer and model are as its README says."""

from __future__ import annotations

import json
import sys
from collections import Counter
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import polars as pl
import pyarrow.parquet as pq
import pytest

from tests.scripts import load_script

QUICKSTART = Path(__file__).resolve().parents[2] / "jobs" / "quickstart"
MODEL = QUICKSTART / "model"


@cache
def script(name: str) -> ModuleType:
    """Import one of the quickstart's scripts; their folder is not a package."""
    if str(QUICKSTART) not in sys.path:
        sys.path.append(str(QUICKSTART))
    return load_script(QUICKSTART / f"{name}.py")


@cache
def prompts() -> list[dict[str, str]]:
    rows: list[dict[str, str]] = pq.read_table(QUICKSTART / "prompts.parquet").to_pylist()
    return rows


@cache
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MODEL)


def messages(row: dict[str, str]) -> list[dict[str, str]]:
    return [
        {"role": "system", "content": row["instruction"]},
        {"role": "user", "content": row["document"]},
    ]


def leaves(answer: str) -> list[str]:
    """Return the values of a JSON answer, or a plain-text answer without its "Ship to"."""
    if answer.startswith("{"):
        return [str(value) for value in json.loads(answer).values()]
    return [answer.removeprefix("Ship to ")]


# Rows ------------------------------------------------------------------------------------------


def test_prompts_are_what_the_script_makes() -> None:
    assert script("make_data").prompts_table().to_pylist() == prompts()


def test_there_are_enough_different_rows() -> None:
    assert len(prompts()) >= 2_000
    assert len({row["id"] for row in prompts()}) == len(prompts())
    assert len({row["document"] for row in prompts()}) == len(prompts())


def test_table_is_small() -> None:
    assert (QUICKSTART / "prompts.parquet").stat().st_size < 1_000_000


def test_tasks_share_few_instructions_and_are_shuffled() -> None:
    tasks = [row["task"] for row in prompts()]
    assert len({row["instruction"] for row in prompts()}) == len(set(tasks)) == 8
    changes = sum(before != after for before, after in pairwise(tasks))
    assert changes > len(tasks) * 0.8


def test_constant_answer_is_mostly_wrong() -> None:
    (_, count), *_ = Counter(row["answer"] for row in prompts()).most_common(1)
    assert count / len(prompts()) < 0.3


def test_most_answers_hold_a_value_of_their_own_document() -> None:
    copied = [
        any(any(c.isupper() or c.isdigit() for c in v) and v in row["document"] for v in values)
        for row in prompts()
        for values in [leaves(row["answer"])]
    ]
    assert sum(copied) / len(copied) >= 0.5


def test_training_text_shares_no_value_with_the_prompts() -> None:
    make_data = script("make_data")
    train, held_out = make_data.Values(5, "train"), make_data.Values(5, "prompts")
    for draw in ("order", "invoice", "phone", "date", "time", "room", "town", "product"):
        seen = {getattr(train, draw)() for _ in range(300)}
        assert not seen & {getattr(held_out, draw)() for _ in range(300)}, draw


def test_same_seed_gives_the_same_training_text() -> None:
    make_data = script("make_data")
    first, again = make_data.training_rows(3), make_data.training_rows(3)
    assert [next(first) for _ in range(20)] == [next(again) for _ in range(20)]


@pytest.mark.parametrize("seed", range(3))
def test_invoice_sums_are_right(seed: int) -> None:
    make_data = script("make_data")
    row = make_data.make_row(make_data.Values(seed, "train"), "invoice")
    fields = dict(line.split(": ") for line in row.document.splitlines() if ": " in line)
    total = round(float(fields["Subtotal"]) + float(fields["Tax"]), 2)
    assert float(fields["Total"].split()[0]) == total == float(json.loads(row.answer)["total"])


# Tokenizer -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["", "plain", " two  spaces\n\n", "Zürich 12.50 € — ok", "日本\t🙂"]
)
def test_tokenizer_round_trip(text: str) -> None:
    assert tokenizer().decode(tokenizer().encode(text, add_special_tokens=False)) == text


def test_tokenizer_round_trip_of_the_rows() -> None:
    texts = [row[key] for row in prompts()[:100] for key in ("document", "answer", "instruction")]
    ids = tokenizer()(texts, add_special_tokens=False)["input_ids"]
    assert tokenizer().batch_decode(ids) == texts


def test_answers_are_short_and_documents_vary() -> None:
    def shortest_and_longest(key: str) -> tuple[int, int]:
        texts = sorted({row[key] for row in prompts()})
        lengths = [len(i) for i in tokenizer()(texts, add_special_tokens=False)["input_ids"]]
        return min(lengths), max(lengths)

    for key, shortest, longest in (("answer", 3, 50), ("instruction", 80, 150)):
        low, high = shortest_and_longest(key)
        assert shortest <= low <= high <= longest, key
    low, high = shortest_and_longest("document")
    assert low <= 20
    assert 120 <= high <= 160


def test_template_starts_the_answer_and_begins_with_one_bos() -> None:
    row = prompts()[0]
    text = tokenizer().apply_chat_template(
        messages(row), tokenize=False, add_generation_prompt=True
    )
    assert text == (
        f"<|bos|><|im_start|>system\n{row['instruction']}<|im_end|>\n"
        f"<|im_start|>user\n{row['document']}<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer().apply_chat_template(
        messages(row), add_generation_prompt=True, return_dict=True
    )["input_ids"]
    bos = tokenizer().bos_token_id
    assert ids[0] == bos
    assert ids.count(bos) == 1
    assert tokenizer().encode("raw text")[0] == bos


# Model -----------------------------------------------------------------------------------------


def test_model_is_small_and_stops_at_im_end() -> None:
    assert (MODEL / "model.safetensors").stat().st_size <= 6_000_000
    config = json.loads((MODEL / "config.json").read_text())
    generation = json.loads((MODEL / "generation_config.json").read_text())
    assert config["model_type"] == "llama"
    assert config["dtype"] in {"bfloat16", "float16"}
    assert config["vocab_size"] == len(tokenizer())
    assert generation["eos_token_id"] == config["eos_token_id"] == tokenizer().eos_token_id
    assert tokenizer().eos_token == "<|im_end|>"


def test_greedy_answers_are_right() -> None:
    import torch
    from transformers import AutoModelForCausalLM

    rows = list({row["task"]: row for row in prompts()}.values())  # a prompt of each task
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    prompt = tokenizer().apply_chat_template(
        [messages(row) for row in rows],
        add_generation_prompt=True,
        padding=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = model.generate(**prompt, max_new_tokens=64, do_sample=False)
    answers = tokenizer().batch_decode(
        output[:, prompt["input_ids"].shape[1] :], skip_special_tokens=True
    )
    assert answers == [row["answer"] for row in rows]


# Scoring ---------------------------------------------------------------------------------------


def test_score_counts_stripped_matches_and_failed_rows(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    pl.DataFrame(
        {
            "task": ["a", "a", "b"],
            "answer": ["yes", "no", "yes"],
            "generated_text": [" yes\n", "yes", None],
        }
    ).write_parquet(tmp_path / "data" / "part-00000.parquet")
    assert script("score").score(tmp_path) == {
        "rows": 3,
        "right": 1,
        "accuracy": pytest.approx(1 / 3),
        "tasks": {"a": 0.5, "b": 0.0},
    }


def test_score_says_when_there_is_no_output(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="run the job first"):
        script("score").score(tmp_path)


@pytest.mark.parametrize("content", [None, "no parquet"])
def test_and_ends_with_one_line_and_code_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    content: str | None,
) -> None:
    if content is not None:
        (tmp_path / "data").mkdir()
        (tmp_path / "data" / "part-00000.parquet").write_text(content)
    monkeypatch.setattr(sys, "argv", ["score.py", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        script("score").main()
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("score.py: ")
