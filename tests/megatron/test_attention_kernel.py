"""megatron/model/attention_kernel.py expects the kernels that Transformer Engine's own selector takes."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers.references.transformer_engine_source import CUDNN, loaded
from packaging.version import Version

from megatron_gvpo.checks.layout import check_division
from megatron_gvpo.checks.preflight import preflight
from megatron_gvpo.core import gpus
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.core.versions import REFERENCE
from megatron_gvpo.megatron.model.attention_kernel import (
    Attention,
    check_attention,
    check_shared_prompts,
    kernel,
)
from megatron_gvpo.settings.parallel import ParallelConfig
from megatron_gvpo.settings.sections import ModelConfig

CAPABILITIES = [(8, 0), (9, 0), (10, 0)]
HEAD_DIMS = [(64, 64), (128, 128), (192, 128), (256, 256)]
WITH_SINKS = {"architectures": ["GptOssForCausalLM"]}
Choice = Callable[..., str]


def cudnn_serves(*, capability: tuple[int, int], **attributes: Any) -> bool:
    """The rules for packs of nvte_get_fused_attn_backend, in Transformer Engine's C++ core, for CUDNN."""
    qk, v = attributes["head_dim_qk"], attributes["head_dim_v"]
    if capability < (9, 0):
        return False
    if (qk, v) == (192, 128) or max(qk, v) <= 128:
        return True
    return capability < (10, 0) and max(qk, v) <= 256 and qk == v


@pytest.fixture(scope="module")
def choose() -> Iterator[Choice]:
    """Transformer Engine's choice for training on eight sequences of 4,096 tokens, 28 heads, 4 groups."""
    with loaded("pytorch/attention/dot_product_attention/utils.py") as utils:
        parallel = sys.modules.setdefault(
            "transformer_engine.pytorch.attention.dot_product_attention.context_parallel",
            ModuleType("context_parallel"),
        )
        parallel.__dict__["cp_per_step_configs"] = lambda *_, **__: [None]
        utils.__dict__["_NVTE_FLASH_ATTN"] = 0  # no advice, for which it would ask the GPU

        def chosen(attention: Attention, exchange: str, capability: tuple[int, int], flash: bool) -> str:
            backends = utils.FusedAttnBackend
            utils.get_device_compute_capability = lambda: capability
            utils.get_cudnn_version = lambda: CUDNN

            def fused_backend(**attributes: Any) -> tuple[int, str]:
                served = cudnn_serves(capability=capability, **attributes)
                return (backends.F16_arbitrary_seqlen if served else backends.No_Backend), ""

            utils._get_fused_attn_backend = fused_backend
            utils.FlashAttentionUtils.is_installed = flash
            if flash:
                utils.FlashAttentionUtils.version = Version(REFERENCE["flash-attn"])
                utils.FlashAttentionUtils.set_flash_attention_version()
            flash_2, _, fused, _, unfused, _ = utils.get_attention_backend(
                utils.AttentionParams(
                    qkv_dtype=getattr(torch, attention.dtype),
                    qkv_layout="thd_thd_thd",
                    batch_size=8,
                    num_heads=28,
                    num_gqa_groups=4,
                    max_seqlen_q=4096,
                    max_seqlen_kv=4096,
                    num_tokens_q=8 * 4096,
                    num_tokens_kv=8 * 4096,
                    head_dim_qk=attention.head_dim_qk,
                    head_dim_v=attention.head_dim_v,
                    attn_mask_type="padding_causal",
                    window_size=(-1, 0),
                    context_parallel=attention.cp > 1,
                    cp_comm_type=exchange,
                    cp_size=attention.cp,
                    deterministic=attention.deterministic,
                    core_attention_bias_requires_grad=False,  # there is none
                    softmax_type="learnable" if attention.sinks else "vanilla",
                )
            )
            names = {"cuDNN": fused, "FlashAttention": flash_2, "unfused": unfused}
            return next((name for name, taken in names.items() if taken), "none")

        required = utils.FlashAttentionUtils.version_required_blackwell
        assert utils.FlashAttentionUtils.is_version_supported(Version(REFERENCE["flash-attn"]), required)
        yield chosen


