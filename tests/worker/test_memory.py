from __future__ import annotations

import itertools
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.profiler import profile

from batchinfer.config import EngineConfig
from batchinfer.engine.kv.layout import KVLayout
from batchinfer.errors import DeviceError, ExitCode
from batchinfer.worker import memory
from batchinfer.worker.memory import MemoryPlan, device_memory, fit_memory
from batchinfer.worker.prompt_logprobs import SCORED_ROWS
from batchinfer.worker.sampling.sampler import workspace_bytes
from tests.models import make_text_model, tiny_config, tiny_model

CONFIG = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 64}
LAYOUT = KVLayout(2, 2, 8, 8, block_size=16, element_bytes=4)  # a block has 4 KiB
MIB = 2**20
GRAPH_BYTES = memory.graph_bytes


def plan(device: str = "cpu", **engine: Any) -> MemoryPlan:
    return fit_memory(
        EngineConfig(**engine),
        LAYOUT,
        CONFIG,
        device_memory(torch.device(device), 3 * MIB),
        weight_bytes=3 * MIB,
        max_model_len=100,
    )


@pytest.fixture(autouse=True)
def _free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_host_bytes", lambda: 64 * MIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (80 * MIB, 100 * MIB))
    monkeypatch.setattr(memory, "graph_bytes", lambda *_, **__: 2 * MIB)


def test_blocks_win_over_bytes() -> None:
    assert plan(num_kv_blocks=7, kv_cache_memory="1MiB").num_blocks == 7


def test_bytes_win_over_utilization() -> None:
    assert plan("cuda", kv_cache_memory="1MiB", max_num_batched_tokens=1).num_blocks == 256


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_fp8_makes_twice_the_blocks_of_a_16_bit_pool(device: str) -> None:
    engine = EngineConfig(max_num_seqs=10**4, max_num_batched_tokens=16)
    plain, fp8 = (
        fit_memory(
            engine,
            KVLayout(2, 2, 8, 8, block_size=16, element_bytes=2, fp8=stored),
            CONFIG,
            device_memory(torch.device(device), 3 * MIB),
            weight_bytes=3 * MIB,
            max_model_len=1000,
        )
        for stored in (False, True)
    )
    assert fp8.num_blocks in (2 * plain.num_blocks, 2 * plain.num_blocks + 1)
    assert fp8.pool_bytes == pytest.approx(plain.pool_bytes, rel=1e-3)
    # Activations and logits do not become smaller.
    assert fp8.activation_bytes == plain.activation_bytes
    assert fp8.logits_bytes == plain.logits_bytes


def test_a_cpu_pool_is_as_large_as_the_job_can_use() -> None:
    assert plan(max_num_seqs=4).num_blocks == 4 * 7


def test_a_cpu_pool_takes_at_most_a_quarter_of_free_memory() -> None:
    assert plan(max_num_seqs=4096).num_blocks == 16 * MIB // LAYOUT.bytes_per_block


def test_a_cuda_pool_takes_the_share_minus_all_other_memory() -> None:
    found = plan("cuda", gpu_memory_utilization=0.5, max_num_batched_tokens=64, max_num_seqs=8)
    room = 50 * MIB - 20 * MIB - found.activation_bytes - found.logits_bytes - found.graph_bytes
    assert found.num_blocks == room // LAYOUT.bytes_per_block
    assert found.activation_bytes > 0
    assert found.logits_bytes > 8 * 100 * 4


