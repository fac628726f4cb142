"""On a CPU, a row's logits have the same bits with any other rows and any schedule."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from batchinfer.config import ModelConfig, SamplingParams
from batchinfer.engine.engine import Engine
from batchinfer.engine.kv.block_pool import BlockPool
from batchinfer.engine.request import Request
from batchinfer.engine.scheduler.scheduler import Scheduler
from batchinfer.engine.scheduler.sequence_table import Rows, SequenceTable
from batchinfer.engine.step import SamplingBatch, SharedPrefixes
from batchinfer.engine.step_io.shared_prefix import PrefixTree
from batchinfer.kernels.cpu import paged_attention as cpu_attention
from batchinfer.worker.kv_cache import KVCache
from batchinfer.worker.linear import kernel_choice
from batchinfer.worker.linear.kernel_choice import KernelRequirements
from batchinfer.worker.loader import LoadedModel, load_model
from batchinfer.worker.model_runner import ModelRunner
from batchinfer.worker.sampling.output import SampleHandle
from batchinfer.worker.sampling.sampler import Sampler
from tests.models import make_checkpoint
from tests.worker.batch_dependent import BATCH_DEPENDENT

CPU = torch.device("cpu")
OWN = KernelRequirements("own", deterministic=True)
# All widths are multiples of 32, like those of real models: in modules that are not fused, torch
# computes exp differently for elements after the last whole pair of vectors.
WIDE = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 8}
ODD = {"hidden_size": 104, "intermediate_size": 300, "num_attention_heads": 4}

pytestmark = pytest.mark.skipif(
    not cpu_attention.supports(torch.float32), reason="needs a C compiler"
)


@dataclass(frozen=True)
class Setup:
    max_tokens: int = 512
    num_blocks: int = 200
    caching: bool = True
    rows: tuple[int, ...] = tuple(range(12))
    preempt_every: int = 0
    prefix: int = 40
    n: int = 1


OTHERS = {
    "chunks_of_7": Setup(max_tokens=7),
    "no_prefix_caching": Setup(caching=False),
    "other_order": Setup(rows=tuple(reversed(range(12)))),
    "alone": Setup(rows=(4,)),
    "small_pool": Setup(num_blocks=24, preempt_every=4),
}


class RecordingSampler(Sampler):
    """Keeps the logits of every sample."""

    def __init__(self) -> None:
        self.logits: dict[tuple[int, int, int], bytes] = {}

    def __call__(self, logits: torch.Tensor, batch: SamplingBatch) -> SampleHandle:
        rows = logits.view(torch.uint8).numpy()
        for at, stream, sample, position in zip(
            batch.logits_rows, batch.stream, batch.sample_index, batch.position, strict=True
        ):
            self.logits[int(stream), int(sample), int(position)] = rows[at].tobytes()
        return super().__call__(logits, batch)


def prompt(row: int, prefix: int) -> np.ndarray:
    shared, own = np.random.default_rng(row % 3), np.random.default_rng(100 + row)
    ids = [shared.integers(2, 190, prefix), own.integers(2, 190, 1 + 3 * row)]
    return np.concatenate(ids).astype(np.int32)


def logits_of(loaded: LoadedModel, setup: Setup) -> dict[tuple[int, int, int], bytes]:
    """Run rows; return their logits, keyed by row, sample and output position."""
    cache = KVCache(loaded.layout(8), setup.num_blocks, CPU, getattr(torch, loaded.dtype))
    windows = cache.layout.windows
    pool = BlockPool(setup.num_blocks, 8, enable_prefix_caching=setup.caching, windows=windows)
    scheduler = Scheduler(pool, SequenceTable(96, 512, 8, windows), setup.max_tokens)
    sampler = RecordingSampler()
    engine = Engine(scheduler, ModelRunner(loaded.model, cache, sampler))
    params = SamplingParams(max_tokens=8, temperature=0.7, n=setup.n)
    for row in setup.rows:
        engine.add_request(Request(row, prompt(row, setup.prefix), params, (1, row)))
    steps = 0
    while engine.num_unfinished:
        engine.step()
        steps += 1
        running = list(scheduler.table.running())
        if running and setup.preempt_every and steps % setup.preempt_every == 0:
            scheduler.preempt(running[-1])
    return sampler.logits


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def llama(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = make_checkpoint("llama", tmp_path_factory.mktemp("llama"), **WIDE)
    return load_model(ModelConfig(str(folder), dtype=request.param), device=CPU, kernels=OWN)


def test_logits_do_not_depend_on_how_a_row_is_run(llama: LoadedModel) -> None:
    usual = logits_of(llama, Setup())
    for name, other in OTHERS.items():
        changed = logits_of(llama, other)
        assert len(changed) == 8 * len(other.rows)
        assert {key: usual[key] for key in changed} == changed, name


@pytest.mark.parametrize(
    ("family", "widths"),
    [
        *((family, WIDE) for family in ("qwen3", "gemma2", "mistral", "olmo2")),
        # The layers of these families are fused completely.
        *((family, ODD) for family in ("llama", "qwen3")),
    ],
)
def test_other_families_and_widths(family: str, widths: dict[str, int], tmp_path: Path) -> None:
    loaded = load_model(
        ModelConfig(str(make_checkpoint(family, tmp_path, **widths))), device=CPU, kernels=OWN
    )
    usual = logits_of(loaded, Setup())
    for name, other in OTHERS.items():
        changed = logits_of(loaded, other)
        assert {key: usual[key] for key in changed} == changed, name


TOGETHER = Setup(num_blocks=600, prefix=150, n=8)
APART = {
    "nothing_told": TOGETHER,
    "one_sample": replace(TOGETHER, n=1),
    "a_row_alone": replace(TOGETHER, rows=(4,), n=1),
    "no_prefix_caching": replace(TOGETHER, caching=False, n=1),
    "chunks_of_7": replace(TOGETHER, max_tokens=7, n=1),
}


def test_rows_that_attend_together_have_the_bits_of_rows_apart(
    llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve rows with three prefixes have eight samples each; shared blocks are read once."""
    all_shared = []
    of_step = PrefixTree.of_step

    def listen(tree: PrefixTree, rows: Rows) -> SharedPrefixes | None:
        all_shared.append(of_step(tree, rows))
        return all_shared[-1]

    monkeypatch.setattr(PrefixTree, "of_step", listen)
    combined_output = logits_of(llama, TOGETHER)
    assert len(combined_output) == 8 * 8 * 12
    assert max(np.count_nonzero(of.shared_lens) for of in all_shared if of) >= 80
    monkeypatch.setattr(PrefixTree, "of_step", lambda tree, rows: None)
    for name, apart in APART.items():
        changed = logits_of(llama, apart)
        assert {key: combined_output[key] for key in changed} == changed, name


def test_batch_dependent_kernel_changes_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Show that the tests above can fail."""
    monkeypatch.setattr(kernel_choice, "linear_kernels", lambda dtype: (BATCH_DEPENDENT,))
    loaded = load_model(ModelConfig(str(make_checkpoint("llama", tmp_path, **WIDE))), device=CPU)
    usual = logits_of(loaded, Setup())
    alone = logits_of(loaded, replace(Setup(), rows=(4,)))
    assert {key: usual[key] for key in alone} != alone
