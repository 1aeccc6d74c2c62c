"""Checks a parallel layout against the config and the model's config.json alone.

This module loads nothing heavy, so a layout that cannot run is refused in the first second. The error names
the reason and values that would run. docs/reference/layouts.md lists the layouts that tests prove.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megatron_gvpo.checks.adapters import check_adapter
from megatron_gvpo.checks.images import check_images
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.huggingface.architectures import check_trainable
from megatron_gvpo.huggingface.card import ModelCard, ModelCards
from megatron_gvpo.huggingface.image_families import takes_images
from megatron_gvpo.settings.config import Config
from megatron_gvpo.settings.lengths import check_lengths
from megatron_gvpo.settings.parallel import ParallelConfig
from megatron_gvpo.settings.sections import RolloutConfig


def check_layout(config: Config, world_size: int) -> ModelCards:
    """Returns the cards of the configuration's models.

    Raises ConfigError if the model or the layout does not fit config.json or the number of processes.
    """
    cards = ModelCards(config)
    card = cards.policy
    architecture = check_trainable(card, f"model.path={config.model.path}")
    check_processes(config.parallel, world_size)
    check_division(config.parallel, card)
    if config.rollout.router_replay and not card.experts:
        raise ConfigError(
            f"rollout.router_replay=true: model.path={config.model.path} has no experts to choose "
            "from; leave it out"
        )
    check_images(config, card)
    check_lengths(config, card)
    _check_stop_tokens(config, card)
    _check_top_k(config, card)
    _check_shared_prompts(config, card)
    _check_servers(config.rollout, card)
    _check_delta_nets(config, card)
    _check_critic(config, cards)
    if config.teacher is not None and config.teacher.server is None:
        key = f"teacher.path={config.teacher.path}"
        _check_second_model(config, key, cards.teacher, is_trained=False)
    _check_fp8(config, card)
    check_adapter(config, card, architecture)
    return cards


def check_division(parallel: ParallelConfig, values: Mapping[str, Any]) -> None:
    """Raises ConfigError if the layout does not fit a model, by the keys and values of its config.json."""
    card = ModelCard(values)
    _check_window(parallel, card)
    _check_widths(parallel, card)
    _check_depth(parallel, card)
    _check_recompute(parallel, card)
    _check_experts(parallel, card)


def _check_servers(rollout: RolloutConfig, card: ModelCard) -> None:
    """Raises ConfigError for servers that would refuse, after their start, to divide the model's heads.

    Source: vLLM's ModelConfig.verify_with_parallel_config, and the layers of SGLang's models.
    """
    servers, heads = rollout.servers, card.get("num_attention_heads")
    if not rollout.uses_servers or servers.urls or "--enable-dp-attention" in servers.args or not heads:
        return
    if heads % servers.tp:
        raise ConfigError(
            f"rollout.servers.tp={servers.tp} does not divide the model's num_attention_heads={heads}, and "
            f"{rollout.engine} gives whole heads to its GPUs; possible: {_divisors(heads)}"
        )


def _check_delta_nets(config: Config, card: ModelCard) -> None:
    """Raises ConfigError for train.deterministic with gated delta nets, which have no such kernels."""
    if card.has_delta_nets and config.train.deterministic:
        raise ConfigError(
            "train.deterministic=true: the model has gated delta nets, which megatron-core computes over "
            "packs without that promise only; leave it out"
        )


def _check_critic(config: Config, cards: ModelCards) -> None:
    """Raises ConfigError for a critic of another model that cannot be trained in the policy's layout."""
    critic = config.algorithm.critic
    if critic is None or critic.path is None:
        return
    card, policy = cards.critic, cards.policy
    _check_second_model(config, f"algorithm.critic.path={critic.path}", card, is_trained=True)
    if card.get("vocab_size") != policy.get("vocab_size"):
        raise ConfigError(
            f"algorithm.critic.path={critic.path}: vocab_size={card.get('vocab_size')}, and "
            f"the policy's is {policy.get('vocab_size')}: a critic reads the policy's tokens"
        )


