"""Episodes over several engine processes: the same trajectories, and what becomes of processes that fail or are left."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import psutil
import pytest

from infra import policies
from infra.config import load
from infra.cores import usable_cores
from infra.fence import Cancelled, fenced
from infra.parts import train_prompts, train_sampling
from infra.records import encode
from infra.stages.context import Context, no_progress
from infra.stages.prepare import prepare_run
from infra.stages.rollout import ENGINES, num_engine_processes, run_episodes, share_out
from infra.worker_processes import WorkerLost, WorkerProcesses, portable
from k3core.checkpoint.tensors import from_torch
from k3core.errors import IntegrityError, RunError
from k3core.rl.trainer import Trainer
from k3core.rollout.episodes import EpisodeSpec
from k3core.types import PolicyVersion, Trajectory

SETTINGS = ("tokenizer.corpus_prompts=40", "environment.max_turn_tokens=24", "rollout.max_running=7")


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Workers have the path of who starts them."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return importlib.import_module("worker_jobs")


@pytest.fixture
def workers() -> Iterator[WorkerProcesses]:
    made = WorkerProcesses()
    yield made
    made.end()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Context, PolicyVersion]]:
    cfg = load("smoke", [f"root={tmp_path_factory.mktemp('runs')}", *SETTINGS])
    context = Context.open(prepare_run(cfg), cfg.root)
    weights, _ = Trainer(cfg.model, cfg.train.optim, None, seed=3).save()
    policy, _ = policies.publish(context.store, cfg.run, 0, from_torch(weights), None, 1, 1, {})
    yield context, policy
    ENGINES.end()


def with_processes(context: Context, count: int) -> Context:
    rollout = replace(context.cfg.rollout, engine_processes=count)
    return replace(context, cfg=replace(context.cfg, rollout=rollout))


def specs_of(context: Context, prompts: int, samples: int) -> list[EpisodeSpec]:
    return [
        EpisodeSpec(prompt, sample, 100 * i + sample)
        for i, prompt in enumerate(train_prompts(context.cfg, 0, 0)[:prompts])
        for sample in range(samples)
    ]


def episodes(
    run: tuple[Context, PolicyVersion],
    processes: int,
    specs: list[EpisodeSpec],
    progress: Callable[[int, int], None] = no_progress,
) -> tuple[Trajectory, ...]:
    context, policy = run
    return run_episodes(with_processes(context, processes), policy, specs, train_sampling(context.cfg), progress)


def wait_until_gone(pids: tuple[int, ...], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline, f"still there: {[pid for pid in pids if is_running(pid)]}"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_two_processes_give_the_trajectories_of_one_to_the_last_bit_and_in_the_order_of_specs(
    run: tuple[Context, PolicyVersion],
) -> None:
    specs = specs_of(run[0], 5, 3)
    told: list[tuple[int, int]] = []
    together = episodes(run, 2, specs, lambda done, of: told.append((done, of)))
    assert told == [(n, 15) for n in range(1, 16)]
    assert len(ENGINES.pids) == 2
    alone = episodes(run, 1, specs)
    assert encode(together) == encode(alone)
    assert [(t.prompt_id, t.sample) for t in together] == [(spec.prompt.id, spec.sample) for spec in specs]


def test_processes_stay_between_stages_and_serve_the_version_they_are_asked_for(
    run: tuple[Context, PolicyVersion],
) -> None:
    context, policy = run
    specs = specs_of(context, 2, 2)
    first, pids = episodes(run, 2, specs), ENGINES.pids
    weights, _ = Trainer(context.cfg.model, context.cfg.train.optim, None, seed=4).save()
    other, _ = policies.publish(context.store, context.cfg.run, 1, from_torch(weights), None, 1, 1, {})
    moved = episodes((context, other), 2, specs)
    assert ENGINES.pids == pids
    assert encode(moved) == encode(episodes((context, other), 1, specs)) != encode(first)
    assert encode(episodes(run, 2, specs)) == encode(first)
    assert policy.step == 0


def test_a_rollout_of_one_group_starts_no_process(run: tuple[Context, PolicyVersion]) -> None:
    ENGINES.end()
    assert len(episodes(run, 8, specs_of(run[0], 1, 2))) == 2
    assert ENGINES.pids == ()


def test_a_killed_process_fails_the_rollout_in_one_line_and_the_next_try_has_others(
    run: tuple[Context, PolicyVersion],
) -> None:
    specs = specs_of(run[0], 4, 2)
    before = episodes(run, 2, specs)
    pids = ENGINES.pids

    def kill_one(done: int, _: int) -> None:
        if done == 1:
            os.kill(pids[1], signal.SIGKILL)

    with pytest.raises(WorkerLost, match=rf"worker process 2 of 2 \(pid {pids[1]}\) was ended by SIGKILL") as lost:
        episodes(run, 2, specs, kill_one)
    assert "\n" not in str(lost.value)
    wait_until_gone(pids)
    assert encode(episodes(run, 2, specs)) == encode(before)
    assert not set(ENGINES.pids) & set(pids)


def test_a_process_that_died_between_stages_is_replaced(run: tuple[Context, PolicyVersion]) -> None:
    specs = specs_of(run[0], 2, 1)
    before, pids = episodes(run, 2, specs), ENGINES.pids
    os.kill(pids[0], signal.SIGKILL)
    while pids[0] in {child.pid for child in multiprocessing.active_children()}:  # its threads end one by one
        time.sleep(0.01)
    assert encode(episodes(run, 2, specs)) == encode(before)
    assert pids[1] in ENGINES.pids
    assert pids[0] not in ENGINES.pids


def test_a_broken_policy_is_the_stores_own_error(run: tuple[Context, PolicyVersion]) -> None:
    """Which is not tried again, as in one process."""
    context, policy = run
    broken = replace(policy, step=7, weights=replace(policy.weights, sha256="0" * 64), weights_sha256="1" * 64)
    with pytest.raises(IntegrityError):
        episodes((context, broken), 2, specs_of(context, 2, 1))


def test_a_fault_of_an_environment_ends_its_episode_only(
    run: tuple[Context, PolicyVersion], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ENGINES.end()
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    gone: list[int] = []

    def take_folder(done: int, _: int) -> None:
        if not gone:
            tmp_path.rename(tmp_path.with_name("elsewhere"))
        gone.append(done)

    trajectories = episodes(run, 2, specs_of(run[0], 6, 4), take_folder)
    ENGINES.end()
    faults = [t.error for t in trajectories if t.stop_reason == "infrastructure_error"]
    assert len(trajectories) == len(gone) == 24
    assert faults
    assert all(fault is not None and "workspace" in fault for fault in faults)


def test_what_work_raises_arrives_with_its_class_and_ends_the_others(
    workers: WorkerProcesses, jobs: ModuleType
) -> None:
    pids: list[int] = []
    begin = time.monotonic()
    with pytest.raises(IntegrityError) as caught:
        workers.run(jobs.fail, ["sleep", "integrity"], lambda: pids.extend(workers.pids))
    assert str(caught.value) == "broken: integrity"
    assert "in fail" in caught.value.__notes__[0]
    assert time.monotonic() - begin < jobs.LONG_S
    wait_until_gone(tuple(pids))
    assert workers.run(jobs.square, [2, 3], lambda: None) == [4, 9]


@pytest.mark.parametrize(
    ("job", "kind", "text"),
    [
        ("run", RunError, "broken: run"),
        ("value", ValueError, "broken: value"),
        ("memory", MemoryError, "broken: memory"),
        ("two", RuntimeError, "TwoArguments: of 2"),  # it would not come out of its pickle
        ("two integrity", IntegrityError, "of 2"),
    ],
)
def test_an_error_that_cannot_travel_keeps_the_class_that_callers_decide_on(
    jobs: ModuleType, job: str, kind: type[Exception], text: str
) -> None:
    with pytest.raises(Exception) as caught:
        jobs.fail(job, lambda: None)
    arrived = pickle.loads(pickle.dumps(portable(caught.value)))
    assert type(arrived) is kind
    assert str(arrived) == text
    assert "in fail" in arrived.__notes__[0]


def test_an_interrupt_or_a_raised_fence_ends_the_work_and_cleans_its_folders(
    workers: WorkerProcesses, jobs: ModuleType, tmp_path: Path
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        workers.run(jobs.work_in_a_folder, [tmp_path / "a"], interrupt)
    assert workers.pids == ()
    cancelled = threading.Event()
    with fenced(cancelled), pytest.raises(Cancelled):
        workers.run(jobs.work_in_a_folder, [tmp_path / "b", tmp_path / "c"], cancelled.set)
    assert workers.pids == ()
    assert list(tmp_path.iterdir()) == []


def test_a_second_signal_does_not_cut_the_clean_up_short(
    workers: WorkerProcesses, jobs: ModuleType, tmp_path: Path
) -> None:
    """As when whoever told the workers to end dies while they do."""

    def tell_twice() -> None:
        for _ in range(2):
            os.kill(workers.pids[0], signal.SIGTERM)
            time.sleep(jobs.CLEAN_UP_S / 2)

    with pytest.raises(WorkerLost, match="ended with code 143"):
        workers.run(jobs.work_in_a_folder, [tmp_path / "a"], tell_twice)
    assert list(tmp_path.iterdir()) == []


STARTER = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from infra.worker_processes import WorkerProcesses
from worker_jobs import square, work_in_a_folder

if __name__ == "__main__":
    workers = WorkerProcesses()
    workers.run(square, [1, 1], lambda: None)
    print(*workers.pids, flush=True)
    if {busy}:
        workers.run(work_in_a_folder, [Path({folder!r}, name) for name in "ab"], lambda: print("busy", flush=True))
    else:
        sys.stdin.read()
"""


