"""Checks of settings from different sections that cannot go together; errors name right settings."""

from __future__ import annotations

import re
from math import lcm

from megatron_gvpo.algorithms.shapers.length import Overlong
from megatron_gvpo.core.metric_names import entry
from megatron_gvpo.settings.idle_keys import check_idle_keys
from megatron_gvpo.settings.rewards import COUNT
from megatron_gvpo.settings.run_sections import RunSections

MOST_RESPONSES = 10**7  # limit for a step; more would take gigabytes on the host


def cross_check(config: RunSections) -> None:
    """Raises ValueError, which names the keys and their values, for a combination that cannot work."""
    for check in (
        _batch,
        _engine_reference,
        _engine,
        _over_sampling,
        _router_replay,
        _truncated_sampling,
        check_speculation,
        check_conversation,
        _data,
        _tools_of_records,
        _rewards,
        _reward_range,
        _served_rewards,
        _components,
        _teacher,
        _evaluation,
        _schedule,
        _checkpoints,
        _offload,
        _muon,
        _fp8_weights,
        check_idle_keys,
    ):
        check(config)


def _batch(config: RunSections) -> None:
    train, algorithm, n = config.train, config.algorithm, config.rollout.n
    if train.prompts_per_step % train.mini_batches:
        raise ValueError(
            f"train.mini_batches={train.mini_batches} does not divide "
            f"train.prompts_per_step={train.prompts_per_step}: every optimizer update takes whole groups"
        )
    if train.prompts_per_step * n > MOST_RESPONSES:
        raise ValueError(
            f"train.prompts_per_step={train.prompts_per_step} x rollout.n={n}: more than {MOST_RESPONSES} "
            "responses a step, which every rank holds"
        )
    for block_at in algorithm.sized(config.rollout.max_tokens).blocks_inside():
        if (problem := block_at.block.problem()) is not None:
            raise ValueError(f"algorithm.{block_at.key}.{problem}")
    if n > 1 or not algorithm.samples_from_policy or algorithm.members:
        return
    if algorithm.needs_group:
        raise ValueError(
            f"rollout.n={n}: this algorithm compares the responses of a prompt with each other, "
            "so it needs rollout.n >= 2"
        )
    for block_at in algorithm.blocks_inside():
        if block_at.block.drops_equal_rewards:
            raise ValueError(
                f"rollout.n={n}: algorithm.{block_at.label} drops the groups whose rewards are equal, as in "
                "every group of one response: it needs rollout.n >= 2"
            )


def _engine_reference(config: RunSections) -> None:
    if config.algorithm.reference_logprobs != "engine":
        return
    if config.train.updates_per_step == 1 and not config.rollout.async_steps:
        raise ValueError(
            "train.mini_batches=1: algorithm.reference_logprobs=engine has no effect there, because "
            "the first update of a step is its own reference: use reference_logprobs=trainer"
        )


