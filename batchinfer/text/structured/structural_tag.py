"""Translates xgrammar's structural tags to Lark for llguidance.

A structural tag is a tree of formats, such as free text in which a trigger starts a tag that holds
JSON. Sources: xgrammar's docs/structural_tag; llguidance's docs/syntax.md.

llguidance splits a text into lexemes, each as long as possible, so ``/[a-z]+/`` followed by
``"end"`` would match no text. Therefore adjacent regular formats become one terminal. Free text up
to a marker is a lazy lexeme, which ends where the marker first occurs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from batchinfer.config.regex import with_ascii_classes
from batchinfer.config.settings_base import format_value
from batchinfer.text.structured.gbnf import GbnfError, lark_of
from batchinfer.text.structured.structural_formats import Format, StructuralTagError
from batchinfer.text.tools.call_grammar import Parameter, quoted, schema_parameters

_ANY = "/(?s:.*)/"
_SPACE = "SPACE"
_PARAMETER_END = "</parameter>"

Ends = tuple[str, ...]
"""Texts of which one follows a format; none if nothing, or anything, may follow."""


@dataclass(frozen=True, slots=True)
class _Part:
    """An expression in Lark."""

    lark: str
    is_regular: bool = False
    """True if a terminal may contain the expression."""


_EMPTY = _Part('""', True)


def structural_lark(text: str, whitespace: str) -> str:
    """Return the Lark grammar of a structural tag.

    Args:
        text: the structural tag as JSON.
        whitespace: regex for the whitespace between the parts of JSON.

    Raises:
        StructuralTagError: the tag is invalid or not supported.
    """
    tag = json.loads(text)
    form = (
        _earlier_form(tag)
        if "structures" in tag
        else Format(tag.get("format"), "structural_tag.format")
    )
    return _Translator(whitespace).grammar(form)


def _earlier_form(tag: Mapping[str, Any]) -> Format:
    """Return the format of ``{structures: [{begin, schema, end}], triggers}``."""
    fields = {key: value for key, value in tag.items() if key not in ("type", "structures")}
    structures = tag["structures"]
    if not isinstance(structures, list) or not all(isinstance(one, Mapping) for one in structures):
        raise StructuralTagError("structures must be a list of {begin, schema, end}")
    tags = [
        {
            "begin": one.get("begin"),
            "content": {"type": "json_schema", "json_schema": one.get("schema")},
            "end": one.get("end", ""),
        }
        for one in structures
    ]
    return Format({"type": "triggered_tags", "tags": tags, **fields}, "structural_tag")


class _Translator:
    """Translates one structural tag.

    The translation of a format matches the format's text and, if ``ends`` are given, one of them:
    free text must know where it ends.
    """

    def __init__(self, whitespace: str) -> None:
        self._spacing = {"whitespace_pattern": whitespace}
        self._rules = [f"{_SPACE}: /[ \\t\\r\\n]{{1,40}}/"]
        self._endless: Mapping[str, Callable[[Format, Ends], _Part]] = {
            "any_text": self._any_text,
            "sequence": self._sequence,
            "or": self._or,
            "optional": self._optional,
            "tag": self._tag,
            "triggered_tags": self._triggered_tags,
            "dispatch": self._dispatch,
        }
        """Formats that may be endless."""
        self._finite: Mapping[str, Callable[[Format], _Part]] = {
            "const_string": lambda form: _constant(form.text("value")),
            "json_schema": self._json_schema,
            "qwen_xml_parameter": self._xml_parameters,
            "grammar": self._grammar,
            "regex": _regex,
            "plus": lambda form: self._repeated(form, "+"),
            "star": lambda form: self._repeated(form, "*"),
            "repeat": self._repeat,
            "tags_with_separator": self._tags_with_separator,
        }

    def grammar(self, form: Format) -> str:
        start = self._name(self._translated(form))
        return "\n".join(["%llguidance {}", f"start: {start}", *self._rules])

    def _translated(self, form: Format, ends: Ends = ()) -> _Part:
        if form.kind in self._endless:
            return self._endless[form.kind](form, ends)
        return self._joined([self._finite[form.kind](form), self._one_of(ends)])

    def _inner(self, form: Format) -> _Part:
        """Return a format that others may follow."""
        if form.is_endless:
            raise form.error(
                "has no end: put it into a tag with an end, give max_chars to any_text, or let "
                "a const_string or nothing follow"
            )
        return self._translated(form)

    # Expressions

    def _new(self, lark: str, kind: str = "r", options: str = "") -> str:
        """Define a rule, or a terminal if ``kind`` is a capital, and return its name."""
        name = f"{kind}{len(self._rules)}"
        self._rules.append(f"{name}{options}: {lark}")
        return name

    def _name(self, part: _Part) -> str:
        """Return an expression that a rule may contain."""
        return self._new(part.lark, "T") if part.is_regular else part.lark

    def _joined(self, parts: Iterable[_Part]) -> _Part:
        """Return the parts one after another; adjacent regular parts become one terminal."""
        joined = list[_Part]()
        for part in parts:
            if part == _EMPTY:
                continue
            if joined and part.is_regular and joined[-1].is_regular:
                joined[-1] = _Part(f"{joined[-1].lark} {part.lark}", True)
            else:
                joined.append(part)
        if len(joined) < 2:
            return joined[0] if joined else _EMPTY
        return _Part(" ".join(map(self._name, joined)))

    def _either(self, parts: Sequence[_Part]) -> _Part:
        regular = all(part.is_regular for part in parts)
        choices = [part.lark if regular else self._name(part) for part in parts]
        return parts[0] if len(parts) == 1 else _Part(f"({' | '.join(choices)})", regular)

    def _one_of(self, texts: Ends) -> _Part:
        return self._either([*map(_constant, texts)]) if texts else _EMPTY

    def _text(self, excludes: Sequence[str], ends: Ends, length: str = "*") -> _Part:
        """Return free text without the texts of ``excludes``, up to the first of ``ends``."""
        text = f"/(?s:.{length})/"
        if excludes:
            text = f"({text} & ~({_ANY} ({' | '.join(map(quoted, excludes))}) {_ANY}))"
        if not any(ends):
            return _Part(text, True)
        whole = self._new(f"{text} {self._one_of(ends).lark}", "T")
        return _Part(self._new(whole, options="[lazy]"))

    # Formats that may be endless

    def _any_text(self, form: Format, ends: Ends) -> _Part:
        limited = form.fields.get("max_chars") is not None
        length = f"{{0,{form.count('max_chars')}}}" if limited else "*"
        return self._text(form.texts("excludes"), ends, length)

    def _sequence(self, form: Format, ends: Ends) -> _Part:
        elements, parts = form.children("elements"), list[_Part]()
        while len(elements) > 1:
            element, end = elements.pop(0), elements[0].constant
            if element.is_endless and end:
                parts.append(self._translated(element, (end,)))
                elements[0] = Format({"type": "const_string", "value": ""}, form.where)
            else:
                parts.append(self._inner(element))
        return self._joined([*parts, self._translated(elements[0], ends)])

    def _or(self, form: Format, ends: Ends) -> _Part:
        return self._either([self._translated(each, ends) for each in form.children("elements")])

    def _optional(self, form: Format, ends: Ends) -> _Part:
        return self._either([self._translated(form.child("content"), ends), self._one_of(ends)])

    def _tag(self, form: Format, ends: Ends) -> _Part:
        begin, content, own = _constant(form.text("begin")), form.child("content"), form.ends
        if not any(own):
            return self._joined([begin, self._translated(content, ends)])
        if content.is_endless and not all(own):
            raise form.error("has endless content, but its end may be empty")
        return self._joined([begin, self._translated(content, own), self._one_of(ends)])

    def _triggered_tags(self, form: Format, ends: Ends) -> _Part:
        triggers, tags = form.texts("triggers"), form.children("tags")
        rules = list[tuple[str, Format]]()
        for tag in tags:
            begin = tag.text("begin")
            trigger = next((one for one in triggers if begin.startswith(one)), None)
            if trigger is None:
                raise tag.error(f"has begin: {format_value(begin)}; it must start with a trigger")
            rest = {**tag.fields, "begin": begin.removeprefix(trigger)}
            rules.append((trigger, replace(tag, fields=rest)))
        once = bool(form.fields.get("stop_after_first"))
        if not form.fields.get("at_least_one"):
            return self._dispatched(form, rules, ends, once=once)
        first = self._either([*map(self._inner, tags)])
        after = self._one_of(ends) if once else self._dispatched(form, rules, ends)
        return self._joined([first, after])

    def _dispatch(self, form: Format, ends: Ends) -> _Part:
        return self._dispatched(form, form.rules(), ends, once=form.fields.get("loop") is False)

    def _dispatched(
        self, form: Format, rules: Iterable[tuple[str, Format]], ends: Ends, *, once: bool = False
    ) -> _Part:
        """Return free text in which the text of a rule starts the rule's format.

        Args:
            once: True if the format ends the text.
        """
        excludes = form.texts("excludes")
        found = self._either(
            [self._joined([self._text(excludes, (head,)), self._inner(one)]) for head, one in rules]
        )
        tail = self._text(excludes, ends)
        if once:
            return self._either([self._joined([found, self._one_of(ends)]), tail])
        return self._joined([_Part(f"({found.lark})*"), tail])

    # Finite formats

    def _json_schema(self, form: Format) -> _Part:
        style = form.fields.get("style") or "json"
        if style == "qwen_xml":
            return self._xml_parameters(form)
        if style != "json":
            shown = format_value(style)
            raise form.error(
                f"has the style {shown}, which is not supported; known: json, qwen_xml"
            )
        return _Part(self._new(self._json(form.schema())))

    def _json(self, schema: Mapping[str, Any]) -> str:
        return f"%json {json.dumps({**schema, 'x-guidance': self._spacing})}"

    def _xml_parameters(self, form: Format) -> _Part:
        """Return the arguments of a call of Qwen3-Coder, in the order of the schema:
        ``<parameter=name>value</parameter>``."""
        parameters = schema_parameters(form.schema(), "value")
        if parameters is None:
            raise form.error("has a json_schema that does not list the properties of an object")
        return self._joined(map(self._xml_parameter, parameters))

    def _xml_parameter(self, one: Parameter) -> _Part:
        value = f"{_SPACE}? {{}} {_SPACE}? {quoted(_PARAMETER_END)}"
        if one.texts is not None:
            value = value.format(f"({' | '.join(map(quoted, one.texts))})")
        elif one.is_text:
            value = self._text((), (_PARAMETER_END,)).lark
        else:
            value = value.format(self._new(self._json(one.schema)))
        whole = f"({quoted(f'<parameter={one.name}>')} {value} {_SPACE}?)"
        return _Part(whole if one.is_required else f"{whole}?")

    def _grammar(self, form: Format) -> _Part:
        name = f"g{len(self._rules)}"
        try:
            self._rules.append(lark_of(form.text("grammar"), name))
        except GbnfError as error:
            raise form.error(f"has a grammar that is not valid GBNF: {error}") from None
        return _Part(name)

    def _repeated(self, form: Format, times: str) -> _Part:
        content = self._inner(form.child("content"))
        return _Part(f"({content.lark}){times}", content.is_regular)

    def _repeat(self, form: Format) -> _Part:
        least = form.count("min")
        if form.fields.get("max") == -1:
            return self._repeated(form, f"{{{least},}}")
        most = form.count("max")
        if most < least:
            raise form.error(f"has max: {most}, which is below min: {least}")
        return self._repeated(form, f"{{{least},{most}}}")

    def _tags_with_separator(self, form: Format) -> _Part:
        tags = self._either([*map(self._inner, form.children("tags"))])
        if not form.fields.get("stop_after_first"):
            more = self._joined([_constant(form.text("separator")), tags])
            tags = self._joined([tags, _Part(f"({more.lark})*", more.is_regular)])
        return tags if form.fields.get("at_least_one") else self._either([tags, _EMPTY])


def _constant(text: str) -> _Part:
    return _Part(quoted(text), True)


def _regex(form: Format) -> _Part:
    pattern = with_ascii_classes(form.text("pattern"))
    slashes = pattern.replace("\\/", "/").replace("/", "\\/")
    return _Part("/" + slashes.replace("\n", "\\n") + "/", True)
