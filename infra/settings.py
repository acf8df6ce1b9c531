"""RunConfig: everything that a run depends on, section by section. Each setting says what it is, for the form too."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, with_config

from infra.task_settings import StageName, TasksConfig
from k3core.chat.settings import ThinkingEffort
from k3core.envs.environment import Limits
from k3core.model.config import K3Config
from k3core.model.lora import LoraConfig
from k3core.rewards.rubric import RewardConfig
from k3core.rl.gspo import GspoConfig
from k3core.rl.optim import OptimConfig
from k3core.rl.update import UpdateConfig
from k3core.types import SamplingParams

Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
TopP = Annotated[float, Field(gt=0, le=1)]
MinP = Annotated[float, Field(ge=0, lt=1)]


@dataclass(frozen=True, slots=True)
class TokenizerConfig:
    """corpus_prompts: how many of the environment's prompts the byte-pair merges are learnt from."""

    vocab_size: Annotated[int, Field(ge=300, description="byte-pair merges and special tokens together")] = 512
    corpus_prompts: Annotated[
        Count, Field(description="prompts of the environment that the merges are learnt from")
    ] = 400


@dataclass(frozen=True, slots=True)
class EnvironmentConfig:
    """path: a checkout of the LAB benchmark, for name "lab" only. The others are k3core.envs.environment.Limits."""

    name: Annotated[Literal["contracts", "lab"], Field(description="what the agent works in")] = "contracts"
    path: Annotated[str | None, Field(description="a checkout of the LAB benchmark, for lab only")] = None
    max_turns: Annotated[Count, Field(description="exchanges of one episode")] = 6
    max_turn_tokens: Annotated[Count, Field(description="tokens sampled in one turn")] = 96
    max_tokens: Annotated[Count, Field(description="tokens of an episode's whole history")] = 512
    max_output_bytes: Annotated[Count, Field(description="bytes of one tool's output; the rest is cut")] = 1500
    tool_timeout_s: Annotated[Positive, Field(description="seconds that one tool call may take")] = 2.0
    max_calls_per_turn: Annotated[Count, Field(description="tool calls in one turn")] = 4
    episode_timeout_s: Annotated[Positive, Field(description="seconds that one episode may take")] = 600.0

    @property
    def limits(self) -> Limits:
        return Limits(**{limit.name: getattr(self, limit.name) for limit in fields(Limits)})


@dataclass(frozen=True, slots=True)
class ChatConfig:
    """What the prompts say besides their messages, in the chat format of the tokenizer. A released model knows tools that
    are declared to it; the tiny policy learns them from demonstrations."""

    declare_tools: Annotated[bool, Field(description="prompts begin with a declaration of the environment's tools")] = (
        False
    )
    thinking: Annotated[bool, Field(description="turns have a think channel before their response")] = False
    thinking_effort: Annotated[
        ThinkingEffort | None, Field(description="said to the policy; none says nothing; needs thinking")
    ] = None


@dataclass(frozen=True, slots=True)
class WarmStartConfig:
    """Supervised steps before the first update. init: a released checkpoint to start from instead of random weights.

    seed: of the initial weights and the demonstrations, apart from the run's, so that runs of several seeds start from
    one and the same policy.
    The first expert_steps teach the skill with flawless demonstrations alone; after them only expert_share of the
    demonstrations is flawless, the others carry bad habits for RL to unlearn. learning_rate is the highest of a cosine
    over the expert steps; the mixture, and the control arms after it, train at mixture_learning_rate.
    """

    init: Annotated[str | None, Field(description="a released checkpoint to start from")] = None
    seed: Annotated[
        Natural, Field(description="of the starting policy; the run's own seed is for everything after it")
    ] = 0
    steps: Annotated[Natural, Field(description="supervised steps in all")] = 380
    expert_steps: Annotated[Natural, Field(description="of these, the first, on flawless demonstrations alone")] = 280
    rows: Annotated[Count, Field(description="packed rows of one step")] = 8
    learning_rate: Annotated[Positive, Field(description="highest of the cosine over the expert steps")] = 4e-3
    mixture_learning_rate: Annotated[Positive, Field(description="after the expert steps, and in the control arms")] = (
        1e-3
    )
    expert_share: Annotated[Fraction, Field(description="share of flawless demonstrations after the expert steps")] = (
        0.14
    )
    checkpoint_every: Annotated[Count, Field(description="steps between checkpoints to go on from")] = 100


