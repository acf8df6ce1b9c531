"""Multi-head latent attention."""

from k3kernels.mla.eager import mla_attention as mla_attention
from k3kernels.mla.eager import mla_attention_from_start as mla_attention_from_start
from k3kernels.mla.reference import mla_absorbed as mla_absorbed