def test_a_cuda_step_has_room_for_the_partial_results_of_its_attention() -> None:
    few = plan("cuda", max_num_batched_tokens=64, max_num_seqs=8)
    layout = KVLayout(2, 2, 8, 8, block_size=16, element_bytes=4)
    config = CONFIG | {"num_attention_heads": 4}
    sizes = {"max_num_seqs": 8, "max_model_len": 1025}
    assert memory.pieces_bytes(layout, config, **sizes) == 4 * 8 * 4 * 3 * (8 + 2)
    assert memory.pieces_bytes(layout, config, **sizes | {"max_model_len": 512}) == 0
    most = memory.pieces_bytes(layout, config, **sizes | {"max_num_seqs": 10**7})
    assert most == 256 * MIB
    long = fit_memory(
        EngineConfig(max_num_batched_tokens=64, max_num_seqs=8),
        layout,
        config,
        device_memory(torch.device("cuda"), 3 * MIB),
        weight_bytes=3 * MIB,
        max_model_len=1025,
    )
    taken = memory.pieces_bytes(layout, config, **sizes)
    assert long.activation_bytes == few.activation_bytes + taken


def test_planned_pieces_equal_the_pieces_of_decodes() -> None:
    from batchinfer.kernels import decode_plan

    assert memory._PIECE_TOKENS == decode_plan.DECODE_PIECE
    assert memory._MAX_PIECES_BYTES == decode_plan.MAX_WORKSPACE_BYTES


@pytest.mark.parametrize(
    ("device", "engine", "key"),
    [
        ("cpu", {"num_kv_blocks": 10**6}, "engine.num_kv_blocks"),
        ("cpu", {"kv_cache_memory": "1GiB"}, "engine.kv_cache_memory"),
        ("cuda", {"gpu_memory_utilization": 0.1}, "engine.gpu_memory_utilization"),
    ],
)
def test_a_pool_that_is_too_large_names_numbers_and_key(
    device: str, engine: dict[str, Any], key: str
) -> None:
    with pytest.raises(DeviceError, match=r"MiB, but the device has only .* MiB left") as raised:
        plan(device, **engine)
    assert key in str(raised.value)
    assert raised.value.exit_code == ExitCode.DEVICE


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("mamba", r"to at least .*, the size of a sequence's recurrent state"),
        ("qwen3_5_text", r"a block of 16 tokens and a sequence's recurrent state"),
    ],
)
def test_a_pool_of_less_than_a_recurrent_state_says_what_one_takes(
    monkeypatch: pytest.MonkeyPatch, family: str, message: str
) -> None:
    text = tiny_config(family).to_dict()
    layout = KVLayout.from_config(text, block_size=16, dtype="float32")
    monkeypatch.setitem(globals(), "LAYOUT", layout)
    num_slots = layout.slots_per_state + len(layout.windows)
    least = num_slots * layout.bytes_per_block
    with pytest.raises(DeviceError, match=message):
        plan(kv_cache_memory=f"{least - 1}B")
    assert plan(kv_cache_memory=f"{least}B").num_blocks == num_slots


def test_logits_are_planned_at_their_own_width_with_a_bounded_workspace() -> None:
    plenty = EngineConfig(max_num_seqs=1024, num_kv_blocks=1)
    vocab = CONFIG | {"vocab_size": 150_000}
    half = KVLayout(2, 2, 8, 8, block_size=16, element_bytes=2)
    free = device_memory(torch.device("cpu"), 0)
    planned = fit_memory(plenty, half, vocab, free, weight_bytes=0, max_model_len=100)
    assert planned.logits_bytes == 2 * 1024 * 150_000 * 2 + workspace_bytes(1024, 150_000, "cpu")
    assert workspace_bytes(1024, 150_000, "cpu") < 64 * MIB < workspace_bytes(1024, 150_000, "cuda")
    assert workspace_bytes(1024, 150_000, "cuda") <= 1024 * MIB


def test_memory_plan_includes_logits_of_scored_prompts() -> None:
    alone, few = plan(max_num_seqs=1), plan(max_num_seqs=SCORED_ROWS)
    assert alone.logits_bytes == few.logits_bytes
    short = plan(max_num_seqs=1, max_num_batched_tokens=16)
    assert short.logits_bytes < alone.logits_bytes


