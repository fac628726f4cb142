"""Turns rows of OpenAI batch files into prompts and sampling parameters for the engine."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from pydantic_core import to_json

from batchinfer.config import PromptConfig
from batchinfer.console.format import printable
from batchinfer.errors import RowError
from batchinfer.job.input.format import Row
from batchinfer.job.openai.pooling import (
    classification_requests,
    embedding_requests,
    pair_requests,
)
from batchinfer.job.openai.request import (
    ParsedRequest,
    RequestKind,
    generation_requests,
    is_served,
)
from batchinfer.job.output.schema import OutputTable
from batchinfer.job.rows.read_prompts import Prompts, row_or_error
from batchinfer.job.rows.sampling_params import RowParams
from batchinfer.job.spec.spec import JobSpec
from batchinfer.job.spec.task_keys import CLASSIFY, EMBED
from batchinfer.requests.requests import BASE_MODEL, PromptRow, RowSampling
from batchinfer.requests.tool_choice import ToolChoices
from batchinfer.text.prompts import Prompt

TEMPLATE_VARIABLES = "chat_template_kwargs"
"""Column that holds a conversation's variables for the chat template."""
_MOST_WARNINGS = 3
_log = logging.getLogger(__name__)


def request_kind(spec: JobSpec, table: OutputTable, *, has_tools: bool = False) -> RequestKind:
    config = spec.classify
    if spec.task == EMBED.name:
        return embedding_requests(table.generated_schema.field("embedding").type.list_size)
    if spec.task != CLASSIFY.name:
        return generation_requests(has_tools=has_tools)
    if config is None or config.query_column is None or config.document_column is None:
        return classification_requests()
    return pair_requests(config.query_column, config.document_column)


class OpenAIReader:
    """Reads prompts and sampling parameters of requests.

    Conversations go through the chat template. The prompt of a text completion is raw: its control
    tokens stay control tokens.

    Args:
        config: the job's ``prompt`` section.
        make_builder: makes a prompt builder for a config and its columns, which may include
            ``TEMPLATE_VARIABLES``.
        params: makes sampling parameters; None if the task does not sample tokens.
        served_names: names that a request's ``model`` may have.
            adapters: maps each adapter's name, which a request's ``model`` may be, to its number.
        tool_choices: forces the tool calls that a request requires; None if the job does not parse
            tool calls.
        accepts_any_model: True to answer requests for other models too, with a few warnings.
    """

    columns: tuple[str, ...] = ("custom_id", "method", "url", "body")

    def __init__(
        self,
        kind: RequestKind,
        config: PromptConfig,
        make_builder: Callable[[PromptConfig, Sequence[str]], Prompts],
        params: RowParams | None,
        served_names: Sequence[str],
        adapters: Mapping[str, int],
        tool_choices: ToolChoices | None = None,
        *,
        accepts_any_model: bool = False,
    ) -> None:
        if kind.pair_columns is None:
            sources = _sources(config, has_tools=tool_choices is not None)
        else:
            sources = {"pair": (config, kind.pair_columns)}
        self._kind = kind
        self._builders = {name: make_builder(*source) for name, source in sources.items()}
        self._params = params
        self._served_names = served_names
        self._adapters = adapters
        self._tool_choices = tool_choices
        self._accepts_any_model = accepts_any_model
        self._other_names: set[str] = set()

    def start(self, row_ids: Sequence[int], rows: Sequence[Row]) -> Callable[[], list[PromptRow]]:
        """Start building the prompts of rows; return a function that waits for the results and
        returns them in order."""
        requests = [self._parse(row) for row in rows]
        started = {
            source: prompts.start(
                [
                    self._row_values(source, request)
                    for request in requests
                    if isinstance(request, ParsedRequest) and request.source == source
                ]
            )
            for source, prompts in self._builders.items()
        }

        def finish() -> list[PromptRow]:
            prompts = {source: iter(wait()) for source, wait in started.items()}
            return [
                PromptRow(row_id, request)
                if isinstance(request, RowError)
                else self._row(row_id, next(prompts[request.source]), request)
                for row_id, request in zip(row_ids, requests, strict=True)
            ]

        return finish

    def _row_values(self, source: str, request: ParsedRequest) -> Mapping[str, object]:
        if source == "pair":
            return dict(zip(self._kind.pair_columns or (), request.value, strict=True))
        values = {TEMPLATE_VARIABLES: request.template_variables}
        if source == "tools":
            tools = request.tools and list(request.tools.tools)
            return {**values, "messages": request.value, "tools": tools}
        return {**values, source: request.value}

    def _parse(self, row: Row) -> ParsedRequest | RowError:
        if isinstance(row, RowError):
            return row
        try:
            if self._accepts_any_model:
                self._warn_about_model(row)
                return self._kind.read(row, None)
            return self._kind.read(row, self._served_names, self._adapters)
        except RowError as error:
            return error

    def _warn_about_model(self, row: Row) -> None:
        """Warn about requests for other models: once per name, for the first few names."""
        body = row.get("body") if isinstance(row, Mapping) else None
        name = body.get("model") if isinstance(body, Mapping) else None
        if not isinstance(name, str) or name in self._other_names:
            return
        if len(self._other_names) < _MOST_WARNINGS and not is_served(name, self._served_names):
            self._other_names.add(name)
            _log.warning(
                "requests for the model %s are answered by %s; to refuse them, set "
                "--served-model-name or model.served_model_name",
                printable(name, 80),
                printable(self._served_names[0], 80),
            )

    def _row(self, row_id: int, prompt: Prompt | RowError, request: ParsedRequest) -> PromptRow:
        if isinstance(prompt, RowError):
            return PromptRow(row_id, _with_request_field(prompt, self._kind.fields))
        adapter = self._adapters.get(request.model or "", BASE_MODEL)
        sampling: RowSampling | RowError | None = None
        if self._params is not None:
            sampling = self._params.of(to_json(request.sampling))
        if self._tool_choices is not None:
            sampling = self._tool_choices.applied(sampling, request.tools)
        return row_or_error(row_id, prompt, sampling, adapter, tools=request.tools)


def _with_request_field(error: RowError, fields: Mapping[str, str]) -> RowError:
    """Return an error that names the request's field instead of the prompt's column."""
    for column, name in fields.items():
        if re.match(rf"{column}\b", error.message):
            return RowError(error.code, name + error.message.removeprefix(column))
    return error


def _sources(
    config: PromptConfig, *, has_tools: bool
) -> dict[str, tuple[PromptConfig, Sequence[str]]]:
    raw = replace(config, system=None, chat_template="none", chat_template_kwargs={})
    text = replace(raw, column="prompt", parse_special_tokens=True)
    token_ids = replace(raw, token_ids_column="token_ids", parse_special_tokens=False)
    messages = replace(config, column="messages")
    sources: dict[str, tuple[PromptConfig, Sequence[str]]] = {
        "messages": (messages, ("messages", TEMPLATE_VARIABLES)),
        "prompt": (text, ("prompt",)),
        "token_ids": (token_ids, ("token_ids",)),
    }
    if has_tools:
        columns = ("messages", "tools", TEMPLATE_VARIABLES)
        sources["tools"] = (replace(messages, tools_column="tools"), columns)
    return sources
