"""Job files for tests."""

from __future__ import annotations

from pathlib import Path

MINIMAL = """\
model: some/model
input: {path: prompts.parquet}
sampling: {max_tokens: 8}
output: {path: out}
"""

SCORE = """\
task: score
model: some/model
input: {path: prompts.parquet}
score: {completions_column: choices}
output: {path: out}
"""

EVERY_KEY = """\
version: 1
name: summarize-{{ ds }}
task: generate                       # generate | score
vars: {ds: null}
model:
  name: Qwen/Qwen3-0.6B
  revision: null
  tokenizer: null
  dtype: auto
  max_model_len: null
  quantization: null
  adapters: {}
  trust_remote_code: false
input:
  path: lake/prompts/dt={{ ds }}/
  format: auto
  version: null
  schema: strict
  id_column: null
  filter: null
  keep_columns: "*"
  limit: null
prompt:
  column: null
  template: null
  messages: null
  token_ids_column: null
  adapter: null
  adapter_column: null
  system: null
  chat_template: auto
  chat_template_kwargs: {}
  tools: null
  tools_column: null
  tool_choice: auto
  parse_special_tokens: false
  on_too_long: error
sampling:
  max_tokens: 256
  n: 1
  min_tokens: 0
  temperature: 1.0
  top_p: 1.0
  top_k: 0
  min_p: 0.0
  presence_penalty: 0.0
  frequency_penalty: 0.0
  repetition_penalty: 1.0
  stop: []
  stop_token_ids: []
  include_stop_str_in_output: false
  ignore_eos: false
  skip_special_tokens: true
  seed: 0
  key: position
  logprobs: null
  prompt_logprobs: null
  logit_bias: null
  allowed_token_ids: null
  bad_words: []
  structured_outputs: null
  beam_width: null
  length_penalty: 1.0
  max_reasoning_tokens: null
accept: null
score: null
engine:
  preset: null
  device: auto
  num_threads: null
  block_size: 16
  gpu_memory_utilization: 0.9
  kv_cache_memory: null
  num_kv_blocks: null
  max_num_seqs: 1024
  max_num_batched_tokens: 8192
  enable_prefix_caching: true
  preemption: auto
  swap_space: 4GiB
  kv_cache_dtype: auto
  order: prefix
  order_window: 65536
  deterministic: false
  cpu_kernels: auto
output:
  path: out/summaries/dt={{ ds }}/
  format: parquet
  rows_per_part: 4096
  if_exists: resume
  explode: false
  include: []
  rename: {}
  reuse: []
  partition_by: []
  reasoning: none
  tool_parser: null
errors: {max_error_rate: 0.01, min_rows: null}
stats: {every_steps: 1}
on_end: {webhook: null, command: null}
"""
"""Every key of the job file, with its default if it has one."""


def write_job(folder: Path, text: str = MINIMAL) -> Path:
    """Write ``text`` as a job file in ``folder``."""
    path = folder / "job.yaml"
    path.write_text(text, encoding="utf-8")
    return path
