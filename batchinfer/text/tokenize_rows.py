"""Tokenizes rendered rows in few calls to the tokenizer; a bad row does not affect other rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from batchinfer.errors import RowError
from batchinfer.text.control_tokens import Marks
from batchinfer.text.images.image_placeholders import ImagesInText
from batchinfer.text.tokenizer import TokenIds, Tokenizer

_Text = TypeVar("_Text")
_Encoded = TypeVar("_Encoded")


@dataclass(frozen=True, slots=True)
class RenderedText:
    """A row's text before it is tokenized."""

    text: str
    """Text with marks in place of the row's own control-token texts, unless ``marks`` is None."""
    add_special_tokens: bool
    marks: Marks | None
    has_control_text: bool
    images: ImagesInText | None = None

    @property
    def restored(self) -> str:
        """Text without marks, with a placeholder for each image."""
        return self.text if self.marks is None else self.marks.restore(self.text)

    @property
    def to_encode(self) -> str:
        """Text with marks, with all tokens of each image."""
        return self.text if self.images is None else self.images.expanded(self.text)


class TextEncoder:
    """Tokenizes rendered rows. The rows' own text never becomes a control token."""

    def __init__(self, tokenizer: Tokenizer, *, parse_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._parse_special_tokens = parse_special_tokens

    def encode(self, rendered: Sequence[RenderedText]) -> list[TokenIds | RowError]:
        """Return token ids of each text, or its error (``invalid_utf8``: a lone surrogate)."""
        results: list[TokenIds | RowError | None] = [unencodable(item.text) for item in rendered]
        for add_special_tokens in (False, True):
            for encode, marked in ((self._encode_whole, False), (self._encode_marked, True)):
                group = [
                    index
                    for index, item in enumerate(rendered)
                    if results[index] is None
                    and item.add_special_tokens == add_special_tokens
                    and (item.marks is not None) == marked
                ]
                encoded = each_apart_if_needed(encode, [rendered[index] for index in group])
                for index, result in zip(group, encoded, strict=True):
                    results[index] = result
        return [self._with_one_bos(result) for result in results if result is not None]

    def _encode_whole(self, group: Sequence[RenderedText]) -> list[TokenIds]:
        """Encode whole texts, exactly as transformers does."""
        encoded = self._tokenizer.encode_batch(
            [item.to_encode for item in group],
            add_special_tokens=group[0].add_special_tokens,
            parse_special_tokens=True,
        )
        if not self._parse_special_tokens:
            for index, item in enumerate(group):
                if self._has_hidden_control(item, encoded[index]):
                    encoded[index] = self._encode_marked([item])[0]
        return encoded

    def _encode_marked(self, group: Sequence[RenderedText]) -> list[TokenIds]:
        return self._tokenizer.encode_marked(
            [item.to_encode for item in group],
            [str if item.marks is None else item.marks.restore for item in group],
            add_special_tokens=group[0].add_special_tokens,
        )

    def _has_hidden_control(self, item: RenderedText, token_ids: TokenIds) -> bool:
        """Return True if the tokenized text has more control tokens than are visible in the text.

        Some tokenizers normalize the text first, and also find control tokens that are written in
        full-width or upper-case letters.
        """
        added = self._tokenizer.num_added_special_tokens if item.add_special_tokens else 0
        count = self._tokenizer.num_control_ids(token_ids) - added
        return count > 0 and count > len(self._tokenizer.control.pattern.findall(item.to_encode))

    def _with_one_bos(self, result: TokenIds | RowError) -> TokenIds | RowError:
        """Drop the first token if the first two tokens are BOS."""
        bos = self._tokenizer.bos_token_id
        if isinstance(result, RowError) or bos is None or len(result) < 2:
            return result
        return result[1:] if result[0] == bos and result[1] == bos else result


def unencodable(text: str) -> RowError | None:
    """Return the error of a text with a lone surrogate, which UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return RowError("invalid_utf8", f"the prompt {half_of_pair(error)}")
    return None


def half_of_pair(error: UnicodeEncodeError) -> str:
    """Say which character of a text UTF-8 cannot encode."""
    code = ord(error.object[error.start])
    where = f"character {error.start}"
    return f"is not valid text: {where} is half of a surrogate pair (U+{code:04X})"


def each_apart_if_needed(
    encode: Callable[[Sequence[_Text]], Sequence[_Encoded]], group: Sequence[_Text]
) -> Sequence[_Encoded | RowError]:
    """Encode ``group`` in one call; if that fails, encode its texts one by one."""
    if not group:
        return []
    try:
        return encode(group)
    except MemoryError:  # running out of memory is not an error in the text
        raise
    # The backend raises plain Exception, for example if a vocabulary has no unknown token.
    except Exception as error:
        if len(group) == 1:
            return [
                RowError("unsupported_content", f"the tokenizer cannot encode the text: {error}")
            ]
        return [result for item in group for result in each_apart_if_needed(encode, [item])]
