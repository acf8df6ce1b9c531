"""Which operation of a model a GPU kernel belongs to, by its name."""

from __future__ import annotations

import re

OTHERS = "element by element, copies"
OPERATIONS = {
    "experts' products": r"products_kernel|gated_rows_kernel|rows_product|weights_gradient|grouped|gate_up_kernel|GroupP",
    "KDA": r"kda_",
    "MLA attention": r"cudnn|flash|sdpa|mla_|fmha|merge_splits",
    "Attention Residuals": r"attn_res",
    "norms": r"norm",
    "convolution": r"conv",
    "activation": r"gated_activation|gated_kernel|gated_gradient",
    "routing, staging, combining": r"stage|combine|bucket|sort|Sort|topk|Topk|radix|scan|searchsorted|tiles_kernel|route_kernel|gather",
    "vocabulary": r"logprob|logits|merge_kernel|align_kernel|slope",
    "AdamW": r"multi_tensor|adam|Adam",
    "dense products": r"gemm|cutlass|nvjet|cublas|splitK|linear_kernel",
}


def operation_of(kernel: str) -> str:
    return next((name for name, pattern in OPERATIONS.items() if re.search(pattern, kernel)), OTHERS)
