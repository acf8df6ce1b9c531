"""The stages of one run: each a task with the run's retries, and the small decisions between them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

from prefect import Task
from prefect.futures import PrefectFuture

from flows.gates import ask, check_drift
from infra.config import RunConfig
from infra.console import say
from infra.stages.context import Inputs
from infra.stages.record import StageRecord, read_record
from infra.stages.summary import iteration_line
from infra.stages.track import Tracked, tracking_uri
from infra.store import Store
from infra.task_settings import StageName
from k3core.errors import RunError
from k3core.types import PolicyVersion, Ref
from tasks.control import control
from tasks.evaluate import evaluate
from tasks.pool import run_on_pool
from tasks.publish import publish
from tasks.rollout import rollout
from tasks.score import score
from tasks.stage import configured
from tasks.track import promote, track
from tasks.update import update
from tasks.warm_start import warm_start

MAX_ATTEMPTS = 3
MAX_UNCHANGED = 2
MAX_TRUNCATED = 3
MAX_TRUNCATED_SHARE = 0.5


class NothingToLearn(RunError):
    """Several batches of one step had no group with variance."""


class TooManyVetoes(RunError):
    """Several updates in a row had a minibatch refused: a loss or gradient was not finite."""


class MostlyTruncated(RunError):
    """Several batches in a row hit a limit of the environment: their rewards say little about the policy."""


class PolicyStandsStill(RunError):
    """Several updates in a row changed no byte of the served policy."""


@dataclass(slots=True)
class Stages:
    cfg: RunConfig
    inputs: Inputs
    num_vetoed: int = 0  # updates in a row
    num_unchanged: int = 0  # versions in a row
    num_truncated: int = 0  # batches in a row

    def warm_start(self) -> Ref:
        return self._run(warm_start)

    def rollout_and_score(self, policy: PolicyVersion) -> tuple[Ref, Ref]:
        """Draws other prompts when no group of a batch has variance; gives up after MAX_ATTEMPTS (NothingToLearn)."""
        for attempt in range(MAX_ATTEMPTS):
            rollouts = self._run(rollout, policy=policy, attempt=attempt)
            scores = self._run(score, rollout=rollouts, attempt=attempt)
            self._check_truncation(self._record(rollouts))
            counts = self._record(scores).metrics
            if counts["groups/kept"] > 0:
                return rollouts, scores
            kinds = ", ".join(f"{k} {v:.0f}" for k, v in counts.items() if k.startswith("groups/") and v > 0)
            say(f"step {policy.step + 1}: no group has variance ({kinds}); drawing other prompts")
        raise NothingToLearn(
            f"step {policy.step + 1}: {MAX_ATTEMPTS} batches without a group that has variance: raise"
            " rollout.group_size or rollout.prompts_per_step, or change what the policy starts from (warm_start)"
        )

    def update(self, policy: PolicyVersion, scores: Ref, optimizer: Ref | None) -> Ref:
        trained = self._run(update, policy=policy, score=scores, optimizer=optimizer)
        record = self._record(trained)
        self.num_vetoed = self.num_vetoed + 1 if record.notes["vetoes"] else 0
        if record.notes["vetoes"]:
            say(
                f"step {record.step}: a minibatch was refused and left the weights as they were: {record.notes['vetoes']}"
            )
        if self.num_vetoed >= self.cfg.train.max_vetoes:
            raise TooManyVetoes(
                f"{self.num_vetoed} updates in a row had a minibatch refused ({record.notes['vetoes']}):"
                " lower train.learning_rate or train.grad_clip"
            )
        check_drift(record, self.cfg.gates.max_drift, self.cfg.gates.approval_timeout_s)
        return trained

    def publish(self, trained: Ref, parent: PolicyVersion | None) -> Ref:
        published = self._run(publish, trained=trained, parent=parent, engines=self.cfg.pools.engines)
        version = self.policy(published)
        unchanged = parent is not None and parent.weights_sha256 == version.weights_sha256 and not self.num_vetoed
        self.num_unchanged = self.num_unchanged + 1 if unchanged else 0
        if self.num_unchanged >= MAX_UNCHANGED:
            raise PolicyStandsStill(
                f"steps {version.step - 1} and {version.step} serve the same bytes as before: the update does not reach"
                " the policy (train.learning_rate too small for the dtype, or no parameter is trained)"
            )
        return published

    def evaluate(self, policy: PolicyVersion) -> Ref | None:
        """None when it is not this step's turn."""
        return self._run(evaluate, policy=policy) if self.is_evaluated(policy.step) else None

    def is_evaluated(self, step: int) -> bool:
        return step % self.cfg.evaluate.every == 0 or step == self.cfg.steps

    def control(self, policy: PolicyVersion, label: str) -> PrefectFuture[Ref]:
        """Starts beside the loop; the arm's process uses another core."""
        task, arguments = self._task(
            control,
            policy=policy,
            label=label,
            sequences=self.cfg.control.sequences,
            timeout_s=self.cfg.tasks.of("control").timeout_s,
        )
        return task.submit(**arguments)

    def track(self, records: tuple[Ref, ...], evaluation: Ref | None) -> Tracked:
        """Waits for a person's approval before a version becomes the champion, where the run asks for that."""
        cfg, gates = self.cfg, self.cfg.gates
        where = (self.inputs, cfg.root, tracking_uri(cfg), cfg.tracking)
        patience = cfg.tasks.of("track")
        tracked: Tracked = configured(track, patience)(
            *where, records, evaluation, cfg.evaluate.confidence, gates.approve_promotion
        )
        say(iteration_line(tracked, cfg.steps))
        if tracked.proposal and ask(f"promote-{tracked.step}", tracked.proposal, gates.approval_timeout_s):
            champion = configured(promote, patience)(*where, tracked.step)
            return replace(tracked, champion=champion, decision=f"{tracked.proposal}; approved")
        return tracked

    def policy(self, published: Ref) -> PolicyVersion:
        version = self._record(published).policy
        assert version is not None
        return version

    def output(self, record: Ref, name: str) -> Ref:
        return self._record(record).outputs[name]

    def _run(self, stage: Task[..., Ref], **arguments: Any) -> Ref:
        task, arguments = self._task(stage, **arguments)
        return task(**arguments)

    def _task(self, stage: Task[..., Ref], **arguments: Any) -> tuple[Task[..., Ref], dict[str, Any]]:
        """The stage's own task where the flow is, or one that starts the stage's flow on its work pool."""
        name = cast(StageName, stage.name)
        patience, pool = self.cfg.tasks.of(name), self.cfg.pools.of(name)
        arguments = {"inputs": self.inputs, "root": self.cfg.root, **arguments}
        if pool is None:
            # A control arm's process has the time-out: Prefect cannot interrupt a thread.
            return configured(stage, patience, watches_itself=name == "control"), arguments
        remote = {"run": self.cfg.run, "stage": name, "pool": pool, "arguments": arguments, "patience": patience}
        return configured(run_on_pool, patience, watches_itself=True), remote

    def _check_truncation(self, rollouts: StageRecord) -> None:
        share = rollouts.metrics["rollout/truncated_fraction"]
        self.num_truncated = self.num_truncated + 1 if share > MAX_TRUNCATED_SHARE else 0
        if self.num_truncated >= MAX_TRUNCATED:
            stops = ", ".join(f"{k} {v:.0%}" for k, v in sorted(rollouts.metrics.items()) if k.startswith("stop/"))
            raise MostlyTruncated(
                f"{share:.0%} of the episodes were cut short, {MAX_TRUNCATED} batches in a row ({stops}): raise"
                " environment.max_turn_tokens, environment.max_tokens or environment.max_turns"
            )

    def _record(self, ref: Ref) -> StageRecord:
        return read_record(Store(self.cfg.root), ref)
