"""Compiles all kernels for GPUs, on machines without one.

This also covers bfloat16, which Triton's interpreter computes wrongly.

Only kernels that differ from `benchmarks/compiled.csv` are compiled; `benchmarks/README.md` says
how to update that table.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import triton

from batchinfer.kernels import launch
from tests.fake_cuda.launches import MOST_SHARED

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
TRITON_3_6 = ROOT / ".venv" / "triton-3.6"  # `make setup` tries to install it there
sys.path.insert(0, str(BENCHMARKS))

from compile_cases import CASES, Case  # noqa: E402
from compile_without_gpu import COMPILED, Row, _without_docstrings, read, regressions, write  # noqa: E402
from sass import main_loop, parse  # noqa: E402

# Kernels that spill 8 bytes per thread on an A100, the second with Triton 3.6 only.
KNOWN_SPILLS = {
    "sm_80 sample_edited_greedy sample",
    "sm_80 batch_invariant_d128_g2 batch_invariant",
}


def report(cache: Path, *options: str, path: Path = ROOT) -> None:
    """Run `compile_report.py` with the Triton package in `path`, or else the installed one."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": f"{path}:{ROOT}"}
    command = [sys.executable, str(BENCHMARKS / "compile_report.py"), *options]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=1200, check=False
    )
    assert done.returncode == 0, done.stderr


ONE_CASE_OF_EACH = {case.kernels: case for case in CASES}.values()


@pytest.mark.parametrize("case", ONE_CASE_OF_EACH, ids=lambda case: case.name)
def test_every_kernel_refuses_the_cpu_without_the_interpreter(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "INTERPRETED", False)
    with pytest.raises(
        RuntimeError, match="tensors are on 'cpu', but the Triton kernel needs a CUDA"
    ):
        case.launch()


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    """Check that no kernel got worse, and return the table rows of all kernels."""
    folder = tmp_path_factory.mktemp("compiled")
    report(folder, "--check", "--out", str(folder / "rows.csv"))
    return read(folder / "rows.csv")


@pytest.mark.long
def test_every_kernel_compiles_fits_and_spills_no_registers(compiled: list[Row]) -> None:
    kernels = {
        function.name
        for path in (ROOT / "kernels").glob("*.py")
        for function in ast.parse(path.read_text()).body
        if isinstance(function, ast.FunctionDef) and re.fullmatch(r"_\w+_kernel", function.name)
    }
    for capability, most in MOST_SHARED.items():
        rows = [row for row in compiled if row.target == f"sm_{capability}"]
        assert {row.kernel for row in rows if row.triton == triton.__version__} == kernels
        assert [row.name for row in rows if row.shared_bytes > most] == []
    spills = {row.name for row in compiled if row.stack and not row.case.endswith("_f32")}
    assert spills <= KNOWN_SPILLS  # in float32, kernels run only while a model is loaded


@pytest.mark.long
def test_float8_linears_use_warp_group_instructions_on_sm_90(compiled: list[Row]) -> None:
    """A warp group multiplies 64 rows by 128 columns of float8 in four instructions; a single warp
    would need many more."""
    products = [row for row in compiled if row.kernel == "_fp8_linear_kernel"]
    wide = [row for row in products if row.target == "sm_90"]
    assert {row.tensor_core for row in wide if "_a8_" in row.case} == {4}
    assert {row.tensor_core for row in wide if "_a16_" in row.case} == {8}
    assert all(row.copies_16 for row in products)


@pytest.mark.long
def test_4_bit_linears_issue_at_most_as_many_instructions_as_reading_allows(
    compiled: list[Row],
) -> None:
    """A multiprocessor issues four instructions per cycle. The time to issue all instructions is at
    most 1.3 times the time to read the weights and their scales."""
    cycles = {"sm_80": 76, "sm_90": 71}  # per KiB, by the data sheets of an A100 and an H100
    scales = {"0.6b": 5 / 64, "g128": 5 / 128, "g32": 5 / 32, "mxfp4": 2 / 32, "nvfp4": 2 / 16}
    products = [row for row in compiled if row.kernel == "_int4_linear_kernel"]
    assert all(row.copies_16 and row.stack == 0 for row in products)
    assert {row.tensor_core for row in products if row.target == "sm_90"} == {8}
    few = [row for row in products if row.unit == "KiB of weight"]
    assert {row.case.rsplit("_", 1)[1] for row in few} == {"1", "32", "64", "deterministic"}
    for row in few:
        more = next(each for name, each in scales.items() if name in row.case)
        slots = 4 * cycles[row.target] * (0.5 + more) / 0.5
        assert row.issued <= 1.3 * slots, row.name


