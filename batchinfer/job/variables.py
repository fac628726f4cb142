"""``{{ name }}`` in the job's name and paths: texts put in from ``vars``.

Names only. What a path needs beyond that is better computed by whoever passes ``--var``, and with
no expressions nothing written here can run long or grow large.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from batchinfer.errors import UsageError
from batchinfer.job.messages import listed, printable

_PLACE = re.compile(r"\{\{(.*?)\}\}", re.DOTALL)


def render_variables(text: str, variables: Mapping[str, str]) -> str:
    """``text`` with every ``{{ name }}`` replaced.

    Raises:
        ValueError: a name that is not in ``variables``, or braces around something else.
    """

    def value(match: re.Match[str]) -> str:
        name = match.group(1).strip()
        if name not in variables:
            known = listed(variables) or "none"
            raise ValueError(
                f"{{{{ {printable(name, 60)} }}}} is not a variable; vars has: {known}"
            )
        return variables[name]

    if text.count("{{") != len(_PLACE.findall(text)):
        raise ValueError("has {{ without }}")
    return _PLACE.sub(value, text)


def parse_variables(assignments: Sequence[str]) -> dict[str, str]:
    """Names and texts of ``--var name=text`` options; of a repeated name the last.

    Raises:
        UsageError: not of that form, or not valid Unicode.
    """
    variables: dict[str, str] = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals or not name.strip():
            raise UsageError(f"--var {printable(assignment, 60)}: write --var name=text")
        try:
            assignment.encode()
        except UnicodeEncodeError:
            raise UsageError(f"--var {printable(name, 60)}: not valid Unicode") from None
        variables[name.strip()] = text
    return variables
