"""A real S3 server behind a proxy that injects faults, and roots of each kind. Started once, when a test asks for it.

And checkpoints of small models with a tokenizer, as a person brings them.
"""

from __future__ import annotations

import os
import subprocess
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from infra.bucket import create_bucket
from infra.config import load
from infra.faults.proxy import FaultProxy
from infra.parts import build_tokenizer
from infra.seaweed import WeedPorts, end_weed, wait_until_healthy, weed_command, write_config
from infra.tokenizer_files import tokenizer_files
from k3core.checkpoint.hf import save_checkpoint
from k3core.model.config import MXFP4, K3Config
from k3core.model.random_weights import random_tensors

S3_BUCKET = "k3-tests"
ACCESS_KEY, SECRET_KEY = "test-access-key", "test-secret-key-that-is-never-shown"


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("seaweed")
    data, config, ports = folder / "data", folder / "s3.json", WeedPorts.free()
    data.mkdir()
    write_config(config, ACCESS_KEY, SECRET_KEY)
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(weed_command(data, ports, config), cwd=folder, stdout=log, stderr=log)
    try:
        wait_until_healthy(server, ports)
        yield f"http://127.0.0.1:{ports.s3}"
    finally:
        end_weed(server, ports)


@pytest.fixture(scope="session")
def s3_proxy(s3_server: str) -> Iterator[FaultProxy]:
    """With the bucket, which the server would make at the first write only: a test may read before."""
    with FaultProxy(s3_server) as proxy:
        with pytest.MonkeyPatch.context() as patched:
            name_server(proxy.url, patched)
            create_bucket(S3_BUCKET)
        yield proxy


@pytest.fixture
def s3_root(s3_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A folder of one's own on the server, reached through the proxy, which has no faults at first."""
    name_server(s3_proxy.url, monkeypatch)
    s3_proxy.clear()
    yield f"s3://{S3_BUCKET}/{uuid.uuid4().hex}"
    s3_proxy.clear()


def name_server(url: str, patched: pytest.MonkeyPatch) -> None:
    """In the environment, and nothing that this machine says of other servers."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        patched.delenv(name)
    for name, value in {
        "AWS_ENDPOINT_URL_S3": url,
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "NO_PROXY": "127.0.0.1",
    }.items():
        patched.setenv(name, value)


@pytest.fixture(params=["path", "file", "memory", "s3"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "s3":
        return str(request.getfixturevalue("s3_root"))
    if request.param == "memory":
        return f"memory://{uuid.uuid4().hex}/store"
    return str(tmp_path / "a store") if request.param == "path" else f"file://{tmp_path}/store"


SMALL_K3 = K3Config(
    hidden_size=32, num_hidden_layers=3, num_attention_heads=2, full_attn_layers=(3,), q_lora_rank=16, kv_lora_rank=16,
    qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, kda_num_heads=2, kda_head_dim=8, intermediate_size=64,
    num_experts=4, moe_intermediate_size=32, routed_expert_hidden_size=32,
)  # fmt: skip
MODELS = {
    "k3": SMALL_K3,
    "k3_packed": replace(SMALL_K3, expert_quantization=MXFP4),
    "kimi_linear": replace(
        SMALL_K3, q_lora_rank=None, mla_use_output_gate=False, use_full_rank_gate=False, gate_lower_bound=None,
        routed_expert_hidden_size=None, latent_moe_use_norm=False, hidden_act="silu", activation_situ_linear_beta=None,
        attn_res_block_size=None,
    ),
}  # fmt: skip
InitFolder = Callable[[str], Path]


@pytest.fixture(scope="session")
def tokenizer_in_files() -> dict[str, bytes]:
    return tokenizer_files(build_tokenizer(load("smoke", ["tokenizer.corpus_prompts=40"])))


@pytest.fixture
def init_folder(tmp_path: Path, tokenizer_in_files: dict[str, bytes]) -> InitFolder:
    """A checkpoint of random weights in bf16: `k3`, `k3_packed` or `kimi_linear`, in several files."""

    def make(kind: str) -> Path:
        folder, cfg = tmp_path / kind, MODELS[kind]
        experts = "mxfp4" if cfg.expert_quantization else "keep"
        save_checkpoint(folder, cfg, random_tensors(cfg, 1), experts=experts, shard_bytes=60_000)
        for name, data in tokenizer_in_files.items():
            (folder / name).write_bytes(data)
        (folder / "LICENSE").write_text("of somebody")
        return folder

    return make
