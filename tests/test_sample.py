"""sample.py as a library: the loop against a plain one and against transformers, and the samplers.

`plain` is the reference that the fast loop is held to: one prompt, no cache, no batch, no padding,
the whole text through the model for every token. The head is not tied: greedy texts of random
weights then wander through the vocabulary instead of repeating a few ids.
"""

import itertools
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from reference import peer, random_model, tiny
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import decode
import sample
from config import UserError
from kv_cache import KVCache
from sample import generate, generate_stream, pick, process_logits

NEVER = float("-inf")
REPO = Path(__file__).parents[1]
PROMPTS = [[5, 7, 11], [3], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [60, 0, 60]]


@pytest.fixture(scope="module")
def model():
    return random_model(tiny(max_position_embeddings=300, tie_word_embeddings=False))


@torch.no_grad()
def plain(model, prompt, max_new_tokens, choose=lambda logits, ids: int(logits.argmax())):
    """The loop as one would first write it. `choose` gets logits (V,) and all ids so far."""
    ids = list(prompt)
    for _ in range(max_new_tokens):
        logits = model(torch.tensor([ids]))[0, -1]
        ids.append(choose(logits, ids))
    return ids[len(prompt) :]


# ------------------------------------------------------------------------------- the loop


def test_greedy_equals_the_plain_loop_alone_and_in_a_batch(model):
    expected = [plain(model, prompt, 30) for prompt in PROMPTS]
    assert min(len(set(ids)) for ids in expected) > 10  # not a few ids over and over
    for prompt, ids in zip(PROMPTS, expected, strict=True):
        assert generate(model, [prompt], 30, temperature=0) == [ids]
    assert generate(model, PROMPTS, 30, temperature=0) == expected
    assert generate(model, PROMPTS[::-1], 30, temperature=0) == expected[::-1]


@pytest.mark.parametrize("shape", [{"num_key_value_heads": 1}, {"attention": "manual"}])
def test_greedy_in_a_batch_equals_the_plain_loop_in_other_shapes(shape):
    model = random_model(tiny(**shape), seed=1)
    expected = [plain(model, prompt, 20) for prompt in PROMPTS]
    assert generate(model, PROMPTS, 20, temperature=0) == expected


