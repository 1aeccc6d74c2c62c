"""The planner against counts, measurements on a CPU, and published numbers."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import subprocess
import sys
from argparse import Namespace
from collections import Counter
from importlib import resources
from pathlib import Path

import pytest
import torch
from helpers.distributed import launch
from helpers.paths import ROOT
from helpers.tiny_run import configure, fit

from megatron_gvpo.checks.layout import check_layout
from megatron_gvpo.megatron.critic import Critic
from megatron_gvpo.megatron.policy import Policy
from megatron_gvpo.planner import architecture, command, search, sharing, step_time, workload
from megatron_gvpo.planner import memory_model as memory
from megatron_gvpo.planner.workload import Layout, Lengths, Workload
from megatron_gvpo.settings.config import load_config
from megatron_gvpo.settings.parallel import ParallelConfig
from megatron_gvpo.types import TrainBatch

KNOWN = json.loads(resources.files("megatron_gvpo.planner").joinpath("models.json").read_text())


@pytest.mark.parametrize("name", KNOWN)
def test_parameter_counts_are_those_of_transformers(name: str):
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    values = dict(KNOWN[name])
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    kind = AutoModelForImageTextToText if "vision_config" in values else AutoModelForCausalLM
    with torch.device("meta"):
        model = kind.from_config(config)
    counted = sum({id(p): p.numel() for p in model.parameters()}.values())
    assert architecture.load(name).parameters == counted


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("Qwen/Qwen2.5-0.5B", 494_032_768),
        ("Qwen/Qwen2.5-7B", 7_615_616_512),
        ("Qwen/Qwen2.5-72B", 72_706_203_648),
        ("Qwen/Qwen3-8B", 8_190_735_360),
        ("Qwen/Qwen3-30B-A3B", 30_532_122_624),
        ("meta-llama/Llama-3.1-8B", 8_030_261_248),
        ("meta-llama/Llama-3.1-70B", 70_553_706_496),
        ("deepseek-ai/DeepSeek-V2", 235_741_434_880),
        ("Qwen/Qwen2.5-VL-3B-Instruct", 3_754_622_976),
        ("Qwen/Qwen2.5-VL-7B-Instruct", 8_292_166_656),
    ],
)
def test_parameter_counts_are_the_published_ones(name: str, published: int):
    """The hub shows these counts beside the models' safetensors."""
    assert architecture.load(name).parameters == published


def test_memory_on_cpu(task: Path, tmp_path: Path):
    """Measured parameters, gradients and optimizer states of every rank, for a policy and a critic, are
    within 2 % of the prediction.
    """
    launch("helpers.workers.memory_worker:run", [1, 2, 4], str(task), str(tmp_path))
    model = architecture.load(str(task / "model"))
    measured = [json.loads(file.read_text()) for file in tmp_path.glob("*.json")]
    assert len(measured) == 2 * (1 + 2 * 4 + 4 * 3)
    for rank in measured:
        layout = Layout(rank["world"], tp=rank["tp"], pp=rank["pp"], offload=rank["offload"])
        critic = rank["critic"]
        predicted = [*memory.state(model, layout, rank["stage"], bytes_each=4, critic=critic)]
        predicted.append(memory.host_state(model, layout, rank["stage"], critic))
        for part, bytes_ in zip(("parameters", "gradients", "optimizer", "host"), predicted, strict=True):
            assert rank[part] == pytest.approx(bytes_, rel=0.02), (rank, part)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("Qwen/Qwen2.5-7B", Layout(8, tp=2)),
        ("Qwen/Qwen2.5-72B", Layout(64, tp=8, pp=4)),
        ("meta-llama/Llama-3.1-8B", Layout(16, tp=2, pp=2)),
        ("Qwen/Qwen3-30B-A3B", Layout(32, tp=2, ep=8)),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_memory_is_what_megatron_reports(name: str, layout: Layout):
    """megatron.training's own estimate of weights and optimizer for the fullest rank, in bf16.

    It leaves out the biases of Qwen2's attention and the norms of Qwen3's heads: less than 0.1 %.
    """
    from megatron.training.theoretical_memory_usage import compute_weight_and_optimizer_memory

    from megatron_gvpo.megatron import parallel  # noqa: F401 - on CPU it must come before megatron.core

    model = architecture.load(name)
    arguments = Namespace(
        kv_channels=model.head_dim,
        num_attention_heads=model.heads,
        hidden_size=model.hidden,
        group_query_attention=True,
        num_query_groups=model.kv_heads,
        num_experts=model.experts or None,
        swiglu=True,
        moe_shared_expert_intermediate_size=None,
        moe_layer_freq=1,
        num_layers=model.layers,
        moe_ffn_hidden_size=model.expert_ffn,
        mtp_num_layers=None,
        normalization="RMSNorm",
        multi_latent_attention=False,
        ffn_hidden_size=model.ffn,
        padded_vocab_size=model.vocab,
        untie_embeddings_and_output_weights=not model.tied,
        moe_latent_size=None,
        moe_router_topk=model.experts_per_token,
        add_bias_linear=False,
        expert_tensor_parallel_size=1,
        expert_model_parallel_size=layout.ep,
        pipeline_model_parallel_size=layout.pp,
        tensor_model_parallel_size=layout.tp,
        world_size=layout.gpus,
        data_parallel_size=layout.dp,
        use_distributed_optimizer=True,
    )
    reported = compute_weight_and_optimizer_memory(arguments)
    assert sum(memory.state(model, layout, 0)) == pytest.approx(reported, rel=0.002)


