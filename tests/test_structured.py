"""Structured output of tiny random models is valid, and equals that of transformers.

The grammars of some rows do not change the results of other rows.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, LogitsProcessorList

from batchinfer import LLM, BeamSearchParams, SamplingParams
from batchinfer.errors import ExitCode, UsageError
from batchinfer.job.run.run_job import run_job
from batchinfer.job.spec.load import load_job
from tests.text.schemas import SCHEMAS

EOS = 2


@pytest.fixture(scope="module")
def llm(model: Path) -> LLM:
    return LLM(str(model), dtype="float32", num_kv_blocks=600, max_num_seqs=64)


class Masked(LogitsProcessor):  # type: ignore[misc]
    """Applies a grammar in transformers' ``generate``."""

    def __init__(self, model: Path, pattern: str, prompt: int) -> None:
        serialized = AutoTokenizer.from_pretrained(model).backend_tokenizer.to_str()
        tokenizer = LLTokenizer(serialized, n_vocab=259, eos_token=[EOS])
        self._beginning = LLMatcher(tokenizer, LLMatcher.grammar_from_regex(pattern))
        self._prompt = prompt

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        masks = allocate_token_bitmask(len(input_ids), 259)
        for row, ids in enumerate(input_ids[:, self._prompt :].tolist()):
            matcher = self._beginning.deep_copy()
            matcher.consume_tokens(ids)
            fill_next_token_bitmask(matcher, masks, row)
        bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little", count=259)
        return scores.masked_fill(torch.from_numpy(bits == 0), -torch.inf)


PATTERNS = [
    r"(yes|no|perhaps), because [a-z ]{5,20}\.",
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}",
    r"[A-Z]+( [A-Z]+)*",
]


