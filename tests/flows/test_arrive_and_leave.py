"""Arrive with a checkpoint of transformers, train, leave with weights or an adapter that transformers and peft load."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flows.cli import main
from infra import policies
from infra.config import RunConfig, load
from infra.parts import build_tokenizer
from infra.pool import _pools
from infra.records import encode
from infra.stages.context import Context, Inputs
from infra.stages.init import find_read
from infra.stages.prepare import prepare_run
from infra.stages.publish import publish_step
from infra.stages.record import read_record
from infra.stages.update import update_step
from infra.stages.warm_start import warm_start
from infra.store import Store
from infra.tokenizer_files import tokenizer_files
from k3core.checkpoint.hf import iter_tensors, load_model, open_checkpoint, save_checkpoint
from k3core.checkpoint.names import is_packed
from k3core.checkpoint.tensors import to_torch
from k3core.model.config import MXFP4, K3Config
from k3core.model.model import K3Model
from k3core.model.random_weights import random_tensors
from k3core.model.weights import load_tensors
from k3core.types import Ref, SamplingParams, Score, ScoredGroup, Trajectory
from k3kernels.packing import Packing

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::RuntimeWarning")

TOKENS = torch.arange(5, 45)
SETTINGS = """
steps = 1
[environment]
max_turns = 4
[rollout]
prompts_per_step = 8
group_size = 4
max_running = 32
[train]
microbatch_rows = 4
{train}
[evaluate]
every = 1
prompts = 4
samples = 2
[control]
enabled = false
[tasks]
retry_delay_s = 0.1
[warm_start]
init = "{init}"
steps = {steps}
expert_steps = 0
mixture_learning_rate = 8e-3
checkpoint_every = 25
"""


@pytest.fixture(scope="module")
def tokenizer_in_files() -> dict[str, bytes]:
    return tokenizer_files(build_tokenizer(load("smoke")))


@pytest.fixture(scope="module")
def arrived(tmp_path_factory: pytest.TempPathFactory, tokenizer_in_files: dict[str, bytes]) -> Path:
    """A tiny Kimi-Linear as transformers saves it, in bf16, with a tokenizer."""
    folder: Path = tmp_path_factory.mktemp("arrived")
    linear = {"full_attn_layers": [3], "kda_layers": [1, 2], "num_heads": 2, "head_dim": 8, "short_conv_kernel_size": 4}
    config = transformers.KimiLinearConfig(
        vocab_size=512, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=2, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8,
        num_experts=4, num_experts_per_token=2, moe_intermediate_size=16, linear_attn_config=linear,
        first_k_dense_replace=1, moe_layer_freq=1, mla_use_nope=True, moe_router_activation_func="sigmoid",
        initializer_range=0.1, bos_token_id=256, eos_token_id=258, pad_token_id=267,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.KimiLinearForCausalLM(config).bfloat16().save_pretrained(folder)
    for name, data in tokenizer_in_files.items():
        (folder / name).write_bytes(data)
    return folder


def train(root: Path, api: str, run: str, init: Path, steps: int, train: Sequence[str] = ()) -> None:
    """As a person runs it: `k3 train` in a process of its own."""
    config = root / f"{run}.toml"
    text = SETTINGS.format(init=init, steps=steps, train="\n".join(train))
    config.write_text(f'run = "{run}"\nroot = "{root}"\n{text}')
    storage = {"PREFECT_LOCAL_STORAGE_PATH": str(root / ".prefect" / "results" / run)}
    environment = {**os.environ, **storage, "PREFECT_API_URL": api, "PREFECT_HOME": str(root / ".prefect")}
    command = [sys.executable, "-m", "flows.cli", "train", str(config)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, prefect_api: str, arrived: Path) -> Path:
    """A root with two runs: `whole` trained all parameters from the checkpoint that arrived, and left in fp32;
    `adapted` arrived with that, and trained an adapter on it."""
    root: Path = tmp_path_factory.mktemp("runs")
    train(root, prefect_api, "whole", arrived, steps=60)
    assert main(["export", "whole@1", str(root / "left"), "--dtype", "fp32", "--root", str(root)]) == 0
    lora = ('mode = "lora"', "lora_rank = 4", 'lora_targets = ["q_proj", "o_proj", "down_proj", "w1", "w2", "w3"]')
    train(root, prefect_api, "adapted", root / "left", 0, (*lora, "learning_rate = 5e-3"))
    return root


def tensors_of(root: Path, run: str, step: int) -> dict[str, Tensor]:
    version = policies.read_version(Store(str(root)), run, step)
    assert version is not None
    return to_torch(policies.load(Store(str(root)), version))


@torch.no_grad()
def ours(root: Path, run: str, step: int) -> Tensor:
    """Our model's logits at a version."""
    context = Context.open(_inputs(root, run), str(root))
    version = policies.read_version(context.store, run, step)
    assert version is not None
    if version.kind == "adapter":
        trainer = context.pool.trainer_at(version, None)
        return logits(trainer.model)
    model = K3Model(context.cfg.model)
    load_tensors(model, tensors_of(root, run, step))
    return logits(model)