def _engine(config: RunSections) -> None:
    rollout = config.rollout
    if rollout.weights.traits.sends_adapter and config.model.adapter is None:
        raise ValueError(
            f"rollout.weights.transport={rollout.weights.transport} sends the adapter that trains, and "
            "without model.adapter none does: set model.adapter, or use broadcast"
        )
    if not rollout.uses_servers:
        for name in ("servers", "weights", "async_steps", "over_sampling_prompts", "speculation"):
            if getattr(rollout, name) != type(rollout).model_fields[name].default:
                raise ValueError(
                    f"rollout.{name} has no effect with rollout.engine={rollout.engine}, which generates in "
                    "the trainer's own processes: choose sglang or vllm, or leave it out"
                )
    if "--trust-remote-code" in rollout.servers.args and not config.model.trust_remote_code:
        raise ValueError(
            "rollout.servers.args: --trust-remote-code, and model.trust_remote_code=false: set the latter, "
            "which holds for trainer and servers"
        )
    if rollout.servers.colocated and rollout.async_steps and not rollout.over_sampling_prompts:
        raise ValueError(
            f"rollout.async_steps={rollout.async_steps}: servers that have the trainer's own "
            "GPUs (rollout.servers.colocated) cannot generate while it trains: set it to 0, or let "
            "rollout.over_sampling_prompts carry responses over to later steps"
        )
    if (n := rollout.servers.nodes) > 1 and not rollout.weights.traits.nodes_ok:
        why = f"with rollout.servers.nodes={n}: a server's other machines do not see the memory; use sharded"
        raise ValueError(f"rollout.weights.transport={rollout.weights.transport} {why}")
    for block_at in config.algorithm.blocks_inside():
        if rollout.servers.colocated and block_at.block.needs_policy_logprobs:
            raise ValueError(
                f"algorithm.{block_at.label} asks the policy for log-probs while responses come, "
                "when servers on the trainer's own GPUs (rollout.servers.colocated) have its memory"
            )
    if rollout.servers.colocated and not rollout.weights.traits.colocated_ok:
        raise ValueError(
            f"rollout.weights.transport={rollout.weights.transport} does not reach servers on the trainer's "
            "own GPUs (rollout.servers.colocated): NCCL, for one, forms no process group of two processes on "
            "the same GPU. Set it to colocated, or to shared for FP8 servers and adapters"
        )


def _over_sampling(config: RunSections) -> None:
    """Refuse settings that cannot be combined with partial rollouts of colocated servers."""
    rollout, algorithm = config.rollout, config.algorithm
    if not (extra := rollout.over_sampling_prompts):
        return
    reason, talks, size = None, rollout.conversation, config.train.prompts_per_step
    if not rollout.servers.colocated:
        reason = (
            "servers with GPUs of their own (rollout.servers.colocated=false) need it not: they go on while "
            "the trainer trains, with rollout.async_steps"
        )
    elif not rollout.async_steps:
        reason = "rollout.async_steps bounds the age of responses that are carried over: set it to 1 or more"
    elif extra > size:
        reason = f"at most train.prompts_per_step={size}, so that a step can train all that is carried over"
    elif rollout.weights.in_flight == "wait":
        reason = "it stops responses, and rollout.weights.in_flight=wait finishes them: set that to carry"
    elif talks is not None and talks.program is not None:
        reason = "a program (rollout.conversation.program) would wait for an answer while the trainer trains"
    elif algorithm.allocation.name != "equal":
        reason = f"algorithm.allocation={algorithm.allocation.name} shares out the responses of a whole step"
    if reason:
        raise ValueError(f"rollout.over_sampling_prompts={extra}: {reason}")


def _router_replay(config: RunSections) -> None:
    if not config.rollout.router_replay:
        return
    reason = None
    if not config.algorithm.samples_from_policy:
        reason = f"algorithm.sampler={config.algorithm.sampler} has no engine that could tell experts"
    elif not config.rollout.uses_servers:
        reason = f"rollout.engine={config.rollout.engine} does not tell experts: choose sglang or vllm"
    elif config.train.requires_shared_prompts:
        reason = (
            "train.share_prompts computes a prompt once, and the engine may have routed it differently for "
            "each of its responses: use one of the two"
        )
    if reason:
        raise ValueError(f"rollout.router_replay=true is not possible here: {reason}")


def _data(config: RunSections) -> None:
    """Check that the data set names the fields that the members and the rewards read.

    The samplers `dataset` and `file` know some forms of records without a key (data/known_forms.py).
    """
    algorithm, fields = config.algorithm, config.data.train
    readers = [f"algorithm.{p.label}" for p in algorithm.blocks_inside() if p.block.needs_demonstrations]
    if readers and fields.demonstration_key is None:
        raise ValueError(
            f"data.train.demonstration_key is missing: {readers[0]} trains on worked "
            "solutions, so name the field that holds them (or a function that makes it, data.train.convert)"
        )
    compares = [component.name for component in config.rewards.components if component.needs_answer]
    judged = {"train": fields if algorithm.samples_from_policy else None, "eval": config.data.eval}
    for part, dataset in judged.items():
        if compares and dataset is not None and dataset.answer_key is None:
            raise ValueError(
                f"data.{part}.answer_key is null, but the reward {compares[0]!r} compares with an answer"
            )


