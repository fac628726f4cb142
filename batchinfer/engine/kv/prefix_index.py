"""The prefix index: a tree of blocks keyed by tokens, never by a hash alone.

A block's key is (parent block, its token ids), so that equal blocks after different prefixes are
different entries. Each adapter has its own tree. Matching prefixes in a tree down to single tokens
follows RadixAttention (Zheng et al. 2024, https://arxiv.org/abs/2312.07104); here the nodes are
blocks of fixed size, and a hit that ends inside a block copies the block.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_TOKEN_BYTES = 4


def token_key(token_ids: npt.ArrayLike) -> bytes:
    """Return token ids as big-endian bytes, so that keys sort like lists of token ids."""
    return np.asarray(token_ids, dtype=">u4").tobytes()


def common_tokens(left: bytes, right: bytes) -> int:
    """Return the number of leading tokens that two keys share."""
    count = min(len(left), len(right)) // _TOKEN_BYTES
    if left[: count * _TOKEN_BYTES] == right[: count * _TOKEN_BYTES]:
        return count
    differ = np.frombuffer(left, ">u4", count) != np.frombuffer(right, ">u4", count)
    return int(differ.argmax())


class Block:
    """A logical block: ``block_size`` token slots of KV, referenced by sequences.

    ``key`` is empty while the block is not in the prefix index. The key of a partly filled block
    consists of the tokens that the block had when it was indexed.
    """

    __slots__ = (
        "children",
        "host_slot",
        "key",
        "last_arrival",
        "num_kept",
        "parent",
        "ref_count",
        "row",
        "serial",
        "slot",
        "snapshots",
        "snapshots_below",
        "used_later",
        "waiters",
        "window_slots",
    )

    def __init__(self, slot: int) -> None:
        self.slot = slot
        """Device slot in the first layer group; -1 while the block is only on the host, or if that
        group has a window."""
        self.window_slots: tuple[WindowSlot, ...] = ()
        """Slots in layer groups with a window, and in all groups after the first."""
        self.snapshots: tuple[StateSnapshot, ...] = ()
        """Snapshots of recurrent state after some of the block's tokens."""
        self.snapshots_below: dict[bytes, StateSnapshot] | None = None
        """Snapshots in the block's children, keyed by ``StateSnapshot.key``."""
        self.num_kept = 0
        """Number of the block's snapshots, plus the number of children with a snapshot in their
        subtree."""
        self.serial: int
        """Unique number of a block with window slots."""
        self.host_slot = -1
        self.ref_count = 0
        self.waiters = 0
        """Number of waiting sequences whose prefix includes the block."""
        self.last_arrival = -1
        """Arrival number of the last row that set ``used_later``."""
        self.used_later = False
        """True if a row that has not arrived yet is known to use the block."""
        self.row = -1
        """Table row of the sequence for which the block was allocated."""
        self.key = b""
        self.parent: Block | None = None
        self.children: _Children | None = None

    @property
    def indexed(self) -> bool:
        """True if a prefix lookup can find the block."""
        return self.parent is not None

    @property
    def wanted(self) -> bool:
        """True if the block has a known future use."""
        return self.waiters > 0 or self.used_later or self.num_kept > 0

    def __repr__(self) -> str:
        return (
            f"Block(slot={self.slot}, host_slot={self.host_slot}, ref_count={self.ref_count}, "
            f"indexed={self.indexed})"
        )


class RecurrentState:
    """A recurrent state and its slots, shared by sequences with the same computed tokens.

    The state of a snapshot may be on the host. Sequences use only states on the device.
    """

    __slots__ = ("host_slots", "ref_count", "slots", "snapshot")

    def __init__(self, slots: list[int], host_slots: list[int] | None = None) -> None:
        self.slots = slots
        """Device slots; empty while the state is on the host."""
        self.host_slots = host_slots or []
        """Host slots; empty while the state is on the device."""
        self.ref_count = 1
        """Number of references, by sequences and by the snapshot."""
        self.snapshot: StateSnapshot | None = None

    @property
    def on_host(self) -> bool:
        return bool(self.host_slots)

    @property
    def is_idle(self) -> bool:
        """True if only a snapshot refers to the state's device slots."""
        return self.ref_count == 1 and self.snapshot is not None and not self.on_host


