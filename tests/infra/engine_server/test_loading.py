"""Weights that come while the server runs, and what is opened to start one: from runs, PEFT folders and checkpoints."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from engines import client_of
from torch import Tensor

from infra import policies
from infra.config import RunConfig, load
from infra.engine_server.service import Service
from infra.engine_server.settings import Made, ServerSettings
from infra.engine_server.weights import Opened, open_folder, open_run
from infra.stages.prepare import prepare_run
from infra.store import Store
from k3core.chat import chat_format
from k3core.checkpoint.adapter import adapter_of, save_adapter
from k3core.checkpoint.tensors import from_torch
from k3core.model.lora import LoraConfig, attach_lora
from k3core.model.model import K3Model
from k3core.model.weights import is_adapter_tensor, named_tensors
from k3core.rollout.engine import K3Engine

LORA = LoraConfig(rank=2, alpha=4.0, targets=("q_proj", "o_proj"))
BODY = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 6, "temperature": 0}}


def smoke(root: Path, run: str, *overrides: str) -> RunConfig:
    return replace(load("smoke", [f"run={run}", *overrides]), root=str(root))


def model_of(cfg: RunConfig, seed: int, lora: LoraConfig | None = None) -> K3Model:
    """Random; an adapter's branches are random too, so that they change what is said."""
    generator = torch.Generator().manual_seed(seed)
    model = K3Model(cfg.model)
    model.init_weights(generator)
    if lora is not None:
        attach_lora(model, lora, generator)
        with torch.no_grad():
            for name, tensor in named_tensors(model).items():
                if name.endswith("lora_B"):
                    tensor.normal_(generator=generator)
    return model


