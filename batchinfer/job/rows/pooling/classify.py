"""``task: classify``: computes labels and scores from a pooled hidden state."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchinfer.config import ClassifyConfig, PromptConfig
from batchinfer.errors import UsageError
from batchinfer.job.input.dataset import Source
from batchinfer.job.rows.column_checks import check_text_column
from batchinfer.job.rows.pooling.pooled import Pooled, plain_prompts
from batchinfer.job.rows.task import LoadedTask, Task
from batchinfer.job.spec.spec import JobSpec
from batchinfer.job.spec.task_keys import CLASSIFY
from batchinfer.pooling.classifier import (
    Classifier,
    asks_questions,
    read_classifier,
)
from batchinfer.text.processes.worker import BuilderFactory
from batchinfer.text.reranker_prompts import (
    PairPromptBuilder,
    QuestionBuilder,
    with_both_columns,
    with_question,
)
from batchinfer.text.structured.compiled_grammar import GrammarCompiler

if TYPE_CHECKING:
    from batchinfer.builders.context import EngineContext

_FAILED: Mapping[str, Any] = {"label": None, "score": None, "scores": None}
_TYPES: Mapping[str, pa.DataType] = {
    "label": pa.string(),
    "score": pa.float32(),
    "scores": pa.list_(pa.struct([("label", pa.string()), ("score", pa.float32())])),
}


def classification(hidden_state: npt.NDArray[np.float32], classifier: Classifier) -> dict[str, Any]:
    """Return a row's results: the scores of all labels, and the label with the highest score."""
    scores = classifier(hidden_state)
    best = int(scores.argmax())
    every = zip(classifier.labels, scores.tolist(), strict=True)
    return {
        "label": classifier.labels[best],
        "score": float(scores[best]),
        "scores": [{"label": label, "score": score} for label, score in every],
    }


def _config(job: JobSpec) -> ClassifyConfig:
    return job.classify or ClassifyConfig()


def _asks_questions(job: JobSpec) -> bool:
    return asks_questions(job.model.name, job.model.revision, _config(job))


def _prompt_config(job: JobSpec) -> PromptConfig:
    config = _config(job)
    if not config.has_pairs:
        return job.prompt
    if not _asks_questions(job):
        return with_both_columns(job.prompt, config)
    if job.prompt.on_too_long != "error":
        raise UsageError(
            f"prompt.on_too_long: {job.prompt.on_too_long} would cut off the "
            "question, which follows the document in prompts of this model; set it "
            "to error, or shorten the document in prompt.template"
        )
    return with_question(job.prompt, config)


def _prompt_builder(job: JobSpec) -> BuilderFactory:
    config = _config(job)
    if config.query_column is None or config.document_column is None:
        return plain_prompts
    columns = (config.query_column, config.document_column)
    if _asks_questions(job):
        return partial(QuestionBuilder, pair_columns=columns)
    return partial(PairPromptBuilder, pair_columns=columns)


def _check_columns(job: JobSpec, source: Source) -> None:
    config = _config(job)
    if source.format.holds_requests:
        return
    for key, name in (("query", config.query_column), ("document", config.document_column)):
        if name is not None:
            check_text_column(name, f"classify.{key}_column", source)


def _load(job: JobSpec, context: EngineContext, grammars: GrammarCompiler) -> LoadedTask:
    classifier = read_classifier(
        job.model.name, job.model.revision, _config(job), context.tokenizer.single_token_id
    )
    labels = len(classifier.labels)
    if job.input.format == "openai-batch" and _config(job).has_pairs and labels != 1:
        raise UsageError(
            f"{job.model.name} has {labels} labels, but requests for scores need a "
            "model with one label",
            hint="ask for labels instead: send requests to /v1/classify, or run task: "
            "classify over a dataset",
        )
    return Pooled(
        context.tokenizer,
        lambda hidden_state: classification(hidden_state, classifier),
        _FAILED,
        job.output.include,
        classifier.pooling,
        result_bytes=4 * (1 + labels),  # the column score repeats the highest of the scores
    )


def _summarize(row: Mapping[str, Any]) -> tuple[str | None, str]:
    facts = f"{row['num_prompt_tokens'] or 0:,} input tokens"
    if row["label"] is None:
        return None, facts
    return f"{row['label']}: {row['score']:.4f}", facts


CLASSIFY_TASK = Task(
    CLASSIFY,
    lambda job: _TYPES,
    _prompt_builder,
    _load,
    _summarize,
    ("label", "score"),
    _FAILED,
    _check_columns,
    _prompt_config,
)
