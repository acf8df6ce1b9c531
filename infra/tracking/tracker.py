"""A training run in MLflow: its parameters and steps, its policy versions, its evaluations."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Literal

from filelock import FileLock
from mlflow.entities import (
    Dataset,
    DatasetInput,
    InputTag,
    LoggedModel,
    LoggedModelOutput,
    LoggedModelStatus,
    Metric,
    Param,
    Run,
    RunTag,
)
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from mlflow.utils.mlflow_tags import (
    MLFLOW_LOGGED_ARTIFACTS,
    MLFLOW_MODEL_VERSIONS,
    MLFLOW_SOURCE_NAME,
    MLFLOW_SOURCE_TYPE,
)

from infra.tracking.connection import connect, is_http, keep_first, sqlite_file
from infra.tracking.evaluation import Evaluation, table_json
from infra.tracking.metrics import EVALUATION, NONFINITE, by_importance, check_listed, metric_key
from infra.tracking.traces import log_traces
from k3core.types import PolicyVersion

RunStatus = Literal["FINISHED", "FAILED", "KILLED"]

MODEL_TYPE = "policy"
KIND = {"mlflow.experimentKind": "custom_model_development"}  # the experiment opens at its runs, not at traces
SOURCE = {MLFLOW_SOURCE_NAME: "k3 train", MLFLOW_SOURCE_TYPE: "LOCAL"}

_MAX_KEY = 250
_MAX_PARAM = 6000
_MAX_MODEL_PARAM = 500
_MAX_RUN_TAG = 8000
_MAX_DIGEST = 36
_MAX_INPUT_TAG = 500
_MAX_TABLES = 100  # that the tag which names them has room for
_TWIN_MS = 60_000


@dataclass(frozen=True, slots=True)
class Registered:
    """A policy version in MLflow: the logged model that carries its metrics, and its number in the registry."""

    model_id: str
    number: str


@dataclass(frozen=True, slots=True)
class EvaluatedOn:
    """Whose evaluation metrics they are, and on which suite."""

    model_id: str
    suite: str
    suite_sha256: str


def flatten(params: Mapping[str, object], prefix: str = "") -> dict[str, str]:
    """Nested mappings and dataclasses as dotted keys; keys and values cut to MLflow's limits (250, 6,000)."""
    flat: dict[str, str] = {}
    for key, value in params.items():
        name = f"{prefix}{key}"
        if is_dataclass(value) and not isinstance(value, type):
            value = asdict(value)
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{name}.")
        else:
            flat[name[:_MAX_KEY]] = str(value)[:_MAX_PARAM]
    return flat