def _tools_of_records(config: RunSections) -> None:
    """Refuse tools of records beside tools that the run calls, which every prompt shows."""
    talks, data = config.rollout.conversation, config.data
    for part, dataset in {"train": data.train, "eval": data.eval}.items():
        if dataset is not None and dataset.tools_key is not None and talks is not None and talks.has_tools:
            raise ValueError(
                f"data.{part}.tools_key={dataset.tools_key}: with rollout.conversation.tools or mcp every "
                "prompt shows the tools that the run calls: leave one of the two out"
            )


def _rewards(config: RunSections) -> None:
    """Check that there are rewards if the method learns from rewards."""
    algorithm, components = config.algorithm, config.rewards.components
    if config.data.eval is not None and not components:
        raise ValueError(
            "rewards.components=[]: data.eval is given, and evaluation counts the first component: name one, "
            "as [{name: math}]"
        )
    if not algorithm.samples_from_policy or any(p.block.makes_rewards for p in algorithm.blocks_inside()):
        return
    readers = [f"algorithm.loss={algorithm.loss.name}"] if algorithm.loss.signal != "none" else []
    readers += [f"algorithm.{part.label}" for part in algorithm.blocks_inside() if part.block.needs_rewards]
    if readers and not components:
        raise ValueError(
            f"rewards.components=[]: {readers[0]} learns from rewards, and all would be 0: name one, as "
            "[{name: math}]"
        )
    if readers and not any(c.weight for c in components) and not any(algorithm.blocks_on_components()):
        raise ValueError(
            f"rewards.components: all weights are 0, so all rewards would be, and {readers[0]} learns from "
            "them"
        )


def _reward_range(config: RunSections) -> None:
    """Refuse rewards that are known to leave [0, 1], beside the estimator bnpo, which needs them there."""
    algorithm, components = config.algorithm, config.rewards.components
    estimator, shapers = algorithm.estimator, algorithm.shapers
    if estimator is None or estimator.name != "bnpo" or estimator.by_components:
        return
    punishments = [shaper.weight for shaper in shapers if isinstance(shaper, Overlong)]
    is_known = len(punishments) == len(shapers) and all(component.is_binary for component in components)
    if not algorithm.samples_from_policy or not is_known:
        return
    low = sum(min(component.weight, 0.0) for component in components) - sum(punishments)
    high = sum(max(component.weight, 0.0) for component in components)
    if low >= 0 and high <= 1:
        return
    shaped = " with the shaper overlong" if punishments else ""
    raise ValueError(
        f"algorithm.estimator=bnpo needs rewards in [0, 1], and those of rewards.components{shaped} are from "
        f"{low:g} to {high:g}: map them by the shaper affine (scale, shift)"
    )


def _served_rewards(config: RunSections) -> None:
    """Refuse blocks that need a score for every response: a server may fail to give one."""
    served = next((c.name for c in config.rewards.components if c.served is not None), None)
    algorithm, reason = config.algorithm, None
    if served is None:
        return
    if single := [member.name for member in algorithm.members if not member.takes_conversations]:
        reason = f"algorithm.members: {single[0]} needs a reward for every response"
    elif algorithm.prior.greedy:
        reason = f"algorithm.prior={algorithm.prior.name}: it takes one response a prompt, which may be lost"
    if reason:
        raise ValueError(
            f"rewards.components: {served} asks a model on servers, which is not possible with {reason}"
        )


