"""Tests and measures everything that needs a GPU, in about eight minutes.

python benchmarks/gpu.py              # all stages; writes benchmarks/results/GPU-DATE.json
python benchmarks/gpu.py --stages kernels parity
python benchmarks/gpu.py --dry-run    # the same code on a CPU, tiny; measures nothing
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
_PACKAGES = ("torch", "triton", "transformers", "flashinfer-python", "flash-attn")


def kernels(dry_run: bool) -> dict[str, Any]:
    """The kernels' tests on the device; a dry run only collects them."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-o", "filterwarnings=default"]
    command += ["-p", "no:cacheprovider", str(ROOT / "tests" / "kernels")]
    if dry_run:
        command.append("--collect-only")
    elif _installed("pytest-xdist"):
        command += ["-n", "8"]  # most of the time is compiling
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    lines = done.stdout.strip().splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    print("\n".join([*failed[:20], *lines[-1:]]), flush=True)
    return {"ok": done.returncode == 0, "summary": lines[-1:], "failed": failed}


def parity(dry_run: bool) -> Any:
    """Tokens and logits against transformers."""
    import gpu_parity

    return gpu_parity.parity(_device(), dry_run=dry_run)


def attention(dry_run: bool) -> Any:
    """The attention kernels against the ceilings of the device."""
    import gpu_attention

    return gpu_attention.attention(_device(), _ceilings(dry_run), dry_run=dry_run)


def bench(dry_run: bool) -> Any:
    """This project's engine on all workloads and shapes."""
    import gpu_bench

    return gpu_bench.bench(_device(), _ceilings(dry_run), dry_run=dry_run)


def peers(dry_run: bool) -> Any:
    """Others, on W1."""
    import gpu_peers

    models = ("tiny",) if dry_run else ("Qwen3-0.6B", "Llama-3.1-8B")
    return gpu_peers.peers(models, dry_run=dry_run)


STAGES: dict[str, Callable[[bool], Any]] = {
    "kernels": kernels,
    "parity": parity,
    "attention": attention,
    "bench": bench,
    "peers": peers,
}
_measured: dict[str, Any] = {}


def _ceilings(dry_run: bool) -> Any:
    """What the device can do, measured once."""
    if "ceilings" not in _measured:
        import torch
        from gpu_timing import measure_ceilings

        dtype = torch.float32 if dry_run else torch.bfloat16
        found = _measured["ceilings"] = measure_ceilings(_device(), dtype)
        print(
            f"copy {found.bytes_per_s / 1e9:,.0f} GB/s, "
            f"matrix product {found.flop_per_s / 1e12:,.1f} TFLOP/s",
            flush=True,
        )
    return _measured["ceilings"]


def _device() -> Any:
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def run(stages: list[str], dry_run: bool) -> dict[str, Any]:
    """Run stages in order; one that fails says so and the next one runs."""
    results: dict[str, Any] = {}
    for name in stages:
        print(f"\n== {name}", flush=True)
        began = time.perf_counter()
        try:
            results[name] = STAGES[name](dry_run)
        except Exception as error:
            results[name] = {"ok": False, "error": f"{type(error).__name__}: {error}"}
            print(f"failed: {results[name]['error'][:2000]}", flush=True)
            if dry_run:
                raise
        results.setdefault("seconds", {})[name] = time.perf_counter() - began
    return results


def write(results: dict[str, Any]) -> Path:
    """Into benchmarks/results, by the device's name and the date."""
    import torch

    gpu = torch.cuda.get_device_name()
    machine = {
        "gpu": gpu,
        "date": date.today().isoformat(),
        "python": platform.python_version(),
        "packages": {name: _installed(name) for name in _PACKAGES},
    }
    if "ceilings" in _measured:
        machine["ceilings"] = vars(_measured["ceilings"])
    name = gpu.lower().replace("nvidia", "").strip().replace(" ", "-")
    path = HERE / "results" / f"{name}-{machine['date']}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"machine": machine, **results}, indent=1, default=str))
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", nargs="*", default=[], choices=[*STAGES, []])
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    if args.dry_run:
        # Before anything imports triton or asks for a device.
        os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    elif _device().type != "cuda":
        sys.exit("no CUDA device: give --dry-run to run the same code on a CPU, tiny")
    os.environ["HF_HUB_OFFLINE"] = "1"
    results = run(args.stages or list(STAGES), args.dry_run)
    if not args.dry_run:
        print(f"\nwritten to {write(results)}")
    if wrong := [name for name in STAGES if not _right(results.get(name))]:
        sys.exit(f"not right: {', '.join(wrong)}")


def _right(found: Any) -> bool:
    """Whether nothing a stage found is marked as wrong."""
    entries = found if isinstance(found, list) else [found]
    return all(entry.get("ok", True) for entry in entries if isinstance(entry, dict))


if __name__ == "__main__":
    main()
