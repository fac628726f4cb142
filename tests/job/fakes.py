"""Engines without a model, which answer with the prompt, and jobs that run on them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from batchinfer.engine.engine import Engine
from batchinfer.engine.request import Request
from batchinfer.job.manifest import Manifest
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.output.resume import clear_output, clear_staging, plan_resume, prepare_directory
from batchinfer.job.row_ranges import Part
from batchinfer.job.spec.spec import JobSpec
from batchinfer.text.structured.compiled_grammar import GrammarCompiler
from batchinfer.text.tokenizer import Tokenizer
from tests.engine.fake import EOS, NextToken, make_engine

EOS_TEXT = "<eos>"
LETTERS = (EOS, 66, 67, 68, 69)


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer with one token per byte; id 0 ends a text."""
    alphabet = [EOS_TEXT, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Backend(models.BPE({text: i for i, text in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([EOS_TEXT])
    return Tokenizer(
        backend,
        chat_template=None,
        special_tokens={"eos_token": EOS_TEXT},
        control_tokens=frozenset({EOS_TEXT}),
    )


def grammars() -> GrammarCompiler:
    """Return a grammar compiler for the byte tokenizer."""
    return GrammarCompiler(byte_tokenizer(), frozenset({EOS}), 257)


def echo(context: bytes, stream: int, sample: int, position: int) -> int:
    """Return the prompt's token at ``position``, or EOS if the prompt is shorter."""
    tokens = np.frombuffer(context, dtype=np.int32)
    return int(tokens[position]) if 2 * position < len(tokens) else EOS


def drawn(context: bytes, stream: int, sample: int, position: int) -> int:
    """Return one of four letters or EOS, by a hash of all arguments."""
    found = zlib.crc32(context + bytes(f"{stream}/{sample}/{position}", "ascii")) % 5
    return LETTERS[found]


def drawn_at_length(context: bytes, stream: int, sample: int, position: int) -> int:
    """Draw like ``drawn``, but return EOS only once in 79 times."""
    found = zlib.crc32(context + bytes(f"{stream}/{sample}/{position}", "ascii"))
    return EOS if found % 79 == 0 else LETTERS[1 + found % 4]


@dataclass
class FakeBuilt:
    """A fake runner's engine, with the attributes of ``build_engine``'s result."""

    engine: Engine
    tokenizer: Tokenizer = field(default_factory=byte_tokenizer)
    eos_token_ids: frozenset[int] = frozenset({EOS})
    max_model_len: int = 256
    vocab_size: int = 257
    adapters: Mapping[str, int] = field(default_factory=dict)
    block_size: int = 4
    num_blocks: int = 0
    bytes_per_block: int = 1024
    device: str = "fake"
    model_facts: dict[str, Any] = field(default_factory=lambda: {"name": "echo"})
    kernels: dict[str, str] = field(default_factory=dict)
    shares_prefixes: bool = True
    slots_per_state: int = 0
    images: None = None
    warm_up: Callable[..., None] | None = None

    def device_bytes(self) -> int:
        return 12345


def _nothing(_number: int) -> None:
    """Do nothing; not a lambda, because a lambda cannot be sent to another process."""


class FakeBuild:
    """Builds engines that answer with the prompt, and counts them."""

    def __init__(
        self, num_blocks: int = 128, max_num_seqs: int = 16, next_token: NextToken = echo
    ) -> None:
        self.num_blocks = num_blocks
        self.max_num_seqs = max_num_seqs
        self.next_token = next_token
        self.count = 0
        self.before_step: Callable[[int], None] = _nothing

    def __call__(
        self, model: object, engine: object, *, log: Callable[[str], None], **_: object
    ) -> FakeBuilt:
        self.count += 1
        log("a table of memory")
        real, runner = make_engine(
            self.num_blocks,
            4,
            max_num_seqs=self.max_num_seqs,
            max_model_len=256,
            next_token=self.next_token,
        )
        run, steps = runner.run, iter(range(1_000_000))

        def run_step(step: Any) -> Any:
            self.before_step(next(steps))
            return run(step)

        runner.run = run_step  # type: ignore[method-assign]
        return FakeBuilt(real, num_blocks=self.num_blocks)


class TellingBuild(FakeBuild):
    """Builds engines that record the ids of the rows they run."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.ran: list[int] = []

    def __call__(
        self, model: object, engine: object, *, log: Callable[[str], None], **_: object
    ) -> FakeBuilt:
        built = super().__call__(model, engine, log=log)
        add = built.engine.add_request

        def add_and_tell(request: Request) -> None:
            self.ran.append(request.row_id)
            add(request)

        built.engine.add_request = add_and_tell  # type: ignore[method-assign]
        return built


class AtOnce:
    """Replaces ``BackgroundConsumer`` and consumes each item inside ``put``, without a thread."""

    def __init__(self, consume: Callable[[Any], None], depth: int) -> None:
        self.put = consume

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def begin(out: OutputDir, manifest: Manifest, if_exists: str = "resume") -> list[Part]:
    """Prepare ``out`` for a run of ``manifest``; return the parts to make."""
    with out.locked():
        work = plan_resume(out, manifest, if_exists)
        prepare_directory(out, work)
        clear_output(out, work)
    return list(work.todo)


def for_writer(out: OutputDir, writer: str) -> OutputDir:
    """Prepare ``out`` for one of several writers, and return the writer's view of it."""
    own = out.for_writer(writer)
    clear_staging(own)
    return own


def job(tmp_path: Path, **sections: dict[str, Any]) -> JobSpec:
    """Return a job that reads ``tmp_path/in`` and writes ``tmp_path/out``.

    Args:
        sections: sections of the job file, merged into the defaults.
    """
    fields: dict[str, dict[str, Any]] = {
        "model": {"name": "echo"},
        "input": {"path": str(tmp_path / "in")},
        "prompt": {"column": "prompt", "chat_template": "none"},
        "sampling": {"max_tokens": 8, "temperature": 0.0},
        "output": {"path": str(tmp_path / "out"), "rows_per_part": 10},
    }
    for name, values in sections.items():
        fields[name] = {**fields.get(name, {}), **values}
    return JobSpec.model_validate(fields)
