"""What only a CUDA card can show; skipped without one. `.ci/gpu_check.sh` runs it.

In this order: the same numbers as transformers; a training step and its waits; fp16; compilation
and CUDA graphs; which attention kernels run; memory. Others marked `gpu` stand in test_model.py
(attention against a loop), test_cache.py (a graph of the eager decode step) and test_sample.py.
"""

import json
import warnings
from pathlib import Path

import pytest
import torch
from reference import MINIMIND_3, padded_batch, peer, positions_of, random_ids, random_model, tiny

import checkpoint
import sample
import train
from config import TrainConfig
from kv_cache import KVCache
from machine import Machine
from model import GPT, AttentionPlan, attend, open_blind
from sample import COMPILE_AFTER, generate, generate_stream

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
PROMPTS = [[5, 9, 2], [7], [1] * 20]
SHAPE = tiny(hidden_size=128, head_dim=64, intermediate_size=192, max_position_embeddings=512)


@pytest.fixture(autouse=True)
def exact_products():
    """fp32 without TF32, and without what earlier tests may have asked for: training on a CPU does
    so for deterministic algorithms, which CUDA does not have everywhere."""
    torch.set_float32_matmul_precision("highest")
    torch.use_deterministic_algorithms(False)
    yield
    torch.compiler.reset()


def machine_of(dtype: torch.dtype) -> Machine:
    return Machine(torch.device(DEVICE), dtype, "", 0, 1)


def a_batch(rows: int = 4, length: int = 32, seed: int = 0) -> dict:
    ids = random_ids(SHAPE, rows, length, seed)
    return {"input_ids": ids, "labels": ids.clone(), "num_tokens": ids.numel()}


# ------------------------------------------------------------------- the numbers of transformers