def trained_model():
    """A model that has learned a text by heart, nearly: its greedy text is confident and varied."""
    text = (Path(__file__).parent.parent / "LICENSE").read_bytes()
    ids = torch.tensor([byte % 61 for byte in text])
    rows = ids[: len(ids) // 64 * 64].view(-1, 64)  # (16, 64)
    model = random_model(tiny(max_position_embeddings=300))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        loss, targets = model(rows, labels=rows)
        (loss / targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss / targets < 2.5  # ln 61 is 4.1
    return model


@pytest.mark.parametrize("weights", ["random", "trained"])
@pytest.mark.parametrize("compile", [False, True])
def test_greedy_equals_transformers_over_200_tokens_alone_and_left_padded(model, weights, compile):
    if compile and decode.load() is not None:
        pytest.skip("decode.cpp cannot be compiled here")
    if weights == "trained":
        model = trained_model()
    qwen = peer(model)
    lengths = [len(prompt) for prompt in PROMPTS]
    width = max(lengths)
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in PROMPTS])
    mask = torch.tensor([[0] * (width - n) + [1] * n for n in lengths])
    options = {"max_new_tokens": 200, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    theirs = qwen.generate(ids, attention_mask=mask, **options)[:, width:].tolist()
    assert min(len(set(ids)) for ids in theirs) > 10
    assert generate(model, PROMPTS, 200, temperature=0, compile=compile) == theirs
    alone = qwen.generate(torch.tensor([PROMPTS[0]]), **options)[0, lengths[0] :].tolist()
    assert generate(model, [PROMPTS[0]], 200, temperature=0, compile=compile) == [alone]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_runs_with_a_cache_of_its_dtype(dtype, monkeypatch):
    made = record_caches(monkeypatch)
    model = random_model(tiny()).to(dtype)
    (ids,) = generate(model, [PROMPTS[0]], 10, temperature=0)
    assert len(ids) == 10
    assert made[0].keys[0].dtype == dtype


def test_each_row_stops_by_itself_and_its_neighbours_go_on(model):
    expected = [plain(model, prompt, 40) for prompt in PROMPTS]
    for stops in ({expected[0][3]}, {expected[1][9], expected[2][1]}, {ids[5] for ids in expected}):
        cut = []
        for ids in expected:
            hits = [i for i, id in enumerate(ids) if id in stops]
            cut.append(ids[: hits[0] + 1] if hits else ids)  # the stop id is included
        assert generate(model, PROMPTS, 40, temperature=0, stop_ids=stops) == cut


def test_the_loop_ends_when_all_rows_have_and_drops_rows_once_half_have(model, monkeypatch):
    expected = [plain(model, prompt, 40) for prompt in PROMPTS]
    ends = [3, 9, 1, 30]
    sizes = []
    forward = model.forward
    monkeypatch.setattr(
        model, "forward", lambda ids, **kw: sizes.append(tuple(ids.shape)) or forward(ids, **kw)
    )
    counts = [0] * 4

    def stop_when(row, id):
        counts[row] += 1
        return counts[row] == ends[row]

    new = generate(model, PROMPTS, 40, temperature=0, stop_when=stop_when)
    assert new == [ids[:end] for ids, end in zip(expected, ends, strict=True)]
    decode = sizes[1:]
    assert sizes[0] == (4, 12)
    # One step per token after the first; two rows left after 3 tokens, one after 9.
    assert decode == [(4, 1)] * 2 + [(2, 1)] * 6 + [(1, 1)] * 21


def test_a_finished_row_stays_finished_and_nothing_is_yielded_for_it(model):
    expected = [plain(model, prompt, 12) for prompt in PROMPTS[:3]]
    ended = set()
    for made in generate_stream(model, PROMPTS[:3], 12, temperature=0, stop_ids=[expected[2][1]]):
        rows = [row for row, _ in made]
        assert rows == sorted(set(rows)) and not ended & set(rows)
        ended |= {row for row, id in made if id == expected[2][1]}
    assert ended


def test_context_limit_minus_one_limit_and_plus_one():
    model = random_model(tiny(max_position_embeddings=16))
    for length in (1, 10, 15, 16):
        prompt = [i % 61 for i in range(length)]
        room = 16 - length + 1  # positions used: prompt + new - 1
        expected = plain(model, prompt, room)
        for wanted in (1, room - 1, room, room + 1, 100):
            if wanted >= 1:
                new = generate(model, [prompt], wanted, temperature=0)
                assert new == [expected[: min(wanted, room)]]
    with pytest.raises(ValueError, match="prompt 1 has 17 tokens, .* context is only 16"):
        generate(model, [[1], [1] * 17], 5)


def test_rows_reach_the_context_limit_each_at_its_own_length():
    model = random_model(tiny(max_position_embeddings=16))
    prompts = [[1] * 16, [2, 3], [4] * 9]
    new = generate(model, prompts, 100, temperature=0)
    assert [len(ids) for ids in new] == [1, 15, 8]
    assert new == [plain(model, p, len(ids)) for p, ids in zip(prompts, new, strict=True)]


def record_caches(monkeypatch):
    made = []

    class Recorded(KVCache):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            made.append(self)

    monkeypatch.setattr(sample, "KVCache", Recorded)
    return made


def test_the_cache_is_made_to_measure(model, monkeypatch):
    made = record_caches(monkeypatch)
    stream = generate_stream(model, PROMPTS, 20)
    next(stream)
    assert made[0].max_length == 12 + 20 - 1
    address = made[0].keys[0].data_ptr()
    assert len(list(stream)) == 19
    assert len(made) == 1 and made[0].keys[0].data_ptr() == address  # and it stays that one
    generate(model, [[1] * 299], 20)
    assert made[1].max_length == 300


def test_a_cache_that_memory_does_not_hold_is_refused_with_its_bytes(model, monkeypatch):
    monkeypatch.setattr(sample, "physical_memory", lambda: 2**20)
    # 2 layers * (keys and values) * 2 heads * 8 * 4 bytes = 256 bytes a token
    with pytest.raises(UserError, match=r"cache of 1000 rows of 100 tokens needs 0\.0 GiB"):
        generate(model, [[1]], 100, num_samples=1000)
    assert len(generate(model, [[1]], 100, num_samples=2)) == 2


MEMORY = """
import re, sys
from pathlib import Path
import torch
from kv_cache import KVCache
from model import GPT, GPTConfig
import decode
from sample import generate_stream

def resident():
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\\s+(\\d+)", status)[1]) * 1024

torch.manual_seed(0)
half_stop, compiled = sys.argv[1] == "half stop", decode.load() is None
config = GPTConfig(100, 32, 4, 2, 48, num_key_value_heads=1, head_dim=64)
model, prompts = GPT(config), [[row + 1] for row in range(8)]
options = {"temperature": 0.0, "compile": compiled}
if half_stop:
    made = [0] * 8
    def stop(row, id):
        made[row] += 1
        return row >= 4 and made[row] == 2048
    options["stop_when"] = stop
list(generate_stream(model, prompts, 20, temperature=0.0, compile=compiled))
before = peak = resident()
for step, _ in enumerate(generate_stream(model, prompts, 4096, **options)):
    if step % 64 == 0 or step == 2048:
        peak = max(peak, resident())
print(step + 1, peak - before, KVCache(config, 8, 4096).nbytes)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc/self/status")
@pytest.mark.parametrize("case", ["all go on", "half stop"])
def test_4096_tokens_of_8_rows_take_their_cache_and_no_more(case):
    """64 MiB; where half of the rows end at half way, one layer more while they are dropped."""
    command = [sys.executable, "-c", MEMORY, case]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPO, timeout=500)
    assert done.returncode == 0, done.stderr
    steps, grown, cache = map(int, done.stdout.split())
    assert steps == 4096 and cache == 2 * 4 * 8 * 4096 * 64 * 4
    assert grown < cache + 2**23


def test_samples_of_one_prompt_share_one_prefill(model, monkeypatch):
    shapes = []
    forward = model.forward
    monkeypatch.setattr(
        model, "forward", lambda ids, **kw: shapes.append(tuple(ids.shape)) or forward(ids, **kw)
    )
    new = generate(model, PROMPTS[:2], 3, temperature=0, num_samples=3)
    assert shapes == [(2, 3), (6, 1), (6, 1)]
    expected = [plain(model, prompt, 3) for prompt in PROMPTS[:2]]
    assert new == [expected[0]] * 3 + [expected[1]] * 3  # prompt-major


def test_each_sample_draws_its_own_first_token(model):
    new = generate(model, [PROMPTS[0]], 1, num_samples=20, temperature=5.0)
    assert len({ids[0] for ids in new}) > 8


def test_a_row_depends_on_its_place_and_the_seed_not_on_its_neighbours(model):
    options = {"temperature": 1.5, "top_p": 0.95, "repetition_penalty": 1.1, "seed": 7}
    alone = generate(model, [PROMPTS[0]], 25, **options)[0]
    assert generate(model, PROMPTS, 25, **options)[0] == alone
    assert generate(model, [PROMPTS[0]], 25, num_samples=3, **options)[0] == alone
    # Neighbours that end early are dropped: that moves no one's noise.
    first = generate(model, PROMPTS, 25, **options)
    stops = {first[1][2], first[2][0]}
    cut = generate(model, PROMPTS, 25, stop_ids=stops, **options)
    for whole, part in zip(first, cut, strict=True):
        hits = [i for i, id in enumerate(whole) if id in stops]
        assert part == (whole[: hits[0] + 1] if hits else whole)
    assert generate(model, [PROMPTS[0]], 25, **options | {"seed": 8})[0] != alone
    same_prompt_twice = generate(model, [PROMPTS[0]] * 2, 25, **options)
    assert same_prompt_twice[0] != same_prompt_twice[1]


def test_draws_follow_the_distribution():
    scores = torch.tensor([[0.1, 0.2, 0.3, 0.4, 0.0]]).log().expand(20_000, -1)
    generator = torch.Generator().manual_seed(0)
    counts = pick(scores, [generator] * 20_000).bincount(minlength=5) / 20_000
    assert counts[4] == 0
    assert torch.allclose(counts[:4], torch.tensor([0.1, 0.2, 0.3, 0.4]), atol=0.015)


def test_repetition_penalty_covers_prompt_and_output(model):
    penalty = RepetitionPenaltyLogitsProcessor(1.3)

    def choose(logits, ids):
        return int(penalty(torch.tensor([ids]), logits[None]).argmax())

    expected = [plain(model, prompt, 30, choose) for prompt in PROMPTS]
    assert expected != [plain(model, prompt, 30) for prompt in PROMPTS]
    new = generate(model, PROMPTS, 30, temperature=0, repetition_penalty=1.3)
    assert new == expected  # in a padded batch, too: the pad id 0 is not penalised
    options = {"temperature": 0, "repetition_penalty": 1.3, "stop_when": lambda row, id: row < 2}
    assert generate(model, PROMPTS, 30, **options)[2:] == expected[2:]  # the others were dropped


def test_bias_and_forbidden_ids(model):
    free = generate(model, PROMPTS, 30, temperature=0)
    forbidden = {ids[0] for ids in free}
    new = generate(model, PROMPTS, 30, temperature=0, forbidden_ids=forbidden)
    assert not forbidden & set(itertools.chain(*new))
    hot = generate(model, PROMPTS, 200, temperature=100.0, forbidden_ids=range(60))
    assert set(itertools.chain(*hot)) == {60}
    assert generate(model, [[1]], 5, temperature=0, logit_bias={17: 1e4}) == [[17] * 5]
    both = generate(model, [[1]], 5, temperature=0, logit_bias={17: 1e4}, forbidden_ids=[17])
    assert 17 not in both[0]


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([[1], []], {}, "prompt 1 is empty"),
        ([[1, 61]], {}, "prompt 0 has the id 61, but ids are 0 to 60"),
        ([[-1]], {}, "prompt 0 has the id -1"),
        ([[1]], {"temperature": -0.5}, "temperature is -0.5"),
        ([[1]], {"temperature": math.nan}, "temperature is nan"),
        ([[1]], {"top_k": -1}, "top_k is -1, but it must be at least 0"),
        ([[1]], {"top_p": 1.5}, "top_p is 1.5, but it must be from 0 to 1"),
        ([[1]], {"min_p": -0.1}, "min_p is -0.1"),
        ([[1]], {"repetition_penalty": 0}, "repetition_penalty is 0"),
        ([[1]], {"num_samples": 0}, "num_samples is 0"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens is 0"),
        ([[1]], {"forbidden_ids": range(61)}, "all 61 ids are forbidden"),
        ([[1]], {"forbidden_ids": [61]}, "ids are 0 to 60"),
        ([[1]], {"logit_bias": {0: math.inf}}, "biases finite"),
    ],
)
def test_mistakes_are_sentences(model, prompts, options, message):
    with pytest.raises(UserError, match=message):
        generate(model, prompts, **{"max_new_tokens": 5} | options)


def test_an_option_that_does_not_exist_is_an_error(model):
    with pytest.raises(TypeError, match="top_kk"):
        generate(model, [[1]], 5, top_kk=3)


def test_no_prompts_no_texts(model):
    assert generate(model, [], 5) == []


def test_dropout_is_off_while_generating_and_the_mode_is_restored():
    model = random_model(tiny(dropout=0.5))
    expected = generate(model, PROMPTS, 10, temperature=0)
    model.train()
    assert generate(model, PROMPTS, 10, temperature=0) == expected
    assert model.training
    stream = generate_stream(model, PROMPTS, 10)
    next(stream)
    stream.close()  # a consumer that leaves early
    assert model.training


def test_a_kept_cache_spares_what_it_holds(model):
    prompt, more = PROMPTS[2], [9, 8, 7]
    cache = KVCache(model.config, 1, 60)
    (first,) = generate(model, [prompt], 10, temperature=0, cache=cache)
    assert cache.length == len(prompt) + 9  # all but the last token
    longer = prompt + first + more
    (second,) = generate(model, [longer], 10, temperature=0, cache=cache)
    assert second == plain(model, longer, 10)
    cache.truncate(5)
    assert generate(model, [prompt], 10, temperature=0, cache=cache) == [first]
    with pytest.raises(ValueError, match="cannot serve"):
        generate(model, [prompt], 60, cache=KVCache(model.config, 1, 60))
    with pytest.raises(ValueError, match="cannot serve"):
        generate(model, [cache_prompt := prompt[:3]], 5, cache=cache)
    assert len(cache_prompt) < cache.length


@pytest.mark.parametrize("options", [dict(temperature=0), dict(seed=1), dict(top_p=0.5)])
def test_scores_that_are_not_numbers_are_an_error_and_not_a_text(model, options):
    broken = random_model(model.config)
    with torch.no_grad():
        broken.model.norm.weight[3] = float("nan")
    with pytest.raises(UserError, match="not numbers"):
        generate(broken, [[1, 2]], 5, forbidden_ids=range(7), repetition_penalty=1.1, **options)
    overflowing = random_model(model.config)
    with torch.no_grad():
        overflowing.lm_head.weight.mul_(1e38).mul_(1e3)
    with pytest.raises(UserError, match="not numbers"):
        generate(overflowing, [[1, 2]], 5, **options)


def tokens_by(step_of, model, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens by a step that is made from the model and a cache with the prompt."""
    with torch.inference_mode():
        cache = KVCache(model.config, 1, model.config.max_position_embeddings)
        ids = model(torch.tensor([prompt]), cache=cache)[:, -1].argmax(dim=-1)
        step, made = step_of(model, cache), [int(ids)]
        while len(made) < count:
            ids = step(ids[:, None])[:, -1].argmax(dim=-1)
            made.append(int(ids))
    return made


def test_the_step_of_gpus_gives_the_same_tokens_with_one_graph_a_capacity(model, monkeypatch):
    """`compiled_step` on the CPU, with a compiler that counts; the GPU's graphs are in test_gpu."""
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *a, **k: compile(*a, backend=count, **k))
    monkeypatch.setattr(KVCache, "capacity", lambda cache, length: 16 if length <= 16 else 64)
    made = tokens_by(sample.compiled_step, model, [5, 4, 3], 40)
    assert made == plain(model, [5, 4, 3], 40) and len(graphs) == 2
    # Another request finds them compiled.
    assert tokens_by(sample.compiled_step, model, [7], 50) == plain(model, [7], 50)
    assert len(graphs) == 2


