"""What structured output costs of a job's time.

    python benchmarks/masks.py FOLDER [--rows 192] [--dtype bfloat16]

Random weights of a Llama of 88 M parameters, with a byte-level vocabulary of 50,000 tokens that is
made of the standard library's sources; 64 rows at a time, each under one of six schemas, up to 64
tokens. Timers lie around the three functions that only such rows go through; one JSON line says
their shares of the time from the first prompt to the last text.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from models import SMALL
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from batchinfer import LLM, SamplingParams
from batchinfer.engine.step_io import process_result, sampling_batch
from batchinfer.worker.sampling import on_cpu

VOCAB_SIZE = 50_000
AT_A_TIME = 64
MAX_TOKENS = 64
_NAME = {"type": "string", "minLength": 1, "maxLength": 12}
_AGE = {"type": "integer", "minimum": 0, "maximum": 120}
_TONE = {"enum": ["positive", "negative", "neutral"]}
_PERSON = {"type": "object", "properties": {"name": _NAME, "age": _AGE}, "required": ["name"]}
SCHEMAS: tuple[dict[str, Any], ...] = (
    _PERSON,
    {"type": "object", "properties": {"tone": _TONE, "why": {"type": "string"}}},
    {"type": "array", "items": _PERSON, "minItems": 1, "maxItems": 3},
    {"type": "object", "properties": {"id": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"}}},
    {"anyOf": [_PERSON, {"type": "array", "items": {"type": "number"}}]},
    {"type": "object", "additionalProperties": {"type": "string"}},
)


def make_model(path: Path) -> Path:
    """Random weights and the vocabulary; half a minute, once."""
    if (path / "tokenizer.json").exists():
        return path
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, tie_word_embeddings=True, eos_token_id=0, pad_token_id=None, **SMALL
    )
    LlamaForCausalLM(config).save_pretrained(path)
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*/*.py"))
    texts = (source.read_text(encoding="utf-8", errors="replace") for source in sources)
    backend.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    tokenizer.save_pretrained(path)
    return path


class Timers:
    """Seconds spent in functions, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def watch(self, module: Any, name: str) -> None:
        """Time every call that ``module`` makes of its function ``name``."""
        function: Callable[..., Any] = getattr(module, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[name] += time.perf_counter() - began

        self.seconds[name] = 0.0
        setattr(module, name, timed)

    def start(self) -> None:
        """From zero."""
        self.seconds = dict.fromkeys(self.seconds, 0.0)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="What structured output costs.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=192)
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    timers = Timers()
    timers.watch(sampling_batch, "grammar_masks")
    timers.watch(on_cpu, "forbid_masked")
    timers.watch(process_result, "add_forced_tokens")
    llm = LLM(make_model(args.folder / "masks"), dtype=args.dtype, max_num_seqs=AT_A_TIME)
    prompts = [f"Row {at}: write a record about item {at * 7 % 13}." for at in range(args.rows)]
    params = [
        SamplingParams(
            max_tokens=MAX_TOKENS,
            seed=1,
            temperature=0.8,
            structured_outputs={"json": SCHEMAS[at % len(SCHEMAS)]},
        )
        for at in range(args.rows)
    ]
    llm.generate(prompts[:AT_A_TIME], params[:AT_A_TIME], use_tqdm=False)  # compiles the schemas
    timers.start()
    began = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    took = time.perf_counter() - began
    assert not any(output.error for output in outputs)
    result = {
        "rows": args.rows,
        "dtype": args.dtype,
        "threads": torch.get_num_threads(),
        "output_tokens": sum(len(output.outputs[0].token_ids) for output in outputs),
        "seconds": round(took, 2),
        "share": {name: round(spent / took, 4) for name, spent in timers.seconds.items()},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
