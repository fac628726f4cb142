"""The planes import each other one way only, and the command line starts without torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "batchinfer"
COMMON = {"console", "config", "cpus", "errors", "protocols"}
MAY_IMPORT = {
    "process": {"errors"},
    "console": {"engine"},
    "cpus": set(),
    "openmp": set(),
    "config": set(),
    "errors": set(),
    "protocols": set(),
    "engine": COMMON,
    "text": COMMON,
    "kernels": set(),
    "worker": COMMON | {"engine", "kernels"},
    "build": COMMON | {"engine", "text", "worker"},
    "build_dry": COMMON | {"engine", "text", "worker", "build"},
    "job": COMMON | {"process", "engine", "text", "build", "build_dry"},
    "report": COMMON | {"engine", "job"},
    "llm": COMMON | {"process", "engine", "text", "build", "job", "report"},
    "bench_options": COMMON,
    "bench": COMMON | {"bench_options", "worker", "llm"},
    "program": COMMON | {"process"},
    "cli": COMMON | {"program", "job", "report", "bench", "bench_options"},
    "__init__": {"config", "llm", "openmp"},
    "__main__": {"cli", "openmp"},
}
HEAVY = {
    "engine": {"torch", "transformers", "tokenizers", "pyarrow", "polars", "pathlib"},
    "text": {"torch", "transformers", "pyarrow", "polars", "pathlib"},
    "kernels": {"transformers", "numpy", "pyarrow", "polars"},
    "worker": {"pyarrow", "polars"},
    "job": {"torch", "transformers"},
    "report": {"torch", "transformers"},
}


def modules() -> Iterator[tuple[str, Path]]:
    """(plane, file) of every module."""
    for path in sorted(PACKAGE.rglob("*.py")):
        plane = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if plane != "configs":
            yield plane, path


def imported(path: Path) -> Iterator[str]:
    """Full names of what a module imports, but for the sake of types alone."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            node.body.clear()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


MODULES = list(modules())


@pytest.mark.parametrize(
    ("plane", "path"), MODULES, ids=[str(path.relative_to(PACKAGE)) for _, path in MODULES]
)
def test_arrows_point_one_way(plane: str, path: Path) -> None:
    for name in imported(path):
        top, _, rest = name.partition(".")
        assert top not in HEAVY.get(plane, set()), f"{path.name} imports {name}"
        if top == "batchinfer":
            target = rest.partition(".")[0]
            allowed = MAY_IMPORT[plane] | {plane}
            known = target in MAY_IMPORT
            assert not known or target in allowed, f"{plane} must not import {target}"


def test_modules_do_not_import_each_other_in_circles() -> None:
    """Not even inside functions: what is imported is the lower of the two."""
    paths = {_module(path): path for _, path in MODULES}
    graph = {
        name: {
            taken for whole in imported(path) if (taken := _known(whole, paths)) not in ("", name)
        }
        for name, path in paths.items()
    }
    list(TopologicalSorter(graph).static_order())  # CycleError names the circle


def _module(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _known(name: str, paths: Mapping[str, Path]) -> str:
    """The module that an import of ``name``, or of a name in it, reads; "" if it is not ours."""
    return next((n for n in (name, name.rpartition(".")[0]) if n in paths), "")


def test_the_top_level_kernels_are_not_a_package() -> None:
    """A PyPI package called ``kernels`` exists, and transformers imports it if it can."""
    assert not (PACKAGE.parent / "kernels" / "__init__.py").exists()


@pytest.mark.parametrize("module", ["batchinfer", "batchinfer.cli", "batchinfer.engine.engine"])
def test_torch_is_not_imported_by(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
