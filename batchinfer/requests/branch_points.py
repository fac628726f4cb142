"""Finds the prompt lengths at which rows diverge. Recurrent states are kept at these lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from batchinfer.engine.kv.prefix_index import common_tokens, token_key
from batchinfer.engine.request import Request

MIN_GAIN = 8
"""Minimum number of prompt tokens between two states kept on a path of the prefix tree. Computing
fewer tokens again costs less than an additional step.
"""

BranchPoints = tuple[tuple[int, int], ...]
"""Pairs (prompt length, number of rows that start from the state at this length), ascending."""


def plan_branch_points(
    order: Sequence[int],
    with_next: Sequence[int],
    run: Sequence[int],
    lengths: Sequence[int],
) -> dict[int, BranchPoints]:
    """Return the branch points of each row that is the first to reach a branch point.

    The first row to reach a branch point computes the state there; the first row of each other
    branch starts from this state.

    Args:
        order: all rows, sorted by token ids.
        with_next: number of leading tokens that each row shares with the next row in ``order``.
        run: the same rows, in the order in which they run.
        lengths: number of prompt tokens of each row, indexed by row.
    """
    turn = {row: at for at, row in enumerate(run)}
    rows = [(turn[row], lengths[row]) for row in order]
    points: dict[int, list[tuple[int, int]]] = {}
    nodes = _inner_nodes(rows, with_next)
    for node in reversed(nodes):  # parents before children
        above = node.parent.kept if node.parent else None
        is_kept = node.depth - (above.depth if above else 0) >= MIN_GAIN
        node.kept = node if is_kept else above
        if node.kept is not None:
            node.kept.followers += node.num_children - 1
    for node in nodes:
        if node.kept is node:
            points.setdefault(run[node.first_turn], []).append((node.depth, node.followers))
    return {row: tuple(sorted(found)) for row, found in points.items()}


def with_branch_points(requests: Sequence[Request]) -> list[Request]:
    """Return requests, which run in this order, with the branch points of their prompts."""
    # A request shares only tokens before the first token whose logits are needed.
    prompts = [request.prompt_token_ids[: request.logits_from + 1] for request in requests]
    keys = [token_key([one.adapter, *ids]) for one, ids in zip(requests, prompts, strict=True)]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    # Keys begin with the adapter, so prompts of different adapters share nothing.
    common = [max(common_tokens(keys[a], keys[b]) - 1, 0) for a, b in pairwise(order)]
    lengths = [len(ids) for ids in prompts]
    points = plan_branch_points(order, [*common, 0][: len(order)], range(len(order)), lengths)
    return [replace(one, branch_points=points.get(at, ())) for at, one in enumerate(requests)]


class _Node:
    """A node of the prefix tree: all rows that share a prefix of ``depth`` tokens."""

    __slots__ = (
        *("depth", "first_turn", "followers", "kept", "num_children", "parent", "shortest"),
    )

    def __init__(self, depth: int, first_turn: int, shortest: int) -> None:
        self.depth = depth
        self.first_turn = first_turn
        """Index into ``run`` of the row that runs first."""
        self.shortest = shortest
        """Number of tokens of the shortest prompt in the node's subtree."""
        self.num_children = 0
        self.parent: _Node | None = None
        self.kept: _Node | None = None
        """Deepest node on the path from the root to this node at which the state is kept."""
        self.followers = 0

    def add(self, child: _Node) -> None:
        self.first_turn = min(self.first_turn, child.first_turn)
        self.shortest = min(self.shortest, child.shortest)
        self.num_children += 1
        child.parent = self


def _inner_nodes(rows: Sequence[tuple[int, int]], with_next: Sequence[int]) -> list[_Node]:
    """Return the inner nodes of the prefix tree of all prompts, each before its parent. A node is
    an LCP interval (Abouelhoda et al. 2004, https://doi.org/10.1016/S1570-8667(03)00065-0).

    Args:
        rows: each row's position in the running order and number of prompt tokens, sorted by token
            ids.
    """
    nodes, path = list[_Node](), list[_Node]()
    for (turn, length), common in zip(rows, with_next, strict=True):
        child = _Node(length, turn, length)
        while path and path[-1].depth > common:
            node = path.pop()
            node.add(child)
            # A hit ends before a prompt's last token, whose logits are needed.
            node.depth = min(node.depth, node.shortest - 1)
            nodes.append(node)
            child = node
        if common and (not path or path[-1].depth < common):
            path.append(_Node(common, child.first_turn, child.shortest))
        if common:
            path[-1].add(child)
    return nodes
