"""``task: embed``: computes a vector for each row from the hidden states of its prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from batchinfer.config import EmbedConfig, Runner
from batchinfer.errors import UsageError
from batchinfer.job.rows.pooling.pooled import Pooled, plain_prompts
from batchinfer.job.rows.task import LoadedTask, Task
from batchinfer.job.spec.spec import JobSpec
from batchinfer.job.spec.task_keys import EMBED
from batchinfer.pooling.embedding import Embedder, EmbeddingModules, read_embedding_modules
from batchinfer.text.processes.worker import BuilderFactory
from batchinfer.text.structured.compiled_grammar import GrammarCompiler

if TYPE_CHECKING:
    from batchinfer.builders.context import EngineContext

_FAILED: Mapping[str, Any] = {"embedding": None}


def _config(job: JobSpec) -> EmbedConfig:
    return job.embed or EmbedConfig()


def _embedder(job: JobSpec) -> Embedder:
    return Embedder(checked_modules(job), _config(job))


def _with_defaults(job: JobSpec) -> JobSpec:
    """Return the job with the defaults from the model's folder filled into ``embed``.

    If the job has no ``embed`` and the model's defaults equal those of batchinfer's first version,
    return the job unchanged, because its fingerprint must stay the same.
    """
    embedder, config = _embedder(job), _config(job)
    dimensions = embedder.width if config.dimensions or embedder.modules.truncate_dim else None
    filled = replace(config, normalize=embedder.normalizes, dimensions=dimensions)
    if job.embed is None and filled == EmbedConfig(normalize=True):
        return job
    return job.model_copy(update={"embed": filled})


def _runner(job: JobSpec) -> Runner:
    return "whole_texts" if _embedder(job).reads_whole_texts else "pooling"


def checked_modules(job: JobSpec) -> EmbeddingModules:
    """Return the modules of a job's model, checked against the job's keys.

    Raises:
        ModelError: the modules cannot be read, or are not supported.
        UsageError: a key of the job contradicts the modules.
    """
    modules = read_embedding_modules(job.model.name, job.model.revision)
    config, prompt = _config(job), job.prompt
    if config.pooling != "auto" and len(modules.pooling) > 1:
        raise UsageError(
            f"embed.pooling is {config.pooling}, but the model concatenates "
            f"{' and '.join(modules.pooling)} pooling; set it to auto"
        )
    if (config.dimensions or 1) > modules.width:
        raise UsageError(
            f"embed.dimensions is {config.dimensions}, but the model's embeddings "
            f"have only {modules.width} dimensions"
        )
    if config.prompt_name and config.prompt_name not in modules.prompts:
        named = ", ".join(modules.prompts) or "(none)"
        raise UsageError(
            f"embed.prompt_name: the model has no prompt {config.prompt_name!r}; "
            f"its prompts are: {named}"
        )
    if config.prompt_name and prompt.token_ids_column is not None:
        raise UsageError(
            "embed.prompt_name cannot be combined with prompt.token_ids_column, "
            "because a prompt cannot be added to token ids"
        )
    if modules.takes_messages and prompt.token_ids_column is None:
        raise UsageError(
            "the model's sentence_bert_config.json (modality_config) asks for its chat template "
            "without the generation prompt, which is not yet supported; give token ids "
            "instead (prompt.token_ids_column)"
        )
    return modules


def _result_types(job: JobSpec) -> dict[str, pa.DataType]:
    size = _embedder(job).width
    kind = pa.float32() if _config(job).dtype == "float32" else pa.float16()
    return {"embedding": pa.list_(kind, size)}


def _load(job: JobSpec, context: EngineContext, grammars: GrammarCompiler) -> LoadedTask:
    embedder = _embedder(job)
    return Pooled(
        context.tokenizer,
        lambda hidden_state: {"embedding": embedder(hidden_state)},
        _FAILED,
        job.output.include,
        embedder.pooling,
        result_bytes=embedder.width * np.dtype(embedder.config.dtype).itemsize,
    )


def _prompt_builder(job: JobSpec) -> BuilderFactory:
    embedder, asked = _embedder(job), _config(job).prompt_name
    modules = embedder.modules
    if asked is None and job.prompt.template is None:
        asked = modules.default_prompt
    prefix = modules.prompts[asked] if asked else ""
    return partial(
        plain_prompts,
        prefix=prefix,
        pools_prefix=modules.pools_prompt,
        most_tokens=modules.max_seq_length,
    )


def _summarize(row: Mapping[str, Any]) -> tuple[str | None, str]:
    facts = f"{row['num_prompt_tokens'] or 0:,} input tokens"
    values = row["embedding"]
    if values is None:
        return None, facts
    first = ", ".join(f"{value:.4f}" for value in values[:4])
    return f"[{first}{', ...' if len(values) > 4 else ''}]", f"{facts}; {len(values):,} numbers"


EMBED_TASK = Task(
    EMBED,
    _result_types,
    _prompt_builder,
    _load,
    _summarize,
    ("embedding.list.element",),
    _FAILED,
    with_defaults=_with_defaults,
    runner=_runner,
)