@pytest.mark.parametrize("name", KNOWN)
def test_the_stages_of_a_pipeline_hold_the_model_together(name: str):
    """All stages, unequal ones as well, hold every parameter once, with a critic's head in place of the
    output layer.
    """
    model = architecture.load(name)
    for pp in (1, 4, 5, 16):
        layout = Layout(pp, pp=pp)
        assert sum(sizes := layout.stage_layers(model.layers)) == model.layers
        assert max(sizes) - min(sizes) <= 1 and sizes[-1] == min(sizes)
        total = sum(memory.shard(model, layout, stage).total for stage in range(pp))
        critic = sum(memory.shard(model, layout, stage, critic=True).total for stage in range(pp))
        again = model.embedding if model.tied and pp > 1 else 0  # the last stage's copy
        assert total == model.parameters + again
        assert critic == total - again - (0 if model.tied else model.embedding) + model.hidden + 1


@pytest.mark.parametrize("name", KNOWN)
def test_every_layout_that_is_considered_is_one_that_the_trainer_takes(name: str, task: Path, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(KNOWN[name]))
    model = architecture.load(name)
    layouts = [
        layout for gpus in (8, 24, 64) for layout in search._layouts(model, Layout(gpus), False, Counter())
    ]
    assert len(layouts) > 20
    base = load_config([task / "run.yaml"], [f"model.path={tmp_path}", f"output_dir={tmp_path}"])
    for layout in layouts:
        parallel = ParallelConfig.model_validate(command.parallel(layout, model.layers))
        check_layout(base.model_copy(update={"parallel": parallel}), layout.gpus)


def test_a_window_is_not_cut_by_context_parallelism(tmp_path: Path):
    config = KNOWN["mistralai/Mistral-7B-v0.3"] | {"sliding_window": 4096}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = architecture.load(str(tmp_path))
    assert {layout.cp for layout in search._layouts(model, Layout(64), False, Counter())} == {1}