def _inputs(root: Path, run: str) -> Inputs:
    pinned = Store(str(root)).read_manifest(f"{run}/run.json")
    assert pinned is not None
    return Inputs(*(Ref(**pinned[name]) for name in ("config", "tokenizer", "init")))


@torch.no_grad()
def logits(model: K3Model) -> Tensor:
    return model.logits(model(TOKENS, Packing((len(TOKENS),))).hidden_TD).float()


@torch.no_grad()
def judged(model: Any) -> Tensor:
    found: Tensor = model.float().eval()(TOKENS[None]).logits[0]
    return found


def judge(folder: Path) -> Any:
    return transformers.KimiLinearForCausalLM.from_pretrained(folder, dtype=torch.float32)


def close(a: Tensor, b: Tensor) -> bool:
    """In fp32. On either side rounding alone moves the logits of a model trained this hard by 1e-5 of their spread,
    against fp64; the trained weights in bf16 would move them by 1e-2."""
    return torch.allclose(a, b, rtol=0, atol=5e-5 * float(b.std()))


def test_a_run_starts_from_what_transformers_saved(trained: Path, arrived: Path) -> None:
    described = find_read(Context.open(_inputs(trained, "whole"), str(trained))).described
    assert described["folder"] == str(arrived)
    assert close(logits(load_model(arrived, torch.float32)), judged(judge(arrived)))
    assert not close(ours(trained, "whole", 0), judged(judge(arrived))), "supervised steps moved it"


def test_all_parameters_leave_as_a_checkpoint_that_transformers_loads(trained: Path) -> None:
    assert close(ours(trained, "whole", 1), judged(judge(trained / "left")))
    assert not close(ours(trained, "whole", 0), judged(judge(trained / "left")))
    tokenizer = transformers.AutoTokenizer.from_pretrained(trained / "left")
    assert tokenizer.decode(tokenizer("The tenant pays.", add_special_tokens=False).input_ids) == "The tenant pays."
    assert tokenizer.eos_token == "<|end_of_msg|>"


def test_an_adapter_leaves_as_a_folder_that_peft_loads(trained: Path, tmp_path: Path) -> None:
    assert main(["export", "adapted", str(tmp_path / "out"), "--root", str(trained)]) == 0
    base = judge(trained / "left")
    assert close(ours(trained, "adapted", 0), judged(base))
    adapted = ours(trained, "adapted", 1)
    assert float((adapted - judged(base)).abs().max()) > 1e-3, "the adapter does something"
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(
        trained / "left"
    )
    assert close(adapted, judged(peft.PeftModel.from_pretrained(base, tmp_path / "out")))


