"""Checks what each room of the package may import, and that the program starts without torch.

A room is a folder of modules, or a module outside of such folders.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import get_args

import pytest

from batchinfer.job.rows.tasks import TASKS
from batchinfer.job.spec.task_keys import TASK_SPECS, TaskName

PACKAGE = Path(__file__).parent.parent / "batchinfer"
MOST_MODULES = 15
"""Largest allowed number of modules in a folder, so that a reader can survey it."""


@dataclass(frozen=True)
class Room:
    """A folder of modules, or a single module next to the folders of its plane.

    Args:
        name: dotted name below ``batchinfer``.
        holds: the room's purpose.
        may_import: names of rooms, or of planes, which stand for all their rooms. Only those above
            this room in ``ROOMS`` may be imported.
    """

    name: str
    holds: str
    may_import: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """The rooms that the room may import, as a sentence."""
        return f"May import: {', '.join(self.may_import) or 'nothing of batchinfer'}."


def described(name: str, may_import: tuple[str, ...] = ()) -> Room:
    """Return the room of a package, described by the first line of the package's docstring."""
    docstring = ast.get_docstring(
        ast.parse((PACKAGE / name.replace(".", "/") / "__init__.py").read_text())
    )
    assert docstring, f"the __init__.py of {name} does not say what the folder holds"
    return Room(name, docstring.splitlines()[0], may_import)


