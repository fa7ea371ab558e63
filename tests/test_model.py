"""The decoder's function: held against transformers, float64 loops, and its own invariants.

In the order of model.py: the config, RoPE, attention and its masks, padding, precision, the loss,
initialisation; then parity with transformers' Qwen3, which covers all of it at once. The numbered
invariants are those of the design: test_invariant_1 to _9 are here, but for 2 and 9, which are the
cache's (test_cache.py).
"""

import math
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import (
    MINIMIND_3,
    YARN,
    gradients,
    largest_difference,
    loop_attention,
    padded_batch,
    peer,
    positions_of,
    random_ids,
    random_model,
    tiny,
    visible_by_rule,
)
from torch.utils._python_dispatch import TorchDispatchMode

import loss as loss_file
import model as model_file
from kv_cache import KVCache
from loss import LinearCrossEntropy
from model import (
    GPT,
    AttentionPlan,
    GPTConfig,
    RMSNorm,
    attend,
    attend_manually,
    open_blind,
    plan_attention,
)
from rope import rope_frequencies, rope_tables, rotate

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def plan_of(visible: torch.Tensor | None, is_causal: bool = False) -> AttentionPlan:
    """What attend() needs of a plan, for a mask made by hand."""
    opened, blind = (None, None) if visible is None else open_blind(visible)
    return AttentionPlan(None, None, visible=opened, blind=blind, is_causal=is_causal)


HEADS = {"mha": (4, 4), "gqa": (4, 2), "mqa": (4, 1)}


# ------------------------------------------------------------------------------------ the config


def test_minimind_3_has_its_published_number_of_parameters():
    with torch.device("meta"):
        assert GPT(MINIMIND_3).num_parameters() == 63_912_192


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"num_attention_heads": 6, "num_key_value_heads": 4}, ["6", "4", "num_key_value_heads"]),
        ({"head_dim": 7}, ["head_dim", "7"]),
        ({"hidden_size": 0}, ["hidden_size", "0"]),
        ({"num_hidden_layers": 2.0}, ["num_hidden_layers", "2.0"]),
        ({"vocab_size": True}, ["vocab_size", "True"]),
        ({"attention": "flash"}, ["attention", "flash"]),
        ({"dropout": 1.0}, ["dropout", "1.0"]),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, ["rope_scaling", "linear"]),
        ({"rope_scaling": {"rope_type": "yarn"}}, ["rope_scaling", "factor"]),
    ],
)
def test_a_shape_that_cannot_be_built_is_an_error_with_names_and_values(changes, named):
    with pytest.raises(ValueError) as error:
        tiny(**changes)
    for word in named:
        assert word in str(error.value)


# ------------------------------------------------------------------------------------------ RoPE


def test_invariant_7_scores_depend_on_relative_position_only():
    config = tiny(head_dim=16)
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 16, generator=generator)

    def score(query_position: int, key_position: int) -> float:
        turned_q = rotate(q, *rope_tables(config, torch.tensor([[query_position]])))
        turned_k = rotate(k, *rope_tables(config, torch.tensor([[key_position]])))
        return (turned_q * turned_k).sum().item()

    for shift in (1, 17, 500):
        assert score(9 + shift, 4 + shift) == pytest.approx(score(9, 4), abs=2e-4)
    assert score(9, 4) != pytest.approx(score(4, 9), abs=1e-2)  # direction counts
    assert score(9, 4) != pytest.approx(score(9, 5), abs=1e-2)  # distance counts


@pytest.mark.parametrize("theta", [1e4, 1e6])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_invariant_7_tables_are_within_2e_3_of_float64_at_position_30000(head_dim, theta):
    positions = torch.arange(30_000, 30_064)[None]
    cos, sin = rope_tables(tiny(head_dim=head_dim, rope_theta=theta), positions)
    pair = torch.arange(0, head_dim, 2, dtype=torch.double)
    angles = positions[0, :, None].double() * theta ** (-pair / head_dim)
    assert cos.dtype == sin.dtype == torch.float32
    assert largest_difference(cos[0, 0], angles.cos()) < 2e-3
    assert largest_difference(sin[0, 0], angles.sin()) < 2e-3


