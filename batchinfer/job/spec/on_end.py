"""The section ``on_end`` of the job file: who is told when a run ends.

A URL or an argument may be a secret as a whole (a chat's webhook is). No message and no record has
more of it than its host or program.
"""

from __future__ import annotations

from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import Field, field_serializer, model_validator

from batchinfer.console.format import printable
from batchinfer.job.spec.section import Section

HIDDEN = "\N{HORIZONTAL ELLIPSIS}"
"""Stands for what is not told."""

Text = Annotated[str, Field(min_length=1)]


class OnEndSpec(Section):
    """Who is told, once, when a run ends: well, with too many errors, stopped or failed. What goes
    wrong with that is a warning and changes no exit code. At most one of the two keys."""

    webhook: Text | None = None
    """An http:// or https:// URL that the outcome is posted to, as JSON."""
    command: tuple[Text, ...] | None = None
    """A program and its arguments, run without a shell, with the outcome on stdin, as JSON."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.webhook is not None and self.command is not None:
            raise ValueError("webhook and command are both given; keep one")
        if self.command is not None and (not self.command or "\0" in "".join(self.command)):
            raise ValueError("command must be a program and its arguments, like [notify, done]")
        if self.webhook is not None and not _is_web_address(self.webhook):
            raise ValueError("webhook must be an http:// or https:// URL")
        return self

    @property
    def named(self) -> str:
        """What is called, without what may be secret."""
        if self.webhook is not None:
            return f"on_end.webhook {_host_of(self.webhook)}"
        program = self.command[0] if self.command else ""
        return f"on_end.command {printable(program, 80)}"

    @field_serializer("webhook")
    def _hide_webhook(self, webhook: str | None) -> str | None:
        return None if webhook is None else _host_of(webhook)

    @field_serializer("command")
    def _hide_arguments(self, command: tuple[str, ...] | None) -> list[str] | None:
        if command is None:
            return None
        return [command[0], HIDDEN] if len(command) > 1 else list(command)


def _is_web_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and (parts.port is None or parts.port > 0)
            and url.isprintable()
            and " " not in url
        )
    except ValueError:  # no such port, or host
        return False


def _host_of(url: str) -> str:
    parts = urlsplit(url)
    port = "" if parts.port is None else f":{parts.port}"
    return f"{parts.scheme}://{printable(parts.hostname or '', 80)}{port}/{HIDDEN}"
