"""OpenAI batch files with a tiny random model; results are parsed with OpenAI's own types."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from openai.types import Completion
from openai.types.chat import ChatCompletion
from openai.types.shared import ErrorObject
from pydantic import TypeAdapter
from transformers import AutoModelForCausalLM, AutoTokenizer

from batchinfer.config.options import BatchOptions
from batchinfer.errors import ExitCode
from batchinfer.job.run.run_batch import run_batch
from batchinfer.job.run.run_job import run_job
from batchinfer.job.spec.spec import JobSpec
from tests.openai_batches import CHAT, TEXT, answers, request

HELLO = [{"role": "user", "content": "hello"}]
CHOICE = {"type": "json_schema", "json_schema": {"name": "c", "schema": {"enum": [7, None]}}}
NUM_LINES = 500
SHAPE = TypeAdapter(dict[str, Any])


def good(row: int) -> dict[str, Any]:
    """Return a valid request; its kind depends on the row."""
    text = f"Shared words, then number {row}"
    talk = [{"role": "system", "content": "Be short."}, {"role": "user", "content": text}]
    parts = [{"role": "user", "content": [{"type": "text", "text": text}]}]
    body: dict[str, Any] = [
        {"messages": talk, "temperature": 0},
        {"messages": parts, "n": 2, "seed": row, "top_p": 0.9},
        {"messages": talk, "logprobs": True, "top_logprobs": 2, "stop": ["a"]},
        {"prompt": text, "logprobs": 1, "temperature": 0},
        {"prompt": [5, 6, 7, row % 200], "logit_bias": {"9": -100}, "presence_penalty": 0.5},
        {"messages": talk, "response_format": CHOICE},
    ][row % 6]
    url = CHAT if "messages" in body else TEXT
    return request(f"request-{row}", url, model="tiny", max_tokens=6, **body)


BAD: dict[int, tuple[str, Any]] = {
    3: ("invalid_json", '{"custom_id": "request-3", "method": "POST", "url": "/v1/chat/com'),
    17: ("invalid_json", "not json at all"),
    41: ("invalid_json", "[1, 2, 3]"),
    60: ("invalid_utf8", b'{"custom_id": "request-60", "body": "\xff"}'),
    77: ("duplicate_custom_id", good(76)),
    99: ("invalid_request", {**good(99), "method": "GET"}),
    101: ("invalid_request", {**good(101), "url": "/v1/embeddings"}),
    150: ("invalid_request", {"custom_id": "request-150"}),
    171: ("invalid_request", request("request-171", messages="hello")),
    199: ("unknown_model", request("request-199", messages=HELLO, model="gpt-4o")),
    222: ("unsupported_parameter", request("request-222", messages=HELLO, tools=[{"x": 1}])),
    250: ("unsupported_parameter", request("request-250", TEXT, prompt="a", suffix="b")),
    277: ("bad_sampling_params", request("request-277", messages=HELLO, temperature=-1)),
    300: ("bad_sampling_params", request("request-300", messages=HELLO, max_tokens="many")),
    333: ("bad_sampling_params", request("request-333", messages=HELLO, logprobs=5)),
    355: (
        "invalid_structured_output",
        request("request-355", messages=HELLO, response_format={"type": "xml"}),
    ),
    371: ("empty_prompt", request("request-371", TEXT, prompt="  ")),
    400: ("prompt_too_long", request("request-400", messages=[{**HELLO[0], "content": "x" * 600}])),
    444: ("unsupported_content", request("request-444", messages=[{"role": "user", "content": 5}])),
    499: ("invalid_json", '{"custom_id": "request-499", "method"'),
}


def batch_file(folder: Path) -> Path:
    rows = [BAD[row][1] if row in BAD else good(row) for row in range(NUM_LINES)]
    lines = [row if isinstance(row, str | bytes) else json.dumps(row) for row in rows]
    path = folder / "batch.jsonl"
    data = [line.encode() if isinstance(line, str) else line for line in lines]
    path.write_bytes(b"".join(line + b"\n" for line in data))
    return path


def job(folder: Path, model: Path) -> JobSpec:
    out = {"path": str(folder / "out"), "format": "openai-batch", "rows_per_part": 100}
    return JobSpec.model_validate(
        {
            "model": {"name": str(model), "dtype": "float32", "served_model_name": "tiny"},
            "input": {"path": str(batch_file(folder)), "format": "openai-batch"},
            "sampling": {"max_tokens": 4},
            "output": out,
            "errors": {"max_error_rate": 0.05},
        }
    )


def lines(path: Path) -> list[dict[str, Any]]:
    return [SHAPE.validate_json(line) for line in path.read_bytes().splitlines()]


@pytest.fixture(scope="module")
def done(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the output directory of a finished job."""
    folder = tmp_path_factory.mktemp("job")
    assert run_job(job(folder, model), quiet=True) is ExitCode.OK
    return folder / "out"


