"""The KV cache and the decode step: any way of cutting a sequence gives the logits of the whole.

First invariant 2 over drawn chunkings, paddings and reuse; then what the cache promises about
itself (size, room, truncation); then decode_step, the compiled unit: the same logits, no copy of
the past, no recompilation as the position advances.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import (
    MINIMIND_3,
    YARN,
    largest_difference,
    padded_batch,
    peer,
    random_ids,
    random_model,
    tiny,
)
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

from kv_cache import KVCache

BOTH_WAYS = pytest.mark.parametrize("way", ["sdpa", "manual"])
MODELS = {
    (way, scaling is not None): random_model(tiny(attention=way, rope_scaling=scaling))
    for way in ("sdpa", "manual")
    for scaling in (None, YARN)
}
CONFIG = tiny()


def new_cache(rows: int = 2, max_length: int = 32) -> KVCache:
    return KVCache(CONFIG, rows, max_length)


@torch.no_grad()
def in_chunks(model, ids, cache, chunks, mask=None):
    """The logits of each chunk, joined; `mask` (B, T) is given up to the chunk's end."""
    past, logits, start = cache.length, [], 0
    for size in chunks:
        end = start + size
        known = None if mask is None else mask[:, : past + end]
        logits.append(model(ids[:, start:end], attention_mask=known, cache=cache))
        start = end
    assert start == ids.shape[1] and cache.length == past + start
    return torch.cat(logits, dim=1)


@torch.no_grad()
def in_steps(model, ids, cache, step=None):
    """The same by decode_step, one token at a time."""
    step, logits = step or model.decode_step, []
    for t in range(ids.shape[1]):
        slot = torch.tensor([cache.length])
        logits.append(step(ids[:, t : t + 1], cache, slot, cache.capacity(cache.length + 1)))
        cache.length += 1
    return torch.cat(logits, dim=1)


# -------------------------------------------------------------------------- invariant 2: chunks

cuts = st.lists(st.integers(1, 6), min_size=1, max_size=8)
CHEAP = settings(derandomize=True, deadline=None, max_examples=30, database=None)


@CHEAP
@given(cuts, cuts, st.sampled_from(["sdpa", "manual"]), st.booleans())
def test_invariant_2_any_chunks_give_the_logits_of_the_whole_also_after_reuse(
    chunks, others, way, yarn
):
    model = MODELS[way, yarn]
    cache = new_cache(rows=3, max_length=48)
    for seed, sizes in ((0, chunks), (1, others)):
        cache.reset()
        ids = random_ids(model.config, 3, sum(sizes), seed)
        with torch.no_grad():
            whole = model(ids)
        assert largest_difference(in_chunks(model, ids, cache, sizes), whole) < 1e-5


@CHEAP
@given(
    cuts,
    st.lists(st.integers(0, 10), min_size=1, max_size=4),
    st.sampled_from(["left", "right"]),
    st.sampled_from(["sdpa", "manual"]),
)
def test_invariant_2_holds_for_padded_rows_in_chunks(chunks, lengths, side, way):
    """A row of pads alone (length 0) is among the batches; its logits are finite, no more."""
    model = MODELS[way, False]
    length = sum(chunks)
    lengths = [min(real, length) for real in lengths]
    ids, _, mask = padded_batch(model.config, lengths, side, length)
    cache = new_cache(len(lengths), 48)
    logits = in_chunks(model, ids, cache, chunks, mask)
    assert logits.isfinite().all()
    assert cache.row_lengths.tolist() == lengths
    with torch.no_grad():
        for row, real in enumerate(mask.bool()):
            if real.any():
                alone = model(ids[row : row + 1, real])[0]
                assert largest_difference(logits[row, real], alone) < 1e-5


@BOTH_WAYS
@pytest.mark.parametrize("chunks", [[4], [1, 1, 1, 1], [2, 1, 1]])
def test_invariant_2_the_cache_remembers_which_slots_are_real(way, chunks):
    """Behind a left-padded prompt no mask is needed: each row goes on from its own length."""
    model = MODELS[way, False]
    prompt, _, mask = padded_batch(CONFIG, [2, 5, 3], "left", 5)
    more = random_ids(CONFIG, 3, 4, seed=2)
    for remembered in (True, False):
        cache = new_cache(3)
        with torch.no_grad():
            model(prompt, attention_mask=mask, cache=cache)
        full = None if remembered else torch.cat((mask, torch.ones(3, 4).long()), dim=1)
        logits = in_chunks(model, more, cache, chunks, full)
        for row, real in enumerate(mask.bool()):
            alone = torch.cat((prompt[row, real], more[row]))[None]
            assert largest_difference(logits[row], model(alone)[0, -4:].detach()) < 1e-5


