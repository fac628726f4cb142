"""Downloads the images that rows name by web address, before their prompts are made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from batchinfer.config import PromptConfig
from batchinfer.errors import RowError
from batchinfer.job.images.download import Downloaded, Downloads
from batchinfer.job.images.media_files import WEB
from batchinfer.job.rows.read_prompts import Prompts
from batchinfer.text.images.files import has_scheme
from batchinfer.text.prompt_sources import prompt_column
from batchinfer.text.prompts import Prompt
from batchinfer.text.row_values import IMAGE_KEYS, IMAGE_TYPES

_Change = Callable[[str], Any]
"""Function that returns the value that replaces a web address."""


class WebPrompts:
    """Downloads the images that rows name by web address, and makes prompts with these files.

    Args:
        prompts: makes the prompts.
        check_stopped: raises an error if prompts are no longer needed.
    """

    def __init__(
        self,
        prompts: Prompts,
        config: PromptConfig,
        downloads: Downloads,
        check_stopped: Callable[[], None],
    ) -> None:
        self.columns = prompts.columns
        self._prompts = prompts
        self._images = config.image_columns
        self._talks = prompt_column(config, prompts.columns)
        self._downloads = downloads
        self._check_stopped = check_stopped

    def start(self, rows: Sequence[Mapping[str, object]]) -> Callable[[], list[Prompt | RowError]]:
        """See ``Prompts.start``. The prompts are started only once all files are downloaded."""
        urls: dict[str, None] = {}
        for row in rows:
            self._changed(row, lambda url: urls.setdefault(url))
        if not urls:
            return self._prompts.start(rows)
        wait = self._downloads.start(urls, self._check_stopped)

        def finish() -> list[Prompt | RowError]:
            files: Mapping[str, Downloaded] = wait()
            return self._prompts.start([self._changed(row, files.__getitem__) for row in rows])()

        return finish

    def _changed(self, row: Mapping[str, object], change: _Change) -> Mapping[str, object]:
        """Apply ``change`` to web addresses in image columns and image parts of conversations."""
        changed = {name: _in_cell(row.get(name), change) for name in self._images if name in row}
        talk = None if self._talks is None else row.get(self._talks)
        if self._talks is not None and isinstance(talk, list):
            changed[self._talks] = [_in_message(message, change) for message in talk]
        return {**row, **changed}


def _in_cell(value: Any, change: _Change) -> Any:
    if isinstance(value, list):
        return [_in_cell(item, change) for item in value]
    if isinstance(value, Mapping):
        return {name: _in_cell(item, change) for name, item in value.items()}
    text = value.decode(errors="replace") if isinstance(value, bytes) else value
    return change(text) if isinstance(text, str) and has_scheme(text, *WEB) else value


def _in_message(message: Any, change: _Change) -> Any:
    if not isinstance(message, Mapping) or not isinstance(message.get("content"), list):
        return message
    return {**message, "content": [_in_part(part, change) for part in message["content"]]}


def _in_part(part: Any, change: _Change) -> Any:
    if not isinstance(part, Mapping) or _text(part.get("type")) not in IMAGE_TYPES:
        return part
    images = {name: _in_cell(part[name], change) for name in IMAGE_KEYS if name in part}
    return {**part, **images}


def _text(value: object) -> object:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
