"""`k3 model merge`: a base and a PEFT adapter, both as folders, into one checkpoint."""

from __future__ import annotations

from pathlib import Path

from flows.byte_bar import byte_bar
from flows.quantities import size
from k3core.checkpoint.adapter import load_adapter
from k3core.checkpoint.hf import iter_tensors, open_checkpoint, save_checkpoint
from k3core.checkpoint.merge import Merge


def merge_folders(base: Path, adapter: Path, out: Path, experts: str) -> int:
    """Tensor by tensor, in the base's layout. Raises ValueError for what does not fit, before anything is written."""
    if experts not in ("bf16", "mxfp4"):
        raise ValueError(f"--experts {experts}: expected bf16 or mxfp4")
    found = open_checkpoint(base)
    is_packed = found.cfg.expert_quantization is not None
    if experts == "mxfp4" and not is_packed:
        raise ValueError(f"--experts mxfp4: the experts of {base} are not packed; leave it out")
    merge = Merge(iter_tensors(found), load_adapter(adapter, found.cfg), "mxfp4" if experts == "mxfp4" else "bf16")
    with byte_bar("merge") as on_bytes:
        saved = save_checkpoint(
            out,
            found.cfg,
            merge,
            like=found,
            experts="bf16" if is_packed and experts == "bf16" else "keep",
            progress=lambda done, of, _: on_bytes(done, of),
        )
    print(f"{out}: {saved.num_tensors:,} tensors, {size(saved.bytes)}, like {base}")
    for line in merge.report().lines():
        print(line)
    return 0
