"""The `quantization_config` of a config.json: MXFP4 of the routed experts, as compressed-tensors writes it, or nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from k3core.model.config import MXFP4_GROUP
from k3core.model.hf_keys import show

METHOD, FORMAT = "compressed-tensors", "mxfp4-pack-quantized"
SCALE_DTYPE = "torch.uint8"  # E8M0: a power of two

_ONLY = f"only {METHOD} {FORMAT} can be read: 4-bit float in groups of {MXFP4_GROUP}, one uint8 scale each"

# Of the weights of each group; a value that may be left out is written as a pair with None.
_WEIGHTS: dict[str, tuple[object, ...]] = {
    "num_bits": (4,),
    "type": ("float",),
    "group_size": (MXFP4_GROUP,),
    "strategy": ("group", None),
    "symmetric": (True, None),
    "dynamic": (False, None),
    "scale_dtype": (SCALE_DTYPE, "uint8", None),
    "actorder": (None, False),
    "block_structure": (None,),
}


def mxfp4_block() -> dict[str, Any]:
    """The block as released. Of the `ignore` list no loader takes the truth: what is packed has a `weight_packed`."""
    return {
        "quant_method": METHOD,
        "format": FORMAT,
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "config_groups": {
            "group_0": {
                "format": FORMAT,
                "targets": ["Linear"],
                "input_activations": None,
                "output_activations": None,
                "weights": {
                    "num_bits": 4,
                    "type": "float",
                    "strategy": "group",
                    "group_size": MXFP4_GROUP,
                    "symmetric": True,
                    "dynamic": False,
                    "scale_dtype": SCALE_DTYPE,
                    "actorder": None,
                    "block_structure": None,
                },
            }
        },
        "ignore": [
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
            "re:.*lm_head.*",
            "re:.*vision_tower.*",
            "re:.*mm_projector.*",
        ],
    }


def mxfp4_problem(block: object, where: str) -> str | None:
    """One line that names everything in the block that is not MXFP4 of the released form; None when it is."""
    if not isinstance(block, Mapping):
        return f"{where}: found {show(block)}: {_ONLY}"
    found = list(_faults(block))
    return f"{where}: found {', '.join(found)}: {_ONLY}" if found else None


def _faults(block: Mapping[str, Any]) -> Iterator[str]:
    if block.get("quant_method") != METHOD:
        yield f"quant_method {show(block.get('quant_method'))}"
        return
    if block.get("quantization_status", "compressed") != "compressed":
        yield f"quantization_status {show(block['quantization_status'])}"
    for key in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        if block.get(key):
            yield f"a {key}"
    groups = block.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        yield f"config_groups {show(groups)}"
        return
    for name, group in groups.items():
        if not isinstance(group, Mapping):
            yield f"{name} {show(group)}"
            continue
        form = group.get("format") or block.get("format")
        if form != FORMAT:
            yield f"{name} of format {show(form)}"
        for key in ("input_activations", "output_activations"):
            if group.get(key) is not None:
                yield f"{name} with {key}"
        weights = group.get("weights")
        if not isinstance(weights, Mapping):
            yield f"{name}.weights {show(weights)}"
            continue
        for key, allowed in _WEIGHTS.items():
            value = weights.get(key)
            if not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in allowed):
                yield f"{name}.weights.{key} {show(value)}"
