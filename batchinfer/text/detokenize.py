"""Decodes a growing list of tokens, a small window at a time."""

from __future__ import annotations

import re
from collections.abc import Sequence
from copy import copy

from batchinfer.config import SamplingParams
from batchinfer.protocols import FinishedSample
from batchinfer.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
"""Character that replaces bytes that are not valid UTF-8 or are only part of a character."""
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_LONG_WINDOW = 64  # tokens; only long runs of invalid UTF-8 reach this length
MAX_CHAR_TOKENS = 4
"""Maximum number of tokens per character, because a character has at most four bytes in UTF-8."""


class IncrementalDetokenizer:
    """Decodes one sample token by token, giving the same text as decoding all tokens at once.

    A token's text depends on the tokens before it: the first token of a text may lose its leading
    space, and a character's bytes may be spread over tokens. The window therefore starts with a
    prefix of tokens whose text is known, and the text after the prefix is new, as in vLLM's and
    TGI's detokenizers. The window moves only past text that later tokens cannot change.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._window: list[int] = []
        self._prefix_tokens = 0
        self._prefix_chars = 0
        self.tail = ""
        """Text after the text that ``push`` has returned. The tail may still change, because it may
        end in the replacement for an incomplete character."""

    def push(self, token_id: int) -> str:
        """Add the next token, and return the text that has become final since the last call."""
        newly_settled = self._settle()
        if token_id not in self._skipped and self._tokenizer.token(token_id) is not None:
            self._window.append(token_id)
            self.tail = self._decode(self._window)[self._prefix_chars :]
        return newly_settled

    def fork(self) -> IncrementalDetokenizer:
        forked = copy(self)
        forked._window = list(self._window)
        return forked

    def _settle(self) -> str:
        """Move the window past the tail, if the tail can no longer change."""
        if not self.tail:
            return ""
        if self._tokenizer.has_byte_fallback:
            # A run of byte tokens is decoded as a whole, so a bad byte makes the whole run invalid.
            last = self._tokenizer.token(self._window[-1]) or ""
            return "" if _BYTE_TOKEN.fullmatch(last) else self._move_to(len(self._window))
        if not self.tail.endswith(REPLACEMENT):
            return self._move_to(len(self._window))
        return self._settle_invalid() if len(self._window) > _LONG_WINDOW else ""

    def _settle_invalid(self) -> str:
        """Settle most of a long run of bytes that are not UTF-8, up to a point that splits no
        character: decoding the two sides separately gives the same text as decoding both together.
        """
        text = self._decode(self._window)
        last = len(self._window) - MAX_CHAR_TOKENS
        for end in range(last, max(last - MAX_CHAR_TOKENS, self._prefix_tokens), -1):
            left = self._decode(self._window[:end])
            if left + self._decode(self._window[end:]) == text:
                return self._move_to(end, left[self._prefix_chars :])
        return ""

    def _move_to(self, end: int, text: str | None = None) -> str:
        """Make the window's tokens up to ``end`` its prefix, if possible.

        Returns:
            The text that the new prefix adds: ``text``, by default the tail; "" if not possible.
        """
        text = self.tail if text is None else text
        prefix_chars = len(self._decode(self._window[self._prefix_tokens : end]))
        if prefix_chars == 0:  # its only text is a space, which decoding drops at the start
            return ""
        del self._window[: self._prefix_tokens]
        self._prefix_tokens = end - self._prefix_tokens
        self._prefix_chars = prefix_chars
        self.tail = self.tail[len(text) :]
        return text

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


def output_text(tokenizer: Tokenizer, sample: FinishedSample, params: SamplingParams) -> str:
    """Return a sample's text. The token or string that stopped the sample is included only with
    ``include_stop_str_in_output``."""
    token_ids, match = sample.token_ids, sample.stop_match
    stopped_by_token = sample.finish_reason == "stop" and match is None
    if stopped_by_token and not params.include_stop_str_in_output:
        # The end token is not part of the text, even if it is an ordinary token.
        token_ids = token_ids[:-1]
    text = tokenizer.decode(token_ids, skip_special_tokens=params.skip_special_tokens)
    return text if match is None else text[: match.text_end]


def token_text(tokenizer: Tokenizer, token_id: int, before: Sequence[int]) -> str:
    """Return the text that a token adds to the tokens before it.

    The token that completes a character adds the whole character, as in vLLM's
    ``LogprobsProcessor._correct_decoded_token`` (vllm/v1/engine/logprobs.py).

    Args:
        before: ids of the tokens before the token; the last ``MAX_CHAR_TOKENS`` suffice.
    """
    text = tokenizer.decode([token_id], skip_special_tokens=False)
    if REPLACEMENT not in (text[:1], text[-1:]):
        return text
    for start in range(len(before), max(len(before) - MAX_CHAR_TOKENS, 0) - 1, -1):
        # Use as few tokens as possible, because a bad byte makes a whole run of byte tokens
        # invalid.
        context = list(before[start:])
        text = tokenizer.decode([*context, token_id], skip_special_tokens=False)
        if not text.startswith(REPLACEMENT):
            known = tokenizer.decode(context, skip_special_tokens=False).rstrip(REPLACEMENT)
            return text.rstrip(REPLACEMENT)[len(known) :]
    return ""


def bad_words_token_ids(
    tokenizer: Tokenizer, bad_words: Sequence[str], vocab_size: int | None = None
) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of each text in ``bad_words``, both without and with a leading space.

    Equal lists of ids appear only once. Lists with ids of ``vocab_size`` or more, which the model
    cannot generate, are omitted.
    """
    spellings = [space + word.lstrip() for word in bad_words for space in ("", " ")]
    encoded = tokenizer.encode_batch(spellings, add_special_tokens=False, parse_special_tokens=True)
    sequences = (tuple(ids.tolist()) for ids in encoded)
    written = (ids for ids in sequences if vocab_size is None or max(ids, default=0) < vocab_size)
    return tuple(dict.fromkeys(ids for ids in written if ids))