@pytest.mark.filterwarnings(
    "ignore:`past_key_values` is deprecated"
)  # its newer name is not in 4.x
def test_invariant_2_agrees_with_transformers_own_cache():
    model = MODELS["sdpa", False]
    ids = random_ids(CONFIG, 2, 12)
    twin, past, theirs = peer(model), None, []
    with torch.no_grad():
        for chunk in ids.split([5, 1, 3, 1, 2], dim=1):
            out = twin(chunk, past_key_values=past, use_cache=True)
            past = out.past_key_values
            theirs.append(out.logits)
    ours = in_chunks(model, ids, new_cache(), [5, 1, 3, 1, 2])
    assert largest_difference(ours, torch.cat(theirs, dim=1)) < 1e-5


@pytest.mark.parametrize("length", [0, 3, 7])
@BOTH_WAYS
def test_a_truncated_cache_is_as_if_the_rest_had_never_been(length, way):
    model = MODELS[way, False]
    ids, _, mask = padded_batch(CONFIG, [4, 7], "left", 7)
    again = random_ids(CONFIG, 2, 5, seed=3)
    kept = torch.cat((mask[:, :length], torch.ones(2, 5).long()), dim=1)
    fresh, cache = new_cache(), new_cache()
    in_chunks(model, ids, cache, [7], mask)
    cache.truncate(length)
    if length:
        in_chunks(model, ids[:, :length], fresh, [length], mask[:, :length])
    assert cache.length == length and cache.row_lengths.tolist() == fresh.row_lengths.tolist()
    retried = in_chunks(model, again, cache, [3, 1, 1])
    assert largest_difference(retried, in_chunks(model, again, fresh, [3, 1, 1], kept)) < 1e-5


def test_selected_rows_go_on_as_they_were():
    model = MODELS["sdpa", False]
    ids, _, mask = padded_batch(CONFIG, [3, 6, 4], "left", 6)
    more = random_ids(CONFIG, 3, 3)
    cache = new_cache(3)
    in_chunks(model, ids, cache, [6], mask)
    cache.select_rows(torch.tensor([2, 0, 2]))
    logits = in_chunks(model, more, cache, [2, 1])
    for row, source in enumerate([2, 0, 2]):
        alone = torch.cat((ids[source, mask[source] == 1], more[row]))[None]
        assert largest_difference(logits[row], model(alone)[0, -3:].detach()) < 1e-5


# ------------------------------------------------------------------- what the cache says of itself


def test_invariant_9_heads_are_not_repeated_and_minimind_3_takes_12_mib_per_1024_tokens():
    cache = KVCache(MINIMIND_3, 1, 1024, dtype=torch.bfloat16)
    assert cache.nbytes == 12 * 2**20
    in_memory = cache.keys + cache.values + [cache.real, cache.row_lengths]
    storages = {s.data_ptr(): s for s in (tensor.untyped_storage() for tensor in in_memory)}
    total = sum(storage.nbytes() for storage in storages.values())
    assert 12 * 2**20 <= total < 12 * 2**20 + 2**12


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_invariant_9_bytes_are_2_layers_kv_heads_head_dim(kv_heads):
    config = tiny(num_key_value_heads=kv_heads, num_hidden_layers=3)
    cache = KVCache(config, 5, 7, dtype=torch.float16)
    assert cache.nbytes == 2 * 3 * kv_heads * 8 * 2 * 5 * 7


@pytest.mark.parametrize("new", [1, 4])
def test_writing_past_the_capacity_is_an_error_with_both_numbers(new):
    model = MODELS["sdpa", False]
    cache = new_cache(max_length=10)
    in_chunks(model, random_ids(CONFIG, 2, 10 - new + 1), cache, [10 - new + 1])
    before = cache.real.clone(), torch.stack(cache.keys)
    with pytest.raises(ValueError, match=rf"{11 - new} of at most 10 .*{new} more"):
        model(random_ids(CONFIG, 2, new), cache=cache)
    assert cache.length == 11 - new  # nothing was written
    assert torch.equal(cache.real, before[0]) and torch.equal(torch.stack(cache.keys), before[1])