@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_logits_loss_and_gradients_are_those_of_transformers_in_fp32(side):
    ids, labels, mask = padded_batch(SHAPE, [40, 23, 7], side if side != "none" else "right", 40)
    if side == "none":
        labels, mask = ids.clone(), torch.ones_like(ids)
    model = random_model(SHAPE)
    twin = peer(model).to(DEVICE)
    model = model.to(DEVICE)
    ids, labels, on_device = ids.to(DEVICE), labels.to(DEVICE), mask.to(DEVICE)
    options = {"attention_mask": on_device, "position_ids": positions_of(mask).to(DEVICE)}
    theirs = twin(ids, **options).logits
    given = None if side == "none" else on_device
    real = on_device == 1
    torch.testing.assert_close(model(ids, attention_mask=given)[real], theirs[real], **CLOSE)

    loss_sum, targets = model(ids, labels=labels, attention_mask=given)
    goals = labels[:, 1:].masked_fill(~real[:, :-1], -100).flatten()
    expected = torch.nn.functional.cross_entropy(
        theirs[:, :-1].flatten(0, 1), goals, reduction="sum"
    )
    assert targets == (goals != -100).sum()
    torch.testing.assert_close(loss_sum, expected, **CLOSE)
    loss_sum.backward()
    expected.backward()
    others = dict(twin.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, others[name].grad, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("side", ["left", "right"])
def test_bf16_is_as_near_to_fp32_as_transformers(side):
    ids, _, mask = padded_batch(SHAPE, [40, 23, 7], side, 40)
    model = random_model(SHAPE).to(torch.bfloat16)
    options = {"attention_mask": mask.to(DEVICE), "position_ids": positions_of(mask).to(DEVICE)}
    ids, real = ids.to(DEVICE), mask.to(DEVICE) == 1
    with torch.no_grad():
        exact = peer(model).float().to(DEVICE)(ids, **options).logits[real]
        half = peer(model).to(DEVICE)(ids, **options).logits[real].float()
        model = model.to(DEVICE)
        ours = model(ids, attention_mask=options["attention_mask"])[real].float()
    assert (ours - exact).pow(2).mean() <= 1.2 * (half - exact).pow(2).mean()


# ------------------------------------------------------------------------------- a training step


def waits_in(call) -> list[str]:
    """What torch says of each wait of the host for the device during a call."""
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    said = [str(warning.message) for warning in caught]
    return [message for message in said if "synchronizing CUDA operation" in message]


def stepper(dtype: torch.dtype, optimizer: str = "muon", compiled: bool = False):
    """(model, a function that takes a training step on micro-batches and returns its Step)."""
    model = random_model(SHAPE).train().to(DEVICE)
    config, machine = TrainConfig(optimizer=optimizer, learning_rate=1e-3), machine_of(dtype)
    optimizers = train.make_optimizers(model, config)
    scaler = torch.amp.GradScaler(DEVICE, enabled=dtype == torch.float16)
    forward = torch.compile(model) if compiled else model

    def step(*window: dict):
        return train.take_step(forward, optimizers, scaler, list(window), machine, config)

    return model, step


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_host_waits_once_in_a_training_step(dtype, optimizer):
    """With two micro-batches, which come from pinned memory; after a first step that sets up."""
    _, step = stepper(dtype, optimizer)
    step(a_batch(), a_batch())
    window = a_batch(seed=1), a_batch(seed=2)
    assert len(waits_in(lambda: step(*window))) == 1


def test_the_host_waits_once_in_a_compiled_training_step():
    _, step = stepper(torch.bfloat16, compiled=True)
    step(a_batch(), a_batch())
    assert len(waits_in(lambda: step(a_batch(), a_batch()))) == 1


def test_a_wait_is_seen():
    value = torch.ones(3, device=DEVICE)
    assert len(waits_in(lambda: (value.sum().item(), value.sum().item()))) == 2


def test_batches_are_moved_without_a_wait_and_arrive_whole():
    batch, machine, moved = a_batch(64, 512), machine_of(torch.bfloat16), []
    assert waits_in(lambda: moved.append(machine.move(batch["input_ids"]))) == []
    assert torch.equal(moved[0].cpu(), batch["input_ids"])


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_a_short_run_learns_and_its_checkpoint_is_read_on_the_cpu(dtype, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [json.dumps({"text": f"{n} and {n} are {2 * n}"}) for n in range(200)]
    Path("rows.jsonl").write_text("\n".join(rows))
    flags = "--data=rows.jsonl --tokenizer=bytes --out_dir=run --max_seq_len=32 --batch_size=16"
    flags += f" --max_steps=60 --warmup_steps=5 --log_every=1 --compile=False --dtype={dtype}"
    train.main([*flags.split(), f"--device={DEVICE}"])
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["val_loss"] < 0.6 * lines[0]["loss"]
    ids = random_ids(SHAPE, 1, 8)
    step = checkpoint.saved_steps(Path("run"))[-1]
    assert GPT.from_pretrained(step)(ids).isfinite().all()


def test_fp16_skips_steps_until_its_scale_fits_and_then_learns():
    model, step = stepper(torch.float16)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    model_too, step_in_fp32 = stepper(torch.float32)
    expected = step_in_fp32(a_batch()).loss
    for _ in range(17):  # from 2**16 down to 1
        taken = step(a_batch())
        if taken.is_good:
            break
        assert all(map(torch.equal, before, model.parameters()))
    assert taken.is_good and taken.loss == pytest.approx(expected, rel=1e-2)
    assert not any(map(torch.equal, before, model.parameters()))


# ------------------------------------------------------------------------ compilation and graphs


def test_training_is_not_compiled_anew_for_every_shape():
    """A second length and a second number of rows make both dynamic; any others are then served."""
    _, step = stepper(torch.bfloat16, compiled=True)
    _, plain = stepper(torch.bfloat16)
    for rows, length in ((4, 16), (4, 24), (8, 32)):
        batch = a_batch(rows, length)
        assert step(batch).loss == pytest.approx(plain(batch).loss, rel=0.02)
    with torch.compiler.set_stance("fail_on_recompile"):
        for rows, length in ((3, 33), (4, 40), (16, 16), (5, 64), (4, 24)):
            assert step(a_batch(rows, length)).is_good


def test_decoding_is_not_compiled_anew_for_every_position():
    """Within a capacity of 256, for rows of unequal prompts."""
    model = random_model(SHAPE).to(DEVICE)
    stream = generate_stream(model, PROMPTS, 120, temperature=0, compile=True)
    made = [next(stream) for _ in range(COMPILE_AFTER + 3)]  # compiled, and captured
    with torch.compiler.set_stance("fail_on_recompile"):
        made += list(stream)
    assert len(made) == 120


def test_a_short_answer_is_not_compiled(monkeypatch):
    model = random_model(SHAPE).to(DEVICE)
    monkeypatch.setattr(sample, "compiled_step", lambda *_: pytest.fail("compiled"))
    expected = generate(model, PROMPTS, COMPILE_AFTER, temperature=0)
    assert generate(model, PROMPTS, COMPILE_AFTER, temperature=0, compile=True) == expected


def test_compiled_and_captured_steps_give_the_tokens_of_plain_ones():
    """Over two capacities, 256 and 512, and once more with what is compiled by then."""
    model = random_model(SHAPE).to(DEVICE)
    expected = generate(model, PROMPTS, 400, temperature=0)
    assert generate(model, PROMPTS, 400, temperature=0, compile=True) == expected
    others = [prompt[::-1] for prompt in PROMPTS]
    expected = generate(model, others, 400, temperature=0)
    assert generate(model, others, 400, temperature=0, compile=True) == expected


@torch.no_grad()
def test_a_graph_of_a_compiled_step_in_bf16_gives_the_logits_of_plain_ones():
    """In a left-padded batch: the prefill is plain, then one graph is replayed at each slot."""
    model = random_model(SHAPE).to(DEVICE, torch.bfloat16)
    ids, _, mask = padded_batch(SHAPE, [30, 12, 1], "left", 30)
    ids, mask = ids.to(DEVICE), mask.to(DEVICE)
    following = random_ids(SHAPE, 3, 40, seed=1).to(DEVICE)
    graphed, plain = (KVCache(SHAPE, 3, 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    decode = torch.compile(model.decode_step, dynamic=False)
    token, slot = following[:, :1].clone(), torch.full((1,), 30, device=DEVICE)
    model(ids, attention_mask=mask, cache=graphed)
    for _ in range(3):  # compiles, which cannot be captured
        decode(token, graphed, slot, 128)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = decode(token, graphed, slot, 128)

    graphed.reset()
    model(ids, attention_mask=mask, cache=graphed)
    model(ids, attention_mask=mask, cache=plain)
    for t in range(40):
        token.copy_(following[:, t : t + 1])
        slot.fill_(30 + t)
        graph.replay()
        expected = model(token, cache=plain).float()
        difference = (logits.float() - expected).abs().max()
        assert difference < 0.05 * expected.abs().max(), f"at slot {30 + t}"


# ------------------------------------------------------------------------- the attention kernels


def kernels_of(call, directory: Path) -> list[dict]:
    """The CUDA kernels that a call starts: name, microseconds, and what the profiler estimates of
    the occupancy, in percent."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    profile.export_chrome_trace(str(directory / "trace.json"))
    events = json.loads((directory / "trace.json").read_text())["traceEvents"]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    return [
        {
            "name": event["name"],
            "us": event["dur"],
            "occupancy": event["args"].get("est. achieved occupancy %", "not given"),
        }
        for event in kernels
    ]


def attention_case(case: str) -> tuple[int, int, AttentionPlan]:
    """(queries, keys, plan) of a row of the table in model.plan_attention."""
    B, S = 8, 1024
    T = {"training, prefill": S, "a token": 1, "a token, fixed shape": 1, "a mask": 512}[case]
    plan = AttentionPlan(None, None, is_causal=case == "training, prefill")
    if case in ("a token, fixed shape", "a mask"):
        real = torch.ones(B, S, dtype=torch.bool, device=DEVICE)
        real[0, :100] = False  # padding on the left, or slots behind the row
        positions = torch.arange(S, device=DEVICE)
        visible = positions[None, :] <= positions[S - T :, None]  # (T, S)
        plan.visible = (visible & real[:, None, :])[:, None]  # (B, 1, T, S)
        if case == "a mask":
            plan.visible, plan.blind = open_blind(plan.visible)
    return T, S, plan


@pytest.mark.parametrize(
    "case, backward",
    [("training, prefill", False), ("training, prefill", True), ("a token", False)]
    + [("a token, fixed shape", False), ("a mask", False), ("a mask", True)],
)
def test_attention_runs_in_a_fused_kernel(case, backward, tmp_path, capsys):
    """MiniMind-3's heads in bf16. A softmax of its own would be the slow way, step by step."""
    T, S, plan = attention_case(case)
    H, K, D = MINIMIND_3.num_attention_heads, MINIMIND_3.num_key_value_heads, MINIMIND_3.head_dim
    options = {"device": DEVICE, "dtype": torch.bfloat16, "requires_grad": backward}
    q = torch.randn(8, H, T, D, **options)
    k, v = (torch.randn(8, K, S, D, **options) for _ in range(2))

    def call():
        out = attend(q, k, v, plan, 0.0)
        if backward:
            torch.autograd.grad(out.sum(), (q, k, v))

    kernels = kernels_of(call, tmp_path)
    with capsys.disabled():
        print(f"\n{case}, {'with backward' if backward else 'forward'}: q {tuple(q.shape)}, S {S}")
        for kernel in kernels:
            print(f"  {kernel['us']:8.1f} us, occupancy {kernel['occupancy']} %, {kernel['name']}")
    if not kernels:
        pytest.skip("the profiler may not see kernels on this machine")
    names = [kernel["name"].lower() for kernel in kernels]
    assert not any("softmax" in name for name in names)
    assert any(word in name for name in names for word in ("flash", "fmha", "cudnn", "attention"))


# ---------------------------------------------------------------------------------------- memory


def test_decoding_4096_tokens_for_8_rows_takes_the_cache_and_little_more(capsys):
    """MiniMind-3 in bf16: 12 KiB a token and row."""
    model = random_model(MINIMIND_3).to(DEVICE, torch.bfloat16)
    prompts = random_ids(MINIMIND_3, 8, 16).tolist()
    generate(model, prompts, 4, temperature=0)  # what the libraries set up for themselves
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    new = generate(model, prompts, 4096 - 16, temperature=0)
    assert all(len(row) == 4096 - 16 for row in new)
    used = torch.cuda.max_memory_allocated() - before
    cache = 12 * 1024 * 8 * (4096 - 1)
    with capsys.disabled():
        print(
            f"\ndecoding 8 x 4096: {used / 2**20:.0f} MiB, of which the cache {cache / 2**20:.0f}"
        )
    assert used < 1.05 * cache + 32 * 2**20