def test_an_adapter_leaves_merged_into_its_base(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", "adapted@1", str(tmp_path / "out"), "--merged", "--root", str(trained)]) == 0
    printed = capsys.readouterr().out
    assert close(ours(trained, "adapted", 1), judged(judge(tmp_path / "out")))
    num_tensors = len(open_checkpoint(trained / "left").model_tensors)
    assert f"of {num_tensors} tensors, " in printed
    assert f"AutoModelForCausalLM.from_pretrained('{tmp_path}/out')" in printed
    assert f"like {trained}/left" in printed


def test_such_runs_are_explained_and_verified(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for run in ("whole", "adapted"):
        assert main(["explain", f"{run}@1", "--root", str(trained)]) == 0
        assert main(["delta", "verify", run, "--root", str(trained)]) == 0
    printed = capsys.readouterr().out
    assert f"warm start  from {trained}/left " in printed
    assert "init of adapted" in printed
    assert printed.count("2 of 2 versions of ") == 2


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["nobody", "{out}"], "run 'nobody' was never started in "),
        (["whole@9", "{out}"], "whole has no version 9 in "),
        (["whole@1", "{out}", "--merged"], "--merged: whole@1 holds whole weights and no adapter; leave it out"),
        (["adapted@1", "{out}", "--experts", "bf16"], "--experts: adapted@1 is exported as an adapter"),
        (["adapted@1", "{out}", "--adapter", "--merged"], "k3 export: Invalid value for --adapter, --merged: one of"),
        (["adapted@1", "{out}", "--dtype", "fp8"], "k3 export: Invalid value for --dtype: expected bf16 or fp32, got"),
        (
            ["adapted@1", "{out}", "--experts", "int4"],
            "k3 export: Invalid value for --experts: expected keep or bf16 or",
        ),
        (["whole@x", "{out}"], "k3 export: Invalid value for VERSION: expected RUN@STEP or RUN, got 'whole@x'."),
        (["whole@1", "{taken}"], "{taken}: is not empty; name a new folder, nothing is ever written over"),
    ],
)
def test_what_cannot_be_exported_is_one_line_and_exit_code_2(
    trained: Path, tmp_path: Path, args: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"out": str(tmp_path / "out"), "taken": str(trained / "left")}
    capsys.readouterr()
    assert main(["export", *(arg.format(**places) for arg in args), "--root", str(trained)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(line.format(**places))
    assert printed.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


# ---- K3 with packed experts, which no other library here loads: the stages of one step, with made-up rewards


K3_PACKED = K3Config(
    hidden_size=32, num_hidden_layers=3, num_attention_heads=2, full_attn_layers=(3,), q_lora_rank=16, kv_lora_rank=16,
    qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, kda_num_heads=2, kda_head_dim=8, intermediate_size=64,
    num_experts=4, moe_intermediate_size=32, routed_expert_hidden_size=32, expert_quantization=MXFP4,
)  # fmt: skip


def trajectory(cfg: RunConfig, prompt: str, sample: int, seed: int) -> Trajectory:
    rng = np.random.default_rng(seed)
    T, layers, k = 20, len(cfg.model.moe_layers), cfg.model.num_experts_per_token
    mask_T = np.arange(T) >= 8
    routes = np.stack([rng.permutation(cfg.model.num_experts)[:k] for _ in range(T * layers)]).reshape(T, layers, k)
    routes[-1] = 255
    return Trajectory(
        prompt, sample, seed,
        tokens_T=rng.integers(0, 256, T).astype(np.int32),
        loss_mask_T=mask_T,
        rollout_logprobs_T=np.where(mask_T, -6.0, 0.0).astype(np.float32),
        routed_experts_TLk=routes.astype(np.uint8),
        policy_step_T=np.where(mask_T, 0, -1).astype(np.int32),
        routed_layers=cfg.model.routed_layers,
        sampling=SamplingParams(), stop_reason="finished", num_turns=1, num_tool_calls=1,
    )  # fmt: skip


def test_packed_experts_arrive_train_an_adapter_and_leave_with_their_bytes(
    tmp_path: Path, tokenizer_in_files: dict[str, bytes]
) -> None:
    folder = tmp_path / "packed"
    save_checkpoint(folder, K3_PACKED, random_tensors(K3_PACKED, 1), experts="mxfp4")
    for name, data in tokenizer_in_files.items():
        (folder / name).write_bytes(data)
    config = tmp_path / "packed.toml"
    lora = 'mode = "lora"\nlora_rank = 4\nlora_targets = ["o_proj"]'
    config.write_text(f'run = "light"\nroot = "{tmp_path}"\n{SETTINGS.format(init=folder, steps=0, train=lora)}')
    cfg = load(config)
    _pools.clear()
    inputs = prepare_run(cfg)
    store, context = Store(cfg.root), Context.open(inputs, cfg.root)
    base = read_record(store, publish_step(inputs, cfg.root, warm_start(inputs, cfg.root), None)).policy
    assert base is not None
    groups = tuple(
        ScoredGroup(
            f"prompt-{g}",
            tuple(trajectory(cfg, f"prompt-{g}", n, 10 * g + n) for n in range(2)),
            (Score(1.0, 1.0, True, ()), Score(0.0, 0.0, False, ())),
        )
        for g in range(2)
    )
    score = context.record("score", 1, {"groups": store.put("light/groups.json", encode(groups))}, {})
    updated = update_step(inputs, cfg.root, base, score, None)
    version = read_record(store, publish_step(inputs, cfg.root, updated, base)).policy
    assert version is not None
    assert version.kind == "adapter"

    before = dict(iter_tensors(open_checkpoint(folder)))
    packed = {name: tensor for name, tensor in before.items() if is_packed(name)}
    assert len(packed) == 2 * 3 * 4 * 2
    served = context.pool.engine_at(version, context.tokenizer()).served_tensors()
    assert all(torch.equal(served[name], tensor) for name, tensor in packed.items()), "the engine serves those bytes"
    assert main(["export", "light", str(tmp_path / "out"), "--merged", "--experts", "keep", "--root", cfg.root]) == 0
    after = dict(iter_tensors(open_checkpoint(tmp_path / "out")))
    assert all(torch.equal(after[name], tensor) for name, tensor in packed.items())
    changed = {name for name, tensor in before.items() if not torch.equal(after[name], tensor)}
    assert changed
    assert all(name.endswith("o_proj.weight") for name in changed)
    # In bf16 the merged weights are rounded; in fp32 the folder is the trained policy.
    exact = tmp_path / "exact"
    assert main(["export", "light", str(exact), "--merged", "--dtype", "fp32", "--root", cfg.root]) == 0
    theirs, trainer = load_model(exact, torch.float32), context.pool.trainer_at(version, None)
    assert theirs.cfg == cfg.model
    assert close(logits(trainer.model), logits(theirs))
    assert not close(logits(trainer.model), logits(load_model(folder, torch.float32)))
