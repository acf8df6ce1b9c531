"""Names, shapes and types of a checkpoint's tensors, inside and in the files of the two families.

An internal name has no prefix (`layers.0.self_attn.A_log`, `lm_head.weight`). Three layouts put it into files:

    kimi_k3       language_model.model.layers.N.block_sparse_moe.…   the released wrapper
    kimi_k3_text  model.layers.N.mlp.…                               K3 without the wrapper, as SGLang's text class has it
    kimi_linear   model.layers.N.block_sparse_moe.…

The MLP of a dense layer is written `mlp.` in all of them. On reading, each layer's MLP may be spelled either way:
transformers writes `block_sparse_moe.` for a dense layer too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import torch

from k3core.model.config import MXFP4, MXFP4_GROUP, K3Config
from k3core.model.hf_config import Layout
from k3core.model.precision import stored_dtype

Shape = tuple[int, ...]

FOREIGN = ("vision_tower.", "mm_projector.")  # not of the text model: skipped, and copied through
PACKED, SCALE = ".weight_packed", ".weight_scale"
READABLE_DTYPES = ("F32", "BF16", "F16")
A_LOG_MULTIPLE = 128

_HF = re.compile(r"^(?:language_model\.)?(?:model\.(?!lm_head\.)(.+)|(lm_head\..+))$")
_MLP = re.compile(r"^(layers\.(0|[1-9]\d{0,5})\.)(?:mlp|block_sparse_moe)\.(.+)$")
_EXPERT = re.compile(
    r"^(layers\.\d+\.block_sparse_moe\.experts\.\d+\.w[123])(\.weight|\.weight_packed|\.weight_scale)$"
)
_RUN = re.compile(r"\b(layers|experts)\.(\d{1,6})\.")


def internal_name(hf_name: str, cfg: K3Config) -> str:
    """Tensors of the vision parts keep their own name; one that no layout has becomes `?NAME`, which no model has."""
    if is_foreign(hf_name):
        return hf_name
    match = _HF.match(hf_name)
    if match is None:
        return f"?{hf_name}"
    name: str = match[1] or match[2]
    mlp = _MLP.match(name)
    if mlp is None:
        return name
    spelling = "block_sparse_moe" if cfg.is_moe(int(mlp[2])) else "mlp"
    return f"{mlp[1]}{spelling}.{mlp[3]}"


def is_foreign(name: str) -> bool:
    """Of the vision parts, which the text model knows nothing of."""
    return name.startswith(FOREIGN)


def hf_name(name: str, layout: Layout) -> str:
    """The inverse, as the layout writes it."""
    if layout == "kimi_k3_text":
        name = name.replace(".block_sparse_moe.", ".mlp.")
    if not name.startswith("lm_head."):
        name = f"model.{name}"
    return f"language_model.{name}" if layout == "kimi_k3" else name


def expected_shapes(cfg: K3Config) -> dict[str, Shape]:
    """Every tensor of the model by internal name, in the order in which files are written, with the model's shape.

    Experts are `.weight`, or `.weight_packed` and `.weight_scale` when cfg.expert_quantization is "mxfp4". Raises
    ValueError for a width that cannot be packed.
    """
    D = cfg.hidden_size
    shapes: dict[str, Shape] = {"embed_tokens.weight": (cfg.vocab_size, D)}
    for layer in range(cfg.num_hidden_layers):
        prefix = f"layers.{layer}"
        shapes[f"{prefix}.input_layernorm.weight"] = (D,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (D,)
        if cfg.attn_res_block_size is not None:
            for read in ("self_attention", "mlp"):
                shapes[f"{prefix}.{read}_res_norm.weight"] = (D,)
                shapes[f"{prefix}.{read}_res_proj.weight"] = (1, D)
        attention = _kda_shapes(cfg) if cfg.is_kda(layer) else _mla_shapes(cfg)
        shapes |= {f"{prefix}.self_attn.{name}": shape for name, shape in attention.items()}
        if cfg.is_moe(layer):
            shapes |= {f"{prefix}.block_sparse_moe.{name}": shape for name, shape in _moe_shapes(cfg)}
        else:
            shapes |= dict(_mlp_shapes(f"{prefix}.mlp", D, cfg.intermediate_size))
    if cfg.attn_res_block_size is not None:
        shapes["output_attn_res_norm.weight"] = (D,)
        shapes["output_attn_res_proj.weight"] = (1, D)
    shapes["norm.weight"] = (D,)
    shapes["lm_head.weight"] = (cfg.vocab_size, D)
    return shapes


def _kda_shapes(cfg: K3Config) -> dict[str, Shape]:
    D, H, K = cfg.hidden_size, cfg.kda_num_heads, cfg.kda_head_dim
    P = H * K
    shapes: dict[str, Shape] = {}
    for x in "qkv":
        shapes[f"{x}_proj.weight"] = (P, D)
        shapes[f"{x}_conv1d.weight"] = (P, 1, cfg.short_conv_kernel_size)
    shapes |= {"f_a_proj.weight": (K, D), "f_b_proj.weight": (P, K), "b_proj.weight": (H, D)}
    shapes |= {"A_log": (H,), "dt_bias": (P,)}
    if cfg.use_full_rank_gate:
        shapes["g_proj.weight"] = (P, D)
    else:
        shapes |= {"g_a_proj.weight": (K, D), "g_b_proj.weight": (P, K)}
    return shapes | {"o_norm.weight": (K,), "o_proj.weight": (D, P)}


def _mla_shapes(cfg: K3Config) -> dict[str, Shape]:
    D, H, C = cfg.hidden_size, cfg.num_attention_heads, cfg.kv_lora_rank
    query = H * (cfg.qk_nope_head_dim + cfg.qk_rope_head_dim)
    shapes: dict[str, Shape] = {}
    if cfg.q_lora_rank is None:
        shapes["q_proj.weight"] = (query, D)
    else:
        shapes |= {"q_a_proj.weight": (cfg.q_lora_rank, D), "q_a_layernorm.weight": (cfg.q_lora_rank,)}
        shapes["q_b_proj.weight"] = (query, cfg.q_lora_rank)
    shapes |= {"kv_a_proj_with_mqa.weight": (C + cfg.qk_rope_head_dim, D), "kv_a_layernorm.weight": (C,)}
    shapes["kv_b_proj.weight"] = (H * (cfg.qk_nope_head_dim + cfg.v_head_dim), C)
    if cfg.mla_use_output_gate:
        shapes["g_proj.weight"] = (H * cfg.v_head_dim, D)
    return shapes | {"o_proj.weight": (D, H * cfg.v_head_dim)}


def _moe_shapes(cfg: K3Config) -> Iterator[tuple[str, Shape]]:
    D, F = cfg.hidden_size, cfg.moe_intermediate_size
    width = cfg.routed_expert_hidden_size or D
    yield "gate.weight", (cfg.num_experts, D)
    yield "gate.e_score_correction_bias", (cfg.num_experts,)
    if cfg.routed_expert_hidden_size is not None:
        yield "routed_expert_down_proj.weight", (width, D)
        if cfg.latent_moe_use_norm:
            yield "routed_expert_norm.weight", (width,)
        yield "routed_expert_up_proj.weight", (D, width)
    if cfg.num_shared_experts:
        yield from _mlp_shapes("shared_experts", D, cfg.num_shared_experts * F)
    matrices = (("w1", (F, width)), ("w3", (F, width)), ("w2", (width, F)))
    for expert in range(cfg.num_experts):
        for matrix, (rows, columns) in matrices:
            name = f"experts.{expert}.{matrix}"
            if cfg.expert_quantization is None:
                yield f"{name}.weight", (rows, columns)
                continue
            if cfg.expert_quantization != MXFP4:
                raise ValueError(f"expert_quantization {cfg.expert_quantization!r} is not known; use mxfp4 or none")
            if columns % MXFP4_GROUP:
                raise ValueError(
                    f"{matrix} of the experts has {columns} inputs: mxfp4 packs multiples of {MXFP4_GROUP}"
                )
            yield f"{name}{PACKED}", (rows, columns // 2)
            yield f"{name}{SCALE}", (rows, columns // MXFP4_GROUP)


def _mlp_shapes(prefix: str, hidden: int, width: int) -> Iterator[tuple[str, Shape]]:
    yield f"{prefix}.gate_proj.weight", (width, hidden)
    yield f"{prefix}.up_proj.weight", (width, hidden)
    yield f"{prefix}.down_proj.weight", (hidden, width)


def written_shape(name: str, shape: Shape, layout: Layout) -> Shape:
    """In a file: K3's A_log is padded with zeros to a multiple of 128, Kimi-Linear's is [1, 1, H, 1]."""
    if not name.endswith("A_log"):
        return shape
    return (1, 1, shape[0], 1) if layout == "kimi_linear" else (_padded(shape[0]),)


def readable_shapes(name: str, shape: Shape) -> tuple[Shape, ...]:
    """Every shape in a file that holds a tensor of the model's `shape`."""
    if not name.endswith("A_log"):
        return (shape,)
    (heads,) = shape
    return tuple(dict.fromkeys([(heads,), (1, 1, heads, 1), (_padded(heads),)]))