@pytest.mark.parametrize("dtype", DTYPES)
def test_invariant_7_no_table_entry_changes_with_the_model_s_dtype(dtype):
    model = random_model(tiny())
    ids = random_ids(model.config, 2, 40)
    seen = []
    model.model.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[1]))
    with torch.no_grad():
        model(ids)
        model.to(dtype)(ids)
    before, after = seen
    assert after.cos.dtype == after.sin.dtype == torch.float32
    assert torch.equal(before.cos, after.cos) and torch.equal(before.sin, after.sin)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_invariant_7_the_rotation_itself_is_in_fp32(dtype):
    x = torch.randn(1, 2, 50, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    tables = rope_tables(tiny(), torch.arange(50)[None])
    assert torch.equal(rotate(x, *tables), rotate(x.float(), *tables).to(dtype))


def test_rope_pairs_dimension_i_with_i_plus_half():
    """One unit in dimension 1 of 8 turns into dimension 5, and nowhere else."""
    x = torch.zeros(1, 1, 1, 8)
    x[..., 1] = 1.0
    turned = rotate(x, *rope_tables(tiny(head_dim=8), torch.tensor([[3]])))[0, 0, 0]
    assert turned.nonzero().flatten().tolist() == [1, 5]
    angle = 3 * 1e4 ** (-2 / 8)
    assert turned[1].item() == pytest.approx(math.cos(angle), abs=1e-6)
    assert turned[5].item() == pytest.approx(math.sin(angle), abs=1e-6)


REAL_YARN = {
    "Qwen3": (128, 40960, {"factor": 4.0, "original_max_position_embeddings": 32768}),
    "MiniMind-3": (
        96,
        32768,
        {
            "factor": 16,
            "original_max_position_embeddings": 2048,
            "beta_fast": 32,
            "beta_slow": 1,
            "attention_factor": 1.0,
        },
    ),
    "not truncated": (
        64,
        4096,
        {"factor": 4.0, "original_max_position_embeddings": 1024, "truncate": False},
    ),
}


@pytest.mark.parametrize("release", REAL_YARN)
def test_yarn_frequencies_are_those_of_transformers(release):
    head_dim, context, scaling = REAL_YARN[release]
    config = tiny(
        head_dim=head_dim,
        rope_theta=1e6,
        max_position_embeddings=context,
        rope_scaling={"rope_type": "yarn"} | scaling,
    )
    frequencies, attention_factor = rope_frequencies(config, torch.device("cpu"))
    rotary = peer(random_model(config)).model.rotary_emb
    assert torch.allclose(frequencies, rotary.inv_freq, rtol=1e-6, atol=0)
    assert attention_factor == pytest.approx(rotary.attention_scaling, rel=1e-9)


# ------------------------------------------------------------- attention against a float64 loop

# (rows' masks over S slots, new tokens T): every mixture of padding and past
MASKS = {
    "square": ([[1, 1, 1, 1, 1]] * 2, 5),
    "square, right padding": ([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]], 5),
    "square, left padding": ([[0, 0, 1, 1, 1], [0, 1, 1, 1, 1]], 5),
    "square, a row of pads": ([[0, 0, 0, 0, 0], [1, 1, 1, 1, 1]], 5),
    "behind a past": ([[1, 1, 1, 1, 1]] * 2, 2),
    "behind a past, left padding": ([[0, 0, 0, 1, 1], [0, 0, 1, 1, 1]], 3),
    "behind a past, a gap": ([[1, 1, 0, 0, 1], [1, 0, 1, 0, 1]], 2),
    "one query": ([[1, 1, 1, 1, 1]] * 2, 1),
    "one query, left padding": ([[0, 0, 1, 1, 1], [0, 0, 0, 0, 1]], 1),
    "one query, nothing to see": ([[0, 0, 0, 0, 0], [0, 1, 1, 1, 1]], 1),
}


def random_qkv(H: int, K: int, T: int, S: int, D: int = 6, B: int = 2, dtype=torch.float32):
    generator = torch.Generator().manual_seed(H * 100 + K * 10 + T)
    shapes = [(B, H, T, D), (B, K, S, D), (B, K, S, D)]
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes]


def run_attention(way: str, qkv, visible, is_causal: bool = False):
    if way == "sdpa":
        return attend(*qkv, plan_of(visible, is_causal), dropout=0.0)
    return attend_manually(*qkv, plan_of(visible), dropout=0.0)[0]


@pytest.mark.parametrize("way", ["sdpa", "manual"])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("case", MASKS)
def test_invariants_5_and_6_attention_equals_a_float64_loop(case, heads, way):
    """Query head h reads key/value head h // G; outputs and every gradient, elementwise."""
    mask, T = torch.tensor(MASKS[case][0]), MASKS[case][1]
    visible = visible_by_rule(mask, T)
    qkv = random_qkv(*HEADS[heads], T, mask.shape[1])
    expected, weights = loop_attention(*qkv, visible)
    direction = torch.randn(expected.shape, generator=torch.Generator().manual_seed(9)).double()
    expected_grads = torch.autograd.grad((expected * direction).sum(), qkv)

    out = run_attention(way, qkv, visible)
    grads = torch.autograd.grad((out * direction).sum(), qkv)
    assert largest_difference(out, expected) < 2e-6
    for ours, theirs in zip(grads, expected_grads, strict=True):
        assert largest_difference(ours, theirs) < 5e-6
    if way == "manual":
        assert largest_difference(attend_manually(*qkv, plan_of(visible), 0.0)[1], weights) < 1e-6


@pytest.mark.parametrize("heads", HEADS)
def test_the_causal_triangle_of_sdpa_equals_a_float64_loop(heads):
    qkv = random_qkv(*HEADS[heads], 5, 5)
    triangle = torch.ones(2, 1, 5, 5).tril().bool()
    expected, _ = loop_attention(*qkv, triangle)
    out = run_attention("sdpa", qkv, None, is_causal=True)
    assert largest_difference(out, expected) < 2e-6
    for ours, theirs in zip(
        torch.autograd.grad(out.pow(2).sum(), qkv),
        torch.autograd.grad(expected.pow(2).sum(), qkv),
        strict=True,
    ):
        assert largest_difference(ours, theirs) < 1e-5


@pytest.mark.parametrize("heads", HEADS)
def test_one_query_without_a_mask_sees_every_key(heads):
    qkv = random_qkv(*HEADS[heads], 1, 5)
    expected, _ = loop_attention(*qkv, torch.ones(2, 1, 1, 5).bool())
    assert largest_difference(run_attention("sdpa", qkv, None), expected) < 2e-6


@pytest.mark.parametrize("side", ["left", "right", "none"])
@pytest.mark.parametrize("heads", HEADS)
def test_invariant_5_models_with_sdpa_and_manual_have_the_same_gradients(heads, side):
    H, K = HEADS[heads]
    config = tiny(num_attention_heads=H, num_key_value_heads=K)
    lengths = [7, 7] if side == "none" else [4, 7]
    ids, labels, mask = padded_batch(config, lengths, side, 7)
    mask = None if side == "none" else mask
    results = {}
    for way in ("sdpa", "manual"):
        model = random_model(config)
        model.config.attention = way
        loss, targets = model(ids, labels=labels, attention_mask=mask)
        (loss / targets).backward()
        results[way] = loss.detach(), gradients(model)
    assert largest_difference(results["sdpa"][0], results["manual"][0]) < 1e-5
    for name, gradient in results["sdpa"][1].items():
        assert largest_difference(gradient, results["manual"][1][name]) < 1e-5, name


