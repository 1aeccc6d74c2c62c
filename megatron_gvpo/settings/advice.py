"""Warnings about settings that are legal and usually unintended."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_gvpo.algorithms.base import RunSizes
from megatron_gvpo.algorithms.config import AlgorithmConfig
from megatron_gvpo.settings.idle_keys import keys_of_sampling
from megatron_gvpo.settings.run_sections import RunSections


def advice(config: RunSections) -> str | None:
    """The warnings about a configuration, one a line; None without any."""
    return "\n".join(warnings_of(config)) or None


def warnings_of(config: RunSections) -> list[str]:
    """Warnings about a configuration that is legal but usually unintended.

    There is a warning for each of these:
    - a step with one update whose reference is the policy at step start: the reference is then the policy
      that trains, and GVPO's d is 0;
    - responses of older weights, in a loss that could correct for that and takes them for the present
      policy's;
    - an evaluation that does not count right answers, although a component of the reward judges them;
    - options whose effect begins with a step's second update, in a run whose steps have one;
    - options that the sizes of the run leave without effect;
    - more patience than the run has evaluations, so that train.stop_early ends nothing;
    - a learning rate that changes no weight;
    - a member's `right` that takes wrong answers for right ones, by the weights of the reward's components;
    - keys of sampling in a run that samples nothing;
    - the words no and off where they stay texts, which a chat template or a function takes for true.
    """
    checks = (
        *(_one_update, _later_updates, _idle_by_size, _older_weights, _counted),
        *(_too_patient, _no_step, _right, keys_of_sampling, _words),
    )
    warnings = [check(config) for check in checks]
    return [text for text in warnings if text is not None]


def _one_update(config: RunSections) -> str | None:
    train, algorithm, loss = config.train, config.algorithm, config.algorithm.loss
    if train.updates_per_step > 1:
        return None
    is_older = config.rollout.async_steps and algorithm.reference_logprobs == "engine"
    if is_older or not loss.reference_sums_only or not loss.known_at_step_start or loss.linear:
        return None
    return (
        f"train.mini_batches=1: a step's only update is its own reference, which makes {loss.name} "
        "a plain policy gradient, its Var and Cov 0; use 2 or more, or train.batch_epochs=2, or another "
        "algorithm.loss.reference"
    )


def _later_updates(config: RunSections) -> str | None:
    """Warn of clipping and the like where it never acts; a recipe's own values are for other runs, too."""
    algorithm = config.algorithm
    if config.train.updates_per_step > 1:
        return None
    recipe = {at.key: at.block for at in AlgorithmConfig(recipe=algorithm.recipe).blocks_inside()}
    idle = []
    for at in algorithm.blocks_inside():
        usual = recipe.get(at.key)
        for option in at.block.only_after_updates:
            default = type(at.block).model_fields[option].get_default(call_default_factory=True)
            known = getattr(usual, option) if type(usual) is type(at.block) else default
            if (value := getattr(at.block, option)) != known:
                idle.append(f"algorithm.{at.key}.{option}={value}")
    if not idle:
        return None
    return (
        f"{', '.join(idle)}: no effect with train.mini_batches=1, where the policy at step start makes a "
        "step's only update; use 2 or more, or train.batch_epochs=2"
    )


def _idle_by_size(config: RunSections) -> str | None:
    train, rollout = config.train, config.rollout
    longest = rollout.max_tokens if rollout.conversation is None else None
    sizes = RunSizes(train.steps, train.prompts_per_step, rollout.n, longest)
    reasons = [(at, at.block.idle_in(sizes)) for at in config.algorithm.blocks_inside()]
    lines = [f"algorithm.{at.key}: {text}: no effect" for at, text in reasons if text is not None]
    return "\n".join(lines) or None


def _older_weights(config: RunSections) -> str | None:
    loss = config.algorithm.loss
    has_correction = "importance" in type(loss).model_fields
    if not config.rollout.async_steps or not has_correction or getattr(loss, "importance", None) is not None:
        return None
    return (
        f"rollout.async_steps={config.rollout.async_steps}: responses come from older weights, and "
        f"{loss.name} takes them for samples of the policy at step start, with which it compares: set "
        "algorithm.loss.importance=truncate"
    )


def _counted(config: RunSections) -> str | None:
    components = config.rewards.components
    if config.data.eval is None or not components or components[0].needs_answer:
        return None
    judge = next((component.name for component in components if component.needs_answer), None)
    if judge is None:
        return None
    return (
        f"rewards.components: evaluation counts the first, {components[0].name}, and {judge} judges the "
        f"answers: put {judge} first"
    )


def _too_patient(config: RunSections) -> str | None:
    stop, best, steps = config.train.stop_early, config.checkpoint.keep_best, config.train.steps
    if stop is None or best is None:
        return None
    between = config.eval.every if best.metric.startswith("eval/") else 1
    after_the_first = (steps - 1) // between
    if stop.patience <= after_the_first:
        return None
    return (
        f"train.stop_early.patience={stop.patience} ends nothing: before the last of train.steps={steps} "
        f"there are {after_the_first} evaluations after the first one"
    )


def _no_step(config: RunSections) -> str | None:
    """Warn of a rate that changes no weight.

    AdamW moves a weight by about the rate, and 0.01 and the next number in float32 differ by 1e-9.
    """
    if config.optimizer.lr >= 1e-12:
        return None
    return f"optimizer.lr={config.optimizer.lr:g} changes no weight: float32 rounds such a step away"


def _right(config: RunSections) -> str | None:
    """Warn of a member that cannot tell right answers from wrong ones where components are from 0 to 1."""
    components = config.rewards.components
    judge = next((c for c in components if c.needs_answer), components[0] if components else None)
    if judge is None or judge.weight <= 0 or judge.pays_turns or any(c.model for c in components):
        return None
    others = [component.weight for component in components if component is not judge]
    wrong, right = sum(max(w, 0.0) for w in others), judge.weight + sum(min(w, 0.0) for w in others)
    remedy = f"set it to {(wrong + right) / 2:g}" if wrong < right else "lower the other components' weights"
    lines = []
    for number, member in enumerate(config.algorithm.members):
        limit = None if "right" in member.ineffective_options else getattr(member, "right", None)
        if limit is None or wrong <= limit < right:
            continue
        mistaken = f"wrong answer may have {wrong:g}" if limit < wrong else f"right answer may have {right:g}"
        lines.append(
            f"algorithm.members.{number}.right={limit:g}: a reward above it is right, and by "
            f"rewards.components a {mistaken}: {remedy}"
        )
    return "\n".join(lines) or None


def _words(config: RunSections) -> str | None:
    """Warn of words for booleans under the keys whose values can be anything."""
    free = {"data.chat_template_kwargs": config.data.chat_template_kwargs}
    for i, component in enumerate(config.rewards.components):
        free[f"rewards.components.{i}.options"] = component.options
        if component.judge is not None:
            fields = component.judge.request.get("chat_template_kwargs")
            free[f"rewards.components.{i}.judge.request.chat_template_kwargs"] = fields or {}
    words = [
        f"{key}.{name}={value}"
        for key, values in free.items()
        for name, value in (values.items() if isinstance(values, Mapping) else ())
        if isinstance(value, str) and value.lower() in ("no", "off")
    ]
    if not words:
        return None
    return f"{', '.join(words)}: a text here, which counts as true: write false, unless the text is meant"