def test_the_table_names_every_purpose() -> None:
    text = "\n".join(plan(num_kv_blocks=256).lines())
    for part in ("weights", "KV pool (256 blocks)", "activations", "logits", "1.0 MiB", "3.0 MiB"):
        assert part in text


@pytest.mark.parametrize(("device", "free"), [("cpu", 64), ("cuda", 80)])
def test_the_table_shows_the_memory_that_was_free_before_the_model(device: str, free: int) -> None:
    (line,) = (line for line in plan(device).lines() if line.startswith("available"))
    assert line.split()[1:] == [f"{free + 3:.1f}", "MiB"]


def test_free_host_bytes_respects_the_control_group(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    unlimited = memory.free_host_bytes()
    assert unlimited > 0
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("2000\n")
    (tmp_path / "memory.stat").write_text(
        "anon 900\nfile 1100\ninactive_file 700\nactive_file 300\n"
    )
    assert memory.free_host_bytes() == 5000 - 2000 + 700 + 300, "cached files can be dropped"
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.free_host_bytes() > 5000


def test_free_host_bytes_respects_the_limit_of_the_address_space(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    mapped = psutil.Process().memory_info().vms
    for limit, least, most in ((mapped + 50 * MIB, 0, 50 * MIB), (mapped // 2, 0, 0)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        assert least <= memory.free_host_bytes() <= most
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda _: unlimited)
    assert memory.free_host_bytes() > 50 * MIB


def test_a_small_pool_runs_with_little_address_space(tmp_path: Path) -> None:
    """The default swap space is mapped at once, even if it is not used."""
    code = """
import os, resource, sys
import psutil, torch, transformers
from batchinfer import LLM, SamplingParams
limit = psutil.Process().memory_info().vms + 2**31
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
llm = LLM(sys.argv[1], num_kv_blocks=60)
print(llm.generate(["a"], SamplingParams(max_tokens=1), use_tqdm=False)[0].error, flush=True)
os._exit(0)  # to take apart what is loaded takes seconds
"""
    make_text_model(tmp_path / "model")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, str(tmp_path / "model")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "None\n", done.stderr


def test_swap_space_takes_at_most_a_quarter_of_the_memory_after_the_pool() -> None:
    found = plan(num_kv_blocks=4 * MIB // LAYOUT.bytes_per_block)
    assert found.host_bytes == 15 * MIB
    assert found.num_host_blocks == 15 * MIB // LAYOUT.bytes_per_block
    assert "swap space (at most 3840 blocks)" in found.lines()[-1]


def test_cuda_pool_takes_no_host_memory() -> None:
    assert plan("cuda").host_bytes == 16 * MIB


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_swap_space_is_reserved_or_refused(device: str) -> None:
    small = {"num_kv_blocks": 4, "max_num_batched_tokens": 1, "max_num_seqs": 1}
    assert plan(device, swap_space="40MiB", **small).host_bytes == 40 * MIB
    with pytest.raises(
        DeviceError, match=r"swap_space is 65MiB, but the host has only \d+MiB free"
    ):
        plan(device, swap_space="65MiB", **small)


@pytest.mark.parametrize(
    "engine", [{"swap_space": 0}, {"preemption": "recompute"}, {"enable_prefix_caching": False}]
)
def test_without_swapping_no_host_memory_is_taken(engine: dict[str, Any]) -> None:
    assert plan(num_kv_blocks=4, **engine).num_host_blocks == 0


def test_a_swap_space_that_holds_no_recurrent_state_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = tiny_config("qwen3_5_text").to_dict()
    layout = KVLayout.from_config(text, block_size=16, dtype="float32")
    monkeypatch.setitem(globals(), "LAYOUT", layout)
    size = layout.slots_per_state * layout.bytes_per_block
    with pytest.raises(DeviceError, match="smaller than a sequence's recurrent state; set it to"):
        plan(preemption="swap", swap_space=f"{size - 1}B", num_kv_blocks=40)
    found = plan(preemption="swap", swap_space=f"{size}B", num_kv_blocks=40)
    assert found.num_host_blocks == layout.slots_per_state


def test_a_swap_space_that_holds_no_block_is_refused() -> None:
    with pytest.raises(DeviceError, match="set it to at least 4KiB"):
        plan(preemption="swap", swap_space="1KiB", num_kv_blocks=4)


LARGE = {"hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128_256}
HALF = KVLayout(32, 8, 128, 128, 16, 2)


def test_graphs_need_room_for_the_largest_step_and_its_rows_of_logits() -> None:
    def needed(max_num_seqs: int, max_graph_tokens: int) -> int:
        return GRAPH_BYTES(
            HALF,
            LARGE,
            max_num_seqs=max_num_seqs,
            max_graph_tokens=max_graph_tokens,
            max_model_len=4096,
        )

    logits_and_tables = 2 * 2 * LARGE["vocab_size"] + 2 * 4 * 256
    assert needed(1024, 2048) - needed(64, 2048) > 960 * logits_and_tables
    activations = 2 * memory.activation_elements(LARGE)
    assert needed(64, 8192) - needed(64, 2048) > 6144 * activations
    assert needed(1024, 8192) < 4 * 2**30


@pytest.mark.parametrize(
    ("gib", "engine", "tokens"),
    [
        (140, {}, 8192),
        (24, {}, 2048),
        (24, {"max_num_batched_tokens": 3000}, 1500),
        (1, {}, 1024),  # a decode step of all sequences
        (140, {"max_num_batched_tokens": 100_000}, 8192),
        (140, {"max_num_batched_tokens": 100}, 100),
    ],
)
def test_the_largest_step_with_a_graph_takes_a_small_share(
    gib: int, engine: dict[str, Any], tokens: int
) -> None:
    config = EngineConfig(**engine)
    assert memory.max_graph_tokens(config, HALF, LARGE, gib * 2**30) == tokens


def test_the_widest_layer_counts() -> None:
    widths = {"hidden_size": 8, "intermediate_size": [16, 64, 32]}
    alike = {"hidden_size": 8, "intermediate_size": 64}
    assert memory.activation_elements(widths) == memory.activation_elements(alike)


@pytest.mark.parametrize(("hidden", "width"), [(64, 16), (32, 128)])
def test_experts_need_no_more_memory_than_planned(hidden: int, width: int) -> None:
    """Measures the peak of transformers' experts, as a CUDA device computes them."""
    sizes = {"hidden_size": hidden, "moe_intermediate_size": width, "intermediate_size": 16}
    model = tiny_model("qwen3_moe", num_hidden_layers=1, num_experts_per_tok=4, **sizes)
    model.set_experts_implementation("grouped_mm")  # type: ignore[operator]
    experts: Any = model.get_submodule("model.layers.0.mlp").bfloat16()
    num_tokens = 512
    rows = torch.ones(1, num_tokens, hidden, dtype=torch.bfloat16)
    with torch.inference_mode():
        experts(rows)
        with profile(profile_memory=True) as profiled:
            experts(rows)
    recorded: Any = profiled.profiler
    events = sorted(recorded.kineto_results.events(), key=lambda event: event.start_ns())
    changes = [event.nbytes() for event in events if event.name() == "[memory]"]
    peak = max(itertools.accumulate(changes)) / num_tokens / 2
    planned = memory.activation_elements(model.config.to_dict())  # type: ignore[union-attr, operator]
    assert 0.5 * planned < peak < planned


def test_widths_of_experts_may_be_a_list() -> None:
    """Ernie 4.5 VL has one width for text and one for images."""
    config = {"hidden_size": 64, "intermediate_size": 96, "moe_k": 2}
    one = memory.activation_elements({**config, "moe_intermediate_size": 512})
    assert memory.activation_elements({**config, "moe_intermediate_size": [512, 128]}) == one
