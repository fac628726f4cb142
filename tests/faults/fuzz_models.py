"""Broken or hostile model folders run, or are refused with a short message that names the file."""

from __future__ import annotations

import json
import logging
import resource
import shutil
from pathlib import Path
from random import Random

from transformers.utils.logging import disable_progress_bar

from batchinfer import LLM, SamplingParams
from batchinfer.cli.program import MAX_MESSAGE_LINES
from batchinfer.errors import JobError, ModelError
from tests.faults.model_mutations import BASES, Mutation, make_base, mutate
from tests.faults.violation import ViolationError

MOST_S = 10.0
"""Maximum number of seconds that a folder may take."""
MAX_LINE = 1000
_MOST_BYTES = 12 << 30
"""Limit of the address space, so that no folder can exhaust the machine's memory."""
_TENSORS = (
    "according to config.json it should be",
    "tensors are missing",
    "tensors that the model in config.json does not have",
)
"""Messages about tensors that do not match a config."""
_PROMPT = "Once"


def case(number: int, seed: int, folder: Path) -> str:
    """Load one model folder and generate a few tokens."""
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, resource.RLIM_INFINITY))
    disable_progress_bar()
    logging.disable(logging.WARNING)
    random = Random(f"{seed} model {number}")
    at = random.randrange(2 * len(BASES))
    base, model = folder / f"base-{at}", folder / "model"
    if not base.exists():
        make_base(base, BASES[at // 2], at)
    shutil.rmtree(model, ignore_errors=True)
    shutil.copytree(base, model)
    mutation = mutate(model, random)
    try:
        llm = LLM(model, num_kv_blocks=16, max_num_seqs=2, swap_space=0, num_threads=1)
        llm.generate(_PROMPT, SamplingParams(max_tokens=3, temperature=0.0), use_tqdm=False)
    except JobError as error:
        _check_message(error, model, mutation)
        return f"exit {int(error.exit_code)}"
    return "OK"


def _check_message(error: JobError, model: Path, mutation: Mutation) -> None:
    message, (file, key) = str(error), mutation
    lines = message.splitlines()
    if not isinstance(error, ModelError):
        raise ViolationError(f"{mutation}: exit {int(error.exit_code)}: {message}")
    if not 1 <= len(lines) <= MAX_MESSAGE_LINES or max(map(len, lines)) > MAX_LINE:
        raise ViolationError(f"{mutation}: {len(lines)} lines: {message}")
    if not all(character.isprintable() for line in lines for character in line):
        raise ViolationError(f"{mutation}: control characters: {message!r}")
    if str(model) not in message and file not in message:
        raise ViolationError(f"{mutation}: it names no file: {message}")
    if key and not _names_key(message, key, model):
        raise ViolationError(f"{mutation}: it names no key: {message}")


def _names_key(message: str, key: str, model: Path) -> bool:
    """Return True if a message names a key of the config, or a tensor that does not match it."""
    keys = {*json.loads((model / "config.json").read_text()), key}
    return any(word in message for word in keys) or any(name in message for name in _TENSORS)
