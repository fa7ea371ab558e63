"""Speed and memory, side by side with transformers' Qwen3 of the same shape and weights.

  python bench.py train    forward, and forward + backward + optimizer step
  python bench.py loop     what train.py's loop costs besides the model
  python bench.py loss     memory and time of the loss at Qwen3's vocabulary
  python bench.py decode   generation: prefill and decode
  python bench.py all      everything, one after the other;  --device=cuda on a GPU

Peers run in the same process, taking turns, and each figure is the median of its rounds: the
ratios can be trusted on a machine that other work slows down, the absolute times less. Each speed
is also given as a share of what the machine can do at best, which is measured in the same run: the
FLOPs of one large matrix product, or the bytes per second of one long read.
"""

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

import decode
import train
from checkpoint import find_checkpoint, load_model
from config import TrainConfig, UserError, choose_device, parse_config, run_program
from evaluate import WORLD, story_loss
from loss import LinearCrossEntropy
from model import GPT, GPTConfig, Linear
from quantize import Int8Linear, quantize_int8
from report import forward_flops
from sample import COMPILE_AFTER, generate, generate_stream, prepare_weights

warnings.filterwarnings("ignore")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

SHAPES = {
    "5M": GPTConfig(1024, 256, 6, 8, 768, num_key_value_heads=4, head_dim=32),
    "64M": GPTConfig(6400, 768, 8, 8, 2432, num_key_value_heads=4, head_dim=96),  # MiniMind-3
    "124M": GPTConfig(50304, 768, 12, 12, 2048, num_key_value_heads=4, head_dim=64),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


# ------------------------------------------------------------------------------- how to measure


def wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    if device == "mps":
        torch.mps.synchronize()


def take_turns(ways: dict[str, Callable], device: str, rounds: int) -> dict[str, float]:
    """Median seconds of each way, one call of each in turn, after two calls to warm up."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 2):
        for name, call in ways.items():
            wait(device)
            start = time.perf_counter()
            call()
            wait(device)
            if number >= 2:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def matrix_peak(device: str, dtype: torch.dtype) -> float:
    """FLOPs per second of a product of two large square matrices."""
    size = 8192 if device.startswith("cuda") else 2048
    a = torch.randn(size, size, device=device).to(dtype)
    seconds = take_turns({"product": lambda: a @ a}, device, rounds=5)["product"]
    return 2 * size**3 / seconds


def read_bandwidth(device: str, size: int) -> float:
    """Bytes per second at which an array of `size` bytes is read: by a sum, or by a product with a
    vector, whichever is faster. A large cache of the processor may hold a part of it."""
    matrix = torch.ones(size // 4096, 1024, device=device)
    vector = torch.ones(1024, device=device)
    ways = {"sum": lambda: matrix.sum(), "product": lambda: matrix @ vector}
    return matrix.nbytes / min(take_turns(ways, device, rounds=15).values())


def peers(config: GPTConfig, device: str) -> tuple[GPT, Any]:
    """Our model and transformers', with the same weights."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    ours = GPT(config).to(device)
    with tempfile.TemporaryDirectory() as directory:
        ours.save_pretrained(directory)
        theirs: Any = transformers.Qwen3ForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="sdpa"
        )
    return ours, theirs.to(device)


class Table:
    """A Markdown table, printed row by row as the figures come."""

    def __init__(self, title: str):
        print(f"\n### {title}\n", flush=True)
        self.empty = True

    def append(self, row: dict) -> None:
        if self.empty:
            print("| " + " | ".join(row) + " |")
            print("| " + " | ".join("---" for _ in row) + " |")
            self.empty = False
        print("| " + " | ".join(str(value) for value in row.values()) + " |", flush=True)


# ---------------------------------------------------------------------------------- training