def tensors_of(model: K3Model, keep: Callable[[str], bool] = lambda _: True) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in named_tensors(model).items() if keep(name)}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of one model: `full` with versions 0 and 1, `lora` with the same step 0 and an adapter as step 1."""
    root = tmp_path_factory.mktemp("runs")
    store, cfg = Store(str(root)), smoke(root, "full")
    weights = [from_torch(tensors_of(model_of(cfg, seed))) for seed in (0, 1)]
    prepare_run(cfg)
    base, _ = policies.publish(store, "full", 0, weights[0], None, 10, 1, {})
    policies.publish(store, "full", 1, weights[1], base, 10, 1, {})
    with_adapter = smoke(root, "lora", "train.mode=lora", "train.lora_rank=2", 'train.lora_targets=["q_proj","o_proj"]')
    prepare_run(with_adapter)
    lora = with_adapter.train.lora
    policies.publish(store, "lora", 0, weights[0], None, 10, 1, {})
    adapter = tensors_of(model_of(cfg, 0, lora), is_adapter_tensor)
    policies.publish_adapter(store, "lora", 1, from_torch(adapter), {})
    prepare_run(smoke(root, "wide", "model.hidden_size=48"))
    return root


def serve(opened: Opened) -> Service:
    stop_token, policy = chat_format(opened.tokenizer).stop_token, opened.read()
    engine = K3Engine(opened.model.cfg, stop_token, 32, 100, lora=opened.model.lora, tokenizer=opened.tokenizer)
    engine.load(policy.step, policy.tensors)
    settings = ServerSettings(lambda: Made(engine), opened.tokenizer, opened.model, 100)
    service = Service(settings)
    service.engine, service.base_sha256 = engine, policy.base_sha256
    return service


async def said(http: httpx.AsyncClient, **more: Any) -> tuple[list[int], int]:
    """The tokens, and the step that drew the last one."""
    answer = (await http.post("/generate", json=BODY | more)).json()
    return answer["output_ids"], answer["meta_info"]["policy_steps"][-1]


@pytest.mark.parametrize("place", ["full", "full/policies/000001", "full/policies/000001/manifest.json"])
def test_a_policy_is_loaded_from_a_runs_folder_or_a_versions_manifest(runs: Path, place: str) -> None:
    async def run() -> None:
        service = serve(open_run(str(runs), "full", 0))
        async with client_of(service) as http:
            before = await said(http)
            service.fault = "FloatingPointError: the logits are not finite"  # of the weights that go now
            loaded = await http.post("/load_policy", json={"path": str(runs / place), "rule": "keep"})
            assert (loaded.status_code, loaded.json()["policy"]) == (200, "full@1"), loaded.text
            assert (await http.get("/health")).status_code == 200
            after = await said(http)
            assert (before[1], after[1]) == (0, 1)
            assert before[0] != after[0]
            back = await http.post("/load_policy", json={"path": f"file://{runs}/full", "step": 0})
            assert back.status_code == 200, back.text
            assert await said(http) == before

    asyncio.run(run())


def test_what_cannot_be_loaded_is_refused_with_the_reason_and_changes_nothing(runs: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    (broken / "policies" / "000001").mkdir(parents=True)
    (broken / "policies" / "000001" / "manifest.json").write_text('{"run": "broken"')
    (broken / "run.json").write_bytes((runs / "full" / "run.json").read_bytes())
    peft = tmp_path / "peft"
    peft.mkdir()
    (peft / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2}')
    (peft / "adapter_model.safetensors").write_bytes(b"\xff" * 40)
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("/load_policy", {"path": str(runs / "none")}, "'none' was never started"),
        ("/load_policy", {"path": str(runs / "full"), "step": 7}, "policies/000007/manifest.json"),
        ("/load_policy", {"path": str(runs / "wide"), "step": 0}, "another model"),
        ("/load_policy", {"path": str(runs / "full/policies/000001"), "step": 0}, "is step 1"),
        ("/load_policy", {"path": str(broken), "step": 1}, "manifest.json"),
        ("/load_policy", {"path": str(runs / "full"), "rule": "merge"}, "rule 'merge': expected drop, keep, continue"),
        ("/load_policy", {"path": str(runs / "full"), "rule": "continue", "step": 0}, "must come after"),
        ("/load_policy", {}, "path: missing"),
        ("/load_adapter", {"name": "x", "path": str(tmp_path / "absent")}, "expected a folder"),
        ("/load_adapter", {"name": "x", "path": str(peft)}, "adapter_"),
        ("/load_adapter", {"name": "x", "path": str(runs / "full/policies/000001")}, "no adapter"),
        ("/load_adapter", {"name": "policy", "path": str(peft)}, "name 'policy'"),
    ]

    async def run() -> None:
        async with client_of(serve(open_run(str(runs), "full", 1))) as http:
            before = await said(http)
            for url, body, reason in cases:
                answer = await http.post(url, json=body)
                assert answer.status_code == 400, (url, body, answer.text)
                assert reason in answer.json()["error"]["message"], (reason, answer.text)
            assert (await http.post("/unload_adapter", json={"name": "x"})).status_code == 404
            assert await said(http) == before
            assert (await http.get("/health")).status_code == 200
            assert len((await http.get("/v1/models")).json()["data"]) == 1

    asyncio.run(run())


def test_a_payload_that_was_altered_is_refused(runs: Path, tmp_path: Path) -> None:
    copied = tmp_path / "full"
    for source in (runs / "full").rglob("*"):
        if source.is_file():
            target = copied / source.relative_to(runs / "full")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())

    async def run() -> None:
        async with client_of(serve(open_run(str(runs), "full", 1))) as http:
            for payload in (runs / "full/policies/000000").glob("payload-*"):
                data = bytearray(payload.read_bytes())
                data[-1] ^= 1
                payload.write_bytes(data)
            answer = await http.post("/load_policy", json={"path": str(runs / "full"), "step": 0})
            for payload in (copied / "policies/000000").glob("payload-*"):
                (runs / "full/policies/000000" / payload.name).write_bytes(payload.read_bytes())
            assert (answer.status_code, "payload-" in answer.text) == (400, True), answer.text
            assert (await said(http))[1] == 1

    asyncio.run(run())


def test_a_peft_folder_and_a_runs_adapter_are_served_beside_the_policy(runs: Path, tmp_path: Path) -> None:
    cfg = smoke(runs, "full")
    model = model_of(cfg, 0, LORA)
    save_adapter(tmp_path / "peft", cfg.model, adapter_of(model, LORA))
    places = {"mine": tmp_path / "peft", "theirs": runs / "lora/policies/000001"}

    async def run() -> None:
        async with client_of(serve(open_run(str(runs), "full", 0))) as http:
            policy = await said(http)
            for name, place in places.items():
                loaded = await http.post("/load_adapter", json={"name": name, "path": str(place)})
                assert loaded.status_code == 200, loaded.text
            assert loaded.json()["adapters"] == ["mine", "theirs"]
            named = [await said(http, lora_path="mine"), await said(http, model="policy:mine")]
            assert named[0] == named[1]
            assert named[0][0] != policy[0]
            assert await said(http) == policy
            wanted = serve(open_run(str(runs), "lora", 1))
            async with client_of(wanted) as own:
                assert (await said(own))[0] == (await said(http, lora_path="theirs"))[0]
                # An adapter's turn was the last one; the policy goes in all the same, and only there.
                assert (
                    await http.post("/load_policy", json={"path": str(runs / "full"), "step": 1})
                ).status_code == 200
                assert (await said(http))[0] != policy[0]
                assert (
                    await http.post("/load_policy", json={"path": str(runs / "full"), "step": 0})
                ).status_code == 200
                assert (await said(own))[0] == (await said(http, lora_path="theirs"))[0]
                await own.post("/load_policy", json={"path": str(runs / "lora"), "step": 0})
                assert await said(own) == policy
            assert (await http.post("/unload_adapter", json={"name": "mine"})).json()["adapters"] == ["theirs"]
            gone = await http.post("/generate", json=BODY | {"lora_path": "mine"})
            assert (gone.status_code, "known: policy, policy:theirs" in gone.text) == (404, True)

    asyncio.run(run())


def test_a_runs_adapter_is_refused_on_another_base(runs: Path) -> None:
    async def run() -> None:
        async with client_of(serve(open_run(str(runs), "full", 1))) as http:
            body = {"name": "x", "path": str(runs / "lora/policies/000001")}
            answer = await http.post("/load_adapter", json=body)
            assert (answer.status_code, "it stands on lora@0" in answer.text) == (400, True)

    asyncio.run(run())


def test_a_checkpoints_folder_is_served_as_step_0(init_folder: Callable[[str], Path]) -> None:
    async def run() -> None:
        for kind in ("k3", "k3_packed", "kimi_linear"):
            async with client_of(serve(open_folder(init_folder(kind)))) as http:
                tokens, step = await said(http)
                assert (len(tokens) > 0, step) == (True, 0)
                chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}
                assert (await http.post("/v1/chat/completions", json=chat)).status_code == 200

    asyncio.run(run())


def test_a_folder_without_a_tokenizer_is_no_model_to_serve(init_folder: Callable[[str], Path]) -> None:
    folder = init_folder("k3")
    for name in ("tokenizer.json", "tiktoken.model"):
        (folder / name).unlink(missing_ok=True)
    with pytest.raises(ValueError, match="holds neither"):
        open_folder(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "other"}))
    with pytest.raises(ValueError, match=r"config\.json"):
        open_folder(folder)
