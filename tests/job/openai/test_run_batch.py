"""``run-batch`` as a job: where its files go, and which inputs it refuses before it begins."""

from __future__ import annotations

import json
import os
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from batchinfer.config import PromptConfig
from batchinfer.config.options import BatchOptions
from batchinfer.errors import DataError, ExitCode, UsageError
from batchinfer.job.openai.batch_names import for_run_batch
from batchinfer.job.openai.reader import TEMPLATE_VARIABLES
from batchinfer.job.run import run_batch as module
from batchinfer.job.run.run_batch import run_batch
from batchinfer.job.run.run_job import run_job
from batchinfer.text.prompts import Prompt, PromptBuilder
from tests.job.fakes import FakeBuild, byte_tokenizer
from tests.job.stores import LAKE, objects, point_to, s3_server

GOOD = [("a", {}), ("b", {"prompt": ["x", "yz", "w"], "n": 2}), ("c", {"model": "other"})]
BAD = [("a", {}), ("bad", {"n": "many"}), ("c", {}), ("a", {})]


@pytest.fixture(autouse=True)
def fake_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Answer with the prompt, and run in the test's own folder."""
    monkeypatch.setattr(module, "run_job", partial(run_job, build=FakeBuild()))
    monkeypatch.chdir(tmp_path)


def ask(requests: list[tuple[str, dict[str, Any]]], **options: Any) -> BatchOptions:
    rows = [
        {
            "custom_id": custom_id,
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": "hi", **body},
        }
        for custom_id, body in requests
    ]
    Path("in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return BatchOptions(
        "in.jsonl", **{"output_file": "out.jsonl", **options}, model="echo", quiet=True
    )


def answers(text: str | None = None) -> dict[str, Any]:
    lines = (Path("out.jsonl").read_text() if text is None else text).splitlines()
    return {line["custom_id"]: line for line in map(json.loads, lines)}


def texts(line: dict[str, Any]) -> list[str]:
    choices = line["response"]["body"]["choices"]
    assert [choice["index"] for choice in choices] == list(range(len(choices)))
    return [choice["text"] for choice in choices]


def test_run_batch_orders_choices_by_prompt() -> None:
    assert run_batch(ask(GOOD)) is ExitCode.OK

    found = answers()
    assert {name: texts(line) for name, line in found.items()} == {
        "a": ["hi"],
        "b": ["x", "x", "yz", "yz", "w", "w"],
        "c": ["hi"],
    }
    usage = found["b"]["response"]["body"]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (4, 2 * 7)


def test_run_batch_bad_prompt_fails_only_its_request() -> None:
    options = ask([("a", {"prompt": ["x", " "]}), ("b", {"prompt": ["x", "y"]}), *GOOD[2:]])
    assert run_batch(options) is ExitCode.OK

    found = answers()
    assert found["a"]["response"]["body"]["error"]["code"] == "empty_prompt"
    assert texts(found["b"]) == ["x", "y"]
    assert len(Path("out.jsonl").read_text().splitlines()) == 3


def test_run_batch_exits_3_with_too_many_failed_requests() -> None:
    options = ask(BAD, max_error_rate=0.25)
    assert run_batch(options) is ExitCode.TOO_MANY_ROW_ERRORS

    lines = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    assert [(line["response"] or {}).get("status_code") for line in lines] == [200, 400, 200, None]
    assert [line["error"] and line["error"]["code"] for line in lines] == [
        *([None] * 3),
        "duplicate_custom_id",
    ]
    assert run_batch(ask(BAD, max_error_rate=0.5, overwrite=True)) is ExitCode.OK


def test_run_batch_hints_of_messages_work() -> None:
    assert run_batch(ask(BAD[:2], max_error_rate=0)) is ExitCode.TOO_MANY_ROW_ERRORS
    with pytest.raises(DataError, match="has changed since") as caught:
        run_batch(ask(GOOD[:1]))
    assert "use --update" in str(caught.value)
    assert run_batch(ask([("a", {"prompt": "new"}), ("b", {})], update=True)) is ExitCode.OK
    assert {name: texts(line) for name, line in answers().items()} == {"a": ["new"], "b": ["hi"]}


@pytest.mark.parametrize(
    ("of_the_job", "says"),
    [
        (
            "raise engine.kv_cache_memory or lower sampling.max_tokens",
            "raise --num-kv-blocks or lower --max-tokens or body.max_tokens",
        ),
        ("lower engine.num_kv_blocks, engine.kv_cache_memory or it", "lower --num-kv-blocks or it"),
        ("use --output (run-batch: -o) to write elsewhere", "use -o to write elsewhere"),
        ("body: sampling.top_k cannot be combined", "body.top_k cannot be combined"),
        (
            "m/model.safetensors: set output.reasoning",
            "m/model.safetensors: set --reasoning-parser",
        ),
        ("x.csv: set input.format to csv", "x.csv: set input.format to csv"),
        (
            "set engine.deterministic: false, or engine.device: cpu",
            "set engine.deterministic: false, or engine.device: cpu\n"
            "run-batch has no option for engine.deterministic and engine.device: use a job file "
            "with input.format: openai-batch",
        ),
    ],
)
def test_messages_name_what_users_of_run_batch_can_set(of_the_job: str, says: str) -> None:
    assert for_run_batch(of_the_job) == says


