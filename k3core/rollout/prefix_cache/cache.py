"""PrefixCache: match, insert, lend, restore, update. Decides over ids; copies nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from k3core.rollout.prefix_cache.config import CacheConfig, Namespace
from k3core.rollout.prefix_cache.results import Allocation, Copy, HalfRestoreError, Inserted, Match, Updated
from k3core.rollout.prefix_cache.stats import CacheStats
from k3core.rollout.prefix_cache.store import TieredStore
from k3core.rollout.prefix_cache.tree import Node, below, page_keys


@dataclass(slots=True)
class Lock:
    """Pinned nodes, parents first; for a match, also the checkpoint at its end and the restore it waits for."""

    nodes: tuple[Node, ...]
    checkpoint_node: Node | None
    pending: tuple[Copy, ...]
    num_stale_tokens: int

    def staged(self) -> list[Node]:
        """What its own restore brings; a state on its way in the middle of the path is another lock's."""
        return [node for node in self.nodes if node.staged_page is not None or node is self.checkpoint_node]


class PrefixCache:
    """One tree a namespace; a prefix is usable where its latent rows and a state at its very end both stand.

    Copies are to be made in the order in which they are handed out, before the ids that came with them are written.
    Time is the number of matches, so equal calls give equal decisions. Not thread safe: one loop owns it.
    """

    def __init__(self, cfg: CacheConfig) -> None:
        self.cfg = cfg
        self.store = TieredStore(cfg)
        self.roots: dict[Namespace, Node] = {}
        self.dying_roots: list[Node] = []
        self.locks: dict[int, Lock] = {}
        self._time = 0
        self._next_lock = 0

    @property
    def stats(self) -> CacheStats:
        return self.store.stats

    # Matching

    def match(self, namespace: Namespace, tokens: Sequence[int]) -> Match:
        """The longest usable prefix of at most len(tokens) - 1 tokens, so that one is left to compute.

        What stands on the host only is staged when device room can be made, else a shorter prefix is taken.
        """
        self._time += 1
        self.stats.queries += 1
        self.stats.query_tokens += len(tokens)
        path = self._walk(namespace, tokens)
        kv_tokens = len(path) * self.cfg.page_size

        copies: list[Copy] = []
        restores: list[Copy] = []
        hit: tuple[Node, ...] = ()
        for end in range(len(path), 0, -1):
            last = path[end - 1]
            if last.has_checkpoint and last.staged_checkpoint is None:
                nodes = tuple(path[:end])
                found = self._reach(nodes, copies)
                if found is not None:
                    hit, restores = nodes, found
                    break

        for node in hit:
            node.page_reuse = node.page_reuse.used(self._time, self.cfg.half_life)
        if hit:
            hit[-1].checkpoint_reuse = hit[-1].checkpoint_reuse.used(self._time, self.cfg.half_life)
        num_stale = sum(node.policy_step < namespace.policy_step for node in hit) * self.cfg.page_size
        lock = self._lock(Lock(hit, hit[-1] if hit else None, tuple(restores), num_stale))
        if not restores:
            self._count_hit(self.locks[lock])

        num_tokens = len(hit) * self.cfg.page_size
        target = kv_tokens // self.cfg.grid * self.cfg.grid
        return Match(
            num_tokens=num_tokens,
            pages=tuple(_device_page(node) for node in hit),
            checkpoint=_device_checkpoint(hit[-1]) if hit else None,
            kv_tokens=kv_tokens,
            branch_target=target if target > num_tokens else None,
            copies=(*copies, *restores),
            lock=lock,
            stale_tokens=num_stale,
            oldest_step=min((node.policy_step for node in hit), default=namespace.policy_step),
        )

    def reach(self, namespace: Namespace, tokens: Sequence[int]) -> int:
        """How many tokens a match would find now, with room on the device. Counts and pins nothing."""
        path = self._walk(namespace, tokens)
        usable = [n for n, node in enumerate(path, 1) if node.has_checkpoint and node.staged_checkpoint is None]
        return max(usable, default=0) * self.cfg.page_size

    def namespaces(self) -> tuple[Namespace, ...]:
        """Those under which something can be found."""
        return tuple(namespace for namespace, root in self.roots.items() if root.children)

    def _walk(self, namespace: Namespace, tokens: Sequence[int]) -> list[Node]:
        """Nodes whose rows can be read, on any tier; a restore in flight ends the walk."""
        path: list[Node] = []
        node = self.roots.get(namespace)
        if node is None:
            return path
        for key in page_keys(tokens, self.cfg.page_size, max(len(tokens) - 1, 0) // self.cfg.page_size):
            node = node.children.get(key)
            if node is None or node.staged_page is not None:
                break
            path.append(node)
        return path

    def _reach(self, nodes: tuple[Node, ...], copies: list[Copy]) -> list[Copy] | None:
        """Pin the path and stage what is on the host. None, unpinned, when there is no device room.

        Evictions made on the way are appended to `copies` in either case.
        """
        store, last = self.store, nodes[-1]
        store.pin(nodes)
        last.num_checkpoint_pins += 1
        on_host = [node for node in nodes if node.page is None]
        checkpoint_room = store.make_checkpoint_room() if last.checkpoint is None else []
        copies += checkpoint_room or []
        page_room = store.make_page_room(len(on_host)) if checkpoint_room is not None else None
        if page_room is None:
            last.num_checkpoint_pins -= 1
            store.unpin(nodes)
            return None
        copies += page_room
        restores = [store.stage_page(node) for node in on_host]
        if last.checkpoint is None:
            restores.append(store.stage_checkpoint(last))
        return restores

    def restored(self, lock: int, done: Collection[Copy]) -> None:
        """The hit's copies to the device were made: it may be used from now on.

        Raises HalfRestoreError when one is missing: all are undone, the entries stay on the host, the lock is gone.
        """
        held = self.locks[lock]
        num_missing = sum(copy not in done for copy in held.pending)
        if num_missing:
            num_copies = len(held.pending)
            self.stats.refused_restores += 1
            self.release(lock)
            raise HalfRestoreError(f"{num_missing} of {num_copies} copies to the device are missing: match again")
        if held.pending:
            for node in held.staged():
                self.store.settle(node)
            held.pending = ()
            self._count_hit(held)

    def _count_hit(self, lock: Lock) -> None:
        self.stats.hits += bool(lock.nodes)
        self.stats.hit_tokens += len(lock.nodes) * self.cfg.page_size
        self.stats.stale_hit_tokens += lock.num_stale_tokens

    # Locks

    def _lock(self, lock: Lock) -> int:
        self._next_lock += 1
        self.locks[self._next_lock] = lock
        return self._next_lock

    def release(self, lock: int) -> None:
        """Unpin. A restore still in flight is undone; entries of a dropped tree go with their last pin."""
        held = self.locks.pop(lock)
        if held.pending:
            for node in held.staged():
                self.store.unstage(node)
        if held.checkpoint_node is not None:
            held.checkpoint_node.num_checkpoint_pins -= 1
        self.store.unpin(held.nodes)
        for node in held.nodes:
            if node.is_dying:
                self._let_die(node)
                if not node.num_pins:
                    break
        self.dying_roots = [root for root in self.dying_roots if root.children]

    def _let_die(self, node: Node) -> None:
        if not node.num_pins:
            self.store.drop(node, "update")
        elif not node.num_checkpoint_pins:
            self.store.free_checkpoint(node, "update")

    # Lending

    def allocate_pages(self, num_pages: int) -> Allocation | None:
        """Device pages for a running sequence; None, with nothing evicted, when pins and loans leave too few."""
        copies = self.store.make_page_room(num_pages)
        return None if copies is None else Allocation(self.store.pages.lend(num_pages), tuple(copies))

    def allocate_checkpoint(self) -> Allocation | None:
        """One device checkpoint slot; None when all are lent or pinned."""
        copies = self.store.make_checkpoint_room()
        return None if copies is None else Allocation(self.store.checkpoints.lend(1), tuple(copies))

    def free_pages(self, pages: Iterable[int]) -> None:
        self.store.pages.take_back(pages)

    def free_checkpoint(self, checkpoint: int) -> None:
        self.store.checkpoints.take_back([checkpoint])

    # Inserting

    def insert(
        self,
        namespace: Namespace,
        tokens: Sequence[int],
        pages: Sequence[int],
        checkpoints: Mapping[int, int],
        policy_step: int | None = None,
    ) -> Inserted:
        """Rows of tokens[: len(pages) * page_size], written, and states by the position that each stands at.

        pages starts at token 0: the match's pages, then lent ones. A checkpoint goes to exactly its position or back
        to the caller, never to a shorter prefix. policy_step is the oldest policy that computed any of it (None: the
        namespace's). Raises ValueError for positions off the grid or past the pages.
        """
        size = self.cfg.page_size
        num_tokens = len(pages) * size
        if num_tokens > len(tokens):
            raise ValueError(f"pages: {len(pages)} of {size} tokens for {len(tokens)} tokens; insert whole pages only")
        for position in checkpoints:
            if position % self.cfg.grid or not 0 < position <= num_tokens:
                raise ValueError(
                    f"checkpoints: position {position} must be a multiple of grid {self.cfg.grid} within {num_tokens} tokens"
                )
        step = namespace.policy_step if policy_step is None else policy_step
        nodes, taken_pages = self._grow(namespace, tokens, pages, step)

        taken_checkpoints: list[int] = []
        for position, slot in checkpoints.items():
            index = position // size - 1
            if index < len(nodes):
                node = nodes[index]
                if node.checkpoint is None and node.staged_checkpoint is None:
                    self.store.place_checkpoint(node, self.store.checkpoints.hand_over(slot, node))
                    node.policy_step = min(node.policy_step, step)
                    node.checkpoint_reuse = node.checkpoint_reuse.used(self._time, self.cfg.half_life)
                    taken_checkpoints.append(slot)

        self.store.pin(nodes)
        return Inserted(
            pages=tuple(_device_page(node) for node in nodes),
            taken_pages=tuple(taken_pages),
            taken_checkpoints=tuple(taken_checkpoints),
            duplicate_pages=tuple(page for page in pages if page in self.store.pages.lent),
            duplicate_checkpoints=tuple(s for s in checkpoints.values() if s in self.store.checkpoints.lent),
            lock=self._lock(Lock(tuple(nodes), None, (), 0)),
        )

    def _grow(
        self, namespace: Namespace, tokens: Sequence[int], pages: Sequence[int], step: int
    ) -> tuple[list[Node], list[int]]:
        store = self.store
        node = self.roots.setdefault(namespace, Node(None, (), 0, namespace.policy_step))
        nodes: list[Node] = []
        taken: list[int] = []
        for page, key in zip(pages, page_keys(tokens, self.cfg.page_size, len(pages)), strict=True):
            child = node.children.get(key)
            if child is not None and child.staged_page is not None:
                break
            if child is None or child.page is None:
                if page not in store.pages.lent:  # it belongs to a tree that an update dropped
                    break
                if child is None:
                    child = Node(node, key, node.position + self.cfg.page_size, step)
                    child.page_reuse = child.page_reuse.used(self._time, self.cfg.half_life)
                    node.children[key] = child
                child.policy_step = min(child.policy_step, node.policy_step, step)
                store.place_page(child, store.pages.hand_over(page, child))
                taken.append(page)
            nodes.append(child)
            node = child
        return nodes, taken

    # Updating

    def update(self, rule: Literal["drop", "keep", "continue"], old: Namespace, new: Namespace) -> Updated:
        """What becomes of the old namespace's entries when sequences go on under the new one.

        drop: gone, pinned ones when released. keep: reachable under the old key only, until evicted. continue:
        reachable under the new key only, counted as stale. Raises ValueError where `continue` would mix what it must
        not: another tokenizer or tenant, a policy that is not a later one, or a new namespace that has entries of its own.
        """
        self.roots = {namespace: root for namespace, root in self.roots.items() if root.children}
        root = self.roots.get(old)
        num_tokens = 0 if root is None else (sum(1 for _ in below(root)) - 1) * self.cfg.page_size
        if rule == "keep":
            return Updated(0, num_tokens, 0)
        if rule == "drop":
            if root is not None:
                self._drop_tree(self.roots.pop(old))
            return Updated(num_tokens, 0, 0)
        if (old.tokenizer_sha256, old.tenant) != (new.tokenizer_sha256, new.tenant):
            raise ValueError("continue: tokenizer_sha256 and tenant must stay the same; use drop or keep")
        if new.policy_step <= old.policy_step:
            raise ValueError(f"continue: policy_step {new.policy_step} must come after {old.policy_step}; use drop")
        if new in self.roots:
            raise ValueError(f"continue: policy_step {new.policy_step} has entries of its own; update before inserting")
        if root is None:
            return Updated(0, 0, 0)
        root.policy_step = new.policy_step  # it holds no rows, so nothing of it is stale
        self.roots[new] = self.roots.pop(old)
        self.stats.stale_tokens += num_tokens
        return Updated(0, 0, num_tokens)

    def _drop_tree(self, root: Node) -> None:
        stack = [root]
        while stack:
            node = stack.pop()
            for child in list(node.children.values()):
                if child.num_pins:
                    child.is_dying = True
                    stack.append(child)
                self._let_die(child)
        if root.children:
            self.dying_roots.append(root)


def _device_page(node: Node) -> int:
    page = node.page if node.page is not None else node.staged_page
    assert page is not None
    return page


def _device_checkpoint(node: Node) -> int:
    checkpoint = node.checkpoint if node.checkpoint is not None else node.staged_checkpoint
    assert checkpoint is not None
    return checkpoint
