from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infra.config import ConfigError, RunConfig, digest, dump, load, parse, shipped_names
from infra.config_rules import warnings
from infra.parts import eval_sampling, train_sampling
from k3core.envs.environment import Limits
from k3core.model.config import K3Config
from k3core.model.lora import LoraConfig, attach_lora
from k3core.model.model import K3Model
from k3core.rl.optim import OptimConfig
from k3core.rl.update import UpdateConfig
from k3core.types import SamplingParams


def problems(*overrides: str, path: str | Path = "tiny") -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load(path, overrides)
    assert str(caught.value) == "\n".join(caught.value.problems)
    return caught.value.problems


def test_tiny_writes_out_the_defaults() -> None:
    assert load("tiny", ["rollout.engine_processes=1", "train.minibatches=2"]) == RunConfig()


def test_every_shipped_config_loads_without_a_warning() -> None:
    assert set(shipped_names()) == {"tiny", "smoke", "linear48b_lora", "k3_lora", "k3_full"}
    for name in shipped_names():
        assert warnings(load(name)) == ()


def test_the_parts_of_k3core_get_their_settings() -> None:
    assert RunConfig().environment.limits == Limits()
    assert RunConfig().train.optim == OptimConfig()
    assert RunConfig().train.update == UpdateConfig()
    assert RunConfig().train.lora is None
    assert load("tiny", ["environment.max_turns=9"]).environment.limits == Limits(max_turns=9)
    assert load("tiny", ["train.beta1=0.5"]).train.optim == OptimConfig(beta1=0.5)
    assert load("tiny", ["train.minibatches=4"]).train.update == UpdateConfig(minibatches=4)
    lora = ["train.mode=lora", "train.lora_rank=4", 'train.lora_targets=["w1"]']
    assert load("tiny", lora).train.lora == LoraConfig(4, 32.0, ("w1",))


@pytest.mark.parametrize("name", ["linear48b_lora", "k3_lora", "tiny"])
def test_the_lora_targets_exist_in_the_model(name: str) -> None:
    """At the size of tiny; which matrices there are depends on which parts a model has."""
    cfg = load(name, ["train.mode=lora"])
    assert cfg.train.lora is not None
    has = {key: getattr(cfg.model, key) for key in ("use_full_rank_gate", "mla_use_output_gate")}
    q_lora_rank = None if cfg.model.q_lora_rank is None else 8
    attach_lora(K3Model(K3Config(q_lora_rank=q_lora_rank, **has)), cfg.train.lora, torch.Generator())


def test_overrides_are_toml_and_bare_words_are_text() -> None:
    cfg = load("tiny", ["gspo.clip_low=0.02", "run=demo", "model.full_attn_layers=[2, 4]", "train.router_replay=false"])
    assert cfg.gspo.clip_low == 0.02
    assert cfg.run == "demo"
    assert cfg.model.full_attn_layers == (2, 4)
    assert cfg.train.router_replay is False


def test_none_switches_a_setting_off_and_stays_text_elsewhere() -> None:
    cfg = load("tiny", ["gspo.tis_cap=none", "model.q_lora_rank=none", "run=none"])
    assert (cfg.gspo.tis_cap, cfg.model.q_lora_rank, cfg.run) == (None, None, "none")


