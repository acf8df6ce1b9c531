"""LatentMoE: router and experts."""

from k3kernels.moe.eager import moe_experts as moe_experts
from k3kernels.moe.matrices import NO_LORA as NO_LORA
from k3kernels.moe.matrices import ExpertLora as ExpertLora
from k3kernels.moe.matrices import LoraPair as LoraPair
from k3kernels.moe.matrices import Matrices as Matrices
from k3kernels.moe.matrices import PackedMatrices as PackedMatrices
from k3kernels.moe.reference import route as route
