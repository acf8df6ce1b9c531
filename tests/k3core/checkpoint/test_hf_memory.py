"""What a checkpoint takes of the host's memory beside the model, as the kernel counts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

MIB = 1 << 20
CONSTANT = 12 * MIB  # staging, scratch of a conversion, what the allocator keeps

SCRIPT = """
import json, sys
from dataclasses import replace
import torch
from k3core.checkpoint.hf import load_model, open_checkpoint, save_checkpoint
from k3core.checkpoint.names import expected_shapes
from k3core.model.config import K3Config
from k3core.model.weights import named_tensors

torch.set_num_threads(1)
folder, stored, loaded, experts = sys.argv[1], getattr(torch, sys.argv[2]), getattr(torch, sys.argv[3]), sys.argv[4]
tiny = replace(K3Config(), routed_expert_hidden_size=64, moe_intermediate_size=64)
cfg = replace(
    tiny, vocab_size=24576, hidden_size=512, intermediate_size=2048, num_experts=16,
    routed_expert_hidden_size=512, moe_intermediate_size=1024,
)
if experts != "plain":
    tiny, cfg = (replace(each, expert_quantization="mxfp4", num_experts=40) for each in (tiny, cfg))

def figure(name):
    line = next(line for line in open("/proc/self/status") if line.startswith(name + ":"))
    return int(line.split()[1]) * 1024

def stream(cfg):
    for name, shape in expected_shapes(cfg).items():
        yield name, torch.ones(shape, dtype=torch.uint8 if "weight_" in name else stored)

def measured(work):
    open("/proc/self/clear_refs", "w").write("5")  # the peak counts from here
    before = figure("VmHWM"), figure("RssAnon")
    result = work()
    return result, figure("VmHWM") - before[0], figure("RssAnon") - before[1]

form = "unpacked" if experts == "unpacked" else "keep"
for name, each in (("tiny", tiny), ("large", cfg)):  # the first time touches libraries' own pages
    _, saving, _ = measured(lambda: save_checkpoint(f"{folder}/{name}", each, stream(each), dtype=stored, shard_bytes=48 << 20))
    model, peak, after = measured(lambda: load_model(f"{folder}/{name}", loaded, experts=form))
checkpoint = open_checkpoint(f"{folder}/large")
print(json.dumps({
    "shards": len(checkpoint.headers),
    "stored": checkpoint.total_bytes,
    "largest": max(each.entry.num_bytes for each in checkpoint.tensors.values()),
    "model": sum(t.nbytes for t in named_tensors(model).values()),
    "saving": saving, "peak": peak, "after": after,
}))
"""


@pytest.mark.parametrize(
    ("stored", "loaded", "experts"),
    [
        ("bfloat16", "bfloat16", "plain"),
        ("float32", "bfloat16", "plain"),
        ("bfloat16", "bfloat16", "kept"),
        ("bfloat16", "bfloat16", "unpacked"),
    ],
)
def test_memory_beside_the_model_stays_within_the_largest_tensor(
    tmp_path: Path, stored: str, loaded: str, experts: str
) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), stored, loaded, experts]
    # What is freed goes back at once, so that nothing is hidden by being taken again.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "262144"}
    run = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    found = json.loads(run.stdout)
    assert found["shards"] >= 3
    assert found["stored"] > 3 * (found["largest"] + CONSTANT), "too small to tell"
    # The stream's own tensor counts while it is written: one at a time.
    assert found["saving"] <= found["largest"] + CONSTANT, found
    assert found["peak"] <= found["model"] + found["largest"] + CONSTANT, found
    assert found["after"] <= found["model"] + CONSTANT, found
