"""Inputs with odd shapes, for comparing attention and cache kernels with their references.

A case is a shape; `build_*` makes its tensors from a seed, on a device, in a dtype. Memory that a
kernel must not read, such as unused cache slots and outputs before the call, holds NaN. Table
entries after a sequence's last block point outside the pool.
"""

from dataclasses import dataclass
from typing import Any

import torch

from batchinfer.kernels import reference
from batchinfer.kernels.attention_loop import Heads
from batchinfer.kernels.chunk_attention import plan_chunks, query_tile
from batchinfer.kernels.decode_plan import plan_decode
from batchinfer.kernels.fp8 import FP8
from batchinfer.kernels.paged_attention import paged_attention

GARBAGE_BLOCK = 2**30  # larger than the number of slots of any pool
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@dataclass(frozen=True)
class Case:
    """The shape of a test's inputs; ``name`` is in the test's id."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class AttentionCase(Case):
    """The shape of a step; `lens` has (query_len, context_len) for every sequence."""

    lens: tuple[tuple[int, int], ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    key_width: int = 16
    value_width: int = 0  # 0: equal to `key_width`
    block_size: int = 16
    sliding_window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    num_splits: int | None = None
    seed: int = 0
    image: int = 0  # texts and images of this many tokens alternate; an image's tokens see it all
    prompts: tuple[int, ...] = ()  # prompt of each sequence, which the window does not hide


@dataclass(frozen=True)
class AttentionInputs:
    """The tensors of a case: the arguments of `attend_paged` and `reference_attention`."""

    pool: torch.Tensor  # [num_slots, slot_elems]; the two caches are views of it
    arguments: dict[str, Any]

    def with_fresh_out(self) -> dict[str, Any]:
        """Return the arguments with `out` filled with NaN."""
        return self.arguments | {"out": torch.full_like(self.arguments["out"], float("nan"))}


_DECODES = ((1, 1), (1, 15), (1, 16), (1, 17), (1, 257))
_MIXED = ((7, 7), (1, 33), (64, 64), (1, 257), (7, 40), (1, 1), (64, 100))

# Cases small enough for Triton's interpreter, which takes milliseconds per program.
INTERPRETED_ATTENTION_CASES = (
    AttentionCase("decodes", _DECODES, num_heads=4, num_kv_heads=1, key_width=40),
    AttentionCase("decodes_split", _DECODES, num_heads=3, num_kv_heads=1, num_splits=3),
    AttentionCase("decodes_group_1", ((1, 17), (1, 70)), num_heads=2, block_size=1, key_width=80),
    AttentionCase("mixed", _MIXED, num_heads=6, num_kv_heads=2, block_size=32),
    AttentionCase("chunk_of_64_after_7", ((64, 71),), num_heads=8, num_kv_heads=1, key_width=64),
    AttentionCase("one_token", ((1, 1),), num_heads=1, num_kv_heads=1),
    AttentionCase("no_query_and_padding", ((0, 9), (1, 0), (5, 20), (0, 0), (1, 3), (1, 0))),
    AttentionCase(
        "window_within_chunk", ((64, 80), (7, 7), (1, 257), (1, 3)), sliding_window=5, num_splits=2
    ),
    AttentionCase(
        "window_not_of_tiles", ((1, 257), (1, 200), (3, 130)), sliding_window=100, num_splits=3
    ),
    AttentionCase("window_of_1", ((7, 20), (1, 65)), sliding_window=1),
    AttentionCase("softcap", ((7, 30), (1, 90)), softcap=2.0, num_splits=2),
    AttentionCase("sinks", ((7, 30), (1, 257), (1, 1)), sinks=True, num_splits=3),
    AttentionCase(
        "everything",
        _MIXED[:5],
        num_heads=8,
        num_kv_heads=1,
        key_width=96,
        sliding_window=20,
        softcap=5.0,
        sinks=True,
        num_splits=2,
    ),
    AttentionCase("key_wider_than_value", ((5, 37), (1, 37)), key_width=192, value_width=128),
    AttentionCase("value_wider_than_key", ((5, 37), (1, 37)), key_width=16, value_width=40),
    AttentionCase("images", ((64, 100), (1, 33), (7, 40), (70, 70)), num_heads=6, image=9),
    AttentionCase("long_images", ((190, 200), (5, 131)), num_heads=2, image=65),
    AttentionCase("images_and_window", ((64, 100), (1, 33), (70, 140)), image=9, sliding_window=20),
    AttentionCase(
        "prompts",
        ((64, 100), (1, 257), (7, 40), (1, 90), (70, 70), (1, 33)),
        sliding_window=20,
        prompts=(70, 130, 300, 3, 0, 64),
        num_splits=2,
    ),
)

_GROUPS = ((1, 1), (8, 8), (3, 1), (12, 4), (8, 2), (8, 1), (16, 2), (71, 1), (128, 1))
_WIDTHS = ((16, 16), (40, 40), (64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256))
_LONG = ((1, 4097), (1, 1), (1, 511), (1, 512), (1, 513), (1, 1025), (300, 1111), (2, 700))

# Cases for a GPU: each pair of head counts with two of the widths, and all features at realistic
# lengths. Not all combinations are tested, because each shape must be compiled.
ATTENTION_CASES = (
    *INTERPRETED_ATTENTION_CASES,
    *(
        AttentionCase(
            f"heads_{heads}_{kv_heads}_width_{key}_{value}", _MIXED, heads, kv_heads, key, value
        )
        for i, (heads, kv_heads) in enumerate(_GROUPS)
        for key, value in (_WIDTHS[i % 8], _WIDTHS[(i + 3) % 8])
    ),
    *(
        AttentionCase(
            f"long_block_{block_size}_window_{window}_splits_{splits}",
            _LONG,
            num_heads=8,
            num_kv_heads=2,
            key_width=128,
            block_size=block_size,
            sliding_window=window,
            softcap=cap,
            sinks=sinks,
            num_splits=splits,
        )
        for block_size in (1, 16, 32, 24)
        for window, cap, sinks in ((0, 0.0, False), (128, 0.0, True), (700, 30.0, False))
        for splits in (None, 1, 4)
    ),
    AttentionCase("many", tuple((1, 1 + 37 * i % 900) for i in range(300)), 16, 8, 128),
    AttentionCase(
        "many_chunks", tuple((1 + 13 * i % 90, 90 + 37 * i % 900) for i in range(100)), 16, 8, 128
    ),
)


def build_attention(
    case: AttentionCase,
    device: torch.device | str,
    dtype: torch.dtype,
    cache_dtype: torch.dtype | None = None,
) -> AttentionInputs:
    """Make the tensors of a case. The caches are the second layer of a two-layer pool."""
    generator = torch.Generator().manual_seed(case.seed)
    value_width = case.value_width or case.key_width
    query_lens, context_lens = zip(*case.lens, strict=True)
    num_tokens, max_context_len = sum(query_lens), max(context_lens)

    blocks = [-(-context_len // case.block_size) for context_len in context_lens]
    num_slots = sum(blocks) + 3
    free = torch.randperm(num_slots, generator=generator).tolist()
    tables = torch.full((len(case.lens), max(*blocks, 1) + 2), GARBAGE_BLOCK, dtype=torch.int32)
    key_elems = case.num_kv_heads * case.block_size * case.key_width
    value_elems = case.num_kv_heads * case.block_size * value_width
    layer_elems = key_elems + value_elems
    pool = torch.full((num_slots, 2 * layer_elems), float("nan"))
    key_cache = pool[:, layer_elems : layer_elems + key_elems].view(
        num_slots, case.num_kv_heads, case.block_size, case.key_width
    )
    value_cache = pool[:, layer_elems + key_elems :].view(
        num_slots, case.num_kv_heads, case.block_size, value_width
    )
    for row, (query_len, context_len) in enumerate(case.lens):
        # Blocks before the window of the first query token have been freed.
        hides = case.sliding_window and not case.prompts
        begin = context_len - query_len + 1 - case.sliding_window if hides else 0
        positions = torch.arange(min(max(0, begin), context_len), context_len)
        for block in sorted(set((positions // case.block_size).tolist())):
            tables[row, block] = free.pop()
        slots = tables[row, positions // case.block_size].long()
        offsets = positions % case.block_size
        for cache in (key_cache, value_cache):
            shape = (len(positions), case.num_kv_heads, cache.shape[3])
            cache[slots, :, offsets] = torch.randn(shape, generator=generator)

    pool = pool.to(device, cache_dtype or dtype)
    values = pool.as_strided(value_cache.shape, value_cache.stride(), value_cache.storage_offset())
    if cache_dtype == FP8:
        numbers = values.float().nan_to_num(448.0)  # float8 values are never NaN
        values = transposed(values)
        values.copy_(numbers.to(FP8))
    query = torch.randn(num_tokens, case.num_heads, case.key_width, generator=generator)
    sinks = torch.randn(case.num_heads, generator=generator) if case.sinks else None
    ends = {"query_ends": query_ends(case).to(device)} if case.image else {}
    if case.prompts:
        ends["prompt_lens"] = torch.tensor(case.prompts, dtype=torch.int32).to(device)
    starts = torch.tensor([0, *query_lens]).cumsum(0)
    return AttentionInputs(
        pool,
        {
            "query": query.to(device, dtype),
            "key_cache": pool.as_strided(
                key_cache.shape, key_cache.stride(), key_cache.storage_offset()
            ),
            "value_cache": values,
            "block_tables": tables.to(device),
            "query_starts": starts.to(device, torch.int32),
            "context_lens": torch.tensor(context_lens, dtype=torch.int32).to(device),
            "scale": case.key_width**-0.5,
            "out": torch.empty(num_tokens, case.num_heads, value_width, device=device, dtype=dtype),
            "sliding_window": case.sliding_window,
            "softcap": case.softcap,
            "sinks": None if sinks is None else sinks.to(device, dtype),
            "max_query_len": max(query_lens),
            "max_context_len": max_context_len,
            "num_splits": case.num_splits,
            **ends,
        },
    )


def query_ends(case: AttentionCase) -> torch.Tensor:
    """Return one past the last position that each query token sees, [T] int32."""
    ends = []
    for query_len, context_len in case.lens:
        positions = torch.arange(context_len - query_len, context_len)
        number = positions // case.image
        image_ends = ((number + 1) * case.image).clamp(max=context_len)
        ends.append(torch.where(number % 2 == 1, image_ends, positions + 1))
    return torch.cat(ends).int()


_PLAN_OPTIONS = ("order", "shared_lens", "max_context_len", "num_splits")
_LAUNCH_OPTIONS = (*_PLAN_OPTIONS, "max_query_len", "work", "launch", "chunks")


def without_launch_options(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name not in _LAUNCH_OPTIONS}


def attend_paged(**arguments: Any) -> None:
    """Run `paged_attention`, with new work lists unless the arguments include some."""
    query, values, starts = (arguments[n] for n in ("query", "value_cache", "query_starts"))
    work, chunks = arguments.get("work"), arguments.get("chunks")
    if work is None:
        work = plan_decode(
            starts,
            arguments["context_lens"],
            num_heads=query.shape[1],
            num_kv_heads=values.shape[1],
            value_width=values.shape[3],
            sliding_window=planned_window(arguments),
            **{name: arguments[name] for name in _PLAN_OPTIONS if name in arguments},
        )
    if chunks is None and arguments["max_query_len"] > 1:
        tokens = query_tile(Heads.of(query, arguments["key_cache"], values))
        chunks = plan_chunks(starts, tokens=tokens, num_tokens=len(query))
    launch = arguments.get("launch", 0)
    paged_attention(**without_launch_options(arguments), work=work, launch=launch, chunks=chunks)


def planned_window(arguments: dict[str, Any]) -> int:
    """Return the window for a work list."""
    return 0 if "prompt_lens" in arguments else arguments.get("sliding_window", 0)


def reference_attention(**arguments: Any) -> None:
    reference.paged_attention(**without_launch_options(arguments))


def check_attention(inputs: AttentionInputs) -> None:
    """Check that `paged_attention` matches the reference, whose output must be finite."""
    got, expected = inputs.with_fresh_out(), inputs.with_fresh_out()
    attend_paged(**got)
    reference_attention(**expected)
    assert expected["out"].isfinite().all()
    tolerance = TOLERANCE[got["out"].dtype]
    torch.testing.assert_close(got["out"], expected["out"], atol=tolerance, rtol=tolerance)


def transposed(values: torch.Tensor) -> torch.Tensor:
    """Return a view of the memory of `values` in column order, like float8 values on a GPU."""
    strides = (*values.stride()[:2], 1, values.shape[2])
    return values.as_strided(values.shape, strides, values.storage_offset())


@dataclass(frozen=True)
class WriteCase(Case):
    """Write `num_tokens` tokens; with `skips`, skip every third one."""

    num_tokens: int
    num_kv_heads: int
    key_width: int
    value_width: int
    block_size: int
    skips: bool = False
    seed: int = 0


WRITE_CASES = (
    WriteCase("one", 1, 1, 16, 16, 1),
    WriteCase("odd_widths", 7, 3, 40, 80, 16),
    WriteCase("skips", 10, 2, 64, 64, 16, skips=True),
    WriteCase("key_wider", 5, 4, 192, 128, 32),
    WriteCase("many_heads", 3, 40, 128, 128, 16),
    WriteCase("block_size_not_a_power_of_two", 9, 5, 96, 96, 24, skips=True),
    WriteCase("no_tokens", 0, 2, 16, 16, 16),
)


def build_write(
    case: WriteCase,
    device: torch.device | str,
    dtype: torch.dtype,
    cache_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return a pool of NaN, and the arguments of `kv_write`.

    Key and value are slices of one row, like outputs of a merged q/k/v projection.
    """
    generator = torch.Generator().manual_seed(case.seed)
    heads, num_slots = case.num_kv_heads, case.num_tokens // case.block_size + 3
    key_elems, value_elems = (heads * width for width in (case.key_width, case.value_width))
    rows = torch.randn(case.num_tokens, key_elems + value_elems + 8, generator=generator)
    rows = rows.to(device, dtype)
    slot_elems = case.block_size * (key_elems + value_elems)
    pool = torch.full((num_slots, slot_elems), float("nan")).to(device, cache_dtype or dtype)
    keys, values = pool[:, : case.block_size * key_elems], pool[:, case.block_size * key_elems :]
    value_cache = values.view(num_slots, heads, case.block_size, case.value_width)
    destinations = torch.randperm(num_slots * case.block_size, generator=generator)
    slot_mapping = destinations[: case.num_tokens].clone()
    if case.skips:
        slot_mapping[::3] = -1
    return pool, {
        "key": rows[:, :key_elems].view(-1, heads, case.key_width),
        "value": rows[:, key_elems:-8].view(-1, heads, case.value_width),
        "key_cache": keys.view(num_slots, heads, case.block_size, case.key_width),
        "value_cache": transposed(value_cache) if cache_dtype == FP8 else value_cache,
        "slot_mapping": slot_mapping.to(device),
    }