def test_a_cache_of_other_rows_is_an_error_with_both_numbers():
    """One row would broadcast into the flags of many."""
    cache = new_cache(rows=3)
    with pytest.raises(ValueError, match=r"3 rows.* 1"):
        MODELS["sdpa", False](random_ids(CONFIG, 1, 4), cache=cache)
    assert cache.length == 0


def test_a_mask_that_leaves_out_the_past_is_an_error_with_both_shapes():
    model, cache = MODELS["sdpa", False], new_cache()
    in_chunks(model, random_ids(CONFIG, 2, 3), cache, [3])
    with pytest.raises(ValueError, match=r"\(2, 2\).*\(2, 5\)"):
        model(random_ids(CONFIG, 2, 2), attention_mask=torch.ones(2, 2), cache=cache)
    assert cache.length == 3


@pytest.mark.parametrize("length", [-1, 5])
def test_truncating_to_what_is_not_there_is_an_error_with_both_numbers(length):
    cache = new_cache()
    in_chunks(MODELS["sdpa", False], random_ids(CONFIG, 2, 4), cache, [4])
    with pytest.raises(ValueError, match=rf"4 .*{length}"):
        cache.truncate(length)


def test_capacity_is_one_of_a_few_sizes_that_hold_the_row():
    cache = KVCache(CONFIG, 1, 3000)
    sizes = {length: cache.capacity(length) for length in range(1, 3001)}
    assert all(size >= length for length, size in sizes.items())
    assert sorted(set(sizes.values())) == [256, 512, 1024, 2048, 3000]
    assert KVCache(CONFIG, 1, 100).capacity(1) == 100
    with pytest.raises(ValueError, match="at most 100"):
        KVCache(CONFIG, 1, 100).capacity(101)


def test_copy_to_a_larger_cache_goes_on_as_before():
    model = MODELS["sdpa", False]
    prompt, _, mask = padded_batch(CONFIG, [5, 9], "left", 9)
    more = random_ids(CONFIG, 2, 4)
    small, large = new_cache(max_length=13), new_cache(max_length=40)
    in_chunks(model, prompt, small, [9], mask)
    small.copy_to(large)
    expected = in_chunks(model, more, small, [1, 3])
    assert torch.equal(in_chunks(model, more, large, [1, 3]), expected)
    assert large.row_lengths.tolist() == [9, 13] and large.max_length == 40


# ---------------------------------------------------------------------------------- decode_step


@BOTH_WAYS
def test_decode_step_gives_the_logits_of_forward_across_capacities(way):
    model = MODELS[way, False]
    prompt, _, mask = padded_batch(CONFIG, [120, 252], "left", 252)
    more = random_ids(CONFIG, 2, 8)
    caches = [new_cache(max_length=600) for _ in range(2)]
    for cache in caches:
        for tensor in cache.keys + cache.values:
            tensor.fill_(7.0)  # what stands in free slots is not read
        in_chunks(model, prompt, cache, [252], mask)
    assert caches[0].capacity(253) == 256 and caches[0].capacity(260) == 512
    expected = in_chunks(model, more, caches[0], [1] * 8)
    assert largest_difference(in_steps(model, more, caches[1]), expected) < 1e-5
    assert torch.equal(caches[0].real, caches[1].real)
    assert caches[1].row_lengths.tolist() == [128, 260]


def test_forward_goes_on_where_decode_step_stopped_and_the_other_way_round():
    model = MODELS["sdpa", True]
    ids, cache = random_ids(CONFIG, 2, 14), new_cache()
    parts = [
        in_steps(model, ids[:, :3], cache),
        in_chunks(model, ids[:, 3:8], cache, [4, 1]),
        in_steps(model, ids[:, 8:10], cache),
        in_chunks(model, ids[:, 10:], cache, [4]),
    ]
    assert largest_difference(torch.cat(parts, dim=1), model(ids).detach()) < 1e-5


