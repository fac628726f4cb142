"""Loads a model folder's tokenizer for the text plane, and its end-of-sequence ids."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, normalizers

from batchinfer.errors import ModelError, one_line
from batchinfer.worker.model.checkpoint import CONFIG_FILES, read_json, resolve_folder
from batchinfer.worker.model.tokenizer_trial import try_tokenizer

_MARKUP = re.compile(r"<.*>|\[.*\]", re.DOTALL)


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """The parts of a tokenizer that the text plane needs."""

    backend: Tokenizer
    chat_template: str | None
    special_tokens: Mapping[str, str]
    """Roles and their texts, e.g. ``{"bos_token": "<s>"}``; templates may name them."""
    control_tokens: frozenset[str]
    """Texts of the added tokens that steer the model."""
    clean_up_tokenization_spaces: bool
    tells_pairs_apart: bool
    """Whether token type ids mark the tokens of a pair's second text."""


def load_tokenizer(
    name: str, *, revision: str | None = None, key: str = "model.name"
) -> TokenizerParts:
    """Load the tokenizer of a model folder or hub id. Nothing from the folder is executed.

    Args:
        revision: of the repository on the hub.
        key: where the user wrote the name, for messages.

    Raises:
        ModelError: it is missing, needs its own code, or has damaged files.
    """
    folder = resolve_folder(name, revision, CONFIG_FILES, key=key)
    read_json(folder / "config.json")  # otherwise transformers blames the tokenizer for its errors
    if "auto_map" in (read_json(folder / "tokenizer_config.json") or {}):
        raise ModelError(
            f"{folder}/tokenizer_config.json needs the model's own code (auto_map), "
            "which is never run; save the tokenizer as tokenizer.json"
        )
    _try(folder / "tokenizer.json")
    from transformers import AutoTokenizer

    from batchinfer.worker.model.quiet import quiet_transformers

    try:
        with quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(
                folder, trust_remote_code=False, local_files_only=True
            )
    except Exception as error:  # damaged files raise errors of several libraries
        raise ModelError(
            f"{folder}: the tokenizer cannot be loaded: {one_line(error, 200)}",
            hint="fetch tokenizer.json again, or give model.tokenizer",
        ) from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise ModelError(
            f"{folder}: only tokenizers that can be saved as tokenizer.json are supported"
        )
    return TokenizerParts(
        backend=backend,
        chat_template=_chat_template(tokenizer.chat_template),
        special_tokens=_special_tokens(tokenizer),
        control_tokens=_control_tokens(backend),
        clean_up_tokenization_spaces=bool(tokenizer.clean_up_tokenization_spaces),
        tells_pairs_apart="token_type_ids" in tokenizer.model_input_names,
    )


def lowers_case(name: str, revision: str | None) -> bool:
    """Whether sentence-transformers lowers the case of a model's texts, by ``do_lower_case`` of its
    sentence_bert_config.json."""
    folder = resolve_folder(name, revision, CONFIG_FILES)
    values = read_json(folder / "sentence_bert_config.json")
    return isinstance(values, Mapping) and values.get("do_lower_case") is True


def lower_cased(backend: Tokenizer) -> Tokenizer:
    """A copy that lowers the case of texts first."""
    copy = Tokenizer.from_str(backend.to_str())
    own = [] if copy.normalizer is None else [copy.normalizer]
    copy.normalizer = normalizers.Sequence([normalizers.Lowercase(), *own])
    return copy


def eos_token_ids(folder: Path, config: Mapping[str, Any], vocab_size: int) -> frozenset[int]:
    """End-of-sequence token ids: those of generation_config.json, else of the config, else the
    tokenizer's.

    Raises:
        ModelError: naming file and key, where they are not token ids of the model.
    """
    sources: tuple[tuple[str, Mapping[str, Any] | None], ...] = (
        ("generation_config.json: ", read_json(folder / "generation_config.json")),
        ("config.json: ", config),
        ("config.json: text_config.", config.get("text_config")),
    )
    for origin, source in sources:
        found = (source or {}).get("eos_token_id")
        if found is None:
            continue
        ids = found if isinstance(found, list) else [found]
        for token_id in ids:
            if type(token_id) is not int or not 0 <= token_id < vocab_size:
                raise ModelError(
                    f"{folder}/{origin}eos_token_id has {json.dumps(token_id)}; it must be token "
                    f"ids from 0 to {vocab_size - 1}, or null if the model has none"
                )
        return frozenset(ids)
    name = (read_json(folder / "tokenizer_config.json") or {}).get("eos_token")
    content = name.get("content") if isinstance(name, Mapping) else name
    backend = _backend(folder)
    token_id = backend.token_to_id(content) if backend is not None and content else None
    return frozenset() if token_id is None else frozenset([token_id])


def check_vocabulary(folder: Path, tokenizer: str | None, vocab_size: int) -> None:
    """Check that a model has embeddings for all ids of its tokenizer.json, if it has one.

    Args:
        tokenizer: hub id or folder of another tokenizer to use.
        vocab_size: of the model.

    Raises:
        ModelError: embeddings or the tokenizer are missing.
    """
    if tokenizer is not None:
        folder = resolve_folder(tokenizer, None, CONFIG_FILES, key="model.tokenizer")
    backend = _backend(folder)
    ids = [] if backend is None else backend.get_vocab(with_added_tokens=True).values()
    highest = max(ids, default=-1)
    if highest >= vocab_size:
        named = "" if tokenizer is None else " (model.tokenizer)"
        raise ModelError(
            f"{folder}: the tokenizer{named} has ids up to {highest} and the model {vocab_size} "
            "embeddings (vocab_size in config.json); they do not belong together"
        )


def _backend(folder: Path) -> Tokenizer | None:
    path = folder / "tokenizer.json"
    if not path.exists():
        return None
    _try(path)
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"{path} cannot be read: {error}; fetch the model again") from error


def _try(path: Path) -> None:
    """Call ``try_tokenizer`` if the file can be read."""
    with suppress(OSError):
        try_tokenizer(path)


def _chat_template(template: Any) -> str | None:
    """Return the chat template; if there are several by name, the one called default."""
    if isinstance(template, Mapping):
        template = template.get("default")
    return template if isinstance(template, str) else None


def _special_tokens(tokenizer: Any) -> dict[str, str]:
    tokens = tokenizer.special_tokens_map
    return {role: str(text) for role, text in tokens.items() if isinstance(text, str)}


def _control_tokens(backend: Tokenizer) -> frozenset[str]:
    """Return special tokens, and added ones that look like markup, which some chat formats use."""
    added = backend.get_added_tokens_decoder().values()
    return frozenset(
        token.content for token in added if token.special or _MARKUP.fullmatch(token.content)
    )