def _components(config: RunSections) -> None:
    """Check that the reward has the components that blocks read by name."""
    algorithm, known = config.algorithm, [component.name for component in config.rewards.components]
    without = [member.name for member in algorithm.members if not member.gives_components]
    for block_at in algorithm.blocks_on_components():
        key = f"algorithm.{block_at.key}"
        if not algorithm.samples_from_policy:
            raise ValueError(
                f"{key} reads components of the reward, and sampler={algorithm.sampler} gives one reward a "
                "response: use sampler=engine"
            )
        if without:
            raise ValueError(
                f"{key} reads components of the reward, and algorithm.members: {without[0]} gives responses "
                "a reward that is not in their components: leave one of them out"
            )
        for component in block_at.block.components_read:
            exists = component < len(known) if isinstance(component, int) else component in known
            if not exists:
                raise ValueError(
                    f"{key} reads the reward component {component!r}, and rewards.components has "
                    f"{', '.join(known) or 'none'}: add it, with weight 0 if it is to count nowhere else"
                )


def _teacher(config: RunSections) -> None:
    """Check that there is a teacher if a block reads one, and that it provides the values that it needs."""
    teacher, needed, rollout = config.teacher, config.algorithm.needs_teacher, config.rollout
    if teacher is None and needed:
        raise ValueError(
            "teacher is missing: algorithm compares with a teacher's log-probs: name its Hugging Face "
            "directory, teacher.path"
        )
    if teacher is None:
        return
    if not needed:
        raise ValueError(
            "teacher has no effect: nothing in algorithm compares with it. Use the recipe opd, or "
            "algorithm.loss.reference=teacher"
        )
    if config.data.train.images_key is not None:
        raise ValueError("data.train.images_key with teacher: a teacher reads no images")
    if teacher.server is None:
        return
    reason, divergence = None, config.algorithm.loss.divergence
    if divergence is not None and divergence.needs_teacher:
        reason = (
            f"algorithm.loss.divergence={divergence.name}: it needs the teacher's hidden states, and servers "
            "give log-probs; use teacher.server=null"
        )
    elif config.algorithm.samples_from_policy and rollout.temperature != 1:
        reason = (
            f"rollout.temperature={rollout.temperature:g}: the log-probs of the loss are those at this "
            "temperature, and servers give those of prompts at temperature 1"
        )
    if reason:
        raise ValueError(f"teacher.server is not possible with {reason}")


def _evaluation(config: RunSections) -> None:
    if max(config.eval.k, default=1) > config.eval.n:
        raise ValueError(
            f"eval.k={list(config.eval.k)}: pass@k needs eval.n >= k, and eval.n={config.eval.n}"
        )


def _schedule(config: RunSections) -> None:
    train, optimizer = config.train, config.optimizer
    profiled = config.logging.profile_steps
    if profiled is not None and profiled[0] > train.steps:
        raise ValueError(
            f"logging.profile_steps={list(profiled)}: the run ends before, with train.steps={train.steps}"
        )
    if optimizer.min_lr > optimizer.lr:
        raise ValueError(f"optimizer.min_lr={optimizer.min_lr} exceeds optimizer.lr={optimizer.lr}")
    if optimizer.min_lr and optimizer.decay == "constant":
        raise ValueError(
            f"optimizer.min_lr={optimizer.min_lr} has no effect with optimizer.decay=constant: set decay to "
            "cosine or linear, or leave it out"
        )


