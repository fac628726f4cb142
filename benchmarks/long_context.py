"""Checks the results and the memory of one long sequence on a CPU.

    python benchmarks/long_context.py [--tokens 131072] [--outputs 16] [--block-size 16]

A random Llama of two small layers with Llama 3.1's scaled positions prefills one prompt in chunks,
then decodes. Keys and values at every position and layer, and the log probability of every output
token, are compared with transformers on the whole sequence (with torch's attention, which allocates
no matrix of scores). Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers import PreTrainedTokenizerFast as Fast

from batchinfer.builders.engine import build_engine
from batchinfer.config import EngineConfig, ModelConfig, SamplingParams
from batchinfer.engine.engine import Engine
from batchinfer.engine.request import Completion, Request
from batchinfer.engine.step import Step
from batchinfer.worker.kv_cache import KVCache
from batchinfer.worker.memory import MemoryPlan

VOCAB_SIZE = 64
MAX_LEN = 131072 + 64


def make_model(path: Path) -> Path:
    """Create a model with hidden width 64 and two query heads per KV head, in float32."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=MAX_LEN,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 16.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=None,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    words = Tokenizer(models.WordLevel({f"t{at}": at for at in range(VOCAB_SIZE)}, unk_token="t0"))
    Fast(tokenizer_object=words).save_pretrained(path)
    return path


def peak_rss() -> int:
    """Return this process's peak memory in bytes. (``ru_maxrss`` may include the parent
    process.)"""
    status = Path("/proc/self/status").read_text()
    (kib,) = (line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(kib) * 1024


class Watched:
    """A runner that stores the last step."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.cache: KVCache = runner._runner._cache  # inside the runner that sets threads
        self.step: Step | None = None

    def submit(self, step: Step) -> Any:
        self.step = step
        return self._runner.submit(step)


@dataclass(frozen=True)
class Generated:
    """The completion, and seconds of prefill and decode."""

    completion: Completion
    prefill_s: float
    decode_s: float


def generate(engine: Engine, prompt: Any, num_outputs: int) -> Generated:
    params = SamplingParams(max_tokens=num_outputs, temperature=0.0, logprobs=0, ignore_eos=True)
    engine.add_request(Request(0, prompt, params, (1, 0)))
    began = first = time.perf_counter()
    completions: list[Completion] = []
    while engine.num_unfinished:
        outcome = engine.step()
        completions += outcome.completions
        if outcome.stats is not None and outcome.stats.prefill_tokens:
            first = time.perf_counter()
    return Generated(completions[0], first - began, time.perf_counter() - first)


def largest_errors(folder: Path, runner: Watched, completion: Completion) -> dict[str, float]:
    """Return the largest errors of keys and values, and of logprobs, against transformers."""
    (output,) = completion.outputs
    count = len(output.token_ids)
    tokens = torch.tensor([*completion.request.prompt_token_ids, *output.token_ids])
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
    with torch.inference_mode():
        found = model(input_ids=tokens[None, :-1], use_cache=True, logits_to_keep=count)
    logprobs = found.logits[0].log_softmax(-1).gather(1, tokens[-count:, None])[:, 0]
    got = torch.tensor([entry.logprob for entry in output.logprobs or ()])
    assert runner.step is not None
    table = torch.from_numpy(runner.step.block_tables[0]).long()
    differences = [
        stored.transpose(1, 2).flatten(0, 1)[: len(tokens) - 1] - expected[0].transpose(0, 1)
        for layer, entry in enumerate(found.past_key_values.layers)
        for expected, stored in zip(
            (entry.keys, entry.values), runner.cache.read(layer, table), strict=True
        )
    ]
    kv = max(float(difference.abs().max()) for difference in differences)
    return {"kv_error": kv, "logprob_error": float((got - logprobs).abs().max())}


def planned_bytes(plan: MemoryPlan) -> int:
    """Return the planned memory without the swap space, which this program never uses."""
    parts = (plan.weight_bytes, plan.adapter_bytes, plan.pool_bytes, plan.graph_bytes)
    return sum(parts) + plan.activation_bytes + plan.logits_bytes


def run(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    # Run a small layer first, so that the memory that torch takes at start-up is not counted.
    torch.nn.Linear(64, 64)(torch.zeros(1024, 64))
    before = peak_rss()
    settings = EngineConfig(
        device="cpu",
        block_size=args.block_size,
        max_num_seqs=1,
        num_kv_blocks=-(-(args.tokens + args.outputs) // args.block_size),
    )
    model = ModelConfig(str(folder), max_model_len=args.tokens + args.outputs)
    built = build_engine(model, settings, log=lambda _: None)
    assert built.memory is not None
    runner = Watched(built.engine._runner)
    built.engine._runner = runner
    prompt = np.random.default_rng(0).integers(2, VOCAB_SIZE, args.tokens).astype(np.int32)
    generated = generate(built.engine, prompt, args.outputs)
    peak = peak_rss()
    return {
        "tokens": args.tokens,
        "outputs": args.outputs,
        "prefill_s": round(generated.prefill_s, 2),
        "decode_s": round(generated.decode_s, 2),
        "planned_mib": round(planned_bytes(built.memory) / 2**20, 1),
        "taken_mib": round((peak - before) / 2**20, 1),
        "memory": asdict(built.memory),
        **largest_errors(folder, runner, generated.completion),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Check one long sequence on a CPU.")
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--outputs", type=int, default=16)
    parser.add_argument("--block-size", type=int, default=16)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(run(make_model(Path(folder)), args)))


if __name__ == "__main__":
    main()
