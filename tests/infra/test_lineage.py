"""Where a version comes from: the whole graph of a run made by the real stages, and what is wrong with a broken one."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from infra import policies
from infra.branch import changed_scores, find_origin, open_branch, read_groups
from infra.config import load
from infra.gc import Keep, collect, live
from infra.lineage import Ancestry, Node, ancestry, newest_step, origin_of
from infra.lineage_view import closing
from infra.pool import _pools
from infra.stages.adopt import adopt_policy
from infra.stages.context import Context, Inputs
from infra.stages.evaluate import evaluate_step
from infra.stages.prepare import prepare_run
from infra.stages.publish import publish_step
from infra.stages.record import StageRecord, find_record, read_record, stage_key, write_record
from infra.stages.rollout import rollout_step
from infra.stages.score import score_step
from infra.stages.update import update_step
from infra.stages.warm_start import warm_start
from infra.store import Store
from k3core.errors import IntegrityError
from k3core.types import PolicyVersion, Ref

STEPS = 2
LORA = ["run=lora", "train.mode=lora", "train.lora_rank=4", "train.learning_rate=1e-3"]


def train(root: str, *overrides: str) -> None:
    """The loop of `flows.rl` without Prefect."""
    settings = [f"root={root}", "warm_start.steps=50", "warm_start.checkpoint_every=50", *overrides]
    cfg = load("smoke", settings)
    store, inputs = Store(root), prepare_run(cfg)
    policy = published(store, publish_step(inputs, root, warm_start(inputs, root), None))
    evaluate_step(inputs, root, policy)
    optimizer: Ref | None = None
    for _ in range(STEPS):
        scores = score_step(inputs, root, rollout_step(inputs, root, policy, 0), 0)
        trained = update_step(inputs, root, policy, scores, optimizer)
        optimizer = read_record(store, trained).outputs["optimizer"]
        policy = published(store, publish_step(inputs, root, trained, policy))
    evaluate_step(inputs, root, policy)


def published(store: Store, record: Ref) -> PolicyVersion:
    version = read_record(store, record).policy
    assert version is not None
    return version


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Runs `smoke` and `lora` of one warm start, which nobody changes."""
    root = str(tmp_path_factory.mktemp("finished"))
    _pools.clear()
    train(root)
    store = Store(root)
    checkpoint = store.read("smoke/checkpoints/warm_start/latest.json")
    assert checkpoint is not None
    store.put("lora/checkpoints/warm_start/latest.json", checkpoint)
    train(root, *LORA)
    return root


@dataclass(frozen=True, slots=True)
class Spoilt:
    """A run that may be broken: references name it by the place that it was made in, so it takes turns with the good one."""

    root: Path

    def file(self, pattern: str) -> Path:
        (found,) = self.root.glob(pattern)
        return found

    def explain(self, run: str = "smoke", step: int = STEPS, **options: Any) -> Ancestry:
        return ancestry(Store(str(self.root)), run, step, **options)


@pytest.fixture
def spoilt(finished: str, tmp_path: Path) -> Iterator[Spoilt]:
    kept = tmp_path / "kept"
    shutil.copytree(finished, kept)
    yield Spoilt(Path(finished))
    shutil.rmtree(finished)
    shutil.copytree(kept, finished)


def titles(nodes: list[Node]) -> set[str]:
    return {node.title for node in nodes}


def refs_in(value: Any) -> set[tuple[str, str]]:
    """(uri, sha256) of every reference inside a JSON value."""
    found: set[tuple[str, str]] = set()
    if isinstance(value, dict):
        if {"uri", "sha256", "size_bytes"} <= value.keys():
            found.add((value["uri"], value["sha256"]))
        for inner in value.values():
            found |= refs_in(inner)
    elif isinstance(value, list):
        for inner in value:
            found |= refs_in(inner)
    return found


def test_a_version_is_followed_down_to_the_warm_start_and_the_config(finished: str) -> None:
    found = ancestry(Store(finished), "smoke", STEPS)
    assert found.problems == []
    assert {node.state for node in found.nodes.values()} == {"ok"}
    assert [node.title for node in found.policies] == ["smoke@2", "smoke@1", "smoke@0"]
    stages = {(node.facts["stage"], node.facts["step"]) for node in found.nodes.values() if node.kind == "record"}
    assert stages == {
        ("warm_start", 0), ("publish", 0), ("evaluate", 0), ("rollout", 0), ("score", 0),
        ("update", 1), ("publish", 1), ("rollout", 1), ("score", 1),
        ("update", 2), ("publish", 2), ("evaluate", 2),
    }  # fmt: skip
    assert {"config of smoke", "tokenizer of smoke", "trajectories of rollout smoke@1", "payload of smoke@1"} <= titles(
        list(found.nodes.values())
    )


