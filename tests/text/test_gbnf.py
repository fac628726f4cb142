"""GBNF grammars: which texts they allow, and the errors of invalid grammars."""

from __future__ import annotations

import random
import re

import pytest
from llguidance import LLMatcher

from batchinfer.text.structured.compiled_grammar import _byte_tokenizer, check_structured_outputs
from batchinfer.text.structured.gbnf import is_gbnf, lark_of
from batchinfer.text.structured.grammar_source import GrammarError

JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::=
  "[" ws ( value ("," ws value)* )? "]" ws

string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws

number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9]+)? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""
CHESS = r"""
# moves of a game
root ::= "1. " move " " move "\n" ([1-9] [0-9]? ". " move " " move "\n")+
move ::= (pawn | nonpawn | castle) [+#]?
nonpawn ::= [NBKQR] [a-h]? [1-8]? "x"? [a-h] [1-8]
pawn ::= ([a-h] "x")? [a-h] [1-8] ("=" [NBKQR])?
castle ::= "O-O" "-O"?
"""


def matches(grammar: str, text: str) -> bool:
    """Return True if a grammar allows the whole text."""
    source = LLMatcher.grammar_from_lark(lark_of(grammar))
    matcher = LLMatcher(_byte_tokenizer(), source, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    taken = matcher.try_consume_tokens(list(text.encode()))
    return taken == len(text.encode()) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("grammar", "allowed", "refused"),
    [
        (JSON, ['{"a": [1, true, {"b": "\\u00e9\\n"}]}', "{}"], ["[1]", '{"a" 1}', '{"a": 1']),
        (CHESS, ["1. e4 e5\n2. Nf3 Nc6\n", "1. O-O exd5+\n9. e8=Q O-O\n"], ["1. e4 e9\n"]),
        ('root ::= a\n  | b\na ::= "x"\nb ::= "y"', ["x", "y"], ["", "xy"]),
        (r'root ::= "\u00e9" "\x41" [\u4e00-\u4e05]', ["éA一"], ["éA丆", "eA一"]),
        (r'root ::= "\U0001F642\t\r\n"', ["🙂\t\r\n"], ["🙂"]),
        (r'root ::= [\[\]^] "\[" "\\" "/" [/]', [r"][\//", r"^[\//"], [r"a[\//"]),
        (r"root ::= [a\-z]+ [-x] [x-]", ["a-z--"], ["b--"]),
        (r'root ::= [^\n"]{2} [^^]', ['ab"', "^^x"], ["abc^", 'a"c', "ab^"]),
        ("root ::= . .", ["ab", "\n€"], ["a", "abc"]),
        ('root ::= "a"{2} "b"{1,} "c"{ 0 , 2 }', ["aab", "aabbcc"], ["ab", "aa", "aabccc"]),
        ('root ::= ("a" | ) ("b"?)* end\nend ::= ""', ["", "a", "abb"], ["aa"]),
        ('root ::= start Start aB\nstart ::= "1"\nStart ::= "2"\naB ::= "3"', ["123"], ["12"]),
        ('root ::= nest\nnest ::= "(" nest ")" | "."', [".", "((.))"], ["(."]),
        ('root ::= list\nlist ::= list "," item | item\nitem ::= [0-9]', ["1,2,3"], ["1,"]),
        ('root ::= "::=" # root ::= "x"', ["::="], ["x"]),
    ],
)  # fmt: skip
def test_gbnf_grammars_allow_and_refuse_texts(
    grammar: str, allowed: list[str], refused: list[str]
) -> None:
    assert [text for text in allowed if not matches(grammar, text)] == []
    assert [text for text in refused if matches(grammar, text)] == []
    check_structured_outputs({"grammar": grammar})


def test_random_gbnf_expressions_agree_with_regular_expressions() -> None:
    """Expressions consist of characters and classes, so both engines match the same texts."""
    choose = random.Random(5)

    def expression(depth: int) -> tuple[str, str]:
        kind = choose.choice(["a", "b", "[ab]", "[^b]"] + ["sequence", "either", "repeat"] * depth)
        if kind in ("a", "b"):
            return f'"{kind}"', kind
        if kind.startswith("["):
            return kind, kind
        (left, left_re), (right, right_re) = expression(depth - 1), expression(depth - 1)
        if kind == "sequence":
            return f"{left} {right}", left_re + right_re
        if kind == "either":
            return f"({left} | {right})", f"(?:{left_re}|{right_re})"
        many = choose.choice(["*", "+", "?", "{1,2}"])
        return f"({left}){many}", f"(?:{left_re}){many}"

    for _ in range(60):
        gbnf, expected = expression(2)
        grammar = f'root ::= {gbnf} more\nmore ::= "." more | "."'
        for _ in range(6):
            text = "".join(choose.choices("abc", k=choose.randrange(5))) + "."
            found = re.fullmatch(f"(?:{expected})\\.+", text) is not None
            assert matches(grammar, text) == found, (gbnf, text)


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ("not a grammar", "Failed to convert the grammar: it has no Lark rules"),
        ('top ::= "a"', "Failed to convert the grammar from GBNF: the grammar has no rule root"),
        ("root ::= a\n", "from GBNF: line 1: the rule a is not defined"),
        ('root ::= "a"\nroot ::= "b"', "line 2: the rule root is defined twice"),
        ('root ::= ("a"\nb ::= "c"', "line 2: a closing parenthesis is missing before b"),
        ('root ::= "a" )', r"line 1: a rule's name is missing before \)"),
        ('root "a"\nx ::= "b"', '::= is missing before "a"'),
        ('root ::= "a', r'line 1: "\\"a" cannot start an element'),
        ('root ::= "a" * * &', '"&" cannot start an element'),
        (r'root ::= "\uZZZZ"', r"line 1: \\u is not a character"),
        (r'root ::= "\uD800"', r"line 1: \\uD800 is not a character"),
        ("root ::= []", r"\[\] has no characters"),
        ("root ::= root", "no text can match|Unsatisfiable|no"),
    ],
)
def test_invalid_gbnf_is_refused(grammar: str, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        check_structured_outputs({"grammar": grammar})


def test_gbnf_is_distinguished_from_lark() -> None:
    assert is_gbnf('root ::= "a"')
    for lark in ('start: "::="', 'start: A // A ::= b\nA: "a"', "start: /a/ # ::="):
        assert not is_gbnf(lark)


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        ('root ::= ("a" | "ab") "bc"', "abc"),
        ('root ::= ("x" | "xy" | "xyz") ("z" | "yz")', "xyz"),
        ('root ::= word "x"\nword ::= [a-z]+', "axxx"),
        ('root ::= ("a" | [a-c]) [b-d] "c"', "abc"),
    ],
)
def test_gbnf_strings_that_are_prefixes_of_others(grammar: str, text: str) -> None:
    assert matches(grammar, text)
