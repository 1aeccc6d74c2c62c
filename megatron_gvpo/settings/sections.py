"""The sections of a configuration; `algorithm`, `parallel` and `rollout.servers` have their own modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    JsonValue,
    NonNegativeInt,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

from megatron_gvpo.core.secrets import from_variable
from megatron_gvpo.core.section import EVERY_KEY, MIB, LocalPath, Section, Seed
from megatron_gvpo.settings.adapter import AdapterConfig
from megatron_gvpo.settings.conversation import ConversationConfig
from megatron_gvpo.settings.servers import (
    ENGINES,
    SERVED,
    ServersConfig,
    SpeculationConfig,
    WeightSyncConfig,
    known_engine,
)


def _not_delayed(recipe: Any) -> Any:
    if recipe == "delayed":
        raise ValueError(
            "delayed scaling starts from scales of 1, which only training moves: log-probs that a run scores "
            "before its first update would be far off; use tensorwise"
        )
    return recipe


class FP8Config(Section):
    """Matrix products in FP8, by Transformer Engine; everything else stays in bfloat16."""

    fixed_keys = EVERY_KEY

    # How values are scaled before they are rounded. `mxfp8` needs a Blackwell GPU.
    recipe: Annotated[Literal["tensorwise", "blockwise", "mxfp8"], BeforeValidator(_not_delayed)]
    bf16_layers: NonNegativeInt = 0  # This many first layers and this many last layers stay in bfloat16.
    weights: bool = False  # Keep and gather the weights in FP8 too.

    @property
    def tokens(self) -> int:
        """Number of tokens in a block of the FP8 kernels."""
        return {"tensorwise": 16, "blockwise": 128, "mxfp8": 32}[self.recipe]

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.weights and self.recipe == "mxfp8":
            raise ValueError(
                "weights=true with recipe=mxfp8: Megatron gathers such weights in the gradients' buffer, "
                "where an export between two updates does not find them; use weights=false"
            )
        return self


class ModelConfig(Section):
    fixed_keys = ("dtype", "fp8", "adapter", "train_vision", "freeze")
    free_keys = ("path", "trust_remote_code")

    path: LocalPath  # A Hugging Face checkpoint directory: config.json, safetensors files, tokenizer.
    # Type of weights and activations; master weights, gradient sums and log-probs are always float32.
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    # Run Python files that come with the checkpoint, in the trainer and in the servers that it starts.
    trust_remote_code: bool = False
    # Train the vision tower of a model that takes images, too; by default its weights stay as they are.
    train_vision: bool = False
    # Weights that stay as they are, by Megatron's names; `*` stands for any text, and a module for all in it:
    # [embedding, decoder.layers.0, "*.router"]. Layers are counted from 0.
    freeze: tuple[str, ...] = ()
    fp8: FP8Config | None = None
    adapter: AdapterConfig | None = None  # Train low-rank adapters (LoRA), and keep the weights as they are.

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.fp8 is not None and self.dtype != "bfloat16":
            raise ValueError(f"fp8 needs dtype=bfloat16 for what is not in FP8, and dtype={self.dtype}")
        if self.freeze and self.adapter is not None:
            raise ValueError("freeze has no effect with adapter, which keeps all weights as they are")
        return self


class DatasetConfig(Section):
    fixed_keys = (
        "subset",
        "split",
        "convert",
        "prompt_key",
        "images_key",
        "tools_key",
        "answer_key",
        "demonstration_key",
        "responses_key",
        "limit",
    )
    free_keys = ("path",)  # a resumed run compares only the content of the files

    # A .jsonl or .parquet file, a directory of such files, the name of a hub data set, or
    # `reasoning_gym:NAME?option=value`, a generator of the package reasoning-gym with its options.
    path: LocalPath
    subset: str | None = None  # The configuration of a hub data set, such as `main`.
    split: str = "train"  # The split of a hub data set, or the name of one for a generator.
    # A function of each record, `module:function` or `path/file.py:function`, that returns it with the fields
    # that the keys below name, or None to leave it out. megatron_gvpo.data.converters has some.
    convert: str | None = None
    prompt_key: str = "prompt"  # The field with the prompt: a string, or a list of chat messages.
    # The field with the images of a prompt, for a model that takes images: one, or a list, of paths (relative
    # to the data file) and data: URLs. Images of a hub data set or a Parquet file are taken as they are.
    images_key: str | None = None
    # The field with the tools that the chat template shows in the record's prompt: a list of JSON schemas, or
    # its JSON text. A record may have none. Tools that the run calls are rollout.conversation.tools.
    tools_key: str | None = None
    # The field with the answer that rewards compare with; null where no reward needs one.
    answer_key: str | None = "answer"
    # The field with a worked solution, for SFT or as a member of the group: a string, or a list of chat
    # messages of which the assistant's are the solution. Without it, SFT recognises the commonest records.
    demonstration_key: str | None = None
    # The field with scored responses, `[{"response": ..., "reward": ...}, ...]`, for algorithm.sampler=file.
    # Without it, records with `chosen` and `rejected` are recognised.
    responses_key: str | None = None
    # Read only this many records, the first; of a hub data set only the files that they are in.
    limit: PositiveInt | None = None


class DataConfig(Section):
    fixed_keys = (
        "chat_template",
        "chat_template_kwargs",
        "system_prompt",
        "max_prompt_tokens",
        "prompt_too_long",
        "shuffle",
    )
    free_keys = ("eval",)

    train: DatasetConfig
    eval: DatasetConfig | None = None
    chat_template: bool = True  # Apply the tokenizer's chat template where it has one.
    # Variables that the chat template reads, such as {enable_thinking: false} for Qwen3.
    chat_template_kwargs: dict[str, JsonValue] = Field(default_factory=dict)
    system_prompt: str | None = None  # System message for prompts that have none; needs a chat template.
    # The longest prompt, in tokens, chat template included. Default: the part of the model's
    # max_position_embeddings that the longest response leaves.
    max_prompt_tokens: PositiveInt | None = None
    # error: a longer prompt ends the run; drop: it is left out.
    prompt_too_long: Literal["error", "drop"] = "error"
    # Draw the prompts of every epoch in a new random order; false keeps the order of the file.
    shuffle: bool = True


GREEDY = 1e-6  # the top_p that leaves only the most likely token, in every engine


def _sampled_text(text: str) -> str:
    if "\ufffd" in text:  # it stands for a character whose last bytes may still come
        raise ValueError("a stop string cannot have the replacement character U+FFFD")
    return text


StopString = Annotated[str, Field(min_length=1, max_length=256), AfterValidator(_sampled_text)]


class SamplingConfig(Section):
    """Settings of sampling. `eval.sampling` takes the keys that it does not set from `rollout`."""

    fixed_keys: ClassVar[tuple[str, ...]] = (
        *("temperature", "top_p", "top_k", "min_p"),
        *("max_tokens", "stop_token_ids", "stop"),
    )

    # Sampling temperature. It is part of the policy: training divides logits by it, too. (vLLM raises lower
    # values to 0.01.)
    temperature: float = Field(1.0, ge=0.01, le=100)
    # Sample from the likeliest tokens whose probabilities add up to this. Training renormalises log-probs to
    # the tokens that top_p, top_k and min_p left (docs/explanation/truncated_sampling.md).
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int | None = Field(None, gt=0, le=10**6)  # Sample from this many likeliest tokens; default: all.
    # Sample from the tokens that are at least this fraction as likely as the likeliest.
    min_p: float = Field(0.0, ge=0, lt=1)
    max_tokens: PositiveInt = 1024  # The longest response, in tokens; a longer one is cut off.
    # Tokens that end a response, besides the tokenizer's eos_token and the eos_token_id of the model's files.
    stop_token_ids: tuple[NonNegativeInt, ...] = ()
    # Texts that end a response, such as ["</answer>"]: it ends with the token that completes one of them. The
    # text belongs to the response, and is trained.
    stop: Annotated[tuple[StopString, ...], Field(max_length=32)] = ()

    @field_validator("temperature", "top_k", mode="before")
    @classmethod
    def _as_engines_say(cls, value: Any, info: ValidationInfo) -> Any:
        if info.field_name == "top_k" and value in (0, -1):
            raise ValueError("all tokens are null here, not 0 or -1 as in some engines")
        if info.field_name == "temperature" and value == 0 and not isinstance(value, bool):
            raise ValueError("0 is greedy in some engines; the lowest here is 0.01, which is nearly so")
        return value

    def stops(self, end_token_ids: Sequence[int]) -> tuple[int, ...]:
        """All tokens that end a response: the policy's `end_token_ids`, and those of the configuration."""
        return tuple(dict.fromkeys((*end_token_ids, *self.stop_token_ids)))

    @property
    def truncates(self) -> bool:
        """True if some tokens of the vocabulary cannot be sampled."""
        return self.top_p < 1 or self.top_k is not None or self.min_p > 0

    @property
    def wants_routing(self) -> bool:
        """True if the engine must report the experts of every token."""
        return False

    @property
    def wants_support(self) -> bool:
        """True if the engine must report the support of each token; its log-probs are over the support."""
        return False


