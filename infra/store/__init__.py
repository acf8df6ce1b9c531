"""Bytes by reference, documents and pointers by key: on a disk, in memory or in S3."""

from infra.store.errors import AlreadyCommitted, Conflict, StoreDenied, StoreUnavailable
from infra.store.options import StoreOptions
from infra.store.store import Store

__all__ = ["AlreadyCommitted", "Conflict", "Store", "StoreDenied", "StoreOptions", "StoreUnavailable"]