# A room may import only rooms above it in this list that its last argument names. Hence rooms do
# not import each other in cycles. Add a new room below all the rooms that it imports.
ROOMS = [
    Room("errors", "errors that a user can cause and fix, with their exit codes"),
    Room("near_names", "suggestions for misspelled names"),
    Room("protocols", "what the engine asks of the text plane"),
    described("process", ("errors",)),
    Room("config", "settings as records that check their values", ("errors", "near_names")),
    Room("kernels", "tensors and numbers only: Triton, C, and their references in torch"),
    Room("engine.images", "images in prompts, and their tokens"),
    Room("engine.step", "the message each way between engine and worker", ("engine.images",)),
    Room("engine.encoder_step", "the message of a worker that reads texts whole", ("engine.step",)),
    Room("engine.runner", "the border to the worker", ("engine.step",)),
    Room("engine.prompt_logprobs", "log-probabilities of a prompt's tokens", ("engine.step",)),
    Room("engine.request", "requests to the engine", ("config", "protocols", "engine")),
    described("engine.kv"),
    Room(
        "engine.beam_search",
        "beam search over one row",
        ("protocols", "engine.request", "engine.step"),
    ),
    Room("engine.sequence", "a row's state and its samples", ("protocols", "engine")),
    Room(
        "engine.resume",
        "requests that continue from the output of an earlier run",
        ("engine.beam_search", "engine.request", "engine.sequence"),
    ),
    Room(
        "engine.output_tracker",
        "output of unfinished requests, as increments",
        ("engine.request", "engine.sequence"),
    ),
    Room("engine.stats", "statistics of a step"),
    described(
        "engine.scheduler",
        (
            *("engine.images", "engine.step", "engine.request", "engine.kv", "engine.sequence"),
            "engine.stats",
        ),
    ),
    Room("engine.metrics", "measures over many steps", ("engine.request", "engine.stats")),
    described("engine.step_io", ("protocols", "engine")),
    Room("engine.oom_recovery", "smaller steps after out-of-memory errors", ("errors", "engine")),
    Room("engine.engine", "schedule, submit, process", ("engine",)),
    Room("engine.encoder_engine", "an engine for encoders, without a pool", ("errors", "engine")),
    described("engine.simulate", ("config", "engine")),
    described("console", ("near_names", "engine.stats")),
    described("text", ("config", "process", "errors", "near_names", "protocols")),
    described("pooling", ("config", "errors", "text")),
    described("requests", ("config", "errors", "engine", "text")),
    Room("worker.oom", "steps that failed for want of memory", ("errors", "engine.runner")),
    Room("worker.transfer", "arrays to the device and back"),
    Room("worker.ops", "row-wise operations on any device", ("kernels",)),
    Room("worker.host_blocks", "host memory for swapped blocks", ("errors", "engine")),
    Room(
        "worker.kv_cache",
        "the pool's tensor",
        ("errors", "kernels", "engine", "worker.host_blocks", "worker.ops"),
    ),
    Room("worker.adapter_batch", "which rows use which adapter", ("engine.step",)),
    Room("worker.linear_kernels", "GEMM kernels of linear layers", ("kernels",)),
    described("worker.threads", ("process", "kernels", "engine.runner", "engine.step")),
    described("worker.attention", ("errors", "kernels", "engine.kv", "engine.step", "worker")),
    described("worker.recurrent", ("kernels", "engine.kv", "worker.attention")),
    described(
        "worker.model", ("config", "errors", "engine", "worker.attention", "worker.transfer")
    ),
    described(
        "worker.vision",
        (
            *("errors", "kernels", "engine.images", "engine.runner", "engine.step"),
            *("worker.attention", "worker.linear_kernels", "worker.model"),
        ),
    ),
    described("worker.cuda_graphs", ("kernels", "engine.runner", "engine.step", "worker")),
    Room("worker.forward", "one forward pass", ("engine.step", "worker")),
    Room(
        "worker.self_test", "a model tried on a few tokens", ("engine.kv", "engine.step", "worker")
    ),
    described(
        "worker.sampling", ("config", "kernels", "engine.step", "worker.oom", "worker.transfer")
    ),
    Room("worker.prompt_logprobs", "scores of a prompt's tokens", ("engine.step", "worker")),
    Room(
        "worker.family_check",
        "a loaded model compared with transformers' own forward pass",
        ("errors", "engine.kv", "worker"),
    ),
    described("worker.linear", ("errors", "console", "kernels", "engine.kv", "worker")),
    described("worker.fusion", ("errors", "kernels", "engine.kv", "engine.step", "worker")),
    described("worker.lora", ("errors", "kernels", "engine.kv", "worker")),
    Room("worker.memory", "where a device's memory goes", ("config", "errors", "engine", "worker")),
    described("worker.encoder", ("config", "errors", "console", "kernels", "engine", "worker")),
    Room(
        "worker.loader", "a model, made ready", ("config", "errors", "console", "engine", "worker")
    ),
    Room(
        "worker.replay_check",
        "CUDA graphs compared with plain steps",
        ("kernels", "engine.kv", "engine.runner", "engine.step", "worker"),
    ),
    Room("worker.model_runner", "the engine's runner", ("engine", "worker")),
    described("builders", ("config", "process", "errors", "console", "engine", "text", "worker")),
    described("job.storage", ("errors", "console")),
    Room("job.row_ranges", "sets of rows, and the parts they fall into"),
    Room("job.run_ids", "ids of runs, and who wrote in them"),
    described("job.input", ("errors", "console", "job.storage", "job.row_ranges")),
    described(
        "job.spec",
        ("config", "errors", "near_names", "console", "text", "job.storage", "job.input"),
    ),
    described("job.model_files", ("errors", "console", "job.storage", "job.spec")),
    Room("job.fingerprint", "what of a job changes its output", ("errors", "console", "job")),
    Room("job.manifest", "what an output directory is for", ("errors", "console", "job")),
    described(
        "job.rows",
        (*("config", "errors", "console", "engine", "text", "pooling"), *("requests", "job")),
    ),
    described("job.images", ("config", "errors", "console", "text", "requests", "builders", "job")),
    described("job.output", ("errors", "console", "engine", "text", "job")),
    described("job.reuse", ("errors", "console", "requests", "job")),
    described("job.claims", ("errors", "console", "job")),
    described("job.openai", ("config", "errors", "console", "text", "requests", "builders", "job")),
    Room(
        "job.job",
        "a job and its loaded model",
        ("config", "errors", "console", "text", "requests", "builders", "job"),
    ),
    described("job.stats", ("errors", "process", "console", "engine", "text", "builders", "job")),
    described("job.tokens", ("errors", "console", "engine", "protocols", "requests", "job")),
    described(
        "job.run",
        ("config", "errors", "process", "console", "text", "engine", "requests", "builders", "job"),
    ),
    described(
        "job.fleet",
        ("config", "errors", "process", "console", "engine", "requests", "builders", "job"),
    ),
    described(
        "job.plan", ("config", "errors", "console", "engine", "text", "requests", "builders", "job")
    ),
    described("job.init", ("config", "errors", "console", "job")),
    described("report", ("errors", "config", "console", "engine", "job", "text")),
    described(
        "llm",
        (
            *("config", "errors", "process", "console", "engine", "text", "pooling"),
            *("requests", "builders", "report"),
        ),
    ),
    Room("__init__", "the names of the Python API", ("process", "config", "llm")),
    described("vllm", ("errors", "process", "llm", "__init__")),
    described(
        "cli", ("errors", "process", "config", "console", "worker.model", "job", "report", "llm")
    ),
    Room("__main__", "the program", ("process", "cli")),
]
BY_NAME = {room.name: room for room in ROOMS}
LEVEL = {room.name: level for level, room in enumerate(ROOMS)}
HEAVY = {
    "engine": {"torch", "transformers", "tokenizers", "pyarrow", "polars", "pathlib"},
    "text": {"torch", "transformers", "pyarrow", "polars", "pathlib"},
    "text.images": {"torch", "pyarrow", "polars"},  # reads image files
    "kernels": {"transformers", "numpy", "pyarrow", "polars"},
    "worker": {"pyarrow", "polars"},
    "console": {"torch", "transformers", "pyarrow", "polars"},
    "job": {"torch", "transformers"},
    "report": {"torch", "transformers"},
    "pooling": {"torch", "transformers", "pyarrow", "polars"},
}
OF_EXTRAS = {
    *("PIL", "deltalake", "jsonschema_rs", "llguidance", "obstore", "prometheus_client"),
    *("pyiceberg", "ray", "torchao"),
}
"""Packages that only extras install."""
PLANES = ("engine", "worker", "job")
"""Planes: each folder and each other module directly within them is a room."""