@dataclass(frozen=True, slots=True)
class Tracker:
    """Every call names its run id, so threads and processes may share one run, and may repeat each other's calls."""

    client: MlflowClient
    lock: FileLock
    uri: str
    experiment_id: str
    run_id: str
    run_name: str
    model_name: str

    @classmethod
    def open(
        cls,
        uri: str,
        experiment: str,
        run_name: str,
        params: Mapping[str, object],
        tags: Mapping[str, str],
        inputs: Mapping[str, str],
        *,
        model_name: str = "policy",
    ) -> Tracker:
        """Finds the MLflow run whose tag `k3.run` is `run_name`, or creates it.

        params: logged when first seen; a later different value does not rewrite history, it becomes the tag
        `k3.resumed_with/<key>`. inputs: name -> sha256, logged as data sets.
        """
        for what, name in (("run name", run_name), ("model name", model_name)):
            if not re.fullmatch(r"[\w.\-]+", name):
                raise ValueError(f"{what} {name!r}: use letters, digits, '.', '_' and '-' only")
        client, lock = connect(uri)
        with lock:
            experiment_id = _experiment_id(client, uri, experiment)
            run = _find_run(client, experiment_id, run_name)
            if run is None:
                client.create_run(
                    experiment_id, run_name=run_name, tags={**SOURCE, **_run_tags(tags), "k3.run": run_name}
                )
                run = _find_run(client, experiment_id, run_name)
                assert run is not None
            else:
                client.update_run(run.info.run_id, status="RUNNING")
            _create_model_if_missing(client, model_name)

            wanted = flatten(params)
            changed = {key: value for key, value in wanted.items() if run.data.params.get(key, value) != value}
            client.log_batch(
                run.info.run_id,
                params=[Param(key, value) for key, value in wanted.items() if key not in run.data.params],
                tags=[RunTag(key, value) for key, value in _run_tags(tags).items()]
                + [RunTag(f"k3.resumed_with/{key}"[:_MAX_KEY], value) for key, value in changed.items()],
                synchronous=True,
            )
            if inputs:
                client.log_inputs(run.info.run_id, [_dataset(name, sha256) for name, sha256 in inputs.items()])
        return cls(client, lock, uri, experiment_id, run.info.run_id, run_name, model_name)

    def log_step(
        self, step: int, metrics: Mapping[str, float], timestamp_ms: int, evaluated: EvaluatedOn | None = None
    ) -> None:
        """Logs one step in one batch. The same call again adds nothing, so keep `timestamp_ms` across retries.

        evaluated: the evaluation metrics among them are also the model's, on that data set.
        A NaN or an infinity would be stored as 0 or as the largest float: it is named in the tag
        `k3.nonfinite/<step>` and counted in `tracking/nonfinite` instead.
        """
        for name in metrics:
            check_listed(name)
        finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        tags: list[RunTag] = []
        with self.lock:
            if len(finite) < len(metrics):
                key = f"k3.nonfinite/{step}"
                named = {f"{name}={float(value)}" for name, value in metrics.items() if name not in finite}
                before = self.client.get_run(self.run_id).data.tags.get(key)
                named |= set(before.split(", ")) if before else set()
                finite[NONFINITE] = float(len(named))
                tags.append(RunTag(key, ", ".join(sorted(named))[:_MAX_RUN_TAG]))
            self.client.log_batch(
                self.run_id,
                metrics=[
                    self._metric(name, value, timestamp_ms, step, evaluated if name.startswith(EVALUATION) else None)
                    for name, value in sorted(finite.items(), key=lambda item: by_importance(item[0]))
                ],
                tags=tags,
                synchronous=True,
            )

    def note(self, tags: Mapping[str, str]) -> None:
        """Says something of the run that is no number."""
        self.client.log_batch(
            self.run_id, tags=[RunTag(key, value) for key, value in _run_tags(tags).items()], synchronous=True
        )

    def register(
        self, version: PolicyVersion, tags: Mapping[str, str], params: Mapping[str, object] | None = None
    ) -> Registered:
        """Registers the policy once per (run, step) and moves the alias `candidate` to it.

        It becomes a logged model, which points at the weights and holds none, and a version of the registered model.
        tags: what else identifies it (digests of environment and rubric, engine settings). params: how it was made.
        Raises ValueError when the same run and step are registered with other weights.
        """
        own = {
            "k3.run": version.run,
            "k3.step": str(version.step),
            "k3.parent": "none" if version.parent is None else str(version.parent),
            "k3.kind": version.kind,
            "k3.weights_uri": version.weights.uri,
            "k3.weights_sha256": version.weights_sha256,
            "k3.manifest_sha256": version.weights.sha256,
        }
        assert version.run == self.run_name, f"policy of run {version.run!r} in the tracker of {self.run_name!r}"
        clash = own.keys() & tags.keys()
        assert not clash, f"tags {sorted(clash)} are the tracker's own"
        with self.lock:
            model = self._logged_model(version, {**tags, **own}, params or {})
            number = self._model_version(version, {**tags, **own, "k3.model_id": model.model_id}, model).version
            self.client.set_registered_model_alias(self.model_name, "candidate", number)
        return Registered(model.model_id, str(number))

    def log_evaluation(self, registered: Registered, evaluation: Evaluation) -> None:
        """The table `evaluations/step-NNNNNN.json` and the traces; the same call again writes the same."""
        name = f"evaluations/step-{evaluation.policy.step:06d}.json"
        log_traces(self.uri, self.experiment_id, self.run_id, registered.model_id, evaluation)
        self.client.log_text(self.run_id, table_json(self.run_id, evaluation), name)
        with self.lock:
            tables = json.loads(self.client.get_run(self.run_id).data.tags.get(MLFLOW_LOGGED_ARTIFACTS, "[]"))
            entry = {"path": name, "type": "table"}
            if entry not in tables:  # the newest first: it is the one that the table view opens with
                newest = sorted([*tables, entry], key=lambda table: str(table["path"]), reverse=True)[:_MAX_TABLES]
                self.client.set_tag(self.run_id, MLFLOW_LOGGED_ARTIFACTS, json.dumps(newest))

    def promote(self, step: int) -> None:
        """Moves the alias `champion` to the policy of this step. ValueError when it was never registered."""
        registered = self._registered(step)
        if registered is None:
            raise ValueError(f"run {self.run_name!r} has no registered policy of step {step}: register it before")
        self.client.set_registered_model_alias(self.model_name, "champion", registered.version)

    def champion(self) -> tuple[str, int] | None:
        """Run and policy step of the champion, whichever run it belongs to; None when there is none."""
        version = self.client.get_registered_model(self.model_name).aliases.get("champion")
        if version is None:
            return None
        champion = self.client.get_model_version(self.model_name, str(version))
        return champion.tags["k3.run"], int(champion.tags["k3.step"])

    def log_report(self, path: Path) -> None:
        """Uploads a file, or a folder's files, to `report/` among the run's artifacts."""
        if path.is_dir():
            self.client.log_artifacts(self.run_id, str(path), "report")
        else:
            self.client.log_artifact(self.run_id, str(path), "report")

    def finish(self, status: RunStatus) -> None:
        self.client.set_terminated(self.run_id, status)

    def _logged_model(
        self, version: PolicyVersion, tags: Mapping[str, str], params: Mapping[str, object]
    ) -> LoggedModel:
        model = self._find_model(version.step)
        if model is None:
            created = self.client.create_logged_model(
                self.experiment_id,
                name=f"{self.run_name}-{version.step:06d}".replace(".", "-"),
                source_run_id=self.run_id,
                tags={**SOURCE, **tags},
                params={key: value[:_MAX_MODEL_PARAM] for key, value in flatten(params).items()},
                model_type=MODEL_TYPE,
            )
            model = self._find_model(version.step) or created
        _refuse_other_weights(version, model.tags["k3.weights_sha256"], f"logged model {model.name!r}")
        if model.status != LoggedModelStatus.READY:
            self.client.finalize_logged_model(model.model_id, "READY")
        outputs = self.client.get_run(self.run_id).outputs
        if model.model_id not in {output.model_id for output in (outputs.model_outputs if outputs else [])}:
            self.client.log_outputs(self.run_id, [LoggedModelOutput(model.model_id, version.step)])
        return model

    def _model_version(self, version: PolicyVersion, tags: Mapping[str, str], model: LoggedModel) -> ModelVersion:
        registered = self._registered(version.step)
        if registered is None:
            created = self.client.create_model_version(
                self.model_name, self._source(version, model), self.run_id, dict(tags), model_id=model.model_id
            )
            registered = self._registered(version.step) or created
        what = f"version {registered.version} of {self.model_name!r}"
        _refuse_other_weights(version, registered.tags["k3.weights_sha256"], what)
        linked = json.dumps([{"name": self.model_name, "version": int(registered.version)}])
        if model.tags.get(MLFLOW_MODEL_VERSIONS) != linked:  # a server notes it, a database does not
            self.client.set_logged_model_tags(model.model_id, {MLFLOW_MODEL_VERSIONS: linked})
        return registered

    def _source(self, version: PolicyVersion, model: LoggedModel) -> str:
        """A server refuses a path of this machine; the version then names its logged model, whose tags have the uri."""
        uri = version.weights.uri
        return f"models:/{model.model_id}" if is_http(self.uri) and not uri.startswith(("s3://", "http")) else uri

    def _metric(self, name: str, value: float, timestamp_ms: int, step: int, on: EvaluatedOn | None) -> Metric:
        if on is None:
            return Metric(metric_key(name), value, timestamp_ms, step)
        digest = on.suite_sha256[:_MAX_DIGEST]
        return Metric(metric_key(name), value, timestamp_ms, step, on.model_id, on.suite, digest, self.run_id)

    def _find_model(self, step: int) -> LoggedModel | None:
        found = self.client.search_logged_models([self.experiment_id], _of_step(self.run_name, step))
        return keep_first(
            found, lambda m: (m.creation_timestamp, m.model_id), lambda m: self.client.delete_logged_model(m.model_id)
        )

    def _registered(self, step: int) -> ModelVersion | None:
        found = self.client.search_model_versions(f"name = '{self.model_name}' AND {_of_step(self.run_name, step)}")
        return keep_first(
            found, lambda v: int(v.version), lambda v: self.client.delete_model_version(self.model_name, v.version)
        )


