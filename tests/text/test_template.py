"""Row templates: what they read, and that no template runs away."""

from __future__ import annotations

import pytest

from batchinfer.errors import RowError, UsageError
from batchinfer.text.template import compile_template

ROW = {"x": "hello {{ y }}", "words": ["a", "b"], "n": 3}


def render(source: str) -> str:
    return compile_template(source).render(ROW)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ x }}", "hello {{ y }}"),
        ("{% raw %}{{ x }}{% endraw %}", "{{ x }}"),
        ("{{ x ~ n ~ words[0] }}", "hello {{ y }}3a"),
        ("{{ x + '!' }}{{ n * 2 }}{{ 2 ** n }}{{ n % 2 }}", "hello {{ y }}!681"),
        ("{% for w in words %}{{ loop.index }}{{ w }}{% endfor %}", "1a2b"),
        ("{% for i in range(6) if i % 2 %}{{ i }}/{{ loop.length }} {% endfor %}", "1/3 3/3 5/3 "),
        ("{{ words | join(', ') }}{{ '-'.join(words) }}", "a, ba-b"),
        ("{{ words | join(d=';') }}", "a;b"),
        ("{{ '%s %05.1f' % (n, 2) }}{{ '%s' | format(x) }}", "3 002.0hello {{ y }}"),
        ("{{ '{} {n}'.format(1, n=2) }}", "1 2"),
        ("{{ x | replace('l', 'L') }}{{ 'aa'.replace('a', 'b') }}", "heLLo {{ y }}bb"),
        ("{{ {'a<b': [1, 'é']} | tojson }}", '{"a<b": [1, "é"]}'),
        ("{{ {'a': 1} | tojson(indent=1) }}", '{\n "a": 1\n}'),
        ("{{ [1, 2, 3] | batch(2) | list }}{{ [1, 2] | sum }}", "[[1, 2], [3]]3"),
        ("{{ 'a b' | title }}{{ 2.345 | round(1) }}", "A B2.3"),
        ("{% macro m(obj, context=1) %}<{{ obj }}>{% endmacro %}{{ m(obj=n) }}", "<3>"),
        ("{% set s %}{{ n }}{{ n }}{% endset %}{{ s }}", "33"),
        ("{% for w in words %}{% if w == 'b' %}{% break %}{% endif %}{{ w }}{% endfor %}", "a"),
    ],
)
def test_templates_render_as_in_jinja(source: str, text: str) -> None:
    assert render(source) == text


def test_columns_are_found_without_running() -> None:
    source = "{% set a = n %}{{ a }}{% for w in words %}{{ w }}{% endfor %}{{ range(2) }}{{ x.y }}"

    assert compile_template(source).columns() == {"n", "words", "x"}


def test_a_column_named_like_a_builtin_is_a_column_if_the_data_has_it() -> None:
    template = compile_template("{{ range }}")

    assert template.columns() == frozenset()
    assert template.columns(frozenset({"range", "other"})) == {"range"}
    assert template.render({"range": "5-10"}) == "5-10"


def test_an_undefined_column_is_a_row_error_that_names_it() -> None:
    with pytest.raises(RowError, match=r"prompt\.template.*'title' is undefined") as caught:
        render("{{ title }}")

    assert caught.value.code == "template_error"


@pytest.mark.parametrize(
    "source",
    [
        "{{ x",
        "{% for %}",
        "{{ x | nothing }}",
        "{{ ''.__class__ }}",
        "{{ x['__class__'] }}",
        "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
        "x" * 2_000_000,
        "{% include 'file' %}",
        "{% import 'file' as f %}",
        "{% from 'file' import f %}",
        "{% extends 'file' %}",
    ],
    ids=range(11),
)
def test_a_template_that_cannot_run_is_refused_at_once(source: str) -> None:
    with pytest.raises(UsageError, match=r"prompt\.template"):
        compile_template(source)


def test_another_template_is_refused_by_the_tag_that_names_it() -> None:
    with pytest.raises(UsageError, match=r"\(line 2\): \{% from %\} has no other template"):
        compile_template("fine\n{% from 'file' import f %}")


