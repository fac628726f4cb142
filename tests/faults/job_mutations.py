"""Random changes to valid job files."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from random import Random
from typing import Any

from batchinfer.job.spec.yaml import parse_yaml
from tests.faults.failures import JOB
from tests.job.job_files import EVERY_KEY, MINIMAL

_MESSAGES = "prompt: {messages: [{role: user, content: '{{ a }}'}]}"
_BASES = (JOB, MINIMAL, EVERY_KEY, MINIMAL + _MESSAGES)

WORDS = (
    "", " ", "x", "~", "null", "no", "true", "0", "-1", "1e400", "0x10", "0o7", ".nan", "1_000",
    "9" * 30, "é", "\u202e\u0007", "\U0001f600", "a\0b", "{{ a }}", "{{", "{% for i in x %}",
    "{{ ''.__class__ }}", "{{ 9**9**9 }}", "/", ".", "..", "~root/x", "s3://bucket/key", "hf://x",
    "file:///etc/passwd", "/dev/zero", "a" * 5000, "*", "**/*", "[", "[!a", "40GiB", "-4KiB", "'",
    '"', "\\", "#", "- a", "a: b", "&a", "*a", "!!binary x", "|", ">", "%x", "@", "2026-11-20",
    "\ud7ff", "\ufeff", "\u2028", "auto", "cpu", "h200",
)  # fmt: skip
"""Texts for values and keys."""
_TEXTS = (
    "<<: {a: 1}\n", "? [a, b]\n: 1\n", "&a a: *a\n", "*a : 1\n", "- a\n", "---\n", "...\n",
    "%YAML 1.1\n---\n", "\t", "a: !!python/object/apply:os.system [ls]\n", "!!set {a, b}\n",
    "a: !<tag:yaml.org,2002:int> 3\n", "a: |\n  b\n c\n", "'", '"', "\\", "\0", "\x1b[31m", "\r",
    "\u0085", b"\xed\xa0\xbd", b"\xff\xfe", b"\xc3\x28", "x: &x [*x]\n", "a: {a: {a: \n",
    "[" * 40, "{a: " * 40, "}", "]", ": ", "sampling:\n", "sampling: {max_tokens: 8}\n", "? ",
    "model: x\nmodel: y\n", "!", "! a\n", "%TAG ! tag:x,2000:\n---\n",
)  # fmt: skip
"""Texts to insert into files."""


def job_file(random: Random) -> bytes:
    """Return the bytes of a random job file."""
    makers: list[Callable[[Random], str | bytes]] = [_changed_data] * 12
    makers += [_changed_text] * 10
    makers += [_junk, _deep, _huge, _alias_bomb]
    made = random.choice(makers)(random)
    data = made if isinstance(made, bytes) else made.encode("utf-8", "surrogatepass")
    return _changed_bytes(random, data) if random.random() < 0.1 else data


def options(random: Random) -> tuple[list[str], list[str]]:
    """Return arguments for ``--set`` and for ``--var``, usually none."""
    overrides, variables = [], []
    while random.random() < 0.15:
        keys = ".".join(map(str, random.choice(_paths(_data(random)))))
        value = random.choice([*WORDS, json.dumps(_value(random))])
        overrides.append(random.choice([f"{keys}={value}", keys, f"={value}", f"{keys}.x={value}"]))
    while random.random() < 0.1:
        variables.append(random.choice(["ds=", "a=", "", "="]) + random.choice(WORDS))
    return overrides, variables


def _data(random: Random) -> Any:
    data = deepcopy(parse_yaml(random.choice(_BASES), "base").data)
    data.pop("vars", None)
    return json.loads(json.dumps(data).replace("{{ ds }}", "x"))


def _paths(data: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    items = (
        data.items()
        if isinstance(data, dict)
        else enumerate(data)
        if isinstance(data, list)
        else ()
    )
    below = [place for key, value in items for place in _paths(value, (*path, key))]
    return [path, *below] if path else below


def _value(random: Random, depth: int = 0) -> Any:
    kind = random.randrange(9 if depth < 4 else 6)
    if kind == 0:
        return random.choice([None, True, False])
    if kind == 1:
        return random.choice([0, -1, 1, 2**31, 2**63, -(2**70), random.randrange(10**6)])
    if kind == 2:
        return random.choice([0.0, -0.5, 1e-300, 1.5, 1e300])
    if kind < 6:
        return random.choice(WORDS)
    size = random.randrange(4)
    if kind == 6:
        return [_value(random, depth + 1) for _ in range(size)]
    return {random.choice(WORDS): _value(random, depth + 1) for _ in range(size)}


def _changed_data(random: Random) -> str:
    data = _data(random)
    for _ in range(random.choice([1, 1, 1, 2, 3])):
        path = random.choice(_paths(data))
        holder = data
        for key in path[:-1]:
            holder = holder[key]
        what = random.randrange(4)
        if what == 0 and isinstance(holder, dict):
            del holder[path[-1]]
        elif what == 1 and isinstance(holder, dict):
            holder[random.choice([*WORDS, f"{path[-1]}x", str(path[-1]).upper()])] = _value(random)
        else:
            holder[path[-1]] = _value(random)
        if not _paths(data):
            break
    return json.dumps(data, ensure_ascii=random.random() < 0.5, indent=random.choice([None, 1]))


def _changed_text(random: Random) -> bytes:
    data = random.choice(_BASES).replace("{{ ds }}", "x").encode()
    for _ in range(random.randrange(1, 5)):
        at, length = random.randrange(len(data) + 1), random.randrange(1, 30)
        what = random.randrange(4)
        if what == 0:
            added = random.choice([*_TEXTS, *WORDS])
            data = data[:at] + (added if isinstance(added, bytes) else added.encode()) + data[at:]
        elif what == 1:
            data = data[:at] + data[at + length :]
        elif what == 2:
            lines = data.splitlines(keepends=True)
            line = random.choice(lines) if lines else b""
            lines.insert(random.randrange(len(lines) + 1), line)
            data = b"".join(lines)
        else:
            lines = data.splitlines(keepends=True)
            random.shuffle(lines)
            data = b"".join(lines)
    return data


def _changed_bytes(random: Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(random.randrange(1, 8)):
        if changed:
            changed[random.randrange(len(changed))] = random.randrange(256)
    return bytes(changed)


def _junk(random: Random) -> bytes:
    junk = random.randbytes(random.randrange(2000))
    return random.choice([junk, b"\x89PNG" + junk, JOB.encode("utf-16"), JOB.encode() + junk, b""])


def _deep(random: Random) -> str:
    depth = random.choice([31, 32, 33, 500])
    what = random.choice(["[", "{a: ", "- ", "? ", "a:\n"])
    if what == "a:\n":
        return JOB + "accept:\n" + "".join(f"{' ' * i}a:\n" for i in range(1, depth))
    closing = {"[": "]", "{a: ": "}"}.get(what, "")
    return JOB + f"accept: {what * depth}1{closing * depth}\n"


def _huge(random: Random) -> str:
    size = random.choice([100_000, 250_000, 1_000_000])
    filling = random.choice(["x", "é", "- a\n  ", "a, ", "# ", " ", "\n", "{{", "'", "&a ", "\\n"])
    text = filling * (size // len(filling))
    place = random.choice(["name: ", 'name: "', "accept:\n  ", "accept: [", "", "# ", "a: |\n  "])
    return JOB + place + text


def _alias_bomb(random: Random) -> str:
    width, levels = random.randrange(2, 12), random.randrange(3, 40)
    lines = ["a0: &a0 [x, x]"]
    lines += [
        f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * width)}]"
        for level in range(1, levels)
    ]
    return JOB + "accept:\n" + "".join(f"  {line}\n" for line in lines)
