"""The prefix cache as a tree of chains, for people: who hangs on what, and what goes next."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pageframe.runtime.prefix_cache import NO_PLACE, Entry

if TYPE_CHECKING:
    from pageframe.runtime.engine import Engine

Json = dict[str, Any]


def prefix_tree(engine: Engine, limit: int) -> Json:
    """{"step", "nodes", "left_out"}: see `_node`. A node is a run of blocks without a branching that the same live
    requests hold; of more than `limit` nodes, those used last are told of, and all that they hang from.
    """
    scheduler = engine.scheduler
    prefix_cache = scheduler.blocks.prefix_cache
    if prefix_cache is None:
        return {"step": scheduler.step, "nodes": [], "left_out": 0}
    holders = _holders(engine)
    eviction = {block_id: place for place, block_id in enumerate(scheduler.allocator.eviction_order())}
    children: dict[int, list[Entry]] = {}
    for entry in prefix_cache.entries():
        assert entry.parent is not None
        children.setdefault(entry.parent.entry_id, []).append(entry)
    nodes: list[Json] = []
    for root in prefix_cache.roots():
        for parent, run in _runs(root, children, holders):
            nodes.append(_node(parent, run, holders, eviction))
    chosen = _newest(nodes, limit)
    for node in chosen:
        node["digest"] = prefix_cache.digest(node.pop("entry"))
    return {"step": scheduler.step, "nodes": chosen, "left_out": len(nodes) - len(chosen)}


def _holders(engine: Engine) -> dict[int, tuple[str, ...]]:
    """By block id, the running requests whose tables have it."""
    found: dict[int, list[str]] = {}
    tables = engine.scheduler.tables
    for request in engine.scheduler.live_requests():
        if request.row >= 0:
            for block_id in tables.block_ids(request.row):
                found.setdefault(block_id, []).append(request.request_id)
    return {block_id: tuple(ids) for block_id, ids in found.items()}


def _runs(
    root: Entry, children: dict[int, list[Entry]], holders: dict[int, tuple[str, ...]]
) -> Iterator[tuple[int | None, list[Entry]]]:
    """The runs behind a root, each with the id of the node that it hangs from, parents first."""
    todo: list[tuple[int | None, Entry]] = [(None, child) for child in children.get(root.entry_id, [])]
    while todo:
        parent, entry = todo.pop()
        run = [entry]
        while len(behind := children.get(entry.entry_id, [])) == 1 and _alike(entry, behind[0], holders):
            entry = behind[0]
            run.append(entry)
        yield parent, run
        todo += [(run[0].entry_id, child) for child in behind]


def _alike(entry: Entry, child: Entry, holders: dict[int, tuple[str, ...]]) -> bool:
    return entry.is_held == child.is_held and holders.get(entry.block_id) == holders.get(child.block_id)


def _node(parent: int | None, run: list[Entry], holders: dict[int, tuple[str, ...]], eviction: dict[int, int]) -> Json:
    """One chain.

    "parent": the node it hangs from, null for the beginning of prompts. "blocks": -1 for one that the device has lost.
    "hits": how often a request went on from its first block. "evicts_at": the place of its first block to go in the
    order of eviction, 0 being the next; null while all of it is in use or gone.
    """
    places = [eviction[entry.block_id] for entry in run if entry.block_id in eviction]
    return {
        "id": run[0].entry_id,
        "parent": parent,
        "blocks": [entry.block_id for entry in run],
        "num_blocks": len(run),
        "held": sum(entry.block_id != NO_PLACE for entry in run),
        "in_host": sum(entry.host_slot != NO_PLACE for entry in run),
        "hits": run[0].num_hits,
        "requests": list(holders.get(run[0].block_id, ())),
        "published_by": run[0].published_by,
        "used_step": max(entry.used_step for entry in run),
        "evicts_at": min(places, default=None),
        "entry": run[-1],
    }


def _newest(nodes: list[Json], limit: int) -> list[Json]:
    """The `limit` nodes that were used last and all that they hang from, in their order."""
    parents = {node["id"]: node["parent"] for node in nodes}
    kept: set[int] = set()
    for node in sorted(nodes, key=lambda node: (node["used_step"], node["id"]), reverse=True)[:limit]:
        node_id: int | None = node["id"]
        while node_id is not None and node_id not in kept:
            kept.add(node_id)
            node_id = parents[node_id]
    return [node for node in nodes if node["id"] in kept]
