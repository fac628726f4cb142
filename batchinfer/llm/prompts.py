"""Reads the prompts and conversations of a call, and refuses invalid prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from typing import Any, NotRequired, TypedDict

import numpy as np

from batchinfer.engine.request import TokenIds
from batchinfer.errors import NotYetError
from batchinfer.llm.compatibility import settle
from batchinfer.llm.images import TextWithImages, TokensWithImages, image_file, is_picture
from batchinfer.llm.prompt_embeds import PromptEmbeds
from batchinfer.text.chat import FinalMessage
from batchinfer.text.prompts import Prompt
from batchinfer.text.tokenize_rows import half_of_pair
from batchinfer.text.tools.row_tools import RowTools, checked_choice, checked_tools


class TextPrompt(TypedDict):
    """vLLM's type for a prompt given as text."""

    prompt: str


class ImageData(TypedDict):
    """vLLM's type for the images of a prompt: PIL images, arrays [height, width, 3] of uint8, or
    bytes of image files."""

    image: Any


class ImagesPrompt(TypedDict):
    """vLLM's type for a text, or token ids, with images and a placeholder for each image."""

    prompt: NotRequired[str]
    prompt_token_ids: NotRequired[list[int]]
    multi_modal_data: ImageData


class TokensPrompt(TypedDict):
    """vLLM's type for a prompt given as token ids; outputs show ``prompt`` as their text."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]


class EmbedsPrompt(TypedDict):
    """vLLM's type for a prompt given as embeddings [tokens, H]; outputs show ``prompt`` as their
    text."""

    prompt_embeds: Any
    prompt: NotRequired[str]


PromptLike = (
    str
    | Sequence[int]
    | TextPrompt
    | ImagesPrompt
    | TokensPrompt
    | EmbedsPrompt
    | Mapping[str, Any]
)
"""Text, token ids, ``{"prompt": text}`` (with ``multi_modal_data`` for images),
``{"prompt_token_ids": ids}`` or ``{"prompt_embeds": tensor}``."""
Conversation = Sequence[Mapping[str, Any]]
"""Messages: ``[{"role": "user", "content": "..."}]``."""
_KEYS = ("prompt", "prompt_token_ids")
_FORMS = "a string, a list of token ids, {'prompt': ...} or {'prompt_token_ids': ...}"
_MESSAGES = "a list of messages such as [{'role': 'user', 'content': '...'}]"
_FILE_KEYS = ("image", "image_pil", "bytes")
"""Keys in messages whose values are images: bytes are an image file, and arrays are pixels."""


def read_prompts(
    prompts: PromptLike | Sequence[PromptLike],
    vocab_size: int,
    *,
    has_tokenizer: bool,
    embeds: PromptEmbeds | None = None,
) -> list[str | TextWithImages | TokensWithImages | Prompt]:
    """Return each prompt as a text or as a ``Prompt`` with token ids or embeddings; a prompt with
    images becomes a text or token ids together with the images.

    Args:
        embeds: reads embeddings; None if the ``LLM`` does not accept them.

    Raises:
        TypeError, ValueError: an item is not a prompt; the message names its index and the
            valid forms.
    """
    items: Sequence[Any] = [prompts] if _is_one(prompts) else listed(prompts, "prompts", _FORMS)
    read = [_read(item, f"prompt {at}", vocab_size, embeds) for at, item in enumerate(items)]
    for at, prompt in enumerate(read):
        if isinstance(prompt, str | TextWithImages) and not has_tokenizer:
            raise ValueError(
                f"prompt {at} is a string, but you cannot pass text prompts when "
                "skip_tokenizer_init is True; give token ids, or leave out "
                "`skip_tokenizer_init=True`"
            )
        if isinstance(prompt, TokensWithImages) and not has_tokenizer:
            raise ValueError(
                f"prompt {at} has images, which need a tokenizer; leave out "
                "`skip_tokenizer_init=True`"
            )
    return read


def read_conversations(
    conversations: Conversation | Sequence[Conversation],
) -> list[list[Mapping[str, Any]]]:
    """Return the conversations as a list; a single conversation becomes a list of one.

    Raises:
        TypeError: a message is not a dict; the error names the conversation and the message.
    """
    items: list[Any] = listed(conversations, "conversations", _MESSAGES)
    if items and isinstance(items[0], Mapping):
        items = [items]
    read = [listed(item, f"conversation {at}", _MESSAGES) for at, item in enumerate(items)]
    for at, messages in enumerate(read):
        for index, message in enumerate(messages):
            if not isinstance(message, Mapping):
                raise TypeError(
                    f"message {index} of conversation {at} is {kind_of(message)}; "
                    "give {'role': ..., 'content': ...}"
                )
    return [_plain_talk(messages, at) for at, messages in enumerate(read)]


def _plain_talk(messages: Any, at: int) -> Any:
    try:
        return _plain(messages)
    except TypeError as error:
        raise TypeError(f"conversation {at}: {error}") from None


def _plain(value: Any) -> Any:
    """Convert every mapping, list and string in ``value`` to a plain dict, list or str, and every
    image to an ``ImageFile``, or to an error if it cannot be decoded."""
    if isinstance(value, Mapping):
        return {
            _plain(key): image_file(item)
            if key in _FILE_KEYS and isinstance(item, bytes | np.ndarray)
            else _plain(item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if is_picture(value):
        return image_file(value)
    return str(value) if isinstance(value, str) else value


def final_message(
    add_generation_prompt: bool | None, continue_final_message: bool | None
) -> FinalMessage:
    """Translate vLLM's arguments that say how the prompt of a conversation ends.

    Raises:
        ValueError: both arguments are True.
    """
    if continue_final_message:
        if add_generation_prompt:
            raise ValueError(
                "continue_final_message continues the last message, but "
                "add_generation_prompt starts a new message; keep only one of them"
            )
        return "continue"
    if add_generation_prompt is None and continue_final_message is None:
        return "auto"
    return "leave" if add_generation_prompt is False else "answer"


def chat_tools(tools: object, choice: object, *, has_parser: bool) -> RowTools | None:
    """Return the tools of a chat; None if it has no tools or ``choice`` is ``none``.

    Args:
        has_parser: True if the format of the model's tool calls is known.

    Raises:
        ValueError: the tools or the choice are invalid, or the choice needs a known format.
    """
    checked = checked_tools([] if tools is None else tools)
    if not checked:
        if choice not in ("auto", "none"):
            raise ValueError(f"tool_choice is {choice!r}, but the call has no tools; give tools")
        return None
    chosen = checked_choice(choice, checked)
    if chosen not in ("auto", "none") and not has_parser:
        raise ValueError(
            "a tool_choice that requires a call needs the model's tool-call format; give "
            "LLM(tool_parser='auto'), or the format's name as tool_parser"
        )
    return None if chosen == "none" else RowTools(checked, chosen)


def _is_one(prompts: Any) -> bool:
    if isinstance(prompts, str | Mapping):
        return True
    if isinstance(prompts, np.ndarray):
        return prompts.ndim == 1 and prompts.dtype.kind in "iu"
    is_list = isinstance(prompts, list | tuple)
    return is_list and len(prompts) > 0 and isinstance(prompts[0], int | np.integer)


def _read(
    item: Any, name: str, vocab_size: int, embeds: PromptEmbeds | None
) -> str | TextWithImages | TokensWithImages | Prompt:
    shown: str | None = None
    if isinstance(item, Mapping) and item.get("prompt_embeds") is not None:
        return _embedded(item, name, embeds)
    if isinstance(item, Mapping) and "multi_modal_data" in item:
        if item["multi_modal_data"]:
            return _with_images(item, name, vocab_size)
        item = {key: value for key, value in item.items() if key != "multi_modal_data"}
    if isinstance(item, Mapping):
        item, shown, name = _value_of(item, name)
    if isinstance(item, str):
        return checked_text(item, name)
    return Prompt(_checked_ids(item, name, vocab_size), shown, False, False)


def _embedded(item: Mapping[Any, Any], name: str, embeds: PromptEmbeds | None) -> Prompt:
    if embeds is None:
        raise ValueError(f"{name} has prompt_embeds; give LLM(enable_prompt_embeds=True)")
    for key in ("prompt_token_ids", "multi_modal_data"):
        if item.get(key) is not None:
            raise ValueError(f"{name} has both prompt_embeds and {key}; keep one of them")
    _check_keys(item, (*_KEYS, "prompt_embeds"), name)
    shown = item.get("prompt")
    if not isinstance(shown, str | None):
        raise TypeError(f"{name}: its prompt is {kind_of(shown)}; give a string")
    return embeds.read(item["prompt_embeds"], f"{name}: its prompt_embeds", shown)


def _with_images(
    item: Mapping[Any, Any], name: str, vocab_size: int
) -> TextWithImages | TokensWithImages:
    data, rest = item["multi_modal_data"], {**item}
    del rest["multi_modal_data"]
    if not isinstance(data, Mapping):
        raise TypeError(f"{name}: its multi_modal_data is {kind_of(data)}; give {{'image': ...}}")
    for key in data.keys() - {"image"}:
        if key in ("video", "audio"):
            raise NotYetError(f"{name}: multi_modal_data with {key}")
        raise ValueError(f"{name}: multi_modal_data has the unknown key {key!r}; give 'image'")
    value, shown, where = _value_of(rest, name)
    pictures = data["image"] if isinstance(data["image"], list | tuple) else [data["image"]]
    try:
        files = [image_file(each) for each in pictures]
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from None
    if isinstance(value, str):
        return TextWithImages(checked_text(value, where), files)
    return TokensWithImages(_checked_ids(value, where, vocab_size), shown, files)


def _value_of(item: Mapping[Any, Any], name: str) -> tuple[Any, str | None, str]:
    """Return the text or token ids of a prompt that is a dict, the text that outputs show for token
    ids, and the value's name in messages."""
    _check_keys(item, _KEYS, name)
    values = {key: item[key] for key in _KEYS if item.get(key) is not None}
    if not values:
        raise ValueError(f"{name} must have prompt or prompt_token_ids")
    for key, value in values.items():
        if isinstance(value, str) != (key == "prompt") or isinstance(value, Mapping):
            expected = "a string" if key == "prompt" else "a list of token ids"
            raise TypeError(f"{name}: its {key} is {kind_of(value)}; give {expected}")
    if "prompt_token_ids" in values:
        return values["prompt_token_ids"], values.get("prompt"), f"{name}: its prompt_token_ids"
    return values["prompt"], None, f"{name}: its prompt"


