"""Runs one task of ``gpu.py`` or ``first_light.py``."""

from __future__ import annotations

import argparse
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from gpu_environment import environment, versions
from gpu_results import Results

if TYPE_CHECKING:
    import torch
    from roofline import Ceilings

_ON_ENGINE = ("smoke", "parity", "bench")
"""Stages that run the engine. On a CPU, Triton's interpreter runs the engine's kernels."""


def ceilings(results: Results, device: torch.device) -> Ceilings:
    """Return the device's limits from the results, or measure them."""
    import torch
    from gpu_operators import measure_ceilings
    from roofline import Ceilings

    name = "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)
    known = results.read().get("machine", {}).get(name, {})
    if "ceilings" not in known:
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        known = {**versions(), "ceilings": vars(measure_ceilings(device, dtype))}
        results.add("machine", name, known)
    return Ceilings(**known["ceilings"])


def run(args: argparse.Namespace) -> None:
    """Imports are local, so that a missing package fails only the tasks that need the package."""
    results, dry = Results(args.out), args.dry_run
    began = time.monotonic()  # before torch is imported, which takes seconds
    if args.stage == "environment":
        environment(results, dry_run=dry)
        return
    if args.stage == "kernels":
        from gpu_kernels import kernels

        kernels(results, began + args.seconds, brief=args.brief, dry_run=dry)
        return
    import torch
    from gpu_interpreted import interpreted

    device = torch.device("cpu" if dry else "cuda")
    with interpreted() if dry and args.stage in _ON_ENGINE else nullcontext():
        _run_on(device, args, results, began)


def _run_on(device: torch.device, args: argparse.Namespace, results: Results, began: float) -> None:
    dry = args.dry_run
    if args.stage == "smoke":
        from gpu_smoke import smoke

        smoke(results, device, dry_run=dry)
    elif args.stage == "parity":
        from gpu_bench import parity

        parity(results, device, dry_run=dry)
    elif args.stage == "attention":
        from gpu_operators import attention

        known = ceilings(results, device)
        attention(results, device, known, args.model, brief=args.brief, dry_run=dry)
    elif args.stage == "linears":
        from gpu_operators import linears

        linears(results, device, ceilings(results, device), args.model, dry_run=dry)
    elif args.stage == "bench":
        from gpu_bench import bench

        imports_s = time.monotonic() - began
        known = ceilings(results, device)
        bench(
            results, device, known, args.model, args.workloads, began + args.seconds,
            layer_major=args.layer_major, imports_s=imports_s, dry_run=dry,
        )  # fmt: skip
    else:
        from gpu_peers import peer

        peer(results, device, args.peer, args.model, dry_run=dry)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True, help="time limit of this task")
    parser.add_argument("--model", default="")
    parser.add_argument("--workloads", nargs="*", default=[])
    parser.add_argument("--peer", default="")
    parser.add_argument("--layer-major", action="store_true")
    parser.add_argument("--brief", action="store_true", help="measure only the main cases")
    parser.add_argument("--dry-run", action="store_true")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
