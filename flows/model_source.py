"""A model as a command line names it: a preset, a config.json, or a checkpoint's folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3core.checkpoint.folder import CONFIG, read_json_object
from k3core.model.config import K3Config
from k3core.model.hf_config import from_hf, to_hf
from k3core.model.presets import PRESETS


@dataclass(frozen=True, slots=True)
class ModelSource:
    """document: its config.json. folder: where it lies, with or without weights; None for a preset."""

    name: str
    cfg: K3Config
    document: Mapping[str, Any]
    folder: Path | None

    @property
    def has_weights(self) -> bool:
        return self.folder is not None and any(self.folder.glob("*.safetensors*"))


def find_model(text: str) -> ModelSource:
    """Raises ValueError, a line for each problem of the config."""
    if text in PRESETS:
        return ModelSource(text, PRESETS[text], to_hf(PRESETS[text]), None)
    path = Path(text)
    file = path / CONFIG if path.is_dir() else path
    if not file.is_file():
        what = f"holds no {CONFIG}" if path.is_dir() else "no such file or folder, and not a preset"
        raise ValueError(f"{text}: {what} ({', '.join(PRESETS)})")
    document = read_json_object(file)
    try:
        cfg = from_hf(document)
    except ValueError as error:
        raise ValueError("\n".join(f"{file}: {line}" for line in str(error).splitlines())) from error
    return ModelSource(text, cfg, document, file.parent)
