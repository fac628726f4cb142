"""What the requests of an OpenAI batch file ask for, and how they are read, by the job's task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from batchinfer.job.openai.embeddings import EMBEDDING_FIELDS, parse_embedding
from batchinfer.job.openai.request import ANSWER_FIELDS, ParsedRequest, parse_request
from batchinfer.job.openai.scores import pair_fields, parse_classification, parse_pair
from batchinfer.job.output.schema import OutputTable
from batchinfer.job.spec.spec import JobSpec
from batchinfer.job.spec.tasks import CLASSIFY, EMBED


@dataclass(frozen=True)
class RequestKind:
    """How requests of a kind are read."""

    parse: Callable[..., ParsedRequest] = parse_request
    """Reads a line, as ``parse_request``."""
    fields: Mapping[str, str] = field(default_factory=lambda: ANSWER_FIELDS)
    """What errors call the columns of prompts, and what requests call them."""
    pair_columns: tuple[str, str] | None = None
    """What the job calls the texts of pairs; None: prompts are single texts."""


def request_kind(spec: JobSpec, table: OutputTable) -> RequestKind:
    """Of a job: requests for answers, for embeddings, for labels, or for scores of pairs."""
    make = _OF_TASKS.get(spec.task)
    return RequestKind() if make is None else make(spec, table)


def _embeddings(spec: JobSpec, table: OutputTable) -> RequestKind:
    width = table.generated_schema.field("embedding").type.list_size
    return RequestKind(partial(parse_embedding, width=width), EMBEDDING_FIELDS)


def _scores(spec: JobSpec, table: OutputTable) -> RequestKind:
    config = spec.classify
    if config is None or config.query_column is None or config.document_column is None:
        return RequestKind(parse_classification, EMBEDDING_FIELDS)
    columns = (config.query_column, config.document_column)
    return RequestKind(parse_pair, pair_fields(columns), columns)


_OF_TASKS = {EMBED.name: _embeddings, CLASSIFY.name: _scores}
