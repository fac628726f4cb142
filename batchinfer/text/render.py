"""Renders the text of a row's prompt: reads the source, then applies the chat template."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any

from batchinfer.config import PromptConfig
from batchinfer.errors import ModelError, RowError, UsageError
from batchinfer.text.chat import ChatTemplate, FinalMessage, Message
from batchinfer.text.control_tokens import Marks
from batchinfer.text.images.files import ImageFile, without_images
from batchinfer.text.images.find_images import image_parts
from batchinfer.text.images.image_placeholders import ImageSettings, RowImages
from batchinfer.text.prompt_sources import (
    checked_template,
    conflicts,
    make_source,
    require_column,
)
from batchinfer.text.row_values import (
    SYSTEM_ROLES,
    decoded,
    keys_in,
    map_texts,
    require_content,
    row_token_ids,
    texts_in,
)
from batchinfer.text.tokenize_rows import RenderedText
from batchinfer.text.tokenizer import TokenIds, Tokenizer
from batchinfer.text.tools.row_tools import RowToolsReader
from batchinfer.text.tools.tool_format import Tools

_GIVE_TEMPLATE = "Set prompt.chat_template to the path of a template, or use a model made for chat."


class RowRenderer:
    """Renders rows.

    A string becomes a user message if there is a chat template; otherwise it is the prompt. A
    conversation without a system message gets the job's system message.

    Args:
        conversation_columns: columns that contain conversations, if known. If there are any, a
            missing chat template fails the job instead of each row.
        chat_template_source: content of the file that ``config.chat_template`` names.
        vocab_size: number of valid token ids in rows, by default the tokenizer's vocabulary size.
        now: time for chat templates, the same for all rows; by default the time of this call.
        appended_column: column whose texts follow the rendered text. Control-token texts in this
            column are marked too.
        final_message: how the prompt of a conversation ends.
        variables_column: column with a row's own ``config.chat_template_kwargs``, which override
            the job's values; ignored if it is not in the data.
        images: settings for images; None if rows have only text.

    Raises:
        UsageError: settings contradict each other or do not fit the columns.
        DataError: a column is missing.
        ModelError: the tokenizer's chat template is invalid, or is needed but missing.
    """

    def __init__(
        self,
        config: PromptConfig,
        tokenizer: Tokenizer,
        *,
        columns: Sequence[str],
        conversation_columns: Collection[str] = (),
        chat_template_source: str | None = None,
        vocab_size: int | None = None,
        now: datetime | None = None,
        appended_column: str | None = None,
        final_message: FinalMessage = "auto",
        variables_column: str | None = None,
        images: ImageSettings | None = None,
    ) -> None:
        for key, problem in conflicts(config):
            raise UsageError(f"{key} {problem}")
        self.vocab_size = vocab_size or tokenizer.vocab_size
        self._ids_column = config.token_ids_column
        if self._ids_column is not None:
            require_column(self._ids_column, "prompt.token_ids_column", columns)
            self.columns = tuple(filter(None, [self._ids_column, appended_column]))
            """Input columns that ``render`` needs, and ``appended_column``."""
            return
        available = frozenset(columns)
        self._control = None if config.parse_special_tokens else tokenizer.control
        self._source = make_source(config, columns)
        self._variables_column = variables_column if variables_column in available else None
        self._system = None
        self._images = None if images is None else RowImages(images, config, columns)
        self._text_columns = {
            *self._source.columns,
            appended_column,
            config.tools_column,
            variables_column,
        }
        needed = self._text_columns | set(config.image_columns)
        if config.system is not None:
            self._system = checked_template(config.system, "prompt.system", available)
            self._text_columns |= self._system.columns(available)
            needed |= self._system.columns(available)
        self._text_images = set(config.image_columns) & self._text_columns
        """Image columns that a template also reads."""
        self.columns = tuple(name for name in columns if name in needed)
        self._chat = _chat_template(
            config, tokenizer, chat_template_source, now or datetime.now(), final_message
        )
        self._tools = RowToolsReader(config)
        if self._tools.column is not None:
            require_column(self._tools.column, "prompt.tools_column", columns)
        if self._chat is None:
            talks = config.messages is not None or needed & frozenset(conversation_columns)
            _refuse_chat_settings(config, talks=bool(talks))

    def render(self, row: Mapping[str, object]) -> RenderedText | TokenIds:
        """Return the row's text, with marks in place of its own control-token texts, or its token
        ids.

        Raises:
            RowError: ``empty_prompt``, ``invalid_utf8``, ``template_error``,
                ``unsupported_content``, ``row_too_large``, ``invalid_image``.
        """
        if self._ids_column is not None:
            where = f"column {self._ids_column}"
            return row_token_ids(row.get(self._ids_column), where, self.vocab_size)
        values = {
            name: decoded(row[name], name)
            for name in self.columns
            if name in row and name in self._text_columns
        }
        for name in self._text_images & values.keys():
            values[name] = without_images(values[name], name)
        row_tools = self._tools.of(values)
        tools = None if row_tools is None else list(row_tools.tools)
        marks, has_control_text = None, False
        if self._control is not None:
            texts = list(texts_in(values))
            if self._tools.column is not None:
                texts += [*texts_in(tools), *keys_in(tools)]
            if any(map(self._control.can_form_in, texts)):
                has_control_text = any(map(self._control.occur_in, texts))
                marks = Marks(self._control, texts)
                values = map_texts(marks.mark, values)
                if self._tools.column is not None:
                    tools = map_texts(marks.mark, tools, keys=True)
        prompt = self._source.read(values)
        files = [] if self._images is None else self._images.in_columns(row)
        if not files:
            require_content(prompt, self._source.where)
        is_raw = self._chat is None and isinstance(prompt, str)
        if isinstance(prompt, str) and is_raw:
            text = prompt
        else:
            messages, files = self._messages(prompt, files)
            text = self._as_chat(messages, values, tools)
        images = None if self._images is None else self._images.in_text(text, files)
        # Chat templates write BOS themselves, so no special tokens are added, as in transformers.
        return RenderedText(text, is_raw, marks, has_control_text, images)

    def _messages(
        self, prompt: str | list[Message], files: list[ImageFile]
    ) -> tuple[list[Message], list[ImageFile]]:
        """Return the conversation, and its images in order."""
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if self._images is not None:
            return self._images.placed(messages, files)
        if any(True for message in messages for _ in image_parts(message)):
            raise RowError(
                "unsupported_content",
                "the conversation has an image, but the model takes only text",
            )
        return messages, []

    def _as_chat(
        self, messages: list[Message], values: Mapping[str, Any], tools: Tools | None
    ) -> str:
        if self._chat is None:
            raise RowError(
                "template_error",
                "the prompt is a conversation, but the model has no chat template. "
                f"{_GIVE_TEMPLATE}",
            )
        if self._system is not None and messages[0]["role"] not in SYSTEM_ROLES:
            messages = [{"role": "system", "content": self._system.render(values)}, *messages]
        name = self._variables_column
        return self._chat.render(messages, tools, None if name is None else values.get(name))


def _chat_template(
    config: PromptConfig,
    tokenizer: Tokenizer,
    file_content: str | None,
    now: datetime,
    final_message: FinalMessage,
) -> ChatTemplate | None:
    if config.chat_template == "none":
        return None
    from_model = config.chat_template == "auto"
    source = tokenizer.chat_template if from_model else file_content
    if source is None and from_model:
        return None
    if config.has_tools and source is not None and "tools" not in source:
        raise UsageError(
            "prompt.tools: the chat template does not use tools, so the model would not see them",
            hint="remove the tools, or set prompt.chat_template to a template that uses tools",
        )
    if source is None:
        raise UsageError(f"prompt.chat_template: the file {config.chat_template} was not read")
    return ChatTemplate(
        source,
        special_tokens=tokenizer.special_tokens,
        kwargs=config.chat_template_kwargs,
        now=now,
        error=ModelError if from_model else UsageError,
        origin="the model's chat template" if from_model else config.chat_template,
        final_message=final_message,
    )


def _refuse_chat_settings(config: PromptConfig, *, talks: bool) -> None:
    """Refuse settings that need a chat template, because there is none.

    Raises:
        UsageError: the job sets ``chat_template: none``.
        ModelError: the tokenizer has no chat template.
    """
    settings = {
        "prompt.system": config.system is not None,
        "prompt.chat_template_kwargs": bool(config.chat_template_kwargs),
        "a prompt with tools": config.has_tools,
        "a prompt made of messages": talks,
    }
    for what, given in settings.items():
        if given and config.chat_template == "none":
            raise UsageError(f"{what} needs a chat template, but prompt.chat_template is none")
        if given:
            message = f"{what} needs a chat template, but the model's tokenizer has none"
            raise ModelError(message, hint=_GIVE_TEMPLATE)