@pytest.mark.parametrize("busy", [False, True])
def test_no_process_outlives_a_killed_starter(tmp_path: Path, busy: bool) -> None:
    script, folder = tmp_path / "starter.py", tmp_path / "work"
    folder.mkdir()
    script.write_text(STARTER.format(tests=str(Path(__file__).parent), busy=busy, folder=str(folder)))
    starter = subprocess.Popen([sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert starter.stdout is not None
        pids = tuple(int(pid) for pid in starter.stdout.readline().split())
        assert len(pids) == 2
        for _ in pids if busy else ():
            assert starter.stdout.readline() == "busy\n"
    finally:
        starter.kill()
        starter.wait()
    wait_until_gone(pids)
    assert list(folder.iterdir()) == []


def test_shares_keep_groups_together_and_are_balanced(run: tuple[Context, PolicyVersion]) -> None:
    specs = specs_of(run[0], 5, 3)
    shares = share_out(specs, 2)
    assert sorted(len(share) for share in shares) == [6, 9]
    assert sorted(i for share in shares for i in share) == list(range(15))
    homes = [{specs[i].prompt.id for i in share} for share in shares]
    assert not homes[0] & homes[1]
    assert len(share_out(specs, 64)) == 5
    assert share_out([], 2) == []


def test_nought_is_a_process_for_each_core_where_others_can_read_the_store(tmp_path: Path) -> None:
    cfg = load("tiny", [f"root={tmp_path}"])
    assert num_engine_processes(cfg) == usable_cores()
    assert num_engine_processes(replace(cfg, root="memory://x")) == 1
    assert num_engine_processes(load("smoke")) == 1


@pytest.mark.parametrize(("quota", "cores"), [("150000 100000", 1), ("100 100000", 1), ("max 100000", None)])
def test_a_containers_quota_bounds_the_cores(tmp_path: Path, quota: str, cores: int | None) -> None:
    file = tmp_path / "cpu.max"
    file.write_text(f"{quota}\n")
    assert usable_cores(file) == (cores or len(os.sched_getaffinity(0)))
    assert usable_cores(tmp_path / "absent") == len(os.sched_getaffinity(0))
