"""Handwritten and mutated templates and tokenizers that loop, grow, panic or abort.

A case is a job with three rows, of which the middle one makes the template or the tokenizer fail.
The job must end with an error or a prompt for that row, and with the right prompts for the others.
Its processes must stay within their memory limits, and end within ``MOST_TO_STOP_S`` of a SIGTERM
that comes during that row.
"""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import polars as pl
from tokenizers import Tokenizer as Backend

from batchinfer.errors import ExitCode, UsageError
from batchinfer.job.run.run_job import run_job
from batchinfer.job.spec.spec import JobSpec
from batchinfer.text.processes.limits import Limits
from batchinfer.text.tokenizer import Tokenizer
from tests.faults.child_peaks import ChildPeaks
from tests.faults.kills import Pace, start
from tests.faults.violation import ViolationError
from tests.job.datasets import write_parquet
from tests.job.fakes import FakeBuild, FakeBuilt, byte_tokenizer, job

MOST_S = 180.0
"""Maximum number of seconds for a case, which runs its job twice.

A row may take 2.5 s of processor time together with other rows, then 10 s alone in the same process
and 10 s in a new one.
"""
MOST_TO_STOP_S = 5.0
MOST_BYTES = Limits().memory_bytes + 2**28
"""Largest allowed resident memory of a text process, including the memory it starts with."""
GOOD, BAD = "good", "bad"
_STOP_AFTER_S = (0.3, 2.0)