def test_valid_requests_are_answered_in_openai_format(done: Path) -> None:
    answered = lines(done / "openai" / "output.jsonl")
    wanted = [good(row) for row in range(NUM_LINES) if row not in BAD]
    assert [line["custom_id"] for line in answered] == [line["custom_id"] for line in wanted]
    assert len({line["id"] for line in answered}) == len(answered)
    for line, asked in zip(answered, wanted, strict=True):
        assert line.keys() == {"id", "custom_id", "response", "error"}
        assert (line["error"], line["response"]["status_code"]) == (None, 200)
        body, given = line["response"]["body"], asked["body"]
        made: ChatCompletion | Completion
        if asked["url"] == CHAT:
            made = ChatCompletion.model_validate(body, strict=True)
            assert all(choice.message.role == "assistant" for choice in made.choices)
            assert all(choice.message.content is not None for choice in made.choices)
            if given.get("response_format"):
                assert made.choices[0].message.content in ("7", "null")
            scored = [choice.logprobs.content for choice in made.choices if choice.logprobs]
            assert bool(scored) == given.get("logprobs", False)
            assert all(len(token.top_logprobs) == 2 for tokens in scored for token in tokens or [])
        else:
            made = Completion.model_validate(body, strict=True)
            assert (made.choices[0].logprobs is not None) == ("logprobs" in given)
        assert [choice.index for choice in made.choices] == list(range(given.get("n", 1)))
        assert made.usage.completion_tokens <= 6 * given.get("n", 1)
        assert made.model == "tiny"


def test_invalid_requests_are_in_the_error_file(done: Path) -> None:
    failed = lines(done / "openai" / "errors.jsonl")
    assert len(failed) == len(BAD)
    for line, (row, (code, _)) in zip(failed, BAD.items(), strict=True):
        assert (line["error"] is None) is (line["response"] is not None)
        if line["response"] is None:
            assert code in ("invalid_json", "invalid_utf8", "duplicate_custom_id")
            assert line["error"].keys() == {"code", "message"}
            found = {"type": "", "param": None, **line["error"]}
        else:
            found = line["response"]["body"]["error"]
            assert line["response"]["status_code"] == (404 if code == "unknown_model" else 400)
        error = ErrorObject.model_validate(found, strict=True)
        assert error.code == code
        if code in ("invalid_json", "invalid_utf8"):
            assert f"batch.jsonl, line {row + 1} " in error.message
    ids = {row: line["custom_id"] for row, line in zip(BAD, failed, strict=True)}
    assert ids[3] == "request-3"  # its line is cut in half
    assert ids[77] == "request-76"
    assert ids[17] is ids[41] is None


