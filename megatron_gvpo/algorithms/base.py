"""The blocks that a method is composed of, and the kinds that losses and advantages share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol, Self, runtime_checkable

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from megatron_gvpo.core.lazy_imports import torch
from megatron_gvpo.core.section import EVERY_KEY, Section
from megatron_gvpo.core.user_functions import check_signature, load_function
from megatron_gvpo.types import BatchTotals, LossInputs, TrainBatch

if TYPE_CHECKING:
    from torch import Tensor

type Metrics = dict[str, Tensor]


class RunSizes(NamedTuple):
    """The sizes of a run on which it may depend whether an option has an effect."""

    steps: int
    prompts: int  # of a step
    responses: int  # to a prompt, without those of members
    max_tokens: int | None  # of a response; None for conversations, which may be longer


# A component of the reward, by its name or its number; by convention 0 is the verifier's.
Component = str | NonNegativeInt


class Block(Section):
    """Options of one block of a method; its fields are the keys that a user writes in YAML.

    If there are several blocks to choose from, `name` is the chosen one; `reference: fixed` is short for
    `reference: {name: fixed}`. A block also declares what it needs of the run, and configurations that lack
    it are refused before anything is loaded.
    """

    fixed_keys = EVERY_KEY

    # True if the block requests responses from the rollout engine.
    needs_engine: ClassVar[bool] = False
    # True if the block reads the log-probs that the rollout engine gave with its responses.
    needs_engine_logprobs: ClassVar[bool] = False
    # True if the block requests log-probs of the policy at step start while responses are still being
    # sampled.
    needs_policy_logprobs: ClassVar[bool] = False
    # True if the block reads `prompt.demonstration`.
    needs_demonstrations: ClassVar[bool] = False
    # True if the block works on rewards and has no meaning without them.
    needs_rewards: ClassVar[bool] = False
    # True if the block gives responses rewards or advantages without a component of the reward.
    makes_rewards: ClassVar[bool] = False
    # True if the block drops groups whose responses have equal rewards.
    drops_equal_rewards: ClassVar[bool] = False
    # True if the block may keep responses from being trained that stay in the batch.
    masks_responses: ClassVar[bool] = False

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, values: Any) -> Any:
        return {"name": values} if isinstance(values, str) and "name" in cls.model_fields else values

    @model_validator(mode="after")
    def _effective(self) -> Self:
        for option, needed in self.ineffective_options.items():
            default = type(self).model_fields[option].get_default(call_default_factory=True)
            if (value := getattr(self, option)) != default:
                raise ValueError(f"{option}={value} has no effect: it goes with {needed}; use the default")
        return self

    @property
    def ineffective_options(self) -> dict[str, str]:
        """Options without effect beside other options, each with the setting that it needs (`only_with`)."""
        return {}

    @property
    def only_after_updates(self) -> tuple[str, ...]:
        """Options that act only after a step's first update, when the policy differs from the old one."""
        return ()

    def idle_in(self, run: RunSizes) -> str | None:
        """The option that has no effect in a run of these sizes, with its value and the reason; else None."""
        return None

    @property
    def needs_tracker(self) -> bool:
        """True if it reads the success rates of prompts (`algorithm.tracker`)."""
        return False

    @property
    def needs_prior(self) -> bool:
        """True if it reads the expected reward of a prompt (`algorithm.prior`)."""
        return False

    @property
    def needs_teacher(self) -> bool:
        """True if it reads the teacher (`teacher`) otherwise than as a reference policy."""
        return False

    @property
    def needs_turns(self) -> bool:
        """True if it has no meaning without conversations."""
        return False

    @property
    def components_read(self) -> tuple[Component, ...]:
        """The components of the reward that the block needs."""
        return ()

    @property
    def record_fields(self) -> dict[str, str]:
        """The fields of data records that it reads, by the option that names each."""
        return {}

    @property
    def unset_length(self) -> str | None:
        """The option that is null and takes the length of the longest response; None if all are set."""
        return None

    def sized(self, max_tokens: int) -> Self:
        """The block, and the blocks inside it, for responses of at most `max_tokens` tokens."""
        changes: dict[str, Any] = {} if self.unset_length is None else {self.unset_length: max_tokens}
        for field in type(self).model_fields:
            value = getattr(self, field)
            if isinstance(value, Block):
                changes[field] = value.sized(max_tokens)
            elif isinstance(value, tuple):
                changes[field] = tuple(v.sized(max_tokens) if isinstance(v, Block) else v for v in value)
        return self.model_copy(update=changes)

    def problem(self) -> str | None:
        """The reason why the block cannot work, which begins with the option's name; None if it can.

        `sized` has set the lengths that users leave out.
        """
        return None

    def blocks_inside(self, above: str = "") -> Iterator[BlockAt]:
        """The blocks among the options of this one, and inside these, in the order of the options."""
        for field in type(self).model_fields:
            value = getattr(self, field)
            is_listed = isinstance(value, tuple)
            for i, block in enumerate(value if is_listed else (value,)):
                if isinstance(block, Block):
                    key = f"{above}{field}.{i}" if is_listed else f"{above}{field}"
                    yield BlockAt(key, _label(f"{above}{field}", block, is_listed), block)
                    yield from block.blocks_inside(f"{key}.")