def test_every_reference_of_every_record_is_a_node(finished: str) -> None:
    found = json.loads(json.dumps(ancestry(Store(finished), "smoke", STEPS).to_json(), allow_nan=False))
    nodes = {(node["ref"]["uri"], node["ref"]["sha256"]) for node in found["nodes"] if node["ref"]}
    documents = [*Path(finished).glob("smoke/steps/*/*.json"), *Path(finished).glob("smoke/policies/*/manifest.json")]
    assert len(documents) == 12 + 3
    for path in documents:
        assert refs_in(json.loads(path.read_text())) <= nodes
    ids = {node["id"] for node in found["nodes"]}
    assert found["root"] in ids
    assert all({*node["made_of"].values(), *node["made"].values()} <= ids for node in found["nodes"])


def test_what_several_share_is_one_node(finished: str) -> None:
    found = ancestry(Store(finished), "smoke", STEPS)
    configs = [node for node in found.nodes.values() if node.title.startswith("config of")]
    assert len(configs) == 1
    assert sum(configs[0].id in node.made_of.values() for node in found.nodes.values()) == 12


def test_a_record_says_what_was_in_force(finished: str) -> None:
    found = ancestry(Store(finished), "smoke", STEPS)
    provenance = {
        (node.facts["stage"], node.facts["step"]): node.facts["provenance"]
        for node in found.nodes.values()
        if node.kind == "record"
    }
    rollout, scores, update = provenance["rollout", 1], provenance["score", 1], provenance["update", 2]
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": 96}
    assert rollout["sampling"] == sampling | {"min_p": 0.0, "stop": [], "stop_token_ids": []}
    assert rollout["engine"].keys() == {"class", "code_sha256", "torch"}
    assert len(rollout["prompts"]["ids"]) == 8
    assert scores["prompts"] == rollout["prompts"]
    assert scores["rubric_sha256"] != provenance["score", 0]["rubric_sha256"]  # other prompts ask for other values
    assert scores["judges"][0]["id"] == "rule/1"
    assert update["gspo"]["clip_low"] == 0.01
    assert provenance["evaluate", 2]["suite"]["sha256"] == provenance["evaluate", 0]["suite"]["sha256"]


def test_a_missing_payload_is_named(spoilt: Spoilt) -> None:
    payload = spoilt.file("smoke/policies/000001/payload-*.delta")
    payload.unlink()
    (problem,) = spoilt.explain().problems
    assert (problem.state, problem.title) == ("missing", "payload of smoke@1")
    assert problem.problem is not None
    assert problem.problem.startswith(f"{payload.as_uri()}: missing; expected ")


def test_an_altered_trajectories_file_is_named(spoilt: Spoilt) -> None:
    trajectories = spoilt.file("smoke/steps/000000/trajectories.zst")
    data = bytearray(trajectories.read_bytes())
    data[-1] ^= 1
    trajectories.write_bytes(data)
    (problem,) = spoilt.explain().problems
    assert (problem.state, problem.title) == ("altered", "trajectories of rollout smoke@0")
    assert problem.problem is not None
    assert problem.problem.startswith(f"{trajectories.as_uri()}: expected sha256 ")


def test_a_torn_file_is_named_with_both_sizes(spoilt: Spoilt) -> None:
    weights = spoilt.file("smoke/steps/000000/weights.safetensors")
    size = weights.stat().st_size
    weights.write_bytes(weights.read_bytes()[:-3])
    (problem,) = spoilt.explain().problems
    assert problem.problem == f"{weights.as_uri()}: expected {size} bytes, found {size - 3}"


@pytest.mark.parametrize("name", ["publish.json", "evaluate.json", "rollout-0.json", "score-0.json"])
def test_a_changed_number_in_a_record_is_found(name: str, spoilt: Spoilt) -> None:
    """Those that are found by key have nothing but their own seal."""
    step = 2 if name in ("publish.json", "evaluate.json") else 1
    path = spoilt.root / "smoke" / "steps" / f"{step:06d}" / name
    document = json.loads(path.read_text())
    document["seconds"] = "0.125"
    path.write_text(json.dumps(document, sort_keys=True, separators=(",", ":")))
    (problem,) = spoilt.explain().problems
    assert problem.state == "altered"
    assert problem.problem is not None
    assert name in problem.problem


