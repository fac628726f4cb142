"""The texts that lm-eval's transformers back end writes for the prompts of other clients."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

model, *files = sys.argv[1:]
reference = HFLM(pretrained=model, dtype="float32", device="cpu", batch_size=8)
for source, target in zip(files[::2], files[1::2], strict=True):
    task = json.loads(Path(source).read_text())
    options = {"until": task["stop"], "max_gen_toks": task["max_tokens"], "do_sample": False}
    requests = [
        Instance("generate_until", {}, (prompt, dict(options)), at)
        for at, prompt in enumerate(task["prompts"])
    ]
    texts = [text.replace("\t", "    ") for text in reference.generate_until(requests)]
    Path(target).write_text(json.dumps({**task, "texts": texts}))