def bench_train(device: str, rounds: int) -> None:
    """Steps at (8, 256) and (2, 1024), a forward at (1, 2048), eager and compiled."""
    names = ["64M", "124M"] if device.startswith("cuda") else ["5M"]
    rows = Table(f"Training on {device_name(device)}")
    for name in names:
        peaks = {dtype: matrix_peak(device, dtype) for dtype in DTYPES.values()}
        for compiled in (False, True):
            for dtype_name, dtype in DTYPES.items():
                torch._dynamo.reset()
                ours, theirs = peers(SHAPES[name], device)
                step_ours = training_step(ours, dtype, device, compiled)
                step_theirs = training_step(theirs, dtype, device, compiled)
                for B, T, what in ((8, 256, "step"), (2, 1024, "step"), (1, 2048, "forward")):
                    ids = torch.randint(0, SHAPES[name].vocab_size, (B, T), device=device)
                    train = what == "step"
                    seconds = take_turns(
                        {
                            "ours": lambda f=step_ours, ids=ids, t=train: f(ids, t),
                            "theirs": lambda f=step_theirs, ids=ids, t=train: f(ids, t),
                        },
                        device,
                        rounds,
                    )
                    flops = forward_flops(SHAPES[name], B, T) * (3 if train else 1)
                    rows.append(
                        {
                            "model": name,
                            "what": f"{what} ({B}, {T})",
                            "dtype": dtype_name,
                            "mode": "compiled" if compiled else "eager",
                            "tokens/s": f"{B * T / seconds['ours']:,.0f}",
                            "transformers": f"{B * T / seconds['theirs']:,.0f}",
                            "ratio": f"{seconds['theirs'] / seconds['ours']:.2f}",
                            "share of peak": f"{flops / seconds['ours'] / peaks[dtype]:.2f}",
                            "theirs": f"{flops / seconds['theirs'] / peaks[dtype]:.2f}",
                        }
                    )


