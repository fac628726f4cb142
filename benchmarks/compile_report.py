"""Compiles every kernel at its real shapes, on a machine without a GPU, and reports on the code.

python benchmarks/compile_report.py                      # a table, for sm_80 and sm_90
python benchmarks/compile_report.py --cases d128 d256    # some of it
python benchmarks/compile_report.py --update             # the table, and keep it in compiled.csv
python benchmarks/compile_report.py --check              # fail where one is worse than there
PYTHONPATH=FOLDER python benchmarks/compile_report.py    # with the Triton that lies in FOLDER

What compiled.csv has of a kernel is not compiled again while its source and launch are the same.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
os.environ.pop("TRITON_INTERPRET", None)  # read when Triton is imported
os.environ["OMP_NUM_THREADS"] = "1"  # and this with torch; its tensors here are small

from compile_cases import CASES  # noqa: E402
from compile_kernels import COMPILED, Compiler, Row, read, regressions, write  # noqa: E402

TARGETS = (80, 90)
_HEAD = (
    f"{'kernel':<45} warps stages  regs  stack   shared  mma copy16 wide16  instr   loop  issued"
)


def report(targets: list[int], names: list[str], *, fresh: bool = False) -> list[Row]:
    """Rows of cases (all where `names` is empty) for compute capabilities, compiled where they are
    not known or `fresh`; of other versions of Triton those that are known."""
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
        for row in rows:
            if row.triton == version:
                print(_line(row, before.get((row.triton, row.name))))


def _keep(rows: list[Row], *, all_cases: bool) -> None:
    """Put rows into compiled.csv, for those of the same name there."""
    kept = {(row.triton, row.name): row for row in [*read(COMPILED), *rows]}
    there = {row.name for row in rows}
    write(COMPILED, [row for row in kept.values() if not all_cases or row.name in there])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="*", choices=[case.name for case in CASES], default=[])
    parser.add_argument("--targets", nargs="*", type=int, choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--fresh", action="store_true", help="compile what is known as well")
    parser.add_argument("--update", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--against", type=Path, help="an earlier report, to say what has changed")
    parser.add_argument("--out", type=Path, help="also write the rows there, as CSV")
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
