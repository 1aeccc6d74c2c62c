"""Models on servers that judge responses: the keys `model` and `judge` of a reward, and the `teacher`."""

from __future__ import annotations

import re
from typing import Any, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from megatron_gvpo.core.section import LocalPath, Seconds, Section
from megatron_gvpo.settings.servers import EngineServers

SCORE, EXPLANATION = "score", "explanation"  # the fields of a verdict in JSON
MODEL = "reward"  # the name of the model in requests to servers that the run starts

TEMPLATE = (
    "Grade the response to a problem from {lowest} to {highest}.\n\nProblem:\n{prompt}\n\n"
    "Response:\n{response}\n\nAnswer in JSON: an explanation of at most three sentences, then the score."
)


class RewardServers(EngineServers):
    """The servers of a reward model."""

    engine: Literal["sglang", "vllm"] = "sglang"  # The servers' engine.
    parallel: PositiveInt = 16  # Requests to one server at once.
    request_timeout: Seconds = 120.0  # Seconds that one request may take; then it is repeated.


class JudgeServers(RewardServers):
    """The servers of a judge."""

    # The servers' engine; `openai` is any server at `urls` with the OpenAI chat interface.
    engine: Literal["sglang", "vllm", "openai"] = "sglang"  # type: ignore[assignment]


class RewardModelConfig(Section):
    """A Hugging Face sequence-classification model with one label, whose logit is the reward."""

    fixed_keys = ("too_long",)
    # The content at `path` is compared, not the path.
    free_keys = ("path", "dtype", "trust_remote_code", "batch_size")

    # The checkpoint's directory: config.json, weights, and the tokenizer with the chat template that the
    # conversations are written in. Servers in `urls` serve the same model.
    path: LocalPath
    dtype: Literal["float32", "bfloat16"] = "bfloat16"  # Type of weights and activations on the servers.
    trust_remote_code: bool = False  # Run Python files that come with the checkpoint.
    batch_size: PositiveInt = 32  # Responses in one request.
    # A conversation longer than the model's context ends the run with an error, or its response leaves its
    # group. It is never cut off.
    too_long: Literal["error", "drop"] = "error"
    servers: RewardServers = RewardServers()


class JudgeConfig(Section):
    """A language model that reads a response and writes a verdict; a number in the verdict is the reward."""

    fixed_keys = (
        "model",
        "template",
        "system_prompt",
        "json_schema",
        "regex",
        "scale",
        "tries",
        "temperature",
        "max_tokens",
        "request",
    )
    free_keys = ("path", "dtype", "trust_remote_code")  # a resumed run compares only the content of `path`

    path: LocalPath | None = None  # The checkpoint's directory, for servers that the trainer starts.
    model: str | None = None  # The model's name in requests to servers in `urls`.
    dtype: Literal["float32", "bfloat16"] = "bfloat16"  # Type of weights and activations of started servers.
    trust_remote_code: bool = False  # Run Python files that come with the checkpoint.
    # The judge's task. {prompt}, {response}, {answer}, {lowest}, {highest} and, by their names, the data
    # record's other fields are filled in.
    template: str = TEMPLATE
    system_prompt: str | None = None  # A system message before the task.
    # The JSON schema that the server forces on every verdict: an object with the number `score` and, if you
    # like, the text `explanation`. Default: an explanation, then an integer score in `scale`.
    json_schema: dict[str, Any] | None = None
    # Instead of a schema: a regular expression for the whole verdict, whose first group is the score.
    regex: str | None = None
    scale: tuple[float, float] = (0.0, 10.0)  # The scores whose rewards are 0 and 1; others are invalid.
    # The most requests for a valid verdict; each repetition tells the judge the error.
    tries: PositiveInt = 3
    temperature: float = Field(0.0, ge=0, le=2)  # Sampling temperature of verdicts.
    max_tokens: PositiveInt = 512  # The longest verdict, in tokens.
    # Further fields of requests, such as {chat_template_kwargs: {enable_thinking: false}}.
    request: dict[str, Any] = Field(default_factory=dict)
    servers: JudgeServers = JudgeServers()

    @property
    def fields_of_data(self) -> list[str]:
        """The fields of data records that the template names."""
        own = {"prompt", "response", "answer", "lowest", "highest"}
        return sorted(set(re.findall(r"\{([^\W\d]\w*)\}", self.template)) - own)

    @property
    def schema_of_verdicts(self) -> dict[str, Any] | None:
        """The JSON schema of verdicts; None if they follow a regular expression."""
        if self.regex is not None:
            return None
        if self.json_schema is not None:
            return self.json_schema
        lowest, highest = self.scale
        score = {"type": "integer", "minimum": int(lowest), "maximum": int(highest)}
        return {
            "type": "object",
            "properties": {EXPLANATION: {"type": "string"}, SCORE: score},
            "required": [EXPLANATION, SCORE],
            "additionalProperties": False,
        }

    @model_validator(mode="after")
    def _possible(self) -> Self:
        servers, own = self.servers, (self.json_schema, self.regex)
        if bool(servers.urls) == (self.path is not None):
            raise ValueError("give either path, for servers that the trainer starts, or servers.urls")
        if servers.urls and self.model is None:
            raise ValueError("model is missing: the name under which the servers in servers.urls have it")
        if servers.engine == "openai" and (not servers.urls or self.regex is not None):
            raise ValueError("servers.engine=openai needs servers.urls, and takes a json_schema, no regex")
        if all(value is not None for value in own):
            raise ValueError("give either json_schema or regex")
        if "{response}" not in self.template:
            raise ValueError("template: {response} is missing, which stands for the response to judge")
        if not self.scale[0] < self.scale[1]:
            raise ValueError(f"scale={list(self.scale)}: want the lowest score and a higher one, as [0, 10]")
        if own == (None, None) and any(end != int(end) for end in self.scale):
            raise ValueError(f"scale={list(self.scale)}: integers, or a json_schema or regex of your own")
        if self.json_schema is not None and SCORE not in self.json_schema.get("properties", {}):
            raise ValueError(f"json_schema: it has no property {SCORE!r}, which is the reward")
        if self.regex is not None:
            try:
                groups = re.compile(self.regex).groups
            except re.error as error:
                raise ValueError(f"regex: not a regular expression: {error}") from None
            if not groups:
                raise ValueError("regex: it has no group for the score; write one, as in Score: ([0-9]+)")
        return self


def key_of(i: int, served: RewardModelConfig | JudgeConfig) -> str:
    """The configuration's key of reward component `i`'s model."""
    return f"rewards.components.{i}.{'judge' if isinstance(served, JudgeConfig) else 'model'}"


# --- the section `teacher` ---------------------------------------------------------------------------------


class TeacherServers(RewardServers):
    """The servers of a teacher."""


class TeacherConfig(Section):
    """A language model of any size, from whose log-probs the policy learns."""

    free_keys = ("path", "trust_remote_code", "server")  # the content at `path` is compared, not the path

    # A Hugging Face checkpoint directory: config.json, weights, and the same tokenizer as model.path has. The
    # recipe gvpo_plus_plus takes another tokenizer, too: the teacher then scores the text of responses.
    # Servers in `server.urls` serve the same model. Its weights and activations have the type model.dtype.
    path: LocalPath
    trust_remote_code: bool = False  # Run Python files that come with the checkpoint.
    # The teacher computes on servers of SGLang or vLLM; null: in the trainer's own processes.
    server: TeacherServers | None = None
