"""Before any test module is imported: one thread, no telemetry, and Triton's interpreter where there is no GPU."""

from __future__ import annotations

import os
import sys
import weakref
from pathlib import Path
from typing import Any

os.environ.update(
    OMP_NUM_THREADS="1",
    PREFECT_SERVER_ANALYTICS_ENABLED="false",
    DO_NOT_TRACK="true",
    MLFLOW_DISABLE_TELEMETRY="true",
    HF_HUB_OFFLINE="1",
)

import pytest
import torch
from hypothesis import settings
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# A deadline per example measures the machine, not the code.
settings.register_profile("k3rl", deadline=None)
settings.load_profile("k3rl")

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read while triton is imported, and torch has not imported it yet
# pytest puts this folder on the path, where tests/k3core would hide the package of that name.
sys.path = [path for path in sys.path if path != str(Path(__file__).parent)]


class Allocations(TorchDispatchMode):
    """Bytes of the tensors that operations inside it made: those alive, and the most that were alive at a time.

    What an operation takes and frees within itself is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in self._known:  # made outside
                self._know(leaf.untyped_storage(), 0)
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in self._known:
                self._know(leaf.untyped_storage(), 0 if leaf.is_meta else leaf.untyped_storage().nbytes())
        return out

    def _know(self, storage: torch.UntypedStorage, size_bytes: int) -> None:
        self._known.add(storage._cdata)
        self.live_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._freed, storage._cdata, size_bytes)

    def _freed(self, key: int, size_bytes: int) -> None:
        self._known.discard(key)
        self.live_bytes -= size_bytes


@pytest.fixture
def allocations() -> Allocations:
    return Allocations()
