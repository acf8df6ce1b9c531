"""Multi-head latent attention."""

from k3kernels.mla.eager import mla_attention_from_start as mla_attention_from_start
from k3kernels.mla.latent import KEYS as KEYS
from k3kernels.mla.latent import absorb_queries as absorb_queries
from k3kernels.mla.latent import attend_latent as attend_latent
from k3kernels.mla.latent import unabsorb as unabsorb
