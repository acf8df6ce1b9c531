"""Where each page and checkpoint lies, and what goes when room is needed.

Eviction is by value: uses expected x tokens that a hit saves / bytes, compared as logarithms. Pages go leaf first;
checkpoints go alone. What leaves the device goes to the host when there is room for both histories, or for something
worth less there; else it is dropped. Pinned entries stay.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from k3core.rollout.prefix_cache.config import CacheConfig
from k3core.rollout.prefix_cache.pool import Pool
from k3core.rollout.prefix_cache.results import Copy
from k3core.rollout.prefix_cache.stats import CacheStats
from k3core.rollout.prefix_cache.tree import Node, below


class TieredStore:
    """The four pools and the leaves of both tiers."""

    def __init__(self, cfg: CacheConfig) -> None:
        self.cfg = cfg
        self.stats = CacheStats()
        self.pages = Pool(cfg.num_pages)
        self.checkpoints = Pool(cfg.num_checkpoints)
        self.host_pages = Pool(cfg.num_host_pages)
        self.host_checkpoints = Pool(cfg.num_host_checkpoints)
        self.device_leaves: dict[Node, None] = {}  # dicts, for an order that does not depend on addresses
        self.host_leaves: dict[Node, None] = {}
        self.pinned: dict[Node, None] = {}

    # Values

    def checkpoint_value(self, node: Node) -> float:
        """A state has constant bytes, so the deeper it stands the more tokens a byte of it saves."""
        return node.checkpoint_reuse.log_weight + math.log2(node.position / self.cfg.checkpoint_bytes)

    def node_value(self, node: Node) -> float:
        """Of the page and what would go with it. A page with a state below it stands for hits at least as deep."""
        if node.has_checkpoint:
            num_bytes = self.cfg.page_bytes + self.cfg.checkpoint_bytes
            return node.checkpoint_reuse.log_weight + math.log2(node.position / num_bytes)
        return node.page_reuse.log_weight + math.log2(node.position / self.cfg.page_bytes)

    def page_order(self, node: Node) -> tuple[bool, float, int]:
        """Rows past the last state save nothing, they only show where a state is worth planning: they go first."""
        return (node.has_checkpoint or bool(node.children), self.node_value(node), node.serial)

    # Pins

    def pin(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            node.num_pins += 1
            self.pinned[node] = None

    def unpin(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            node.num_pins -= 1
            if node.num_pins == 0:
                del self.pinned[node]

    # Room

    def make_page_room(self, num_pages: int) -> list[Copy] | None:
        """Evict until so many device pages are free; None, with nothing evicted, when pins and loans forbid it."""
        held = sum(node.page is not None or node.staged_page is not None for node in self.pinned)
        if len(self.pages.free) + len(self.pages.owner) - held < num_pages:
            return None
        copies: list[Copy] = []
        while len(self.pages.free) < num_pages:
            leaves = (node for node in self.device_leaves if not node.num_pins)
            copies += self._evict_page(min(leaves, key=self.page_order))
        return copies

    def make_checkpoint_room(self) -> list[Copy] | None:
        if self.checkpoints.free:
            return []
        candidates = [node for node in self.checkpoints.owner.values() if not node.num_checkpoint_pins]
        if not candidates:
            return None
        return self._evict_checkpoint(min(candidates, key=lambda n: (self.checkpoint_value(n), n.serial)))

    def _evict_page(self, node: Node) -> list[Copy]:
        if not node.has_checkpoint and not node.children:
            self.drop(node, "no_checkpoint")
            return []
        value = max(self.node_value(n) for n in below(node))
        self.pin([node])
        node.num_checkpoint_pins += 1  # its own host checkpoint must not make room for its page
        has_room = self._make_host_room(value, 1, int(node.checkpoint is not None))
        node.num_checkpoint_pins -= 1
        self.unpin([node])
        if not node.has_checkpoint and not node.children:
            self.drop(node, "no_checkpoint")
            return []
        if not has_room:
            self.drop(node, "host_full")
            return []
        copies = [self._page_to_host(node)]
        if node.checkpoint is not None:
            copies.append(self._checkpoint_to_host(node))
        return copies

    def _evict_checkpoint(self, node: Node) -> list[Copy]:
        if self._make_host_room(self.checkpoint_value(node), 0, 1):
            return [self._checkpoint_to_host(node)]
        self.drop_checkpoint(node, "host_full")
        return []

    def _make_host_room(self, value: float, num_pages: int, num_checkpoints: int) -> bool:
        """Evict host entries worth no more than `value`. May drop some and still answer no."""
        if self.host_pages.size < num_pages or self.host_checkpoints.size < num_checkpoints:
            return False
        while len(self.host_pages.free) < num_pages:
            leaves = [node for node in self.host_leaves if not node.num_pins]
            victim = min(leaves, key=lambda n: (self.node_value(n), n.serial), default=None)
            if victim is None or self.node_value(victim) > value:
                return False
            self.drop(victim, "host_evicted")
        while len(self.host_checkpoints.free) < num_checkpoints:
            owners = [node for node in self.host_checkpoints.owner.values() if not node.num_checkpoint_pins]
            victim = min(owners, key=lambda n: (self.checkpoint_value(n), n.serial), default=None)
            if victim is None or self.checkpoint_value(victim) > value:
                return False
            self.drop_checkpoint(victim, "host_evicted")
        return True

    # Moves

    def _page_to_host(self, node: Node) -> Copy:
        assert node.page is not None
        copy = Copy("page", "to_host", node.page, self.host_pages.own(node))
        self.pages.disown(node.page)
        node.page, node.host_page = None, copy.target
        self.refresh(node)
        self.stats.offloaded_pages += 1
        return copy

    def _checkpoint_to_host(self, node: Node) -> Copy:
        assert node.checkpoint is not None
        copy = Copy("checkpoint", "to_host", node.checkpoint, self.host_checkpoints.own(node))
        self.checkpoints.disown(node.checkpoint)
        node.checkpoint, node.host_checkpoint = None, copy.target
        self.stats.offloaded_checkpoints += 1
        return copy

    def stage_page(self, node: Node) -> Copy:
        assert node.host_page is not None
        node.staged_page = self.pages.own(node)
        return Copy("page", "to_device", node.host_page, node.staged_page)

    def stage_checkpoint(self, node: Node) -> Copy:
        assert node.host_checkpoint is not None
        node.staged_checkpoint = self.checkpoints.own(node)
        return Copy("checkpoint", "to_device", node.host_checkpoint, node.staged_checkpoint)

    def settle(self, node: Node) -> None:
        """The restore arrived: the device ids count, the host ids are free."""
        if node.staged_page is not None:
            self.place_page(node, node.staged_page)
            node.staged_page = None
            self.stats.restored_pages += 1
        if node.staged_checkpoint is not None:
            self.place_checkpoint(node, node.staged_checkpoint)
            node.staged_checkpoint = None
            self.stats.restored_checkpoints += 1

    def unstage(self, node: Node) -> None:
        """The restore did not arrive: the host ids still count."""
        if node.staged_page is not None:
            self.pages.disown(node.staged_page)
            node.staged_page = None
        if node.staged_checkpoint is not None:
            self.checkpoints.disown(node.staged_checkpoint)
            node.staged_checkpoint = None

    def place_page(self, node: Node, page: int) -> None:
        """A device page that the node owns; a host copy is no longer needed."""
        node.page = page
        if node.host_page is not None:
            self.host_pages.disown(node.host_page)
            node.host_page = None
        self.refresh(node)

    def place_checkpoint(self, node: Node, checkpoint: int) -> None:
        node.checkpoint = checkpoint
        if node.host_checkpoint is not None:
            self.host_checkpoints.disown(node.host_checkpoint)
            node.host_checkpoint = None

    # Ends

    def drop_checkpoint(self, node: Node, reason: str) -> None:
        """Host rows that no state makes usable any more go with it."""
        self.free_checkpoint(node, reason)
        self._prune_host(node)

    def drop(self, node: Node, reason: str) -> None:
        """The node and everything below it, none of it pinned, and the host rows above that it alone made usable."""
        parent = node.parent
        assert parent is not None
        self._remove(node, reason)
        self._prune_host(parent)

    def _remove(self, node: Node, reason: str) -> None:
        for each in reversed(list(below(node))):
            assert not each.num_pins, "pinned entries are not dropped"
            self.free_checkpoint(each, reason)
            if each.page is not None:
                self.pages.disown(each.page)
            if each.host_page is not None:
                self.host_pages.disown(each.host_page)
            each.page = each.host_page = None
            self.stats.dropped_pages[reason] += 1
            self.refresh(each)
        assert node.parent is not None
        del node.parent.children[node.key]
        self.refresh(node.parent)

    def free_checkpoint(self, node: Node, reason: str) -> None:
        if not node.has_checkpoint:
            return
        if node.checkpoint is not None:
            self.checkpoints.disown(node.checkpoint)
        if node.host_checkpoint is not None:
            self.host_checkpoints.disown(node.host_checkpoint)
        node.checkpoint = node.host_checkpoint = None
        self.stats.dropped_checkpoints[reason] += 1

    def _prune_host(self, node: Node) -> None:
        while node in self.host_leaves and not node.has_checkpoint and not node.num_pins:
            assert node.parent is not None
            self._remove(node, "no_checkpoint")
            node = node.parent

    def refresh(self, node: Node) -> None:
        """Keep both sets of leaves after a page of this node moved or its children changed."""
        for each in (node, node.parent):
            if each is None or each.parent is None:
                continue
            is_device_leaf = each.is_on_device and not any(child.is_on_device for child in each.children.values())
            is_host_leaf = each.host_page is not None and not each.children
            for leaves, is_leaf in ((self.device_leaves, is_device_leaf), (self.host_leaves, is_host_leaf)):
                if is_leaf:
                    leaves[each] = None
                else:
                    leaves.pop(each, None)
