"""Kimi Delta Attention."""

from k3kernels.kda.eager import kda_chunked as kda_chunked
from k3kernels.kda.reference import kda_gate as kda_gate
from k3kernels.kda.reference import kda_recurrent as kda_recurrent
from k3kernels.kda.reference import kda_step as kda_step
from k3kernels.kda.reference import l2_norm as l2_norm