def room_of(module: str) -> str:
    """Return the room of a module, which is given by its dotted name below ``batchinfer``."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] in PLANES else parts[0]


def modules() -> Iterator[tuple[str, Path]]:
    """Yield (dotted name below ``batchinfer``, file) of every module."""
    linked = (PACKAGE / "kernels").rglob("*.py")  # rglob does not follow the link
    for path in sorted({*PACKAGE.rglob("*.py"), *linked}):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts[0] != "configs":
            yield ".".join(parts[:-1] if parts[1:] and parts[-1] == "__init__" else parts), path


@cache
def nodes(path: Path) -> list[ast.AST]:
    """Return all nodes of a module, except imports that only type checkers see."""
    tree = ast.parse(path.read_text())
    for node in tree.body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body.clear()
    return list(ast.walk(tree))


def imported(path: Path, *, at_import_only: bool = False) -> Iterator[str]:
    """Yield the full names of the modules that a module imports, also in its functions."""
    for node in ast.parse(path.read_text()).body if at_import_only else nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: use absolute imports"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.fixture(scope="module", autouse=True)
def syntax_trees_are_freed() -> Iterator[None]:
    """Free half a million objects, which would slow down the garbage collector in later tests."""
    yield
    nodes.cache_clear()


MODULES = dict(modules())
_BELOW = {f"batchinfer.{name}": name for name in MODULES} | {"batchinfer": "__init__"}


def known(name: str) -> str:
    """Return the module that an import of ``name`` loads, or "" if it is not part of batchinfer."""
    return next((_BELOW[n] for n in (name, name.rpartition(".")[0]) if n in _BELOW), "")


def may_import(room: Room, target: str) -> bool:
    """Return True if the room's entry in ``ROOMS`` names ``target``, and ``target`` is above it."""
    named = any(target == name or target.startswith(f"{name}.") for name in room.may_import)
    return named and LEVEL[target] < LEVEL[room.name]


def where_it_goes(room: Room, target: str) -> str:
    """Explain how to resolve an import that the table does not allow."""
    users = [
        r.name for r in ROOMS if r != room and may_import(r, target) and may_import(r, room.name)
    ]
    common = [
        r.name for r in ROOMS if may_import(room, r.name) and may_import(BY_NAME[target], r.name)
    ]
    advice = [
        f"{room.name} ({room.holds}) must not import {target} ({BY_NAME[target].holds}). "
        f"{room.words}"
    ]
    if users:
        advice.append(f"Code that needs both goes into one of: {', '.join(users)}.")
    if common:
        advice.append(f"What both need goes into one of: {', '.join(common)}.")
    return " ".join(advice)


