"""Converts values of a row to text: decodes UTF-8 strictly and checks conversations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from batchinfer.errors import RowError
from batchinfer.text.chat import Message
from batchinfer.text.sandbox import MAX_TEXT_CHARS

_MAX_BYTES_PER_CHAR = 4
MAX_ROW_BYTES = 4 * _MAX_BYTES_PER_CHAR * MAX_TEXT_CHARS
"""Maximum number of bytes in all columns from which a row's prompt is made."""
SYSTEM_ROLES = ("system", "developer")
IMAGE_TYPES = ("image", "image_url", "input_image", "image_pil")
"""Types of image parts in the message formats of OpenAI, transformers and vLLM."""
IMAGE_KEYS = ("image_url", "image", "image_pil", "url", "path")
"""Fields of a message part that may hold an image."""


def decoded(value: object, column: str) -> Any:
    """Decode all bytes in ``value``, including nested ones, from UTF-8.

    Raises:
        RowError: ``invalid_utf8``, ``row_too_large``, or ``value`` itself if it is an error.
    """
    if isinstance(value, RowError):
        raise value
    require_size(value, column)
    if isinstance(value, bytes):
        try:
            value = str(value, "utf-8")
        except UnicodeDecodeError as error:
            raise RowError("invalid_utf8", f"column {column}: {error}") from error
    if isinstance(value, str):
        require_size(value, column)
        return value
    if isinstance(value, Mapping):
        return {decoded(key, column): decoded(item, column) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [decoded(item, column) for item in value]
    return value


def require_size(value: object, column: str) -> None:
    """Raise ``row_too_large`` if ``value`` is a text that is too long."""
    chars = len(value) if isinstance(value, str | bytes) else 0
    if chars // (_MAX_BYTES_PER_CHAR if isinstance(value, bytes) else 1) > MAX_TEXT_CHARS:
        what = f"column {column} holds more than {MAX_TEXT_CHARS} characters"
        raise RowError("row_too_large", what)


def texts_in(value: object) -> Iterator[str]:
    """Yield all texts in ``value``, including nested ones, without keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from texts_in(item)
    elif isinstance(value, list):
        for item in value:
            yield from texts_in(item)


def keys_in(value: object) -> Iterator[str]:
    """Yield all keys in ``value``, including nested ones."""
    if isinstance(value, Mapping):
        yield from value
        value = list(value.values())
    for item in value if isinstance(value, list) else []:
        yield from keys_in(item)


def map_texts(function: Callable[[str], str], value: Any, *, keys: bool = False) -> Any:
    """Apply ``function`` to all texts in ``value``, and to its keys if ``keys`` is True."""
    if isinstance(value, str):
        return function(value)
    if isinstance(value, Mapping):
        return {
            function(key) if keys else key: map_texts(function, item, keys=keys)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [map_texts(function, item, keys=keys) for item in value]
    return value


def row_token_ids(value: object, where: str, vocab_size: int) -> npt.NDArray[np.int32]:
    """Return the token ids that a row contains, int32.

    Raises:
        RowError: ``empty_prompt`` if there are no ids; ``unsupported_content`` if the value is not
            a list of valid ids.
    """
    if value is None or (isinstance(value, list | tuple | np.ndarray) and len(value) == 0):
        raise RowError("empty_prompt", f"{where} holds no token ids")
    try:
        ids = np.asarray(value)
    except ValueError:  # the lists have different lengths
        ids = np.empty(0, dtype=np.object_)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise RowError("unsupported_content", f"{where} is not a list of integers")
    if ids.min() < 0 or ids.max() >= vocab_size:
        reason = f"token ids must be from 0 to {vocab_size - 1}"
        raise RowError("unsupported_content", f"{where}: {reason}")
    return ids.astype(np.int32)


def as_messages(value: list[Any], column: str) -> list[Message]:
    """Return the messages of a conversation, without null fields.

    The content of a message is a text, or a list of parts: ``{"type": "text", "text": ...}`` or
    ``{"type": "image", "image": ...}``, where null means the next image from the row's image
    columns.

    Raises:
        RowError: ``empty_prompt`` for null or no content, or ``unsupported_content`` for other
            content.
    """
    return [_as_message(item, f"column {column}, message {at}") for at, item in enumerate(value)]


def require_content(prompt: str | list[Message], where: str) -> None:
    """Raise ``empty_prompt`` if a text is blank, or if a conversation has no content besides a
    system message."""
    if isinstance(prompt, str):
        if not prompt.strip():
            raise RowError("empty_prompt", f"{where} is empty or whitespace only")
        return
    messages = prompt
    spoken = [message for message in messages if message["role"] not in SYSTEM_ROLES] or messages
    if not any(_has_text(message) or message.get("tool_calls") for message in spoken):
        raise RowError("empty_prompt", f"{where}: the conversation is empty")


def _has_text(message: Message) -> bool:
    content = message.get("content", "")
    if not isinstance(content, list):
        return bool(content.strip())
    return any(part["type"] == "image" or part["text"].strip() for part in content)


def _as_message(item: object, where: str) -> Message:
    if not isinstance(item, Mapping):
        raise RowError("unsupported_content", f"{where} is not a struct of role and content")
    message = {key: value for key, value in item.items() if value is not None}
    if not isinstance(message.get("role"), str) or not message["role"]:
        raise RowError("unsupported_content", f"{where} has no role")
    if message.keys() <= {"role", "name"}:
        what = "null" if "content" in item else "no"
        raise RowError("empty_prompt", f"{where} has {what} content")
    content = message.get("content", "")
    if isinstance(content, list):
        message["content"] = [_part(part, where) for part in content]
    elif not isinstance(content, str):
        kind = type(content).__name__
        raise RowError("unsupported_content", f"{where}: content is {kind}, not text")
    return message


def _part(part: object, where: str) -> dict[str, Any]:
    if isinstance(part, Mapping) and part.get("type") in IMAGE_TYPES:
        given = [part[key] for key in IMAGE_KEYS if not _is_null(part.get(key))]
        image = given[0] if given else None
        if isinstance(image, Mapping) and image.get("url") is not None:
            image = image["url"]
        return {"type": "image", "image": image}
    return {"type": "text", "text": _part_text(part, where)}


def _is_null(value: object) -> bool:
    """Return True for null, and for a struct of nulls."""
    values = value.values() if isinstance(value, Mapping) else [value]
    return all(item is None for item in values)


def _part_text(part: object, where: str) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type") in ("text", None):
        text = part.get("text")
        if isinstance(text, str):
            return text
        problem = f"{where}: a part of type text has no string in its text field"
        raise RowError("unsupported_content", problem)
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise RowError(
        "unsupported_content",
        f"{where}: a part has type {kind}, but only text and images are supported",
    )