def training_step(model: torch.nn.Module, dtype: torch.dtype, device: str, compiled: bool):
    """A function (ids, train) that runs one whole step, or one forward without gradients."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    call = torch.compile(model) if compiled else model
    autocast = torch.autocast(device.split(":")[0], dtype, enabled=dtype != torch.float32)
    is_ours = isinstance(model, GPT)

    def run(ids: torch.Tensor, train: bool) -> None:
        if not train:
            with torch.no_grad(), autocast:
                call(ids)
            return
        with autocast:
            if is_ours:
                loss_sum, targets = call(ids, labels=ids)
                loss = loss_sum / targets
            else:
                loss = call(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


# ------------------------------------------------------------------------------------- the loop


def bench_loop(config_file: str, steps: int = 100) -> None:
    """What train.py's loop costs besides the model: each batch of a recipe makes two steps, one by
    train.take_step and one by a bare loop (forward, backward, clipping, optimizer), taking turns
    at going first."""
    with tempfile.TemporaryDirectory() as directory:
        options = [f"--out_dir={directory}/run", "--dtype=fp32", "--compile=False"]
        never = [f"--{name}=1000000" for name in ("eval_every", "save_every")]
        config = parse_config(TrainConfig, [config_file, f"--max_steps={steps}", *options, *never])
        config.eval_batches, config.sample_tokens = 1, 0
        take_step = train.take_step
        bare: list[float] = []
        ours: list[float] = []
        between: list[float] = []
        ended = None

        def both(forward, optimizers, scaler, window, machine, config, stop=None):
            nonlocal ended
            if ended is not None:
                between.append(time.perf_counter() - ended)
            for way in ("ours", "bare") if len(ours) % 2 else ("bare", "ours"):
                started = time.perf_counter()
                if way == "bare":
                    bare_step(forward, optimizers, window, config)
                    bare.append(time.perf_counter() - started)
                else:
                    step = take_step(forward, optimizers, scaler, window, machine, config, stop)
                    ours.append(time.perf_counter() - started)
            ended = time.perf_counter()
            return step

        train.take_step = both
        train.train(config)
        train.take_step = take_step
    more = statistics.median(o - b for o, b in zip(ours[5:], bare[5:], strict=True))
    by_bare, rest = statistics.median(bare[5:]), statistics.median(between[5:])
    rows = Table(f"The loop's cost in {config_file} on {device_name('cpu')}, milliseconds a step")
    rows.append(
        {
            "bare loop": f"{by_bare * 1e3:.2f}",
            "take_step": f"{more * 1e3:+.2f}",
            "between steps": f"{rest * 1e3:+.2f}",
            "overhead": f"{(more + rest) / by_bare:.1%}",
        }
    )


def bare_step(model: Any, optimizers: list, window: list[dict], config: TrainConfig) -> None:
    for batch in window:
        loss_sum, targets = model(batch["input_ids"], labels=batch["labels"])
        (loss_sum / targets / len(window)).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    loss_sum.item(), norm.item()  # what any loop would log


# -------------------------------------------------------------------------------------- loss


def bench_loss(device: str) -> None:
    """Qwen3-0.6B's head: 4,096 positions, hidden 1,024, 151,936 ids; each in its own process."""
    rows = Table(f"Loss at V = 151,936 on {device_name(device)}, forward + backward")
    for dtype in DTYPES:
        results = {}
        for way in ("plain", "ours"):
            arguments = [sys.executable, __file__, "one_loss", f"--way={way}", f"--dtype={dtype}"]
            done = subprocess.run(
                [*arguments, f"--device={device}"], stdout=subprocess.PIPE, text=True
            )
            if done.returncode:
                sys.exit(1)  # it has said why
            results[way] = json.loads(done.stdout.splitlines()[-1])
        plain, ours = results["plain"], results["ours"]
        rows.append(
            {
                "dtype": "fp32" if dtype == "fp32" else "bf16 autocast",
                "plain GiB": f"{plain['peak'] / 2**30:.2f}",
                "ours GiB": f"{ours['peak'] / 2**30:.2f}",
                "memory": f"{ours['peak'] / plain['peak']:.2f}",
                "plain s": f"{plain['seconds']:.1f}",
                "ours s": f"{ours['seconds']:.1f}",
                "time": f"{ours['seconds'] / plain['seconds']:.2f}",
                "loss differs by": f"{abs(ours['loss'] - plain['loss']):.1e}",
            }
        )


def one_loss(way: str, dtype: str, device: str) -> None:
    """Run one way in this process; print its peak memory above the inputs, and its time."""
    torch.manual_seed(0)
    N, C, V = 4096, 1024, 151_936
    hidden = torch.randn(N, C, device=device, requires_grad=True)
    weight = (torch.randn(V, C, device=device) * 0.02).requires_grad_()
    targets = torch.randint(0, V, (N,), device=device)
    base = memory_now(device)
    start = time.perf_counter()
    enabled = dtype != "fp32"
    with torch.autocast(device.split(":")[0], DTYPES[dtype], enabled=enabled):
        if way == "ours":
            loss = LinearCrossEntropy.apply(hidden, weight, targets, None, True)
        else:
            logits = F.linear(hidden, weight)
            loss = F.cross_entropy(logits.float(), targets, reduction="sum")
    loss.backward()
    wait(device)
    seconds = time.perf_counter() - start
    peak = memory_peak(device) - base
    print(json.dumps({"peak": peak, "seconds": seconds, "loss": loss.item() / N}))


def memory_now(device: str) -> int:
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    return proc_status("VmRSS")


def memory_peak(device: str) -> int:
    return torch.cuda.max_memory_allocated() if device.startswith("cuda") else proc_status("VmHWM")


def proc_status(field: str) -> int:
    """Bytes, from Linux's /proc/self/status."""
    if not os.path.exists("/proc/self/status"):
        raise UserError("bench.py loss reads the memory of a process from /proc, which Linux has")
    with open("/proc/self/status", encoding="utf-8") as file:
        line = next(line for line in file if line.startswith(field))
    return int(line.split()[1]) * 1024


# ------------------------------------------------------------------------------------ decode


