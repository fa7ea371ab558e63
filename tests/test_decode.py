"""decode.py: a step of decode.cpp against the plain one, for every shape, dtype and padding; whom
it serves; where weights are packed; and how compiled code is kept."""

import math
import os
import stat

import pytest
import torch
from reference import random_model, tiny

import decode
from kv_cache import KVCache
from model import GPT
from quantize import quantize_int8
from sample import generate

BF16 = torch.bfloat16
SHAPES = {
    "gqa": dict(),
    "mha, odd widths": dict(
        hidden_size=50, num_attention_heads=3, num_key_value_heads=3, head_dim=22, vocab_size=61
    ),
    "mqa, wide heads": dict(num_attention_heads=4, num_key_value_heads=1, head_dim=136),
    "mqa, eleven heads": dict(num_attention_heads=11, num_key_value_heads=1, head_dim=20),
    "one layer, one head, two ids": dict(
        num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, vocab_size=2
    ),
    "many lanes": dict(hidden_size=128, intermediate_size=203, head_dim=64),
    "untied, yarn": dict(
        tie_word_embeddings=False, rope_scaling={"rope_type": "yarn", "factor": 4.0}
    ),
}


@pytest.fixture(scope="module")
def compiled():
    why_not = decode.load()
    if why_not is not None:
        pytest.skip(why_not)


def model_of(shape: str, dtype: torch.dtype = torch.float32, int8: bool = False) -> GPT:
    model = random_model(tiny(**SHAPES[shape])).to(dtype).eval()
    return quantize_int8(model) if int8 else model


@torch.inference_mode()
def steps_of_both(model: GPT, rows: int, steps: int = 20) -> tuple:
    """Logits (steps, rows, 1, V) of the plain step and of decode.cpp's, behind rows of one to five
    tokens, left-padded; and both caches."""
    config, dtype = model.config, model.model.embed_tokens.weight.dtype
    torch.manual_seed(rows)
    ids = torch.randint(config.vocab_size, (rows, 5 + steps))
    real = torch.arange(5) >= 4 - torch.arange(rows)[:, None] % 5  # (rows, 5)
    caches = [KVCache(config, rows, 5 + steps, dtype=dtype) for _ in range(2)]
    for cache in caches:
        model(ids[:, :5], attention_mask=real, cache=cache)
    step = decode.step_of(model, caches[1])
    places = range(5, 5 + steps)
    plain = torch.stack([model(ids[:, [at]], cache=caches[0]) for at in places])
    fast = torch.stack([step(ids[:, [at]]) for at in places])
    return plain, fast, caches


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 16])
def test_a_step_gives_the_logits_and_the_cache_of_the_plain_one(compiled, shape, rows):
    plain, fast, (expected, cache) = steps_of_both(model_of(shape), rows)
    assert fast.shape == plain.shape and fast.dtype == plain.dtype
    assert (fast - plain).abs().max() < 1e-5 * max(1, plain.abs().max())
    for left, right in zip(cache.keys + cache.values, expected.keys + expected.values, strict=True):
        assert torch.allclose(left, right, atol=1e-4)
    assert torch.equal(cache.real, expected.real) and cache.length == expected.length
    assert torch.equal(cache.row_lengths, expected.row_lengths)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("int8", [False, True])
def test_in_bf16_and_int8_it_is_as_near_to_fp32_as_the_plain_step(compiled, shape, dtype, int8):
    model = model_of(shape, dtype, int8)
    plain, fast, _ = steps_of_both(model, 15)
    exact = random_model(tiny(**SHAPES[shape])).eval()
    if int8:  # the same rounded weights, in fp32
        weights = {name: m.weight.float() for name, m in model.named_modules() if "proj" in name}
        head = model.lm_head.weight.float()
        for name, module in exact.named_modules():
            if name in weights:
                module.weight = torch.nn.Parameter(weights[name])
        exact.lm_head.weight = torch.nn.Parameter(head)
    else:
        exact.load_state_dict({name: t.float() for name, t in model.state_dict().items()})
    truth, _, _ = steps_of_both(exact, 15)
    off = (fast.float() - truth).abs().mean()
    assert off <= 1.5 * (plain.float() - truth).abs().mean() + 1e-6


@pytest.mark.parametrize("shape", ["gqa", "mqa, eleven heads"])
def test_a_long_past_and_large_scores(compiled, shape):
    """Scores of hundreds, and more than twice as many keys as are taken together (64)."""
    model = model_of(shape)
    with torch.no_grad():
        for block in model.model.layers:
            block.self_attn.q_norm.weight.mul_(30)
    plain, fast, _ = steps_of_both(model, 2, steps=140)
    assert math.isfinite(fast.sum()) and torch.allclose(fast, plain, atol=2e-3)


def test_nan_stays_nan(compiled):
    for dtype in (torch.float32, BF16):
        model = model_of("gqa", dtype)
        with torch.no_grad():
            model.model.layers[0].mlp.down_proj.weight[3, 4] = float("nan")
        plain, fast, _ = steps_of_both(model, 2, steps=2)
        assert plain.isnan().all() and fast.isnan().all()


def test_threads_share_the_work(compiled):
    model = model_of("many lanes")
    _, alone, _ = steps_of_both(model, 3)
    torch.set_num_threads(3)
    try:
        assert torch.equal(steps_of_both(model, 3)[1], alone)
    finally:
        torch.set_num_threads(1)