class WithFunction(Block):
    """A block whose work is done by a function of the user's, which is loaded with the configuration."""

    arguments: ClassVar[tuple[str, ...]]  # The function is called with these, and with the options.

    function: str  # "module:function" or "file.py:function"
    options: dict[str, Any] = Field(default_factory=dict)  # keyword arguments of the function

    @model_validator(mode="after")
    def _callable(self) -> Self:
        check_call(self.function, self.arguments, self.options)
        return self


def check_call(function: str, arguments: Sequence[str], options: Mapping[str, Any]) -> None:
    """Load a function by the name that the user gave. Raises ValueError if it cannot be called so."""
    check_signature(load_function(function), f"f({', '.join(arguments)}, **options)", len(arguments), options)


def only_with(**options: tuple[bool, str]) -> dict[str, str]:
    """The options without effect; each argument is (has it an effect?, the setting that it goes with)."""
    return {option: needed for option, (effective, needed) in options.items() if not effective}


class BlockAt(NamedTuple):
    """A block inside another: its key there (`shapers.0`) and how errors call it (`shapers: overlong`)."""

    key: str
    label: str
    block: Block

    def option(self, name: str) -> str:
        """Return the name of the block's option for error messages."""
        return f"{self.label}: {name}" if ": " in self.label else f"{self.key}.{name}"


def _label(key: str, block: Block, listed: bool) -> str:
    name = getattr(block, "name", None)
    if name is None:
        return key
    return f"{key}: {name}" if listed else f"{key}={name}"


class Reference(Block):
    """Another policy that a loss or an advantage compares with; the trainer gives its log-probs.

    `step_start` is the policy that the step began with, `fixed` the one that the run began with, `ema`
    an exponential moving average of the weights (`ema <- decay * ema + (1 - decay) * weights` after
    every step), `teacher` another model, which the section `teacher` names.
    """

    name: Literal["step_start", "fixed", "ema", "teacher"] = "step_start"
    decay: float | None = Field(None, gt=0, lt=1)

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if (self.name == "ema") != (self.decay is not None):
            raise ValueError(
                f"decay={self.decay} with name={self.name}: ema needs a decay, the others have none"
            )
        return self

    def __str__(self) -> str:
        return self.name if self.decay is None else f"{self.name} with decay={self.decay}"

    @property
    def is_kept(self) -> bool:
        """True if the trainer keeps a copy of the trained weights for it."""
        return self.name in ("fixed", "ema")


STEP_START = Reference()
TEACHER = Reference(name="teacher")


