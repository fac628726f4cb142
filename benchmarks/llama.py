"""Runs llama.cpp through llama-cpp-python's low-level API, with continuous batching.

Only llama.cpp's engine is measured, not its server. Samples of a row share the KV cells of the
row's prompt.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from workloads import Row

_SEQUENCES = 64  # sequences that run together
_CELLS = 640  # KV cells per sequence
_BATCH = 1024  # tokens per step
_TYPES = {"float32": "F32", "bfloat16": "BF16", "q8_0": "Q8_0"}
_FILE_TYPES = {"float32": 0, "bfloat16": 32, "q8_0": 7}
_LAYER_TENSORS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_TENSORS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def make(model: str, kind: str, threads: int) -> Callable[[list[Row]], list[list[int]]]:
    """Load a Llama, and return a function that runs rows."""
    import llama_cpp as cpp

    path = _converted(Path(model), kind)
    cpp.llama_backend_init()
    loading = cpp.llama_model_default_params()
    loading.n_gpu_layers = 0
    loaded = cpp.llama_model_load_from_file(str(path).encode(), loading)
    asked = cpp.llama_context_default_params()
    asked.n_ctx, asked.n_batch, asked.n_seq_max = _SEQUENCES * _CELLS, _BATCH, _SEQUENCES
    asked.n_threads = asked.n_threads_batch = threads
    asked.kv_unified = True
    context = cpp.llama_init_from_model(loaded, asked)
    return lambda rows: _Batching(cpp, loaded, context, rows).run()


class _Batching:
    """Runs all samples of rows, up to ``_SEQUENCES`` at a time."""

    def __init__(self, cpp: Any, model: Any, context: Any, rows: list[Row]) -> None:
        self._cpp, self._context, self._rows = cpp, context, rows
        self._memory = cpp.llama_get_memory(context)
        self._vocab = cpp.llama_vocab_n_tokens(cpp.llama_model_get_vocab(model))
        self._batch = cpp.llama_batch_init(_BATCH, 0, 1)
        self._random = np.random.default_rng(0)
        self._free = list(range(_SEQUENCES))
        self._waiting = [(at, sample) for at, row in enumerate(rows) for sample in range(row.n)]
        self._todo: dict[int, list[int]] = {}  # tokens to compute, keyed by sequence
        self._computed: dict[int, int] = {}
        self._of: dict[int, tuple[int, int]] = {}  # row and sample, keyed by sequence
        self._leads: dict[int, int] = {}  # sequence with the prompt, keyed by row
        self._counts = [[0] * row.n for row in rows]

    def run(self) -> list[list[int]]:
        while self._waiting or self._of:
            self._admit()
            self._step()
        return self._counts

    def _admit(self) -> None:
        while self._waiting and self._free:
            at, sample = self._waiting[0]
            prompt, lead = self._rows[at].prompt, self._leads.get(at)
            if sample and lead is not None and self._of.get(lead, (None,))[0] == at:
                if self._computed[lead] < len(prompt):
                    return  # wait for the prompt
                shared = len(prompt) - 1
            else:
                lead, shared = None, 0
            self._waiting.pop(0)
            sequence = self._free.pop()
            if lead is None:
                self._leads[at] = sequence
            else:
                self._cpp.llama_memory_seq_cp(self._memory, lead, sequence, 0, shared)
            self._of[sequence] = at, sample
            self._computed[sequence], self._todo[sequence] = shared, prompt[shared:]

    def _step(self) -> None:
        batch, count, sampled = self._batch, 0, []
        for sequence, todo in self._todo.items():
            taken = todo[: _BATCH - count]
            for token in taken:
                batch.token[count], batch.pos[count] = token, self._computed[sequence]
                batch.n_seq_id[count], batch.seq_id[count][0] = 1, sequence
                batch.logits[count] = 0
                self._computed[sequence] += 1
                count += 1
            if taken and len(taken) == len(todo):
                batch.logits[count - 1] = 1
                sampled.append((sequence, count - 1))
            self._todo[sequence] = todo[len(taken) :]
        batch.n_tokens = count
        if self._cpp.llama_decode(self._context, batch):
            raise RuntimeError("llama_decode failed")
        for sequence, place in sampled:
            self._take(sequence, self._drawn(self._of[sequence][0], place))

    def _drawn(self, at: int, place: int) -> int:
        logits = np.ctypeslib.as_array(
            self._cpp.llama_get_logits_ith(self._context, place), (self._vocab,)
        )
        if self._rows[at].n == 1:
            return int(logits.argmax())
        top = np.argpartition(logits, -50)[-50:]
        weights = np.exp(logits[top] - logits[top].max()).cumsum()
        return int(top[np.searchsorted(weights, self._random.random() * weights[-1])])

    def _take(self, sequence: int, token: int) -> None:
        at, sample = self._of[sequence]
        self._counts[at][sample] += 1
        self._todo[sequence] = [token]
        if self._counts[at][sample] == self._rows[at].output_len:
            self._cpp.llama_memory_seq_rm(self._memory, sequence, -1, -1)
            del self._of[sequence], self._todo[sequence]
            self._free.append(sequence)


def _converted(folder: Path, kind: str) -> Path:
    """Convert the model to llama.cpp's format, next to the original."""
    import gguf

    path = folder.with_name(f"{folder.name}.{kind}.gguf")
    if path.exists():
        return path
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path.with_suffix(".part"), "llama")
    heads = config["num_attention_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(_FILE_TYPES[kind])
    wanted = gguf.GGMLQuantizationType[_TYPES[kind]]
    for file in sorted(folder.glob("*.safetensors")):
        for name, whole in _tensors(file):
            values = _interleaved(name, whole, config)
            of = wanted if values.ndim > 1 else gguf.GGMLQuantizationType.F32
            writer.add_tensor(_name(name), gguf.quants.quantize(values, of), raw_dtype=of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    path.with_suffix(".part").rename(path)
    return path


def _tensors(file: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yield names and float32 values of a safetensors file, which may have bfloat16 tensors that
    safetensors' NumPy reader cannot read."""
    data = np.memmap(file, np.uint8, "r")
    start = 8 + int(data[:8].view(np.uint64)[0])
    entries = json.loads(bytes(data[8:start]))
    for name, entry in entries.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        raw = np.array(data[start + begin : start + end])
        if entry["dtype"] == "BF16":
            values = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            values = raw.view({"F32": np.float32, "F16": np.float16}[entry["dtype"]])
        yield name, values.astype(np.float32).reshape(entry["shape"])


def _interleaved(name: str, values: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """Interleave the two halves of each head's rotary dimensions."""
    key = next((k for k in ("q_proj", "k_proj") if f"self_attn.{k}" in name), None)
    if key is None:
        return values
    heads = config["num_attention_heads" if key == "q_proj" else "num_key_value_heads"]
    halves = values.reshape(heads, 2, -1, values.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)


def _name(name: str) -> str:
    base = name.removesuffix(".weight")
    if base in _TENSORS:
        return f"{_TENSORS[base]}.weight"
    _, _, layer, rest = base.split(".", 3)
    return f"blk.{layer}.{_LAYER_TENSORS[rest]}.weight"
