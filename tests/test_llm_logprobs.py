"""Log-probabilities of ids that a call asks for, and ``LLM(logprobs_mode=...)``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from batchinfer import LLM, BeamSearchParams, RequestOutput, SamplingParams

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
MODES = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")


def run(llm: LLM, prompts: Any, params: Any) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False)


def own_logits(model: Path, tokens: Sequence[int]) -> torch.Tensor:
    """Return transformers' logits at each token."""
    reference = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        logits: torch.Tensor = reference(input_ids=torch.tensor([tokens])).logits[0].float()
    return logits


@pytest.mark.parametrize("flat", [False, True])
def test_logprob_token_ids_replace_the_most_likely(llm: LLM, model: Path, flat: bool) -> None:
    named = [200, 9, 9, 150]
    params = replace(GREEDY, logprob_token_ids=named, flat_logprobs=flat)
    plain = replace(GREEDY, logprobs=1)
    output, without_logprobs = run(llm, [[5, 6, 7], [5, 6, 7]], [params, plain])
    (sample,) = output.outputs
    assert sample.token_ids == without_logprobs.outputs[0].token_ids
    own = own_logits(model, [5, 6, 7, *sample.token_ids]).log_softmax(-1)[2:]
    assert sample.logprobs is not None
    assert len(sample.logprobs) == 6
    for found, token, expected in zip(sample.logprobs, sample.token_ids, own, strict=False):
        assert [*found] == [*dict.fromkeys([token, *named])], (
            "the drawn token comes first, then the named ids"
        )
        for token_id, entry in found.items():
            assert entry.logprob == pytest.approx(float(expected[token_id]), abs=1e-4)
            assert entry.rank == (1 if token_id == token else None)
            assert entry.decoded_token is not None


def test_logprob_token_ids_with_a_grammar(llm: LLM) -> None:
    """Results mark tokens that the grammar excludes or forces."""
    params = SamplingParams(
        n=2,
        max_tokens=4,
        seed=1,
        logprob_token_ids=(0, 1),
        structured_outputs={"choice": ["abc", "abd"]},
    )
    (output,) = run(llm, "a", params)
    for sample in output.outputs:
        assert sample.logprobs is not None
        for found, token in zip(sample.logprobs, sample.token_ids, strict=True):
            others = {found[at].logprob for at in (0, 1) if at != token}
            assert others <= {-math.inf}


def test_prompt_logprob_token_ids_are_scored_at_their_tokens(llm: LLM, model: Path) -> None:
    prompt = [5, 90, 17, 33, 60, 21, 9]
    own = own_logits(model, prompt).log_softmax(-1).numpy()
    rows = [[t, 3] if at % 2 else [t] for at, t in enumerate(prompt[1:])]
    whole = replace(GREEDY, max_tokens=1, prompt_logprob_token_ids=rows, prompt_logprobs=0)
    later = replace(whole, prompt_logprob_token_ids=rows[2:], prompt_logprob_start=2)
    alone = replace(later, prompt_logprobs=None)
    cells = np.arange(18, dtype=np.uint8).reshape(6, 3)
    table = replace(GREEDY, prompt_logprob_token_ids=cells)
    assert table == replace(GREEDY, prompt_logprob_token_ids=list(cells))
    found = run(llm, [prompt] * 4, [whole, later, alone, table])
    scores = [output.prompt_token_id_logprobs for output in found]
    assert scores[0] is not None
    assert scores[1] is not None
    assert scores[0].dtype == np.float32
    padded = np.array([[t, 3 if at % 2 else -1] for at, t in enumerate(prompt[1:])])
    expected = np.where(padded < 0, -np.inf, np.take_along_axis(own[:6], padded.clip(0), axis=1))
    np.testing.assert_allclose(scores[0], expected, atol=1e-4)
    np.testing.assert_array_equal(scores[1], scores[0][2:])
    np.testing.assert_array_equal(scores[2], scores[0][2:])
    np.testing.assert_allclose(
        scores[3], own[:6, :18].reshape(6, 6, 3)[range(6), range(6)], atol=1e-4
    )
    assert [output.prompt_logprobs is None for output in found] == [False, False, True, True]
    of_prompt = found[0].prompt_logprobs
    for row, token in enumerate(prompt[1:]):
        entries = of_prompt[row + 1]
        assert entries[token].logprob == scores[0][row, 0]