def test_whole_answers_are_those_of_the_plain_path(compiled, monkeypatch):
    """Also when rows end and leave, and when a prompt has several samples; and it is what runs."""
    model = model_of("gqa")
    prompts = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10, 11]]
    ways: list[dict] = [dict(), dict(stop_ids=range(0, 40, 3)), dict(num_samples=3)]
    plain = [generate(model, prompts, 30, temperature=0, **way) for way in ways]
    drawn = generate(model, prompts, 30, seed=3, num_samples=2)
    calls = []
    call = decode.call
    monkeypatch.setattr(decode, "call", lambda told: calls.append(1) or call(told))
    fast = [generate(model, prompts, 30, temperature=0, compile=True, **way) for way in ways]
    assert fast == plain and len(calls) > 60
    assert generate(model, prompts, 30, seed=3, num_samples=2, compile=True) == drawn


def test_a_cache_without_room_is_an_error(compiled):
    model = model_of("gqa")
    cache = KVCache(model.config, 1, 2)
    step = decode.step_of(model, cache)
    ids = torch.tensor([[1]])
    step(ids), step(ids)
    with pytest.raises(ValueError, match="no room"):
        step(ids)
    cache.truncate(1)
    step(ids)
    cache.truncate(1)
    cache.select_rows(torch.tensor([0, 0]))
    with pytest.raises(ValueError, match="rows"):
        step(ids)


def test_an_id_outside_the_vocabulary_is_an_error_and_not_read(compiled):
    model = model_of("gqa")
    step = decode.step_of(model, KVCache(model.config, 2, 4))
    for id in (-1, model.config.vocab_size):
        with pytest.raises(IndexError):
            step(torch.tensor([[1], [id]]))
    with pytest.raises(ValueError, match="shape"):
        step(torch.tensor([[1]]))


def test_what_it_is_not_made_for_goes_the_plain_way(compiled):
    def serves(model: GPT, rows: int = 1, dtype: torch.dtype = torch.float32) -> bool:
        return decode.step_of(model, KVCache(model.config, rows, 4, dtype=dtype)) is not None

    model = model_of("gqa")
    assert serves(model) and serves(model, decode.MOST_ROWS)
    assert not serves(model, decode.MOST_ROWS + 1)
    assert not serves(model, dtype=BF16)
    assert not serves(random_model(tiny(attention="manual")).eval())
    assert not serves(model.to(torch.float16), dtype=torch.float16)
    with pytest.raises(ValueError, match="contiguous"):
        decode.address(torch.zeros(3, 2).T)


# ------------------------------------------------------------------------------- packing


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("int8", [False, True])
def test_packed_weights_are_the_same_in_one_block(tied, int8):
    model = random_model(tiny(tie_word_embeddings=tied))
    if int8:
        quantize_int8(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tokens = generate(model, [[1, 2, 3]], 20, temperature=0)
    decode.pack(model)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert len({tensor.untyped_storage().data_ptr() for tensor in after.values()}) == 1
    assert generate(model, [[1, 2, 3]], 20, temperature=0) == tokens
    if tied and not int8:
        assert model.lm_head.weight is model.model.embed_tokens.weight


# ---------------------------------------------------------------------- how the code is kept


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A cache of its own, and in the place of g++ a program that writes "compiled"."""
    if decode.platform.system() != "Linux":
        pytest.skip("decode.cpp is for Linux")
    fake = tmp_path / "fake++"
    fake.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\nprintf compiled > "$2"\n')
    fake.chmod(0o700)
    monkeypatch.setenv("CXX", str(fake))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(decode.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(decode, "call", None)

    class Library:  # as ctypes has it, of a file that says "compiled"
        def __init__(self, file):
            if not os.path.exists(file) or open(file).read() != "compiled":
                raise OSError(f"{file}: cannot open shared object file")
            self.decode_step = lambda told: None

    monkeypatch.setattr(decode.ctypes, "CDLL", Library)
    return tmp_path


def load_anew(tell=lambda text: None) -> str | None:
    decode.call = None  # not what an earlier call found
    return decode.load(tell)


def test_it_is_compiled_once_and_again_where_the_file_is_damaged(workplace):
    told: list[str] = []
    assert load_anew(told.append) is None and decode.call
    file = decode.library()
    assert file.read_text() == "compiled"
    assert os.listdir(file.parent) == [file.name]  # nothing half made lies beside it
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    made = file.stat().st_ino
    assert load_anew(told.append) is None and file.stat().st_ino == made and len(told) == 1
    file.write_text("comp")
    assert load_anew(told.append) is None and file.read_text() == "compiled" and len(told) == 2


def test_other_code_or_other_options_are_another_file(workplace, monkeypatch):
    names = {decode.library()}
    monkeypatch.setattr(decode, "FLAGS", ["-O0"])
    names.add(decode.library())
    other = workplace / "other.cpp"
    other.write_text("int main() {}")
    monkeypatch.setattr(decode, "SOURCE", other)
    names.add(decode.library())
    assert len(names) == 3


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_without_a_compiler_that_works_it_says_so_and_the_plain_step_goes_on(
    workplace, monkeypatch, compiler
):
    monkeypatch.setenv("CXX", compiler)
    assert compiler in load_anew() and decode.call is None
    model = model_of("gqa")
    plain = generate(model, [[1, 2]], 8, temperature=0)
    assert generate(model, [[1, 2]], 8, temperature=0, compile=True) == plain


def test_code_is_not_taken_from_where_others_could_have_put_it(workplace):
    directory = workplace / "cache" / "gpt"
    directory.mkdir(parents=True)
    directory.chmod(0o777)
    assert str(directory) in load_anew() and decode.call is None
    directory.rename(workplace / "elsewhere")
    directory.symlink_to(workplace / "elsewhere")
    (workplace / "elsewhere").chmod(0o700)
    assert str(directory) in load_anew() and decode.call is None