def test_a_missing_record_does_not_hide_the_versions_before_it(spoilt: Spoilt) -> None:
    """The publication names the parent as well as the update does."""
    spoilt.file("smoke/steps/000001/score-0.json").unlink()
    found = spoilt.explain()
    assert [node.state for node in found.problems] == ["missing"]
    assert [node.title for node in found.policies] == ["smoke@2", "smoke@1", "smoke@0"]


def test_a_version_whose_manifest_is_gone_is_explained_by_its_publication(spoilt: Spoilt) -> None:
    manifest = spoilt.file("smoke/policies/000002/manifest.json")
    manifest.unlink()
    found = spoilt.explain()
    assert [node.problem for node in found.problems] == [
        f"{manifest.as_uri()}: missing; expected {found.nodes[found.root].ref.size_bytes} bytes"  # type: ignore[union-attr]
    ]
    assert "update smoke@2" in titles(list(found.nodes.values()))


def test_a_ledger_entry_must_name_the_update_that_was_published(spoilt: Spoilt) -> None:
    spoilt.file("smoke/ledger/000002.json").unlink()
    shutil.copy(spoilt.file("smoke/ledger/000001.json"), spoilt.root / "smoke/ledger/000002.json")
    (problem,) = spoilt.explain().problems
    assert (problem.state, problem.title) == ("altered", "ledger smoke@2")


def test_what_gc_collected_is_pruned_and_not_missing(spoilt: Spoilt) -> None:
    store = Store(str(spoilt.root))
    now = datetime(2026, 1, 1, tzinfo=UTC)
    gone = collect(store, live(store, "smoke", Keep(last=1, trajectories=False), now), now)
    found = spoilt.explain()
    assert found.problems == []
    pruned = [node for node in found.nodes.values() if node.state == "pruned"]
    assert {"payload of smoke@1", "trajectories of rollout smoke@0"} <= titles(pruned)
    assert {store.uri(item.key) for item in gone} == {node.ref.uri for node in pruned if node.ref}
    assert all(": pruned by gc at " in str(node.problem) for node in pruned)
    with pytest.raises(ValueError, match=r"smoke@1: its trajectories cannot be graded again: .*pruned by gc at"):
        open_branch(store, find_origin(store, str(spoilt.root), "smoke", 1), str(spoilt.root), "rescore", [], None)


def test_a_version_that_was_recorded_before_records_said_what_they_read_ends_there(spoilt: Spoilt) -> None:
    path = spoilt.file("smoke/steps/000002/publish.json")
    document = json.loads(path.read_text())
    for key in ("inputs", "provenance", "self_sha256"):
        del document[key]
    path.write_text(json.dumps(document, sort_keys=True, separators=(",", ":")))
    found = spoilt.explain()
    assert found.problems == []
    assert closing(found, is_checked=True)[0].startswith("publish smoke@2: recorded before records said what they read")
    with pytest.raises(ValueError, match="smoke@2: its records do not say what it was made of"):
        find_origin(Store(str(spoilt.root)), str(spoilt.root), "smoke", 2)


def test_without_a_check_files_are_not_read_but_documents_are_verified(spoilt: Spoilt) -> None:
    spoilt.file("smoke/steps/000000/trajectories.zst").unlink()
    found = spoilt.explain(check=False)
    assert found.problems == []
    assert {node.state for node in found.nodes.values() if node.kind == "file"} == {"unchecked"}
    spoilt.file("smoke/steps/000001/rollout-0.json").unlink()
    assert [node.state for node in spoilt.explain(check=False).problems] == ["missing"]


def test_the_check_says_how_far_it_is(finished: str) -> None:
    seen: list[tuple[int, int]] = []
    found = ancestry(Store(finished), "smoke", STEPS, on_bytes=lambda done, of: seen.append((done, of)))
    total = sum(node.ref.size_bytes for node in found.nodes.values() if node.kind == "file" and node.ref)
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_an_adapter_is_shown_with_the_base_that_it_stands_on(finished: str) -> None:
    found = ancestry(Store(finished), "lora", STEPS)
    assert found.problems == []
    assert [node.facts["kind"] for node in found.policies] == ["adapter", "adapter", "base"]
    newest = found.nodes[found.root]
    assert found.nodes[newest.made_of["base"]].title == "lora@0"


def test_an_adapter_without_its_base_is_named(spoilt: Spoilt) -> None:
    spoilt.file("lora/policies/000000/manifest.json").unlink()
    assert any("the adapter stands on it" in str(node.problem) for node in spoilt.explain("lora").problems)


