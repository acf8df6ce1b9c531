"""Prefix cache of a hybrid engine: one tree whose nodes own MLA pages and, at single positions, KDA checkpoints.

Pure decisions over ids: the engine owns the tensors and carries the returned copies out.
"""

from k3core.rollout.prefix_cache.audit import audit
from k3core.rollout.prefix_cache.cache import PrefixCache
from k3core.rollout.prefix_cache.ceiling import HitCeiling, hit_ceiling
from k3core.rollout.prefix_cache.config import CacheConfig, Namespace
from k3core.rollout.prefix_cache.results import Allocation, Copy, HalfRestoreError, Inserted, Match, Updated
from k3core.rollout.prefix_cache.stats import CacheStats

__all__ = [
    "Allocation",
    "CacheConfig",
    "CacheStats",
    "Copy",
    "HalfRestoreError",
    "HitCeiling",
    "Inserted",
    "Match",
    "Namespace",
    "PrefixCache",
    "Updated",
    "audit",
    "hit_ceiling",
]