def test_run_batch_messages_name_its_options_and_fields() -> None:
    requests = [
        ("beams", {"use_beam_search": True, "n": 2, "top_k": 5}),
        ("model", {"model": "other"}),
        ("good", {}),
    ]
    assert run_batch(ask(requests, served_model_name=["echo"])) is ExitCode.OK
    found = {name: line["response"]["body"] for name, line in answers().items()}
    assert "body.top_k cannot be combined with beam_width" in found["beams"]["error"]["message"]
    assert found["model"]["error"]["message"].endswith("set --served-model-name")
    with pytest.raises(UsageError, match="--max-model-len") as caught:
        run_batch(ask(requests, max_model_len=0))
    assert "model.max_model_len" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "body", "says"),
    [
        ("completions", {"prompt": " "}, "body.prompt is empty or whitespace only"),
        ("chat/completions", {"messages": []}, "body.messages: the conversation is empty"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "body.messages, message 0: a part of type text has no string in its text field",
        ),
    ],
)
def test_run_batch_errors_name_request_fields(url: str, body: dict[str, Any], says: str) -> None:
    options = ask([("a", {})])
    line = {"custom_id": "a", "method": "POST", "url": f"/v1/{url}", "body": body}
    Path("in.jsonl").write_text(json.dumps(line))
    assert run_batch(options) is ExitCode.OK
    assert answers()["a"]["response"]["body"]["error"]["message"] == says


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_run_batch_with_an_empty_file(content: str) -> None:
    options = ask([])
    Path("in.jsonl").write_text(content)
    assert run_batch(options) is ExitCode.OK
    assert Path("out.jsonl").read_bytes() == b""


@pytest.mark.parametrize(
    ("line", "problem"),
    [('{"method": "POST"}', "custom_id is missing"), ('{"custom_id": ""}', 'custom_id is ""')],
)
def test_run_batch_request_without_custom_id_is_a_file_error(line: str, problem: str) -> None:
    options = ask(GOOD)
    with open("in.jsonl", "a", encoding="utf-8") as file:
        file.write(f"\n{line}\n")
    with pytest.raises(DataError, match=f"in.jsonl, line 5: {problem}"):
        run_batch(options)
    assert not Path("out.jsonl").exists()


def test_run_batch_with_served_model_name_refuses_other_models() -> None:
    assert run_batch(ask(GOOD, served_model_name=["echo"])) is ExitCode.OK
    assert answers()["c"]["response"]["status_code"] == 404


def test_run_batch_warns_about_other_models(caplog: pytest.LogCaptureFixture) -> None:
    run_batch(ask([(f"{at}", {"model": name}) for at, name in enumerate(["x", "y", "x", "echo"])]))
    assert [record.args[0] for record in caplog.records if record.args] == ["x", "y"]


def test_run_batch_writes_to_a_pipe() -> None:
    os.mkfifo("pipe")
    found: list[str] = []
    for _ in range(2):
        reader = threading.Thread(target=lambda: found.append(Path("pipe").read_text()))
        reader.start()
        assert run_batch(ask(GOOD, output_file="pipe")) is ExitCode.OK
        reader.join()
    assert list(answers(found[0])) == ["a", "b", "c"]
    assert found[0] == found[1]
    assert Path("in.jsonl.batchinfer/openai/output.jsonl").read_text() == found[0]


def test_run_batch_output_in_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    with s3_server() as address:
        point_to(address, monkeypatch)
        options = ask(GOOD, output_file=f"{LAKE}/answers/out.jsonl")
        assert run_batch(options) is ExitCode.OK
        found = objects("answers")
    assert list(answers(found["out.jsonl"].decode())) == ["a", "b", "c"]
    assert "out.jsonl.batchinfer/_SUCCESS" in found


def test_run_batch_separates_reasoning_by_parser_or_markers() -> None:
    markers = {"start": "<a>", "end": "</a>"}
    for asked, found in [
        ("auto", "auto"),
        ("qwen3", {"start": "<think>", "end": "</think>"}),
        ("openai_gptoss", "auto"),
        (json.dumps(markers), markers),
    ]:
        job = module.batch_job(ask(GOOD, reasoning_parser=asked))
        assert job.output.asked_reasoning == found
    for asked, says in [("qwen", "did you mean qwen3"), ('{"start": "<a>"}', "known: auto")]:
        with pytest.raises(UsageError, match=f"--reasoning-parser: .* is unknown; {says}"):
            module.batch_job(ask(GOOD, reasoning_parser=asked))


def test_run_batch_request_template_variables_override_the_jobs() -> None:
    builder = PromptBuilder(
        PromptConfig(chat_template="file", chat_template_kwargs={"effort": "none", "mood": "good"}),
        byte_tokenizer(),
        max_model_len=100,
        columns=["messages", TEMPLATE_VARIABLES],
        chat_template_source="{{ messages[0].content }} {{ effort }} {{ mood }}",
        variables_column=TEMPLATE_VARIABLES,
    )
    talk = [{"role": "user", "content": "hi"}]
    given: list[dict[str, Any]] = [{}, {"effort": "high", "mood": "<eos>"}]

    built = builder.build([{"messages": talk, TEMPLATE_VARIABLES: one} for one in given])

    prompts = [one for one in built if isinstance(one, Prompt)]
    assert [one.text for one in prompts] == ["hi none good", "hi high <eos>"]
    assert prompts[1].has_control_text