def _check_keys(item: Mapping[Any, Any], known: Sequence[str], name: str) -> None:
    unknown = {str(key): value for key, value in item.items() if key not in known}
    try:
        settle(name, unknown, known, stacklevel=9)
    except TypeError as error:
        raise ValueError(str(error).replace("no argument", "no key")) from None


def checked_text(text: str, name: str) -> str:
    """Return a string, which may be an instance of a subclass, as a plain ``str``.

    Raises:
        ValueError: the string cannot be encoded as UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} {half_of_pair(error)}") from None
    return str(text)


def _checked_ids(ids: Any, name: str, vocab_size: int) -> TokenIds:
    if not isinstance(ids, list | tuple | np.ndarray):
        raise TypeError(f"{name} is {kind_of(ids)}; give {_FORMS}")
    values = ids.tolist() if isinstance(ids, np.ndarray) else ids
    for kind in set(map(type, values)):
        if kind is bool or not issubclass(kind, int | np.integer):
            at = next(at for at, value in enumerate(values) if type(value) is kind)
            raise TypeError(
                f"{name}: element {at} is {kind_of(values[at])}; token ids are whole numbers"
            )
    for value in (min(values), max(values)) if values else ():
        if not 0 <= value < vocab_size:
            raise ValueError(
                f"{name}: token id {value} is out of vocabulary; "
                f"the model's ids are 0 to {vocab_size - 1}"
            )
    return np.array(values, dtype=np.int32)


def listed(values: Any, name: str, expected: str) -> list[Any]:
    """Return the items of a list, an array or a column of a data frame.

    Raises:
        TypeError: ``values`` has another type; the message names ``expected``.
    """
    several = isinstance(values, Sized) and hasattr(values, "__iter__")
    unordered = isinstance(values, set | frozenset) or hasattr(values, "columns")
    if not several or unordered or isinstance(values, str | bytes | bytearray | Mapping):
        also = ", or put them into a list first" if hasattr(values, "__next__") else ""
        raise TypeError(f"{name} is {kind_of(values)}; give {expected}{also}")
    return list(values)


def one_for_each(
    value: Any, kinds: type | tuple[type, ...], name: str, what: str, count: int, plural: str
) -> list[Any]:
    """Return the value of a call's argument for each prompt, from a single value or a list.

    Args:
        kinds: types of a single value.
        what: description of a single value, for messages.
        plural: description of several values, for messages.

    Raises:
        TypeError: a value has the wrong type.
        ValueError: the numbers of values and prompts differ.
    """
    if isinstance(value, kinds):
        return [value] * count
    values = listed(value, name, f"{what}, or a list with one for each prompt")
    if len(values) != count:
        raise ValueError(f"there are {count} prompts, but {len(values)} {plural}")
    for at, item in enumerate(values):
        if not isinstance(item, kinds):
            raise TypeError(f"{name} {at} is {kind_of(item)}; give {what}")
    return values


def kind_of(value: object) -> str:
    """Return the type of a value for messages: ``a list``, ``None``."""
    kind = type(value).__name__
    return "None" if value is None else f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"
