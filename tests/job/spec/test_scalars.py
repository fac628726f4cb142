"""What a plain scalar means."""

from __future__ import annotations

import pytest

from batchinfer.job.spec.yaml import Scalar, plain_scalar


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        ("~", None),
        ("null", None),
        ("True", True),
        ("false", False),
        ("no", "no"),
        ("-7", -7),
        ("07", 7),
        ("0o17", 15),
        ("0xff", 255),
        ("1e-5", 1e-5),
        (".5", 0.5),
        ("a: b # c", "a: b # c"),
        ("1_000", "1_000"),
    ],
)
def test_the_core_schema(text: str, value: Scalar) -> None:
    found = plain_scalar(text)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (".inf", "is not a number that can be used"),
        ("1e999", "too large"),
        ("9" * 5000, "too large"),
        ("\udcff", "not valid Unicode"),
    ],
)
def test_what_has_no_value(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plain_scalar(text)
