"""Kernels compiled for GPUs that are not here: bfloat16, which cannot be interpreted, among them.

What they compile to is in `benchmarks/compiled.csv`, and compiled here where it is not of today's
source; `benchmarks/README.md` says how to bring it up to date.
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

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
TRITON_3_6 = ROOT / ".venv" / "triton-3.6"  # `make setup` puts it there if it can
sys.path.insert(0, str(BENCHMARKS))

from compile_table import COMPILED, Ceiling, Row, above_ceilings, ceilings_of, read, write  # noqa: E402
from sass import main_loop, parse  # noqa: E402

# Shared memory that one program may have, in bytes: A100 and H100 or H200.
SHARED_MEMORY = {"sm_80": 163 * 2**10, "sm_90": 227 * 2**10}
# A few bytes; none may be more than they are (`compile_ceilings.csv`).
KNOWN_SPILLS = {
    # The second launch, which has work where a row is flat alone.
    "sm_80 sample_filters sample_rest",
    "sm_90 sample_filters sample_rest",
}


def report(cache: Path, *options: str, path: Path = ROOT) -> str:
    """Run the script with the Triton that is found in `path`, else the installed one."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": f"{path}:{ROOT}"}
    command = [sys.executable, str(BENCHMARKS / "compile_report.py"), *options]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=1200, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    """What all kernels compile to, which is within their ceilings."""
    folder = tmp_path_factory.mktemp("compiled")
    report(folder, "--check", "--out", str(folder / "rows.csv"))
    return read(folder / "rows.csv", Row)


@pytest.mark.long
def test_every_kernel_compiles_within_its_ceilings_and_fits(compiled: list[Row]) -> None:
    kernels = {
        function.name
        for path in (ROOT / "kernels").glob("*.py")
        for function in ast.parse(path.read_text()).body
        if isinstance(function, ast.FunctionDef) and re.fullmatch(r"_\w+_kernel", function.name)
    }
    here = [row for row in compiled if row.triton == triton.__version__]
    for target, most in SHARED_MEMORY.items():
        rows = [row for row in here if row.target == target]
        assert {row.kernel for row in rows} == kernels
        assert [row.name for row in rows if row.shared_bytes > most] == []


@pytest.mark.long
def test_16_bit_kernels_spill_no_registers(compiled: list[Row]) -> None:
    spills = {row.name for row in compiled if row.stack}
    assert spills <= KNOWN_SPILLS


@pytest.mark.long
def test_float8_products_are_of_warp_groups_where_there_are_such(compiled: list[Row]) -> None:
    """A warp group multiplies 64 rows by 128 columns of float8 in four instructions, a warp 16 rows
    by 8 and 32 columns."""
    products = [row for row in compiled if row.kernel == "_fp8_linear_kernel"]
    wide = [row for row in products if row.target == "sm_90"]
    assert {row.tensor_core for row in wide if "_a8_" in row.case} == {4}
    assert {row.tensor_core for row in wide if "_a16_" in row.case} == {8}
    assert all(row.copies_16 for row in products)


def check_kept(version: str, path: Path, folder: Path) -> None:
    """Compile some kernels, and compare with what is kept of them."""
    chosen = ["--cases", "d64", "rotary_d128_norms", "--targets", "90"]
    report(folder, "--fresh", *chosen, "--out", str(folder / "rows.csv"), path=path)
    rows = read(folder / "rows.csv", Row)
    assert {row.triton for row in rows} == {version}
    kept = {(row.triton, row.name): row for row in read(COMPILED, Row)}
    for row in rows:
        if kept[version, row.name].fingerprint == row.fingerprint:
            assert kept[version, row.name] == row


def test_what_is_kept_is_what_the_compiler_gives(tmp_path: Path) -> None:
    if triton.__version__ not in {row.triton for row in read(COMPILED, Row)}:
        pytest.skip(f"compiled.csv has nothing of Triton {triton.__version__}: --update")
    check_kept(triton.__version__, ROOT, tmp_path)


@pytest.mark.long
def test_triton_3_6_compiles_within_the_ceilings(compiled: list[Row], tmp_path: Path) -> None:
    if not TRITON_3_6.exists():
        known = sum(row.triton == "3.6.0" for row in compiled)
        pytest.skip(f"no {TRITON_3_6}; {known} kernels are as they were compiled with it last")
    report(tmp_path, "--check", path=TRITON_3_6)
    check_kept("3.6.0", TRITON_3_6, tmp_path)


ROW = Row(
    "3.9.0", "sm_90", "d128", "_decode_kernel", 4, 5, 72192, 208, 0, 32, 48, 2, 2000, 646, 80.8,
    "KiB of KV", "0",
)  # fmt: skip


def test_a_number_above_its_ceiling_is_named_with_it() -> None:
    ceilings = ceilings_of([ROW, replace(ROW, triton="3.6.0", registers=222)])
    assert above_ceilings([replace(ROW, registers=222, issued=60.0)], ceilings) == []
    assert above_ceilings([replace(ROW, registers=223, stack=8, copies_16=0)], ceilings) == [
        "sm_90 d128 decode (Triton 3.9.0): registers 223 is above its ceiling of 222",
        "sm_90 d128 decode (Triton 3.9.0): stack 8 is above its ceiling of 0",
        "sm_90 d128 decode (Triton 3.9.0): copies_16 0, where such instructions have to be",
    ]


def test_a_kernel_without_a_ceiling_is_named() -> None:
    (line,) = above_ceilings([replace(ROW, case="d512")], ceilings_of([ROW]))
    assert line == "sm_90 d512 decode (Triton 3.9.0): has no ceiling in compile_ceilings.csv"


def test_tables_come_back_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    for record, rows in ((Row, [ROW]), (Ceiling, ceilings_of([ROW]))):
        write(path, rows)
        assert read(path, record) == rows
    assert read(tmp_path / "other.csv", Row) == []


def test_a_broken_line_of_a_table_is_named(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    write(path, [ROW])
    path.write_text(path.read_text().replace("72192", "many"))
    with pytest.raises(ValueError, match=r"table\.csv, line 2: .*many"):
        read(path, Row)


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


def test_the_main_loop_is_the_shortest_inner_one_with_products() -> None:
    instructions, labels = parse(SASS)
    assert len(instructions) == 12
    assert [each.name for each in main_loop(instructions, labels)] == [
        "HGMMA.64x64x16.F32",
        "BRA",
    ]


def test_without_products_the_main_loop_is_the_longest_inner_one() -> None:
    instructions, labels = parse(re.sub(r"HG?MMA\S*", "FMUL", SASS))
    assert [each.name for each in main_loop(instructions, labels)] == ["FMUL", "FADD", "BRA"]


def test_code_without_a_loop_has_no_main_loop() -> None:
    instructions, labels = parse("        /*0000*/                   EXIT ;\n")
    assert main_loop(instructions, labels) == []
