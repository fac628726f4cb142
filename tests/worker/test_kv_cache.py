from __future__ import annotations

import numpy as np
import pytest
import torch

from batchinfer.engine.kv.layout import KVLayout
from batchinfer.errors import DeviceError
from batchinfer.worker import host_blocks, kv_cache
from batchinfer.worker.host_blocks import pinned_pieces
from batchinfer.worker.kv_cache import KVCache
from tests.devices import CPU_AND_CUDA

CPU = torch.device("cpu")
in_both_orders = pytest.mark.parametrize(
    "layer_major", [False, True], ids=["block_major", "layer_major"]
)


def make(
    key_width: int = 6,
    value_width: int = 4,
    num_blocks: int = 5,
    num_host_blocks: int = 0,
    *,
    fp8: bool = False,
    device: str = "cpu",
    layer_major: bool = False,
) -> KVCache:
    layout = KVLayout(
        num_layers=3,
        num_kv_heads=2,
        key_width=key_width,
        value_width=value_width,
        block_size=4,
        element_bytes=4,
        fp8=fp8,
    )
    return KVCache(
        layout, num_blocks, torch.device(device), torch.float32, num_host_blocks,
        layer_major=layer_major,
    )  # fmt: skip


def pairs(*of: tuple[int, int]) -> np.ndarray:
    return np.array(of, np.int32).reshape(-1, 2)


@in_both_orders
def test_views_tile_the_pool(layer_major: bool) -> None:
    cache = make(layer_major=layer_major)
    cache.pool.fill_(-1)
    for layer in range(3):
        cache.key(layer).fill_(2 * layer)
        cache.value(layer).fill_(2 * layer + 1)
    counts = torch.bincount(cache.pool.long().flatten())
    per_slot = 2 * 4 * 6  # heads, tokens per block, slots including the null slot
    assert counts.tolist() == [per_slot * n for n in (6, 4)] * 3


@in_both_orders
@pytest.mark.parametrize("fp8", [False, True])
def test_values_may_be_stored_in_the_keys(fp8: bool, layer_major: bool) -> None:
    layout = KVLayout(3, 1, 20, 16, block_size=4, element_bytes=4, fp8=fp8, latent=True)
    cache = KVCache(layout, 5, CPU, torch.float32, layer_major=layer_major)
    assert cache.pool.numel() == 6 * 3 * 4 * 20  # slots (including the null slot), layers, tokens
    key = torch.randint(-8, 8, (7, 1, 20)).float()
    slots = torch.tensor([4, 5, 6, 7, 16, 17, -1])
    for layer in range(3):
        cache.write(layer, key + layer, key[..., :16] + layer, slots)
    for layer in range(3):
        keys, values = cache.read(layer, torch.tensor([1, 4]))
        stored = keys.float().view(8, 20)[:6]
        assert torch.equal(stored, key[:6, 0] + layer)
        assert torch.equal(values.float().reshape(8, 16)[:6], stored[:, :16])