class StateSnapshot:
    """A recurrent state after a token of an indexed block, kept for later rows.

    The parent of that block stores the snapshot in ``snapshots_below``, keyed by the block's tokens
    up to the state. A lookup therefore finds the snapshot whichever tokens follow the state.
    """

    __slots__ = ("block", "followers", "in_windows", "key", "parent", "state")

    def __init__(
        self,
        state: RecurrentState,
        block: Block,
        key: bytes,
        followers: int,
        in_windows: tuple[int, ...] = (),
    ) -> None:
        assert block.parent is not None
        self.state = state
        self.block = block
        """The block with the state's last token."""
        self.parent = block.parent
        self.key = key
        """Tokens of the block that the state includes."""
        self.followers = followers
        """Number of rows that have yet to start from the snapshot."""
        self.in_windows = in_windows
        """Number of blocks, up to ``block``, that each window includes."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the block that the state includes."""
        return len(self.key) // _TOKEN_BYTES


class WindowSlot:
    """A block's device slot in one layer group.

    The slot is freed when no sequence's window includes it. If the block is indexed, the slot is
    freed only when the pool needs space.
    """

    __slots__ = ("block", "num_kept", "readers", "slot")

    def __init__(self, block: Block, slot: int) -> None:
        self.block = block
        self.slot = slot
        """Number of the device slot; -1 after the slot was freed."""
        self.readers = 1
        """Number of sequences whose windows include the slot, or that will write to it."""
        self.num_kept = 0
        """Number of snapshots of recurrent state whose windows include the slot."""

    @property
    def wanted(self) -> bool:
        """True if the slot has a known future use. If there are snapshots in or after the block,
        rows start from these and need only the slots in the snapshots' windows."""
        return self.num_kept > 0 if self.block.num_kept else self.block.wanted


class _Children:
    """The indexed children of a block, keyed by ``Block.key``.

    Computed blocks and blocks in flight (computed by the step being built) have separate sorted
    lists of keys, because only computed blocks can be copied.
    """

    __slots__ = ("blocks", "in_flight", "settled")

    def __init__(self) -> None:
        self.blocks: dict[bytes, Block] = {}
        self.settled: list[bytes] = []
        self.in_flight: list[bytes] = []

    def add(self, block: Block) -> None:
        self.blocks[block.key] = block
        insort(self.in_flight, block.key)

    def settle(self, block: Block) -> None:
        del self.in_flight[bisect_left(self.in_flight, block.key)]
        insort(self.settled, block.key)

    def discard(self, block: Block) -> None:
        del self.blocks[block.key]
        for keys in (self.settled, self.in_flight):
            at = bisect_left(keys, block.key)
            if at < len(keys) and keys[at] == block.key:
                del keys[at]


def _longest(keys: list[bytes], key: bytes) -> tuple[bytes, int]:
    """Return the key in sorted ``keys`` that shares the most leading tokens with ``key``, and the
    number of these tokens. The found key is next to the position where ``key`` would be
    inserted."""
    best, shared = b"", 0
    at = bisect_left(keys, key)
    for neighbor in keys[max(at - 1, 0) : at + 1]:
        count = common_tokens(neighbor, key)
        if count > shared:
            best, shared = neighbor, count
    return best, shared


