"""MLflow: one MLflow run per training run, every metric named once, every policy version registered once."""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal, get_args

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read while mlflow is imported, so it has to come first

from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, Run, RunTag
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from k3core.types import PolicyVersion, StopReason

METRICS: Mapping[str, str] = MappingProxyType(
    {
        "rollout/reward": "mean reward of the graded trajectories",
        "rollout/fraction": "mean weighted share of passed criteria",
        "rollout/all_pass": "share of graded trajectories that pass every criterion",
        "rollout/turns": "mean turns of a trajectory",
        "rollout/tool_calls": "mean tool calls of a trajectory",
        "rollout/tokens": "mean length of a trajectory in tokens, context included",
        "rollout/truncated_fraction": "share of trajectories that a limit on turns, tokens or time ended",
        "rollout/infra_error_fraction": "share of trajectories lost to our own failures; never graded",
        "rollout/seconds": "wall-clock seconds of the rollout stage",
        "rollout/tokens_per_s": "sampled tokens per wall-clock second",
        **{f"stop/{reason}": f"share of trajectories that stopped with '{reason}'" for reason in get_args(StopReason)},
        "groups/kept": "groups that reach the loss",
        "groups/zero_variance_all_pass": "groups left out because every trajectory passed everything",
        "groups/zero_variance_all_fail": "groups left out because every trajectory got the lowest reward",
        "groups/zero_variance_other": "groups left out because all rewards are equal and in between",
        "groups/ungraded": "groups left out because too few trajectories have a grade",
        "groups/ungraded_trajectories": "trajectories without a grade, which took no part",
        "gspo/loss": "clipped surrogate, mean over sequences",
        "gspo/ratio_mean": "mean sequence ratio of policy to old policy",
        "gspo/ratio_max": "largest sequence ratio",
        "gspo/clip_fraction": "share of sequences whose gradient the clip removed",
        "gspo/dual_clip_fraction": "share of sequences under the dual clip (negative advantage, large ratio)",
        "gspo/masked_token_fraction": "share of tokens that the loss does not see",
        "gspo/tis_mean": "mean truncated importance weight, trainer against engine",
        "gspo/tis_clip_fraction": "share of importance weights at their bound",
        "train/grad_norm": "global gradient norm before clipping",
        "train/learning_rate": "learning rate of the step",
        "train/vetoed_steps": "optimizer steps refused because of a non-finite loss or gradient",
        "train/tokens": "tokens through forward and backward",
        "train/seconds": "wall-clock seconds of the update stage",
        "drift/k3_rollout_trainer": "k3 estimate of KL(engine || trainer) at equal weights, nat per token",
        "drift/k3_trainer_rollout": "k3 estimate of KL(trainer || engine) at equal weights, nat per token",
        "drift/abs_p50": "median |logprob difference|, nat",
        "drift/abs_p99": "99th percentile of |logprob difference|, nat",
        "drift/abs_max": "largest |logprob difference|, nat",
        "drift/route_missing_fraction": "share of tokens and layers without a recorded expert choice",
        "staleness/mean": "mean policy steps between sampling a trajectory and training on it",
        "staleness/max": "most policy steps between sampling a trajectory and training on it",
        "publish/bytes_payload": "bytes written for this version",
        "publish/bytes_full": "bytes of the whole weights",
        "publish/changed_fraction": "share of weight elements whose bits changed",
        "publish/seconds": "wall-clock seconds of the publish stage",
        "eval/reward": "mean reward over the prompts of the suite",
        "eval/reward_stderr": "its standard error, clustered by prompt",
        "eval/fraction": "mean weighted share of passed criteria over prompts",
        "eval/all_pass": "share of samples that pass every criterion, mean over prompts",
        "eval/all_pass_stderr": "its standard error, clustered by prompt",
        "eval_criterion/<title>": "share of samples that pass this criterion",
        "tracking/nonfinite": "metrics of this step that were NaN or infinite; the tag k3.nonfinite/<step> names them",
    }
)

# Its table creation and migrations are no news to a person who waits for a step.
logging.getLogger("mlflow").setLevel(logging.WARNING)
logging.getLogger("alembic").setLevel(logging.WARNING)

NONFINITE = "tracking/nonfinite"
CRITERION = "eval_criterion/"

_MAX_KEY = 250
_MAX_PARAM = 6000
_MAX_RUN_TAG = 8000
_MAX_DIGEST = 36
_MAX_INPUT_TAG = 500