class RolloutConfig(SamplingConfig):
    fixed_keys = (
        *SamplingConfig.fixed_keys,
        *("n", "async_steps", "over_sampling_prompts", "router_replay", "conversation"),
    )
    free_keys = ("engine", "batch_size", "mismatch_threshold", "speculation")

    # `local` runs inside the trainer's processes; the others are servers.
    engine: Annotated[str, AfterValidator(known_engine)] = "local"
    n: int = Field(8, gt=0, le=10**5)  # Responses to a prompt: the group size k.
    batch_size: PositiveInt = 256  # Sequences that the engine `local` generates at once.
    # Steps by which a response's oldest weights may be behind; 0: on-policy. Servers on GPUs of their own
    # generate so many batches ahead while the trainer trains.
    async_steps: int = Field(0, ge=0, le=100)
    # Partial rollouts on colocated servers: prompts in progress beyond those of a step, which ends when
    # train.prompts_per_step groups are complete. The rest continue in later steps, within async_steps.
    over_sampling_prompts: NonNegativeInt = 0
    router_replay: bool = False  # Train every token through the experts that sampled it.
    conversation: ConversationConfig | None = None  # Several turns with an environment or tools.
    servers: ServersConfig = ServersConfig()  # The servers of the engines sglang and vllm.
    weights: WeightSyncConfig = WeightSyncConfig()
    # Speculative decoding on servers: a draft proposes several tokens, the policy accepts or replaces them.
    speculation: SpeculationConfig | None = None
    # Warn above this KL between the policy that samples and the trained one, in nats a token. Default: 1e-6
    # in float32, 4e-3 in bfloat16.
    mismatch_threshold: float | None = Field(None, gt=0)

    @property
    def truncation(self) -> str:
        """The keys that truncate with their values, as messages name them."""
        values = {"top_p": self.top_p, "top_k": self.top_k, "min_p": self.min_p}
        neutral = {"top_p": 1, "top_k": None, "min_p": 0}
        return ", ".join(f"rollout.{key}={value}" for key, value in values.items() if value != neutral[key])

    @property
    def wants_routing(self) -> bool:
        return self.router_replay

    @property
    def wants_support(self) -> bool:
        return self.truncates

    @property
    def greedy(self) -> SamplingConfig:
        """The same sampling, but always of the likeliest token, for responses that are not trained."""
        values = {name: getattr(self, name) for name in SamplingConfig.model_fields}
        return SamplingConfig(**values | {"top_p": GREEDY})

    @property
    def uses_servers(self) -> bool:
        """True if the engine uses servers, instead of generating in the trainer's processes."""
        return ENGINES[self.engine] == SERVED


