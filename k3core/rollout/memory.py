"""The engine's memory: which sequence has which slot and pages, and what the prefix cache keeps of the others.

The cache decides over numbers, the state holds the tensors; this carries the one's decisions out on the other. What a
running sequence holds is its lease; what it gives back stays in the tree until room is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from k3core.model.config import K3Config
from k3core.model.state import PAGE, Histories, SlotState
from k3core.rollout.prefix_cache import CacheConfig, Copy, Namespace, PrefixCache
from k3core.rollout.protocol import UpdateRule
from k3core.rollout.scheduling import Free


@dataclass(frozen=True, slots=True)
class MemorySizes:
    """How much an engine holds. None: enough that every slot can be full twice over, and no host memory.

    Pages have page_size tokens; checkpoints stand at multiples of `grid`, which is a multiple of page_size.
    """

    page_size: int = PAGE
    grid: int = PAGE
    num_pages: int | None = None
    num_checkpoints: int | None = None
    num_host_pages: int = 0
    num_host_checkpoints: int = 0


@dataclass(slots=True)
class Lease:
    """What a running sequence holds: pages from token 0 on, those in `owned` its own and the others the tree's, pinned
    by `locks`; checkpoints by position, not in the tree yet. num_cached tokens stood there when it began, and
    oldest_step is the oldest policy that computed any of it."""

    slot: int
    namespace: Namespace
    pages: list[int]
    owned: set[int]
    locks: list[int]
    num_cached: int
    oldest_step: int
    num_pinned: int = 0
    checkpoints: dict[int, int] = field(default_factory=dict)


class EngineMemory:
    """Slots, pages, checkpoints and, beside the pages, the experts that each token was routed to."""

    def __init__(
        self,
        cfg: K3Config,
        num_slots: int,
        max_length: int,
        sizes: MemorySizes,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        pages_per_slot = -(-max_length // sizes.page_size)
        num_pages = sizes.num_pages or 2 * num_slots * pages_per_slot
        num_checkpoints = sizes.num_checkpoints or 4 * num_slots
        self.state = SlotState(
            cfg, num_slots, max_length, dtype, device, num_pages, num_checkpoints, page_size=sizes.page_size
        )
        is_pinned = torch.device(device).type == "cuda"
        self.host = Histories.empty(
            *(cfg, sizes.num_host_pages, sizes.num_host_checkpoints, sizes.page_size, dtype, "cpu", is_pinned)
        )
        self.cache_config = CacheConfig(
            page_size=sizes.page_size,
            grid=sizes.grid,
            num_pages=num_pages,
            num_checkpoints=num_checkpoints,
            num_host_pages=sizes.num_host_pages,
            num_host_checkpoints=sizes.num_host_checkpoints,
            page_bytes=max(1, self.state.slots.page_bytes),
            checkpoint_bytes=max(1, self.state.checkpoints.state_bytes),
        )
        self.cache = PrefixCache(self.cache_config)
        self.route_dtype = np.uint8 if cfg.num_experts < 255 else np.uint16
        routes = (sizes.page_size, len(cfg.routed_layers), cfg.num_experts_per_token)
        self._routes = np.zeros((num_pages, *routes), self.route_dtype)
        self._host_routes = np.zeros((sizes.num_host_pages, *routes), self.route_dtype)
        self._free_slots = list(range(num_slots))
        self._leases: list[Lease] = []

    @property
    def grid(self) -> int:
        return self.cache_config.grid

    @property
    def free(self) -> Free:
        """What can be leased: all that no lease counts as its own. A page that two share is counted twice."""
        held = sum(len(lease.pages) for lease in self._leases)
        return Free(max(0, self.cache_config.num_pages - held), len(self._free_slots))

    @property
    def num_slots_used(self) -> int:
        """Up to and including the highest slot in use."""
        return max((lease.slot for lease in self._leases), default=-1) + 1

    # Leases

    def take(self, namespace: Namespace, tokens: Sequence[int], num_pages: int) -> tuple[Lease, int | None]:
        """A slot that stands at the longest cached prefix of `tokens`, with num_pages pages, and where a checkpoint is
        worth planning. The caller has seen in `free` that there is room."""
        match = self.cache.match(namespace, tokens)
        self._perform(match.copies)
        if match.is_staged:
            self.cache.restored(match.lock, match.copies)
        slot = min(self._free_slots)
        self._free_slots.remove(slot)
        pages = list(match.pages)
        lease = Lease(slot, namespace, pages, set(), [match.lock], match.num_tokens, match.oldest_step, len(pages))
        self._leases.append(lease)
        self.state.reset(slot)
        self._add_pages(lease, num_pages - len(pages))
        if match.checkpoint is not None:
            self.state.restore(match.checkpoint, slot, match.num_tokens)
        return lease, match.branch_target

    def grow(self, lease: Lease) -> None:
        self._add_pages(lease, 1)

    def lend_checkpoint(self, lease: Lease, position: int) -> int | None:
        """Where the state at `position`, a multiple of the grid, is to be kept; None when all are in use."""
        if position in lease.checkpoints:
            return None
        allocation = self.cache.allocate_checkpoint()
        if allocation is None:
            return None
        self._perform(allocation.copies)
        lease.checkpoints[position] = allocation.ids[0]
        return allocation.ids[0]

    def roll_checkpoint(self, lease: Lease, position: int) -> None:
        """Keep the slot's state, which stands at `position`, in place of the last one that the tree does not have."""
        if lease.checkpoints:
            lease.checkpoints = {position: lease.checkpoints.pop(max(lease.checkpoints)), **lease.checkpoints}
            checkpoint: int | None = lease.checkpoints[position]
        else:
            checkpoint = self.lend_checkpoint(lease, position)
        if checkpoint is not None:
            self.state.save(lease.slot, checkpoint)

    def share(self, lease: Lease, tokens: Sequence[int]) -> None:
        """Put the whole pages of `tokens`, all computed, and the checkpoints into the tree, where others find them."""
        num_pages = len(tokens) // self.cache_config.page_size
        pages = lease.pages[:num_pages]
        reached = num_pages * self.cache_config.page_size
        checkpoints = {position: slot for position, slot in lease.checkpoints.items() if position <= reached}
        if not pages or (num_pages == lease.num_pinned and not checkpoints):
            return
        inserted = self.cache.insert(lease.namespace, tokens, pages, checkpoints, lease.oldest_step)
        lease.owned -= set(inserted.taken_pages)
        num_in_tree = len(inserted.pages)
        if list(inserted.pages) != pages[:num_in_tree]:
            lease.pages[:num_in_tree] = inserted.pages
            self.state.set_pages(lease.slot, lease.pages)
        replaced = lease.owned.intersection(inserted.duplicate_pages).difference(lease.pages)
        self.cache.free_pages(sorted(replaced))
        lease.owned -= replaced
        for position, slot in checkpoints.items():
            del lease.checkpoints[position]
            if slot in inserted.duplicate_checkpoints:
                self.cache.free_checkpoint(slot)
        if num_in_tree >= lease.num_pinned:  # the new lock pins all that the older ones did
            for lock in lease.locks:
                self.cache.release(lock)
            lease.locks, lease.num_pinned = [inserted.lock], num_in_tree
        else:
            lease.locks.append(inserted.lock)

    def give_back(self, lease: Lease, tokens: Sequence[int] = ()) -> None:
        """Slot, pages and checkpoints; what was computed of `tokens` stays in the tree."""
        self.share(lease, tokens)
        for lock in lease.locks:
            self.cache.release(lock)
        self.cache.free_pages(sorted(lease.owned))
        for slot in lease.checkpoints.values():
            self.cache.free_checkpoint(slot)
        self._leases.remove(lease)
        self._free_slots.append(lease.slot)

    def close_ranks(self, num_slots: int) -> None:
        """Move leases into the first num_slots slots, where there is room for all of them."""
        for lease in self._leases:
            if lease.slot >= num_slots:
                target = min(self._free_slots)
                self.state.move(lease.slot, target)
                self._free_slots[self._free_slots.index(target)] = lease.slot
                lease.slot = target

    # Updates

    def update(self, rule: UpdateRule, new: Mapping[Namespace, Namespace]) -> None:
        """The histories of each old namespace, by the rule; leases, which `continue` keeps, go along."""
        for old, namespace in new.items():
            self.cache.update(rule, old, namespace)
        for lease in self._leases:
            lease.namespace = new.get(lease.namespace, lease.namespace)

    def forget(self) -> None:
        """Everything: after a fault nobody knows what the tensors hold. No lease may be left."""
        assert not self._leases
        self.cache = PrefixCache(self.cache_config)
        self.state.forget()

    # Routes

    def write_routes(self, lease: Lease, start: int, routes_TLk: np.ndarray) -> None:
        pages, offsets = self._places(lease, start, len(routes_TLk))
        self._routes[pages, offsets] = routes_TLk

    def write_step_routes(self, leases: Sequence[Lease], positions: Sequence[int], routes_NLk: np.ndarray) -> None:
        """One token of each of N sequences, each at its own position."""
        size = self.cache_config.page_size
        pages = [lease.pages[position // size] for lease, position in zip(leases, positions, strict=True)]
        self._routes[pages, np.array(positions) % size] = routes_NLk

    def read_routes(self, lease: Lease, num_tokens: int) -> np.ndarray:
        pages, offsets = self._places(lease, 0, num_tokens)
        return self._routes[pages, offsets]

    def _places(self, lease: Lease, start: int, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
        positions = np.arange(start, start + num_tokens)
        size = self.cache_config.page_size
        return np.array(lease.pages)[positions // size], positions % size

    def _add_pages(self, lease: Lease, num_pages: int) -> None:
        allocation = self.cache.allocate_pages(num_pages)
        assert allocation is not None, f"{num_pages} pages were promised and are not there"
        self._perform(allocation.copies)
        lease.owned.update(allocation.ids)
        lease.pages += allocation.ids
        self.state.set_pages(lease.slot, lease.pages)

    def _perform(self, copies: Iterable[Copy]) -> None:
        """In order, on the device's stream: a copy out is made before what replaces it is written."""
        device, host, kept = self.state.slots, self.host, self.state.checkpoints
        for copy in copies:
            is_out = copy.direction == "to_host"
            if copy.kind == "page":
                pairs = [(device.pages_PLSC, host.pages_PLSC)]
                source, target = (self._routes, self._host_routes) if is_out else (self._host_routes, self._routes)
                target[copy.target] = source[copy.source]
            else:
                pairs = [(kept.states_NLHKV, host.states_NLHKV), (kept.windows_NLJP, host.windows_NLJP)]
            for on_device, on_host in pairs:
                a, b = (on_device, on_host) if is_out else (on_host, on_device)
                b[copy.target].copy_(a[copy.source], non_blocking=True)


def stepped(namespaces: Iterable[Namespace], old: int, base_sha256: str, step: int) -> dict[Namespace, Namespace]:
    """Where each namespace of policy step `old` goes on under other weights."""
    return {n: replace(n, base_sha256=base_sha256, policy_step=step) for n in namespaces if n.policy_step == old}