TEMPLATES = [
    "{{ ('a' * 16000000).rfind('ab' ~ 'a' * 8000000) }}",
    "{{ ('a' * 16000000).find('a' * 8000000 ~ 'b') }}",
    "{{ ('a' * 16000000).count('a' * 8000000 ~ 'b' ~ 'a' * 9) }}",
    "{% set ns = namespace(a=[], b=[]) %}{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] %}"
    "{% set ns.b = [ns.b, ns.b] %}{% endfor %}{{ ns.a == ns.b }}",
    "{% set ns = namespace(a=[1], b=[1]) %}{% for i in range(40) %}{% set ns.a = [ns.a, ns.a] %}"
    "{% set ns.b = [ns.b, ns.b] %}{% endfor %}{{ ns.a < ns.b }}",
    "{% for i in range(99999) %}{% set s = range(99999) | map('string') | list %}{% endfor %}",
    "{{ ([1] * 1000000) | map('string') | map('upper') | map('lower') | list | length }}",
    "{% set ns = namespace(v=[]) %}{% for i in range(9999) %}"
    "{% set ns.v = ns.v + ['x' * 16000000] %}{% endfor %}",
    "{% set ns = namespace(v='') %}{% for i in range(9999) %}{% set ns.v = ns.v ~ 'x' * 16000000 %}"
    "{% endfor %}{{ ns.v | length }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) if 0 %}{% for j in range(9) %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{{ f(n - 1) ~ f(n - 1) if n }}{% endmacro %}{{ f(60) }}",
    "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "{% macro f(n) %}{% if n %}{% call(x) f(n - 1) %}{{ caller(x) }}{% endcall %}{% endif %}"
    "{% endmacro %}{{ f(900) }}",
    "{{ 10 ** 100000000 }}",
    "{{ 7 ** 7 ** 9 % 1000 }}",
    "{{ (10 ** 1000000) | string | length }}",
    "{{ ('9' * 4000000) | int }}",
    "{{ 'x' * 200000000 }}",
    "{{ 'x' * 10 ** 11 }}",
    "{{ 'x'.center(10 ** 9) | length }}",
    "{{ '%*d' % (10 ** 9, 1) }}",
    "{{ '{:>{w}}'.format(1, w=10 ** 9) }}",
    "{{ ([text] * 10 ** 7) | join('x' * 10 ** 7) }}",
    "{{ ('ab' * 10 ** 7).replace('a', 'x' * 10 ** 6) }}",
    "{{ ('ab' * 10 ** 7) | replace('', 'x' * 100) | length }}",
    "{{ ('a ' * 10 ** 7).split() | sort | length }}",
    "{{ ('a ' * 10 ** 6) | wordwrap(1, wrapstring='x' * 1000) | length }}",
    "{{ ('<' * 10 ** 7) | striptags | length }}",
    "{{ ('a@b.c ' * 10 ** 6) | urlize | length }}",
    "{{ ('www.' * 10 ** 6) | urlize | length }}",
    "{{ [[[1] * 1000] * 1000] * 1000 | string | length }}",
    "{{ ([[1] * 1000] * 100000) | tojson(indent=100) | length }}",
    "{{ ([1] * 10 ** 7) | pprint | length }}",
    "{{ range(99999) | batch(10 ** 9, 'fill') | list | length }}",
    "{{ range(9) | slice(10 ** 9) | list | length }}",
    "{{ ([[1] * 100000] * 1000) | sum(start=[]) | length }}",
    "{{ range(99999) | groupby('real') | list | length }}",
    "{{ (range(99999) | list * 300) | unique | list | length }}",
    "{{ 1 | round(10 ** 9, 'ceil') }}",
    "{{ 1 .to_bytes(10 ** 10) }}",
    "{{ ('x' * 10 ** 7).translate({120: 'y' * 1000}) | length }}",
    "{{ ('\\t' * 10 ** 6).expandtabs(10 ** 5) | length }}",
    "{{ ('a' * 10 ** 7) | indent(10 ** 6, first=true) | length }}",
    "{{ dict(a=1, **{'b' * 10 ** 9: 1}) }}",
    "{% set ns = namespace(v=[1]) %}{% for i in range(60) %}{% set ns.v = ns.v + ns.v %}"
    "{% endfor %}",
    "{% set ns = namespace(v='ab') %}{% for i in range(60) %}{% set ns.v %}{{ ns.v }}{{ ns.v }}"
    "{% endset %}{% endfor %}",
    "{% set ns = namespace(v={}) %}{% for i in range(500) %}{% set ns.v = {'a': ns.v} %}"
    "{% endfor %}{{ ns.v | tojson }}",
    "{% set ns = namespace(v=1) %}{% for i in range(99999) %}{% set ns.v = ns.v * 3 %}{% endfor %}",
    "{% for c in text * 10 ** 8 %}{{ loop.length }}{% endfor %}",
    "{% for i in range(99999) recursive %}{{ loop(range(99999)) }}{% endfor %}",
    "{{ cycler(*range(99999)).next() }}{{ joiner('x' * 10 ** 9)() }}{{ joiner('x')() }}",
    "{{ raise_exception('x' * 10 ** 9) }}",
    "{{ ('%s' * 10 ** 7) % ((text,) * 10 ** 7) }}",
    "{{ ('a' * 10 ** 8).encode().decode().encode('utf-16').hex() | length }}",
    "{{ ('x' * 10 ** 7) | list | map('ord') | list }}",
    "{{ ('1,' * 10 ** 7).split(',') | map('int') | sum }}",
    "{{ ('a' * 10 ** 6) | reverse | list | join | reverse | length }}{{ 'x' * 10 ** 8 }}",
]
"""Each template must end in time; only the middle row renders it."""

Change = Callable[[dict[str, Any]], None]
"""Changes a serialized tokenizer into a hostile one."""


def split(pattern: str) -> Change:
    """Return a change that splits texts at the matches of a regular expression."""

    def change(tokenizer: dict[str, Any]) -> None:
        pieces = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
        both = [{**pieces, "invert": False}, tokenizer["pre_tokenizer"]]
        tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": both}

    return change


def replace(pattern: str, content: str, times: int) -> Change:
    """Return a change that replaces the matches of a regular expression, several times."""

    def change(tokenizer: dict[str, Any]) -> None:
        one = {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}
        tokenizer["normalizer"] = {"type": "Sequence", "normalizers": [one] * times}

    return change


def normalized(*kinds: str) -> Change:
    """Return a change that normalizes texts."""

    def change(tokenizer: dict[str, Any]) -> None:
        steps = [{"type": kind} for kind in kinds]
        tokenizer["normalizer"] = {"type": "Sequence", "normalizers": steps}

    return change


def word_piece(tokenizer: dict[str, Any]) -> None:
    """Use a WordPiece model, whose search for the longest piece takes quadratic time."""
    alphabet = tokenizer["model"]["vocab"]
    continued = {f"##{text}": len(alphabet) + id_ for text, id_ in alphabet.items()}
    tokenizer["model"] = {
        "type": "WordPiece",
        "unk_token": "<eos>",
        "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 10**9,
        "vocab": {**alphabet, **continued},
    }
    tokenizer["pre_tokenizer"] = None