class EarlyStopConfig(Section):
    """End a run whose metric of `checkpoint.keep_best` no longer improves."""

    free_keys = EVERY_KEY

    patience: PositiveInt  # Evaluations without an improvement after which the run ends.
    min_delta: float = Field(0.0, ge=0)  # Only a change by more than this is an improvement.


class TrainConfig(Section):
    fixed_keys = ("prompts_per_step", "mini_batches", "batch_epochs", "seed")
    free_keys = (
        "steps",
        "max_hours",
        "stop_early",
        "max_tokens_per_micro_batch",
        "max_empty_batches",
        "share_prompts",
        "head_stash_mb",
        "head_backend",
        "deterministic",
    )

    steps: PositiveInt  # Steps of the run. A step samples one batch of prompts and trains on it.
    # End the run after the step in which this many hours of wall time have passed since its start, loading
    # included, with a checkpoint and an export; --resume goes on, for as many hours again. Default: no limit.
    max_hours: float | None = Field(None, gt=0, le=10**5)
    # End the run when the metric of checkpoint.keep_best has not improved in this many evaluations, with a
    # checkpoint and an export; the best checkpoint is that of keep_best. Default: never.
    stop_early: EarlyStopConfig | None = None
    prompts_per_step: int = Field(gt=0, le=10**6)  # Prompts of a step, over all ranks.
    mini_batches: PositiveInt = 1  # Optimizer updates of a step; each trains on an equal part of its groups.
    batch_epochs: PositiveInt = 1  # Passes over the mini-batches of a step (PPO's epochs, GRPO's mu).
    # Prompt and response tokens that a rank computes at once. It bounds memory and does not change gradients.
    max_tokens_per_micro_batch: PositiveInt = 8192
    # End the run after this many batches in a row that teach nothing: algorithm.shapers drop every group, no
    # group has a signal for the loss (all its rewards are equal), a reward fails for every response, or no
    # update has a finite gradient.
    max_empty_batches: PositiveInt = 20
    # Compute a prompt once for all responses to it in a micro-batch. `auto`: on a CPU, where model and layout
    # allow it; the run reports that it does, or the reason why not.
    share_prompts: bool | Literal["auto"] = "auto"
    # MiB that a rank may keep between a micro-batch's forward and backward for the output layer's gradient; 0
    # keeps nothing and recomputes (docs/explanation/head.md).
    head_stash_mb: NonNegativeInt = 1024
    # The kernels of the output layer's log-probs. `quack`: on Hopper, in bfloat16, for the tokens whose
    # exponentials are kept, a product of quack-kernels that writes no logits. No GPU has run it yet.
    head_backend: Literal["auto", "quack"] = "auto"
    seed: Seed = 0  # Seed of sampling, order and initialisation.
    deterministic: bool = False  # Repeat the metrics bit for bit under the same layout; slower on a GPU.

    @property
    def requires_shared_prompts(self) -> bool:
        """True if the run must not start where prompts cannot be shared."""
        return self.share_prompts is True

    @property
    def head_stash_bytes(self) -> int:
        return self.head_stash_mb * MIB

    @property
    def updates_per_step(self) -> int:
        """Optimizer updates of a step."""
        return self.mini_batches * self.batch_epochs

    @property
    def updates(self) -> int:
        """Optimizer updates of the whole run."""
        return self.steps * self.updates_per_step


