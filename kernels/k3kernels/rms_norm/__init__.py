"""RMSNorm, plain and gated."""

from k3kernels.rms_norm.eager import gated_rms_norm as gated_rms_norm
from k3kernels.rms_norm.eager import rms_norm as rms_norm