def test_a_whole_number_is_a_number() -> None:
    value = load("tiny", ["train.learning_rate=1"]).train.learning_rate
    assert isinstance(value, float)


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("gspo.clip_hihg=0.1", "gspo.clip_hihg: unknown key (did you mean clip_high?)"),
        ("clip_high=0.1", "clip_high: unknown key (did you mean gspo.clip_high?)"),
        ("optimizer.lr=1", "optimizer: unknown key (known: run, seed, root, steps, model, tokenizer, environment, "),
        ("train.learning_rate=-1", "train.learning_rate: must be > 0, got -1"),
        ("rollout.temperature=0", "rollout.temperature: must be > 0, got 0"),
        ("evaluate.temperature=-1", "evaluate.temperature: must be >= 0, got -1"),
        ("rollout.min_p=1", "rollout.min_p: must be < 1, got 1"),
        ("evaluate.stop_token_ids=[-1]", "evaluate.stop_token_ids.0: must be >= 0, got -1"),
        ("rollout.stop=x", 'rollout.stop: expected a list, got "x"'),
        ("train.beta2=1.0", "train.beta2: must be < 1, got 1.0"),
        ("warm_start.expert_share=1.5", "warm_start.expert_share: must be <= 1, got 1.5"),
        ("reward.all_pass_weight=1.5", "reward.all_pass_weight: must lie in 0..1, not 1.5"),
        ("reward.unfinished=half", "reward.unfinished: must be 'zero' or 'graded', got \"half\""),
        ("tokenizer.vocab_size=100", "tokenizer.vocab_size: must be >= 300, got 100"),
        ("train.learning_rate=nan", "train.learning_rate: input should be a finite number, got NaN"),
        ('rollout.group_size="8"', 'rollout.group_size: expected a whole number, got "8"'),
        ("rollout.group_size=8.0", "rollout.group_size: expected a whole number, got 8.0"),
        ("train.learning_rate=fast", 'train.learning_rate: expected a number, got "fast"'),
        ("control.enabled=1", "control.enabled: expected true or false, got 1"),
        ("tracking.experiment=7", "tracking.experiment: expected text, got 7"),
        ("model.full_attn_layers=4", "model.full_attn_layers: expected a list, got 4"),
        ("train=3", "train: expected a section, got 3"),
        ("seed.x=1", "seed: expected a whole number, got a section"),
        ("train.mode=qlora", "train.mode: must be 'full' or 'lora', got \"qlora\""),
        ("run=a/b", "run: must be letters, digits, '.', '_' or '-', starting with a letter or digit, got \"a/b\""),
        ("tracking.model_name=", "tracking.model_name: must not be empty"),
        ("steps", "steps: expected key=value, for example train.learning_rate=1e-4"),
        ("train..mode=full", "train..mode=full: expected key=value"),
        ("model.hidden_size=0", "model.hidden_size: must be >= 1, got 0"),
        ("model.routed_scaling_factor=0.0", "model.routed_scaling_factor: must be > 0, got 0"),
        ("model.hidden_act=relu", "model.hidden_act: must be 'situ' or 'silu', got \"relu\""),
        (
            "model.expert_quantization=fp8",
            "model.expert_quantization: must be 'mxfp4' or none, got \"fp8\"",
        ),
        ("model.gate_lower_bound=-6.0", "model.gate_lower_bound: must be in [-5, 0) or none, got -6"),
        ("gspo.clip_low=1.0", "gspo.clip_low: must be > 0 and < 1, got 1"),
        ("gspo.clip_high=0.0", "gspo.clip_high: must be > 0, got 0"),
        ("gspo.mask_ratio_above=1.0", "gspo.mask_ratio_above: must be > 1 or none"),
        ("gspo.tis_cap=0.5", "gspo.tis_cap: must be >= 1 or none"),
        ("root=gs://bucket", 'root: must be a folder or one of file://, memory://, s3://, got "gs://bucket"'),
    ],
)
def test_a_faulty_setting_is_one_line(override: str, line: str) -> None:
    (problem,) = problems(override)
    assert problem.startswith(line)
    assert "\n" not in problem


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["rollout.group_size=1"], "rollout.group_size 1 and gspo: advantages are differences within a group"),
        (['rollout.stop=["a", ""]'], "rollout.stop '': the empty string is in every text; leave it out"),
        (["evaluate.stop_token_ids=[3, 512]"], "evaluate.stop_token_ids 512 and model.vocab_size 512: no such token"),
        (["evaluate.every=21"], "evaluate.every 21 and steps 20: no step would be evaluated"),
        (["warm_start.steps=0"], "warm_start.steps 0 and warm_start.init none: a random policy earns no reward"),
        (["train.lora_rank=8"], 'train.lora_rank and train.mode "full": only mode "lora" reads it'),
        (["train.minibatches=129"], "train.minibatches 129 and rollout.prompts_per_step x rollout.group_size = 128: "),
        (["evaluate.prompts=51"], 'evaluate.prompts 51 and environment.name "contracts": '),
        (["environment.max_turn_tokens=513"], "environment.max_turn_tokens 513 and environment.max_tokens 512: "),
        (["environment.name=lab"], 'environment.name "lab" and environment.path none: set environment.path'),
        (["environment.path=x"], 'environment.name "contracts" and environment.path "x": only "lab" reads a path'),
        (["gspo.dual_clip=1.0"], "gspo.dual_clip 1 and gspo.clip_high 0.015: "),
        (["tokenizer.vocab_size=600"], "tokenizer.vocab_size 600 and model.vocab_size 512: "),
        (["root=s3://bucket/runs"], "root s3://bucket/runs and tracking.mlflow_uri none: "),
        (["root=memory://runs"], "root memory://runs and tracking.mlflow_uri none: "),
        (["model.full_attn_layers=[5]"], "model.full_attn_layers [5] and model.num_hidden_layers 4: "),
        (["model.first_k_dense_replace=5"], "model.first_k_dense_replace 5 and model.num_hidden_layers 4: "),
        (["model.num_experts_per_token=9"], "model.num_experts_per_token 9 and model.num_experts 8: "),
    ],
)
def test_a_contradiction_names_both_settings(overrides: list[str], line: str) -> None:
    (problem,) = problems(*overrides)
    assert problem.startswith(line)
    assert "\n" not in problem


