from __future__ import annotations

from itertools import combinations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.engine.step import SharedPrefixes, Step
from batchinfer.engine.step_io.shared_prefix import MIN_SHARED_TOKENS, order_by_blocks
from tests.engine.fake import MakeEngine, make_request, run_all

BLOCK_SIZE = 16


def padded(tables: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Return block tables padded like those of the sequence table, and their lengths."""
    rows = np.zeros((len(tables), max(map(len, tables))), np.int32)
    for row, blocks in zip(rows, tables, strict=True):
        row[: len(blocks)] = blocks
    return rows, np.array([len(blocks) for blocks in tables], np.int32)


def common_blocks(left: list[int], right: list[int]) -> int:
    """Return the number of leading blocks that two tables share."""
    pairs = list(zip(left, right, strict=False))
    return next((at for at, (a, b) in enumerate(pairs) if a != b), len(pairs))


def shared_of_pairs(order: np.ndarray, shared: np.ndarray) -> dict[tuple[int, int], int]:
    """Return the length of the shared prefix of each pair of sequences.

    It is the minimum of ``shared`` between the two sequences in ``order``.
    """
    return {
        (int(order[i]), int(order[j])): int(shared[i + 1 : j + 1].min())
        for i, j in combinations(range(len(order)), 2)
    }


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=9))
def test_every_pair_shares_what_its_tables_share(tables: list[list[int]]) -> None:
    """Few slots make long common prefixes likely; slot 0 is an ordinary block."""
    order, shared = order_by_blocks(*padded(tables))
    assert sorted(order.tolist()) == list(range(len(tables)))
    assert shared[0] == 0
    for (left, right), count in shared_of_pairs(order, shared).items():
        assert count == common_blocks(tables[left], tables[right])


def test_the_same_slot_after_others_is_not_shared() -> None:
    order, shared = order_by_blocks(*padded([[5, 9], [6, 9]]))
    assert order.tolist() == [0, 1]
    assert shared.tolist() == [0, 0]


def check(step: Step) -> None:
    """Check the shared prefixes of a step.

    Each reported prefix is really shared. Every shared prefix that is long enough and computed for
    all of its sequences is reported.
    """
    starts, lens = step.query_starts, step.context_lens
    computed = lens - np.diff(starts)
    tables = [
        step.block_tables[at, : computed[at] // BLOCK_SIZE].tolist()
        for at in range(step.num_sequences)
    ]
    prefixes = step.shared_prefixes
    if prefixes is None:
        order = np.arange(step.num_sequences)
        prefixes = SharedPrefixes(order, np.zeros(step.num_sequences, np.int32))
    for (left, right), tokens in shared_of_pairs(prefixes.order, prefixes.shared_lens).items():
        common = BLOCK_SIZE * common_blocks(tables[left], tables[right])
        assert tokens <= common
        assert tokens == common or common < MIN_SHARED_TOKENS or computed.min() < common


@settings(max_examples=20)
@given(st.data())
def test_steps_list_the_shared_prefixes_of_their_sequences(
    make_engine: MakeEngine, data: st.DataObject
) -> None:
    """Prefixes have two levels, and rows have several samples and start and end at any time."""
    engine, runner = make_engine(
        num_blocks=data.draw(st.sampled_from([40, 200])),
        block_size=BLOCK_SIZE,
        max_tokens=data.draw(st.sampled_from([37, 500])),
    )
    common = list(range(1, 81))
    requests = []
    for row in range(data.draw(st.integers(2, 8))):
        branch = data.draw(st.integers(0, 2))
        prompt = common + [100 + branch] * data.draw(st.sampled_from([0, 33, 70])) + [200 + row]
        n, max_tokens = data.draw(st.sampled_from([1, 3])), data.draw(st.integers(1, 20))
        requests.append(make_request(row, prompt, n=n, max_tokens=max_tokens, ignore_eos=True))
    run_all(engine, requests)
    for step in runner.steps:
        check(step)


def test_samples_of_a_row_share_its_prompt(make_engine: MakeEngine) -> None:
    engine, runner = make_engine(num_blocks=200, block_size=BLOCK_SIZE, max_tokens=500)
    run_all(engine, [make_request(0, [7] * 100, n=4, max_tokens=5, ignore_eos=True)])
    decodes = [step for step in runner.steps if step.num_sequences == 4]
    assert decodes
    for step in decodes:
        assert step.shared_prefixes.shared_lens.tolist() == [0, 96, 96, 96]


def test_steps_of_rows_without_common_prefixes_list_none(make_engine: MakeEngine) -> None:
    engine, runner = make_engine(num_blocks=200, block_size=BLOCK_SIZE, max_tokens=500)
    requests = [
        make_request(row, [row + 1] * 100, max_tokens=5, ignore_eos=True) for row in range(4)
    ]
    run_all(engine, requests)
    assert all(step.shared_prefixes is None for step in runner.steps)


def test_a_reused_table_row_shares_no_old_blocks(make_engine: MakeEngine) -> None:
    engine, runner = make_engine(
        num_blocks=200, block_size=BLOCK_SIZE, max_num_seqs=2, max_tokens=500
    )
    lengths = [([7] * 100, 30), ([7] * 99 + [8], 3), ([9] * 100, 5)]
    requests = [
        make_request(row, prompt, max_tokens=max_tokens, ignore_eos=True)
        for row, (prompt, max_tokens) in enumerate(lengths)
    ]
    run_all(engine, requests)
    assert any(step.shared_prefixes is not None for step in runner.steps)
    for step in runner.steps:
        check(step)