class FullDivergence(Block):
    """A divergence of the policy from another model, over the whole vocabulary, at every response token.

    The loss gets `coef` times its mean over response tokens, in nats, with both models' logits divided by the
    sampling temperature. p is the policy, t the other model:

        forward  KL(t || p)        covers all that the teacher might say (supervised distillation)
        reverse  KL(p || t)        avoids what it would not write (MiniLLM, arXiv 2306.08543; the exact form
                                   of the sampled-token reverse KL of on-policy distillation)
        js       beta KL(t || m) + (1 - beta) KL(p || m), m = beta t + (1 - beta) p
                                   (GKD, arXiv 2306.13649; near beta 0 as forward, near 1 as reverse)
    """

    name: Literal["forward", "reverse", "js"] = "reverse"
    beta: float | None = Field(None, gt=0, lt=1)  # js: the weight of the other model in m; null: 0.5.
    # Compare the other model's k likeliest tokens; the rest counts as one token. null: all tokens.
    top_k: PositiveInt | None = None
    coef: float = Field(1.0, gt=0)  # The weight of the divergence in the loss.
    # The other model: `teacher`, which the trainer must hold (teacher.server=null), `fixed` or `ema`.
    reference: Reference = TEACHER

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.beta is not None and self.name != "js":
            raise ValueError(f"beta={self.beta} goes with name=js, not {self.name}")
        if self.reference == STEP_START:
            raise ValueError("reference=step_start: want teacher, fixed or ema")
        return self

    @property
    def needs_teacher(self) -> bool:
        return self.reference == TEACHER


# The attributes of a member that tell which responses it may bring.
MemberTrait = Literal["brings_demonstrations", "brings_hinted"]

# The policies that a block compares with, by the column of log-probs (`old_logp_r`, `ref_logp_r`) of each.
References = Mapping[Literal["old", "ref"], Reference]


@runtime_checkable
class Stateful(Protocol):
    """A member or an advantage of a run that remembers something between steps, for checkpoints.

    The state consists of JSON values and is a copy: an interrupted step resumes from the state before it.
    """

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class FilledBy(Protocol):
    """An advantage as a run uses it: `fill` adds advantages to rows, and may change a state."""

    def fill(self, rows: TrainBatch) -> tuple[TrainBatch, Metrics]: ...


class Advantage(Block):
    """Advantages from rewards, for all rows of one optimizer step at once.

    Calling it returns (advantages, metrics): fp32 [n], one a response, or [r], one a token, where
    `per_token`. Rows that are not trained have advantages too, which are ignored.
    """

    name: str

    # True if each token of a response has an advantage.
    per_token: ClassVar[bool] = False
    # True if the block numbers the items of responses (`rows.item_r`).
    finds_items: ClassVar[bool] = False
    # True if the block reads components of the reward, and never the total reward, which shapers change.
    by_components: ClassVar[bool] = False

    @property
    def needs_group(self) -> bool:
        """True if it compares the responses of a prompt with each other."""
        return True

    @property
    def needs_values(self) -> bool:
        """True if it reads `rows.value_r`, the critic's values."""
        return False

    @property
    def reference_policies(self) -> References:
        """The policies whose log-probs the estimator reads, in the form of `Loss.reference_policies`."""
        return {}

    def build(self) -> FilledBy:
        """The advantage at work in a run: itself, unless it remembers something between steps."""
        return self

    def __call__(self, rows: TrainBatch) -> tuple[Tensor, Metrics]:
        raise NotImplementedError

    def fill(self, rows: TrainBatch) -> tuple[TrainBatch, Metrics]:
        """Returns the batch with its advantages, and metrics."""
        advantage, metrics = self(rows)
        column = "advantage_r" if self.per_token else "advantage_n"
        return rows.with_columns(**{column: advantage}), metrics