def test_it_is_transformer_engines_own_choice(choose: Choice) -> None:
    differ = {}
    for capability, dtype, deterministic, (cp, exchange), dims, flash, sinks in itertools.product(
        CAPABILITIES,
        ("bfloat16", "float32"),
        (False, True),
        ((1, "p2p"), (2, "p2p"), (2, "all_gather"), (2, "a2a")),
        HEAD_DIMS,
        (False, True),
        (False, True),
    ):
        attention = Attention(dtype, deterministic, cp, *dims, sinks)
        wanted, got = choose(attention, exchange, capability, flash), kernel(attention, capability, flash)
        if sinks and cp > 1 and exchange != "a2a":
            assert wanted == "none"
            with pytest.raises(ConfigError, match=r"sinks with parallel\.cp_exchange=a2a only"):
                check_division(ParallelConfig(cp=cp, cp_exchange=exchange), WITH_SINKS)
            continue
        if wanted != got:
            differ[capability, exchange, flash, attention] = (wanted, got)
    assert not differ


def test_what_has_no_kernel_is_refused_with_the_remedy() -> None:
    usual = Attention("bfloat16", False, 1, 128, 128)
    check_attention(usual, (9, 0), False)
    check_attention(usual, (8, 0), True)
    check_attention(Attention("float32", False, 1, 128, 128), (9, 0), False)  # for small checks
    for attention, capability, message in [
        (
            usual,
            (8, 0),
            r"bfloat16 on a GPU of compute capability 8\.0: .* keep all scores .* flash-attn==",
        ),
        (Attention("bfloat16", False, 2, 128, 128), (8, 0), r"parallel\.cp=2 .* has no attention kernel"),
        (Attention("bfloat16", True, 1, 128, 128), (9, 0), r"train\.deterministic=true .* flash-attn=="),
        (
            Attention("float32", False, 2, 64, 64),
            (9, 0),
            r"float32, parallel\.cp=2 .* use model\.dtype=bfloat16",
        ),
        (Attention("bfloat16", False, 1, 256, 256), (10, 0), r"head dimensions 256 and 256 .* flash-attn=="),
        (Attention("bfloat16", False, 1, 64, 64, True), (8, 0), r"attention sinks .* use another model"),
        (Attention("bfloat16", True, 1, 64, 64, True), (9, 0), r"sinks, train\.deterministic=true .*=false"),
    ]:
        with pytest.raises(ConfigError, match=message):
            check_attention(attention, capability, False)


def test_shared_prompts_are_refused_where_flash_attention_does_not_run() -> None:
    for dims in (64, 128, 256):
        check_shared_prompts(Attention("bfloat16", True, 1, dims, dims), (8, 0))
    for attention, capability, message in [
        (Attention("float32", False, 1, 128, 128), (9, 0), r"bfloat16, and this is model\.dtype=float32"),
        (Attention("bfloat16", False, 1, 128, 128), (7, 5), r"8\.0, and this GPU has 7\.5"),
        (Attention("bfloat16", False, 1, 100, 100), (9, 0), r"multiples of 8 .* the model's is 100"),
        (Attention("bfloat16", False, 1, 512, 512), (9, 0), r"up to 256, and the model's is 512"),
    ]:
        with pytest.raises(ConfigError, match=rf"train\.share_prompts=true .* {message}; set it to false"):
            check_shared_prompts(attention, capability)


def test_the_first_second_of_a_run_asks_the_machines_gpus(
    task: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for the driver's list of GPUs; the model's own files and the whole preflight."""
    from helpers.tiny_run import GVPO, configure

    h100 = gpus.LocalGpu(0, "H100", 80.0, (9, 0), 18)
    monkeypatch.setattr("megatron_gvpo.checks.preflight.list_gpus", lambda: [h100])
    monkeypatch.setattr("megatron_gvpo.checks.preflight.version", lambda _: "2.13.0")
    monkeypatch.setattr("megatron_gvpo.checks.preflight.check_gpu_packages", lambda: None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    config = configure(task, tmp_path / "out", *GVPO, "train.deterministic=true", "model.dtype=bfloat16")
    with pytest.raises(ConfigError, match=r"train\.deterministic=true on a GPU of compute capability 9\.0"):
        preflight(config, "train", 1)
    preflight(config, "slurm", 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    preflight(config, "train", 1)


def test_the_sinks_of_gpt_oss_are_known() -> None:
    shape = {"architectures": ["GptOssForCausalLM"], "head_dim": 64}
    assert Attention.of(ModelConfig(path="unused"), ParallelConfig(), False, shape).sinks


def test_latent_attention_has_two_head_dimensions() -> None:
    shape = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    of = Attention.of(ModelConfig(path="unused"), ParallelConfig(cp=2), True, shape)
    assert of == Attention("bfloat16", True, 2, 192, 128)
