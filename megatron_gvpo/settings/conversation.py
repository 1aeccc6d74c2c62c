"""The section `rollout.conversation`: the partner of the policy's conversations, and their limits."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from megatron_gvpo.core.secrets import from_variable, is_secret_name
from megatron_gvpo.core.section import LocalPath, Processes, Seconds, Section

PYTHON = "python"  # the built-in tool that runs programs
PARSERS = ("hermes", "json", "xml")  # formats of tool calls; data/tool_calls.py has a function for each


class SandboxConfig(Section):
    """The sandbox in which the tool `python` runs a program, by bubblewrap: no network, no host files."""

    fixed_keys = ("seconds", "memory_mb")
    free_keys = ("packages",)

    seconds: float = Field(10.0, gt=0, le=3600)  # Seconds that a program may take.
    # MiB of address space that a program may take, its interpreter's 30 included.
    memory_mb: int = Field(512, ge=64, le=2**20)
    # A directory of Python packages that programs can import, as `pip install --target` makes it. Default:
    # the standard library alone.
    packages: LocalPath | None = None


class McpConfig(Section):
    """An MCP server, whose tools the policy may call: a program to start, or an address."""

    fixed_keys = ("command", "url")
    free_keys = ("env", "headers")

    command: tuple[str, ...] = ()  # The program and its arguments; it speaks over its input and output.
    # The program's environment, besides PATH, HOME, USER, LOGNAME, SHELL and TERM.
    env: dict[str, str] = Field(default_factory=dict)
    url: str | None = None  # The address of a server that speaks streamable HTTP.
    headers: dict[str, str] = Field(default_factory=dict)  # HTTP headers for that address.

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if bool(self.command) == (self.url is not None):
            raise ValueError("give either a command or a url")
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url={self.url}: want http:// or https://")
        if (self.env and self.url is not None) or (self.headers and self.command):
            raise ValueError("env is for a command, headers are for a url")
        for key in ("env", "headers"):
            for name, value in getattr(self, key).items():
                if is_secret_name(name) and not from_variable(value):
                    raise ValueError(f"{key}.{name}: a secret in the configuration: give `{{env: NAME}}`")
        return self


class ConversationConfig(Section):
    """A conversation of several turns with an environment or with tools, instead of one response to a prompt.

    `rollout.max_tokens` bounds all that comes after the prompt, the environment's tokens included.
    """

    fixed_keys = (
        "environment",
        "program",
        "options",
        "tools",
        "mcp",
        "parser",
        "earlier_key",
        "history",
        "turns",
        "turn_tokens",
        "observation_tokens",
    )
    free_keys = ("step_timeout", "rollout_timeout", "workers", "max_lost")

    # Your own class with reset(prompt, seed) and step(response): `module:Class` or `path/file.py:Class`.
    environment: str | None = None
    # Your own function run(prompt, endpoint), plain or async, in the same form: any program that asks the
    # policy through an OpenAI client, and returns the reward.
    program: str | None = None
    # Keyword arguments of the class or the program.
    options: dict[str, Any] = Field(default_factory=dict)
    # Functions that the policy may call, `module:function` or `path/file.py:function`, instead of an
    # environment. The chat template gets their signatures and docstrings. `python` runs programs in a
    # sandbox.
    tools: tuple[str, ...] = ()
    sandbox: SandboxConfig = SandboxConfig()  # The sandbox of the tool `python`.
    # MCP servers, whose tools the policy may call, too. They need the package `mcp`.
    mcp: tuple[McpConfig, ...] = ()
    # How the policy writes tool calls: hermes, json, xml, or your own function in the same form, which takes
    # the text of a turn and returns the calls as a list of (name, arguments).
    parser: str = "hermes"
    # Field of the data with the policy's earlier turns, a list of texts, if prompts are beginnings of
    # conversations: the environment gets them before the first turn. Default: prompts have no earlier turns.
    earlier_key: str | None = None
    # append: the policy sees its own tokens and the environment's answers after them. template: the chat
    # template writes the whole conversation again for every turn, and may leave out earlier thinking.
    history: Literal["append", "template"] = "append"
    turns: PositiveInt = 8  # The largest number of the policy's turns.
    turn_tokens: PositiveInt | None = None  # The longest turn, in tokens; null: as long as max_tokens allows.
    # The longest answer of the environment, in tokens; a note replaces a longer one.
    observation_tokens: PositiveInt = 1024
    # Seconds for one answer of the environment, or of a program between two answers of the policy.
    step_timeout: Seconds = 30.0
    # Seconds for all answers of the environment in one conversation, or for the program's time between the
    # policy's answers; then the conversation ends as if no turns were left. Default: no limit.
    rollout_timeout: Seconds | None = None
    # Processes in which environments run, or which start programs, on every rank that samples.
    workers: Processes = 1
    # End the run if failures of the environment lose a larger share of a batch's conversations.
    max_lost: float = Field(0.5, ge=0, lt=1)

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if sum(map(bool, (self.environment, self.program, self.has_tools))) != 1:
            raise ValueError("give one of environment, tools and program")
        if self.has_tools and self.options:
            raise ValueError("options are for an environment or a program; tools take none")
        if self.environment is None and self.earlier_key is not None:
            raise ValueError("earlier_key is for an environment")
        if self.program is not None and self.history != "append":
            raise ValueError("history is for an environment and tools; a program's calls bring their own")
        if self.parser not in PARSERS and ":" not in self.parser:
            raise ValueError(
                f"parser={self.parser}: want {', '.join(PARSERS)}, or your own function as module:function "
                "or path/file.py:function"
            )
        if PYTHON in self.tools and self.sandbox.seconds >= self.step_timeout:
            raise ValueError(
                f"sandbox.seconds={self.sandbox.seconds:g} must be below step_timeout={self.step_timeout:g}"
            )
        return self

    @property
    def counts(self) -> tuple[str, ...]:
        """The names of the counts of every conversation; an environment or a program may add its own."""
        names = ["turns", "environment_reward", "observation_tokens"]
        if self.has_tools:
            names += ["tool_calls", "tool_errors"]
        if self.program is None:
            names += ["observations_dropped"]
        else:
            names += ["overridden_calls", "retried_calls"]
        return tuple(names)

    @property
    def has_tools(self) -> bool:
        """True if the policy calls tools: functions, or those of MCP servers."""
        return bool(self.tools or self.mcp)