def test_rooms_import_only_what_they_may() -> None:
    for module, path in MODULES.items():
        name = room_of(module)
        if name in PLANES:  # a plane's __init__.py only has a docstring
            assert all(not n.startswith("batchinfer.") for n in imported(path)), path
            continue
        assert name in BY_NAME, (
            f"{path} is in no room of ROOMS: move it into the folder of a room, or add a room"
        )
        plane = "text.images" if module.startswith("text.images.") else name.partition(".")[0]
        for whole in imported(path):
            top = whole.partition(".")[0]
            assert top not in HEAVY.get(plane, set()), f"{path.name} imports {whole}"
            target = room_of(known(whole)) if known(whole) else name
            assert target == name or may_import(BY_NAME[name], target), where_it_goes(
                BY_NAME[name], target
            )


def test_the_table_has_no_rooms_that_are_gone() -> None:
    there = {room_of(module) for module in MODULES}
    assert sorted(BY_NAME.keys() - there) == []
    for room in ROOMS:
        for name in room.may_import:
            known_rooms = [r.name for r in ROOMS if r.name == name or r.name.startswith(f"{name}.")]
            assert known_rooms, f"{room.name} may import {name}, which is not a room"
            assert LEVEL[known_rooms[0]] < LEVEL[room.name], f"{name} is not above {room.name}"


def test_no_folder_has_more_modules_than_one_can_survey() -> None:
    folders = Counter(path.parent for path in MODULES.values() if path.name != "__init__.py")
    del folders[PACKAGE / "kernels"]
    for folder, count in folders.items():
        assert count <= MOST_MODULES, f"{folder} has {count} modules: split it"


def test_modules_have_no_circular_imports() -> None:
    """Imports inside functions count, too."""
    graph = {
        name: {found for whole in imported(path) if (found := known(whole)) not in ("", name)}
        for name, path in MODULES.items()
    }
    list(TopologicalSorter(graph).static_order())  # CycleError names the modules of a cycle


@pytest.mark.parametrize(
    "start", ["__main__", "cli.commands", "job.run.run_job", "llm", "builders.engine"]
)
def test_packages_of_extras_are_imported_only_when_they_are_used(start: str) -> None:
    waiting, reached = [start], {start}
    while waiting:
        path = MODULES[waiting.pop()]
        for whole in imported(path, at_import_only=True):
            assert whole.partition(".")[0] not in OF_EXTRAS, f"{path} imports {whole}"
            if (found := known(whole)) and found not in reached:
                reached.add(found)
                waiting.append(found)


def test_docstrings_describe_only_existing_arguments() -> None:
    described = re.compile(r"^ {4}(\w+): ", re.MULTILINE)
    unknown = []
    for path in MODULES.values():
        for node in nodes(path):
            if not isinstance(node, ast.FunctionDef):
                continue
            _, _, after = (ast.get_docstring(node) or "").partition("\nArgs:\n")
            there = {at.arg for at in ast.walk(node.args) if isinstance(at, ast.arg)}
            names = described.findall(after.partition("\n\n")[0])
            unknown += [f"{path}: {node.name}({name})" for name in names if name not in there]
    assert unknown == []


def test_only_task_lists_compare_task_names() -> None:
    """Other code must use the attributes of a task's ``TaskSpec`` or ``Task`` instead."""
    assert get_args(TaskName) == tuple(TASK_SPECS) == tuple(TASKS)
    tests = [
        f"{path}:{node.lineno}"
        for path in MODULES.values()
        for node in nodes(path)
        if isinstance(node, ast.Compare)
        for operand in (node.left, *node.comparators)
        if isinstance(operand, ast.Constant) and operand.value in TASK_SPECS
    ]
    assert tests == []


def test_the_top_level_kernels_are_not_a_package() -> None:
    """If they were one, transformers would mistake it for the PyPI package ``kernels``."""
    assert not (PACKAGE.parent / "kernels" / "__init__.py").exists()


@pytest.mark.parametrize(
    "module", ["batchinfer", "batchinfer.cli.commands", "batchinfer.engine.engine"]
)
def test_torch_is_not_imported_by(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
