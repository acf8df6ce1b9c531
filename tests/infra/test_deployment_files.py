"""The files that platform engineers deploy: against Kubernetes' own schemas, and against the flows they name."""

from __future__ import annotations

import json
import re
from importlib import import_module
from typing import Any, get_args

import kubernetes_validate
import pytest
import yaml
from jsonschema import Draft202012Validator
from prefect import Flow
from prefect.utilities.callables import parameter_schema

from infra.config import POOL_OF, SHIPPED, RunConfig
from infra.task_settings import StageName

INFRA = SHIPPED.parent
JOB = json.loads((INFRA / "kubernetes" / "gpu-job.json").read_text())
DEPLOYMENTS: list[dict[str, Any]] = yaml.safe_load((INFRA / "prefect.yaml").read_text())["deployments"]
PLACEHOLDER = re.compile(r"{{ (\w+) }}")
KUBERNETES = kubernetes_validate.latest_version()


def rendered(node: Any, values: dict[str, Any]) -> Any:
    """As a worker fills in its template: a placeholder without a value takes its key with it."""
    if isinstance(node, dict):
        filled = {key: rendered(value, values) for key, value in node.items()}
        return {key: value for key, value in filled.items() if value is not None}
    if isinstance(node, list):
        return [rendered(item, values) for item in node]
    if isinstance(node, str) and (whole := PLACEHOLDER.fullmatch(node)):
        return values.get(whole[1])
    return PLACEHOLDER.sub(lambda m: str(values[m[1]]), node) if isinstance(node, str) else node


def job_manifest(**values: Any) -> dict[str, Any]:
    defaults = {name: one["default"] for name, one in JOB["variables"]["properties"].items() if "default" in one}
    manifest: dict[str, Any] = rendered(JOB["job_configuration"]["job_manifest"], defaults | values)
    # What the worker itself makes of an environment: a list of names and values.
    container = manifest["spec"]["template"]["spec"]["containers"][0]
    container["env"] = [{"name": name, "value": value} for name, value in container["env"].items()]
    return manifest


def test_the_gpu_job_is_a_valid_kubernetes_job_that_asks_for_gpus() -> None:
    manifest = job_manifest(gpus=4, env={"K3_CACHE": "/var/cache/k3rl"}, node_selector={"pool": "h200"})
    kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
    container = manifest["spec"]["template"]["spec"]["containers"][0]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 4


def test_the_check_of_the_job_can_fail() -> None:
    manifest = job_manifest()
    manifest["spec"]["template"]["spec"]["containers"][0]["resourcess"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


def test_every_variable_of_the_job_template_is_declared_and_used() -> None:
    used = set(PLACEHOLDER.findall(json.dumps(JOB["job_configuration"])))
    assert used == set(JOB["variables"]["properties"])
    Draft202012Validator.check_schema(JOB["variables"])


def test_the_residents_are_valid_kubernetes_objects() -> None:
    for document in yaml.safe_load_all((INFRA / "kubernetes" / "resident.yaml").read_text()):
        kubernetes_validate.validate(document, KUBERNETES, strict=True)


def flow_of(deployment: dict[str, Any]) -> Flow[..., Any]:
    path, name = deployment["entrypoint"].split(":")
    flow: Flow[..., Any] = getattr(import_module(path.removesuffix(".py").replace("/", ".")), name)
    return flow


def test_every_deployment_names_a_flow_that_exists_and_says_what_it_is() -> None:
    for deployment in DEPLOYMENTS:
        assert flow_of(deployment).name == deployment["flow_name"]
        assert len(deployment["description"]) > 20
        assert "k3rl" in deployment["tags"], "the reaper looks after runs with this tag"


def test_every_stage_that_can_leave_the_loop_is_deployed_under_its_pool_s_name() -> None:
    deployed = {(d["flow_name"], d["name"]): d["work_pool"]["name"] for d in DEPLOYMENTS}
    shipped = {"cpu": "cpu", "rollout": "gpu-rollout", "train": "gpu-train"}
    for stage in get_args(StageName):
        if POOL_OF[stage]:
            pool = shipped[POOL_OF[stage]]
            assert deployed[(stage, pool)] == pool


def schema() -> dict[str, Any]:
    def form(cfg: RunConfig) -> None:
        del cfg

    return parameter_schema(form).model_dump()["definitions"]


def test_every_setting_of_the_form_has_a_help_text() -> None:
    definitions = schema()
    for name, section in definitions.items():
        without = [key for key, setting in section["properties"].items() if not setting.get("description")]
        assert without == [], f"{name}: {without}"


def test_the_form_carries_limits_so_that_a_wrong_value_is_refused_before_the_run() -> None:
    definitions = schema()
    assert definitions["RunConfig"]["properties"]["steps"]["minimum"] == 1
    assert definitions["PublishConfig"]["properties"]["zstd_level"]["maximum"] == 22
    assert definitions["TrainConfig"]["properties"]["mode"]["enum"] == ["full", "lora"]
    assert definitions["RunConfig"]["additionalProperties"] is False
