"""Runs one task of ``gpu.py``."""

from __future__ import annotations

import argparse
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from gpu_results import Results
from roofline import Ceilings

_PACKAGES = ("torch", "triton", "transformers", "numpy", "flashinfer-python", "flash-attn")


def ceilings(results: Results, device: torch.device) -> Ceilings:
    """Return the device's measured limits; measure them if the results do not have them yet."""
    name = _device_name(device)
    known = results.read().get("machine", {}).get(name, {})
    if "ceilings" not in known:
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        from gpu_operators import measure_ceilings

        known = {**_versions(), "ceilings": vars(measure_ceilings(device, dtype))}
        results.add("machine", name, known)
    return Ceilings(**known["ceilings"])


def _device_name(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)


def _versions() -> dict[str, Any]:
    packages = {}
    for name in _PACKAGES:
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = None
    return {"python": platform.python_version(), "packages": packages}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True, help="time limit of this task")
    parser.add_argument("--model", default="")
    parser.add_argument("--workloads", nargs="*", default=[])
    parser.add_argument("--peer", default="")
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args()
    ends = time.monotonic() + args.seconds
    results = Results(args.out)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dry = args.dry_run
    # Imports are local, so that a missing package fails only the tasks that need it.
    if args.stage == "kernels":
        from gpu_kernels import kernels

        kernels(results, ends, dry_run=dry)
    elif args.stage == "parity":
        from gpu_bench import parity

        parity(results, device, dry_run=dry)
    elif args.stage == "attention":
        from gpu_operators import attention

        attention(results, device, ceilings(results, device), args.model, dry_run=dry)
    elif args.stage == "linears":
        from gpu_operators import linears

        linears(results, device, ceilings(results, device), args.model, dry_run=dry)
    elif args.stage == "bench":
        from gpu_bench import bench

        known = ceilings(results, device)
        bench(results, device, known, args.model, args.workloads, ends, dry_run=dry)
    else:
        from gpu_peers import peer

        peer(results, device, args.peer, args.model, dry_run=dry)


if __name__ == "__main__":
    main()