Decay = Annotated[float, Field(ge=0, lt=1)]


class MuonConfig(Section):
    """Muon updates the layers' matrices; AdamW embeddings, heads, norms, biases and single rows."""

    fixed_keys = EVERY_KEY

    momentum: Decay = 0.95  # Decay rate of the moment.
    nesterov: bool = True  # Also look ahead: mix the gradient into the moment before it is orthogonalised.
    steps: int = Field(5, ge=1, le=20)  # Newton-Schulz iterations of an update.
    # The factor of an orthogonalised matrix of R rows and C columns. `adamw`: 0.2 sqrt(max(R, C)), so that
    # updates are as large as AdamW's with the same learning rate; `shape_scaling`: sqrt(max(1, R / C)), as in
    # the first description of Muon; `unit_rms_norm`: sqrt(R / C).
    scale: Literal["adamw", "shape_scaling", "unit_rms_norm"] = "adamw"


class OptimizerConfig(Section):
    fixed_keys = (
        "lr",
        "min_lr",
        "warmup_steps",
        "decay",
        "betas",
        "eps",
        "weight_decay",
        "clip_grad",
        "muon",
    )
    free_keys = ("offload_fraction",)

    lr: float = Field(gt=0, le=10)  # Learning rate after the warm-up.
    min_lr: float = Field(0.0, ge=0)  # Learning rate at the end of the decay.
    # Optimizer updates over which the rate rises linearly from 0. A run of fewer updates ends in the warm-up.
    warmup_steps: int = Field(0, ge=0)
    # How the learning rate falls from lr to min_lr until the last update.
    decay: Literal["constant", "linear", "cosine"] = "constant"
    betas: tuple[Decay, Decay] = (0.9, 0.95)  # AdamW's decay rates of the first and second moments.
    eps: float = Field(1e-8, gt=1e-30, le=1)  # AdamW's epsilon.
    # Decoupled weight decay. Megatron does not apply it to norms and biases, as torch's AdamW would.
    weight_decay: float = Field(0.0, ge=0, le=10)
    clip_grad: float = Field(1.0, ge=0)  # Clip the gradient's global norm to this; 0 does not clip.
    # Share of the fp32 master weights and moments that is kept in host memory and updated there.
    offload_fraction: float = Field(0.0, ge=0, le=1)
    muon: MuonConfig | None = None  # Update the matrices of the layers by Muon; `{}` takes its defaults.


class EvalConfig(Section):
    free_keys = EVERY_KEY

    # Steps between evaluations, which always come before the first step and after the last; 0: only then.
    every: int = Field(0, ge=0)
    n: int = Field(4, gt=0, le=10**5)  # Samples of each held-out prompt.
    # A sample is right if its score, that of the first reward component, is at least this: pass@k, all@k and
    # maj@n count the right ones.
    right_at: float = 1.0
    k: tuple[PositiveInt, ...] = (1,)  # Report unbiased estimates of pass@k and all@k for these k.
    sampling: SamplingConfig = SamplingConfig()
    seed: Seed = 1234  # Seed of the evaluation's samples, the same at every step.