@pytest.mark.parametrize(
    "overrides",
    [
        ["rollout.temperature=0.7"],  # reported under the sampling distribution, and the trainer divides too
        ["rollout.top_p=0.9", "rollout.top_k=20", "rollout.min_p=0.05"],  # the trainer renormalises over what was kept
        ['rollout.stop=["</done>"]', "rollout.stop_token_ids=[3, 511]"],
        ["evaluate.top_p=0.9", "evaluate.top_k=20", "evaluate.temperature=0", "evaluate.min_p=0.1"],
        ["train.mode=lora", "train.lora_rank=8"],
        ["environment.name=lab", "environment.path=lab"],
        ["root=s3://bucket/runs", "tracking.mlflow_uri=http://127.0.0.1:5000"],
        ["root=file:///tmp/runs"],
        ["gspo.dual_clip=3.0"],
    ],
)
def test_what_can_be_honoured_is_accepted(overrides: list[str]) -> None:
    load("tiny", overrides)


def test_widths_that_cannot_be_packed_are_refused() -> None:
    found = problems("train.mode=lora", "model.expert_quantization=mxfp4", "model.moe_intermediate_size=64")
    assert found[0].startswith(
        "model.routed_expert_hidden_size 48 and model.expert_quantization mxfp4: packed experts come in groups of 32"
    )


def test_all_problems_are_reported_at_once() -> None:
    found = problems("steps=0", "train.mode=x", "gspo.clip_hihg=1", "rollout.group_size=1", "what")
    assert len(found) == 5


def test_a_faulty_setting_is_not_also_a_contradiction() -> None:
    """steps falls back to its default for the other rules; none of them may speak of that value."""
    assert problems("steps=0", "evaluate.every=50") == ("steps: must be >= 1, got 0",)


def test_a_problem_in_the_file_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("[gspo]\nclip_hihg = 0.1\n[rollout]\ngroup_size = 1\n")
    assert problems("train.learning_rate=-1", path=path) == (
        "train.learning_rate: must be > 0, got -1",
        "mine.toml: gspo.clip_hihg: unknown key (did you mean clip_high?)",
        problems("rollout.group_size=1")[0].replace("rollout", "mine.toml: rollout", 1),
    )


def test_broken_toml_is_one_line_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("run = 'x'\nsteps = = 3\n")
    (problem,) = problems(path=path)
    assert problem == "mine.toml: not TOML: Invalid value (at line 2, column 9)"


def test_a_missing_file_lists_the_shipped_configs() -> None:
    assert problems(path="tyni") == (
        "tyni: no such file, and not a shipped config (k3_full, k3_lora, linear48b_lora, smoke, tiny)",
    )
    assert problems(path="configs/tiny")[0].startswith("configs/tiny: no such file")


def test_an_override_cannot_carry_a_second_key() -> None:
    assert problems("run=1\nseed=5")[0].startswith("run: must be letters")