TOKENIZERS: list[tuple[Change, str]] = [
    (split(r"(x+x+)+y"), "x" * 60),
    (split(r"\s*[\r\n]+"), " " * 10_100_000),
    (split(r"\s*[\r\n]+|\s+(?!\S)|\s+"), " " * 3_000_000),
    (split(r"x+y"), "x" * 10**6),
    (split(r"x*x*x*y"), "x" * 3000),
    (split(r"(?:x|xx)+y"), "x" * 90),
    (split(r"(?:x*)*y"), "x" * 90),
    (split(r"(.*)(.*)(.*)(.*)(.*)y"), "x" * 900),
    (split(r"^(\w+\s?)*$"), "word " * 40 + "!"),
    (split(r"(\w+)\1+z"), "ab" * 5000),
    (split(r"(?<=x)(?=x)"), "x" * 10**6),
    (split(r"(?<!y)x{1,9}+"), "x" * 10**7),
    (split(r"(?i)(?:İ|ß|é)+z"), "ß" * 10**5),
    (split(r"\X+z"), "\u0301" * 10**5),
    (split(r"(?:(?:(?:x{0,99}){0,99}){0,99}){0,99}y"), "x" * 99),
    (split(r"(?:a?){30}a{30}"), "a" * 30 * 1000),
    (split("|".join("x" * length for length in range(1, 999))), "x" * 10**6),
    (split(""), "x" * 10**6),
    (split("(?=)"), "x" * 10**6),
    (split(r"(?<n>x\g<n>?y)"), "x" * 10**5),
    (split(r"(?<n>x|\(\g<n>*\))"), "(" * 10**5),
    (replace("x", "x" * 4000, 3), "x"),
    (replace("x", "xx", 40), "x"),
    (replace("", "x", 9), "x" * 10**5),
    (replace("x", "y" * 10**6, 1), "x" * 10**4),
    (replace("(x+x+)+y", "z", 2), "x" * 60),
    (replace("x+y", "", 1), "x" * 10**6),
    (normalized("NFKD", "NFKC", "NFKD"), "\ufdfa" * 10**6),
    (normalized("NFD", "NFC"), "\u0301" * 10**6),
    (normalized("Lowercase", "NFKD", "StripAccents"), "İ" * 10**7),
    (word_piece, "x" * 10**5),
    (word_piece, "é" * 10**6),
]


@dataclass(frozen=True)
class Hostile:
    """A template for the middle row, and a tokenizer and text that may be hostile too."""

    template: str
    change: Change | None
    text: str


def hostile(number: int, seed: int) -> Hostile:
    """Return a handwritten case, or a mutation of one if ``number`` is higher."""
    if number < len(TEMPLATES):
        return Hostile(TEMPLATES[number], None, BAD)
    number -= len(TEMPLATES)
    if number < len(TOKENIZERS):
        return Hostile("", *TOKENIZERS[number])
    random = Random(f"{seed}/{number}")
    if random.random() < 0.6:
        return Hostile(_mutated_template(random), None, BAD)
    (change, text), (other, _) = random.choices(TOKENIZERS, k=2)
    text = text[: random.randrange(1, len(text) + 1)] * random.choice((1, 1, 2, 10))
    return Hostile("", _both(change, other), text + random.choice(("", "y", " ", "\n", "z")))


def _both(first: Change, second: Change) -> Change:
    def change(tokenizer: dict[str, Any]) -> None:
        first(tokenizer)
        if word_piece not in (first, second):
            second(tokenizer)

    return change


def _mutated_template(random: Random) -> str:
    first, second = random.choices(TEMPLATES, k=2)
    macro = "{% macro m() %}" + first + "{% endmacro %}"  # the macro can use names that it sets
    forms = [
        first + second,
        macro + "{% for again in range(9) %}{{ m() }}{% endfor %}",
        macro + "{% set kept %}{{ m() }}{% endset %}{{ kept * 9 }}" + second,
        macro + "{% if text %}{{ m() }}{% endif %}" + second,
        macro + "{{ m() ~ m() }}",
    ]
    made = random.choice(forms)
    digits = [at for at, letter in enumerate(made) if letter.isdigit()]
    for at in random.sample(digits, min(2, len(digits))):
        made = made[:at] + random.choice("0123456789") + made[at + 1 :]
    return made