def test_decode_step_does_not_recompile_as_the_position_advances():
    """One graph for each capacity, and no graph break."""
    model = MODELS["sdpa", False]
    counter = CompileCounterWithBackend("eager")
    step = torch.compile(model.decode_step, fullgraph=True, backend=counter)
    cache = new_cache(max_length=1024)
    in_chunks(model, random_ids(CONFIG, 2, 200), cache, [200])
    for seed in range(2):  # again after truncation: another turn of the chat
        ids = random_ids(CONFIG, 2, 90, seed)
        whole = cache_free(model, ids)
        cache.truncate(200)
        logits = in_steps(model, ids, cache, step)
        assert largest_difference(logits, whole) < 1e-5
        assert counter.frame_count <= 2, "256 and 512 slots"


def cache_free(model, ids):
    prompt = random_ids(CONFIG, 2, 200)
    with torch.no_grad():
        return model(torch.cat((prompt, ids), dim=1))[:, 200:]


def test_the_tensors_of_the_cache_stay_where_they_are():
    """A CUDA graph replays addresses: steps, prefills, truncation and reset write in place."""
    model, cache = MODELS["sdpa", False], new_cache()

    def addresses():
        tensors = cache.keys + cache.values + [cache.real, cache.row_lengths]
        return [tensor.data_ptr() for tensor in tensors]

    before = addresses()
    ids, _, mask = padded_batch(CONFIG, [3, 5], "left", 5)
    in_chunks(model, ids, cache, [4, 1], mask)
    in_steps(model, ids[:, :2], cache)
    cache.truncate(4)
    in_chunks(model, ids, cache, [5])
    cache.reset()
    assert addresses() == before


class Made(TorchDispatchMode):
    """Counts the entries of the largest new tensor that an operation makes (views are not new)."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **kwargs or {})
        given = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor):
                if tensor.untyped_storage().data_ptr() not in given:
                    self.largest = max(self.largest, tensor.numel())
        return out


@pytest.mark.parametrize("fixed_shape", [False, True])
def test_a_step_neither_concatenates_nor_copies_the_past(fixed_shape):
    """No operation makes a tensor as large as one row's keys of one layer."""
    model, cache = MODELS["sdpa", False], new_cache(rows=1, max_length=2048)
    ids = random_ids(CONFIG, 1, 2000)
    in_chunks(model, ids, cache, [2000])
    with Made() as made:
        run = in_steps if fixed_shape else lambda m, i, c: in_chunks(m, i, c, [1])
        run(model, ids[:, :1], cache)
    one_layer = CONFIG.num_key_value_heads * CONFIG.head_dim * 2000
    # A mask has one entry a slot, scores of the portable kernel four (one a head).
    assert made.largest <= 4 * 2048 < one_layer // 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cache_in_half_precision_follows_the_whole(dtype):
    model = random_model(CONFIG).to(dtype)
    ids = random_ids(CONFIG, 2, 20)
    cache = KVCache(CONFIG, 2, 32, dtype=dtype)
    logits = in_chunks(model, ids, cache, [7, 1, 5, 1, 6])
    whole = model(ids).detach()
    scale = whole.float().abs().max().item()
    assert largest_difference(logits, whole) < 8 * torch.finfo(dtype).eps * scale


def test_a_cache_in_fp32_serves_a_model_under_autocast():
    model, cache = MODELS["sdpa", False], new_cache()
    ids = random_ids(CONFIG, 2, 9)
    with torch.autocast("cpu", torch.bfloat16):
        logits = in_chunks(model, ids, cache, [4, 1, 4])
        whole = model(ids).detach()
    assert largest_difference(logits, whole) < 0.1


@pytest.mark.gpu
def test_a_decode_step_is_captured_in_a_cuda_graph_and_replays_at_every_position():
    model = random_model(CONFIG).cuda()
    ids = random_ids(CONFIG, 2, 20).cuda()
    cache = KVCache(CONFIG, 2, 64, device="cuda")
    token, slot = ids[:, :1].clone(), torch.zeros(1, dtype=torch.long, device="cuda")
    with torch.no_grad():
        whole = model(ids)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):  # warm up outside the capture
            model.decode_step(token, cache, slot, 64)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = model.decode_step(token, cache, slot, 64)
        for _ in range(2):
            cache.length = 20
            cache.reset()
            for t in range(20):
                token.copy_(ids[:, t : t + 1])
                slot.fill_(t)
                graph.replay()
                assert largest_difference(logits[:, 0].cpu(), whole[:, t].cpu()) < 1e-4