class BestConfig(Section):
    free_keys = EVERY_KEY

    metric: str  # Such as `eval/pass@1`. Only checkpoints of steps that have this metric are compared.
    order: Literal["highest", "lowest"] = "highest"  # Which value is best.


class HubConfig(Section):
    free_keys = EVERY_KEY

    repo: str = Field(pattern=r"^[\w.-]+/[\w.-]+$")  # OWNER/NAME; created if it does not exist.
    # `{env: NAME}`: the environment variable with the token. Default: the login of this machine.
    token: str | None = None
    private: bool = True  # Create the repository as a private one.

    @model_validator(mode="after")
    def _token_from_environment(self) -> Self:
        if self.token is not None and not from_variable(self.token):
            raise ValueError("token: a secret in the configuration: give `{env: NAME}`")
        return self


class CheckpointConfig(Section):
    free_keys = EVERY_KEY

    # Steps between checkpoints, of which one always follows the last step; 0: only that one.
    every: int = Field(0, ge=0)
    keep: PositiveInt = 2  # How many of the newest complete checkpoints stay on disk.
    asynchronous: bool = False  # Write while the next step generates and scores.
    export_hf: bool = True  # Write a Hugging Face checkpoint, OUTPUT_DIR/hf, after the last step.
    # Also write every N-th checkpoint as a Hugging Face checkpoint to OUTPUT_DIR/exports; 0: none.
    export_every: NonNegativeInt = 0
    # Also keep the checkpoint with the best value of a metric, and write it to OUTPUT_DIR/hf_best.
    keep_best: BestConfig | None = None
    # Push OUTPUT_DIR/hf_best (without keep_best OUTPUT_DIR/hf) to the Hugging Face hub after the last step.
    push_to_hub: HubConfig | None = None

    def exports(self, step: int) -> bool:
        """True if the checkpoint of this step is exported during the run."""
        return step > 0 and self.export_every > 0 and step % (self.every * self.export_every) == 0


class RolloutFilesConfig(Section):
    """The responses of the run as Parquet files, OUTPUT_DIR/rollouts."""

    free_keys = EVERY_KEY

    # Save the responses of every N-th step, and of evaluations; 0: none.
    every: NonNegativeInt = 1
    groups: PositiveInt | None = None  # Save at most this many groups of a step, evenly spread. Default: all.
    # Gigabytes (10^9 bytes) for all files together; above it the oldest are removed.
    max_gb: float = Field(4.0, gt=0)

    def saves(self, step: int) -> bool:
        """True if the responses of this training step are saved."""
        return self.every > 0 and step % self.every == 0


class StepRecordsConfig(Section):
    """The trainer's numbers of the last steps, OUTPUT_DIR/steps, for `megatron-gvpo replay`."""

    free_keys = EVERY_KEY

    # Gigabytes (10^9 bytes) for all records together; above it the oldest are removed. 0: none is written.
    max_gb: float = Field(1.0, ge=0)


class LoggingConfig(Section):
    free_keys = EVERY_KEY

    rollouts: RolloutFilesConfig = RolloutFilesConfig()
    steps: StepRecordsConfig = StepRecordsConfig()

    tensorboard: bool = True  # Write TensorBoard events to OUTPUT_DIR/tensorboard.
    wandb_project: str | None = None  # Log to this Weights & Biases project too.
    trackio_project: str | None = None  # Log to this trackio project too.
    mlflow_experiment: str | None = None  # Log to this MLflow experiment too.
    swanlab_project: str | None = None  # Log to this SwanLab project too.
    # How the terminal shows progress. live: a display; lines: one at least every 30 seconds; all: every step
    # with all its metrics; off: nothing; auto: live on a terminal, else lines.
    progress: Literal["auto", "live", "lines", "all", "off"] = "auto"
    # Run a profiler over the steps [first, last].
    profile_steps: tuple[PositiveInt, PositiveInt] | None = None
    # torch's profiler, or Nsight Systems, under which the run was started; nsys also marks the phases (NVTX).
    profiler: Literal["torch", "nsys"] = "torch"
    opentelemetry: bool = False  # Send the phases of steps as spans to OTEL_EXPORTER_OTLP_ENDPOINT.

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.profile_steps is not None and self.profile_steps[0] > self.profile_steps[1]:
            raise ValueError(
                f"profile_steps={list(self.profile_steps)}: want the first step and the last, as [2, 4]"
            )
        return self