def check_kept(version: str, path: Path, folder: Path) -> None:
    """Compile some kernels again, and compare their rows with the stored table."""
    chosen = ["--cases", "d64", "rotary_d128_norms", "--targets", "90"]
    report(folder, "--fresh", *chosen, "--out", str(folder / "rows.csv"), path=path)
    rows = read(folder / "rows.csv")
    assert {row.triton for row in rows} == {version}
    kept = {(row.triton, row.name): row for row in read(COMPILED)}
    for row in rows:
        if kept[version, row.name].fingerprint == row.fingerprint:
            assert kept[version, row.name] == row


@pytest.mark.long
def test_stored_table_equals_fresh_compilation(tmp_path: Path) -> None:
    if triton.__version__ not in {row.triton for row in read(COMPILED)}:
        pytest.skip(f"compiled.csv has no rows for Triton {triton.__version__}; --update adds them")
    check_kept(triton.__version__, ROOT, tmp_path)


@pytest.mark.long
def test_triton_3_6_compiles_every_kernel(tmp_path: Path) -> None:
    if not TRITON_3_6.exists():
        pytest.skip(f"{TRITON_3_6} is not installed")
    report(tmp_path, "--check", path=TRITON_3_6)
    check_kept("3.6.0", TRITON_3_6, tmp_path)


ROW = Row(
    "3.9.0", "sm_90", "d128", "_decode_kernel", 4, 5, 72192, 208, 0, 32, 48, 2, 2000, 646, 80.8,
    "KiB of KV", "0",
)  # fmt: skip


def test_comments_and_docstrings_do_not_change_the_fingerprint() -> None:
    source = '"""Module."""\n\ndef kernel(x):\n    """Double."""\n    return 2 * x\n'
    other = "def kernel(x):\n    return 2 * x  # doubled\n"
    assert _without_docstrings(source) == _without_docstrings(other)
    assert _without_docstrings(source) != _without_docstrings(other.replace("2", "3"))


def test_regressions_name_kernel_and_numbers() -> None:
    assert regressions([replace(ROW, issued=85.0), replace(ROW, case="new")], [ROW]) == []
    assert regressions([replace(ROW, issued=90.0, stack=8, copies_16=0)], [ROW]) == [
        "sm_90 d128 decode (Triton 3.9.0): issues 90 per KiB of KV, 80.8 before",
        "sm_90 d128 decode (Triton 3.9.0): a stack of 8 bytes, 0 before",
        "sm_90 d128 decode (Triton 3.9.0): copies_16 0, 48 before",
    ]


def test_table_round_trips_through_csv(tmp_path: Path) -> None:
    write(tmp_path / "table.csv", [ROW])
    assert read(tmp_path / "table.csv") == [ROW]
    assert read(tmp_path / "other.csv") == []


SASS = """
.L_x_1:
        /*0000*/                   HMMA.16816.F32 R4, R8, R10, R4 ;
.L_x_2:
        /*0010*/                   HMMA.16816.F32 R4, R8, R10, R4 ;
        /*0020*/                   FADD R1, R2, R3 ;
        /*0030*/              @!P1 BRA `(.L_x_2) ;
.L_x_3:
        /*0040*/                   HGMMA.64x64x16.F32 R4, R8, R10, R4 ;
        /*0050*/               @P0 BRA `(.L_x_3) ;
        /*0060*/               @P0 BRA `(.L_x_4) ;
.L_x_5:
        /*0070*/                   IADD3 R1, R2, R3 ;
        /*0080*/               @P2 BRA `(.L_x_5) ;
        /*0090*/              @!P0 BRA `(.L_x_1) ;
.L_x_4:
        /*00a0*/                   EXIT ;
.L_x_6:
        /*00b0*/                   BRA `(.L_x_6);
"""
NO_PRODUCTS = re.sub(r"HG?MMA\S*", "FMUL", SASS)


@pytest.mark.parametrize(
    ("sass", "loop"),
    [
        (SASS, ["HGMMA.64x64x16.F32", "BRA"]),
        (NO_PRODUCTS, ["FMUL", "FADD", "BRA"]),
        ("        /*0000*/                   EXIT ;\n", []),
    ],
    ids=["shortest_with_products", "longest_without_products", "no_loop"],
)
def test_main_loop_is_an_innermost_loop(sass: str, loop: list[str]) -> None:
    assert [each.name for each in main_loop(*parse(sass))] == loop
