"""With `engine.deterministic`, the bits of a row's tokens and logprobs are reproducible on CUDA.

They depend neither on other rows nor on the schedule. The tests run in Triton's interpreter
and on GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from batchinfer.config import SamplingParams
from batchinfer.engine.engine import Engine
from batchinfer.engine.kv.block_pool import BlockPool
from batchinfer.engine.kv.layout import KVLayout
from batchinfer.engine.request import Request
from batchinfer.engine.scheduler.scheduler import Scheduler
from batchinfer.engine.scheduler.sequence_table import SequenceTable
from batchinfer.engine.step import SamplingBatch
from batchinfer.errors import DeviceError, ModelError
from batchinfer.kernels import batch_invariant_attention
from batchinfer.worker.attention.attention import ATTENTION_NAME, register
from batchinfer.worker.cuda_graphs.capture import Capture, CudaCapture, Run
from batchinfer.worker.cuda_graphs.step_graphs import StepGraphs
from batchinfer.worker.fusion.fuse import fuse
from batchinfer.worker.kv_cache import KVCache
from batchinfer.worker.linear.batch_invariance import check_batch_invariance, check_operations
from batchinfer.worker.linear.packed_linear import pack_linears
from batchinfer.worker.linear_kernels import LinearKernel, triton_kernel
from batchinfer.worker.lora.adapter_checkpoint import read_adapters
from batchinfer.worker.lora.lora_layers import add_adapters
from batchinfer.worker.model_runner import ModelRunner
from batchinfer.worker.sampling.output import SampleHandle
from batchinfer.worker.sampling.sampler import Sampler
from batchinfer.worker.self_test import Probe
from batchinfer.worker.transfer import HostCopy
from tests.kernels.interpreted_dot import sum_rows_alike
from tests.lora import make_adapter
from tests.models import tiny_model
from tests.worker.on_triton import pretend_cuda

MAX_MODEL_LEN, BLOCK_SIZE = 96, 8
SMALL = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}


@dataclass(frozen=True)
class Setup:
    rows: tuple[int, ...] = (0, 1)
    max_tokens: int = 64
    max_num_seqs: int = 8
    num_blocks: int = 60
    caching: bool = True
    preempt_every: int = 0
    graphs: bool = False


OTHERS = {
    "alone": Setup(rows=(0,)),
    "in_chunks_and_preempted": Setup((1,), 11, 2, 8, caching=False, preempt_every=5),
    "graphs": Setup(rows=(0,), max_tokens=16, max_num_seqs=1, graphs=True),
}


@dataclass(frozen=True)
class Prepared:
    """A model prepared for ``engine.deterministic``, and the function that captures its steps."""

    model: torch.nn.Module
    layout: KVLayout
    kernel: LinearKernel
    capture: Capture


class RecordingSampler(Sampler):
    """Records the bits of every sample: its logits, its token and its logprob."""

    def __init__(self) -> None:
        self.bits: dict[tuple[int, int, int], bytes] = {}

    def __call__(self, logits: torch.Tensor, batch: SamplingBatch) -> SampleHandle:
        rows = logits.cpu().view(torch.uint8).numpy()
        handle = super().__call__(logits, batch)
        result = handle.result()
        for place, at in enumerate(batch.logits_rows):
            key = (batch.stream[place], batch.sample_index[place], batch.position[place])
            self.bits[tuple(map(int, key))] = (  # type: ignore[index]
                rows[at].tobytes()
                + result.token_ids[place].tobytes()
                + result.logprobs[place].tobytes()
            )
        return handle


def bits_of(prepared: Prepared, setup: Setup) -> dict[tuple[int, int, int], bytes]:
    """Run rows, and return the bits of the samples, keyed by row, sample and output position."""
    weight = next(prepared.model.parameters())
    cache = KVCache(prepared.layout, setup.num_blocks, weight.device, weight.dtype)
    windows = prepared.layout.windows
    pool = BlockPool(
        setup.num_blocks, BLOCK_SIZE, enable_prefix_caching=setup.caching, windows=windows
    )
    table = SequenceTable(setup.max_num_seqs, MAX_MODEL_LEN, BLOCK_SIZE, windows)
    scheduler = Scheduler(pool, table, setup.max_tokens)
    graphs = None
    if setup.graphs:
        graphs = StepGraphs(
            prepared.model,
            cache,
            max_num_seqs=setup.max_num_seqs,
            max_graph_tokens=setup.max_tokens,
            max_model_len=MAX_MODEL_LEN,
            kernel=prepared.kernel,
            capture=prepared.capture,
        )
        graphs.capture_all(lambda line: None)
        assert graphs.num_captured == len(graphs.sizes)
    sampler = RecordingSampler()
    runner = ModelRunner(prepared.model, cache, sampler, graphs, prepared.kernel)
    engine = Engine(scheduler, runner)
    for row in setup.rows:
        params = SamplingParams(max_tokens=5, temperature=0.7 * (row % 2), n=1 + row % 3)
        engine.add_request(Request(row, prompt(row), params, (1, row)))
    steps = 0
    while engine.num_unfinished:
        engine.step()
        steps += 1
        running = list(scheduler.table.running())
        if running and setup.preempt_every and steps % setup.preempt_every == 0:
            scheduler.preempt(running[-1])
    return sampler.bits


def prompt(row: int) -> np.ndarray:
    """Return a prompt whose first 9 tokens are the same in all even rows, and in all odd rows."""
    shared, own = np.random.default_rng(row % 2), np.random.default_rng(100 + row)
    ids = [shared.integers(2, 190, 9), own.integers(2, 190, 1 + 6 * row)]
    return np.concatenate(ids).astype(np.int32)


def replayed(run: Run) -> Run:
    """Capture nothing: a replay calls ``run`` again."""
    return run


def wait_for_nothing(self: HostCopy, tensor: torch.Tensor) -> None:
    """Keep the tensor itself: without a device there is no pinned memory."""
    self._event, self._host = None, tensor


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_cuda(monkeypatch)
    sum_rows_alike(monkeypatch)
    monkeypatch.setattr(HostCopy, "__init__", wait_for_nothing)
    monkeypatch.setattr(batch_invariant_attention, "ALIGNED_PIECE", 16)


def prepared_model(
    family: str,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    capture: Capture = replayed,
    *,
    packed: bool = True,
    **changes: Any,
) -> Prepared:
    """Return a tiny model prepared as ``engine.deterministic`` does.

    Args:
        packed: whether linear layers use our kernel; otherwise they use torch's matrix products.
    """
    register()
    model = tiny_model(family, **SMALL | changes).to(device, dtype)
    model.set_attn_implementation(ATTENTION_NAME)  # type: ignore[operator]
    layout = KVLayout.from_config(
        model.config.to_dict(),  # type: ignore[union-attr, operator]
        block_size=BLOCK_SIZE,
        dtype=str(dtype).removeprefix("torch."),
    )
    fuse(model, layout, MAX_MODEL_LEN)
    kernel = triton_kernel(torch.device(device))
    if packed:
        pack_linears(model, kernel, dtype)
    return Prepared(model, layout, kernel, capture)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # padding holds arbitrary values
@pytest.mark.usefixtures("interpreted")
def test_bits_do_not_depend_on_how_a_row_is_run() -> None:
    """Without ``engine.deterministic``, the preempted row would have different bits."""
    prepared = prepared_model("qwen3", hidden_size=32)
    usual = bits_of(prepared, Setup())
    assert len(usual) == 5 * 3
    for name, other in OTHERS.items():
        changed = bits_of(prepared, other)
        assert changed, name
        assert {key: usual[key] for key in changed} == changed, name


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.usefixtures("interpreted")
def test_bits_of_rows_with_adapters_do_not_depend_on_the_others(tmp_path: Path) -> None:
    prepared, tokens = prepared_model("llama", num_hidden_layers=1), (3, 7, 5)
    targets = ["q_proj", "o_proj", "down_proj"]
    one_layer = tiny_model("llama", **SMALL | {"num_hidden_layers": 1})
    make_adapter(one_layer, tmp_path, seed=1, r=4, target_modules=targets)
    adapters = read_adapters({"a": str(tmp_path)}, prepared.model.config)  # type: ignore[arg-type]
    add_adapters(prepared.model, prepared.layout, adapters)

    def logits(*numbers: int) -> torch.Tensor:
        count, kernel = len(numbers), prepared.kernel
        probe = Probe(
            prepared.model, prepared.layout, tokens, count, adapters=numbers, kernel=kernel
        )
        return probe.logits()

    alone, without = logits(1), logits(0)
    assert not torch.equal(alone, without)
    assert torch.equal(logits(0, 1, 1), torch.cat([without, alone, alone]))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # fusion tries very large gates
@pytest.mark.parametrize("family", ["llama", "starcoder2", "qwen3_moe"])
@pytest.mark.usefixtures("interpreted")
def test_models_of_batch_invariant_operations_pass_the_check(family: str) -> None:
    prepared = prepared_model(family, hidden_size=32)
    check_operations(prepared.model, prepared.layout, prepared.kernel)


@pytest.mark.parametrize(
    ("family", "operation"),
    [("gpt2", "addmm"), ("axk1", r"_grouped_mm \(all experts of a layer at once\)")],
)
@pytest.mark.usefixtures("interpreted")
def test_operations_that_may_depend_on_the_rows_are_refused(family: str, operation: str) -> None:
    prepared = prepared_model(family)
    with pytest.raises(ModelError, match=f"'{family}', torch runs .*{operation}"):
        check_operations(prepared.model, prepared.layout, prepared.kernel)


@pytest.mark.usefixtures("interpreted")
def test_torchs_matrix_products_are_refused() -> None:
    prepared = prepared_model("llama", packed=False)
    with pytest.raises(ModelError, match=r"torch runs .*linear"):
        check_operations(prepared.model, prepared.layout)


@pytest.mark.usefixtures("interpreted")
def test_products_in_tf32_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = prepared_model("llama")
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(allow_tf32=True))
    with pytest.raises(DeviceError, match="TF32"):
        check_operations(prepared.model, prepared.layout, prepared.kernel)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_bits_do_not_depend_on_how_a_row_is_run_on_a_gpu(
    family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_invariant_attention, "ALIGNED_PIECE", 64)
    wide = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 8}
    prepared = prepared_model(family, "cuda", dtype, CudaCapture(), num_hidden_layers=3, **wide)
    check_batch_invariance(prepared.model, prepared.layout, prepared.kernel)
    rows, num_blocks = tuple(range(12)), 400
    usual = bits_of(prepared, Setup(rows, 256, 32, num_blocks))
    for setup in (
        Setup((7,), 256, 32, num_blocks),
        Setup(rows[::-1], 7, 32, num_blocks, caching=False),
        Setup(rows, 256, 3, num_blocks),
        Setup(rows, 64, 32, 24, preempt_every=4),
        Setup(rows, 256, 32, num_blocks, graphs=True),
    ):
        changed = bits_of(prepared, setup)
        assert changed
        assert {key: usual[key] for key in changed} == changed, setup