def _kept_below(node: Block, key: bytes, at: int) -> tuple[tuple[StateSnapshot, int], ...]:
    """Return ((snapshot, ``at``),) for the longest snapshot in children of ``node`` that matches,
    or an empty tuple if none does. A snapshot matches if its key is a prefix of ``key``."""
    kept = (node.snapshots_below or {}).values()
    matching = [snapshot for snapshot in kept if key.startswith(snapshot.key)]
    return ((max(matching, key=lambda one: one.num_tokens), at),) if matching else ()


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Longest indexed prefix of a key: whole blocks, and a part of one block."""

    blocks: list[Block]
    """Whole blocks, including blocks that the step being built fills: in each layer, a step writes
    all KV before it attends."""
    tail: Block | None
    tail_tokens: int
    tokens_in_flight: int
    """Number of matching tokens after ``blocks`` in a block in flight."""
    snapshots: tuple[tuple[StateSnapshot, int], ...] = ()
    """Pairs (snapshot of recurrent state, number of whole blocks before its block). Each pair has
    the last matching snapshot in one block of the prefix."""


class PrefixIndex:
    """Trees of indexed blocks, with one root per adapter. Adapter 0 is the base model."""

    def __init__(self, block_size: int) -> None:
        self._roots: dict[int, Block] = {}
        self._block_bytes = block_size * _TOKEN_BYTES

    def root(self, adapter: int) -> Block:
        """Return the root of an adapter's tree, an empty block."""
        return self._roots.setdefault(adapter, Block(slot=-1))

    def is_root(self, block: Block) -> bool:
        return block in self._roots.values()

    def match(self, key: bytes, adapter: int = 0) -> PrefixMatch:
        """Return the longest prefix of ``key`` that is indexed for an adapter."""
        node, blocks, start = self.root(adapter), list[Block](), 0
        snapshots = _kept_below(node, key[: self._block_bytes], 0)
        while node.children is not None and len(key) - start >= self._block_bytes:
            child = node.children.blocks.get(key[start : start + self._block_bytes])
            if child is None:
                break
            blocks.append(child)
            node, start = child, start + self._block_bytes
            if node.snapshots_below is not None:
                rest = key[start : start + self._block_bytes]
                snapshots += _kept_below(node, rest, len(blocks))
        children = node.children
        if children is None:
            return PrefixMatch(blocks, None, 0, 0, snapshots)
        tail_key = key[start : start + self._block_bytes]
        tail, tail_tokens = _longest(children.settled, tail_key)
        _, in_flight = _longest(children.in_flight, tail_key)
        tail_block = children.blocks.get(tail)
        return PrefixMatch(blocks, tail_block, tail_tokens, in_flight, snapshots)

    def child(self, parent: Block, key: bytes) -> Block | None:
        """Return the child of ``parent`` with exactly this key, if any."""
        return None if parent.children is None else parent.children.blocks.get(key)

    def insert(self, parent: Block, block: Block, key: bytes) -> Block:
        """Index ``block`` as an in-flight child of ``parent``, unless ``key`` already has a block.

        Returns:
            The block indexed for ``key``, which is the parent of the next block.
        """
        if parent.children is not None and key in parent.children.blocks:
            return parent.children.blocks[key]
        if block.parent is not None:  # the block was indexed when it was partly filled
            self._unlink(block)
        if parent.children is None:
            parent.children = _Children()
        block.parent, block.key = parent, key
        parent.children.add(block)
        return block

    def replace(self, old: Block, block: Block) -> None:
        """Replace ``old`` with the in-flight ``block``, which takes over the key, the children, and
        the children's snapshots. ``old`` itself must have no snapshot."""
        parent, key, children = old.parent, old.key, old.children
        assert parent is not None
        assert parent.children is not None
        if block.parent is not None:
            self._unlink(block)
        parent.children.discard(old)
        old.parent, old.key, old.children = None, b"", None
        block.parent, block.key, block.children = parent, key, children
        for child in () if children is None else children.blocks.values():
            child.parent = block
        parent.children.add(block)
        self._move_snapshots(old, block)

    @staticmethod
    def _move_snapshots(old: Block, block: Block) -> None:
        assert block.parent is not None
        assert not old.snapshots
        for snapshot in (old.snapshots_below or {}).values():
            snapshot.parent = block
        block.snapshots_below, old.snapshots_below = old.snapshots_below, None
        block.parent.num_kept -= old.num_kept > 0 and block.num_kept > 0
        block.num_kept, old.num_kept = block.num_kept + old.num_kept, 0
        for slot, old_slot in zip(block.window_slots, old.window_slots, strict=True):
            slot.num_kept, old_slot.num_kept = slot.num_kept + old_slot.num_kept, 0

    def settle(self, block: Block) -> None:
        """Mark a block in flight as computed."""
        assert block.parent is not None
        assert block.parent.children is not None
        block.parent.children.settle(block)

    def remove(self, block: Block) -> list[Block]:
        """Remove ``block``, if it is indexed, and its descendants from the index; return them."""
        removed = list(self.subtree(block))
        if block.indexed:
            self._unlink(block)
        for below in removed:
            below.parent, below.key, below.children = None, b"", None
        return removed

    def first_blocks(self) -> list[Block]:
        below = (root.children for root in self._roots.values())
        return [block for each in below if each is not None for block in each.blocks.values()]

    def blocks(self) -> Iterator[Block]:
        for root in self._roots.values():
            below = self.subtree(root)
            next(below)
            yield from below

    @staticmethod
    def subtree(block: Block) -> Iterator[Block]:
        stack = [block]
        while stack:
            node = stack.pop()
            yield node
            if node.children is not None:
                stack.extend(node.children.blocks.values())

    def _unlink(self, block: Block) -> None:
        parent = block.parent
        assert parent is not None
        assert parent.children is not None
        parent.children.discard(block)
        if not parent.children.blocks:
            parent.children = None
