"""distilabel's ``vLLM``: answers chats, and writes its texts and the prompts that it rendered."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from distilabel.models.llms import vLLM

model, source, target = sys.argv[1:]
task = json.loads(Path(source).read_text())
llm = vLLM(model=model, dtype="float32", disable_cuda_device_placement=True)
llm.load()
chats = [[{"role": "user", "content": prompt}] for prompt in task["prompts"]]
outputs = llm.generate_outputs(inputs=chats, max_new_tokens=task["max_tokens"], temperature=0.0)
texts = [output["generations"][0] for output in outputs]
prompts = [llm.prepare_input(chat) for chat in chats]
llm.unload()
Path(target).write_text(json.dumps({**task, "texts": texts, "prompts": prompts, "stop": []}))