@pytest.mark.slow
def test_the_step_of_gpus_compiled_by_inductor_gives_the_same_tokens(model):
    torch.compiler.reset()
    made = tokens_by(sample.compiled_step, model, [5, 4, 3], 50)
    assert made == plain(model, [5, 4, 3], 50)


@pytest.mark.gpu
def test_greedy_on_cuda_equals_the_cpu(model):
    expected = generate(model, PROMPTS, 30, temperature=0)
    cuda = random_model(model.config).to("cuda")
    assert generate(cuda, PROMPTS, 30, temperature=0) == expected
    drawn = generate(cuda, PROMPTS, 30, temperature=1.0, top_k=5, top_p=0.9, seed=3)
    assert generate(cuda, PROMPTS, 30, temperature=1.0, top_k=5, top_p=0.9, seed=3) == drawn


# ----------------------------------------------------------------------------- the samplers


def random_logits(ties: bool, rows: int = 32, vocabulary: int = 40) -> torch.Tensor:
    logits = 3 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(5))
    return logits.round() if ties else logits


def same(ours: torch.Tensor, theirs: torch.Tensor, whichever: bool = False) -> None:
    """The same ids are left, with the same probabilities; or whichever of equals are left."""
    ours_left, theirs_left = ours != NEVER, theirs != NEVER
    ours, theirs = ours.softmax(-1), theirs.softmax(-1)
    if whichever:
        ours, theirs = ours.sort(-1).values, theirs.sort(-1).values
        ours_left, theirs_left = ours_left.sum(-1), theirs_left.sum(-1)
    assert torch.equal(ours_left, theirs_left)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("ties", [False, True])
