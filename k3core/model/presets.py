"""Models by name."""

from __future__ import annotations

from k3core.model.config import K3Config
from k3core.model.hf_config import from_hf
from k3core.model.hf_released import kimi_k3, kimi_linear

PRESETS: dict[str, K3Config] = {
    "tiny": K3Config(),
    "kimi-linear-48b-a3b": from_hf(kimi_linear()),
    "kimi-k3": from_hf(kimi_k3()),
}
