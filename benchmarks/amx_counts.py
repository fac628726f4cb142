"""Counts the instructions and cache lines of the C kernels for AMX, on a processor without AMX.

python benchmarks/amx_counts.py
python benchmarks/amx_counts.py --kernels OTHER_CHECKOUT/kernels/cpu

Needs AVX-512 with bfloat16, gcc and objdump. ``amx_counts.c`` runs the kernels, compiled for AMX,
instruction by instruction. The tables also give the cycles for which each kind of unit of one core
of Sapphire Rapids or later is busy, under the assumptions in ``Counts.busy``. The largest of
these numbers is a lower bound of the time. It is no measurement.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from batchinfer.kernels.cpu import compiled_library

HERE = Path(__file__).resolve().parent
SOURCES = "gemm", "gemm_groups", "gemm_int8", "gemm_rows", "paged_attention"
AMX = "-mamx-tile", "-mamx-bf16", "-mamx-int8"
NOT_FOR_PROGRAMS = "-fPIC", "-shared"
GROUP = 64
PANEL = 32  # outputs that the kernels compute at a time
LAYER = (768, 1280), (768, 768), (768, 4096), (2048, 768)
"""Inputs and outputs of the linear layers of a decoder layer of the model `small` of models.py."""
GEMMS = (
    ("bf16", 1, "bfloat16, AMX"),
    ("int8", 1, "int8, AMX"),
    ("int4", 0, "int4, vectors"),
    ("int4", 1, "int4, AMX"),
)
CONTEXTS = 16, 100, 200, 1000
CYCLES_PER_LINE = 6.7
"""Cycles per cache line from memory: 25 GB/s, measured on two threads, at an assumed 2.6 GHz."""


@dataclass(frozen=True)
class Counts:
    """Counts of one run: totals of ``amx_counts.c``, and executed instructions by their text."""

    totals: dict[str, int]
    result: str
    instructions: Counter[str]

    @cached_property
    def kinds(self) -> Counter[str]:
        """Executed operations of each kind."""
        kinds: Counter[str] = Counter()
        for text, times in self.instructions.items():
            for kind in _kinds_of(text):
                kinds[kind] += times
        return kinds

    def extended(self, longer: Counts, times: int) -> Counts:
        """Add ``times`` times the difference to ``longer``."""
        totals = {name: n + times * (longer.totals[name] - n) for name, n in self.totals.items()}
        counts = Counter(
            {
                text: self.instructions[text] + times * (n - self.instructions[text])
                for text, n in longer.instructions.items()
            }
        )
        return Counts(totals, longer.result, counts)

    @property
    def busy(self) -> dict[str, float]:
        """Cycles for which each kind of unit is busy, if it starts this many per cycle: two vector
        operations, two wide and three other loads, one wide and two other stores, six operations of
        any kind. A product of tiles takes 16 cycles. A row of a tile counts as an operation."""
        kinds, rows = self.kinds, self.totals
        tile_rows = rows["loaded"] + rows["stored"]
        return {
            "tiles": 16 * kinds["tile product"],
            "vectors": kinds["vector"] / 2,
            "loads": (kinds["wide load"] + rows["loaded"]) / 2 + kinds["load"] / 3,
            "stores": kinds["wide store"] + rows["stored"] + kinds["store"] / 2,
            "decoding": (self.instructions.total() + tile_rows) / 6,
        }

    @property
    def bound(self) -> float:
        return max(self.busy.values())


def _kinds_of(text: str) -> list[str]:
    """Return the kinds of operations that an instruction in AT&T syntax consists of."""
    name, _, operands = text.partition(" ")
    if name.startswith("td"):
        return ["tile product"]
    if name.startswith(("tile", "ldtile")) or name.startswith(("lea", "nop")):
        return []
    if name.startswith("prefetch"):
        return ["prefetch", "load"]
    wide = "wide " if "%zmm" in operands else ""
    last = re.split(r",(?![^(]*\))", operands)[-1]
    kinds = []
    if "(" in last:
        kinds.append(f"{wide}store" if "mov" in name or name == "push" else f"{wide}load")
    elif "(" in operands:
        kinds.append(f"{wide}load")
    moves = name.startswith(("vmov", "vbroadcast", "vpbroadcast")) and "(" in operands
    copies = name.startswith("vmov") and "%r" not in operands
    if name.startswith("v") and not moves and not copies:
        kinds += ["vector"] * (2 if name == "vpmulld" else 1)
    return kinds


class Program:
    """The compiled ``amx_counts.c``.

    Args:
        kernels: the folder with the kernels' sources.
        folder: where to write the program.
    """

    def __init__(self, kernels: Path, folder: Path) -> None:
        self._path = folder / "amx_counts"
        shared = [flag for flag in compiled_library.FLAGS if flag not in NOT_FOR_PROGRAMS]
        flags = [*shared, *compiled_library.for_this_processor(), *AMX, f"-I{kernels}", "-w"]
        objects = []
        emulated = kernels / "amx_tiles.c", HERE / "amx_counts.c"
        for source in (*emulated, *(kernels / f"{name}.c" for name in SOURCES)):
            objects.append(str(folder / f"{source.stem}.o"))
            more = ["-DEMULATE_TILES"] if source in emulated else []
            command = ["cc", *flags, *more, "-c", str(source), "-o", objects[-1]]
            subprocess.run(command, check=True)
        subprocess.run(["cc", "-no-pie", *objects, "-o", str(self._path), "-lm"], check=True)
        listing = subprocess.run(
            ["objdump", "-d", "--no-show-raw-insn", str(self._path)],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        self._code = {
            int(address, 16): " ".join(text.split("#")[0].split())
            for address, text in re.findall(r"^ *([0-9a-f]+):\t(.*)$", listing, re.M)
        }

    def count(self, *arguments: object) -> Counts:
        output = subprocess.run(
            [str(self._path), *map(str, arguments)], check=True, capture_output=True, text=True
        ).stdout
        pairs = [line.split() for line in output.splitlines()]
        totals = {name: int(value) for name, value in pairs[1:5]}
        instructions: Counter[str] = Counter()
        for address, times in pairs[5:]:
            instructions[self._code[int(address, 16)]] += int(times)
        return Counts(totals, pairs[0][1], instructions)


def layer(program: Program, kind: str, kernel: int, rows: int) -> tuple[dict[str, float], str]:
    """Return the cycles of all linear layers of LAYER together, and hashes of their results.

    Runs only the first two panels of each layer: the second shows what a panel takes, and the first
    what is computed once for all panels.
    """
    cycles: defaultdict[str, float] = defaultdict(float)
    hashes = ""
    for inputs in sorted({inputs for inputs, _ in LAYER}):
        one, two = (
            program.count("gemm", kind, kernel, rows, inputs, panels * PANEL, GROUP)
            for panels in (1, 2)
        )
        hashes += two.result
        for outputs in (outputs for width, outputs in LAYER if width == inputs):
            counts = one.extended(two, outputs // PANEL - 1)
            for name, value in counts.busy.items():
                cycles[name] += value
            cycles["instructions"] += counts.instructions.total()
            cycles["lines"] += counts.totals["lines"]
            cycles["cache"] += counts.bound
            cycles["memory"] += max(counts.bound, CYCLES_PER_LINE * counts.totals["lines"])
    return cycles, hashes


def gemms(program: Program, rows: list[int]) -> None:
    """Print a table of the linear layers of a decoder layer, per 64 inputs and 32 outputs."""
    print(f"Linear layers {LAYER}; int4 in groups of {GROUP}; per 64 inputs and 32 outputs:\n")
    names = "lines", "instructions", "tiles", "vectors", "loads", "stores", "decoding"
    print("| " + " | ".join(("rows", "weights", *names, "speed: cache", "memory")) + " |")
    print("|---" * (len(names) + 4) + "|")
    parts = sum(inputs * outputs for inputs, outputs in LAYER) / (64 * PANEL)
    for count in rows:
        results = {title: layer(program, kind, kernel, count) for kind, kernel, title in GEMMS}
        assert results["int4, AMX"][1] == results["int4, vectors"][1], "other bits"
        first = results["bfloat16, AMX"][0]
        for title, (each, _) in results.items():
            cells = [f"{each[name] / parts:,.0f}" for name in names]
            speeds = [f"{first[name] / each[name]:.2f}" for name in ("cache", "memory")]
            print("| " + " | ".join((str(count), title, *cells, *speeds)) + " |", flush=True)


def attention(program: Program) -> None:
    """Print a table of decoding with the shapes of the model `small` of models.py."""
    print("\n12 heads, 4 KV heads, width 64, blocks of 16; per cache line of keys and values:\n")
    print("| context | instructions | tile products | prefetches | busy cycles |")
    print("|---|---|---|---|---|")
    for context in CONTEXTS:
        each = program.count("attention", 1, 16, context, 12, 4, 64, 16)
        lines = each.totals["lines"]
        busy = ", ".join(f"{name} {value / lines:.2f}" for name, value in each.busy.items())
        print(
            f"| {context} | {each.instructions.total() / lines:.1f} "
            f"| {each.kinds['tile product'] / lines:.3f} | {each.kinds['prefetch'] / lines:.2f} "
            f"| {busy} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    default = Path(compiled_library.__file__).parent
    parser.add_argument("--kernels", type=Path, default=default, help="folder of the C sources")
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 16, 32, 64])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        program = Program(args.kernels.resolve(), Path(folder))
        gemms(program, args.rows)
        attention(program)


if __name__ == "__main__":
    main()