def test_the_memory_is_that_of_the_micro_batches_that_the_trainer_makes():
    """With context parallelism, train.max_tokens_per_micro_batch is a rank's part of a micro-batch."""
    model, gpu = architecture.load("Qwen/Qwen2.5-7B"), workload.gpu("h800")
    work = Workload(256, 8, 500, Lengths(8000, 15000, 30000))
    candidates = [c for c in search.search(model, gpu, 64, work).best if c.layout.cp > 1]
    assert len(candidates) > 20
    for candidate in candidates:
        layout, share = candidate.layout, work.tokens / candidate.layout.dp
        budget = candidate.micro_tokens * layout.cp  # of Policy
        assert budget >= work.longest
        tokens, batches = min(budget, share), max(1, int(share // budget))
        responses = tokens * work.responses * work.lengths.mean / work.tokens
        assert candidate.memory == memory.memory(model, layout, tokens, batches, responses=responses)


@pytest.mark.parametrize(
    ("recipe", "epochs"), [("gvpo", 1), ("grpo", 1), ("grpo", 2), ("ppo", 2), ("gvpo_minus_cov", 1)]
)
def test_a_method_scores_as_often_as_it_is_planned_to(
    recipe: str, epochs: int, task: Path, tmp_path: Path, monkeypatch
):
    """Responses that a real run scores, and that its critic evaluates, per response trained in one pass."""
    seen = dict.fromkeys(("scored", "valued", "trained", "critic"), 0)

    def count(owner: type, method: str, what: str) -> None:
        original = getattr(owner, method)

        def counted(self: object, rows: TrainBatch, *arguments: object, **options: object) -> object:
            seen[what] += len(rows)
            return original(self, rows, *arguments, **options)

        monkeypatch.setattr(owner, method, counted)

    count(Policy, "score", "scored")
    count(Policy, "update", "trained")
    count(Critic, "values", "valued")
    count(Critic, "update", "critic")
    overrides = (f"algorithm={recipe}", "train.steps=1", "train.mini_batches=4")
    fit(configure(task, tmp_path / "run", *overrides, f"train.batch_epochs={epochs}"))
    planned = workload.method(recipe, mini_batches=4)
    assert epochs * seen["scored"] / seen["trained"] == pytest.approx(planned.scoring)
    assert epochs * seen["valued"] == seen["trained"] * planned.critic
    assert seen["critic"] == seen["trained"] * planned.critic


@pytest.mark.parametrize("critic", [False, True])
def test_more_passes_over_a_batch_cost_training_and_nothing_else(critic: bool):
    model, gpu = architecture.load("Qwen/Qwen2.5-7B"), workload.gpu("h800")
    lengths = Lengths(850, 2000, 4000)
    once, thrice = (Workload(1024, 4, 150, lengths, 4, 2.0, critic, passes) for passes in (1, 3))
    took, longer = (step_time.seconds(model, gpu, Layout(8, tp=2), work, 8192) for work in (once, thrice))
    assert longer.training == pytest.approx(3 * took.training)
    assert longer.optimizer == pytest.approx(3 * took.optimizer)
    for same in ("rollout", "scoring", "sync", "waiting"):
        assert getattr(longer, same) == getattr(took, same)
    assert step_time.model_flops(model, thrice) == pytest.approx(3 * step_time.model_flops(model, once))


def test_a_critic_costs_as_much_training_as_the_policys_layers_and_no_rollout():
    model, gpu = architecture.load("Qwen/Qwen2.5-7B"), workload.gpu("h800")
    lengths = Lengths(850, 2000, 4000)
    alone, both = (Workload(1024, 4, 150, lengths, 4, 2.0, critic) for critic in (False, True))
    took, longer = (step_time.seconds(model, gpu, Layout(8, tp=2), work, 8192) for work in (alone, both))
    assert longer.rollout == took.rollout and longer.sync == took.sync
    share = (longer.training - took.training) / took.training
    assert share == pytest.approx(1 - model.embedding / (model.parameters - model.embedding), abs=0.02)
    assert longer.scoring == pytest.approx(took.scoring * (1 + share / 2), rel=0.01)  # one pass to two


@pytest.mark.parametrize(
    ("name", "tp", "elements"),
    [
        ("Qwen/Qwen3-235B-A22B", 4, 94 * 2 * 4 * 128),
        ("Qwen/Qwen3-235B-A22B", 8, 94 * 2 * 8 * 128),  # each of 4 heads is on two GPUs
        ("deepseek-ai/DeepSeek-V3", 1, 61 * (512 + 64)),
        ("deepseek-ai/DeepSeek-V3", 32, 32 * 61 * (512 + 64)),  # all GPUs have the latents
    ],
)
def test_an_engine_keeps_heads_and_latents_on_every_gpu_that_computes_with_them(name, tp, elements):
    assert architecture.load(name).cache_per_token(tp) == elements


def test_an_expert_that_no_other_rank_has_is_updated_whole():
    """With 64 expert-parallel ranks of 64, each updates its own two experts of 48 layers by itself."""
    model, gpu = architecture.load("Qwen/Qwen3-30B-A3B"), workload.gpu("h100")
    layout = Layout(64, ep=64, offload=1.0)
    own_experts = 48 * 2 * 3 * 2048 * 768
    rest = model.parameters - 48 * 128 * 3 * 2048 * 768
    on_host = 40 * (own_experts + rest / 64) / (gpu.host_gb_per_s * gpu.memory_fraction * 1e9)
    exchanged = 6 * rest * 63 / 64 / (gpu.network_gb_per_s * gpu.network_fraction * 1e9)
    assert step_time._optimizer(model, gpu, layout) == pytest.approx(on_host + exchanged, rel=0.001)
    assert 16 * (own_experts + rest / 64) == pytest.approx(memory.host_state(model, layout, 0))


def test_published_step_times():
    """benchmarks/planner_accuracy.py prints the committed table, misses included."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "planner_accuracy.py"), "--check"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_lengths_have_the_mean_and_the_percentile_that_were_asked_for():
    lengths = Lengths(850, 2400, 100_000)
    sample = lengths.sample(20_000)
    assert sum(sample) / len(sample) == pytest.approx(850, rel=0.01)
    assert sample[int(0.95 * len(sample))] == pytest.approx(2400, rel=0.01)


def test_rollout_time_is_that_of_every_single_step():
    """The simulation leaps from one finished response to the next; this reference simulates every token."""
    model, gpu = architecture.load("Qwen/Qwen2.5-7B"), workload.gpu("h800")
    work = Workload(16, 4, 200, Lengths(60, 150, 200))
    lengths = [math.ceil(n) for n in work.lengths.sample(64)]
    step = step_time.DecodeStep(model, gpu, 1)
    slow = model.layer_flops(16 * 200, context=100) / (gpu.flops(fp8=False) * step_time.PREFILL_FRACTION)
    for token in range(max(lengths)):
        running = [n for n in lengths if n > token]
        slow += step.seconds(len(running), len(running) * (200 + token + 0.5))
    assert step_time.rollout_seconds(model, gpu, 1, 1, work) == pytest.approx(slow, rel=0.02)


@pytest.mark.parametrize(
    ("prompt", "response", "k", "tokens", "pairs"),
    [(150, 850, 5, (5000, 4400), (2.5e6, 2.455e6)), (4000, 1000, 8, (40000, 12000), (1e8, 4.4e7))],
)
def test_shared_prompts_save_what_a_count_by_hand_says(prompt, response, k, tokens, pairs):
    model = architecture.load("Qwen/Qwen2.5-7B")
    fixed = Lengths(response - 1e-6, response - 1e-7, response)
    savings = sharing.sharing(model, Workload(1, k, prompt, fixed)).to_dict()
    width = 28 * 128
    layer = 2 * 3584 * width + 2 * 3584 * 4 * 128 + 3 * 3584 * 18944
    for kind, t, p in zip(("whole", "shared"), tokens, pairs, strict=True):
        assert savings["tokens"][kind] == pytest.approx(t)
        assert savings["pairs"][kind] == pytest.approx(p)
        flops = 6 * 28 * layer * t + 12 * 28 * width * p + 6 * 3584 * 152_064 * k * response
        assert savings["flops"][kind] == pytest.approx(flops, rel=1e-3)  # and biases and norms
    ratio = tokens[1] / tokens[0]
    assert savings["activation_gib"]["ratio"] == savings["tokens"]["ratio"] == pytest.approx(ratio, abs=1e-4)


def test_the_documented_savings_are_the_planners_and_the_measured_ones():
    cases = json.loads((ROOT / "benchmarks/results/shared_prompts_cpu.json").read_text())["cases"]
    document = (ROOT / "docs/reference/layouts.md").read_text()
    for name, case in cases.items():
        prompt, response, k = map(int, re.findall(r"\d+", name))
        fixed = Lengths(response - 1e-3, response - 1e-4, response)
        model = architecture.load("Qwen/Qwen2.5-7B")
        savings = sharing.sharing(model, Workload(1, k, prompt, fixed)).to_dict()
        cells = [f"{prompt} + {response}, k={k}", *(f"{savings[cost]['ratio']:.2f}" for cost in savings)]
        measured, predicted = case["cpu_s"]["ratio"], case["predicted"]["flops"]["ratio"]
        cells += [f"{case['lengths_divided_by']}", f"{measured:.2f} ({predicted:.2f})"]
        cells += [f"{case['activation_mib']['ratio']:.2f}"]
        assert f"| {' | '.join(cells)} |" in document
        assert case["Qwen/Qwen2.5-7B"] == savings


def test_a_plan_with_shared_prompts_trains_faster_and_keeps_groups_whole():
    model, gpu = architecture.load("Qwen/Qwen2.5-7B"), workload.gpu("h800")
    unshared = Workload(256, 8, 4000, Lengths(1000, 1500, 2000))
    shared = dataclasses.replace(unshared, share_prompts=True)
    took, less = (step_time.seconds(model, gpu, Layout(8, tp=2), work, 16384) for work in (unshared, shared))
    assert less.training < 0.36 * took.training and less.scoring == took.scoring == 0
    assert less.rollout == took.rollout and less.optimizer == took.optimizer
    best = search.search(model, gpu, 16, shared).best
    assert all(c.layout.cp == 1 for c in best)
    assert min(c.micro_tokens for c in best) >= 4000 + 8 * 1000
    with_critic = dataclasses.replace(unshared, critic=True)
    of_critic = step_time.model_flops(model, with_critic) - step_time.model_flops(model, unshared)
    both = step_time.model_flops(model, dataclasses.replace(with_critic, share_prompts=True))
    assert both == pytest.approx(step_time.model_flops(model, shared) + of_critic)  # which shares nothing


def test_a_model_that_cannot_share_prompts_is_told_so(tmp_path: Path):
    assert (
        sharing.sharing(architecture.load("deepseek-ai/DeepSeek-V3"), Workload(1, 2, 10, Lengths(5, 6, 7)))
        is None
    )


def test_a_longer_tail_costs_time_at_the_same_mean():
    model, gpu = architecture.load("Qwen/Qwen2.5-7B"), workload.gpu("h800")
    short, long = (Workload(1024, 5, 150, Lengths(850, p95, 8192)) for p95 in (1200, 3000))
    assert step_time.rollout_seconds(model, gpu, 8, 1, long) > 1.5 * step_time.rollout_seconds(
        model, gpu, 8, 1, short
    )
