"""Control-token text that comes in with a row, kept apart from the template's own.

``<|im_end|>`` written by a template ends a turn; the same characters inside a row's text are text.
After rendering the two look alike, so a row's occurrences are replaced by marks (one private-use
character each, which no template operation can split) before rendering and put back after.
transformers' ``sanitize_control_tokens`` has the same aim with markers around the token.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import TypeAlias

_MARKS = range(0x100000, 0x10FFFC)  # Supplementary Private Use Area-B; chat.py uses U+10FFFD
_MARK = re.compile(f"[{chr(_MARKS[0])}-{chr(_MARKS[-1])}]")


class ControlTokens:
    """The texts of a tokenizer's control tokens, and how to find them."""

    def __init__(self, tokens: Collection[str]) -> None:
        self.tokens = frozenset(token for token in tokens if token)
        self.pattern = re.compile(_any_of(self.tokens) if self.tokens else r"(?!)")
        self._longest = max(map(len, self.tokens), default=0)
        self._beginnings = {token[:n] for token in self.tokens for n in range(1, len(token))}
        self._endings = {token[-n:] for token in self.tokens for n in range(1, len(token))}

    def occur_in(self, text: str) -> bool:
        """Whether a control token's text is in ``text``."""
        return self.pattern.search(text) is not None

    def beginning_at_end(self, text: str) -> int:
        """Length of the longest proper beginning of a control token that ends ``text``."""
        lengths = range(min(self._longest - 1, len(text)), 0, -1)
        return next((n for n in lengths if text[-n:] in self._beginnings), 0)

    def ending_at_start(self, text: str) -> int:
        """Length of the longest proper ending of a control token that starts ``text``."""
        lengths = range(min(self._longest - 1, len(text)), 0, -1)
        return next((n for n in lengths if text[:n] in self._endings), 0)

    def can_form_in(self, text: str) -> bool:
        """Whether ``text`` holds a control token's text, or could complete one together with
        what a template puts beside it."""
        at_edges = self.beginning_at_end(text) or self.ending_at_start(text)
        return bool(at_edges) or self.occur_in(text)


class Marks:
    """Marks of one row: which character stands for which piece of its text."""

    def __init__(self, tokens: ControlTokens, texts: Iterable[str]) -> None:
        """``texts``: all texts of the row, whose own characters are not used as marks."""
        taken = {char for text in texts for char in _MARK.findall(text)}
        self._tokens = tokens
        self._free = (chr(code) for code in _MARKS if chr(code) not in taken)
        self._mark_of: dict[str, str] = {}
        self._piece_of: dict[str, str] = {}

    def mark(self, text: str) -> str:
        """``text`` with marks for its control-token texts and for half ones at its edges."""
        text = self._tokens.pattern.sub(lambda match: self._mark(match[0]), text)
        if length := self._tokens.beginning_at_end(text):
            text = text[:-length] + self._mark(text[-length:])
        if length := self._tokens.ending_at_start(text):
            text = self._mark(text[:length]) + text[length:]
        return text

    def restore(self, text: str) -> str:
        """``text`` with the row's own pieces back in place of their marks."""
        return _MARK.sub(lambda match: self._piece_of.get(match[0], match[0]), text)

    def _mark(self, piece: str) -> str:
        if piece not in self._mark_of:
            mark = self._mark_of[piece] = next(self._free)
            self._piece_of[mark] = piece
        return self._mark_of[piece]


_Tree: TypeAlias = "dict[str, _Tree]"


def _any_of(texts: Collection[str]) -> str:
    """A pattern for any of ``texts``, the longest first, as a tree of shared beginnings.

    A plain alternation of a few thousand reserved tokens would try each at every ``<``.
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
