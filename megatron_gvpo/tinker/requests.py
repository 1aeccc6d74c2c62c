"""The JSON requests of the Tinker API (tinker 0.38) that this server serves; unknown keys are errors."""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from megatron_gvpo.tinker.wire import Refusal

HIGHEST_RATE = 10  # the highest learning rate, as that of optimizer.lr
LONGEST_LIFE = 10**9  # the longest time, in seconds, after which a checkpoint expires


class ApiRequest(BaseModel):
    """A request of the API."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())
    type: str | None = None  # the SDK repeats the request's name here


class CreateSession(ApiRequest):
    tags: list[str] = []
    user_metadata: dict[str, JsonValue] | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None


class SessionRequest(ApiRequest):
    session_id: str


class LoraOptions(ApiRequest):
    rank: int
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerChoice(ApiRequest):
    type: Literal["adamw"] = "adamw"


class CreateModel(ApiRequest):
    session_id: str
    model_seq_id: int = Field(ge=0)
    base_model: str
    user_metadata: dict[str, JsonValue] | None = None
    lora_config: LoraOptions | None = None
    optimizer_config: OptimizerChoice = OptimizerChoice()


class ModelRequest(ApiRequest):
    model_id: str


class AdamParams(ApiRequest):
    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0

    def step(self) -> dict[str, Any]:
        """Return the settings in the form that the ranks get. Raises Refusal for impossible settings."""
        values = self.model_dump(exclude={"type"})
        if not all(math.isfinite(value) and value >= 0 for value in values.values()):
            raise Refusal(f"adam_params={values}: want finite numbers of at least 0")
        if max(self.beta1, self.beta2) >= 1 or self.eps == 0 or self.learning_rate > HIGHEST_RATE:
            raise Refusal(
                f"adam_params={values}: want betas below 1, an eps above 0 and a learning_rate of at most "
                f"{HIGHEST_RATE}"
            )
        return {
            "lr": self.learning_rate,
            "betas": [self.beta1, self.beta2],
            "eps": self.eps,
            "weight_decay": self.weight_decay,
            "clip_grad": self.grad_clip_norm,
        }


class OptimStep(ModelRequest):
    adam_params: AdamParams
    seq_id: int = 0


class SaveWeights(ModelRequest):
    path: str | None = None
    seq_id: int = 0
    ttl_seconds: int | None = Field(None, gt=0, le=LONGEST_LIFE)
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None


class SaveForSampler(ModelRequest):
    path: str | None = None
    sampling_session_seq_id: int | None = None
    kind: Literal["snapshot"] = "snapshot"  # `inflight`, a sampler that follows training, is not served
    seq_id: int = 0
    ttl_seconds: int | None = Field(None, gt=0, le=LONGEST_LIFE)
    user_metadata: dict[str, str] | None = None


class LoadWeights(ApiRequest):
    model_id: str | None = None
    seq_id: int = 0
    session_id: str | None = None
    model_seq_id: int | None = None
    base_model: str | None = None
    user_metadata: dict[str, JsonValue] | None = None
    path: str
    optimizer: bool
    optimizer_config: OptimizerChoice | None = None
    weights_access_token: None = None


class CreateSampler(ApiRequest):
    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None


class TextChunk(ApiRequest):
    type: Literal["encoded_text"] = "encoded_text"
    tokens: list[int]


class ModelInput(ApiRequest):
    chunks: list[TextChunk]

    def tokens(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.tokens]


class SamplingParams(ApiRequest):
    max_tokens: int | None = Field(None, gt=0)
    seed: int | None = Field(None, ge=0)
    stop: str | list[str] | list[int] | None = None
    temperature: float = Field(1.0, ge=0, le=100)
    top_k: int = -1
    top_p: float = Field(1.0, gt=0, le=1)


class SampleBody(ApiRequest):
    sampling_session_id: str
    seq_id: int
    num_samples: int = Field(1, gt=0, le=10**5)
    prompt: ModelInput
    sampling_params: SamplingParams
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: int | None = None
    topk_prompt_logprobs: Literal[0] = 0
    topk_sample_logprobs: Literal[0] = 0
    prompt_alt_tokens_k: Literal[0] = 0
    target_prompt_logprobs: None = None
    record_stability_info: bool | None = None  # True is refused, with an explanation


class RetrieveFuture(ApiRequest):
    request_id: str
    allow_metadata_only: bool = False


class WeightsInfo(ApiRequest):
    tinker_path: str


def read[Request: ApiRequest](kind: type[Request], body: bytes) -> Request:
    """Parse and validate a body. Raises Refusal, which names the field."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        problem = "this server does not serve it" if first["type"] == "extra_forbidden" else first["msg"]
        raise Refusal(f"{where}: {problem}", 422) from None
