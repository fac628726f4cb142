"""Requests of OpenAI batch files, read for the engine."""

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
from batchinfer.job.openai.kinds import RequestKind
from batchinfer.job.openai.request import ParsedRequest, is_served
from batchinfer.job.rows.reader import Prompts, row_or_error
from batchinfer.job.rows.sampling_params import RowParams
from batchinfer.requests.requests import BASE_MODEL, PromptRow, RowSampling
from batchinfer.requests.tool_choice import ToolChoices
from batchinfer.text.prompts import Prompt

MakeBuilder = Callable[[PromptConfig, Sequence[str]], Prompts]
TEMPLATE_VARIABLES = "chat_template_kwargs"
"""The column of a conversation's variables for the chat template."""
_MOST_WARNINGS = 3
_log = logging.getLogger(__name__)


class OpenAIReader:
    """Prompts and sampling parameters of the requests in an OpenAI batch file.

    Conversations go through the chat template. The text of a completion is raw: it has no template,
    and control tokens in it are control tokens.

    Args:
        config: the job's ``prompt``.
        make_builder: makes a builder of prompts: how, and of which columns; one of them may be
            ``TEMPLATE_VARIABLES``.
        params: makes the sampling parameters; None: nothing is drawn.
        served_names: what a request may call the model.
        adapters: numbers of those that a request may name in its place.
        tool_choices: hold requests to calls that they must make; None: they have no tools.
        takes_other_names: answer requests for other models too; a few are warned of.
        kind: how lines are read.
    """

    columns: tuple[str, ...] = ("custom_id", "method", "url", "body")

    def __init__(
        self,
        config: PromptConfig,
        make_builder: MakeBuilder,
        params: RowParams | None,
        served_names: Sequence[str],
        adapters: Mapping[str, int],
        tool_choices: ToolChoices | None = None,
        *,
        takes_other_names: bool = False,
        kind: RequestKind = RequestKind(),  # noqa: B008 - it is frozen
    ) -> None:
        if kind.pair_columns is None:
            kinds = _kinds(config, has_tools=tool_choices is not None)
        else:
            kinds = {"pair": (config, kind.pair_columns)}
        self._kind = kind
        self._builders = {name: make_builder(*made_of) for name, made_of in kinds.items()}
        self._params = params
        self._served_names = served_names
        self._adapters = adapters
        self._tool_choices = tool_choices
        self._takes_other_names = takes_other_names
        self._other_names: set[str] = set()

    def start(self, row_ids: Sequence[int], rows: Sequence[Row]) -> Callable[[], list[PromptRow]]:
        """Begin to make the prompts of requests; call what is returned for the rows, in order."""
        requests = [self._request(row) for row in rows]
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

    def _request(self, row: Row) -> ParsedRequest | RowError:
        if isinstance(row, RowError):
            return row
        try:
            has_tools = self._tool_choices is not None
            if self._takes_other_names:
                self._warn_of(row)
                return self._kind.parse(row, None, has_tools=has_tools)
            return self._kind.parse(row, self._served_names, self._adapters, has_tools=has_tools)
        except RowError as error:
            return error

    def _warn_of(self, row: Row) -> None:
        """Say once of each name that it is not the model's; of a few names."""
        body = row.get("body") if isinstance(row, Mapping) else None
        name = body.get("model") if isinstance(body, Mapping) else None
        if not isinstance(name, str) or name in self._other_names:
            return
        if len(self._other_names) < _MOST_WARNINGS and not is_served(name, self._served_names):
            self._other_names.add(name)
            _log.warning(
                "requests for the model %s are answered by %s; to refuse such, "
                "say what it is called: --served-model-name, or model.served_model_name",
                printable(name, 80),
                printable(self._served_names[0], 80),
            )

    def _row(self, row_id: int, prompt: Prompt | RowError, request: ParsedRequest) -> PromptRow:
        if isinstance(prompt, RowError):
            return PromptRow(row_id, _in_words_of_requests(prompt, self._kind.fields))
        adapter = self._adapters.get(request.model or "", BASE_MODEL)
        sampling: RowSampling | RowError | None = None
        if self._params is not None:
            sampling = self._params.of(to_json(request.sampling))
        if self._tool_choices is not None:
            sampling = self._tool_choices.applied(sampling, request.tools)
        return row_or_error(row_id, prompt, sampling, adapter, tools=request.tools)


def _in_words_of_requests(error: RowError, fields: Mapping[str, str]) -> RowError:
    for column, name in fields.items():
        if re.match(rf"{column}\b", error.message):
            return RowError(error.code, name + error.message.removeprefix(column))
    return error


def _kinds(
    config: PromptConfig, *, has_tools: bool
) -> dict[str, tuple[PromptConfig, Sequence[str]]]:
    """By where a request's prompt is: how it is made, and of which columns."""
    raw = replace(config, system=None, chat_template="none", chat_template_kwargs={})
    raw_text = replace(raw, column="prompt", parse_special_tokens=True)
    token_ids = replace(raw, token_ids_column="token_ids", parse_special_tokens=False)
    talks = replace(config, column="messages")
    with_tools = replace(talks, tools_column="tools")
    kinds: dict[str, tuple[PromptConfig, Sequence[str]]] = {
        "messages": (talks, ("messages", TEMPLATE_VARIABLES)),
        "tools": (with_tools, ("messages", "tools", TEMPLATE_VARIABLES)),
        "prompt": (raw_text, ("prompt",)),
        "token_ids": (token_ids, ("token_ids",)),
    }
    if not has_tools:
        del kinds["tools"]
    return kinds