def test_narrow_heads_in_short_rows_attend_in_fp32_while_they_train(monkeypatch):
    """On a CPU under bf16 autocast; in a longer row, and without a gradient, in bf16."""
    dtypes = []
    real = F.scaled_dot_product_attention

    def watched(q, k, v, **options):
        out = real(q, k, v, **options)
        dtypes.append((q.dtype, out.dtype))
        return out

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    model = random_model(tiny(max_position_embeddings=2**14))
    short = random_ids(model.config, 2, 6)
    long = random_ids(model.config, 1, 2**14 // model.config.head_dim)
    with torch.autocast("cpu", torch.bfloat16):
        for ids, is_short in ((short, True), (long, False)):
            model(ids, labels=ids)
            expected = torch.float32 if is_short else torch.bfloat16
            assert set(dtypes) == {(expected, expected)}
            dtypes.clear()
        with torch.no_grad():
            model(short, labels=short)
        assert set(dtypes) == {(torch.bfloat16, torch.bfloat16)}


@pytest.mark.parametrize("way", ["sdpa", "manual"])
def test_attention_weights_sum_to_1_where_a_query_sees_something(way):
    model = random_model(tiny(attention=way))
    ids, _, mask = padded_batch(model.config, [3, 6], "left", 6)
    weights = model.attention_weights(ids, mask)
    assert len(weights) == 2
    visible = visible_by_rule(mask, 6)
    for layer in weights:
        assert layer.shape == (2, 4, 6, 6) and layer.dtype == torch.float32
        assert torch.all(layer[~visible.expand_as(layer)] == 0)
        sees = visible.any(-1).expand(2, 4, 6)
        assert torch.allclose(layer.sum(-1), sees.float(), atol=1e-6)  # 1, or 0 for the blind
    unpadded = model.attention_weights(ids[1:])
    for layer, alone in zip(weights, unpadded, strict=True):
        assert largest_difference(layer[1:], alone) < 1e-6


@pytest.mark.parametrize("way", ["sdpa", "manual"])
@pytest.mark.parametrize("length", [1, 40])
def test_invariant_5_dropout_drops_weights_and_not_tokens(way, length):
    """Values are unit vectors, so each output entry is one weight, dropped or scaled up."""
    p, S = 0.5, 40
    q, k, _ = random_qkv(4, 2, length, S, D=S)
    v = torch.eye(S).expand(2, 2, S, S)
    visible = torch.ones(2, 1, length, S).tril(S - length).bool()
    weights = attend_manually(q, k, v, plan_of(visible), 0.0)[1]
    torch.manual_seed(0)
    if way == "sdpa":
        out = attend(q, k, v, plan_of(visible), p)
    else:
        out = attend_manually(q, k, v, plan_of(visible), p)[0]
    kept = out != 0
    assert torch.allclose(out, torch.where(kept, weights / (1 - p), 0.0), atol=1e-6)
    seen = visible.expand_as(out)
    assert kept[seen].float().mean().item() == pytest.approx(1 - p, abs=0.1)
    if length > 1:  # a dropped token would be a whole column, in every head
        columns = (kept | ~seen).flatten(1, 2).all(1) | (~kept | ~seen).flatten(1, 2).all(1)
        assert columns.float().mean() < 0.1


def test_dropout_acts_on_the_embedding_and_on_the_output_of_o_proj_in_training_only():
    model = random_model(tiny(dropout=0.5))
    seen = {}
    model.model.layers[0].register_forward_pre_hook(lambda _, args: seen.update(stream=args[0]))
    model.model.layers[0].self_attn.register_forward_hook(
        lambda _, args, out: seen.update(attention=out)
    )
    model.model.layers[0].mlp.register_forward_hook(lambda _, args, out: seen.update(mlp=out))
    ids = random_ids(model.config, 4, 16)
    for training, zeros in ((True, 0.5), (False, 0.0)):
        model.train(training)
        torch.manual_seed(0)
        model(ids)
        for name in ("stream", "attention"):
            share = (seen[name] == 0).float().mean().item()
            assert share == pytest.approx(zeros, abs=0.05), (name, training)
        assert (seen["mlp"] != 0).all()
        kept = model.model.embed_tokens(ids) / (1 - zeros)
        assert torch.allclose(seen["stream"], torch.where(seen["stream"] == 0, 0.0, kept))
    undropped = random_model(tiny())
    assert torch.equal(model(ids), undropped(ids))


def test_each_case_takes_its_path():
    """The table of the design: which of SDPA's triangle, no mask, or a boolean mask."""
    config, manual = tiny(), tiny(attention="manual")
    cache = KVCache(config, 2, 16)
    prefill = plan_attention(config, random_ids(config, 2, 4), None, cache)
    assert prefill.is_causal and prefill.visible is None
    one = plan_attention(config, random_ids(config, 2, 1), None, cache)
    assert not one.is_causal and one.visible is None
    several = plan_attention(config, random_ids(config, 2, 3), None, cache)
    assert not several.is_causal
    assert torch.equal(several.visible[0, 0], visible_by_rule(torch.ones(1, 8), 3)[0, 0])
    mask = torch.tensor([[0, 1, 1], [1, 1, 0]])
    for chosen in (config, manual):
        padded = plan_attention(chosen, random_ids(config, 2, 3), mask, None)
        assert not padded.is_causal
        assert torch.equal(padded.visible, visible_by_rule(mask, 3))
    by_hand = plan_attention(manual, random_ids(config, 2, 3), None, None)
    assert torch.equal(by_hand.visible[0, 0], torch.ones(3, 3).tril().bool())


@pytest.mark.parametrize("shape", [(4, 3), (4,), (3, 4), (4, 4, 1), (1, 4), (4, 1), (4, 5)])
def test_a_mask_of_another_shape_is_an_error_with_both_shapes(shape):
    """B == T == 4: a (T, T) or (1, T) mask would broadcast in silence."""
    model = random_model(tiny())
    with pytest.raises(ValueError) as error:
        model(random_ids(model.config, 4, 4), attention_mask=torch.ones(shape))
    assert str(tuple(shape)) in str(error.value) and "(4, 4)" in str(error.value)


# ------------------------------------------------------------------------- prefix and padding


@pytest.mark.parametrize("way", ["sdpa", "manual"])
@pytest.mark.parametrize("t", [0, 3, 7])
def test_invariant_1_tokens_after_t_change_no_logit_at_or_before_t(t, way):
    model = random_model(tiny(attention=way))
    ids = random_ids(model.config, 2, 9)
    changed = ids.clone()
    changed[:, t + 1 :] = (changed[:, t + 1 :] + 1) % model.config.vocab_size
    with torch.no_grad():
        before, after = model(ids), model(changed)
    assert largest_difference(before[:, : t + 1], after[:, : t + 1]) < 1e-6
    assert torch.all((before[:, t + 1 :] - after[:, t + 1 :]).abs().amax(-1) > 1e-3)


@pytest.mark.parametrize("way", ["sdpa", "manual"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_invariant_3_what_stands_in_pads_changes_no_logit_loss_or_gradient(side, way):
    config = tiny(attention=way, tie_word_embeddings=False)
    ids, labels, mask = padded_batch(config, [3, 6, 8], side, 8)
    other = torch.where(mask == 1, ids, (ids + 7) % config.vocab_size)
    results = []
    for batch in (ids, other):
        model = random_model(config)
        logits = model(batch, attention_mask=mask)
        loss, targets = model(batch, labels=labels, attention_mask=mask)
        loss.backward()
        results.append((logits.detach(), loss.detach(), targets, gradients(model)))
    (logits, loss, targets, grads), (logits2, loss2, targets2, grads2) = results
    assert torch.equal(logits[mask == 1], logits2[mask == 1])
    assert torch.equal(loss, loss2) and targets == targets2 == 3 + 6 + 8 - 3
    for name, gradient in grads.items():
        assert largest_difference(gradient, grads2[name]) < 1e-6, name


@pytest.mark.parametrize("way", ["sdpa", "manual"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_invariant_3_a_row_in_a_padded_batch_equals_the_row_alone(side, way):
    config = tiny(attention=way)
    model = random_model(config)
    lengths = [1, 3, 6, 8]
    ids, labels, mask = padded_batch(config, lengths, side, 8)
    logits = model(ids, attention_mask=mask)
    loss, targets = model(ids, labels=labels, attention_mask=mask)
    loss.backward()
    together = gradients(model)
    model.zero_grad()
    losses, counts = 0.0, 0
    for row, real in enumerate(mask.bool()):
        alone = ids[row : row + 1, real]
        assert largest_difference(logits[row, real], model(alone)[0]) < 1e-5
        row_loss, row_targets = model(alone, labels=alone)
        row_loss.backward()
        losses, counts = losses + row_loss.item(), counts + row_targets.item()
    assert loss.item() == pytest.approx(losses, abs=1e-4) and targets.item() == counts
    for name, gradient in gradients(model).items():
        assert largest_difference(gradient, together[name]) < 2e-5, name


def test_right_padding_needs_no_mask_in_training_and_left_padding_does():
    config = tiny()
    model = random_model(config)
    for side, needs_mask in (("right", False), ("left", True)):
        ids, labels, mask = padded_batch(config, [3, 8], side, 8)
        with_mask = model(ids, attention_mask=mask)[mask == 1]
        without = model(ids)[mask == 1]
        assert (largest_difference(with_mask, without) > 1e-3) == needs_mask


def test_a_mask_of_ones_changes_nothing_and_pads_in_the_middle_are_as_if_absent():
    model = random_model(tiny())
    ids = random_ids(model.config, 2, 6)
    assert largest_difference(model(ids), model(ids, attention_mask=torch.ones(2, 6))) < 1e-5
    mask = torch.tensor([[1, 1, 0, 0, 1, 1], [1, 0, 1, 0, 1, 1]])
    logits = model(ids, attention_mask=mask)
    for row, real in enumerate(mask.bool()):
        assert largest_difference(logits[row, real], model(ids[row : row + 1, real])[0]) < 1e-5


def test_the_last_pad_before_a_left_padded_row_predicts_nothing():
    model = random_model(tiny())
    ids, _, mask = padded_batch(model.config, [3, 6], "left", 6)
    _, targets = model(ids, labels=ids, attention_mask=mask)  # labels stand on the pads as well
    assert targets == 2 + 5


def test_logits_to_keep_gives_the_last_positions_only():
    model = random_model(tiny())
    ids = random_ids(model.config, 2, 6)
    for keep in (1, 3, 6):
        assert largest_difference(model(ids, logits_to_keep=keep), model(ids)[:, -keep:]) < 1e-6


# --------------------------------------------------------------------- nothing to see; precision


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", ["sdpa", "manual"])
@pytest.mark.parametrize("T", [1, 4])
def test_invariant_4_a_query_with_nothing_to_see_yields_zeros_and_finite_gradients(way, dtype, T):
    qkv = random_qkv(4, 2, T, 4, D=8, dtype=dtype)
    visible = torch.ones(2, 1, T, 4).tril(4 - T).bool()
    visible[0, :, 0] = False
    out = run_attention(way, qkv, visible)
    assert torch.all(out[0, :, 0] == 0) and out.isfinite().all() and (out[1] != 0).all()
    grads = torch.autograd.grad(out.float().pow(2).sum(), qkv)
    assert all(gradient.isfinite().all() for gradient in grads)
    assert torch.all(grads[0][0, :, 0] == 0)


@pytest.mark.parametrize("T", [1, 4])
def test_invariant_4_holds_whatever_the_kernel_returns_for_such_a_query(monkeypatch, T):
    """Some kernels give NaN where every key is masked: here is one that always does."""
    plain = F.scaled_dot_product_attention

    def kernel(q, k, v, attn_mask=None, **options):
        out = plain(q, k, v, attn_mask=attn_mask, **options)
        return out.masked_fill(~attn_mask.any(-1, keepdim=True), math.nan)

    monkeypatch.setattr(F, "scaled_dot_product_attention", kernel)
    qkv = random_qkv(4, 2, T, 4)
    visible = torch.ones(2, 1, T, 4).tril(4 - T).bool()
    visible[0, :, 0] = False
    out = run_attention("sdpa", qkv, visible)
    assert torch.all(out[0, :, 0] == 0) and out.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", ["sdpa", "manual"])
def test_invariant_4_a_batch_with_a_row_of_pads_trains(way, dtype):
    model = random_model(tiny(attention=way)).to(dtype)
    ids, labels, mask = padded_batch(model.config, [0, 5, 2], "left", 5)
    loss, targets = model(ids, labels=labels, attention_mask=mask)
    loss.backward()
    assert model(ids, attention_mask=mask).isfinite().all()
    assert loss.isfinite() and loss.dtype == torch.float32 and targets == 4 + 1
    for name, gradient in gradients(model).items():
        assert gradient.isfinite().all() and gradient.dtype == dtype, name


def test_invariant_4_no_large_negative_literal_stands_for_minus_infinity():
    source = Path(model_file.__file__).read_text()
    assert not re.search(r"-\s*1e\d|\b1e9\b|-\s*\d{4,}", source)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rmsnorm_computes_in_fp32(dtype):
    """300 squared is beyond fp16: a norm in half precision would give zeros."""
    norm = RMSNorm(64, eps=1e-6)
    x = (300 * torch.randn(4, 64, generator=torch.Generator().manual_seed(0))).to(dtype)
    wide = x.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    out = norm.to(dtype)(x)
    assert out.dtype == dtype
    assert torch.allclose(out.double(), expected, rtol=torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("way", ["sdpa", "manual"])
def test_softmax_is_in_fp32(way, dtype):
    """Two thousand equal keys: in half precision the weights would not sum to 1."""
    q, k = torch.ones(1, 1, 1, 8, dtype=dtype), torch.ones(1, 1, 2049, 8, dtype=dtype)
    visible = torch.ones(1, 1, 1, 2049).bool()
    out = run_attention(way, (q, k, torch.ones_like(k)), visible)
    assert torch.allclose(out.float(), torch.ones(1), atol=2 * torch.finfo(dtype).eps)
    weights = attend_manually(q, k, k, plan_of(visible), 0.0)[1]
    assert weights.dtype == torch.float32
    assert weights.sum().item() == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("way", ["sdpa", "manual"])
def test_large_scores_do_not_overflow_fp16(way):
    """QK-Norm weights of trained models reach tens: the dot product passes 65,504 unscaled."""
    generator = torch.Generator().manual_seed(0)
    q = (40 * torch.randn(1, 2, 4, 128, generator=generator)).half()
    k = (40 * torch.randn(1, 2, 4, 128, generator=generator)).half()
    k[:, :, 0] = q[:, :, 0]
    visible = torch.ones(1, 1, 4, 4).tril().bool()
    out = run_attention(way, (q, k, k), visible)
    expected, _ = loop_attention(q, k, k, visible)
    assert largest_difference(out, expected) < 0.2  # values of 40, in steps of 0.03


# ---------------------------------------------------------------------------------------- the loss


def plain_loss(hidden, weight, targets):
    logits = F.linear(hidden, weight).float()
    return F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")


def loss_inputs(dtype=torch.float32, rows: int = 13, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, 16, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(37, 16, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(37, (rows,), generator=generator)
    targets[1::4] = -100
    return hidden, weight, targets


def loss_and_gradients(function, hidden, weight, targets, scale: float = 1.0):
    loss = function(hidden, weight, targets)
    return loss.detach(), *torch.autograd.grad(loss * scale, (hidden, weight))


def chunked(hidden, weight, targets):
    return LinearCrossEntropy.apply(hidden, weight, targets, None, True)


@pytest.fixture(params=[1, 37 * 5, 2**26], ids=["a row", "five rows", "all rows"])
def at_once(request, monkeypatch):
    """Chunks of one row (also when V exceeds the limit), of five (13 is no multiple), of all."""
    monkeypatch.setattr(loss_file, "LOGITS_AT_ONCE", request.param)


@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)]
)
def test_the_loss_equals_cross_entropy_in_value_and_gradient(at_once, dtype, tolerance):
    inputs = loss_inputs(dtype)
    wide = [t.detach().double().requires_grad_() for t in inputs[:2]]
    logits = wide[0] @ wide[1].T
    reference = F.cross_entropy(logits, inputs[2], ignore_index=-100, reduction="sum")
    expected = reference.detach(), *torch.autograd.grad(reference * 0.25, wide)
    ours = loss_and_gradients(chunked, *inputs, scale=0.25)
    assert ours[0].dtype == torch.float32 and ours[1].dtype == ours[2].dtype == dtype
    for mine, theirs in zip(ours, expected, strict=True):
        assert largest_difference(mine, theirs) <= tolerance * theirs.abs().max().item()


@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)]
)
def test_the_loss_of_soft_labels_equals_cross_entropy_with_them(at_once, dtype, tolerance):
    hidden, weight, targets = loss_inputs(dtype)
    generator = torch.Generator().manual_seed(3)
    soft = torch.rand(13, 37, generator=generator).pow(4)
    soft /= soft.sum(-1, keepdim=True)

    def ours(hidden, weight, targets):
        return LinearCrossEntropy.apply(hidden, weight, targets, soft, True)

    wide = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    counted = (targets != -100)[:, None]
    # torch's own has no ignore_index for probabilities: rows that are zero count for nothing
    reference = F.cross_entropy(wide[0] @ wide[1].T, soft.double() * counted, reduction="sum")
    expected = reference.detach(), *torch.autograd.grad(reference * 0.25, wide)
    found = loss_and_gradients(ours, hidden, weight, targets, scale=0.25)
    assert found[0].dtype == torch.float32 and found[1].dtype == found[2].dtype == dtype
    for mine, theirs in zip(found, expected, strict=True):
        assert largest_difference(mine, theirs) <= tolerance * theirs.abs().max().item()


def test_soft_labels_of_one_token_each_are_labels():
    """In the model, with padding: the same loss, number of targets and gradients."""
    model = random_model(tiny())
    input_ids, labels, _ = padded_batch(model.config, [3, 8], "right", 8)
    one_hot = F.one_hot(labels.clamp(min=0), model.config.vocab_size).float()
    found = []
    for soft_labels in (None, one_hot):
        loss_sum, targets = model(input_ids, labels=labels, soft_labels=soft_labels)
        gradients = torch.autograd.grad(loss_sum, list(model.parameters()))
        found.append([loss_sum.detach(), targets, *gradients])
    for hard, soft in zip(*found, strict=True):
        assert torch.allclose(hard, soft, rtol=1e-5, atol=1e-5)


def test_the_loss_under_autocast_stays_fp32_and_equals_the_plain_way(at_once):
    inputs = loss_inputs()
    with torch.autocast("cpu", torch.bfloat16):
        ours = loss_and_gradients(chunked, *inputs)
        plain = loss_and_gradients(plain_loss, *inputs)
    assert all(tensor.dtype == torch.float32 for tensor in ours)
    exact = loss_and_gradients(plain_loss, *inputs)
    for mine, theirs, true in zip(ours, plain, exact, strict=True):
        # as near to the truth as autocast's own way, and close to it
        assert largest_difference(mine, theirs) <= 2e-2 * true.abs().max().item()
        assert largest_difference(mine, true) <= 2 * largest_difference(theirs, true) + 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_loss_multiplies_in_the_dtype_of_autocast(at_once, dtype):
    inputs, dtypes = loss_inputs(), set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.aten.mm.default:
                dtypes.add(args[0].dtype)
            return function(*args, **kwargs or {})

    with Watch(), torch.autocast("cpu", dtype):
        loss_and_gradients(chunked, *inputs)
    assert dtypes == {dtype}


def test_the_gradient_of_the_loss_is_its_slope(at_once):
    """Finite differences of the forward, which is fp32: steps of 0.01, central."""
    hidden, weight, targets = loss_inputs(rows=7)
    _, grad_hidden, grad_weight = loss_and_gradients(chunked, hidden, weight, targets)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for tensor, gradient in ((hidden, grad_hidden), (weight, grad_weight)):
            for _ in range(5):
                step = torch.randn(tensor.shape, generator=generator)
                step *= 0.01 / step.norm()
                up = plainly(hidden, weight, targets, tensor, step)
                down = plainly(hidden, weight, targets, tensor, -step)
                slope = (gradient * step).sum().item() / 0.01
                assert (up - down) / 0.02 == pytest.approx(slope, rel=2e-3, abs=2e-3)


def plainly(hidden, weight, targets, moved, step) -> float:
    arguments = [tensor + step if tensor is moved else tensor for tensor in (hidden, weight)]
    return chunked(*arguments, targets).item()


def test_a_batch_without_targets_has_a_loss_and_gradients_of_zero():
    model = random_model(tiny())
    ids = random_ids(model.config, 2, 5)
    for labels, batch in ((torch.full_like(ids, -100), ids), (ids[:, :1], ids[:, :1])):
        model.zero_grad()
        loss, targets = model(batch, labels=labels)
        loss.backward()
        assert loss.item() == 0 and targets.item() == 0
        assert all(torch.all(gradient == 0) for gradient in gradients(model).values())


def test_the_loss_holds_no_more_logits_than_it_may(monkeypatch):
    """Every tensor that forward and backward make is watched: none has N x V entries."""
    config = tiny(vocab_size=500)
    model = random_model(config)
    ids = random_ids(config, 4, 33)  # 128 targets: 64,000 logits
    monkeypatch.setattr(loss_file, "LOGITS_AT_ONCE", 500 * 10)

    class Watch(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **kwargs or {})
            if isinstance(out, torch.Tensor):
                self.largest = max(self.largest, out.numel())
            return out

    with Watch() as watch:
        model(ids, labels=ids)[0].backward()
    assert watch.largest <= 500 * 32  # the head itself, V x C


@pytest.mark.parametrize("grad", [True, False])
def test_labels_are_shifted_inside_and_the_loss_is_a_sum(grad):
    model = random_model(tiny())
    ids = random_ids(model.config, 2, 6)
    labels = ids.clone()
    labels[0, 2:4] = -100
    with torch.set_grad_enabled(grad):
        loss, targets = model(ids, labels=labels)
        logits = model(ids)[:, :-1].flatten(0, 1)
    expected = F.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
    assert targets == 8 and loss.item() == pytest.approx(expected.item(), abs=1e-5)
    assert loss.requires_grad == grad


def test_recomputed_activations_give_the_same_gradients():
    config = tiny(dropout=0.2)
    ids = random_ids(config, 2, 6)
    results = []
    for recompute in (False, True):
        model = random_model(config).train()
        model.model.recompute_activations = recompute
        torch.manual_seed(0)
        model(ids, labels=ids)[0].backward()
        results.append(gradients(model))
    for name, gradient in results[0].items():
        assert torch.equal(gradient, results[1][name]), name


def test_training_compiles_as_one_graph():
    """No graph break in forward, loss and backward, with and without a mask."""
    config = tiny()
    model = random_model(config)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for side in (None, "left"):
        ids, labels, mask = padded_batch(config, [4, 6], side or "right", 6)
        mask = mask if side else None
        loss, targets = model(ids, labels=labels, attention_mask=mask)
        loss.backward()
        expected = gradients(model)
        model.zero_grad()
        loss2, targets2 = compiled(ids, labels=labels, attention_mask=mask)
        loss2.backward()
        assert loss2.item() == pytest.approx(loss.item(), abs=1e-4) and targets2 == targets
        for name, gradient in gradients(model).items():
            assert largest_difference(gradient, expected[name]) < 1e-5, name
        model.zero_grad()


# ---------------------------------------------------------------------------------- initialisation

SCRATCH = {
    "bytes, tiny": dict(vocab_size=260, hidden_size=128, num_hidden_layers=4),
    "bytes, wide": dict(vocab_size=260, hidden_size=768, num_hidden_layers=2),
    "small vocabulary, wide": dict(vocab_size=2048, hidden_size=1024, num_hidden_layers=2),
    "MiniMind-3, shallow": dict(vocab_size=6400, hidden_size=768, num_hidden_layers=2),
    "deep": dict(vocab_size=2048, hidden_size=64, num_hidden_layers=32),
}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("shape", SCRATCH)
def test_the_first_loss_is_within_2_percent_of_ln_v(shape, tied):
    changes = SCRATCH[shape]
    width = changes["hidden_size"]
    torch.manual_seed(0)
    config = tiny(
        **changes, head_dim=width // 8, intermediate_size=2 * width, tie_word_embeddings=tied
    )
    model = GPT(config)
    ids = random_ids(config, 8, 128)
    with torch.no_grad():
        loss, targets = model(ids, labels=ids)
    assert (loss / targets).item() == pytest.approx(math.log(config.vocab_size), rel=0.02)


def test_the_residual_stream_does_not_grow_with_depth():
    scales = {}
    for layers in (2, 8, 32):
        torch.manual_seed(0)
        model = GPT(tiny(hidden_size=64, num_hidden_layers=layers, intermediate_size=128))
        seen = []
        model.model.norm.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0]))
        with torch.no_grad():
            model(random_ids(model.config, 4, 32))
        scales[layers] = seen[0].pow(2).mean().sqrt().item()
    assert max(scales.values()) / min(scales.values()) < 1.3, scales


