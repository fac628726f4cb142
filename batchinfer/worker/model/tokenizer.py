"""Loads a model folder's tokenizer and its end-of-sequence ids.

Before the job's process loads a tokenizer file, a separate process tries to load the file. Native
code reads the file's patterns and tables, and a bad file can make this code loop forever, run out
of memory or crash. In the job's process, a crash would end the job without a message.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, normalizers

from batchinfer.errors import ModelError, one_line
from batchinfer.worker.model.model_folder import CONFIG_FILES, read_json, resolve_folder

_MARKUP = re.compile(r"<.*>|\[.*\]", re.DOTALL)

_CPU_S = 60
_WALL_S = 600
"""Limit in seconds on the elapsed time of the separate process, in case it sleeps or gets no
processor time."""
_MEMORY_BYTES = 4 << 30
_PANICKED = 3
# sys.path is replaced before other imports, because it begins with the current folder, whose
# modules could shadow the intended ones.
_TRIAL_CODE = f"""
import sys
path, sys.path[:] = sys.argv[1], sys.argv[2:]
import resource
from tokenizers import Tokenizer
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_CPU, ({_CPU_S}, {_CPU_S} + 5))
if sys.platform == "linux":
    most = resource.getrlimit(resource.RLIMIT_AS)[1]
    most = {_MEMORY_BYTES} if most == resource.RLIM_INFINITY else min(most, {_MEMORY_BYTES})
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
try:
    tokenizer = Tokenizer.from_file(path)
except Exception:
    sys.exit()  # the main process reports it
except BaseException as error:  # a panic
    print(error, file=sys.stderr)
    sys.exit({_PANICKED})
try:
    ids = tokenizer.get_vocab(with_added_tokens=True).values()
    tokenizer.decode_batch([[id] for id in ids])
except BaseException:
    pass  # the job's rows report it
"""
_ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "RUST_BACKTRACE": "0"}


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    backend: Tokenizer
    chat_template: str | None
    special_tokens: Mapping[str, str]
    """Texts of special tokens, keyed by role, such as ``{"bos_token": "<s>"}``, for chat
    templates."""
    control_tokens: frozenset[str]
    """Texts of the added tokens that have a special meaning for the model, such as role markers."""
    clean_up_tokenization_spaces: bool
    has_token_type_ids: bool
    """True if token type ids mark the tokens of a pair's second text."""


def load_tokenizer(
    name: str, *, revision: str | None = None, key: str = "model.name"
) -> TokenizerParts:
    """Load the tokenizer of a model folder or hub id. No code from the folder is run.

    Args:
        key: configuration key with the name, for messages.

    Raises:
        ModelError: the tokenizer is missing, needs its own code, or has damaged files.
    """
    folder = resolve_folder(name, revision, CONFIG_FILES, key=key)
    # Check config.json first. If config.json is damaged, transformers would blame the tokenizer.
    read_json(folder / "config.json")
    if "auto_map" in (read_json(folder / "tokenizer_config.json") or {}):
        raise ModelError(
            f"{folder}/tokenizer_config.json needs the model's own code (auto_map), "
            "which is never run; set model.tokenizer to a folder with a tokenizer.json and "
            "without auto_map"
        )
    with suppress(OSError):
        try_tokenizer(folder / "tokenizer.json")
    from transformers import AutoTokenizer

    from batchinfer.worker.model.quiet_transformers import quiet_transformers

    try:
        with quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(
                folder, trust_remote_code=False, local_files_only=True
            )
    except Exception as error:  # damaged files raise errors of several libraries
        raise ModelError(
            f"{folder}: the tokenizer cannot be loaded: {one_line(error, 200)}",
            hint="fetch tokenizer.json again, or set model.tokenizer",
        ) from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise ModelError(
            f"{folder}: the tokenizer cannot be saved as tokenizer.json, and other "
            "tokenizers are not supported"
        )
    return TokenizerParts(
        backend=backend,
        chat_template=_chat_template(tokenizer.chat_template),
        special_tokens=_special_tokens(tokenizer),
        control_tokens=_control_tokens(backend),
        clean_up_tokenization_spaces=bool(tokenizer.clean_up_tokenization_spaces),
        has_token_type_ids="token_type_ids" in tokenizer.model_input_names,
    )


def lowers_case(name: str, revision: str | None) -> bool:
    """Return True if sentence-transformers lowercases a model's texts, because
    sentence_bert_config.json sets ``do_lower_case``."""
    folder = resolve_folder(name, revision, CONFIG_FILES)
    values = read_json(folder / "sentence_bert_config.json")
    return isinstance(values, Mapping) and values.get("do_lower_case") is True


def lower_cased(backend: Tokenizer) -> Tokenizer:
    """Return a copy of a tokenizer that lowercases texts first."""
    copy = Tokenizer.from_str(backend.to_str())
    present = [] if copy.normalizer is None else [copy.normalizer]
    copy.normalizer = normalizers.Sequence([normalizers.Lowercase(), *present])
    return copy