def bench_decode(device: str, rounds: int, checkpoint: str | None) -> None:
    """MiniMind-3's shape: a prompt, then 64 tokens; every time is from whole calls of generate.

    A step must read the weights once and the visible cache once: the bytes in the table. They over
    the bandwidth, which is measured in each round with as many bytes, are the floor, and "share" is
    floor / time. On CUDA the compiled call makes its first 32 tokens by the plain step.
    """
    config = SHAPES["64M"]
    # As in sample.py, and for transformers too: before this process has any tensor.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    rows = Table(f"Generation of the 64M shape on {device_name(device)}")
    for dtype_name in ("fp32", "bf16", "int8"):
        torch.compiler.reset()
        dtype = DTYPES.get(dtype_name, torch.bfloat16)
        ours, theirs = peers(config, device)
        ours, theirs = ours.to(dtype).eval(), theirs.to(dtype).eval()
        prepare_weights(ours, int8=dtype_name == "int8")
        why_not = decode.load() if device == "cpu" else None
        if why_not is not None:
            raise UserError(f"there is no compiled step to measure: {why_not}")
        weights = sum(linear_weights(ours))
        per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        for B, context in ((1, 128), (1, 1024), (1, 4096), (8, 128), (8, 1024), (8, 4096)):
            prompts = torch.randint(3, config.vocab_size, (B, context)).tolist()
            read = weights + B * context * per_token * dtype.itemsize
            turns = rounds if B * context <= 8192 else 1
            ways: dict[str, Callable[[], list[float]]] = {
                "plain": partial(time_generate, ours, prompts, False),
                "compiled": partial(time_generate, ours, prompts, True),
                "dynamic": partial(time_transformers, theirs, prompts, None),
                "static": partial(time_transformers, theirs, prompts, "static"),
            }
            first: dict[str, list[float]] = defaultdict(list)
            steps: dict[str, list[float]] = defaultdict(list)
            bandwidths: list[float] = []
            for _ in range(turns):
                bandwidths.append(read_bandwidth(device, read))
                for name, way in ways.items():
                    times = way()
                    first[name].append(times[0])
                    # On CUDA from behind the one that compiles.
                    is_captured = name == "compiled" and device != "cpu"
                    steps[name] += times[COMPILE_AFTER + 2 if is_captured else 5 :]
            prefill = {name: statistics.median(times) for name, times in first.items()}
            step = {name: statistics.median(times) for name, times in steps.items()}
            best = min(step["dynamic"], step["static"])
            bandwidth = statistics.median(bandwidths)
            floor = read / bandwidth
            rows.append(
                {
                    "weights": dtype_name,
                    "batch": B,
                    "context": context,
                    "MB a step": f"{read / 1e6:,.0f}",
                    "GFLOP": f"{decode_flops(config, B, context) / 1e9:.2f}",
                    "GB/s": f"{bandwidth / 1e9:.0f}",
                    "plain tokens/s": f"{B / step['plain']:,.0f}",
                    "share ": f"{floor / step['plain']:.2f}",
                    "compiled": f"{B / step['compiled']:,.0f}",
                    "share": f"{floor / step['compiled']:.2f}",
                    "transformers": f"{B / step['dynamic']:,.0f}",
                    "static": f"{B / step['static']:,.0f}",
                    "compiled / best": f"{best / step['compiled']:.2f}",
                    "prefill tokens/s": f"{B * context / prefill['compiled']:,.0f}",
                    "prefill / theirs": f"{prefill['dynamic'] / prefill['compiled']:.2f}",
                }
            )
        check_same_tokens(ours, config)
    say_loss_of_int8(checkpoint)


