"""What ``LLM.stats`` returns: a dict that shows itself as a table."""

from __future__ import annotations

from html import escape


class Stats(dict[str, dict[str, float]]):
    """``tokens``, ``throughput`` and ``kv`` of ``summary.json``; in a notebook, a table."""

    def __repr__(self) -> str:
        lines: list[str] = []
        for section, values in self.items():
            lines += [section, *(f"  {name:<22}{_said(name, n):>14}" for name, n in values.items())]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """What notebooks show."""
        rows = "".join(
            f"<tr><th colspan=2 style='text-align:left'>{escape(section)}</th></tr>"
            + "".join(
                f"<tr><td style='text-align:left'>{escape(name)}</td><td>{_said(name, n)}</td></tr>"
                for name, n in values.items()
            )
            for section, values in self.items()
        )
        return f"<table>{rows}</table>"


def _said(name: str, value: float) -> str:
    if "per_s" in name:
        return f"{value:,.1f}"
    return f"{value:.1%}" if isinstance(value, float) else f"{value:,}"