def _of_step(run: str, step: int) -> str:
    return f"tags.`k3.run` = '{run}' AND tags.`k3.step` = '{step}'"


def _refuse_other_weights(version: PolicyVersion, sha256: str, what: str) -> None:
    if sha256 != version.weights_sha256:
        raise ValueError(
            f"run {version.run!r} step {version.step} is registered as {what} with other weights ({sha256[:12]}, now "
            f"{version.weights_sha256[:12]}): give the new run a name of its own"
        )


def _experiment_id(client: MlflowClient, uri: str, experiment: str) -> str:
    found = client.get_experiment_by_name(experiment)
    if found is not None:
        return str(found.experiment_id)
    database = sqlite_file(uri)
    # MLflow would put the artifacts of a local database below the current directory, wherever that is.
    artifacts = None if database is None else (database.parent / "mlartifacts").as_uri()
    try:
        return str(client.create_experiment(experiment, artifact_location=artifacts, tags=KIND))
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    return str(client.get_experiment_by_name(experiment).experiment_id)  # of a process on another machine


def _find_run(client: MlflowClient, experiment_id: str, run_name: str) -> Run | None:
    """The earliest. Only a run that another process created in the same minute is its twin, and goes."""
    found = client.search_runs([experiment_id], f"tags.`k3.run` = '{run_name}'")
    earliest_ms = min((run.info.start_time for run in found), default=0)
    twins = [run for run in found if run.info.start_time - earliest_ms < _TWIN_MS]
    return keep_first(
        twins, lambda run: (run.info.start_time, run.info.run_id), lambda run: client.delete_run(run.info.run_id)
    )


def _create_model_if_missing(client: MlflowClient, model_name: str) -> None:
    try:
        client.create_registered_model(model_name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise


def _run_tags(tags: Mapping[str, str]) -> dict[str, str]:
    return {key[:_MAX_KEY]: str(value)[:_MAX_RUN_TAG] for key, value in tags.items()}


def _dataset(name: str, sha256: str) -> DatasetInput:
    """MLflow's digests end at 36 characters; the whole one is a tag."""
    dataset = Dataset(name=name, digest=sha256[:_MAX_DIGEST], source_type="sha256", source=sha256)
    return DatasetInput(dataset=dataset, tags=[InputTag("sha256", sha256[:_MAX_INPUT_TAG])])