def test_greedy_batch_answers_equal_generate(done: Path, model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    reference = AutoModelForCausalLM.from_pretrained(model).eval()
    answered = {line["custom_id"]: line for line in lines(done / "openai" / "output.jsonl")}
    for row in (0, 6, 9, 15):
        body = good(row)["body"]
        if "messages" in body:
            text = tokenizer.apply_chat_template(
                body["messages"], tokenize=False, add_generation_prompt=True
            )
        else:
            text = body["prompt"]
        ids = tokenizer(text, return_tensors="pt").input_ids
        with torch.inference_mode():
            made = reference.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
        choice = answered[f"request-{row}"]["response"]["body"]["choices"][0]
        answer = choice["message"]["content"] if "message" in choice else choice["text"]
        assert answer == tokenizer.decode(made, skip_special_tokens=True)


def test_completions_have_the_offsets_of_their_token_texts(done: Path) -> None:
    scored = [
        choice["logprobs"]
        for line in lines(done / "openai" / "output.jsonl")
        if line["response"]["body"]["object"] == "text_completion"
        for choice in line["response"]["body"]["choices"]
        if choice["logprobs"]
    ]
    assert scored
    for logprobs in scored:
        texts = logprobs["tokens"]
        assert len(texts) == len(logprobs["token_logprobs"])
        assert logprobs["text_offset"] == [sum(map(len, texts[:at])) for at in range(len(texts))]


def test_batch_answers_are_also_in_parquet(done: Path) -> None:
    rows = pq.read_table(sorted((done / "data").iterdir())).to_pylist()
    assert [row["row_id"] for row in rows] == list(range(NUM_LINES))
    failed = {row["row_id"]: row["error"]["code"] for row in rows if row["error"]}
    assert failed == {row: code for row, (code, _) in BAD.items()}
    assert json.loads(rows[0]["body"]) == good(0)["body"]


def test_missing_or_damaged_answer_files_are_rewritten(done: Path, model: Path) -> None:
    from batchinfer.job.output.directory import OutputDir
    from batchinfer.job.output.verify import verify

    spec, errors = job(done.parent, model), done / "openai" / "errors.jsonl"
    os.utime(done.parent / "batch.jsonl", ns=_times_of(done))
    before = errors.read_bytes()
    for damage in (errors.unlink, lambda: errors.write_bytes(before[:-1])):
        damage()
        (problem,) = verify(OutputDir(done)).problems
        assert str(errors) in problem
        assert run_job(spec, quiet=True, build=_no_model) is ExitCode.OK
        assert errors.read_bytes() == before
        assert not verify(OutputDir(done)).problems


def _times_of(out: Path) -> tuple[int, int]:
    """Return the input's modification time at planning, as both times that ``os.utime`` takes."""
    plan = json.loads((out / "_batchinfer" / "manifest.json").read_bytes())
    mtime_ns = plan["inputs"][0]["mtime_ns"]
    return mtime_ns, mtime_ns


def _no_model(*_: Any, **__: Any) -> Any:
    raise AssertionError("nothing is left to run")


def test_run_batch_puts_all_lines_into_one_file_in_order(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in.jsonl"
    bad = request("bad", messages="x")
    rows = [good(0), bad, good(3), request("long", messages=HELLO, temperature=0)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    target = tmp_path / "output.jsonl"  # the file in the working folder has this name too
    options = BatchOptions(str(source), str(target), str(model), max_model_len=64, quiet=True)
    assert run_batch(options) is ExitCode.OK
    written = target.read_bytes()
    found = lines(target)
    assert [line["custom_id"] for line in found] == ["request-0", "bad", "request-3", "long"]
    assert found[1]["response"]["body"]["error"]["code"] == "invalid_request"
    usage = found[3]["response"]["body"]["usage"]
    assert usage["total_tokens"] <= 64
    choice = found[3]["response"]["body"]["choices"][0]
    assert choice["finish_reason"] == "length" if usage["total_tokens"] == 64 else "stop"
    assert (tmp_path / "output.jsonl.batchinfer" / "openai" / "errors.jsonl").exists()
    target.unlink()
    assert capsys.readouterr().out == ""
    assert run_batch(replace(options, quiet=False)) is ExitCode.OK
    assert target.read_bytes() == written
    assert capsys.readouterr().out.splitlines()[-1] == f"answers  {target}"


def test_batch_with_several_prompts_echo_and_vllm_fields(model: Path, tmp_path: Path) -> None:
    words = {"prompt": "hello world", "max_tokens": 3, "temperature": 0}
    template = {"messages": HELLO, "max_tokens": 1, "temperature": 0}
    requests = [
        request("plain", TEXT, **words, logprobs=1),
        request("echoed", TEXT, **words, logprobs=1, echo=True),
        request("ids", TEXT, **{**words, "prompt": [5, 6, 7]}, echo=True),
        request("several", TEXT, **{**words, "prompt": ["hello world", "stop"]}, n=2, echo=True),
        request("chosen", **{**template, "max_tokens": 9}, guided_choice=["yes"]),
        request("talk", **template, model="another"),
        request("templated", **template, chat_template_kwargs={"messages_are": "ignored"}),
    ]
    found = answers(tmp_path, model, requests, max_model_len=64).values()
    plain, echoed, of_ids, several, chosen, *talks = (line["response"]["body"] for line in found)

    (choice,), (with_echo,) = plain["choices"], echoed["choices"]
    assert with_echo["text"] == "hello world" + choice["text"]
    tokens, scores = (with_echo["logprobs"][key] for key in ("tokens", "token_logprobs"))
    assert "".join(tokens).startswith("hello world")
    assert [score is None for score in scores] == [True] + [False] * (len(scores) - 1)
    num_prompt = plain["usage"]["prompt_tokens"]
    assert scores[num_prompt:] == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-4)
    _check_scores(model, scores[1:num_prompt])
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert of_ids["choices"][0]["text"].startswith(tokenizer.decode([5, 6, 7]))
    texts = [choice["text"] for choice in several["choices"]]
    assert [choice["index"] for choice in several["choices"]] == [0, 1, 2, 3]
    assert texts[:2] == [with_echo["text"]] * 2
    assert all(text.startswith("stop") for text in texts[2:])
    assert several["usage"]["prompt_tokens"] > num_prompt
    assert chosen["choices"][0]["message"]["content"] == "yes"
    assert talks[0]["choices"] == talks[1]["choices"]
    assert talks[0]["model"] == "another"
    for body in (plain, several, talks[0]):
        usage = body["usage"]
        assert 0 <= usage["prompt_tokens_details"]["cached_tokens"] <= usage["prompt_tokens"]


def _check_scores(model: Path, found: list[float]) -> None:
    """Check that log-probabilities of the prompt's tokens equal transformers'."""
    ids = AutoTokenizer.from_pretrained(model)("hello world", return_tensors="pt").input_ids
    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(model).eval()(ids).logits
    wanted = logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    assert found == pytest.approx(wanted.tolist(), abs=1e-4)