def test_each_sampler_equals_transformers(ties):
    logits = random_logits(ties)
    for temperature in (0.1, 0.7, 1.0, 3.0):
        theirs = TemperatureLogitsWarper(temperature)(None, logits)
        same(process_logits(logits, temperature=temperature), theirs)
    for k in (1, 2, 7, 39, 40, 50):
        same(process_logits(logits, top_k=k), TopKLogitsWarper(k)(None, logits))
    for p in (0.05, 0.3, 0.5, 0.9, 0.999):
        # Which of equals they leave depends on an unstable sort; ours are the lower ids.
        same(process_logits(logits, top_p=p), TopPLogitsWarper(p)(None, logits), whichever=ties)
    for p in (0.01, 0.1, 0.5, 1.0):
        same(process_logits(logits, min_p=p), MinPLogitsWarper(p)(None, logits))
    ids = torch.randint(40, (32, 12), generator=torch.Generator().manual_seed(6))
    seen = torch.zeros(32, 40, dtype=torch.bool).scatter(1, ids, True)
    for penalty in (0.5, 1.2, 2.0):
        theirs = RepetitionPenaltyLogitsProcessor(penalty)(ids, logits)
        same(process_logits(logits, seen=seen, repetition_penalty=penalty), theirs)


@pytest.mark.parametrize("ties", [False, True])
def test_all_samplers_together_run_in_the_stated_order(ties):
    logits = random_logits(ties)
    ids = torch.randint(40, (32, 12), generator=torch.Generator().manual_seed(6))
    seen = torch.zeros(32, 40, dtype=torch.bool).scatter(1, ids, True)
    bias = torch.zeros(40)
    bias[3], bias[4], bias[39] = 2.5, -4.0, NEVER
    theirs = RepetitionPenaltyLogitsProcessor(1.3)(ids, logits + bias)
    for step in (
        TemperatureLogitsWarper(0.8),
        TopKLogitsWarper(12),
        TopPLogitsWarper(0.9),
        MinPLogitsWarper(0.05),
    ):
        theirs = step(None, theirs)
    ours = process_logits(
        logits, bias, seen, repetition_penalty=1.3, temperature=0.8, top_k=12, top_p=0.9, min_p=0.05
    )
    same(ours, theirs, whichever=ties)
    assert (ours != NEVER).sum() < 32 * 12 and (ours[:, 39] == NEVER).all()


