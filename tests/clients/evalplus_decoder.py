"""EvalPlus's decoder for vLLM: continues prompts, and writes its texts and stop strings."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from evalplus.provider.vllm import VllmDecoder

model, source, target = sys.argv[1:]
task = json.loads(Path(source).read_text())
decoder = VllmDecoder(
    name=model,
    dataset="humaneval",
    force_base_prompt=True,
    temperature=0.0,
    max_new_tokens=task["max_tokens"],
    dtype="float32",
)
texts = [decoder.codegen(prompt, do_sample=False, num_samples=1)[0] for prompt in task["prompts"]]
Path(target).write_text(json.dumps({**task, "texts": texts, "stop": decoder.eos}))