RunStatus = Literal["FINISHED", "FAILED", "KILLED"]


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
    """A training run in MLflow. Every call names its run id, so threads and processes may share one run."""

    client: MlflowClient
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
        client = MlflowClient(tracking_uri=_prepared(uri), registry_uri=uri)
        experiment_id = _experiment_id(client, uri, experiment)
        run = _find_run(client, experiment_id, run_name)
        if run is None:
            run = client.create_run(experiment_id, run_name=run_name, tags={"k3.run": run_name})
        else:
            client.update_run(run.info.run_id, status="RUNNING")
        _create_model_if_missing(client, model_name)

        wanted = flatten(params)
        changed = {key: value for key, value in wanted.items() if run.data.params.get(key, value) != value}
        client.log_batch(
            run.info.run_id,
            params=[Param(key, value) for key, value in wanted.items() if key not in run.data.params],
            tags=[RunTag(key, str(value)[:_MAX_RUN_TAG]) for key, value in tags.items()]
            + [RunTag(f"k3.resumed_with/{key}"[:_MAX_KEY], value) for key, value in changed.items()],
            synchronous=True,
        )
        if inputs:
            client.log_inputs(run.info.run_id, [_dataset(name, sha256) for name, sha256 in inputs.items()])
        return cls(client, experiment_id, run.info.run_id, run_name, model_name)

    def log_step(self, step: int, metrics: Mapping[str, float], timestamp_ms: int) -> None:
        """Logs one step in one batch. The same call again adds nothing, so keep `timestamp_ms` across retries.

        A NaN or an infinity would be stored as 0 or as the largest float: it is named in the tag
        `k3.nonfinite/<step>` and counted in `tracking/nonfinite` instead.
        """
        for name in metrics:
            if name not in METRICS and not (name.startswith(CRITERION) and len(name) > len(CRITERION)):
                raise ValueError(
                    f"metric {name!r} is not listed in infra.tracking.METRICS: add it there with its meaning"
                )
        finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        tags: list[RunTag] = []
        if len(finite) < len(metrics):
            key = f"k3.nonfinite/{step}"
            named = {f"{name}={float(value)}" for name, value in metrics.items() if name not in finite}
            before = self.client.get_run(self.run_id).data.tags.get(key)
            named |= set(before.split(", ")) if before else set()
            finite[NONFINITE] = float(len(named))
            tags.append(RunTag(key, ", ".join(sorted(named))[:_MAX_RUN_TAG]))
        self.client.log_batch(
            self.run_id,
            metrics=[Metric(_metric_key(name), value, timestamp_ms, step) for name, value in finite.items()],
            tags=tags,
            synchronous=True,
        )

    def register(self, version: PolicyVersion, tags: Mapping[str, str]) -> str:
        """Registers the policy once per (run, step), moves the alias `candidate` to it, gives MLflow's version number.

        tags: what else identifies it (digests of environment and rubric, engine settings).
        Raises ValueError when the same run and step are registered with other weights.
        """
        assert version.run == self.run_name, f"policy of run {version.run!r} in the tracker of {self.run_name!r}"
        own = {
            "k3.run": version.run,
            "k3.step": str(version.step),
            "k3.parent": "none" if version.parent is None else str(version.parent),
            "k3.kind": version.kind,
            "k3.weights_sha256": version.weights_sha256,
            "k3.manifest_sha256": version.weights.sha256,
        }
        clash = own.keys() & tags.keys()
        assert not clash, f"tags {sorted(clash)} are the tracker's own"
        registered = self._registered(version.step)
        if registered is None:
            registered = self.client.create_model_version(
                self.model_name, source=version.weights.uri, run_id=self.run_id, tags={**tags, **own}
            )
        elif registered.tags["k3.weights_sha256"] != version.weights_sha256:
            raise ValueError(
                f"run {version.run!r} step {version.step} is registered as version {registered.version} of "
                f"{self.model_name!r} with other weights ({registered.tags['k3.weights_sha256'][:12]}, now "
                f"{version.weights_sha256[:12]}): give the new run a name of its own"
            )
        self.client.set_registered_model_alias(self.model_name, "candidate", registered.version)
        return str(registered.version)

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

    def _registered(self, step: int) -> ModelVersion | None:
        found = self.client.search_model_versions(
            f"name = '{self.model_name}' AND tags.`k3.run` = '{self.run_name}' AND tags.`k3.step` = '{step}'"
        )
        return min(found, key=lambda version: int(version.version), default=None)


def _prepared(uri: str) -> str:
    """The URI itself, once a local database has a folder to live in."""
    if (database := _sqlite_path(uri)) is not None:
        database.parent.mkdir(parents=True, exist_ok=True)
    return uri


def _sqlite_path(uri: str) -> Path | None:
    return Path(uri.removeprefix("sqlite:///")).absolute() if uri.startswith("sqlite:///") else None


def _experiment_id(client: MlflowClient, uri: str, experiment: str) -> str:
    found = client.get_experiment_by_name(experiment)
    if found is not None:
        return str(found.experiment_id)
    database = _sqlite_path(uri)
    # MLflow would put the artifacts of a local database below the current directory, wherever that is.
    artifacts = None if database is None else (database.parent / "mlartifacts").as_uri()
    return str(client.create_experiment(experiment, artifact_location=artifacts))


def _find_run(client: MlflowClient, experiment_id: str, run_name: str) -> Run | None:
    found = client.search_runs(
        [experiment_id], f"tags.`k3.run` = '{run_name}'", order_by=["attributes.start_time ASC"], max_results=1
    )
    return found[0] if found else None


def _create_model_if_missing(client: MlflowClient, model_name: str) -> None:
    try:
        client.create_registered_model(model_name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise


def _dataset(name: str, sha256: str) -> DatasetInput:
    """MLflow's digests end at 36 characters; the whole one is a tag."""
    dataset = Dataset(name=name, digest=sha256[:_MAX_DIGEST], source_type="sha256", source=sha256)
    return DatasetInput(dataset=dataset, tags=[InputTag("sha256", sha256[:_MAX_INPUT_TAG])])


def _metric_key(name: str) -> str:
    """Criterion ids are written by people: what MLflow refuses in a key becomes '-'."""
    return re.sub(r"[^\w\-. :/]", "-", name)[:_MAX_KEY]


__all__ = ["METRICS", "NONFINITE", "RunStatus", "Tracker", "flatten"]
