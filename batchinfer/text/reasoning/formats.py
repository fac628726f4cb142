"""Finds the markers of a model's reasoning in its chat template and its tokenizer.

The markers come from the parsers of vLLM (vllm/reasoning) and SGLang
(python/sglang/srt/parser/reasoning_parser.py).
"""

from __future__ import annotations

from collections.abc import Mapping

from batchinfer.config.types import format_value
from batchinfer.errors import UsageError
from batchinfer.text.reasoning.harmony import HarmonyFormat
from batchinfer.text.reasoning.markers import MarkerFormat
from batchinfer.text.reasoning.reasoning_format import ReasoningFormat
from batchinfer.text.tokenizer import Tokenizer

_HARMONY = ("<|channel|>", "<|start|>", "<|message|>", "<|end|>")
_MARKERS = (
    ("<think>", "</think>", ""),  # Qwen3, DeepSeek R1, GLM 4.5, OLMo 3, SmolLM3, Nemotron, ...
    ("[THINK]", "[/THINK]", ""),  # Mistral: Magistral, Ministral 3
    ("<seed:think>", "</seed:think>", ""),  # Seed-OSS
    ("<|START_THINKING|>", "<|END_THINKING|>", ""),  # Cohere Command A
    ("<|inner_prefix|>", "<|inner_suffix|>", ""),  # Apertus
    ("<|channel>", "<channel|>", "thought\n"),  # Gemma 4
    ("◁think▷", "◁/think▷", ""),  # Kimi VL
    ("Here is my thought process:", "Here is my response:", ""),  # Granite 3.2
)
_THINK = {"start": "<think>", "end": "</think>"}
_THINKERS = (
    *("deepseek_r1", "deepseek_v3", "glm45", "holo2", "kimi_k2", "minimax_m2", "nemotron_v3"),
    *("olmo3", "qwen3", "step3", "step3p5"),
)
PARSERS: Mapping[str, str | Mapping[str, str]] = {
    **{"auto": "auto", "none": "none"},
    **dict.fromkeys(_THINKERS, _THINK),
    "granite": {"start": "Here is my thought process:", "end": "Here is my response:"},
    "mistral": {"start": "[THINK]", "end": "[/THINK]"},
    "openai_gptoss": "auto",
    "seed_oss": {"start": "<seed:think>", "end": "</seed:think>"},
}
"""Values of ``wanted`` for ``find_reasoning_format``, by vLLM's names (``--reasoning-parser``)."""


def checked_reasoning(wanted: object) -> str | Mapping[str, str]:
    """Return ``wanted``; raise ValueError unless ``find_reasoning_format`` accepts it."""
    if isinstance(wanted, str) and wanted in ("auto", "none"):
        return wanted
    if (
        isinstance(wanted, Mapping)
        and set(wanted) == {"start", "end"}
        and all(isinstance(text, str) and text for text in wanted.values())
    ):
        return wanted
    raise ValueError(
        f'reasoning is {format_value(wanted)}; it must be "auto", "none" or '
        '{"start": "<think>", "end": "</think>"}'
    )


def find_reasoning_format(
    wanted: str | Mapping[str, str], tokenizer: Tokenizer, chat_template: str | None = None
) -> ReasoningFormat | None:
    """Return the format of a model's reasoning.

    Args:
        wanted: ``none``, ``auto`` (by the chat template, then by the tokenizer's tokens), or the
            markers: ``{start: text, end: text}``.
        chat_template: source of the template in use; None for the tokenizer's template.

    Raises:
        UsageError: ``wanted`` is ``auto``, but there are no known markers.
    """
    if wanted == "none":
        return None
    if not isinstance(wanted, str):
        return MarkerFormat(tokenizer, wanted["start"], wanted["end"])
    found = _found(tokenizer, chat_template or tokenizer.chat_template or "")
    if found is None:
        raise UsageError(
            "reasoning is auto, but neither the chat template nor the tokenizer has known "
            "reasoning markers",
            hint="name them, like reasoning: {start: <think>, end: </think>}, or set none",
        )
    return found


def _found(tokenizer: Tokenizer, chat_template: str) -> ReasoningFormat | None:
    if all(tokenizer.added_token_id(text) is not None for text in _HARMONY):
        return HarmonyFormat(tokenizer)
    by_template = (row for row in _MARKERS if row[0] in chat_template or row[1] in chat_template)
    by_token = (row for row in _MARKERS if None not in map(tokenizer.added_token_id, row[:2]))
    row = next(by_template, None) or next(by_token, None)
    return None if row is None else MarkerFormat(tokenizer, *row)