class HostileBuild(FakeBuild):
    """Builds engines that answer with the prompt and have a changed tokenizer."""

    def __init__(self, change: Change | None) -> None:
        super().__init__()
        self._change = change

    def __call__(self, *arguments: Any, **options: Any) -> FakeBuilt:
        """Build an engine like ``FakeBuild``."""
        built = super().__call__(*arguments, **options)
        if self._change is not None:
            built.tokenizer = _changed(self._change)
        return built


def _changed(change: Change) -> Tokenizer:
    plain = byte_tokenizer()
    serialized = json.loads(plain.serialized)
    change(serialized)
    try:
        backend = Backend.from_str(json.dumps(serialized))
    except Exception as error:  # the library raises a plain Exception
        raise UsageError(f"no tokenizer: {error}") from error
    return Tokenizer(
        backend,
        chat_template=None,
        special_tokens=plain.special_tokens,
        control_tokens=plain.control.tokens,
    )


def case(number: int, seed: int, folder: Path) -> str:
    """Run one case; see ``tests.faults.fuzz``."""
    one, place = hostile(number, seed), folder / str(number)
    build = HostileBuild(one.change)
    try:
        spec = _job(place, one, [GOOD, one.text, GOOD])
        with ChildPeaks() as peaks:
            found = _outcome(spec, build, partial(_job, place / "good", one, [GOOD]))
        if peaks.most_bytes > MOST_BYTES:
            raise ViolationError(f"a process took {peaks.most_bytes >> 20} MiB")
        shutil.rmtree(spec.output.path)
        waited = _stopped(spec, build, place, Random(f"{seed}/{number}/stop"))
        if waited > MOST_TO_STOP_S:
            raise ViolationError(f"ended {waited:.1f} s after SIGTERM")
        return found
    except UsageError as error:
        return f"refused: {str(error)[:30]}"
    except ViolationError as error:
        raise ViolationError(f"{error}: {one}") from error
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _job(folder: Path, one: Hostile, texts: list[str]) -> JobSpec:
    rows = {"text": texts, "hostile": [text is one.text for text in texts]}
    write_parquet(folder / "in" / "x.parquet", rows)
    macro = "{% macro choke() %}" + one.template + "{% endmacro %}"
    template = macro + "{% if hostile %}{{ choke() }}{% endif %}{{ text }}"
    return job(
        folder,
        prompt={"column": None, "template": template},
        sampling={"max_tokens": 1},
        errors={"max_error_rate": 1.0},
    )


def _outcome(spec: JobSpec, build: HostileBuild, good: Callable[[], JobSpec]) -> str:
    first, middle, last = _errors(spec, build)
    if first != last or (first is not None and [first] != _errors(good(), build)):
        raise ViolationError(f"rows {first}, {middle}, {last}")
    if middle is None:
        return "a prompt"
    return f"{middle['code']}: {' '.join(middle['message'].split()[:4])[:40]}"


def _errors(spec: JobSpec, build: HostileBuild) -> list[dict[str, str] | None]:
    """Return the error of each row, or None."""
    code = run_job(spec, build=build, quiet=True)  # type: ignore[arg-type]
    if code is not ExitCode.OK:
        raise ViolationError(f"exit {code}")
    rows = pl.read_parquet(Path(spec.output.path) / "data" / "*.parquet").sort("row_id")
    return rows["error"].to_list()


def _stopped(spec: JobSpec, build: HostileBuild, folder: Path, random: Random) -> float:
    """Send SIGTERM to a job; return the seconds from the signal to the end of the job."""
    child = start(spec, build, Pace(1e9, 4096), folder)
    code, waited = child.signal_after(random.uniform(*_STOP_AFTER_S), signal.SIGTERM)
    if code not in (ExitCode.OK, ExitCode.INTERRUPTED, -signal.SIGTERM):
        log = (folder / "log").read_text(errors="replace")
        raise ViolationError(f"exit {code} after SIGTERM: {log[-500:]}")
    return waited
