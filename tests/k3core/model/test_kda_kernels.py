"""The KDA layer between its projections, in the kernels that a trainer's gradient runs in on a GPU: here interpreted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from k3core.model.config import K3Config
from k3core.model.kda import KimiDeltaAttention
from k3kernels.kda.chunk.table import ROWS
from k3kernels.packing import Packing
from k3kernels.rms_norm import eager
from k3kernels.rms_norm import triton as kernels

Form = Callable[..., Tensor]

LENGTHS = (1, ROWS + 3, 2)
CFG = K3Config(hidden_size=32, kda_num_heads=2, kda_head_dim=16)


def of_the_layer(layer: KimiDeltaAttention, x_TD: Tensor, form: Form, gated_norm: Form) -> list[Tensor]:
    """The layer's output in that form, and the gradients of x and of all parameters."""
    x_TD = x_TD.detach().requires_grad_()
    qkv_TP = torch.cat([layer.q_proj(x_TD), layer.k_proj(x_TD), layer.v_proj(x_TD)], -1)
    o_THV = form(Packing(LENGTHS), qkv_TP, *layer._raw_gates(x_TD))
    gate_THV = layer.g_proj(x_TD).view(o_THV.shape)
    out_TD = layer.o_proj(gated_norm(o_THV, gate_THV, layer.o_norm.weight, layer.cfg.rms_norm_eps).flatten(1))
    wanted = [x_TD, *layer.parameters()]
    return [out_TD, *torch.autograd.grad(out_TD.square().sum(), wanted)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="in fp32, which the kernels take in the interpreter alone")
def test_the_layers_kernels_have_the_values_and_gradients_of_its_eager_form() -> None:
    generator = torch.Generator().manual_seed(0)
    layer = KimiDeltaAttention(CFG, 0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    x_TD = torch.randn(sum(LENGTHS), CFG.hidden_size, generator=generator)
    got = of_the_layer(layer, x_TD, layer._chunk_kernels, kernels.gated_rms_norm)
    want = of_the_layer(layer, x_TD, layer._chunked, eager.gated_rms_norm)
    for each, other in zip(got, want, strict=True):
        assert (each - other).norm() <= 1e-5 * other.norm(), each.shape