class Loss(Block):
    """A loss as a differentiable function of the current log-probs.

    Calling it returns (share, metrics): this micro-batch's share of the optimizer step's loss (fp32
    scalar) and detached shares of metrics, which add up over micro-batches and ranks like the loss.
    """

    # The reason why this loss has no option `importance`, for a user who looks for one.
    without_importance: ClassVar[str] = "its source defines none"

    name: str
    # Bonus on the policy's entropy: the trainer subtracts entropy_coef times its mean over response tokens.
    entropy_coef: float = Field(0.0, ge=0)
    # A divergence over the whole vocabulary that is added to the loss.
    divergence: FullDivergence | None = None

    # The column that weights the log-probs: `rows.reward_n`, the advantages, or none.
    signal: ClassVar[Literal["reward", "advantage", "none"]]
    # The weight of a sequence depends on the other sequences of its group, which must all be among the rows
    # of one call.
    couples_groups: ClassVar[bool] = False
    # Advantages may differ between the tokens of a response.
    token_advantages: ClassVar[bool] = True
    # The weight of a sequence depends on all sequences of the optimizer step.
    couples_step: ClassVar[bool] = False
    # True if the loss has other terms than its divergence.
    has_terms: ClassVar[bool] = True
    # True if the loss reads log-probs of reference policies only as sums over a response and never
    # exponentiates them, so that small errors in them stay small.
    reference_sums_only: ClassVar[bool] = False
    # True if the loss needs only a reference policy's log-prob of a response's text, so that a teacher may
    # have another tokenizer. Its column of token log-probs then has the sum of each response, spread over its
    # tokens.
    reads_text: ClassVar[bool] = False

    @model_validator(mode="before")
    @classmethod
    def _no_importance(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and "importance" in values and "importance" not in cls.model_fields:
            name = cls.model_fields["name"].default
            raise ValueError(
                f"importance: the loss {name} has no such option ({cls.without_importance}); the losses pg, "
                "ppo and cispo do"
            )
        return values

    @property
    def reference_policies(self) -> References:
        """The policies that it compares with, by the column of log-probs that each must fill."""
        return {}

    @property
    def reads_members(self) -> dict[str, MemberTrait]:
        """Options, with their values, that have an effect only on responses of members with some trait."""
        return {}

    @property
    def needs_items(self) -> bool:
        """True if it reads the items of responses (`rows.item_r`)."""
        return False

    @property
    def linear(self) -> bool:
        """True if dL/dlogp depends on no policy's log-probs: the weights are known before any forward."""
        return False

    @property
    def known_at_step_start(self) -> bool:
        """True if the weights of a step's first mini-batch are known before the forward.

        For that mini-batch every `step_start` reference equals the current policy. So a loss that reads
        log-probs only as differences from such references may get zeros for all of them.
        """
        return self.linear

    def derived(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Metrics that do not add up, from the sums of the others over the whole step."""
        return {}

    def has_signal(self, rows: TrainBatch) -> bool:
        """True if rewards or advantages give the loss a direction in these rows.

        Without such a direction, only the pull towards a reference policy and an entropy bonus are left of
        the gradient. A loss that compares the responses of a group has no signal if their rewards are equal.
        """
        if self.divergence is not None:
            return len(rows) > 0
        if self.signal == "none" or not len(rows):
            return self.signal == "none" and len(rows) > 0
        if self.signal == "advantage":
            columns = (rows.advantage_n, rows.advantage_r)
            return any(bool((column != 0).any()) for column in columns if column is not None)
        if not self.couples_groups:
            return bool((rows.reward_n != 0).any())
        first: dict[int, int] = {}  # the first row of each group
        of_row = [first.setdefault(group, row) for row, group in enumerate(rows.group_n.tolist())]
        return bool((rows.reward_n != rows.reward_n[rows.group_n.new_tensor(of_row)]).any())

    @property
    def wants_entropy(self) -> bool:
        """True if the head must compute entropies (it costs time)."""
        return self.entropy_coef > 0

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, Metrics]:
        raise NotImplementedError


def token_weights(
    loss: Loss, rows: TrainBatch, logp_r: Tensor, totals: BatchTotals
) -> tuple[Tensor, Metrics]:
    """Weights w = dL/dlogp at `logp_r`, fp32 [r], and the loss and metrics there.

    They let a group be split over micro-batches or ranks: with w fixed, the surrogate sum(w * logp) has the
    same gradient as the loss, whatever the packing (design law 2).
    """
    logp_r = logp_r.detach().clone().requires_grad_()
    with torch.enable_grad():
        share, metrics = loss(LossInputs(rows, logp_r, totals))
        (weight_r,) = torch.autograd.grad(share, logp_r)
    return weight_r, {"loss": share.detach(), **metrics}
