"""Variables in names and paths."""

from __future__ import annotations

import pytest

from batchinfer.errors import UsageError
from batchinfer.job.spec.load import parse_variables, render_variables


@pytest.mark.parametrize(
    ("text", "rendered"),
    [
        ("dt={{ ds }}/x", "dt=2026-11-20/x"),
        ("{{ds}}{{ ds }}", "2026-11-202026-11-20"),
        ("plain {% x %} {# y #} {z}", "plain {% x %} {# y #} {z}"),
        ("{{ braces }}", "{{ ds }}"),
    ],
)
def test_variables_are_replaced_once(text: str, rendered: str) -> None:
    assert render_variables(text, {"ds": "2026-11-20", "braces": "{{ ds }}"}) == rendered


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{{ dt }}", "{{ dt }} is not a variable; vars has: ds"),
        ("{{ 9 ** 9 ** 9 }}", "is not a variable"),
        ("a {{ ds", "a {{ has no matching }}"),
    ],
)
def test_anything_but_a_known_name_is_refused(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=r"not a variable|no matching") as caught:
        render_variables(text, {"ds": "x"})
    assert says in str(caught.value)


def test_var_options_are_parsed_as_strings() -> None:
    assert parse_variables(["a=1", "b=x=y", "c=", "a=2"]) == {"a": "2", "b": "x=y", "c": ""}


@pytest.mark.parametrize("option", ["a", "=1", " =1", "a=\udcff"])
def test_malformed_options_are_refused(option: str) -> None:
    with pytest.raises(UsageError, match="--var"):
        parse_variables([option])
