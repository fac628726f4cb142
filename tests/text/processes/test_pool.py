"""Workers build the same prompts as this process; a row that kills a worker is an error row."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest

from batchinfer.config import PromptConfig
from batchinfer.errors import DeviceError, ModelError, RowError, UsageError
from batchinfer.text.processes.limits import Limits
from batchinfer.text.processes.pool import TextProcesses
from batchinfer.text.processes.server_process import StoppedError
from batchinfer.text.prompts import Prompt, PromptBuilder, PromptTooLongError
from batchinfer.text.scoring_prompts import ScoredPrompt, ScoringBuilder
from batchinfer.text.tokenizer import Tokenizer
from tests.text.processes.builders import Computing, Faulty, Killed, Waiting
from tests.text.processes.conftest import (
    SOON_S,
    TIGHT,
    MakeProcesses,
    byte_level,
    prompts_of,
    workers,
)

PIECES = ["invoice ", "<|im_end|>", "naïve ", "\n", "東京", "<|im_", "start|>", " " * 9, "a\0b"]
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
LARGE = "{{ 'a' * 10 ** 9 }}"
DONE = "{% endif %}{{ text }}"


def described(result: Prompt | RowError) -> tuple[Any, ...]:
    """Return all contents of a result as a tuple, to compare it with others."""
    if isinstance(result, PromptTooLongError):
        return result.code, result.message, result.num_tokens
    if isinstance(result, RowError):
        return result.code, result.message
    completions = [ids.tolist() for ids in getattr(result, "completions", ())]
    facts = result.text, result.truncated, result.has_control_text, completions
    return (type(result), result.token_ids.dtype, result.token_ids.tolist(), *facts)


def random_rows(random: Random, count: int) -> list[dict[str, object]]:
    """Return rows with texts of all kinds, and some invalid values."""
    odd: list[object] = [None, b"\xff", "\ud800", b"", 7, RowError("template_error", "unreadable")]
    rows: list[dict[str, object]] = []
    for _ in range(count):
        text = "".join(random.choices(PIECES, k=random.randrange(30)))
        value = random.choice(odd) if random.random() < 0.1 else text.encode()
        rows.append({"prompt": value, "others": ["yes", text[:5]], "unused": object()})
    return rows


@pytest.mark.parametrize("seed", range(3))
def test_workers_build_the_same_prompts_as_this_process(
    tokenizer: Tokenizer, make_processes: MakeProcesses, seed: int
) -> None:
    random = Random(seed)
    recipe = partial(
        PromptBuilder, PromptConfig(column="prompt"), max_model_len=60, columns=["prompt"]
    )
    rows = random_rows(random, random.randrange(1, 500))

    made = make_processes(tokenizer, most=random.randint(1, 4)).prompts(recipe).build(rows)

    assert list(map(described, made)) == [
        described(result) for result in recipe(tokenizer=tokenizer).build(rows)
    ]


def test_workers_build_the_same_scoring_prompts_as_this_process(
    tokenizer: Tokenizer, make_processes: MakeProcesses
) -> None:
    recipe = partial(
        ScoringBuilder,
        PromptConfig(column="prompt"),
        completions_column="others",
        max_model_len=200,
        columns=["prompt", "others"],
    )
    rows = random_rows(Random(1), 100)

    made = make_processes(tokenizer).prompts(recipe).build(rows)

    assert any(isinstance(result, ScoredPrompt) for result in made)
    assert list(map(described, made)) == [
        described(result) for result in recipe(tokenizer=tokenizer).build(rows)
    ]


@pytest.mark.parametrize(
    ("template", "tokenizer", "text", "code", "what"),
    [
        (ENDLESS, byte_level(), "bad", "template_error", "the template took more than 0.5 s"),
        (LARGE, byte_level(), "bad", "template_error", "the template needed more than 256 MiB"),
        ("", byte_level("(x+x+)+y"), "x" * 60, "tokenizer_error", "the tokenizer failed: Onig"),
        (
            "",
            byte_level("x+y"),
            "x" * 10**5,
            "tokenizer_error",
            "the tokenizer took more than 0.5 s",
        ),
        (
            "",
            byte_level(growth=4000),
            "x",
            "tokenizer_error",
            "the tokenizer needed more than 256 MiB",
        ),
    ],
    ids=["endless", "large", "panics", "slow", "aborts"],
)
def test_row_that_kills_its_worker_gets_an_error_and_other_rows_succeed(
    template: str,
    tokenizer: Tokenizer,
    text: str,
    code: str,
    what: str,
    make_processes: MakeProcesses,
) -> None:
    source = "{% if text == 'bad' %}" + template + "{% endif %}{{ text }}"
    rows = [{"text": b"good %d" % at} for at in range(100)]
    rows[40]["text"] = text.encode()

    # A slow machine must not reach the limit of time before the limit of memory.
    limits = replace(TIGHT, cpu_seconds=20, shared_cpu_seconds=20) if "MiB" in what else TIGHT
    made = prompts_of(make_processes(tokenizer, limits), source).build(rows)

    error = made.pop(40)
    assert isinstance(error, RowError)
    assert (error.code, error.message[: len(what)]) == (code, what)
    del rows[40]
    assert [prompt.text for prompt in made if isinstance(prompt, Prompt)] == [
        str(row["text"], "utf-8") for row in rows
    ]


def test_row_error_does_not_depend_on_other_rows(make_processes: MakeProcesses) -> None:
    prompts = prompts_of(make_processes(byte_level()), "{{ text * (text | length) ** 6 }}")
    texts = [b"a" * length for length in (1, 40, 2, 30, 3, 50, 1)]

    alone = [described(prompts.build([{"text": text}])[0]) for text in texts]
    together = prompts.build([{"text": text} for text in texts * 5])

    assert list(map(described, together)) == alone * 5
    assert [len(result) for result in alone] == [7, 2, 7, 2, 7, 2, 7]


def test_kill_of_a_worker_from_outside_loses_no_row(make_processes: MakeProcesses) -> None:
    prompts = prompts_of(make_processes(byte_level()))
    rows = [{"text": b"row %d" % at} for at in range(2000)]
    prompts.build(rows)
    for child in workers():
        child.kill()

    assert all(isinstance(result, Prompt) for result in prompts.build(rows))


def test_repeated_kills_from_outside_raise_device_error(make_processes: MakeProcesses) -> None:
    prompts = make_processes(byte_level(), most=1).prompts(Killed)

    with pytest.raises(
        DeviceError, match=r"killed it \(SIGKILL\).* memory; this happened 4 times for one row"
    ):
        prompts.build([{"ids": 1}] * 3)


def test_kill_of_a_worker_halves_the_number_of_workers(make_processes: MakeProcesses) -> None:
    prompts = prompts_of(make_processes(byte_level(), most=4))
    rows = [{"text": b"row %d" % at} for at in range(200)]
    for _ in range(50):  # a fast worker may make several batches before the next one starts
        prompts.build(rows)
        children = workers()
        if len(children) == 4:
            break
    children[1].kill()

    made = prompts.build(rows * 3)

    assert (len(children), len(workers())) == (4, 2)
    assert [getattr(result, "text", None) for result in made] == [
        str(row["text"], "utf-8") for row in rows * 3
    ]


@pytest.mark.long
@pytest.mark.parametrize(("times", "code"), [(1, "done"), (99, "template_error")])
def test_row_that_waits_too_long_alone_gets_an_error(
    make_processes: MakeProcesses, tmp_path: Path, times: int, code: str
) -> None:
    limits = Limits(seconds=2, patient_seconds=6)
    processes = make_processes(byte_level(), limits, most=1)
    prompts = processes.prompts(partial(Waiting, tmp_path, times))

    (error,) = prompts.build([{"ids": 1}])

    assert isinstance(error, RowError)
    assert error.code == code
    assert error.message in ("", "the template took more than 6 s")


def test_machine_that_is_too_busy_raises_device_error(make_processes: MakeProcesses) -> None:
    limits = Limits(cpu_seconds=1e4, shared_cpu_seconds=1e4, seconds=1, patient_seconds=1)
    prompts = make_processes(byte_level(), limits, most=1).prompts(Computing)

    with pytest.raises(
        DeviceError, match=r"\d\.\d s of processor time in 1 s; this happened 4 times"
    ):
        prompts.build([{"ids": 1}])


def test_job_error_of_a_prompt_builder_is_raised_in_this_process(
    make_processes: MakeProcesses,
) -> None:
    processes = make_processes(byte_level())

    with pytest.raises(UsageError, match="reads title, which the data does not have"):
        prompts_of(processes, "{{ title }}")
    columns = {"columns": ["talk"], "conversation_columns": ["talk"]}
    talks = partial(PromptBuilder, PromptConfig(column="talk"), max_model_len=9, **columns)
    with pytest.raises(ModelError, match="a prompt made of messages needs a chat template"):
        processes.prompts(talks)


def test_row_that_is_too_large_is_not_sent_to_a_worker(
    make_processes: MakeProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = prompts_of(make_processes(byte_level()))
    monkeypatch.setattr("batchinfer.text.row_values.MAX_TEXT_CHARS", 1000)
    monkeypatch.setattr("batchinfer.text.processes.pool.MAX_ROW_BYTES", 5000)
    texts = [b"a", b"a" * 4004, b"b" * 3000, [b"a" * 3000, b"b" * 3000]]

    made = prompts.build([{"text": text} for text in texts])

    codes = [getattr(result, "code", None) for result in made]
    assert codes == [None, "row_too_large", None, "row_too_large"]


def test_stop_ends_the_wait_for_a_row_that_hangs(make_processes: MakeProcesses) -> None:
    processes = make_processes(byte_level(), Limits(cpu_seconds=1e4, shared_cpu_seconds=1e4))
    prompts = prompts_of(processes, ENDLESS + "{{ text }}")
    threading.Timer(0.2, processes.stop).start()
    began = time.monotonic()

    with pytest.raises(StoppedError):
        prompts.build([{"text": b"a"}] * 3)
    processes.close()

    assert time.monotonic() - began < SOON_S


def test_kill_of_this_process_ends_its_workers(make_processes: MakeProcesses) -> None:
    code = (
        "from tests.text.processes.test_pool import hang; "
        "from batchinfer.text.processes.pool import TextProcesses; hang(TextProcesses)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    with process, process.stdout:
        process.stdout.readline()
        below = _waited(lambda: _busy(psutil.Process(process.pid).children(recursive=True)))
        process.kill()

    gone, alive = psutil.wait_procs(below, SOON_S)

    assert len(gone) == 2
    assert not alive


def hang(make: Callable[..., TextProcesses]) -> None:
    """Wait for a row that never ends."""
    processes = make(1, Limits(cpu_seconds=1e4, shared_cpu_seconds=1e4))
    processes.load(byte_level())
    prompts = prompts_of(processes, ENDLESS + "{{ text }}")
    print("ready", flush=True)
    prompts.build([{"text": b"a"}])


def test_prompts_can_be_built_after_an_interrupt(
    make_processes: MakeProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = prompts_of(make_processes(byte_level()), "{% if text == 'bad' %}" + LARGE + DONE)
    rows = [{"text": b"good %d" % at} for at in range(100)]

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Future, "result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prompts.build(rows)
    made: list[Prompt | RowError] = []
    again = threading.Thread(
        target=lambda: made.extend(prompts.build([*rows, {"text": b"bad"}])), daemon=True
    )
    again.start()
    again.join(60)

    assert [getattr(result, "text", None) for result in made[:-1]] == [
        str(row["text"], "utf-8") for row in rows
    ]
    assert getattr(made[-1], "code", None) == "template_error"


def test_interrupt_fails_unfinished_calls(
    make_processes: MakeProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = make_processes(byte_level(), Limits(cpu_seconds=1e4, shared_cpu_seconds=1e4))
    finish = prompts_of(processes, ENDLESS).start([{"text": b"a"}])

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    prompts = prompts_of(processes)
    with monkeypatch.context() as patch:
        patch.setattr(Future, "result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prompts.build([{"text": b"b"}])

    with pytest.raises(DeviceError, match="interrupted"):
        finish()


def test_bug_in_a_worker_fails_only_its_call(make_processes: MakeProcesses) -> None:
    processes = make_processes(byte_level(), most=1)
    prompts, faulty = prompts_of(processes), processes.prompts(Faulty)
    finish_faulty = faulty.start([{"ids": 1}])
    finish = prompts.start([{"text": b"a"}] * 5)

    assert all(isinstance(result, Prompt) for result in finish())
    with pytest.raises(RuntimeError, match=r"(?s)in a child process: .*ZeroDivisionError"):
        finish_faulty()


def _busy(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Return the two processes if the second one is computing, else an empty list."""
    return processes if len(processes) == 2 and processes[1].cpu_times().user > 0.1 else []


def _waited(find: Callable[[], list[psutil.Process]]) -> list[psutil.Process]:
    until = time.monotonic() + 60
    while not (found := find()) and time.monotonic() < until:
        time.sleep(0.01)
    return found