def eos_token_ids(folder: Path, config: Mapping[str, Any], vocab_size: int) -> frozenset[int]:
    """Return the end-of-sequence token ids from generation_config.json, or else from the config, or
    else from the tokenizer.

    Raises:
        ModelError: an id is not in the model's vocabulary. The message names the file and the key.
    """
    sources: tuple[tuple[str, Mapping[str, Any] | None], ...] = (
        ("generation_config.json: ", read_json(folder / "generation_config.json")),
        ("config.json: ", config),
        ("config.json: text_config.", config.get("text_config")),
    )
    for origin, source in sources:
        value = (source or {}).get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        for token_id in ids:
            if type(token_id) is not int or not 0 <= token_id < vocab_size:
                raise ModelError(
                    f"{folder}/{origin}eos_token_id has {json.dumps(token_id)}; it must have token "
                    f"ids from 0 to {vocab_size - 1}, or be null"
                )
        return frozenset(ids)
    name = (read_json(folder / "tokenizer_config.json") or {}).get("eos_token")
    content = name.get("content") if isinstance(name, Mapping) else name
    backend = _backend(folder)
    token_id = backend.token_to_id(content) if backend is not None and content else None
    return frozenset() if token_id is None else frozenset([token_id])


def check_vocabulary(folder: Path, tokenizer: str | None, vocab_size: int) -> None:
    """Check that a model has embeddings for all token ids in tokenizer.json, if that file exists.

    Raises:
        ModelError: embeddings are missing, or the tokenizer does not exist.
    """
    if tokenizer is not None:
        folder = resolve_folder(tokenizer, None, CONFIG_FILES, key="model.tokenizer")
    backend = _backend(folder)
    ids = [] if backend is None else backend.get_vocab(with_added_tokens=True).values()
    highest = max(ids, default=-1)
    if highest >= vocab_size:
        named = "" if tokenizer is None else " (model.tokenizer)"
        raise ModelError(
            f"{folder}: the tokenizer{named} has ids up to {highest}, but the "
            f"model has {vocab_size} embeddings (vocab_size in config.json); use "
            "a tokenizer and a model from the same folder"
        )


def _backend(folder: Path) -> Tokenizer | None:
    path = folder / "tokenizer.json"
    if not path.exists():
        return None
    with suppress(OSError):
        try_tokenizer(path)
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"{path} cannot be read: {error}; fetch the model again") from error


def _chat_template(template: Any) -> str | None:
    """Return the chat template. If there are several, return the template named default."""
    if isinstance(template, Mapping):
        template = template.get("default")
    return template if isinstance(template, str) else None


def _special_tokens(tokenizer: Any) -> dict[str, str]:
    tokens = tokenizer.special_tokens_map
    return {role: str(text) for role, text in tokens.items() if isinstance(text, str)}


def _control_tokens(backend: Tokenizer) -> frozenset[str]:
    """Return special tokens, and added tokens that look like the markup of chat formats."""
    added = backend.get_added_tokens_decoder().values()
    return frozenset(
        token.content for token in added if token.special or _MARKUP.fullmatch(token.content)
    )


def try_tokenizer(path: Path) -> None:
    """Load a tokenizer.json and decode each of its tokens, in a process with limits on time and
    memory. The result is cached by the file's content. Do nothing if this Python cannot start
    processes.

    Raises:
        ModelError: the process crashed or exceeded its limits.
        OSError: the file cannot be read.
    """
    problem = _trial_problem(path, hashlib.sha256(path.read_bytes()).digest())
    if problem:
        raise ModelError(
            f"{path} cannot be used: loading it, or decoding its tokens, {problem}",
            hint="fetch tokenizer.json again, or set model.tokenizer",
        )


@functools.lru_cache(maxsize=64)
def _trial_problem(path: Path, digest: bytes) -> str:
    """Return why the process failed, as the predicate of a sentence, or "" after a success.

    Args:
        digest: hash of the file's content, for the cache.
    """
    del digest
    if not sys.executable or getattr(sys, "frozen", False):
        return ""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TRIAL_CODE, str(path), *sys.path],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, **_ENVIRONMENT},
            timeout=_WALL_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"takes more than {_WALL_S} s"
    except OSError:
        return ""
    code, stderr = done.returncode, done.stderr.decode(errors="replace")
    if code in (-signal.SIGXCPU, -signal.SIGKILL):
        return f"takes more than {_CPU_S} s of processor time, or runs out of memory"
    if code < 0 and "memory allocation of" in stderr:
        return f"needs more than {_MEMORY_BYTES >> 30} GiB of memory"
    last = one_line(ValueError(stderr.strip().rpartition("\n")[2]), 200)
    if code < 0:
        return f"crashes the process ({signal.Signals(-code).name}): {last}"
    return f"fails: {last}" if code == _PANICKED else ""
