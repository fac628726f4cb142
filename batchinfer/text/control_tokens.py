"""Distinguishes control-token text in a row's columns from control tokens in templates.

``<|im_end|>`` in a template ends a turn; the same characters in a row are plain text. Both look the
same after rendering, so marks replace such text in rows before rendering. Marks are private-use
characters, which no template operation can split. transformers' ``sanitize_control_tokens`` has the
same aim, but puts markers around the token.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import TypeAlias

_MARKS = range(0x100000, 0x10FFFC)  # Supplementary Private Use Area-B; chat.py uses U+10FFFD
_MARK = re.compile(f"[{chr(_MARKS[0])}-{chr(_MARKS[-1])}]")


class ControlTokens:
    def __init__(self, tokens: Collection[str]) -> None:
        self.tokens = frozenset(token for token in tokens if token)
        self.pattern = re.compile(_any_of(self.tokens) if self.tokens else r"(?!)")
        self._longest = max(map(len, self.tokens), default=0)
        self._beginnings = {token[:n] for token in self.tokens for n in range(1, len(token))}
        self._endings = {token[-n:] for token in self.tokens for n in range(1, len(token))}

    def occur_in(self, text: str) -> bool:
        return self.pattern.search(text) is not None

    def beginning_at_end(self, text: str) -> int:
        """Return the length of the longest suffix of ``text`` that is a proper prefix of a control
        token's text."""
        lengths = range(min(self._longest - 1, len(text)), 0, -1)
        return next((n for n in lengths if text[-n:] in self._beginnings), 0)

    def ending_at_start(self, text: str) -> int:
        """Return the length of the longest prefix of ``text`` that is a proper suffix of a control
        token's text."""
        lengths = range(min(self._longest - 1, len(text)), 0, -1)
        return next((n for n in lengths if text[:n] in self._endings), 0)

    def can_form_in(self, text: str) -> bool:
        """Return True if ``text`` contains a control token's text, or starts or ends with a part of
        such a text that a template could complete."""
        at_edges = self.beginning_at_end(text) or self.ending_at_start(text)
        return bool(at_edges) or self.occur_in(text)


class Marks:
    """The marks of one row, and the pieces of text that they replace."""

    def __init__(self, tokens: ControlTokens, texts: Iterable[str]) -> None:
        """Choose marks that do not occur in ``texts``, which are all texts of the row."""
        taken = {char for text in texts for char in _MARK.findall(text)}
        self._tokens = tokens
        self._free = (chr(code) for code in _MARKS if chr(code) not in taken)
        self._mark_of: dict[str, str] = {}
        self._piece_of: dict[str, str] = {}

    def mark(self, text: str) -> str:
        """Replace control-token texts, and parts of them at the start or end, with marks."""
        text = self._tokens.pattern.sub(lambda match: self._mark(match[0]), text)
        if length := self._tokens.beginning_at_end(text):
            text = text[:-length] + self._mark(text[-length:])
        if length := self._tokens.ending_at_start(text):
            text = self._mark(text[:length]) + text[length:]
        return text

    def restore(self, text: str) -> str:
        """Replace marks with the row's own pieces of text."""
        return _MARK.sub(lambda match: self._piece_of.get(match[0], match[0]), text)

    def _mark(self, piece: str) -> str:
        if piece not in self._mark_of:
            mark = self._mark_of[piece] = next(self._free)
            self._piece_of[mark] = piece
        return self._mark_of[piece]


_Tree: TypeAlias = "dict[str, _Tree]"


def _any_of(texts: Collection[str]) -> str:
    """Return a pattern that matches the longest of ``texts``, written as a trie.

    A plain alternation of a few thousand reserved tokens would try each token at every ``<``.
    """
    tree: _Tree = {}
    for text in texts:
        node = tree
        for char in text:
            node = node.setdefault(char, {})
        node[""] = {}
    return _branches(tree)


def _branches(tree: _Tree) -> str:
    options = [re.escape(char) + _branches(below) for char, below in sorted(tree.items()) if char]
    if len(options) == 1 and "" not in tree:
        return options[0]
    return f"(?:{'|'.join(options)})" + ("?" if "" in tree else "") if options else ""
