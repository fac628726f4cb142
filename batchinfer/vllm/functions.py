"""Functions of vLLM that clients call besides the methods of ``LLM``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from batchinfer.llm.compatibility import settle

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def get_tokenizer(
    tokenizer_name: str | os.PathLike[str],
    *,
    revision: str | None = None,
    truncation_side: str = "left",
    tokenizer_mode: str = "auto",
    trust_remote_code: bool = False,
    download_dir: str | None = None,
    **options: Any,
) -> PreTrainedTokenizerBase:
    """Return a tokenizer, as transformers loads it.

    Args:
        trust_remote_code: True to run the tokenizer's own Python code, if it has any.
        options: options of ``AutoTokenizer.from_pretrained``.

    Raises:
        NotYetError, ValueError: ``tokenizer_mode`` is not supported.
        OSError: the tokenizer cannot be read.
    """
    settle("get_tokenizer", {"tokenizer_mode": tokenizer_mode, "download_dir": download_dir}, ())
    from transformers import AutoTokenizer

    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        tokenizer_name,
        revision=revision,
        truncation_side=truncation_side,
        trust_remote_code=trust_remote_code,
        **options,
    )
    return tokenizer


def resolve_chat_template(
    tokenizer: PreTrainedTokenizerBase,
    chat_template: str | None,
    tools: Sequence[Mapping[str, Any]] | None,
    **_: object,
) -> str | None:
    """Return ``chat_template``, or else the tokenizer's chat template, or None if it has none.

    Args:
        chat_template: text of a template, or the name of one of the tokenizer's templates.
        tools: tools of the chat; some tokenizers have a separate template for chats with tools.
    """
    with suppress(ValueError):  # the tokenizer has no template
        template: str = tokenizer.get_chat_template(chat_template, tools=tools)
        return template
    return None


def destroy_model_parallel() -> None:
    """Do nothing, because an ``LLM`` has a single process, and frees its memory when deleted."""


def destroy_distributed_environment() -> None:
    """Do nothing; see ``destroy_model_parallel``."""
