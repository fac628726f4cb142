"""A single copy moves a step's padded arrays to fixed addresses on the device."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from batchinfer.engine.step import SharedPrefixes, Step
from batchinfer.worker.cuda_graphs.graph_sizes import GraphSize
from batchinfer.worker.cuda_graphs.step_inputs import StepInputs
from tests.worker.on_triton import pretend_cuda, traced
from tests.worker.step_maker import StepMaker

SIZE = GraphSize("mixed", 9, 4)
LARGEST = GraphSize("mixed", 12, 5)


def make_inputs(num_groups: int = 1) -> StepInputs:
    return StepInputs(LARGEST, 4, torch.device("cpu"), num_groups)


def some_step() -> Step:
    maker = StepMaker(num_blocks=32, block_size=4)
    ended, begun, new = (maker.sequence(list(range(n))) for n in (5, 9, 3))
    maker.step([(ended, 4), (begun, 5)])
    step = maker.step([(ended, 1), (begun, 2), (new, 3)])
    tree = SharedPrefixes(np.array([2, 0, 1], np.int32), np.array([0, 64, 0], np.int32))
    return replace(step, shared_prefixes=tree)


def test_padding_computes_nothing_and_writes_nowhere() -> None:
    inputs, step = make_inputs(), some_step()
    inputs.load(step, SIZE, None)
    on = {name: tensor.tolist() for name, tensor in inputs.of(SIZE).items()}
    assert on["token_ids"] == [*step.token_ids, 0, 0, 0]
    assert on["positions"] == [*step.positions, 0, 0, 0]
    assert on["slot_mapping"] == [*step.slot_mapping, -1, -1, -1]
    assert on["query_starts"] == [0, 1, 3, 6, 6]
    assert on["context_lens"] == [5, 7, 3, 0]
    assert on["logits_indices"] == [0, 5, 0, 0]
    assert on["order"] == [2, 0, 1, 3]
    assert on["shared_lens"] == [0, 64, 0, 0]
    width = step.block_tables.shape[1]
    assert [row[:width] for row in on["block_tables"][:3]] == step.block_tables.tolist()
    assert on["other_slots"] == on["other_tables"] == []


def test_without_shared_prefixes_every_sequence_has_its_own_place() -> None:
    inputs = make_inputs()
    inputs.load(some_step(), SIZE, None)
    inputs.load(replace(some_step(), shared_prefixes=None), SIZE, None)
    on = inputs.of(SIZE)
    assert on["order"].tolist() == [0, 1, 2, 3]
    assert on["shared_lens"].tolist() == [0, 0, 0, 0]


def test_layer_groups_have_their_own_slots_and_tables() -> None:
    step, inputs = some_step(), make_inputs(num_groups=3)
    others = np.stack([step.block_tables + 100, step.block_tables + 200])
    slots = np.stack([step.slot_mapping + 7, step.slot_mapping + 9])
    inputs.load(replace(step, other_tables=others, other_slots=slots), SIZE, None)
    on = inputs.of(SIZE)
    assert on["slot_mapping"].tolist() == [*step.slot_mapping, -1, -1, -1]
    assert on["other_slots"].tolist() == [[*row, -1, -1, -1] for row in slots.tolist()]
    width = step.block_tables.shape[1]
    assert on["block_tables"][:3, :width].tolist() == step.block_tables.tolist()
    assert on["other_tables"][:, :3, :width].tolist() == others.tolist()


def test_drawn_tokens_replace_unknown_tokens() -> None:
    inputs, step = make_inputs(), some_step()
    previous = np.array([3, -1, 0, -1, -1, -1], np.int32)
    inputs.load(replace(step, previous_sample=previous), SIZE, torch.tensor([70, 71, 72, 73]))
    expected = [73, step.token_ids[1], 70, *step.token_ids[3:], 0, 0, 0]
    assert inputs.of(SIZE)["token_ids"].tolist() == expected


def test_tokens_of_adapters_stand_side_by_side() -> None:
    inputs, step = StepInputs(LARGEST, 4, torch.device("cpu"), num_adapters=3), some_step()
    for adapters, tokens, starts in (
        ([2, 0, 1], [3, 4, 5, 0], [0, 3, 4, 4]),
        ([0, 3, 0], [1, 2], [0, 0, 0, 2]),
        (None, [], [0, 0, 0, 0]),
    ):
        numbers = None if adapters is None else np.array(adapters, np.int32)
        inputs.load(replace(step, adapters=numbers), SIZE, None)
        on = inputs.of(SIZE)
        assert on["adapter_tokens"].tolist() == tokens + [0] * (SIZE.tokens - len(tokens))
        assert on["adapter_starts"].tolist() == starts


def test_arrays_keep_their_addresses_and_are_aligned_to_16_bytes() -> None:
    inputs, step = make_inputs(), some_step()
    captured = inputs.of(SIZE)
    inputs.load(step, SIZE, None)
    now = inputs.of(SIZE)
    views = set(now) - {"token_ids"}
    assert {captured[name].data_ptr() for name in views} == {now[n].data_ptr() for n in views}
    assert captured["positions"].tolist() == [*step.positions, 0, 0, 0]
    one_group = views - {"other_slots", "other_tables"}
    start = inputs._bytes.data_ptr()
    assert all((now[name].data_ptr() - start) % 16 == 0 for name in one_group - {"block_tables"})


def test_a_step_takes_one_copy_and_one_more_for_previous_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend_cuda(monkeypatch)
    inputs, step, drawn = make_inputs(), some_step(), torch.tensor([70])
    with traced(monkeypatch) as trace:
        inputs.load(step, SIZE, None)
    assert trace.names == ["copy_"]
    with traced(monkeypatch) as trace:
        inputs.load(replace(step, previous_sample=step.previous_sample + 1), SIZE, drawn)
    assert trace.names == ["copy_", "copy_"]


def test_steps_with_more_blocks_samples_or_adapters_than_planned_do_not_fit() -> None:
    inputs, step = make_inputs(), some_step()
    assert inputs.holds(step)
    assert not inputs.holds(replace(step, block_tables=np.zeros((3, 5), np.int32)))
    assert inputs.holds(replace(step, previous_sample=np.array([4], np.int32)))
    assert not inputs.holds(replace(step, previous_sample=np.array([5], np.int32)))
    assert not inputs.holds(replace(step, adapters=np.ones(3, np.int32)))
