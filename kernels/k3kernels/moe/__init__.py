"""LatentMoE: router and experts."""

from k3kernels.moe.eager import moe_experts as moe_experts
from k3kernels.moe.reference import route as route