@in_both_orders
def test_float8_values_are_stored_transposed_for_gpu_kernels(
    layer_major: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kv_cache._transposes_values(make(fp8=True).layout, torch.device("cuda"))
    monkeypatch.setattr(kv_cache, "_transposes_values", lambda *_: True)
    cache = make(fp8=True, num_host_blocks=2, layer_major=layer_major)
    assert not cache.pool.view(torch.uint8).any()
    key, value = torch.randint(-8, 8, (7, 2, 6)).float(), torch.randint(-8, 8, (7, 2, 4)).float()
    value[2, 1, 3] = torch.nan
    slots = torch.tensor([4, 5, 6, 7, 16, 17, -1])
    for layer in range(3):
        cache.write(layer, key + layer, value + layer, slots)
    cache.host.copy(pairs((1, 0), (4, 1)), pairs((0, 0), (1, 2)))
    cache.copy_blocks(torch.tensor([[0, 3]]))
    value[2, 1, 3], key[2, 1] = 0, torch.nan
    for layer in range(3):
        column = cache.value(layer)[3, 1, :, 2]
        assert column.stride() == (1,)
        assert torch.equal(column.float(), value[:4, 1, 2] + layer)
        keys, values = (x.float().transpose(1, 2) for x in cache.read(layer, torch.tensor([3, 2])))
        torch.testing.assert_close(
            keys.flatten(0, 1)[:6], (key + layer)[:6], rtol=0, atol=0, equal_nan=True
        )
        expected = value + layer
        expected[2, 1, 3] = 0
        assert torch.equal(values.flatten(0, 1)[:6], expected[:6])


def test_a_block_of_all_layers_is_contiguous() -> None:
    cache = make()
    assert cache.pool.is_contiguous()
    assert cache.pool.shape == (6, cache.layout.elements_per_block)
    assert cache.key(2)[4].data_ptr() > cache.pool[4].data_ptr()
    assert cache.value(2)[4].data_ptr() < cache.pool[5].data_ptr()


def test_the_blocks_of_a_layer_are_contiguous_in_a_layer_major_pool() -> None:
    cache = make(layer_major=True)
    runs = [(cache.key(layer)[0], cache.value(layer)[-1]) for layer in range(3)]
    bounds = [(key.data_ptr(), value.data_ptr() + value.nbytes) for key, value in runs]
    assert [begin for begin, _ in bounds[1:]] == [end for _, end in bounds[:-1]]
    assert bounds[-1][1] - bounds[0][0] == cache.nbytes == make().nbytes
    assert cache.nbytes == 6 * cache.layout.bytes_per_block


@in_both_orders
def test_write_puts_tokens_where_the_mapping_says(layer_major: bool) -> None:
    cache = make(layer_major=layer_major)
    cache.pool.zero_()
    key, value = torch.randn(3, 2, 6), torch.randn(3, 2, 4)
    cache.write(1, key, value, torch.tensor([9, 2, 19]))
    for token, (slot, offset) in enumerate([(2, 1), (0, 2), (4, 3)]):
        keys, values = cache.read(1, slot)
        assert torch.equal(keys[:, offset], key[token])
        assert torch.equal(values[:, offset], value[token])
    assert torch.count_nonzero(cache.pool) == key.numel() + value.numel()


@in_both_orders
@pytest.mark.parametrize("fp8", [False, True])
def test_copy_blocks_moves_every_layer(fp8: bool, layer_major: bool) -> None:
    cache = make(fp8=fp8, layer_major=layer_major)
    cache.pool.copy_(torch.randn(cache.pool.shape))
    before = cache.blocks.float().clone()
    cache.copy_blocks(torch.tensor([[0, 3], [4, 1]], dtype=torch.int32))
    after = cache.blocks.float()
    assert torch.equal(after[[3, 1]], before[[0, 4]])
    assert torch.equal(after[[0, 2, 4, 5]], before[[0, 2, 4, 5]])


def test_a_pool_of_float8_has_a_byte_a_number_and_saturates() -> None:
    cache = make(fp8=True)
    assert cache.nbytes == 6 * cache.layout.bytes_per_block == 6 * cache.layout.elements_per_block
    key = torch.tensor([500.0, -1e30, 1.1, torch.nan, 0.0, 2**-9]).expand(1, 2, 6)
    cache.write(0, key, torch.ones(1, 2, 4), torch.tensor([5]))
    expected = torch.tensor([448.0, -448.0, 1.125, torch.nan, 0.0, 2**-9]).expand(2, 6)
    keys, values = cache.read(0, 1)
    torch.testing.assert_close(keys[:, 1].float(), expected, equal_nan=True)
    assert (values[:, 1].float() == 1).all()
    assert torch.count_nonzero(cache.pool[cache.null_slot].float()) == 0


@in_both_orders
def test_the_pool_has_an_additional_null_slot_of_zeros(layer_major: bool) -> None:
    cache = make(layer_major=layer_major)
    assert cache.null_slot == cache.num_blocks == 5
    assert torch.count_nonzero(cache.blocks[5]) == 0


@in_both_orders
@pytest.mark.parametrize(("key_width", "value_width"), [(6, 4), (4, 4), (8, 12)])
def test_units_find_each_head(key_width: int, value_width: int, layer_major: bool) -> None:
    cache = make(key_width, value_width, layer_major=layer_major)
    cache.pool.copy_(torch.randn_like(cache.pool))
    slot, head = 3, 1
    for values, width, view in ((False, key_width, cache.key), (True, value_width, cache.value)):
        rows = cache.units(2, values=values)
        first = slot * cache.rows_per_slot + head * (width // cache.unit)
        got = rows[first : first + width // cache.unit].reshape(4, width)
        assert torch.equal(got, view(2)[slot, head])


def test_a_pool_that_does_not_fit_names_the_keys() -> None:
    with pytest.raises(DeviceError, match="num_kv_blocks"):
        make(num_blocks=2**52)


@in_both_orders
@pytest.mark.parametrize("device", CPU_AND_CUDA)
def test_swapped_block_returns_unchanged(layer_major: bool, device: str) -> None:
    cache = make(num_host_blocks=3, layer_major=layer_major, device=device)
    cache.pool.copy_(torch.randn_like(cache.pool))
    before = cache.blocks.clone()
    cache.host.copy(pairs((0, 2), (3, 0)), pairs())
    cache.blocks[:4].fill_(torch.nan)
    cache.host.copy(pairs(), pairs((2, 1), (0, 0)))
    assert torch.equal(cache.blocks[[1, 0]], before[[0, 3]])
    assert cache.blocks[2:4].isnan().all()


def test_blocks_are_swapped_to_every_piece_of_host_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def in_two_pieces(blocks: torch.Tensor, num_blocks: int) -> list[torch.Tensor]:
        whole = allocate(blocks, num_blocks)[0]
        return [whole[:2], whole[2:].clone()]

    allocate = host_blocks._allocate_host_blocks
    monkeypatch.setattr(host_blocks, "_allocate_host_blocks", in_two_pieces)
    cache = make(num_host_blocks=4)
    cache.pool.copy_(torch.randn_like(cache.pool))
    before = cache.blocks.clone()
    cache.host.copy(pairs((0, 0), (1, 1), (2, 2), (3, 3)), pairs((3, 0), (2, 1), (1, 2), (0, 3)))
    assert torch.equal(cache.blocks[:4], before[[3, 2, 1, 0]])


@pytest.mark.parametrize("num_blocks", [0, 1, 2, 3, 5, 33, 1000, 10_240])
@pytest.mark.parametrize("block_bytes", [2**21, 1000, 1, 2**21 + 2**19])
def test_pinned_memory_is_hardly_larger_than_its_blocks(num_blocks: int, block_bytes: int) -> None:
    pieces = pinned_pieces(num_blocks, block_bytes)
    assert sum(pieces) == num_blocks
    pinned = sum(1 << (count * block_bytes - 1).bit_length() for count in pieces)
    assert pinned - num_blocks * block_bytes < max(1, len(pieces)) * block_bytes
    assert len(pieces) <= 15


@in_both_orders
@pytest.mark.parametrize("device", CPU_AND_CUDA)
def test_blocks_leave_a_slot_before_others_fill_it(layer_major: bool, device: str) -> None:
    """A slot is read before it is filled; if two blocks fill it in one step, the last one stays."""
    cache = make(num_host_blocks=3, layer_major=layer_major, device=device)
    cache.pool.copy_(torch.randn_like(cache.pool))
    before = cache.blocks.clone()
    cache.host.copy(pairs((0, 0), (1, 1)), pairs((0, 2), (1, 2), (0, 1)))
    assert torch.equal(cache.blocks[[0, 1, 2]], before[[0, 0, 1]])


@in_both_orders
@pytest.mark.parametrize("device", CPU_AND_CUDA)
def test_measuring_a_copy_leaves_the_pool_as_it_was(layer_major: bool, device: str) -> None:
    cache = make(num_host_blocks=3, layer_major=layer_major, device=device)
    cache.pool.copy_(torch.randn_like(cache.pool))
    before = cache.blocks.clone()
    assert 0 < cache.host.measure() < 60
    assert torch.equal(cache.blocks, before)


def test_blocks_that_do_not_fit_the_host_name_the_key() -> None:
    with pytest.raises(DeviceError, match="swap_space"):
        make(num_host_blocks=2**52)