def _check_second_model(config: Config, key: str, card: ModelCard, is_trained: bool) -> None:
    """Raises ConfigError for a teacher or critic of the trainer's that the policy's layout cannot hold."""
    check_trainable(card, key)
    if takes_images(card):
        raise ConfigError(
            f"{key} takes images ({card.architectures[0]}), and the trainer holds text models alone beside "
            "the policy: name a text model"
        )
    try:
        for check in (_check_window, _check_widths, _check_depth, _check_experts):
            check(config.parallel, card)
        _check_delta_nets(config, card)
        if is_trained:
            _check_fp8(config, card)  # a teacher is not in FP8
        else:
            _check_shared_prompts(config, card)  # a critic repeats prompts
    except ConfigError as error:
        raise ConfigError(f"{key} is held in the policy's layout: {error}") from None


def _check_fp8(config: Config, card: ModelCard) -> None:
    """Raises ConfigError if a matrix size on a rank is not a multiple of 16 (MXFP8: 32, its block size)."""
    fp8, parallel = config.model.fp8, config.parallel
    if fp8 is None:
        return
    if 2 * fp8.bf16_layers >= card.get("num_hidden_layers", math.inf):
        raise ConfigError(
            f"model.fp8.bf16_layers={fp8.bf16_layers} at both ends leave none of the model's "
            f"num_hidden_layers={card['num_hidden_layers']} in FP8"
        )
    block = 32 if fp8.recipe == "mxfp8" else 16
    cut = {"hidden_size": ("", 1), "intermediate_size": ("tp", parallel.tp)}
    cut["moe_intermediate_size"] = ("etp", parallel.etp)
    for name, (by, ranks) in cut.items():
        if card.get(name) and card[name] // ranks % block:
            of_a_rank = f" with parallel.{by}={ranks}" if ranks > 1 else ""
            raise ConfigError(
                f"model.fp8.recipe={fp8.recipe} needs sizes that are multiples of {block} on each rank, and "
                f"the model's {name}={card[name]}{of_a_rank} is {card[name] // ranks}"
            )


def _check_window(parallel: ParallelConfig, card: ModelCard) -> None:
    if card.window and parallel.cp > 1 and parallel.cp_exchange == "p2p":
        raise ConfigError(
            f"parallel.cp={parallel.cp}: a ring cannot follow the model's sliding_window={card.window}; "
            "use parallel.cp_exchange=a2a"
        )
    if "GptOssForCausalLM" in card.architectures and parallel.cp > 1 and parallel.cp_exchange != "a2a":
        raise ConfigError(
            f"parallel.cp={parallel.cp} with cp_exchange={parallel.cp_exchange}: Transformer Engine has the "
            "model's attention sinks with parallel.cp_exchange=a2a only"
        )