def _checkpoints(config: RunSections) -> None:
    options, steps = config.checkpoint, config.train.steps
    if options.export_every and not options.every:
        raise ValueError(
            f"checkpoint.export_every={options.export_every} with checkpoint.every=0, which writes only the "
            "last checkpoint: set checkpoint.every"
        )
    if options.push_to_hub is not None and not (options.export_hf or options.keep_best):
        raise ValueError(
            "checkpoint.push_to_hub with checkpoint.export_hf=false and no keep_best has nothing to push"
        )
    if options.keep_best is None:
        if config.train.stop_early is not None:
            raise ValueError(
                "train.stop_early needs checkpoint.keep_best, whose metric it watches and which keeps the "
                "best checkpoint: set checkpoint.keep_best={metric: eval/pass@1}"
            )
        return
    metric = options.keep_best.metric
    if not options.every:
        raise ValueError(
            f"checkpoint.keep_best: {metric} with checkpoint.every=0, which writes only the last checkpoint: "
            "set checkpoint.every"
        )
    # Users' code may log its own metrics under train/ and advantage/.
    if entry(metric) is None and not metric.startswith(("train/", "advantage/")):
        raise ValueError(f"checkpoint.keep_best.metric={metric}: no metric has this name")
    of_k = {f"eval/pass@{k}" for k in (1, *config.eval.k)} | {f"eval/all@{k}" for k in config.eval.k if k > 1}
    if metric.startswith(("eval/pass@", "eval/all@")) and metric not in of_k:
        raise ValueError(
            f"checkpoint.keep_best.metric={metric}: with eval.k={list(config.eval.k)} evaluations report "
            f"{', '.join(sorted(of_k))}: name one of them, or change eval.k"
        )
    if metric.startswith("eval/") and config.data.eval is None:
        raise ValueError(f"checkpoint.keep_best.metric={metric} needs held-out prompts: set data.eval")
    if metric.startswith("eval/") and not 0 < lcm(options.every, config.eval.every) < steps:
        raise ValueError(
            f"checkpoint.keep_best.metric={metric}: only the last checkpoint would be evaluated, with "
            f"checkpoint.every={options.every}, eval.every={config.eval.every} and train.steps={steps}: make "
            "eval.every equal to checkpoint.every, or a divisor or multiple of it"
        )


def _offload(config: RunSections) -> None:
    fraction, fp8 = config.optimizer.offload_fraction, config.model.fp8
    if fraction and fp8 is not None and fp8.weights:
        raise ValueError(
            f"optimizer.offload_fraction={fraction} is not possible with model.fp8.weights=true: Megatron "
            "would make the host's masters of weights that are rounded to FP8 already; use weights=false"
        )


def _muon(config: RunSections) -> None:
    """Refuse where a rank does not have a matrix as one tensor on its GPU."""
    if config.optimizer.muon is None:
        return
    if config.optimizer.offload_fraction:
        raise ValueError(
            f"optimizer.muon is not possible with optimizer.offload_fraction="
            f"{config.optimizer.offload_fraction}: Megatron updates on the host by AdamW alone; leave one out"
        )
    if config.model.fp8 is not None and config.model.fp8.weights:
        raise ValueError(
            "optimizer.muon is not possible with model.fp8.weights=true: an FP8 weight is several tensors; "
            "use weights=false"
        )


def _fp8_weights(config: RunSections) -> None:
    """Refuse features that copy weights as plain memory: an FP8 weight consists of several tensors."""
    if config.model.fp8 is None or not config.model.fp8.weights:
        return
    reason = None
    if config.rollout.servers.colocated:
        reason = "rollout.servers.colocated=true: the weights' memory could not be given to the servers"
    elif config.algorithm.kept_reference is not None:
        reason = (
            "a reference policy with weights of its own: when it has scored, the policy's would be rounded "
            "to FP8 once more"
        )
    if reason:
        raise ValueError(f"model.fp8.weights=true is not possible with {reason}; use weights=false")


def _truncated_sampling(config: RunSections) -> None:
    """Refuse settings that would compare log-probs over supports with log-probs over the whole vocabulary."""
    rollout, algorithm = config.rollout, config.algorithm
    if not rollout.truncates:
        return
    reason, divergence = None, algorithm.loss.divergence
    if rollout.engine == "sglang" and rollout.top_k is None:
        reason = (
            "rollout.engine=sglang: SGLang returns the tokens that a token was sampled from only where top-k "
            "bounds their number: set rollout.top_k, too, to 1000 for one; or eval.sampling alone, if only "
            "the evaluation is meant"
        )
    elif not algorithm.samples_from_policy:
        return
    elif divergence is not None:
        reason = f"algorithm.loss.divergence={divergence.name}, which compares the whole vocabulary"
    elif config.teacher is not None and config.teacher.server is not None:
        reason = (
            "teacher.server: servers give a teacher's log-probs over the whole vocabulary, and those of the "
            "loss are over the tokens that could be sampled; use teacher.server=null"
        )
    elif rollout.speculation is not None:
        reason = f"rollout.speculation.method={rollout.speculation.method}: the two were not tested together"
    if reason is None:
        return
    raise ValueError(f"{rollout.truncation} is not possible with {reason}")