def say_loss_of_int8(checkpoint: str | None) -> None:
    """Validation loss of a run of configs/tiny.py in fp32, bf16 and int8."""
    if checkpoint is None:
        print("\nfor what int8 costs in loss, name a run of configs/tiny.py: --checkpoint=out/tiny")
        return
    for name in ("fp32", "bf16", "int8"):
        model, tokenizer, _ = load_model(checkpoint, "cpu", DTYPES.get(name, torch.bfloat16))
        if name == "int8":
            quantize_int8(model)
        loss, _ = story_loss(model, tokenizer, WORLD)
        print(f"validation loss of {checkpoint} in {name}: {loss:.4f}", flush=True)


def linear_weights(model: torch.nn.Module) -> Iterator[int]:
    """Bytes of what one token must read: each matrix product's weights, the head's among them."""
    for module in model.modules():
        if isinstance(module, Linear):
            yield module.weight.nbytes
        elif isinstance(module, Int8Linear):
            yield module.rounded.nbytes


def decode_flops(config: GPTConfig, B: int, S: int) -> float:
    """2 per weight, and 4 * H * D for each of S keys, a token and row (Tq = 1, Tk = S)."""
    per_key = 4 * config.num_attention_heads * config.head_dim * config.num_hidden_layers
    return forward_flops(config, B, 1) + B * (S - 1) * per_key


def time_generate(model: GPT, prompts: list[list[int]], compile: bool) -> list[float]:
    """Seconds to the first token, and from each to the next; 64 tokens, greedy."""
    times = [time.perf_counter()]
    for _ in generate_stream(model, prompts, 64, temperature=0.0, compile=compile):
        times.append(time.perf_counter())
    return [after - before for before, after in pairwise(times)]


def time_transformers(model: Any, prompts: list[list[int]], cache: str | None) -> list[float]:
    """The same of transformers' generate, 32 tokens."""
    ids = torch.tensor(prompts, device=model.device)
    times = [time.perf_counter()]

    def note_time(*_, **__):
        times.append(time.perf_counter())
        return torch.zeros(len(prompts), dtype=torch.bool, device=model.device)

    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=32,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        cache_implementation=cache,
        stopping_criteria=[note_time],
    )
    return [after - before for before, after in pairwise(times)]


def check_same_tokens(model: GPT, config: GPTConfig) -> None:
    """Say whether the compiled path gives the tokens of the plain one."""
    prompts = torch.randint(3, config.vocab_size, (1, 100)).tolist()
    compiled = generate(model, prompts, 100, temperature=0.0, compile=True)[0]
    plain = generate(model, prompts, 100, temperature=0.0)[0]
    same = sum(a == b for a, b in zip(compiled, plain, strict=True))
    print(f"\ncompiled and plain agree in {same} of 100 greedy tokens", flush=True)


# ----------------------------------------------------------------------------------- the end


def device_name(device: str) -> str:
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(torch.device(device))
    return f"{torch.get_num_threads()} CPU threads"


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["train", "loop", "loss", "decode", "all", "one_loss"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=5, help="calls that each median is taken of")
    parser.add_argument("--checkpoint", help="decode: a run of configs/tiny.py, for int8's loss")
    parser.add_argument("--config", default="configs/tiny.py", help="loop: the recipe")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--dtype", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    if options.rounds < 1:
        raise UserError(f"--rounds={options.rounds}, but a median needs at least 1")
    device = str(choose_device(options.device, "auto")[0])
    if options.checkpoint is not None:  # before the long part: a mistake shows at once
        find_checkpoint(options.checkpoint)
    if options.what == "one_loss":
        one_loss(options.way, options.dtype, device)
    if options.what == "train":
        bench_train(device, options.rounds)
    if options.what == "loop":
        bench_loop(options.config)
    if options.what == "loss":
        bench_loss(device)
    if options.what == "decode":
        bench_decode(device, options.rounds, options.checkpoint)
    if options.what == "all":  # each in a process of its own, with its own settings of memory
        flags = [argument for argument in arguments if argument != "all"]
        for what in ("train", "loop", "loss", "decode"):
            if subprocess.run([sys.executable, __file__, what, *flags]).returncode:
                sys.exit(1)


if __name__ == "__main__":
    run_program(main)