def check_processes(parallel: ParallelConfig, world_size: int) -> None:
    tp, pp, cp, ep, etp = parallel.tp, parallel.pp, parallel.cp, parallel.ep, parallel.etp
    ranks = f"parallel.tp={tp} x parallel.pp={pp}" + (f" x parallel.cp={cp}" if cp > 1 else "")
    if world_size % (tp * pp * cp):
        raise ConfigError(
            f"{world_size} process(es) cannot hold {ranks}: "
            f"start a multiple of {tp * pp * cp} (train --nproc {tp * pp * cp}; in a job, --nodes times "
            "--ranks-per-node)"
        )
    if (world_size // pp) % (ep * etp):
        raise ConfigError(
            f"{world_size // pp} process(es) of a pipeline stage cannot hold parallel.ep={ep} x "
            f"parallel.etp={etp}: start a multiple of {math.lcm(ep * etp, tp * cp) * pp}"
        )


def _check_widths(parallel: ParallelConfig, card: ModelCard) -> None:
    heads = ["num_attention_heads"]
    if not card.is_mla:  # MLA's latent keys are not divided into heads
        heads.append("num_key_value_heads")
    sizes = {name: card[name] for name in [*heads, "intermediate_size"] if card.get(name)}
    for name, size in sizes.items():
        if size % parallel.tp:
            raise ConfigError(
                f"parallel.tp={parallel.tp} does not divide the model's {name}={size}; "
                f"possible: {_divisors(math.gcd(*sizes.values()))}"
            )
    for name in ("linear_num_key_heads", "linear_num_value_heads"):  # gated delta net, cut into whole heads
        if card.get(name) and card[name] % (parallel.tp * parallel.cp):
            raise ConfigError(
                f"parallel.tp={parallel.tp} x parallel.cp={parallel.cp} do not divide the model's "
                f"{name}={card[name]}; possible products: {_divisors(card[name])}"
            )
    if card.get("linear_num_value_heads") and parallel.tp > 1 and not parallel.sequence_parallel:
        raise ConfigError(
            f"parallel.tp={parallel.tp} with gated delta nets (linear_num_value_heads) needs "
            "parallel.sequence_parallel=true: otherwise megatron-core leaves the other ranks' heads out of "
            "the gradient of the norm behind them"
        )
    if card.is_mla and parallel.tp > 1 and not parallel.sequence_parallel:
        raise ConfigError(
            f"parallel.tp={parallel.tp} with latent attention (kv_lora_rank) needs "
            "parallel.sequence_parallel=true: otherwise megatron-core leaves the other ranks' heads out of "
            "the gradient of the rotary key that all heads share"
        )
    if parallel.cp > 1 and parallel.cp_exchange == "a2a":
        for name in [name for name in heads if name in sizes]:
            here = sizes[name] // parallel.tp
            if here % parallel.cp:
                raise ConfigError(
                    f"parallel.cp={parallel.cp} with cp_exchange=a2a gives every rank whole heads, and "
                    f"{name}={sizes[name]} with parallel.tp={parallel.tp} leaves {here}; use cp_exchange=p2p"
                )


def _check_recompute(parallel: ParallelConfig, card: ModelCard) -> None:
    layers, modules = card.get("num_hidden_layers", math.inf), set(parallel.recompute_modules)
    if parallel.offload_layers >= layers:
        raise ConfigError(
            f"parallel.offload_layers={parallel.offload_layers}: one of the model's "
            f"num_hidden_layers={layers} at least has to stay"
        )
    offloaded = set(parallel.offload_modules)
    if (inside := {"expert_fc1", "moe_act"} & offloaded) and not card.experts:
        raise ConfigError(f"parallel.offload_modules={sorted(inside)}: the model has no experts")
    fused = {"attn_norm": card.is_mla, "mlp_norm": card.experts}
    if inside := {name for name, apart in fused.items() if not apart} & offloaded:
        raise ConfigError(
            f"parallel.offload_modules={sorted(inside)}: Transformer Engine has this model's norm inside the "
            "linear layer after it"
        )
    if parallel.recompute_layers is not None:
        most = max(parallel.stage_layers or [layers // (parallel.pp * parallel.vpp)])
        if parallel.recompute_layers > most:
            raise ConfigError(
                f"parallel.recompute_layers={parallel.recompute_layers}: no stage has more than {most} layers"
            )
    if parallel.recompute == "selective":
        of_experts = {"moe_act", "shared_experts"} | (set() if "mlp" in modules else {"moe"})
        if (wrong := modules & of_experts) and not card.experts:
            raise ConfigError(f"parallel.recompute_modules={sorted(wrong)}: the model has no experts")
        if "mla_up_proj" in modules and not card.is_mla:
            raise ConfigError(
                "parallel.recompute_modules=['mla_up_proj']: the model has no latent attention (kv_lora_rank)"
            )


def _check_depth(parallel: ParallelConfig, card: ModelCard) -> None:
    layers = card.get("num_hidden_layers", 0)
    pp, vpp, stage_layers = parallel.pp, parallel.vpp, parallel.stage_layers
    if stage_layers is not None and layers and sum(stage_layers) != layers:
        raise ConfigError(
            f"parallel.stage_layers={list(stage_layers)} are {sum(stage_layers)} layers, and the model has "
            f"num_hidden_layers={layers}"
        )
    if stage_layers is None and layers and layers % pp:
        raise ConfigError(
            f"parallel.pp={pp} does not divide the model's num_hidden_layers={layers}; "
            f"possible: {_divisors(layers)}, or name the layers of each stage: parallel.stage_layers"
        )
    if stage_layers is None and layers and layers % (pp * vpp):
        raise ConfigError(
            f"parallel.vpp={vpp} does not divide the {layers // pp} layers of a pipeline rank; "
            f"possible: {_divisors(layers // pp)}, or name the layers of each stage: parallel.stage_layers"
        )


def _check_experts(parallel: ParallelConfig, card: ModelCard) -> None:
    count = card.experts
    if not count:
        for name, size in (("ep", parallel.ep), ("etp", parallel.etp)):
            if size > 1:
                raise ConfigError(f"parallel.{name}={size}: the model has no experts")
        return
    if count % parallel.ep:
        raise ConfigError(
            f"parallel.ep={parallel.ep} does not divide the model's {count} experts; "
            f"possible: {_divisors(count)}"
        )
    if (width := card.get("moe_intermediate_size", parallel.etp)) % parallel.etp:
        raise ConfigError(
            f"parallel.etp={parallel.etp} does not divide the model's moe_intermediate_size={width}; "
            f"possible: {_divisors(width)}"
        )
    if parallel.etp > 1 and "GptOssForCausalLM" in card.architectures:
        raise ConfigError(
            f"parallel.etp={parallel.etp}: GPT-OSS's experts have biases, and megatron-core would add them "
            "on every rank that shares an expert; use parallel.etp=1"
        )
    if parallel.tp > 1 and {"OlmoeForCausalLM", "MiniMaxM2ForCausalLM"} & set(card.architectures):
        raise ConfigError(
            f"parallel.tp={parallel.tp}: {card.architectures[0]} normalizes queries and keys over all heads, "
            "and Megatron-Bridge has this, with its gradient, for one tensor-parallel rank only; use "
            "parallel.ep or parallel.pp"
        )
    if parallel.tp > 1 and not parallel.sequence_parallel:
        raise ConfigError(
            f"parallel.tp={parallel.tp} with experts needs parallel.sequence_parallel=true: otherwise every "
            "rank of a tensor-parallel group would send the same tokens to the experts"
        )


def _check_shared_prompts(config: Config, card: ModelCard) -> None:
    if not config.train.requires_shared_prompts:
        return
    reason = None
    if config.parallel.cp > 1:
        reason = f"parallel.cp={config.parallel.cp} cuts every sequence by itself"
    elif card.is_mla:
        reason = "megatron-core rotates the latent attention's keys by their place in a sequence"
    elif card.window:
        reason = f"the model's sliding_window={card.window} does not end where the prompt does"
    elif "core_attn" in config.parallel.offload_modules:
        reason = (
            f"parallel.offload_modules={list(config.parallel.offload_modules)} frees the attention's inputs, "
            "which shared prompts rotate inside it"
        )
    if reason:
        raise ConfigError(f"train.share_prompts=true is not possible here: {reason}; leave it out")


def _check_top_k(config: Config, card: ModelCard) -> None:
    divergence, vocabulary = config.algorithm.loss.divergence, card.get("vocab_size", math.inf)
    if divergence is not None and divergence.top_k is not None and divergence.top_k > vocabulary:
        raise ConfigError(
            f"algorithm.loss.divergence.top_k={divergence.top_k}: the model's vocab_size={vocabulary} has "
            "fewer tokens; leave it out for all of them"
        )


def _check_stop_tokens(config: Config, card: ModelCard) -> None:
    vocabulary = card.get("vocab_size", math.inf)
    for key, sampling in (("rollout", config.rollout), ("eval.sampling", config.eval.sampling)):
        if beyond := [token for token in sampling.stop_token_ids if token >= vocabulary]:
            raise ConfigError(
                f"{key}.stop_token_ids={list(sampling.stop_token_ids)}: the model's vocab_size={vocabulary} "
                f"has no token {beyond[0]}"
            )


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