def test_what_belongs_to_one_version_is_told_from_what_belongs_to_those_before(finished: str) -> None:
    found = ancestry(Store(finished), "smoke", STEPS)
    own = titles(found.own(found.nodes[found.root]))
    assert {"update smoke@2", "score smoke@1", "rollout smoke@1", "payload of smoke@2"} <= own
    assert not own & {"update smoke@1", "smoke@1", "payload of smoke@1"}


def test_a_step_or_run_that_is_not_there_is_one_line(finished: str) -> None:
    with pytest.raises(ValueError, match="run 'smoke' has no version 7: it has versions up to 2"):
        ancestry(Store(finished), "smoke", 7)
    with pytest.raises(ValueError, match="run 'nosuch' has no version 0: it has no version yet"):
        ancestry(Store(finished), "nosuch", 0)


def test_a_stage_that_is_done_again_keeps_its_first_record(finished: str) -> None:
    """Its clock is another one, and later records refer to the first by digest."""
    store = Store(finished)
    policy = policies.read_version(store, "smoke", 1)
    assert policy is not None
    inputs = Inputs(*(Ref(**store.read_manifest("smoke/run.json")[name]) for name in ("config", "tokenizer")))  # type: ignore[index]
    before = store.read(stage_key("smoke", 1, "rollout-0.json"))
    again = rollout_step(inputs, finished, policy, 0)
    assert store.read(stage_key("smoke", 1, "rollout-0.json")) == before
    assert score_step(inputs, finished, again, 0) == find_origin(store, finished, "smoke", 2).score


