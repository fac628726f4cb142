"""Text processes with low limits, and tokenizers that can exceed them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import psutil
import pytest
from tokenizers import Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from batchinfer.config import PromptConfig
from batchinfer.text.processes.limits import Limits
from batchinfer.text.processes.pool import TextProcesses, WorkerPrompts
from batchinfer.text.prompts import PromptBuilder
from batchinfer.text.tokenizer import Tokenizer

TIGHT = Limits(cpu_seconds=0.5, shared_cpu_seconds=0.2, seconds=60, memory_bytes=2**28)

SOON_S = 5.0

MakeProcesses = Callable[..., TextProcesses]


@pytest.fixture
def text_processes_start_fast() -> None:
    """Replace the fixture of the same name: these tests start processes as a job does."""


def byte_level(pattern: str | None = None, growth: int = 1) -> Tokenizer:
    """Return a tokenizer with one token per byte of a text.

    Args:
        pattern: a regular expression that splits texts first.
        growth: each x in a text is first replaced by this many x, three times in a row.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({text: at for at, text in enumerate(alphabet)}, []))
    splits = [] if pattern is None else [pre_tokenizers.Split(Regex(pattern), "isolated")]
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_])
    if growth > 1:
        backend.normalizer = normalizers.Sequence([normalizers.Replace("x", "x" * growth)] * 3)
    return Tokenizer(
        backend, chat_template=None, special_tokens={}, control_tokens=frozenset({"<|end|>"})
    )


@pytest.fixture
def make_processes() -> Iterator[MakeProcesses]:
    """Return a function that makes ``TextProcesses``, which end with the test."""
    made: list[TextProcesses] = []

    def make(tokenizer: Tokenizer, limits: Limits = TIGHT, most: int = 2) -> TextProcesses:
        made.append(TextProcesses(most, limits))
        made[-1].load(tokenizer)
        return made[-1]

    yield make
    for processes in made:
        processes.close()


def prompts_of(
    processes: TextProcesses, template: str = "{{ text }}", **more: Any
) -> WorkerPrompts:
    """Return a prompt builder for a template that uses the column ``text``."""
    config = PromptConfig(template=template)
    facts: dict[str, Any] = {"max_model_len": 10**8, "columns": ["text"], **more}
    return processes.prompts(partial(PromptBuilder, config, **facts))


def fork_server() -> psutil.Process:
    """Return the fork server that started last; engines of other tests may have their own."""
    servers = (
        child for child in psutil.Process().children() if "fork_server" in " ".join(child.cmdline())
    )
    return max(servers, key=psutil.Process.create_time)


def workers() -> list[psutil.Process]:
    """Return the workers of the fork server that started last."""
    return fork_server().children()