def test_the_message_of_a_syntax_error_names_key_and_line() -> None:
    with pytest.raises(UsageError, match=r"prompt\.messages\[1\].*line 2"):
        compile_template("fine\n{{ x", "prompt.messages[1]")


@pytest.mark.parametrize(
    "source",
    [
        "{{ x | attr('__class__') }}",
        "{{ '{0.__class__}'.format(x) }}",
        "{{ ''['__cl' ~ 'ass__'].mro }}",
        "{{ words.append(1) }}",
        "{{ raise_exception('no') }}",
        "{{ 1 // 0 }}",
        "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    ],
)
def test_escapes_and_mistakes_are_row_errors(source: str) -> None:
    template = compile_template(source)

    with pytest.raises(RowError) as caught:
        template.render(ROW)

    assert caught.value.code == "template_error"


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 200000000 }}",
        "{{ x.center(200000000) }}",
        "{{ x | center(200000000) }}",
        "{{ '\t'.expandtabs(200000000) }}",
        "{{ '%200000000d' % 1 }}",
        "{{ '%*d' % (200000000, 1) }}",
        "{{ '{:>200000000}'.format(1) }}",
        "{{ '{:>{w}}'.format(1, w=200000000) }}",
        "{{ [x] * 200000000 }}",
        "{{ ([x * 100000] * 100000) | join }}",
        "{{ (x * 100000).join(words * 1000) }}",
        "{{ (words * 1000) | replace('a', x * 100000) }}",
        "{{ ('a' * 100000).replace('a', x * 100000) }}",
        "{{ x | indent(200000000) }}",
        "{{ [[1] * 100000] * 100000 }}",
        "{{ words | batch(200000000, 'fill') | list }}",
        "{{ words | slice(200000000) | list }}",
        "{{ [[1] * 100000] * 1000 | sum(start=[]) }}",
        "{{ 10 ** 100000000 }}",
        "{{ 1 | round(200000000, 'ceil') }}",
        "{{ n.to_bytes(200000000) }}",
        "{{ ([1] * 1000000) | tojson(indent=100) }}",
        "{% set ns = namespace(v='ab') %}{% for i in range(60) %}{% set ns.v = ns.v ~ ns.v %}"
        "{% endfor %}",
        "{% set ns = namespace(v='ab') %}{% for i in range(60) %}"
        "{% set ns.v %}{{ ns.v }}{{ ns.v }}{% endset %}{% endfor %}",
        "{% set ns = namespace(v=[1]) %}{% for i in range(60) %}{% set ns.v = ns.v + ns.v %}"
        "{% endfor %}",
        "{% set ns = namespace(v=[1]) %}{% for i in range(60) %}{% set ns.v = [ns.v, ns.v] %}"
        "{% endfor %}{{ ns.v }}",
        "{% for i in range(90000) %}" + "x" * 1000 + "{% endfor %}",
        "{% set s %}{% for i in range(90000) %}" + "x" * 1000 + "{% endfor %}{% endset %}",
    ],
)
def test_a_result_of_hundreds_of_megabytes_is_refused_before_it_is_built(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A slow processor must not come to its own limit before that of the size.
    monkeypatch.setattr("batchinfer.text.sandbox.MAX_CPU_SECONDS", 300.0)
    with pytest.raises(RowError, match=r"over|too large|unsafe") as caught:
        render(source)

    assert caught.value.code == "template_error"


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) if 0 %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) ~ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    ],
)
def test_an_endless_loop_is_ended(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchinfer.text.sandbox.MAX_STEPS", 10_000)

    with pytest.raises(RowError, match="runs too long"):
        render(source)


def test_slow_turns_are_ended_by_processor_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchinfer.text.sandbox.MAX_CPU_SECONDS", 0.05)

    with pytest.raises(RowError, match="runs too long"):
        render("{% for i in range(99999) %}{% set s = range(99999) | sum %}{% endfor %}")