@dataclass(frozen=True, slots=True)
class RolloutConfig:
    """max_running: sequences that decode together, in all engine processes of a stage.

    engine_processes: how many of this machine's processes share the episodes of a rollout or an evaluation.
    """

    prompts_per_step: Annotated[Count, Field(description="prompts of one step")] = 16
    group_size: Annotated[Count, Field(description="trajectories of one prompt")] = 8
    max_running: Annotated[Count, Field(description="sequences that decode together in the engine")] = 128
    engine_processes: Annotated[
        Natural, Field(description="that share the episodes, an engine on the CPU each; 0: one for each core")
    ] = 1
    temperature: Annotated[Positive, Field(description="of the sampling; the trainer divides by it too")] = 1.0
    top_p: Annotated[TopP, Field(description="of the sampling; the trainer renormalises over what it kept")] = 1.0
    top_k: Annotated[Natural, Field(description="of the sampling, likewise; 0 is off")] = 0
    min_p: Annotated[MinP, Field(description="of the sampling, likewise: share of the likeliest token; 0 is off")] = 0.0
    stop: Annotated[tuple[str, ...], Field(description="texts that end a turn, besides its own end")] = ()
    stop_token_ids: Annotated[tuple[Natural, ...], Field(description="tokens that end a turn, likewise")] = ()


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """lora_*: read in mode "lora" only. max_vetoes: so many updates in a row with a minibatch refused as not finite end the run.

    normalize_std: advantages are divided by their group's standard deviation.
    """

    mode: Annotated[Literal["full", "lora"], Field(description="all weights, or a LoRA adapter")] = "full"
    learning_rate: Annotated[Positive, Field(description="of AdamW")] = 5e-4
    beta1: Annotated[float, Field(ge=0, lt=1, description="of AdamW")] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1, description="of AdamW")] = 0.95
    eps: Annotated[Positive, Field(description="of AdamW")] = 1e-8
    weight_decay: Annotated[NonNegative, Field(description="of AdamW, decoupled")] = 0.0
    grad_clip: Annotated[Positive, Field(description="global gradient norm")] = 1.0
    normalize_std: Annotated[bool, Field(description="advantages in units of their group's standard deviation")] = True
    minibatches: Annotated[Count, Field(description="optimizer steps of one update")] = 2
    microbatch_rows: Annotated[Count, Field(description="sequences in one forward and backward pass")] = 16
    router_replay: Annotated[bool, Field(description="the trainer uses the experts that the engine chose")] = True
    activation_checkpointing: Annotated[
        bool, Field(description="layers are computed again in the backward pass: less memory, about a third more time")
    ] = False
    lora_rank: Annotated[Count, Field(description="mode lora only")] = 16
    lora_alpha: Annotated[
        Positive, Field(description="mode lora only: the adapter's output is scaled by alpha / rank")
    ] = 32.0
    lora_targets: Annotated[
        tuple[str, ...],
        Field(min_length=1, description="mode lora only: projections that get an adapter"),
    ] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "g_proj",
        "o_proj",
        "q_a_proj",
        "q_b_proj",
        "kv_a_proj_with_mqa",
        "kv_b_proj",
    )
    max_vetoes: Annotated[Count, Field(description="updates in a row with a refused minibatch that end the run")] = 3

    @property
    def optim(self) -> OptimConfig:
        return OptimConfig(**{setting.name: getattr(self, setting.name) for setting in fields(OptimConfig)})

    @property
    def update(self) -> UpdateConfig:
        return UpdateConfig(**{setting.name: getattr(self, setting.name) for setting in fields(UpdateConfig)})

    @property
    def lora(self) -> LoraConfig | None:
        """None in mode "full"."""
        return LoraConfig(self.lora_rank, self.lora_alpha, self.lora_targets) if self.mode == "lora" else None


