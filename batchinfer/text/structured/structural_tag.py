"""Translates xgrammar's structural tags to Lark for llguidance.

A structural tag is a tree of formats, such as free text in which a trigger starts a tag that holds
JSON. Sources: xgrammar's docs/structural_tag; llguidance's docs/syntax.md.

llguidance splits a text into lexemes, each as long as possible, so ``/[a-z]+/`` followed by
``"end"`` would match no text. Therefore adjacent regular formats become one terminal. Free text up
to a marker is a lazy lexeme, which ends where the marker first occurs. So is a regex that a
constant and a part that is not regular follow, such as JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, permutations
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
    closed: str = ""
    """Expression in a rule that anything may follow; ``lark`` unless given."""
    open: Format | None = None
    """Format at the end, such as a regex, that only regular parts and a constant may follow."""
    is_marker: bool = False
    """True if the expression is a text that is not empty, or one of several such texts."""
    elements: tuple[_Part, ...] = ()
    """What the expression joins."""

    def __post_init__(self) -> None:
        if not self.closed:
            object.__setattr__(self, "closed", self.lark)

    def before_others(self) -> str:
        """Return an expression that anything may follow."""
        if self.open:
            raise self.open.error(
                "has no clear end, because what follows does not begin with a constant: let a "
                "const_string or a tag follow it directly, or nothing"
            )
        return self.closed


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
                "has no end: put it into a tag with an end, or let a const_string, a tag or "
                "nothing follow"
            )
        return self._translated(form)

    # Expressions

    def _new(self, lark: str, kind: str = "r", options: str = "") -> str:
        """Define a rule, or a terminal if ``kind`` is a capital, and return its name."""
        name = f"{kind}{len(self._rules)}"
        self._rules.append(f"{name}{options}: {lark}")
        return name

    def _lazy(self, lark: str) -> str:
        """Define a lexeme that ends as early as it can, and return its name."""
        return self._new(self._new(lark, "T"), options="[lazy]")

    def _name(self, part: _Part) -> str:
        """Return an expression that a rule may contain."""
        return self._new(part.lark, "T") if part.is_regular else part.lark

    def _joined(self, parts: Iterable[_Part]) -> _Part:
        """Return the parts one after another; adjacent regular parts become one terminal."""
        elements = [one for part in parts for one in part.elements or (part,) if one != _EMPTY]
        if len(elements) < 2:
            return elements[0] if elements else _EMPTY
        runs = list[_Part]()
        for is_regular, group in groupby(elements, lambda one: one.is_regular):
            run = list(group)
            runs += [self._regular(run)] if is_regular else run
        *before, last = runs
        head = [one.before_others() for one in before]
        return replace(
            last,
            lark=" ".join([*head, self._name(last)]) if head else last.lark,
            closed=" ".join([*head, last.closed]),
            is_regular=last.is_regular and not head,
            is_marker=last.is_marker and not head,
            elements=tuple(elements),
        )

    def _regular(self, parts: Sequence[_Part]) -> _Part:
        """Return adjacent regular parts as one terminal."""
        closed, rest = list[str](), list[_Part]()
        for part, after in zip(parts, [*parts[1:], _EMPTY], strict=True):
            rest.append(part)
            if part.is_marker and not after.is_marker and any(one.open for one in rest):
                closed.append(self._lazy(" ".join(one.lark for one in rest)))
                rest = []
        lark = " ".join(part.lark for part in parts)
        is_marker = all(part.is_marker for part in parts)
        closed += [self._new(lark, "T")] if is_marker else [one.closed for one in rest]
        opened = next((one.open for one in rest if one.open), None)
        return _Part(lark, True, " ".join(closed), opened, is_marker)

    def _either(self, parts: Sequence[_Part]) -> _Part:
        if len(parts) == 1:
            return parts[0]
        regular = all(part.is_regular for part in parts)
        choices = [part.lark if regular else self._name(part) for part in parts]
        return _Part(
            f"({' | '.join(choices)})",
            regular,
            closed=f"({' | '.join(part.closed for part in parts)})",
            open=next((part.open for part in parts if part.open), None),
            is_marker=all(part.is_marker for part in parts),
        )

    def _times(self, part: _Part, times: str) -> _Part:
        if part.is_regular:
            closed = f"({part.closed}){times}"
            return _Part(f"({part.lark}){times}", True, closed=closed, open=part.open)
        return _Part(f"({part.before_others()}){times}")

    def _one_of(self, texts: Ends) -> _Part:
        return self._either([*map(_constant, texts)]) if texts else _EMPTY

    def _text(self, form: Format, ends: Ends, length: str = "*") -> _Part:
        """Return free text without the texts of ``excludes``, up to the first of ``ends``."""
        excludes = form.texts("excludes")
        text = f"/(?s:.{length})/"
        if excludes:
            text = f"({text} & ~({_ANY} ({' | '.join(map(quoted, excludes))}) {_ANY}))"
        if not ends or "" in ends:
            return self._joined([_Part(text, True, open=form), self._one_of(ends)])
        return _Part(self._lazy(f"{text} {self._one_of(ends).lark}"))

    # Formats that may be endless

    def _any_text(self, form: Format, ends: Ends) -> _Part:
        limited = form.fields.get("max_chars") is not None
        length = f"{{0,{form.count('max_chars')}}}" if limited else "*"
        return self._text(form, ends, length)

    def _sequence(self, form: Format, ends: Ends) -> _Part:
        elements, parts = form.children("elements"), list[_Part]()
        while len(elements) > 1:
            element, end = elements.pop(0), elements[0].begin
            if end:
                parts.append(self._translated(element, (end,)))
                elements[0] = elements[0].after(end)
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
            # Free text ends at the first trigger, so a longer one that begins alike is never read.
            trigger = min(filter(begin.startswith, triggers), key=len, default=None)
            if trigger is None:
                raise tag.error(f"has begin: {format_value(begin)}; it must start with a trigger")
            rules.append((trigger, tag.after(trigger)))
        once = bool(form.fields.get("stop_after_first"))
        if not form.fields.get("at_least_one"):
            return self._dispatched(form, rules, ends, once=once)
        first = self._either([*map(self._inner, tags)])
        after = self._one_of(ends) if once else self._dispatched(form, rules, ends)
        return self._joined([first, after])

    def _dispatch(self, form: Format, ends: Ends) -> _Part:
        return self._dispatched(form, form.rules(), ends, once=form.fields.get("loop") is False)

    def _dispatched(
        self, form: Format, rules: Sequence[tuple[str, Format]], ends: Ends, *, once: bool = False
    ) -> _Part:
        """Return free text in which the text of a rule starts the rule's format.

        Args:
            once: True if the format ends the text.
        """
        for inner, outer in permutations({head for head, _ in rules}, 2):
            if inner in outer:
                raise form.error(
                    f"has the texts {format_value(inner)} and {format_value(outer)}; none may "
                    "contain another, because free text ends at the first of them"
                )
        found = self._either(
            [self._joined([self._text(form, (head,)), self._inner(one)]) for head, one in rules]
        )
        tail = self._text(form, ends)
        if once:
            return self._either([self._joined([found, self._one_of(ends)]), tail])
        return self._joined([self._times(found, "*"), tail])

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
            value = self._lazy(f"{_ANY} {quoted(_PARAMETER_END)}")
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
        return self._times(self._inner(form.child("content")), times)

    def _repeat(self, form: Format) -> _Part:
        least = form.count("min")
        if form.fields.get("max") == -1:
            return self._repeated(form, f"{{{least},}}")
        most = form.count("max")
        if most < least:
            raise form.error(f"has max: {most}, which is below min: {least}")
        repeated = self._repeated(form, f"{{{least},{most}}}")
        return repeated if most else _EMPTY

    def _tags_with_separator(self, form: Format) -> _Part:
        tags = self._either([*map(self._inner, form.children("tags"))])
        if not form.fields.get("stop_after_first"):
            more = self._joined([_constant(form.text("separator")), tags])
            tags = self._joined([tags, self._times(more, "*")])
        return tags if form.fields.get("at_least_one") else self._either([tags, _EMPTY])


def _constant(text: str) -> _Part:
    return _Part(quoted(text), True, is_marker=text != "")


def _regex(form: Format) -> _Part:
    pattern = with_ascii_classes(form.text("pattern"))
    if not pattern:  # two slashes would begin a comment
        return _EMPTY
    escapes = {"/": "\\/", "\n": "\\n"}
    escaped = re.sub(
        r"\\.|[/\n]", lambda one: escapes.get(one[0][-1], one[0]), pattern, flags=re.DOTALL
    )
    return _Part(f"/{escaped}/", True, open=form)
