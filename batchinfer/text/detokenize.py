"""The text of a growing list of tokens, decoded a small window at a time."""

from __future__ import annotations

import re

from batchinfer.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
"""Stands for bytes that are no UTF-8, or not yet."""
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_LONG_WINDOW = 64  # tokens; reached only by long runs of bytes that are no UTF-8
_MAX_CHAR_TOKENS = 4  # a UTF-8 character has at most 4 bytes, so it is in at most 4 tokens


class IncrementalDetokenizer:
    """Decodes one sample token by token; the text is always that of decoding all at once.

    Decoders look back: the first token of a text may lose its leading space, and a character's
    bytes may be spread over tokens. So the window starts with tokens whose text is known (the
    prefix), and the new text is what comes after theirs, as in vLLM's and TGI's detokenizers.
    The window moves on only at a point that later tokens cannot change.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._window: list[int] = []
        self._prefix_tokens = 0
        self._prefix_chars = 0
        self.tail = ""
        """The text after what ``push`` has returned. It can still change: it may end in the
        replacement for a character whose bytes are not all there."""

    def push(self, token_id: int) -> str:
        """Take the next token; returns the text that has settled since the last call."""
        newly_settled = self._settle()
        if token_id not in self._skipped and self._tokenizer.token(token_id) is not None:
            self._window.append(token_id)
            self.tail = self._decode(self._window)[self._prefix_chars :]
        return newly_settled

    def _settle(self) -> str:
        """Move the window over the tail, where that can no longer change."""
        if not self.tail:
            return ""
        if self._tokenizer.has_byte_fallback:
            # A run of byte tokens is decoded as a whole: one bad byte spoils all of it.
            last = self._tokenizer.token(self._window[-1]) or ""
            return "" if _BYTE_TOKEN.fullmatch(last) else self._move_to(len(self._window))
        if not self.tail.endswith(REPLACEMENT):
            return self._move_to(len(self._window))
        return self._settle_invalid() if len(self._window) > _LONG_WINDOW else ""

    def _settle_invalid(self) -> str:
        """Settle most of a long run of bytes that are no UTF-8: up to where no character is
        split, which shows in both sides having the same text apart as together."""
        text = self._decode(self._window)
        last = len(self._window) - _MAX_CHAR_TOKENS
        for end in range(last, max(last - _MAX_CHAR_TOKENS, self._prefix_tokens), -1):
            left = self._decode(self._window[:end])
            if left + self._decode(self._window[end:]) == text:
                return self._move_to(end, left[self._prefix_chars :])
        return ""

    def _move_to(self, end: int, text: str | None = None) -> str:
        """Make the window's tokens up to ``end``, whose new text is ``text`` (default: all of
        the tail), the prefix."""
        text = self.tail if text is None else text
        prefix_chars = len(self._decode(self._window[self._prefix_tokens : end]))
        if prefix_chars == 0:  # a space that is stripped at the start: no sign of where it ends
            return ""
        del self._window[: self._prefix_tokens]
        self._prefix_tokens = end - self._prefix_tokens
        self._prefix_chars = prefix_chars
        self.tail = self.tail[len(text) :]
        return text

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)