def _padded(heads: int) -> int:
    return -(-heads // A_LOG_MULTIPLE) * A_LOG_MULTIPLE


def is_packed(name: str) -> bool:
    """Codes or scales of a packed matrix: bytes, where every other tensor holds floating point numbers."""
    return name.endswith((PACKED, SCALE))


def written_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """In a file of type `dtype`: what the model keeps in fp32 is stored so, codes and scales are bytes."""
    return torch.uint8 if is_packed(name) else stored_dtype(name, dtype)


def expert_matrix(name: str) -> str | None:
    """`layers.1.block_sparse_moe.experts.0.w1` of its .weight, .weight_packed or .weight_scale; None for all others."""
    match = _EXPERT.match(name)
    return match[1] if match else None


def collapse(names: Iterable[str]) -> list[str]:
    """The same names in few lines: `layers.{1-3}.block_sparse_moe.experts.{0-7}.w1.weight` stands for 24 of them."""
    lines = list(dict.fromkeys(names))
    for counter in ("experts", "layers"):
        groups: dict[str, list[int]] = {}
        for name in lines:
            match = next((m for m in _RUN.finditer(name) if m[1] == counter), None)
            # A number written in another way (007) stays as it is.
            if match is None or str(int(match[2])) != match[2]:
                groups.setdefault(name, [])
                continue
            groups.setdefault(f"{name[: match.start(2)]}\0{name[match.end(2) :]}", []).append(int(match[2]))
        lines = [key.replace("\0", _ranges(numbers)) for key, numbers in groups.items()]
    return lines


def _ranges(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return "{" + ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) + "}"
