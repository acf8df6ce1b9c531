"""What the engine keeps of each sequence: MLA history, KDA state and convolution window, all at one position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from k3core.model.config import K3Config
from k3kernels.dtypes import wider
from k3kernels.kda import CHUNK, ChunkRows
from k3kernels.kda.aligned import Places
from k3kernels.mla import KEYS

if TYPE_CHECKING:
    from k3kernels.kda.triton import KdaPool

PAGE = CHUNK  # tokens of a page unless told otherwise


@dataclass(frozen=True)
class Histories:
    """Both histories of every layer, by entry: P pages of latent rows and N recurrent states with their windows.

    pages_PLSC [pages, MLA layers, page size, C]: one entry is one contiguous piece of memory, which is how it travels
    to the host and back. states_NLHKV in the next wider type, windows_NLJP: the last J-1 inputs of the convolution (q|k|v).
    """

    pages_PLSC: Tensor
    states_NLHKV: Tensor
    windows_NLJP: Tensor

    @staticmethod
    def empty(
        cfg: K3Config,
        num_pages: int,
        num_states: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        pin_memory: bool = False,
        by_layer: bool = False,
    ) -> Histories:
        """by_layer: the states of all sequences in a layer are one piece, which is how a step multiplies by them."""
        H, K, J = cfg.kda_num_heads, cfg.kda_head_dim, cfg.short_conv_kernel_size
        num_kda = sum(cfg.is_kda(layer) for layer in range(cfg.num_hidden_layers))
        num_mla = cfg.num_hidden_layers - num_kda

        def zeros(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device, pin_memory=pin_memory)

        outer = (num_kda, num_states) if by_layer else (num_states, num_kda)
        states = zeros(*outer, H, K, K, dtype=wider(dtype))
        return Histories(
            zeros(num_pages, num_mla, page_size, cfg.kv_lora_rank + cfg.qk_rope_head_dim),
            states.transpose(0, 1) if by_layer else states,
            zeros(num_states, num_kda, J - 1, 3 * H * K),
        )

    @property
    def page_bytes(self) -> int:
        return self.pages_PLSC[0].numel() * self.pages_PLSC.itemsize

    @property
    def state_bytes(self) -> int:
        parts = (self.states_NLHKV, self.windows_NLJP)
        return sum(part[0].numel() * part.itemsize for part in parts)


@dataclass(frozen=True, slots=True)
class Emit:
    """Number n of a prefill's sequences passes `position`, a multiple of CHUNK at most its end: keep the state there."""

    n: int
    position: int
    checkpoint: int