def test_prompt_logprob_token_ids_with_chunks_and_preemptions(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = LLM(model, num_kv_blocks=14, block_size=4, max_num_batched_tokens=8, max_num_seqs=4)
    large = LLM(model, num_kv_blocks=256, block_size=4)
    prompts = [[(7 * at + 11 * i) % 250 + 2 for i in range(9 + at)] for at in range(8)]
    params = [
        SamplingParams(
            max_tokens=12,
            temperature=0.0,
            ignore_eos=True,
            prompt_logprob_token_ids=[[at, at + 40, i] for i in range(len(prompt) - 2)],
            prompt_logprob_start=1,
        )
        for at, prompt in enumerate(prompts)
    ]
    engine, steps = small._context.engine, itertools.count()
    step = engine.step

    def preempt_and_step() -> Any:
        if next(steps) % 3 == 2 and engine.num_running:
            *_, newest = engine.scheduler.table.running()
            engine.scheduler.preempt(newest)
        return step()

    monkeypatch.setattr(engine, "step", preempt_and_step)
    expected = run(large, prompts, params)
    found = run(small, prompts, params)
    again = run(small, prompts, params)  # more than the prefix cache holds
    assert small.stats()["kv"]["preemptions"] > 0
    for ours, whole in zip((*found, *again), expected * 2, strict=True):
        np.testing.assert_allclose(
            ours.prompt_token_id_logprobs, whole.prompt_token_id_logprobs, atol=1e-4
        )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"logprob_token_ids": [-1]}, "logprob_token_ids has -1; token ids are 0 or more"),
        ({"logprob_token_ids": [5, 9999]}, "has 9999, which is out-of-vocab; .* below"),
        ({"logprob_token_ids": [5] * 129}, "has 129 ids; at most 128 are"),
        ({"logprob_token_ids": [5], "logprobs": 3}, "logprobs is 3, but logprob_token_ids has 1"),
        ({"prompt_logprob_token_ids": [1, 2]}, r"shape \[num_rows, num_ids\]"),
        ({"prompt_logprob_token_ids": [[], []]}, "non-empty, but all of its 2 rows"),
        ({"prompt_logprob_token_ids": [[5], [True]]}, "row 1 must be a list of integer token ids"),
        ({"prompt_logprob_token_ids": [[5], [9999]]}, "has 9999, which is out-of-vocab; .* below"),
        ({"prompt_logprob_token_ids": [[5] * 21] * 2}, "max_logprobs is 20; .* at least 21"),
        (
            {"prompt_logprob_token_ids": [[5]] * 600},
            "600 rows; a prompt has at most .* scored rows",
        ),
        (
            {"prompt_logprob_token_ids": [[5]]},
            "has 1 rows, but the prompt of 3 tokens needs 2",
        ),
        ({"logprob_token_ids": [5], "beam_width": 2}, "cannot be combined with beam"),
        ({"prompt_logprob_start": 3}, "prompt_logprob_start requires prompt_logprob_token_ids"),
        (
            {"prompt_logprob_start": -1, "prompt_logprob_token_ids": [[5]]},
            "prompt_logprob_start is",
        ),
    ],
)
def test_invalid_logprob_token_ids_are_refused(
    llm: LLM, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        run(llm, [5, 6, 7], SamplingParams(**given))


def test_params_with_prompt_logprob_token_ids_compare_and_change() -> None:
    params = SamplingParams(prompt_logprob_token_ids=[[1], [2, 3]])
    assert params == params.clone()
    assert params != SamplingParams(prompt_logprob_token_ids=[[1], [2, 4]])
    assert params != SamplingParams()
    params.prompt_logprob_token_ids = np.array([[4, 5]])
    assert params == SamplingParams(prompt_logprob_token_ids=[[4, 5]])
    assert params.prompt_logprob_token_ids.dtype == np.int32


def test_logprobs_mode(model: Path) -> None:
    prompt = [5, 6, 7]
    params = SamplingParams(
        max_tokens=3,
        temperature=0.5,
        top_k=5,
        seed=3,
        ignore_eos=True,
        logprobs=8,
        prompt_logprobs=1,
    )
    found = {}
    for mode in MODES:
        llm = LLM(model, num_kv_blocks=16, logprobs_mode=mode)
        (found[mode],) = run(llm, prompt, params)
        if mode == "raw_logits":
            (beams,) = llm.beam_search(prompt, BeamSearchParams(beam_width=2, max_tokens=3))
            assert all((beam.cumulative_logprob or 1) < 0 for beam in beams.outputs)
    (tokens,) = {tuple(output.outputs[0].token_ids) for output in found.values()}
    logits = own_logits(model, [*prompt, *tokens])
    halved = logits / 0.5
    kept = halved.where(halved >= halved.topk(5).values[:, -1:], -math.inf)
    expected = {
        "raw_logprobs": logits.log_softmax(-1),
        "processed_logprobs": kept.log_softmax(-1),
        "raw_logits": logits,
        "processed_logits": kept,
    }
    for mode, output in found.items():
        assert output.outputs[0].logprobs is not None
        for entries, own in zip(output.outputs[0].logprobs, expected[mode][2:5], strict=True):
            for token_id, entry in entries.items():
                assert entry.logprob == pytest.approx(float(own[token_id]), abs=1e-4)
        entries = output.prompt_logprobs[2]
        own = logits[1] if "logits" in mode else logits[1].log_softmax(-1)
        assert entries[7].logprob == pytest.approx(float(own[7]), abs=1e-4)


def test_an_unknown_logprobs_mode_is_refused(model: Path) -> None:
    for wrong in ("raw", None, ["raw_logits"]):
        with pytest.raises(ValueError, match=r"logprobs_mode is .*; it must be one of"):
            LLM(model, logprobs_mode=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["raw_logprobs", "raw_logits"])
def test_logprobs_of_beams_are_what_the_search_adds_up(model: Path, mode: str) -> None:
    llm = LLM(model, num_kv_blocks=64, logprobs_mode=mode)
    params = SamplingParams(
        beam_width=3, n=2, max_tokens=5, logprobs=-1, min_tokens=2, logit_bias={40: 3.0}
    )
    (output,) = run(llm, [5, 6, 7], params)
    for beam in output.outputs:
        values = own_logits(model, [5, 6, 7, *beam.token_ids])[2:-1].log_softmax(-1)
        values[:, 40] += 3
        pairs = list(zip(values, beam.logprobs, beam.token_ids, strict=True))
        own = [float(row[token]) for row, _, token in pairs]
        found = [entry[token].logprob for _, entry, token in pairs]
        assert found == pytest.approx(own, abs=1e-4)
        assert beam.cumulative_logprob == pytest.approx(sum(own), abs=1e-4)
        assert [len(entry) for entry in beam.logprobs] == [values.shape[1]] * len(found)
