from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from batchinfer.engine.kv.layout import KVLayout
from batchinfer.engine.step import SamplingBatch
from batchinfer.worker.attention.attention import ATTENTION_NAME, register
from batchinfer.worker.attention.temperature import temper_queries
from batchinfer.worker.kv_cache import KVCache
from batchinfer.worker.model_runner import ModelRunner
from batchinfer.worker.sampling.output import SampleHandle
from tests.models import VOCAB_SIZE, tiny_model
from tests.worker.step_maker import HandSequence, StepMaker

NEAR_TIE = 1e-4


def greedy(logits: torch.Tensor, batch: SamplingBatch) -> SampleHandle:
    """Take the most likely tokens, in place of the sampler."""
    ids = logits[torch.from_numpy(batch.logits_rows).long()].argmax(-1)
    zeros = torch.zeros(len(ids))
    return SampleHandle(ids, zeros, zeros > 0)


def make_runner(family: str, num_blocks: int = 64) -> tuple[ModelRunner, StepMaker]:
    register()
    model = tiny_model(family)
    model.set_attn_implementation(ATTENTION_NAME)
    temper_queries(model)
    layout = KVLayout.from_config(model.config.to_dict(), block_size=4, dtype="float32")
    cache = KVCache(layout, num_blocks, torch.device("cpu"), torch.float32)
    return ModelRunner(model, cache, greedy), StepMaker(num_blocks, 4)


def generate(family: str, prompts: list[list[int]], num_tokens: int, chunk: int) -> list[list[int]]:
    """Generate greedily for all prompts together; prompts are computed in chunks."""
    runner, maker = make_runner(family)
    sequences = [maker.sequence(prompt) for prompt in prompts]
    targets = [len(prompt) + num_tokens for prompt in prompts]
    while True:
        parts: list[tuple[HandSequence, int]] = []
        for sequence, target in zip(sequences, targets, strict=True):
            if len(sequence.token_ids) < target:
                left = len(sequence.token_ids) - sequence.num_computed
                parts.append((sequence, min(chunk, left)))
        if not parts:
            return [s.token_ids[len(p) :] for s, p in zip(sequences, prompts, strict=True)]
        result = runner.submit(maker.step(parts)).result()
        tokens = iter(result.token_ids.tolist())
        for sequence, _ in parts:
            if sequence.num_computed == len(sequence.token_ids):
                sequence.token_ids.append(next(tokens))


def test_graphs_are_freed_before_others_are_captured() -> None:
    runner, _ = make_runner("llama")

    class Graphs:
        pass

    def capture() -> Any:
        freed.append(first() is None)
        return Graphs()

    made, freed = [Graphs()], list[bool]()
    first = weakref.ref(made[0])
    runner.recapture(made.pop)  # type: ignore[arg-type]
    runner.recapture(capture)
    assert freed == [True]


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma2", "gpt_oss", "gpt2"])
@pytest.mark.parametrize("chunk", [7, 64])
def test_greedy_tokens_equal_generate(family: str, chunk: int) -> None:
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, VOCAB_SIZE, n).tolist() for n in (23, 5, 12)]
    got = generate(family, prompts, 8, chunk)
    model = tiny_model(family)
    for prompt, tokens in zip(prompts, got, strict=True):
        with torch.inference_mode():
            reference = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=8,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
        expected = reference.sequences[0, len(prompt) :].tolist()
        for position, (token, wanted) in enumerate(zip(tokens, expected, strict=True)):
            if token != wanted:
                row = reference.logits[position][0]
                assert row[wanted] - row[token] < NEAR_TIE
                break


def test_a_step_of_prefill_alone_samples_nothing() -> None:
    runner, maker = make_runner("llama")
    sequence = maker.sequence(list(range(20)))
    result = runner.submit(maker.step([(sequence, 11)])).result()
    assert len(result.token_ids) == len(result.logprobs) == len(result.nonfinite) == 0


def test_a_step_takes_its_tokens_from_the_previous_samples() -> None:
    prompts = [[5, 6, 7], [8, 9]]

    def second_step(known: bool) -> list[int]:
        """Return the second tokens; unless ``known``, the first ones are only on the device."""
        runner, maker = make_runner("llama")
        sequences = [maker.sequence(prompt) for prompt in prompts]
        first = runner.submit(maker.step([(s, len(s.token_ids)) for s in sequences])).result()
        for sequence, token in zip(sequences, first.token_ids.tolist(), strict=True):
            sequence.token_ids.append(token if known else 0)
        # A third sequence has its tokens from the host; the other two change their order.
        third = maker.sequence([3, 4])
        step = maker.step([(sequences[1], 1), (third, 2), (sequences[0], 1)])
        if not known:
            step = replace(step, previous_sample=np.array([1, -1, -1, 0], np.int32))
        return runner.submit(step).result().token_ids.tolist()

    assert second_step(known=False) == second_step(known=True)


def test_block_copies_come_before_the_forward_pass() -> None:
    runner, maker = make_runner("llama")
    prompt = list(range(10, 17))
    first, second = maker.sequence(prompt), maker.sequence(prompt)
    expected = runner.submit(maker.step([(first, 7)])).token_ids[0]
    blocks = [maker.free.pop(), maker.free.pop()]
    copies = tuple(zip(first.block_table, blocks, strict=True))
    second.block_table, second.num_computed = blocks, 6
    assert runner.submit(maker.step([(second, 1)], copies=copies)).token_ids[0] == expected


def test_device_bytes_are_weights_and_pool() -> None:
    runner, _ = make_runner("llama", num_blocks=64)
    more, _ = make_runner("llama", num_blocks=164)
    per_block = 3 * 2 * (8 + 8) * 4 * 4
    assert more.device_bytes() - runner.device_bytes() == 100 * per_block
    weights = sum(p.nbytes for p in tiny_model("llama").parameters())
    assert 0 <= runner.device_bytes() - 65 * per_block - weights < 1024
