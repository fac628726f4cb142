"""Reads the arguments of the Python API; what is no prompt is refused before anything runs."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence, Sized
from typing import Any

import numpy as np

from batchinfer.config import SamplingParams
from batchinfer.engine.request import TokenIds

PromptLike = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``."""
Conversation = Sequence[Mapping[str, Any]]
"""Messages: ``[{"role": "user", "content": "..."}]``."""

_KEYS = ("prompt", "prompt_token_ids")
_FORMS = "a text, a list of token ids, {'prompt': ...} or {'prompt_token_ids': ...}"
_MESSAGES = "a list of messages such as [{'role': 'user', 'content': '...'}]"


def read_prompts(
    prompts: PromptLike | Sequence[PromptLike], vocab_size: int
) -> list[str | TokenIds]:
    """Each prompt's text or token ids, int32.

    Raises:
        TypeError, ValueError: naming the prompt by its index, and what it must be.
    """
    items: Sequence[Any] = [prompts] if _is_one(prompts) else _listed(prompts, "prompts", _FORMS)
    return [_read(item, f"prompt {at}", vocab_size) for at, item in enumerate(items)]


def read_conversations(
    conversations: Conversation | Sequence[Conversation],
) -> list[list[Mapping[str, Any]]]:
    """Several conversations as a list, one as a list of one.

    Raises:
        TypeError: naming the conversation and the message by their indices.
    """
    items: list[Any] = _listed(conversations, "conversations", _MESSAGES)
    if items and isinstance(items[0], Mapping):
        items = [items]
    found = [_listed(item, f"conversation {at}", _MESSAGES) for at, item in enumerate(items)]
    for at, messages in enumerate(found):
        for index, message in enumerate(messages):
            if not isinstance(message, Mapping):
                raise TypeError(
                    f"message {index} of conversation {at} is {_kind(message)}; "
                    "give {'role': ..., 'content': ...}"
                )
    return [_plain(messages) for messages in found]


def _plain(value: Any) -> Any:
    """``value`` with no other mappings, lists and texts than Python's own in it."""
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, str) else value


def params_of_each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int, vocab_size: int
) -> list[SamplingParams]:
    """The sampling parameters of each of ``count`` prompts.

    Raises:
        TypeError, ValueError: they are something else, not as many, or name a token id that the
            model does not have.
    """
    if params is None or isinstance(params, SamplingParams):
        found = [params or SamplingParams()] * count
        distinct = found[:1]
    else:
        expected = "SamplingParams(...), or a list of one for each prompt"
        distinct = found = _listed(params, "sampling_params", expected)
        if len(found) != count:
            raise ValueError(f"{count} prompts, but {len(found)} sampling params")
    for at, one in enumerate(distinct):
        if not isinstance(one, SamplingParams):
            raise TypeError(f"sampling_params {at} is {_kind(one)}; give SamplingParams(...)")
        one.check_token_ids(vocab_size)
    return found


def adapters_of_each(
    adapter: str | Sequence[str | None] | None, count: int, numbers: Mapping[str, int]
) -> list[int]:
    """The number of each of ``count`` prompts' adapter; 0 is the base model.

    Raises:
        TypeError, ValueError: it is no name, there is no such adapter, or they are not as many.
    """
    names: list[Any] = [adapter] * count
    if not (adapter is None or isinstance(adapter, str)):
        names = _listed(adapter, "adapter", "a name, or a list of one for each prompt")
        if len(names) != count:
            raise ValueError(f"{count} prompts, but {len(names)} adapters")
    for name in names:
        if name is not None and name not in numbers:
            raise ValueError(
                f"there is no adapter {name!r}; known: {', '.join(numbers) or '(none)'}"
            )
    return [0 if name is None else numbers[name] for name in names]


def _is_one(prompts: Any) -> bool:
    """Whether this is one prompt, not several."""
    if isinstance(prompts, str | Mapping):
        return True
    if isinstance(prompts, np.ndarray):
        return prompts.ndim == 1 and prompts.dtype.kind in "iu"
    is_list = isinstance(prompts, list | tuple)
    return is_list and len(prompts) > 0 and isinstance(prompts[0], int | np.integer)


def _read(item: Any, name: str, vocab_size: int) -> str | TokenIds:
    if isinstance(item, Mapping):
        item, name = _value_of(item, name)
    if isinstance(item, str):
        return _checked_text(item, name)
    if isinstance(item, list | tuple | np.ndarray):
        return _checked_ids(item, name, vocab_size)
    raise TypeError(f"{name} is {_kind(item)}; give {_FORMS}")


def _value_of(item: Mapping[Any, Any], name: str) -> tuple[Any, str]:
    """The text or the token ids of a prompt that is a dict, and their name."""
    for key in item:
        if key not in _KEYS:
            near = difflib.get_close_matches(str(key), _KEYS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(_KEYS)}"
            raise ValueError(f"{name} has the unknown key {key!r}; {hint}")
    if len(item) != 1:
        raise ValueError(f"{name} must have either prompt or prompt_token_ids")
    ((key, value),) = item.items()
    if isinstance(value, str) != (key == "prompt") or isinstance(value, Mapping):
        expected = "a text" if key == "prompt" else "a list of token ids"
        raise TypeError(f"{name}: its {key} is {_kind(value)}; give {expected}")
    return value, f"{name}: its {key}"


def _checked_text(text: str, name: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} is no valid text: character {error.start} is half of a surrogate pair "
            f"(U+{ord(text[error.start]):04X})"
        ) from None
    return str(text)


def _checked_ids(ids: Sequence[Any] | np.ndarray[Any, Any], name: str, vocab_size: int) -> TokenIds:
    values = ids.tolist() if isinstance(ids, np.ndarray) else ids
    for kind in set(map(type, values)):
        if kind is bool or not issubclass(kind, int | np.integer):
            at = next(at for at, value in enumerate(values) if type(value) is kind)
            raise TypeError(
                f"{name}: element {at} is {_kind(values[at])}; token ids are whole numbers"
            )
    for value in (min(values), max(values)) if values else ():
        if not 0 <= value < vocab_size:
            raise ValueError(
                f"{name}: token id {value} is not in the vocabulary; "
                f"the model's ids are 0 to {vocab_size - 1}"
            )
    return np.array(values, dtype=np.int32)


def _listed(values: Any, name: str, expected: str) -> list[Any]:
    """Several values as a list: of a list, an array or a column of a data frame."""
    several = isinstance(values, Sized) and hasattr(values, "__iter__")
    unordered = isinstance(values, set | frozenset) or hasattr(values, "columns")
    if not several or unordered or isinstance(values, str | bytes | bytearray | Mapping):
        also = ", or put them into a list first" if hasattr(values, "__next__") else ""
        raise TypeError(f"{name} is {_kind(values)}; give {expected}{also}")
    return list(values)


def _kind(value: object) -> str:
    kind = type(value).__name__
    return "None" if value is None else f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"