# --- rollout.speculation -----------------------------------------------------------------------------------


def check_speculation(config: RunSections) -> None:
    """Raises ValueError, which names the keys, for a combination that cannot work or is not tested."""
    rollout, chosen = config.rollout, config.rollout.speculation
    for word in rollout.servers.args:
        if re.match(r"--spec|-sc(=|$)", word):
            raise ValueError(
                f"rollout.servers.args: {word.partition('=')[0]} could change what the policy samples: set "
                "rollout.speculation, which does not"
            )
    if chosen is None:
        return
    reason, transport = None, f"rollout.weights.transport={rollout.weights.transport}"
    if rollout.engine == "sglang" and chosen.method == "suffix":
        reason = "SGLang has no suffix decoding: use ngram, or rollout.engine=vllm"
    elif rollout.router_replay:
        reason = "rollout.router_replay=true: experts of rejected tokens would be among those told"
    elif rollout.weights.traits.sends_adapter:
        reason = f"{transport}: not tested; use broadcast, which sends the merged model"
    elif chosen.own_weights and rollout.engine == "sglang" and rollout.weights.traits.sends_files:
        reason = f"{transport}: SGLang would load the policy's files into the draft, too"
    if reason is not None:
        raise ValueError(f"rollout.speculation.method={chosen.method} is not possible with {reason}")


# --- rollout.conversation ----------------------------------------------------------------------------------


def check_conversation(config: RunSections) -> None:
    """Raises ValueError, which names the keys, for a combination that cannot work."""
    _conversation_components(config)
    if config.rollout.conversation is None:
        _no_reader(config)
    else:
        _possible(config)


def _no_reader(config: RunSections) -> None:
    """Refuse blocks that read turns if there are none."""
    algorithm = config.algorithm
    reader = next((block_at for block_at in algorithm.blocks_inside() if block_at.block.needs_turns), None)
    if reader is not None:
        raise ValueError(
            f"algorithm.{reader.label} reads the turns of conversations: set rollout.conversation, or "
            "the options with which it reads single responses"
        )


def _possible(config: RunSections) -> None:
    """Refuse settings that are for a single response to a prompt."""
    algorithm, reason = config.algorithm, None
    if config.rollout.router_replay:
        reason = "rollout.router_replay=true: the experts of several turns are not recorded"
    elif config.train.requires_shared_prompts:
        reason = "train.share_prompts=true: every turn has a context of its own"
    elif single := [member.name for member in algorithm.members if not member.takes_conversations]:
        reason = f"algorithm.members: {single[0]} adds or changes single responses"
    elif algorithm.prior.greedy:
        reason = f"algorithm.prior={algorithm.prior.name}: it takes one response a prompt, which may be lost"
    if reason:
        raise ValueError(f"rollout.conversation is not possible with {reason}")


def _conversation_components(config: RunSections) -> None:
    """Refuse reward components that read a value no conversation has: they would always be 0.

    The counts of a user's environment are known only when it has answered; they are checked then.
    """
    talks = config.rollout.conversation
    for i, component in enumerate(config.rewards.components):
        key = f"rewards.components.{i}"
        pays, counts = component.pays_turns, component.function == COUNT
        if not pays and not counts:
            continue
        if talks is None:
            raise ValueError(f"{key} ({component.name}) reads conversations: set rollout.conversation")
        if pays and talks.has_tools:
            raise ValueError(
                f"{key}.name={component.name}: tools pay nothing, so it would be 0 for every response: name "
                "a reward that reads rollout.messages"
            )
        of = component.options.get("of")
        if counts and not isinstance(of, str):
            raise ValueError(f"{key}.options.of={of}: want the name of a count, such as turns")
        if counts and talks.has_tools and of not in talks.counts:
            raise ValueError(
                f"{key}.options.of={of}: conversations with tools have no such count; they have: "
                f"{', '.join(talks.counts)}"
            )
