"""Kimi Delta Attention."""

from k3kernels.kda.aligned import CHUNK as CHUNK
from k3kernels.kda.aligned import ChunkRows as ChunkRows
from k3kernels.kda.aligned import kda_aligned as kda_aligned
from k3kernels.kda.aligned import kda_aligned_from as kda_aligned_from
from k3kernels.kda.aligned import kda_aligned_step as kda_aligned_step
from k3kernels.kda.eager import kda_chunked as kda_chunked
from k3kernels.kda.reference import kda_gate as kda_gate
from k3kernels.kda.reference import kda_recurrent as kda_recurrent
from k3kernels.kda.reference import l2_norm as l2_norm
