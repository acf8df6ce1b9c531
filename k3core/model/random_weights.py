"""Random weights tensor by tensor, so that a model larger than the memory can be written to a disk."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from k3core.checkpoint.names import expected_shapes, written_dtype
from k3core.model.config import K3Config

EMBEDDING_STD = 0.3
SLOWEST, FASTEST = 1e-3, 0.3  # log decay of a token, at a raw gate of zero
WRITERS = ("o_proj.weight", "down_proj.weight", "routed_expert_up_proj.weight")


def random_tensors(
    cfg: K3Config, seed: int, dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu"
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the model by internal name, experts not packed; each depends on (seed, name, shape) alone.

    As a model from scratch starts, without the copying that a small one is given: linears 1/sqrt(in), what writes into
    the residual stream further by 1/sqrt(2 L), uniform AttnRes reads, decays log-uniform.
    """
    for name, shape in expected_shapes(replace(cfg, expert_quantization=None)).items():
        digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
        generator = torch.Generator(device).manual_seed(int.from_bytes(digest, "little"))
        tensor = torch.empty(shape, dtype=written_dtype(name, dtype), device=device)
        yield name, _fill(tensor, name, cfg, generator)


def _fill(tensor: Tensor, name: str, cfg: K3Config, generator: torch.Generator) -> Tensor:
    if name.endswith(("A_log", "res_proj.weight", "e_score_correction_bias")):
        return tensor.zero_()
    if name.endswith("conv1d.weight"):
        return tensor.uniform_(-0.5, 0.5, generator=generator)
    if name.endswith("dt_bias"):
        decay = tensor.uniform_(math.log(SLOWEST), math.log(FASTEST), generator=generator).exp()
        bound = cfg.gate_lower_bound
        return torch.log(torch.expm1(decay)) if bound is None else torch.logit(decay / -bound)
    if tensor.ndim == 1:
        return tensor.fill_(1.0)
    std = EMBEDDING_STD if name == "embed_tokens.weight" else tensor.shape[-1] ** -0.5
    if name.endswith(WRITERS):
        std *= (2 * cfg.num_hidden_layers) ** -0.5
    return tensor.normal_(0.0, std, generator=generator)
