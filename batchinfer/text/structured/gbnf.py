"""Translates GBNF, the grammar format of llama.cpp, xgrammar and vLLM, to Lark.

The syntax is defined in llama.cpp's grammars/README.md: rules ``name ::= ...`` with strings,
character classes, ``.``, groups, ``|`` and ``* + ? {m,n}``. Texts match the rule ``root``, and
``#`` begins a comment. A rule ends where the next rule begins, even on the same line. Lark matches
a terminal greedily and GBNF does not, so every terminal is a single character.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

_TOKEN = re.compile(
    r"""
    (?P<space> [ \t\r\n]+ | \#[^\n]* )
  | (?P<string> "(?:[^"\\\n]|\\.)*" )
  | (?P<class> \[\^?(?:[^\]\\\n]|\\.)*\] )
  | (?P<defines> ::= )
  | (?P<name> [A-Za-z0-9_][A-Za-z0-9_-]* )
  | (?P<repeat> [*+?] | \{\s*[0-9]+\s*(?:,\s*[0-9]*\s*)?\} )
  | (?P<mark> [|().] )
    """,
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))", re.DOTALL)
_PLAIN_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}
_IN_STRINGS = re.compile(r'"(?:[^"\\\n]|\\.)*"|[#/][^\n]*')
_RULE = ("name", "defines")


class GbnfError(ValueError):
    """An invalid grammar; the message has the reason and the line."""


def is_gbnf(grammar: str) -> bool:
    """Return True if a grammar defines rules with ``::=``, which Lark does not have."""
    return "::=" in _IN_STRINGS.sub("", grammar)


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    line: int


def lark_of(grammar: str, start: str = "start") -> str:
    """Translate a GBNF grammar to Lark, token by token: rules have nearly the same syntax in both.

    Args:
        start: name of the rule that matches a text; the names of the other rules begin with it.

    Raises:
        GbnfError: the grammar is not valid GBNF.
    """
    tokens = list(_tokens(grammar))
    defined = [one.text for one, after in pairwise(tokens) if (one.kind, after.kind) == _RULE]
    names = {name: f"{start}_{_lark_name(name, at)}" for at, name in enumerate(defined)}
    out, groups, seen = list[str](), list[int](), set[str]()
    item: int | None = None  # index in ``out`` of the item that a repeat applies to
    at = 0
    while at < len(tokens):
        token = tokens[at]
        begins_rule = tuple(one.kind for one in tokens[at : at + 2]) == _RULE
        at += 2 if begins_rule else 1
        if not seen and not begins_rule:
            is_name = token.kind == "name"
            raise _missing("::=" if is_name else "a rule's name", tokens[at - 1 + is_name :])
        if item is None and seen and (begins_rule or token.text in ("|", ")")):
            out.append('""')
        if begins_rule:
            if groups:
                raise _missing("a closing parenthesis", [token])
            if token.text in seen:
                raise GbnfError(f"line {token.line}: the rule {token.text} is defined twice")
            seen.add(token.text)
            out.append(f"\n{names[token.text]}:")
            item = None
        elif token.text in ("|", "("):
            groups += [len(out)] if token.text == "(" else []
            out.append(token.text)
            item = None
        elif token.text == ")" and groups:
            out.append(")")
            item = groups.pop()
        elif token.kind == "repeat" and item is not None:
            out[item] = f"({out[item]}"
            out[-1] += ")" + re.sub(r"\s", "", token.text)
        else:
            item = len(out)
            out.append(_atom(token, names))
    if item is None:
        out.append('""')
    if groups:
        raise _missing("a closing parenthesis", [])
    if "root" not in seen:
        raise GbnfError("the grammar has no rule root ::= ..., which is the start of every text")
    return f"{start}: {names['root']}" + " ".join(out)


def _atom(token: _Token, names: Mapping[str, str]) -> str:
    if token.kind == "name":
        if token.text not in names:
            raise GbnfError(f"line {token.line}: the rule {token.text} is not defined")
        return names[token.text]
    if token.kind == "string":
        text = "".join(one for one, _ in _characters(token.text[1:-1], token.line))
        return f"({' '.join(map(json.dumps, text))})" if text else '""'
    if token.kind == "class":
        return _class_expression(token)
    if token.text == ".":
        return "/(?s:.)/"
    raise _missing("a rule's name", [token])


def _missing(what: str, rest: Sequence[_Token]) -> GbnfError:
    if not rest:
        return GbnfError(f"{what} is missing at the end")
    return GbnfError(f"line {rest[0].line}: {what} is missing before {rest[0].text}")


def _tokens(grammar: str) -> Iterator[_Token]:
    at, line = 0, 1
    while at < len(grammar):
        match = _TOKEN.match(grammar, at)
        if match is None:
            shown = json.dumps(grammar[at : at + 20], ensure_ascii=False)
            raise GbnfError(f"line {line}: {shown} cannot start an element of a grammar")
        kind, text = str(match.lastgroup), match.group()
        if kind != "space":
            yield _Token(kind, text, line)
        at, line = match.end(), line + text.count("\n")


def _characters(text: str, line: int) -> Iterator[tuple[str, bool]]:
    """Yield the characters of a string or class, each with True if it was escaped."""
    at = 0
    while at < len(text):
        match = _ESCAPE.match(text, at)
        if match is None:
            yield text[at], False
            at += 1
            continue
        *codes, plain = match.groups()
        code = next(filter(None, codes), None)
        number = 0 if code is None else int(code, 16)
        if number > 0x10FFFF or 0xD800 <= number <= 0xDFFF or plain in ("x", "u", "U"):
            raise GbnfError(f"line {line}: {match.group()} is not a character")
        yield (_PLAIN_ESCAPES.get(plain, plain) if code is None else chr(number)), True
        at = match.end()


def _class_expression(token: _Token) -> str:
    inside = token.text[1:-1]
    negated = inside.startswith("^")
    characters = list(_characters(inside[negated:], token.line))
    if not characters:
        raise GbnfError(f"line {token.line}: {token.text} has no characters")
    last = len(characters) - 1
    members = "".join(
        "-" if character == "-" and not escaped and 0 < at < last else f"\\x{{{ord(character):X}}}"
        for at, (character, escaped) in enumerate(characters)
    )
    return f"/[{'^' if negated else ''}{members}]/"


def _lark_name(name: str, number: int) -> str:
    return f"r{number}_{re.sub(r'[^A-Za-z0-9]', '_', name).lower()}"
