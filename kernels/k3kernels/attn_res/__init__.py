"""Attention Residuals."""

from k3kernels.attn_res.eager import attn_res_mix as attn_res_mix
