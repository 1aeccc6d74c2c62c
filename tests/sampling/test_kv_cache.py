"""The embedded engine's cache against that of transformers: the same keys and values, and fewer copies."""

import pytest
import torch
from transformers import DynamicCache, Gemma3TextConfig, Qwen2Config

from megatron_gvpo.sampling.local_model import KeyValueCache, grouped_sdpa

HEADS, DIM, MOST = 2, 4, 300
CONFIGS = {
    "full attention": Qwen2Config(num_hidden_layers=2),
    "with sliding windows": Gemma3TextConfig(
        num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"], sliding_window=8
    ),
}


@pytest.fixture(params=CONFIGS)
def config(request):
    return CONFIGS[request.param]


def new_columns(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, HEADS, columns, DIM), torch.randn(rows, HEADS, columns, 2 * DIM)


def update_both(own_cache: KeyValueCache, dynamic_cache: DynamicCache, rows: int, columns: int) -> None:
    for layer in range(2):
        keys, values = new_columns(rows, columns)
        for tensor, other in zip(
            own_cache.update(keys, values, layer), dynamic_cache.update(keys, values, layer), strict=True
        ):
            assert torch.equal(tensor, other)
        assert own_cache.get_seq_length(layer) == dynamic_cache.get_seq_length(layer)
        assert own_cache.get_mask_sizes(1, layer) == dynamic_cache.get_mask_sizes(1, layer)


def test_it_holds_what_the_cache_of_transformers_holds(config):
    torch.manual_seed(0)
    own_cache, dynamic_cache = KeyValueCache(config, MOST), DynamicCache(config=config)
    update_both(own_cache, dynamic_cache, rows=3, columns=5)
    spread = torch.tensor([0, 0, 0, 1, 1, 2, 2])
    for cache in (own_cache, dynamic_cache):
        cache.batch_select_indices(spread)
    rows = len(spread)
    for step in range(MOST - 5):  # beyond the first room for columns, to the last
        update_both(own_cache, dynamic_cache, rows, columns=1)
        if step in (3, 4, 50, 120):
            stays = torch.rand(rows) > 0.3
            stays[0] = step != 3  # the first row leaves first: another one takes its place
            row_indices = own_cache.keep(stays)
            assert sorted(row_indices.tolist()) == stays.nonzero().squeeze(1).tolist()
            dynamic_cache.batch_select_indices(row_indices)
            rows = len(row_indices)
    assert 0 < rows < 5


def test_no_row_may_be_left_and_all_may_stay():
    cache = KeyValueCache(CONFIGS["full attention"], MOST)
    for layer in range(2):
        cache.update(*new_columns(4, 3), layer)
    assert cache.keep(torch.ones(4, dtype=torch.bool)).tolist() == [0, 1, 2, 3]
    assert cache.keep(torch.zeros(4, dtype=torch.bool)).tolist() == []
    assert len(cache.layers[0].keys) == 0


def test_a_column_and_a_row_that_leaves_copy_nothing_else():
    cache = KeyValueCache(CONFIGS["full attention"], MOST)
    cache.update(*new_columns(6, 5), 0)
    address = cache.layers[0].keys.data_ptr()
    for _ in range(12):
        keys, _ = cache.update(*new_columns(6, 1), 0)
    assert keys.data_ptr() == address
    before = keys.clone()
    rows = cache.keep(torch.tensor([True, False, True, True, True, True]))
    assert rows.tolist() == [0, 5, 2, 3, 4]
    assert cache.layers[0].keys.data_ptr() == address
    assert torch.equal(cache.layers[0].keys, before[rows])


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("group", [1, 3])  # query heads of a key head
def test_a_tokens_attention_over_memory_with_room_is_pytorchs(masked, group):
    torch.manual_seed(0)
    cache = KeyValueCache(CONFIGS["full attention"], MOST)
    for layer in range(2):
        cache.update(*new_columns(7, 9), layer)
    rows = len(cache.keep(torch.arange(7) != 2))
    keys, values = cache.update(*new_columns(rows, 1), 0)
    assert keys.stride(1) > keys.shape[2] * DIM, "there is room behind the columns"
    query = torch.randn(rows, HEADS * group, 1, DIM)
    mask = torch.rand(rows, 1, 1, keys.shape[2]) > 0.4 if masked else None
    if mask is not None:
        mask[..., -1] = True
    attention, _ = grouped_sdpa(torch.nn.Module(), query, keys, values, mask, scaling=0.7)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query,
        keys.repeat_interleave(group, 1),
        values.repeat_interleave(group, 1),
        attn_mask=mask,
        scale=0.7,
    )
    torch.testing.assert_close(attention, expected.transpose(1, 2), rtol=1e-5, atol=1e-6)