def test_the_edges_of_each_sampler():
    logits = random_logits(ties=True)
    everything = logits.softmax(-1)
    for off in ({"top_k": 0}, {"top_k": 40}, {"top_k": 1000}, {"top_p": 1.0}, {"min_p": 0.0}):
        torch.testing.assert_close(process_logits(logits, **off).softmax(-1), everything)
    likeliest = logits.argmax(-1)
    nucleus = process_logits(logits, top_p=0.0)
    assert ((nucleus != NEVER).sum(-1) == 1).all()  # of equals the lower id, as in argmax
    assert torch.equal(nucleus.argmax(-1), likeliest)
    assert torch.equal(process_logits(logits, temperature=0).argmax(-1), likeliest)
    # Temperatures near 0 are finite and nearly greedy; equals share.
    for temperature in (1e-3, 1e-30, 1e-300):
        p = process_logits(logits, temperature=temperature).softmax(-1)
        torch.testing.assert_close(p, process_logits(logits, min_p=1.0).softmax(-1))
    flat = torch.zeros(1, 4)
    kept = process_logits(flat, top_p=0.5) != NEVER
    assert kept.tolist() == [[True, True, False, False]]
    kept = process_logits(flat, top_p=0.51) != NEVER  # the one that crosses stays
    assert kept.tolist() == [[True, True, True, False]]
    assert (process_logits(flat, top_k=1) != NEVER).all()  # what ties with the last stays


def test_samplers_take_half_precision_and_leave_their_input_alone():
    logits = random_logits(ties=False).bfloat16()
    before = logits.clone()
    scores = process_logits(logits, top_k=5, top_p=0.9, min_p=0.1)
    assert scores.dtype == torch.float32
    assert torch.equal(logits, before)
