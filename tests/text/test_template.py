"""Row templates: what they can read and write, and what they cannot access."""

from __future__ import annotations

import jinja2
import pytest

from batchinfer.errors import RowError, UsageError
from batchinfer.text.prompt_sources import RowTemplate, checked_template
from batchinfer.text.sandbox import MAX_TEXT_CHARS, PromptEnvironment

ROW = {"x": "hello {{ y }}", "words": ["a", "b"], "n": 3}


def compile_template(source: str) -> RowTemplate:
    return RowTemplate(source, "prompt.template")


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
def test_row_templates_render_like_jinja(source: str, text: str) -> None:
    assert render(source) == text


def test_columns_are_found_without_running() -> None:
    source = "{% set a = n %}{{ a }}{% for w in words %}{{ w }}{% endfor %}{{ range(2) }}{{ x.y }}"

    assert compile_template(source).columns() == {"n", "words", "x"}


def test_names_that_are_set_under_a_condition_are_no_columns_unless_the_data_has_them() -> None:
    template = compile_template(
        "{% if n %}{% set title = n ~ '!' %}{% set ns = namespace(v=1) %}"
        "{% for w in words %}{% set ns.v = ns.v + 1 %}{% endfor %}{{ title ~ ns.v }}"
        "{% else %}{{ title }}{% endif %}"
    )

    assert template.columns() == {"n", "words"}
    assert template.columns(frozenset({"n", "words", "title"})) == {"n", "words", "title"}
    assert template.render({"n": 1, "words": "ab"}) == "1!3"
    assert template.render({"n": 0, "words": "", "title": "T"}) == "T"


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


def test_loading_another_template_is_refused_with_its_tag() -> None:
    with pytest.raises(UsageError, match=r"\(line 2\): \{% from %\} cannot load another template"):
        compile_template("fine\n{% from 'file' import f %}")


def test_the_message_of_a_syntax_error_names_key_and_line() -> None:
    with pytest.raises(UsageError, match=r"prompt\.messages\[1\].*line 2"):
        RowTemplate("fine\n{{ x", "prompt.messages[1]")


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
        "{{ 7 ** 9 }}",
        "{% for i in [1] %}{{ (7 ** 9) | string }}{{ 7 ** 9 ~ '' }}{% endfor %}",
        "{% macro m(x=7 ** 9) %}{{ -(7 ** 9) }}{% endmacro %}{% set y = 7 ** 9 %}",
        "{% if 7 ** 9 > 1 %}{{ '{}'.format(7 ** 9) }}{% endif %}",
        "{% autoescape false %}{{ 7 ** 9 }}{% endautoescape %}",
    ],
)
def test_nothing_is_computed_when_a_template_is_compiled(source: str) -> None:
    assert str(7**9) not in PromptEnvironment().compile(source, raw=True)


def test_nothing_is_computed_to_find_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []
    monkeypatch.setattr(jinja2.nodes.Pow, "as_const", lambda *_: computed.append(1))

    assert compile_template("{{ 7 ** 9 }}{{ x }}").columns() == {"x"}

    assert not computed


def test_nothing_is_computed_for_autoescape() -> None:
    with pytest.raises(UsageError, match="autoescape must be true or false"):
        compile_template("{% autoescape 10 ** 10 ** 10 %}{% endautoescape %}")


def test_a_result_that_is_too_long_is_a_row_error() -> None:
    with pytest.raises(RowError, match=f"the result has more than {MAX_TEXT_CHARS} characters"):
        render(f"{{{{ 'x' * {MAX_TEXT_CHARS} }}}}y")


def test_a_template_renders_the_same_text_each_time() -> None:
    for source in ("{{ words | random }}", "{{ lipsum(1) }}"):
        with pytest.raises((RowError, UsageError), match=r"random|lipsum"):
            render(source)


AVAILABLE = frozenset({"prompt text", "x", "keys"})


@pytest.mark.parametrize(
    ("source", "columns", "text"),
    [
        ("{{ row['prompt text'] }}", {"prompt text"}, "hi"),
        ("{{ row.x ~ x }}", {"x"}, "11"),
        ("{% for name in ['x'] %}{{ row[name] }}{% endfor %}", AVAILABLE, "1"),
        (
            "{% for key, value in row.items() %}{{ key }};{% endfor %}",
            AVAILABLE,
            "keys;prompt text;x;",
        ),
        ("{{ row | length }}", AVAILABLE, "3"),
        ("{{ row['keys'] }}", {"keys"}, "k"),
        ("{% for row in [5] %}{{ row }}{% endfor %}", set(), "5"),
    ],
)
def test_row_holds_the_columns(source: str, columns: set[str], text: str) -> None:
    template = compile_template(source)
    row = {"keys": "k", "prompt text": "hi", "x": 1}
    assert template.columns(AVAILABLE) == columns
    assert template.render({name: row[name] for name in sorted(columns)}) == text


def test_a_column_named_row_can_be_used() -> None:
    template = compile_template("{{ row }}")
    assert template.columns(frozenset({"row", "x"})) == {"row"}
    assert template.render({"row": "text"}) == "text"


def test_a_column_of_row_that_is_missing_has_a_name_that_is_near() -> None:
    message = (
        "prompt.template reads prompt txt, which the data does not have; "
        "did you mean prompt text[?] its"
    )
    with pytest.raises(UsageError, match=message):
        checked_template("{{ row['prompt txt'] }}", "prompt.template", AVAILABLE)
