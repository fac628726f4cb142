"""Finds the format of a model's tool calls, by name or from its chat template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from batchinfer.errors import UsageError
from batchinfer.text.tools.json_formats import (
    DeepSeekFormat,
    HermesFormat,
    KimiFormat,
    ListFormat,
    LlamaJsonFormat,
    MistralFormat,
)
from batchinfer.text.tools.tag_formats import GlmFormat, TagFormat
from batchinfer.text.tools.text_formats import HarmonyCalls, PythonicFormat
from batchinfer.text.tools.tool_format import ToolFormat

if TYPE_CHECKING:
    from batchinfer.text.tokenizer import Tokenizer

FORMATS: Mapping[str, ToolFormat] = {
    "hermes": HermesFormat(),
    "qwen3_coder": TagFormat("tool_call", "<function=", "<parameter=", ">", is_around_all=False),
    "seed_oss": TagFormat("seed:tool_call", "<function=", "<parameter=", ">", is_around_all=False),
    "minimax_m2": TagFormat(
        "minimax:tool_call", '<invoke name="', '<parameter name="', '">', is_around_all=True
    ),
    "glm45": GlmFormat(),
    "mistral": MistralFormat(),
    "llama3_json": LlamaJsonFormat(),
    "pythonic": PythonicFormat("<|python_start|>", "<|python_end|>", may_be_bare=True),
    "olmo3": PythonicFormat("<function_calls>", "</function_calls>", has_lines=True),
    "lfm2": PythonicFormat("<|tool_call_start|>", "<|tool_call_end|>"),
    "granite": ListFormat("<|tool_call|>"),
    "phi4_mini_json": ListFormat("functools"),
    "deepseek_v3": DeepSeekFormat(fenced=True),
    "deepseek_v31": DeepSeekFormat(fenced=False),
    "kimi_k2": KimiFormat(),
    "openai": HarmonyCalls(),
}
"""Formats, keyed by vLLM's names for ``--tool-call-parser``; ``lfm2`` is SGLang's name."""

_SIGNS: tuple[tuple[tuple[str, ...], str | None], ...] = (
    (("<|channel|>", "<|message|>"), "openai"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<｜tool▁calls▁begin｜>", "```json"), "deepseek_v3"),  # noqa: RUF001
    (("<｜tool▁calls▁begin｜>",), "deepseek_v31"),  # noqa: RUF001
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("minimax:tool_call", '<invoke name="'), "minimax_m2"),
    (("<invoke name=",), None),
    (("<|tool_call_start|>",), "lfm2"),
    (("<function_calls>",), "olmo3"),
    (("<seed:tool_call>", "<function="), "seed_oss"),
    (("<arg_key>",), "glm45"),
    (("<function=", "<parameter="), "qwen3_coder"),
    (("<tool_call>",), "hermes"),
    (("<|tool_call|>",), "granite"),
    (("functools",), "phi4_mini_json"),
    (("[func_name1(",), "pythonic"),
    (("<|python_tag|>",), "llama3_json"),
    (('"parameters": dictionary',), "llama3_json"),
)
"""Texts in a chat template that identify a format; the first match counts. None stands for an
unsupported format that looks like a supported format.
"""


def find_tool_format(
    wanted: str, tokenizer: Tokenizer, chat_template: str | None = None
) -> ToolFormat | None:
    """Return the format of a model's tool calls.

    Args:
        wanted: ``none``, ``auto`` or a name in ``FORMATS``.
        chat_template: source of the template in use; None for the tokenizer's template.

    Raises:
        UsageError: the name is unknown, or ``auto`` finds no known format.
    """
    if wanted == "none":
        return None
    if wanted != "auto" and wanted not in FORMATS:
        raise UsageError(f"tool_parser must be one of auto, none, {', '.join(FORMATS)}")
    if wanted != "auto":
        return FORMATS[wanted]
    template = chat_template or tokenizer.chat_template or ""
    matches = (name for signs, name in _SIGNS if all(sign in template for sign in signs))
    if (name := next(matches, None)) is not None:
        return FORMATS[name]
    raise UsageError(
        "tool_parser is auto, but the chat template contains no known tool-call format",
        hint="set tool_parser (for run-batch: --tool-call-parser) to the model's format, one of "
        f"{', '.join(FORMATS)}; or to none, which leaves tool calls in the text",
    )
