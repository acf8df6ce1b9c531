"""Every invariant of the cache, checked from the trees up."""

from __future__ import annotations

from collections import Counter

from k3core.rollout.prefix_cache.cache import PrefixCache
from k3core.rollout.prefix_cache.pool import Pool
from k3core.rollout.prefix_cache.tree import Node, below


def audit(cache: PrefixCache) -> None:
    """Raises AssertionError naming the first thing that is wrong."""
    roots = [*cache.roots.values(), *cache.dying_roots]
    nodes = [node for root in roots for node in below(root) if node is not root]
    store = cache.store
    _check_pool("page", store.pages, nodes, ("page", "staged_page"))
    _check_pool("checkpoint", store.checkpoints, nodes, ("checkpoint", "staged_checkpoint"))
    _check_pool("host page", store.host_pages, nodes, ("host_page",))
    _check_pool("host checkpoint", store.host_checkpoints, nodes, ("host_checkpoint",))
    for node in nodes:
        _check_node(node, cache.cfg.page_size, cache.cfg.grid)
    _check_pins(cache, nodes)
    device_leaves = {n for n in nodes if n.page is not None and all(c.page is None for c in n.children.values())}
    assert device_leaves == set(store.device_leaves), "device leaves are not the leaves on the device"
    host_leaves = {n for n in nodes if n.host_page is not None and not n.children}
    assert host_leaves == set(store.host_leaves), "host leaves are not the leaves on the host"


def _check_pool(name: str, pool: Pool, nodes: list[Node], fields: tuple[str, ...]) -> None:
    owner = {getattr(node, f): node for node in nodes for f in fields if getattr(node, f) is not None}
    num_held = sum(getattr(node, f) is not None for node in nodes for f in fields)
    assert len(owner) == num_held, f"one {name} in two nodes"
    assert owner == pool.owner, f"the {name} pool and the trees disagree"
    everywhere = [*pool.free, *pool.lent, *pool.owner]
    assert sorted(everywhere) == list(range(pool.size)), f"a {name} is in two places or in none"


def _check_node(node: Node, page_size: int, grid: int) -> None:
    parent = node.parent
    assert parent is not None
    assert parent.children[node.key] is node, "a child that its parent does not know"
    assert len(node.key) == page_size, "an edge that is not one page"
    assert node.position == parent.position + page_size, "a position that is not the path's"
    assert (node.page is None) != (node.host_page is None), "rows on both tiers or on none"
    assert node.checkpoint is None or node.host_checkpoint is None, "a state on both tiers"
    assert not node.has_checkpoint or node.position % grid == 0, "a checkpoint off the grid"
    assert node.checkpoint is None or node.page is not None, "half a history on the host: rows without their state"
    assert node.has_checkpoint or node.children or node.page is not None, "host rows that no state makes usable"
    if node.page is not None and parent.parent is not None:
        assert parent.page is not None, "device rows below host rows"
    assert not node.is_restoring or node.num_pins, "a restore that nobody holds"
    assert node.staged_page is None or node.page is None, "rows restored twice"
    assert node.staged_checkpoint is None or node.host_checkpoint is not None, "a state restored from nowhere"


def _check_pins(cache: PrefixCache, nodes: list[Node]) -> None:
    pins: Counter[Node] = Counter()
    checkpoint_pins: Counter[Node] = Counter()
    for lock in cache.locks.values():
        pins.update(lock.nodes)
        if lock.checkpoint_node is not None:
            checkpoint_pins[lock.checkpoint_node] += 1
    for node in nodes:
        assert node.num_pins == pins[node], "pins that no lock explains"
        assert node.num_checkpoint_pins == checkpoint_pins[node], "checkpoint pins that no lock explains"
        assert not node.num_checkpoint_pins or node.has_checkpoint, "a pinned checkpoint is gone"
        assert not node.is_dying or node.num_pins, "a dropped entry without a pin"
    assert set(cache.store.pinned) == set(pins), "pinned nodes are not the locks' nodes"
    assert set(pins) <= set(nodes), "a lock on a node outside the trees"