def test_a_stage_that_makes_other_bytes_replaces_its_record(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    config = Ref("file:///config", "0" * 64, 1)
    first = StageRecord("score", "r", 0, {"groups": config}, {}, 1.0, 1, inputs={"config": config})
    ref = write_record(store, first)
    assert write_record(store, dataclasses.replace(first, seconds=2.0, metrics={"a": 1.0})) == ref
    assert write_record(store, dataclasses.replace(first, provenance={"attempt": 1})) != ref


def test_a_record_from_before_records_said_what_they_read_is_read_and_says_so(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    old = {
        "stage": "evaluate", "run": "old", "step": 0, "outputs": {}, "metrics": {}, "seconds": "1.0",
        "finished_ms": 1, "policy": None, "notes": {},
    }  # fmt: skip
    ref = store.put("old/steps/000000/evaluate.json", json.dumps(old, sort_keys=True, separators=(",", ":")).encode())
    assert read_record(store, ref).inputs is None


def test_a_record_with_inputs_and_without_a_seal_is_refused(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    record = StageRecord("score", "r", 0, {}, {}, 1.0, 1, inputs={})
    path = Path(tmp_path, "r/steps/000000/score.json")
    write_record(store, record)
    document = json.loads(path.read_text())
    del document["self_sha256"]
    path.write_text(json.dumps(document, sort_keys=True, separators=(",", ":")))
    with pytest.raises(IntegrityError, match="expected content with sha256 None"):
        find_record(store, "r/steps/000000/score.json")


def redo(root: str, run: str, step: int, *settings: str) -> tuple[str, PolicyVersion, Ref]:
    """The new run, its version, its scores: what `k3 retrain` does, without Prefect."""
    store = Store(root)
    origin = find_origin(store, root, run, step)
    cfg, inputs = open_branch(store, origin, root, "retrain", settings, None)
    scores = score_step(inputs, root, origin.rollout, origin.attempt)
    parent = published(store, adopt_policy(inputs, root, origin.parent))
    trained = update_step(inputs, root, parent, scores, origin.optimizer)
    return cfg.run, published(store, publish_step(inputs, root, trained, parent)), scores


@pytest.mark.parametrize(("run", "step"), [("smoke", 1), ("smoke", 2), ("lora", 1), ("lora", 2)])
def test_a_step_done_again_with_the_same_settings_gives_the_same_bits(run: str, step: int, finished: str) -> None:
    store = Store(finished)
    old = policies.read_version(store, run, step)
    assert old is not None
    name, new, scores = redo(finished, run, step)
    assert new.weights_sha256 == old.weights_sha256
    assert (new.run, new.step) == (name, step)
    origin = find_origin(store, finished, run, step)
    assert (
        read_record(store, scores).outputs["groups"].sha256 == read_record(store, origin.score).outputs["groups"].sha256
    )
    assert changed_scores(read_groups(store, origin.score), read_groups(store, scores)) == []


def test_a_step_done_again_with_another_loss_gives_other_weights_in_a_run_of_its_own(finished: str) -> None:
    store = Store(finished)
    old = policies.read_version(store, "smoke", 2)
    assert old is not None
    name, new, _ = redo(finished, "smoke", 2, "train.learning_rate=1e-3", "gspo.clip_low=0.001")
    assert new.weights_sha256 != old.weights_sha256
    again = policies.read_version(store, "smoke", 2)
    assert again == old
    assert origin_of(store, name) is not None
    found = ancestry(store, name, 2)
    assert found.problems == []
    assert [node.title for node in found.policies] == [f"{name}@2", f"{name}@1", "smoke@1", "smoke@0"]
    assert newest_step(store, name) == 2


def test_the_policy_before_a_redone_step_is_adopted_by_reference_when_it_is_whole(finished: str) -> None:
    name, _, _ = redo(finished, "smoke", 1)
    store = Store(finished)
    ours, theirs = (store.read_manifest(f"{run}/policies/000000/manifest.json") for run in (name, "smoke"))
    assert ours is not None
    assert theirs is not None
    assert ours["payload"] == theirs["payload"]
    name, _, _ = redo(finished, "smoke", 2)  # after a delta
    adopted = policies.read_version(store, name, 1)
    assert adopted is not None
    assert adopted.kind == "base"


def test_the_same_request_finds_the_run_of_the_first_and_another_gets_a_name_of_its_own(finished: str) -> None:
    store = Store(finished)
    origin = find_origin(store, finished, "smoke", 2)
    first = open_branch(store, origin, finished, "rescore", ["reward.all_pass_weight=0.5"], None)
    assert open_branch(store, origin, finished, "rescore", ["reward.all_pass_weight=0.5"], None) == first
    other, _ = open_branch(store, origin, finished, "rescore", ["reward.all_pass_weight=0.6"], None)
    assert other.run != first[0].run
    with pytest.raises(ValueError, match=f"run '{other.run}' .* choose a new name with --as"):
        open_branch(store, origin, finished, "rescore", [], other.run)


@pytest.mark.parametrize(
    ("redo_", "setting", "line"),
    [
        ("rescore", "gspo.clip_low=0.02", "gspo.clip_low: rescoring does not learn; use `k3 retrain smoke@2`"),
        ("rescore", "model.hidden_size=64", "model.hidden_size: the stored trajectories and weights were made with it"),
        ("retrain", "rollout.temperature=0.5", "rollout.temperature: the stored trajectories"),
        ("retrain", "train.mode=lora", "train.mode: the stored trajectories and weights"),
        ("retrain", "train.lora_rank=2", "train.lora_rank: the stored trajectories and weights"),
        ("retrain", "gspo.clip_hihg=1", "gspo.clip_hihg: unknown key"),
    ],
)
def test_a_setting_that_cannot_change_afterwards_is_refused(redo_: Any, setting: str, line: str, finished: str) -> None:
    store = Store(finished)
    origin = find_origin(store, finished, "smoke", 2)
    with pytest.raises(ValueError) as refused:
        open_branch(store, origin, finished, redo_, [setting], "refused")
    assert str(refused.value).startswith(line)
    assert store.read("refused/run.json") is None


def test_the_warm_start_cannot_be_redone(finished: str) -> None:
    with pytest.raises(ValueError, match="smoke@0 is the warm start"):
        find_origin(Store(finished), finished, "smoke", 0)


def test_another_reward_changes_grades_and_says_which(finished: str) -> None:
    store = Store(finished)
    origin = find_origin(store, finished, "smoke", 2)
    cfg, inputs = open_branch(store, origin, finished, "rescore", ["reward.all_pass_weight=0.9"], None)
    scores = score_step(inputs, finished, origin.rollout, origin.attempt)
    before, after = read_groups(store, origin.score), read_groups(store, scores)
    changed = changed_scores(before, after)
    assert {(one.prompt_id, one.sample) for one in changed} == {
        (t.prompt_id, t.sample)
        for group in before
        for t, score in zip(group.trajectories, group.scores, strict=True)
        if score.value
    }
    assert all(one.verdicts == [] for one in changed)
    found = ancestry(store, cfg.run, 2)
    assert found.nodes[found.root].title == f"score {cfg.run}@1"
    assert "smoke@1" in titles(list(found.nodes.values()))
    assert Context.open(inputs, finished).cfg.reward.all_pass_weight == 0.9
