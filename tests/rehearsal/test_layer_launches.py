"""The kernels that a layer launches, beside those of megatron-core's own layer of the same sizes."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.on_null_cuda import QWEN, counts_of, run_code

# A forward and a backward of megatron-core's GPTModel without its output layer, in its data parallelism, on a
# pack of 1,024 tokens; the fusions are those that Megatron-LM's training turns on for such a model.
MEGATRONS_OWN = """
import torch
import torch.nn.functional as F
from megatron_gvpo.rehearsal.world import FakeWorld
world = FakeWorld()
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron_gvpo.rehearsal.nullcuda import counters

world.join(0, 1)
parallel_state.initialize_model_parallel()
tensor_parallel.model_parallel_cuda_manual_seed(0)

def launches(layers):
    config = TransformerConfig(
        num_layers=layers, hidden_size=256, ffn_hidden_size=512, num_attention_heads=4,
        num_query_groups=2, normalization="RMSNorm", gated_linear_unit=True, activation_func=F.silu,
        add_bias_linear=False, add_qkv_bias=True, attention_dropout=0.0, hidden_dropout=0.0, bf16=True,
        params_dtype=torch.bfloat16, bias_activation_fusion=True, bias_dropout_fusion=True,
        apply_rope_fusion=True, gradient_accumulation_fusion=True,
    )
    model = GPTModel(
        config, get_gpt_layer_with_transformer_engine_spec(), vocab_size=1024, max_sequence_length=4096,
        position_embedding_type="rope", post_process=False, share_embeddings_and_output_weights=False,
    )
    parallel = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    chunk = DistributedDataParallel(config, parallel, model.cuda().bfloat16())
    ends = torch.arange(0, 1025, 256, dtype=torch.int32, device="cuda")
    packed = PackedSeqParams("thd", ends, ends, max_seqlen_q=256, max_seqlen_kv=256)
    ids = torch.zeros(1, 1024, dtype=torch.int64, device="cuda")
    def launched(backward):
        before = counters.read()["kernel_launches"]
        with torch.set_grad_enabled(backward):
            output = chunk(input_ids=ids, position_ids=ids, attention_mask=None, packed_seq_params=packed)
            if backward:
                output.mean().backward()
        return counters.read()["kernel_launches"] - before

    counts = [[launched(False), launched(True)] for _ in range(3)]  # the first compile
    return counts[-1]

result = [(many - few) / 2 for many, few in zip(launches(4), launches(2))]
"""


@pytest.mark.proof
def test_a_layer_launches_hardly_more_kernels_than_megatrons_own(tmp_path: Path) -> None:
    """A micro-batch of a second update: its group is scored by a forward, and then trained.

    The difference of updates with four and with two micro-batches leaves out what an update does once.
    """
    models = {str(layers): QWEN | {"num_hidden_layers": layers} for layers in (2, 4)}
    counts = counts_of(models, (2, 4), tmp_path)

    def of_a_micro_batch(layers: int) -> float:
        few, many = (counts[str(layers), n]["second update"]["kernel_launches"] for n in (2, 4))
        return (many - few) / 2

    own = (of_a_micro_batch(4) - of_a_micro_batch(2)) / 2
    forward, both = run_code(MEGATRONS_OWN)
    assert 10 < forward < both < 60
    assert own <= 1.2 * (forward + both)