class SlotState:
    """Histories of up to `num_slots` sequences of up to `max_length` tokens.

    kda_NHKV[layer] the recurrent state at the start of the chunk in which the slot stands, in the next wider type;
    chunk_rows[layer] what it has seen of that chunk (on a GPU in kda_pool[layer]); window_NJP[layer] the last J-1 inputs
    of the convolution (q|k|v), pages_PSC[layer] latent rows (kv_lora_rank | rope width), of which those of slot n at
    position p are in page table_NM[n, p // page_size]. length_N counts the tokens that all of them have seen: there is one
    position per slot, so they cannot come apart. All lie on `device`, the model's; dtype is that of its activations.

    Without num_pages every slot owns its pages; with it `set_pages` says whose they are. `checkpoints` holds states that
    stand at a chunk's start, by number: `save` and `restore` copy a slot's there and back.
    """

    def __init__(
        self,
        cfg: K3Config,
        num_slots: int,
        max_length: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        num_pages: int | None = None,
        num_checkpoints: int = 0,
        page_size: int = PAGE,
    ) -> None:
        assert page_size % KEYS == 0 or KEYS % page_size == 0, page_size
        self.num_slots, self.max_length, self.page_size = num_slots, max_length, page_size
        self.read_size = max(KEYS, page_size)  # rows are read in multiples of this
        max_pages = -(-max_length // self.read_size) * self.read_size // page_size
        owned = torch.arange(num_slots * max_pages, device=device).view(num_slots, max_pages)
        self.table_NM = owned if num_pages is None else torch.zeros_like(owned)
        is_gpu = torch.device(device).type == "cuda"
        # On a GPU one page more, for rows that take no part: to leave them out it would have to be asked who they are.
        sizes = ((num_pages or owned.numel()) + is_gpu, num_slots, page_size)
        self.slots = Histories.empty(cfg, *sizes, dtype, device, by_layer=True)
        self.checkpoints = Histories.empty(cfg, 0, num_checkpoints, page_size, dtype, device)
        self._kda_index: dict[int, int] = {}
        self.kda_NHKV: dict[int, Tensor] = {}
        self.chunk_rows: dict[int, ChunkRows] = {}
        self.kda_pool: dict[int, KdaPool] = {}
        self.window_NJP: dict[int, Tensor] = {}
        self.pages_PSC: dict[int, Tensor] = {}
        for layer in range(cfg.num_hidden_layers):
            if cfg.is_kda(layer):
                n = self._kda_index[layer] = len(self._kda_index)
                self.kda_NHKV[layer] = self.slots.states_NLHKV[:, n]
                self.window_NJP[layer] = self.slots.windows_NLJP[:, n]
                H, K = cfg.kda_num_heads, cfg.kda_head_dim
                if is_gpu:
                    self.kda_pool[layer] = _pool_of(self.kda_NHKV[layer], dtype)
                    continue
                shape = (num_slots, H, CHUNK, K)
                rows = [torch.zeros(shape, dtype=wider(dtype), device=device) for _ in range(4)]
                self.chunk_rows[layer] = ChunkRows(*rows)
            else:
                self.pages_PSC[layer] = self.slots.pages_PLSC[:, len(self.pages_PSC)]
        self.length_N = torch.zeros(num_slots, dtype=torch.long, device=device)
        self._heads = cfg.kda_num_heads, cfg.kda_head_dim

    def places(self, is_active_N: Tensor) -> Places:
        """Of the first N slots, for a step in which those take part that are active."""
        return Places.of(self.length_N[: len(is_active_N)], is_active_N, *self._heads)

    def latent_rows(self, layer: int, which: Tensor | slice | int, num_tokens: int) -> Tensor:
        """The first num_tokens rows and perhaps more, a multiple of KEYS: [N, S, C], or [S, C] of one slot."""
        pages = self.table_NM[which, : -(-num_tokens // self.read_size) * self.read_size // self.page_size]
        pages_PSC = self.pages_PSC[layer]
        rows_PX = pages_PSC.flatten(1).index_select(0, pages.flatten())  # a page is one piece: by far the fastest
        return rows_PX.view(*pages.shape[:-1], pages.shape[-1] * self.page_size, pages_PSC.shape[-1])

    def write_latent(self, layer: int, slots_T: Tensor, positions_T: Tensor, rows_TC: Tensor) -> None:
        pages_T = self.table_NM[slots_T, positions_T // self.page_size]
        self.pages_PSC[layer][pages_T, positions_T % self.page_size] = rows_TC

    def set_pages(self, slot: int, pages: Sequence[int]) -> None:
        """Rows from position 0 on lie in these pages."""
        self.table_NM[slot, : len(pages)] = torch.tensor(pages, device=self.table_NM.device)

    def save(self, slot: int, checkpoint: int) -> None:
        """The slot, which stands at a chunk's start, as a checkpoint; its pages are not copied."""
        self.checkpoints.states_NLHKV[checkpoint] = self.slots.states_NLHKV[slot]
        self.checkpoints.windows_NLJP[checkpoint] = self.slots.windows_NLJP[slot]

    def save_layer(self, layer: int, checkpoint: int, state_HKV: Tensor, window_JP: Tensor) -> None:
        self.checkpoints.states_NLHKV[checkpoint, self._kda_index[layer]] = state_HKV
        self.checkpoints.windows_NLJP[checkpoint, self._kda_index[layer]] = window_JP

    def checkpoints_of(self, layer: int) -> tuple[Tensor, Tensor]:
        """States and windows of a KDA layer."""
        n = self._kda_index[layer]
        return self.checkpoints.states_NLHKV[:, n], self.checkpoints.windows_NLJP[:, n]

    def restore(self, checkpoint: int, slot: int, length: int) -> None:
        """The checkpoint, which stands at `length`, into a slot whose pages are set."""
        assert length % CHUNK == 0, length
        self.slots.states_NLHKV[slot] = self.checkpoints.states_NLHKV[checkpoint]
        self.slots.windows_NLJP[slot] = self.checkpoints.windows_NLJP[checkpoint]
        self.length_N[slot] = length

    def move(self, source: int, target: int) -> None:
        """The history of one slot into another, whose own is lost, and its pages with it."""
        for rows in self.chunk_rows.values():
            rows.write(torch.tensor([target]), rows.of(torch.tensor([source])))
        for per_slot in (self.slots.states_NLHKV, self.slots.windows_NLJP, self.table_NM, self.length_N):
            per_slot[target] = per_slot[source].clone()

    def reset(self, slot: int) -> None:
        """Make a slot an empty history. Rows behind the length weigh 0 in a batch, whatever they hold, if it is finite."""
        self.slots.states_NLHKV[slot] = 0
        self.slots.windows_NLJP[slot] = 0
        self.length_N[slot] = 0

    def forget(self) -> None:
        """Zeros everywhere: after a fault what lies in pages and states may be NaN, and 0 times NaN is NaN."""
        for tensor in (*self._tensors(), self.length_N):
            tensor.zero_()

    def _tensors(self) -> list[Tensor]:
        kept = [x for h in (self.slots, self.checkpoints) for x in (h.pages_PLSC, h.states_NLHKV, h.windows_NLJP)]
        pools = [x for pool in self.kda_pool.values() for x in (pool.k, pool.G, pool.u)]
        return [*kept, *pools, *(x for rows in self.chunk_rows.values() for x in rows.tensors())]


def _pool_of(states_NHKV: Tensor, dtype: torch.dtype) -> KdaPool:
    from k3kernels.kda.triton import KdaPool  # where there is no GPU, Triton need not be installed

    N, H, K, V = states_NHKV.shape

    def rows(width: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(N, CHUNK, H, width, dtype=dtype, device=states_NHKV.device)

    return KdaPool(states_NHKV, rows(K, dtype), rows(K, states_NHKV.dtype), rows(V, states_NHKV.dtype))
