"""Simulates how well workers that claim parts share a job.

    python benchmarks/fleet.py [--workers 1,2,4,8,32] [--rows 200000] [--rows-per-part 4096]

A simulated worker claims as many parts as ``claim_size`` returns. A worker runs ``SLOTS`` rows at a
time; a row with n tokens takes n steps. A worker claims more parts if fewer than ``SLOTS`` rows
wait outside its engine. Output lengths are uniform from 10 to 2,000 tokens. With two workers or
more, one worker is four times slower. Prints the ideal time, in which all slots are busy until the
end, divided by the simulated time.
"""

from __future__ import annotations

import argparse
import heapq
from collections import deque

import numpy as np

from batchinfer.job.claims.worker_queue import claim_size, is_too_slow
from batchinfer.job.row_ranges import Part

SLOTS = 64
WINDOW_ROWS = 65_536
_QUEUED = SLOTS // 2


def share_of_ideal(
    num_workers: int, num_rows: int = 200_000, rows_per_part: int = 4096, slowness: float = 4.0
) -> float:
    """Return the ideal time divided by the simulated time. One worker is ``slowness`` times
    slower."""
    lengths = np.random.default_rng(0).integers(10, 2001, num_rows)
    paces = [1.0] * (num_workers - 1) + [slowness if num_workers > 1 else 1.0]
    ideal = float(lengths.sum()) / (SLOTS * sum(1 / pace for pace in paces))
    starts = range(0, num_rows, rows_per_part)
    parts = [
        Part(at, range(start, min(start + rows_per_part, num_rows)))
        for at, start in enumerate(starts)
    ]
    return ideal / _run(lengths.tolist(), parts, paces)


def _run(lengths: list[int], free: list[Part], paces: list[float]) -> float:
    """Return the number of steps until the last row is finished."""
    waiting = [deque[int]() for _ in paces]
    running = [0] * len(paces)
    made = [0] * len(paces)
    late = set[int]()
    """Workers that claim no parts for now, because the job would finish sooner without them."""
    missing = {part.index: part.num_rows for part in free}
    """Number of unfinished rows of each part."""
    owner: dict[int, int] = {}
    size, rows_per_part = dict(missing), free[0].num_rows
    ends: list[tuple[float, int, int]] = []
    now = 0.0

    def feed(worker: int) -> None:
        nonlocal free
        while running[worker] < SLOTS:
            if free and len(waiting[worker]) < SLOTS + _QUEUED:
                rate = made[worker] / now if now else 0.0
                others = [rows / now for at, rows in enumerate(made) if at != worker and now]
                held = sum(
                    size[at] for at, rows in missing.items() if rows and owner.get(at) != worker
                )
                num_free = sum(part.num_rows for part in free)
                left = num_free + (held - num_free) // 2
                if is_too_slow(free[0].num_rows, left, rate, others):
                    late.add(worker)
                    return
                count = claim_size(free, len(paces), WINDOW_ROWS)
                late.discard(worker)
                waiting[worker].extend(row for part in free[:count] for row in part.rows)
                owner.update((part.index, worker) for part in free[:count])
                free = free[count:]
            if not waiting[worker]:
                return
            row = waiting[worker].popleft()
            running[worker] += 1
            heapq.heappush(ends, (now + lengths[row] * paces[worker], worker, row))

    for worker in range(len(paces)):
        feed(worker)
    while ends:
        now, worker, row = heapq.heappop(ends)
        running[worker] -= 1
        made[worker] += 1
        missing[row // rows_per_part] -= 1
        for each in (worker, *late) if free else (worker,):
            feed(each)
    return now


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", default="1,2,4,8,32")
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--rows-per-part", type=int, default=4096)
    args = parser.parse_args()
    print("| workers | share of the ideal time |\n|---|---|")
    for number in map(int, args.workers.split(",")):
        share = share_of_ideal(number, args.rows, args.rows_per_part)
        print(f"| {number} | {share:.3f} |", flush=True)


if __name__ == "__main__":
    main()