def test_initialisation_is_what_its_table_says():
    torch.manual_seed(0)
    config = tiny(hidden_size=256, intermediate_size=512, head_dim=32, tie_word_embeddings=False)
    for name, parameter in GPT(config).named_parameters():
        if "norm" in name:
            assert torch.all(parameter == 1), name
        elif "embed_tokens" in name or "lm_head" in name:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.05), name
        else:
            std = parameter.shape[1] ** -0.5 / (2 if re.search("o_proj|down_proj", name) else 1)
            assert parameter.std().item() == pytest.approx(std, rel=0.05), name


# ------------------------------------------------------------------------- parity with transformers

PARITY = {
    "mha": dict(num_key_value_heads=4),
    "gqa": dict(num_key_value_heads=2),
    "mqa": dict(num_key_value_heads=1),
    "head_dim = hidden / heads": dict(hidden_size=32, head_dim=8),
    "head_dim above hidden / heads": dict(hidden_size=32, head_dim=24),
    "head_dim below hidden / heads": dict(hidden_size=64, head_dim=6),
    "untied": dict(tie_word_embeddings=False),
    "YaRN": dict(rope_scaling=YARN),
    "YaRN, all options": dict(
        head_dim=32,
        rope_scaling=YARN
        | {"beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.3, "truncate": False},
    ),
    "YaRN, mscale": dict(rope_scaling=YARN | {"mscale": 0.7, "mscale_all_dim": 1.2}),
    "manual": dict(attention="manual"),
    "theta 1e6, eps 1e-5": dict(rope_theta=1e6, rms_norm_eps=1e-5),
}


def assert_parity(config: GPTConfig, ids, labels, mask, seed: int = 0, tolerance: float = 1e-5):
    """Logits of real tokens, mean loss, and every parameter's gradient; returns the largest."""
    model = random_model(config, seed)
    twin = peer(model)
    real = torch.ones_like(ids) if mask is None else mask
    their_labels = labels.clone()
    their_labels[:, 1:][real[:, :-1] == 0] = -100  # transformers counts a target behind a pad
    theirs = twin(
        ids,
        attention_mask=mask,
        position_ids=None if mask is None else positions_of(mask),
        labels=their_labels,
    )
    theirs.loss.backward()
    logits = model(ids, attention_mask=mask)
    loss_sum, targets = model(ids, labels=labels, attention_mask=mask)
    loss = loss_sum / targets
    loss.backward()
    assert targets.item() == int((their_labels[:, 1:] != -100).sum())
    differences = {
        "logits": largest_difference(logits[real == 1], theirs.logits[real == 1]),
        "loss": largest_difference(loss.detach(), theirs.loss.detach()),
    }
    their_gradients = gradients(twin)
    for name, gradient in gradients(model).items():
        differences[name] = largest_difference(gradient, their_gradients[name])
    worst = max(differences, key=differences.get)
    assert differences[worst] < tolerance, (worst, differences[worst])
    return differences


@pytest.mark.parametrize("side", ["none", "right", "left"])
@pytest.mark.parametrize("case", PARITY)
def test_invariant_8_same_logits_loss_and_gradients_as_transformers(case, side, record_property):
    """B == T == heads == 4: a wrong broadcast would pass in silence."""
    config = tiny(**PARITY[case])
    lengths = [4, 4, 4, 4] if side == "none" else [2, 4, 1, 3]
    ids, labels, mask = padded_batch(config, lengths, side, 4)
    differences = assert_parity(config, ids, labels, None if side == "none" else mask)
    record_property("largest", max(differences.values()))


@pytest.mark.parametrize("scaling", [None, YARN], ids=["plain", "YaRN"])
@pytest.mark.parametrize("side", ["none", "left"])
def test_invariant_8_holds_at_the_full_context(scaling, side, record_property):
    config = tiny(rope_scaling=scaling)
    context = config.max_position_embeddings
    lengths = [context, context if side == "none" else context - 9]
    ids, labels, mask = padded_batch(config, lengths, side, context)
    differences = assert_parity(config, ids, labels, None if side == "none" else mask)
    record_property("largest", max(differences.values()))


@st.composite
def shapes(draw):
    """Any small decoder and any batch, padded on any side or not at all."""
    kv_heads, group = draw(st.sampled_from([(1, 1), (1, 3), (2, 1), (2, 2), (3, 2)]))
    config = tiny(
        vocab_size=draw(st.integers(2, 80)),
        hidden_size=draw(st.integers(1, 40)),
        num_hidden_layers=draw(st.integers(1, 3)),
        num_attention_heads=kv_heads * group,
        num_key_value_heads=kv_heads,
        head_dim=2 * draw(st.integers(1, 12)),
        intermediate_size=draw(st.integers(1, 50)),
        rope_theta=draw(st.sampled_from([1e3, 1e4, 1e6])),
        rope_scaling=draw(st.sampled_from([None, YARN])),
        tie_word_embeddings=draw(st.booleans()),
    )
    length = draw(st.integers(2, 20))
    lengths = draw(st.lists(st.integers(1, length), min_size=1, max_size=4))
    lengths[0] = length
    side = draw(st.sampled_from(["none", "left", "right"]))
    lengths = [length] * len(lengths) if side == "none" else lengths
    ids, labels, mask = padded_batch(config, lengths, side, length, seed=draw(st.integers(0, 9)))
    return config, ids, labels, None if side == "none" else mask


@settings(derandomize=True, deadline=None, max_examples=40, database=None)
@given(shapes())
def test_invariant_8_holds_for_shapes_that_nobody_chose(case):
    assert_parity(*case)


@pytest.mark.parametrize("side", ["none", "left"])
def test_in_bf16_we_are_as_near_to_fp32_as_transformers_is(side):
    config = tiny(hidden_size=64, num_hidden_layers=4)
    ids, _, mask = padded_batch(config, [32, 20 if side == "left" else 32], "left", 32)
    mask = None if side == "none" else mask
    real = torch.ones_like(ids) if mask is None else mask
    model = random_model(config).to(torch.bfloat16)
    options = dict(attention_mask=mask, position_ids=positions_of(real))
    with torch.no_grad():
        half = peer(model)(ids, **options).logits[real == 1].float()
        exact = peer(model).float()(ids, **options).logits[real == 1]
        ours = model(ids, attention_mask=mask)[real == 1].float()
    error = half - exact
    assert largest_difference(ours, exact) <= 1.25 * error.abs().max().item()
    assert (ours - exact).pow(2).mean() <= 1.1 * error.pow(2).mean()
    assert (ours - half).pow(2).mean() <= 2 * error.pow(2).mean()  # two independent roundings


# --------------------------------------------------------------------- devices that are not here


def exercise(model: GPT) -> None:
    """Every public call once, on the model's own device."""
    device = model.lm_head.weight.device
    ids = torch.zeros(2, 5, dtype=torch.long, device=device)
    mask = torch.ones(2, 5, dtype=torch.long, device=device)
    model(ids, labels=ids, attention_mask=mask)[0].backward()
    model(ids, labels=ids)[0].backward()
    model.attention_weights(ids, mask)
    with torch.no_grad():
        cache = KVCache(model.config, 2, 16, device=device)
        model(ids, attention_mask=mask, cache=cache)
        model(ids, cache=cache, logits_to_keep=1)
        model(ids[:, :1], cache=cache)
        slot = torch.full((1,), cache.length, dtype=torch.long, device=device)
        model.decode_step(ids[:, :1], cache, slot, cache.capacity(cache.length + 1))
        cache.length += 1
        cache.truncate(3)
        cache.select_rows(torch.zeros(1, dtype=torch.long, device=device))
        cache.reset()


@pytest.mark.parametrize("scaling", [None, YARN])
def test_every_tensor_is_made_on_the_model_s_device(scaling):
    """With meta as the default device, a factory without device= would make a meta tensor."""
    model = random_model(tiny(rope_scaling=scaling)).train()
    with torch.device("meta"):
        # ids, mask and slot name their device; so must everything that the model makes
        exercise(model)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", MASKS)
def test_attention_on_cuda_equals_a_float64_loop(case, dtype):
    mask, T = torch.tensor(MASKS[case][0]), MASKS[case][1]
    visible = visible_by_rule(mask, T)
    qkv = random_qkv(4, 2, T, mask.shape[1], D=64, dtype=dtype)
    expected, _ = loop_attention(*qkv, visible)
    expected_grads = torch.autograd.grad(expected.pow(2).sum(), qkv)
    moved = [tensor.detach().cuda().requires_grad_() for tensor in qkv]
    out = attend(*moved, plan_of(visible.cuda()), 0.0)
    grads = torch.autograd.grad(out.float().pow(2).sum(), moved)
    tolerance = 40 * torch.finfo(dtype).eps
    assert largest_difference(out.cpu(), expected) < tolerance
    for ours, theirs in zip(grads, expected_grads, strict=True):
        assert largest_difference(ours.cpu(), theirs) < 10 * tolerance
