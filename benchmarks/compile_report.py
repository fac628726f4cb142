"""Compiles all kernels at real shapes, without a GPU, and prints a table of the compiled code.

python benchmarks/compile_report.py                      # print a table for sm_80 and sm_90
python benchmarks/compile_report.py --cases d128 d256    # only these cases
python benchmarks/compile_report.py --update             # store the table in compiled.csv
python benchmarks/compile_report.py --check              # fail if a kernel got worse
PYTHONPATH=FOLDER python benchmarks/compile_report.py    # use the Triton package in FOLDER

Kernels whose code and launch arguments are the same as in compiled.csv are not compiled again.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
os.environ.pop("TRITON_INTERPRET", None)  # Triton reads it at import
os.environ["OMP_NUM_THREADS"] = "1"  # torch reads it at import; tensors are small here

from compile_cases import CASES  # noqa: E402
from compile_without_gpu import COMPILED, Compiler, Row, read, regressions, write  # noqa: E402

TARGETS = (80, 90)
_HEAD = (
    f"{'kernel':<45} warps stages  regs  stack   shared  mma copy16 wide16  instr   loop  issued"
)


def report(targets: list[int], names: list[str], *, fresh: bool = False) -> list[Row]:
    """Compile cases, and return their rows together with known rows of other Triton versions. An
    empty list of names means all cases; ``fresh`` compiles kernels even if compiled.csv has
    them."""
    compiler = Compiler([] if fresh else read(COMPILED))
    rows = []
    for target in targets:
        for case in CASES:
            if not names or case.name in names:
                rows += compiler.rows(case, target)
    return rows


def _line(row: Row, before: Row | None) -> str:
    change = (
        "" if before is None or not before.issued else f"  {row.issued / before.issued - 1:+.0%}"
    )
    return (
        f"{row.name:<45} {row.num_warps:>5} {row.num_stages:>6} {row.registers:>5} {row.stack:>6} "
        f"{row.shared_bytes:>8} {row.tensor_core:>4} {row.copies_16:>6} {row.accesses_16:>6} "
        f"{row.instructions:>6} {row.loop:>6} "
        f"{row.issued:>7g} / {row.unit}{change}"
    )


def _print(rows: list[Row], against: list[Row]) -> None:
    before = {(row.triton, row.name): row for row in against}
    for version in sorted({row.triton for row in rows}):
        print(f"Triton {version}\n{_HEAD}")
        chosen = [row for row in rows if row.triton == version]
        for row in chosen:
            print(_line(row, before.get((row.triton, row.name))))
        for target in sorted({row.target for row in chosen}):
            print(_spills([row for row in chosen if row.target == target]))


def _spills(rows: list[Row]) -> str:
    """Return a line that names a target's kernels that spill registers to memory."""
    spilling = [row for row in rows if row.stack]
    names = "".join(f"\n  {row.name}: {row.stack} bytes per thread" for row in spilling)
    return f"{rows[0].target}: {len(spilling)} of {len(rows)} kernels spill registers{names}"


def _keep(rows: list[Row], *, all_cases: bool) -> None:
    """Replace the rows of compiled.csv that have the same names as the new rows."""
    kept = {(row.triton, row.name): row for row in [*read(COMPILED), *rows]}
    names = {row.name for row in rows}
    write(COMPILED, [row for row in kept.values() if not all_cases or row.name in names])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="*", choices=[case.name for case in CASES], default=[])
    parser.add_argument("--targets", nargs="*", type=int, choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--fresh", action="store_true", help="compile all kernels again")
    parser.add_argument("--update", action="store_true", help="store the table in compiled.csv")
    parser.add_argument("--check", action="store_true", help="fail if a kernel got worse")
    parser.add_argument("--against", type=Path, help="CSV of an earlier report to compare with")
    parser.add_argument("--out", type=Path, help="CSV file to write")
    args = parser.parse_args()
    rows = report(args.targets, args.cases, fresh=args.fresh)
    _print(rows, read(args.against) if args.against else [])
    worse = regressions(rows, read(COMPILED)) if args.check else []
    if args.update:
        _keep(rows, all_cases=not args.cases and len(args.targets) == len(TARGETS))
    if args.out is not None:
        write(args.out, rows)
    if worse:
        sys.exit("\n".join(worse))


if __name__ == "__main__":
    main()