@dataclass(frozen=True)
class CopyCase(Case):
    """Copy `num_pairs` blocks within a pool of `num_slots`."""

    num_slots: int
    slot_elems: int
    num_pairs: int
    index_dtype: torch.dtype = torch.int32
    seed: int = 0


COPY_CASES = (
    CopyCase("one", 2, 1, 1),
    CopyCase("several", 9, 4097, 3),
    CopyCase("half_of_the_pool", 8, 10_000, 4, torch.int64),
    CopyCase("whole_chunks", 5, 8192, 2),
    CopyCase("no_pairs", 3, 64, 0),
)


def build_copy(
    case: CopyCase, device: torch.device | str, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Return the arguments of `block_copy`. Sources may repeat; some elements are NaN."""
    generator = torch.Generator().manual_seed(case.seed)
    pool = torch.randn(case.num_slots, case.slot_elems, generator=generator)
    pool[:, ::7] = float("nan")
    slots = torch.randperm(case.num_slots, generator=generator)
    destinations, others = slots[: case.num_pairs], slots[case.num_pairs :]
    sources = others[torch.randint(len(others), (case.num_pairs,), generator=generator)]
    pairs = torch.stack([sources, destinations], dim=1).to(device, case.index_dtype)
    return {"pool": pool.to(device, dtype), "pairs": pairs}


@dataclass(frozen=True)
class TablesCase(Case):
    """Shape of a step's block tables, and of the larger tables that they are copied to."""

    groups: int
    count: int
    width: int
    sequences: int
    max_blocks: int


TABLES_CASES = (
    TablesCase("one", 1, 1, 1, 1, 1),
    TablesCase("groups", 3, 5, 7, 8, 20),
    TablesCase("several_programs_a_row", 1, 2, 1500, 3, 2050),
    TablesCase("full", 2, 4, 16, 4, 16),
    TablesCase("no_sequences", 1, 0, 0, 4, 9),
)


def build_tables(case: TablesCase, device: torch.device | str) -> dict[str, torch.Tensor]:
    """Return the arguments of `unpack_block_tables`; the large tables hold invalid entries."""
    generator = torch.Generator().manual_seed(0)
    size = case.groups * case.count * case.width
    packed = torch.randint(0, 999, (size + 3,), generator=generator, dtype=torch.int32)
    room = torch.full((case.groups, case.sequences + 1, case.max_blocks), -7, dtype=torch.int32)
    shape = torch.tensor([case.count, case.width], dtype=torch.int32)
    arguments = {"packed": packed, "shape": shape, "tables": room}
    arguments = {name: tensor.to(device) for name, tensor in arguments.items()}
    return arguments | {"tables": arguments["tables"][:, :-1]}