def test_greedy_structured_text_equals_transformers(llm: LLM, model: Path) -> None:
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = ["Is it so?", "When?", "Shout! " * 9]
    asked = [(prompt, pattern) for prompt in prompts for pattern in PATTERNS]
    outputs = llm.generate(
        [prompt for prompt, _ in asked],
        [
            SamplingParams(max_tokens=40, temperature=0, structured_outputs={"regex": pattern})
            for _, pattern in asked
        ],
        use_tqdm=False,
    )
    for (prompt, pattern), output in zip(asked, outputs, strict=True):
        inputs = tokenizer(prompt, return_tensors="pt")
        masked = Masked(model, pattern, inputs["input_ids"].shape[1])
        ids = reference.generate(
            **inputs,
            max_new_tokens=40,
            do_sample=False,
            eos_token_id=EOS,
            pad_token_id=0,
            logits_processor=LogitsProcessorList([masked]),
        )[0]
        (sample,) = output.outputs
        assert sample.token_ids == ids[inputs["input_ids"].shape[1] :].tolist()
        assert (sample.finish_reason == "stop") == (sample.token_ids[-1] == EOS)
        if sample.finish_reason == "stop":
            assert re.fullmatch(pattern, sample.text)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_structured_beams_equal_transformers(llm: LLM, model: Path, pattern: str) -> None:
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    inputs = AutoTokenizer.from_pretrained(model)("When?", return_tensors="pt")
    prompt = inputs["input_ids"].shape[1]
    found = reference.generate(
        **inputs,
        max_new_tokens=12,
        num_beams=3,
        num_return_sequences=3,
        do_sample=False,
        eos_token_id=EOS,
        pad_token_id=0,
        logits_processor=LogitsProcessorList([Masked(model, pattern, prompt)]),
        renormalize_logits=True,
        return_dict_in_generate=True,
        output_scores=True,
    )
    params = BeamSearchParams(3, 12, structured_outputs={"regex": pattern})
    (output,) = llm.beam_search("When?", params, use_tqdm=False)
    for beam, ids, score in zip(
        output.outputs, found.sequences, found.sequences_scores, strict=True
    ):
        assert beam.token_ids == ids[prompt : prompt + len(beam.token_ids)].tolist()
        assert beam.score == pytest.approx(float(score), abs=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_finished_json_is_valid(llm: LLM, temperature: float) -> None:
    num_samples = 2 if temperature else 1
    names = [name for name in SCHEMAS for _ in range(6)]
    params = [
        SamplingParams(
            max_tokens=160,
            temperature=temperature,
            n=num_samples,
            seed=at,
            structured_outputs={"json": SCHEMAS[name]},
        )
        for at, name in enumerate(names)
    ]
    outputs = llm.generate([f"Row {at}:" for at in range(len(names))], params, use_tqdm=False)
    ended = 0
    for name, output in zip(names, outputs, strict=True):
        assert output.error is None
        for sample in output.outputs:
            if sample.finish_reason == "stop":
                jsonschema.validate(json.loads(sample.text), SCHEMAS[name])
                ended += 1
            else:
                assert len(sample.token_ids) == 160
    assert ended > 30 * num_samples


@pytest.mark.parametrize(
    "texts",
    [[f"c{number}" for number in range(10_000)], ["a", "ab", 'a"b', "a|b\\n", "é\n"]],
    ids=["many", "odd"],
)
def test_choice_with_a_long_list(llm: LLM, texts: list[str]) -> None:
    params = SamplingParams(max_tokens=40, n=4, seed=3, structured_outputs={"choice": texts})
    (output,) = llm.generate(["Choose:"], params, use_tqdm=False)
    assert output.error is None
    assert {sample.finish_reason for sample in output.outputs} == {"stop"}
    assert {sample.text for sample in output.outputs} <= set(texts)


def test_structured_text_does_not_depend_on_batch_or_pool_size(llm: LLM, model: Path) -> None:
    prompts = [f"A row that says {at} and a little more." for at in range(24)]
    free = SamplingParams(max_tokens=30, seed=5, temperature=1.0, n=2)
    within = SamplingParams(
        max_tokens=60, seed=5, n=2, structured_outputs={"json": SCHEMAS["records"]}
    )
    params = [within if at % 2 else free for at in range(24)]
    mixed = llm.generate(prompts, params, use_tqdm=False)
    small = LLM(str(model), dtype="float32", num_kv_blocks=40, max_num_seqs=16, swap_space=0)
    tight = small.generate(prompts, params, use_tqdm=False)
    assert small.stats()["kv"]["preemptions"] > 0
    for at in range(24):
        (alone,) = llm.generate([prompts[at]], params[at], use_tqdm=False)
        for one, two, three in zip(
            mixed[at].outputs, tight[at].outputs, alone.outputs, strict=True
        ):
            assert one.token_ids == two.token_ids == three.token_ids
            assert one.cumulative_logprob == two.cumulative_logprob == three.cumulative_logprob


def test_complete_structured_text_ends_before_min_tokens(llm: LLM) -> None:
    params = SamplingParams(max_tokens=30, min_tokens=30, structured_outputs={"choice": ["ab"]})
    (output,) = llm.generate(["a"], params, use_tqdm=False)
    assert output.error is None
    assert output.outputs[0].text == "ab"


def test_invalid_grammar_is_refused_before_prompts_run(llm: LLM) -> None:
    bad = SamplingParams(structured_outputs={"regex": "("})
    with pytest.raises(ValueError, match=r"prompt 1: structured_outputs: a regular expression"):
        llm.generate(["a", "b"], [SamplingParams(), bad], use_tqdm=False)


def job(folder: Path, model: Path, sampling: str) -> Path:
    path = folder / "job.yaml"
    path.write_text(
        f"model: {{name: {model}, dtype: float32}}\n"
        "input: {path: in.parquet}\nprompt: {chat_template: none}\n"
        f"sampling:\n  max_tokens: 120\n{sampling}\n"
        "engine: {num_kv_blocks: 400, max_num_seqs: 16}\noutput: {path: out}\n"
        "errors: {max_error_rate: 0.5}\n"
    )
    return path


def test_job_and_row_grammars(tmp_path: Path, model: Path) -> None:
    cells = [
        None,
        '{"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": [1]}}}}',
        '{"structured_outputs": {"regex": "("}}',
        '{"guided_decoding": {"choice": ["left", "right"]}}',
        '{"structured_outputs": {"json": {"type": "strnig"}}}',
        '{"max_tokens": 3}',
    ]
    prompts = [f"Row {at}" for at in range(len(cells))]
    pq.write_table(pa.table({"prompt": prompts, "sampling_params": cells}), tmp_path / "in.parquet")
    schema = json.dumps(SCHEMAS["array"])
    spec = load_job(job(tmp_path, model, f"  structured_outputs: {{json: {schema}}}"))
    assert run_job(spec, quiet=True) is ExitCode.OK
    rows = pq.read_table(tmp_path / "out" / "data").to_pylist()
    jsonschema.validate(json.loads(rows[0]["generated_text"]), SCHEMAS["array"])
    assert json.loads(rows[1]["generated_text"]) == [1]
    assert rows[3]["generated_text"] in ("left", "right")
    assert rows[5]["outputs"][0]["finish_reason"] == "length"
    failed = {at: row["error"]["code"] for at, row in enumerate(rows) if row["error"]}
    assert failed == {2: "invalid_structured_output", 4: "invalid_structured_output"}


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        (
            "  structured_outputs:\n    regex: '(a'",
            "line 6: sampling.structured_outputs: a regular",
        ),
        ("  guided_decoding: {json: {type: strnig}}", "Invalid type: strnig"),
        ("  structured_outputs: {regex: '(a{1000}){1000}'}", "too many expressions"),
        ("  structured_outputs: {choice: [yes, 1]}", "choice contains 1, which is not a string"),
        ("  response_format: {type: json_schema}", "needs json_schema: {schema: ...}"),
    ],
)
def test_invalid_grammar_ends_job_before_the_model_loads(
    tmp_path: Path, sampling: str, message: str
) -> None:
    with pytest.raises(UsageError) as caught:
        load_job(job(tmp_path, tmp_path / "no-model", sampling))
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 12


def test_schema_property_order_is_part_of_the_job(tmp_path: Path, model: Path) -> None:
    pq.write_table(pa.table({"prompt": ["x"]}), tmp_path / "in.parquet")
    texts = [
        "{json: {type: object, properties: {a: {const: 1}, b: {const: 2}}, required: [a, b]}}",
        "{json: {type: object, properties: {b: {const: 2}, a: {const: 1}}, required: [a, b]}}",
    ]
    first, second = (
        load_job(job(tmp_path, model, f"  structured_outputs: {text}")).sampling for text in texts
    )
    assert first != second
    assert json.dumps(first.structured_outputs) != json.dumps(second.structured_outputs)