@dataclass(frozen=True, slots=True)
class PublishConfig:
    """full_every: steps between whole bases; the versions between them are deltas.

    max_numeric_drift: before a version is visible, a canary batch that the engine samples from it is compared with the
    trainer's logprobs; above this it stays invisible. 0 asks for the same bits, none for no canary.
    """

    full_every: Annotated[Count, Field(description="steps between whole bases; versions between them are deltas")] = 10
    zstd_level: Annotated[int, Field(ge=1, le=22, description="of the payload's compression")] = 1
    max_numeric_drift: Annotated[
        NonNegative | None,
        Field(
            description="largest |logprob difference| of a canary batch, nat; above it: not visible; none: no canary"
        ),
    ] = 0.0


@dataclass(frozen=True, slots=True)
class EvaluateConfig:
    """confidence: of the paired interval between two versions. One prompt alone has no standard error.

    between: versions that are not this step's turn are evaluated too, beside the run, by the automation that the event
    `k3.policy.published` triggers (work pools only).
    """

    every: Annotated[
        Count, Field(description="steps between evaluations; the first and the last version are always evaluated")
    ] = 5
    between: Annotated[bool, Field(description="evaluate the other versions too, beside the run (work pools only)")] = (
        False
    )
    prompts: Annotated[int, Field(ge=2, description="of the frozen suite")] = 50
    samples: Annotated[Count, Field(description="trajectories of one prompt")] = 4
    temperature: Annotated[NonNegative, Field(description="of the sampling; 0 takes the likeliest token")] = 1.0
    top_p: Annotated[TopP, Field(description="of the sampling")] = 1.0
    top_k: Annotated[Natural, Field(description="of the sampling; 0 is off")] = 0
    min_p: Annotated[MinP, Field(description="of the sampling: share of the likeliest token; 0 is off")] = 0.0
    stop: Annotated[tuple[str, ...], Field(description="texts that end a turn, besides its own end")] = ()
    stop_token_ids: Annotated[tuple[Natural, ...], Field(description="tokens that end a turn, likewise")] = ()
    confidence: Annotated[float, Field(gt=0.5, lt=1, description="of the paired interval between two versions")] = 0.95


def sampling_of(section: RolloutConfig | EvaluateConfig, env: EnvironmentConfig) -> SamplingParams:
    return SamplingParams(
        temperature=section.temperature,
        top_p=section.top_p,
        top_k=section.top_k,
        max_tokens=env.max_turn_tokens,
        min_p=section.min_p,
        stop=section.stop,
        stop_token_ids=section.stop_token_ids,
    )


@dataclass(frozen=True, slots=True)
class ControlConfig:
    """The control arm: the warm start trained on `sequences` more demonstrations, as many as RL sees trajectories.

    expert_only: besides it, an arm that trains on as many flawless ones alone.
    """

    enabled: Annotated[bool, Field(description="train arms on demonstrations alone, beside the loop")] = True
    sequences: Annotated[Count, Field(description="demonstrations that an arm sees")] = 2560
    expert_only: Annotated[bool, Field(description="a second arm, on flawless demonstrations alone")] = True

    @property
    def arms(self) -> tuple[str, ...]:
        if not self.enabled:
            return ()
        return ("control", "expert_only") if self.expert_only else ("control",)


@dataclass(frozen=True, slots=True)
class TrackingConfig:
    """mlflow_uri None: an SQLite file below root."""

    mlflow_uri: Annotated[
        str | None, Field(description="tracking server; none: the environment's, else an SQLite file below root")
    ] = None
    experiment: Annotated[str, Field(min_length=1, description="MLflow experiment of the run")] = "k3rl"
    model_name: Annotated[str, Field(min_length=1, description="registered model whose versions the policies are")] = (
        "policy"
    )
    tags: Annotated[
        tuple[Annotated[str, Field(pattern=r"^[\w.\-/]+=.+$")], ...],
        Field(description="key=value, of the run and of its versions: what belongs together is found by them"),
    ] = ()
    traces_per_evaluation: Annotated[
        Natural, Field(description="episodes that MLflow keeps as traces: best, worst, median, truncated, broken, ...")
    ] = 8