@pytest.mark.parametrize("name", shipped_names())
def test_dump_round_trips_every_shipped_config(name: str, tmp_path: Path) -> None:
    cfg = load(name)
    path = tmp_path / "dumped.toml"
    path.write_text(dump(cfg), encoding="utf-8")
    assert load(path) == cfg


@given(
    experiment=st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(lambda text: text != "none"),
    learning_rate=st.floats(min_value=1e-300, allow_infinity=False, allow_nan=False),
    targets=st.lists(st.sampled_from(["q_proj", 'a"b', "c\\d"]), min_size=1),
    tis_cap=st.none() | st.floats(min_value=1, max_value=1e308),
)
def test_dump_round_trips_any_value(
    tmp_path_factory: pytest.TempPathFactory,
    experiment: str,
    learning_rate: float,
    targets: list[str],
    tis_cap: float | None,
) -> None:
    base = load("k3_lora")
    cfg = dataclasses.replace(
        base,
        tracking=dataclasses.replace(base.tracking, experiment=experiment, mlflow_uri=experiment),
        train=dataclasses.replace(base.train, learning_rate=learning_rate, lora_targets=tuple(targets)),
        gspo=dataclasses.replace(base.gspo, tis_cap=tis_cap),
    )
    path = tmp_path_factory.getbasetemp() / "dumped.toml"
    path.write_text(dump(cfg), encoding="utf-8", newline="")
    assert load(path) == cfg


def test_a_digest_depends_on_its_sections_only() -> None:
    cfg = load("tiny")
    sections = ("model", "tokenizer", "seed")
    assert digest(cfg, sections) == digest(load("tiny", ["steps=40", "train.learning_rate=1e-3"]), sections)
    assert digest(cfg, sections) == digest(cfg, tuple(reversed(sections)))
    for change in ("model.hidden_size=64", "tokenizer.vocab_size=511", "seed=1"):
        assert digest(cfg, sections) != digest(load("tiny", [change]), sections)
    assert digest(cfg, ("model",)) != digest(cfg, ("model", "seed"))


def test_a_digest_of_an_unknown_section_is_a_programmer_error() -> None:
    with pytest.raises(AssertionError, match="modle"):
        digest(load("tiny"), ("modle",))


def test_a_clip_narrower_than_the_numerics_is_a_warning_only_without_the_correction() -> None:
    narrow = ["gspo.clip_low=3e-4", "gspo.clip_high=4e-4"]
    assert warnings(load("tiny", narrow)) == ()
    (line,) = warnings(load("tiny", [*narrow, "gspo.tis_cap=none"]))
    assert line.startswith("gspo.tis_cap none, gspo.clip_low 0.0003 and gspo.clip_high 0.0004: ")
    assert "0.0053" in line  # 3 x 0.04 / sqrt(512)


def test_greedy_samples_of_which_one_is_enough_are_a_warning() -> None:
    (line,) = warnings(load("tiny", ["evaluate.temperature=0"]))
    assert line.startswith("evaluate.temperature 0 and evaluate.samples 4: ")
    assert warnings(load("tiny", ["evaluate.temperature=0", "evaluate.samples=1"])) == ()


def test_the_sampling_settings_reach_the_engine_and_return_from_a_stored_config() -> None:
    cut = ["temperature=0.7", "top_p=0.9", "top_k=40", "min_p=0.05", 'stop=["a", "\\n"]', "stop_token_ids=[3]"]
    for section, sampling in (("rollout", train_sampling), ("evaluate", eval_sampling)):
        cfg = load("tiny", [f"{section}.{setting}" for setting in cut])
        assert sampling(cfg) == SamplingParams(0.7, 0.9, 40, 96, 0.05, ("a", "\n"), (3,))
        assert parse(dump(cfg), "") == cfg


def test_a_control_arm_of_another_size_is_a_warning() -> None:
    (line,) = warnings(load("tiny", ["steps=10"]))
    assert line.startswith("control.sequences 2560 and steps x rollout.prompts_per_step x rollout.group_size = 1280")
    assert warnings(load("tiny", ["steps=10", "control.enabled=false"])) == ()