@dataclass(frozen=True, slots=True)
class PoolsConfig:
    """Which work pool runs a kind of stage; none: the process that runs the flow, which is the embedded default.

    The stage's flow is deployed there under the pool's name (infra/prefect.yaml). The control arms, the warm start,
    updates and publications are `train`; rollouts and evaluations `rollout`; scores `cpu`.
    engines: the addresses of all engines that must acknowledge a version before it counts as served.
    """

    cpu: Annotated[str | None, Field(description="work pool of score")] = None
    rollout: Annotated[str | None, Field(description="work pool of rollout and evaluate")] = None
    train: Annotated[str | None, Field(description="work pool of warm_start, update, publish and control")] = None
    engines: Annotated[tuple[str, ...], Field(description="URLs of the engines that serve the policy")] = ()

    def of(self, stage: StageName) -> str | None:
        return getattr(self, POOL_OF[stage], None)


POOL_OF: dict[StageName, str] = {
    "warm_start": "train",
    "rollout": "rollout",
    "score": "cpu",
    "update": "train",
    "publish": "train",
    "evaluate": "rollout",
    "control": "train",
    "track": "",  # where the flow is
}


@dataclass(frozen=True, slots=True)
class GatesConfig:
    """What stops a run until a person has looked, where there is a Prefect server to wait at; else it ends the run."""

    max_drift: Annotated[
        Positive | None, Field(description="largest |logprob difference| of engine and trainer, nat; above it: stop")
    ] = None
    approve_promotion: Annotated[
        bool, Field(description="a person approves before a version becomes the champion; needs a Prefect server")
    ] = False
    approval_timeout_s: Annotated[
        Positive, Field(description="seconds to wait for the person; after them the champion stays")
    ] = 86400.0


@with_config(ConfigDict(strict=True, extra="forbid", allow_inf_nan=False))
@dataclass(frozen=True, slots=True)
class RunConfig:
    """Everything a run depends on. `root` is where it is stored: a folder, file://, memory:// or s3://."""

    run: Annotated[
        str,
        Field(
            pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="name; a run of the same name goes on where it ended"
        ),
    ] = "tiny"
    seed: Annotated[Natural, Field(description="of the data, the sampling and the order of training")] = 0
    root: Annotated[str, Field(min_length=1, description="where runs are stored: a folder or s3://bucket/prefix")] = (
        "runs"
    )
    steps: Annotated[Count, Field(description="updates; each makes one policy version")] = 20
    model: Annotated[K3Config, Field(description="architecture, in the field names of the released config.json")] = (
        field(default_factory=K3Config)
    )
    tokenizer: Annotated[TokenizerConfig, Field(description="learnt from the environment's prompts")] = field(
        default_factory=TokenizerConfig
    )
    environment: Annotated[
        EnvironmentConfig, Field(description="what the agent works in, and the limits of an episode")
    ] = field(default_factory=EnvironmentConfig)
    chat: Annotated[ChatConfig, Field(description="tools and thinking, in the tokenizer's chat format")] = field(
        default_factory=ChatConfig
    )
    warm_start: Annotated[
        WarmStartConfig, Field(description="supervised steps that give the run a policy that earns some reward")
    ] = field(default_factory=WarmStartConfig)
    rollout: Annotated[RolloutConfig, Field(description="how trajectories are sampled")] = field(
        default_factory=RolloutConfig
    )
    train: Annotated[TrainConfig, Field(description="optimizer, batches, LoRA")] = field(default_factory=TrainConfig)
    gspo: Annotated[GspoConfig, Field(description="the loss")] = field(default_factory=GspoConfig)
    reward: Annotated[RewardConfig, Field(description="from criteria to one number")] = field(
        default_factory=RewardConfig
    )
    publish: Annotated[PublishConfig, Field(description="bases and deltas")] = field(default_factory=PublishConfig)
    evaluate: Annotated[EvaluateConfig, Field(description="the frozen suite, and when")] = field(
        default_factory=EvaluateConfig
    )
    control: Annotated[ControlConfig, Field(description="arms without reinforcement learning")] = field(
        default_factory=ControlConfig
    )
    tracking: Annotated[TrackingConfig, Field(description="MLflow")] = field(default_factory=TrackingConfig)
    tasks: Annotated[TasksConfig, Field(description="retries and time-outs, by stage")] = field(
        default_factory=TasksConfig
    )
    pools: Annotated[PoolsConfig, Field(description="which work pool runs which stage")] = field(
        default_factory=PoolsConfig
    )
    gates: Annotated[GatesConfig, Field(description="what waits for a person")] = field(default_factory=GatesConfig)
