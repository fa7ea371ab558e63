"""Generation: a cached, batched loop, the text that comes out of it, and the command line.

Read it in this order:
  1. process_logits, pick        from logits to one token a row
  2. generate_stream, generate   one prefill, then one token per row and step
  3. Completion, Writer          tokens become text: whole characters, stop strings, speed
  4. main                        the command line: a prompt, a file of prompts, or chat.py

Letters in shape comments: B rows, T tokens, V vocab_size.
"""

import codecs
import contextlib
import importlib.util
import json
import os
import random
import secrets
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import decode
from chat import note, talk
from checkpoint import load_model
from config import SampleConfig, UserError, choose_device, parse_config, run_program
from data.sources import RowError, chat_messages
from data.tokenizer import Tokenizer
from files import DEEPEST_JSON, is_deeper, read_json, shown
from kv_cache import KVCache
from model import GPT
from pretrained import physical_memory
from quantize import quantize_int8

NEVER = float("-inf")
COMPILE_AFTER = 32  # tokens that are made before the decode step is compiled
LONG_ANSWER = 1000  # tokens, for which compiling pays even the first time
LONGEST_NAME = 255  # bytes, of a file
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")

# ------------------------------------------------------------------- from logits to a token


def process_logits(
    logits: Tensor,
    bias: Tensor | None = None,
    seen: Tensor | None = None,
    *,
    repetition_penalty: float = 1.0,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> Tensor:
    """Scores (B, V) fp32, -inf for what must not come; their softmax is what to draw from.

    logits (B, V); bias (V,) is added, -inf forbids; seen (B, V) bool is True for the ids in the
    row's prompt or output. In this order:

    repetition_penalty  divides a positive score of a seen id, multiplies a negative one; 1: off
                        (Keskar et al. 2019, section 4.1, signed as in transformers)
    temperature         divides; 0: greedy, and as no filter removes the likeliest, none is applied
    top_k               keeps the k likeliest, and what ties with the last; 0, V and above: off
    top_p               keeps the likeliest until they hold this probability, the one that crosses
                        it included, of equals the lower id; 1: off; 0: the likeliest alone
    min_p               keeps what has this share of the likeliest's probability; 0: off
    """
    scores = logits.float()
    if bias is not None:
        scores = scores + bias
    if repetition_penalty != 1:
        quoted = torch.where(scores < 0, scores * repetition_penalty, scores / repetition_penalty)
        scores = torch.where(seen, quoted, scores)
    if temperature == 0:
        return scores
    # Relative to the likeliest, so that a temperature near 0 cannot overflow.
    scores = (scores - scores.amax(dim=-1, keepdim=True)) / max(temperature, 1e-30)
    if 0 < top_k < scores.shape[-1]:
        last_kept = scores.topk(top_k, dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < last_kept, NEVER)
    if top_p < 1:
        ordered, ids = scores.sort(dim=-1, descending=True, stable=True)
        likelier = ordered.softmax(dim=-1).cumsum(dim=-1).roll(1, dims=-1)  # sum over those before
        left_out = likelier >= top_p
        left_out[:, 0] = False
        scores = scores.masked_fill(torch.zeros_like(left_out).scatter(1, ids, left_out), NEVER)
    if min_p > 0:
        probabilities = scores.softmax(dim=-1)
        least = min_p * probabilities.amax(dim=-1, keepdim=True)
        scores = scores.masked_fill(probabilities < least, NEVER)
    return scores


def pick(scores: Tensor, generators: list[torch.Generator] | None) -> Tensor:
    """One id a row, (B,) int64: drawn, each row by its own generator, or the likeliest (None).

    If the e_i are exponentially distributed, argmax p_i / e_i is i with probability p_i. Unlike
    torch.multinomial that lets each row have its own noise, so that a row's text does not depend on
    its neighbours, and it never makes the host wait. -1 for a row with a score that is no number.
    """
    broken = scores.isnan().any(dim=-1)  # (B,)
    if generators is None:
        return scores.argmax(dim=-1).masked_fill(broken, -1)
    noise = torch.empty_like(scores)
    for row, generator in enumerate(generators):
        noise[row].exponential_(generator=generator)
    smallest = torch.finfo(noise.dtype).tiny  # 0 / 0 would be picked
    ids = (scores.softmax(dim=-1) / noise.clamp(min=smallest)).argmax(dim=-1)
    return ids.masked_fill(broken, -1)


def row_generator(seed: int, prompt: int, sample: int, device: torch.device) -> torch.Generator:
    """The noise of one row: a function of the seed and of the row's place, of nothing else."""
    row_seed = random.Random(f"{seed} {prompt} {sample}").getrandbits(63)
    return torch.Generator(device).manual_seed(row_seed)


# ---------------------------------------------------------------------------------- the loop


@torch.inference_mode()
def generate_stream(
    model: GPT,
    prompts: list[list[int]],
    max_new_tokens: int,
    *,
    num_samples: int = 1,
    seed: int = 0,
    logit_bias: dict[int, float] | None = None,
    forbidden_ids: Iterable[int] = (),
    stop_ids: Iterable[int] = (),
    stop_when: Callable[[int, int], bool] | None = None,
    compile: bool = False,
    cache: KVCache | None = None,
    **sampling: Any,
) -> Generator[list[tuple[int, int]]]:
    """Continue prompts of any lengths; yield each step's (row, id) pairs as they are made.

    Row p * num_samples + s is sample s of prompt p. A row ends with the first of: an id of
    stop_ids, which is the last one yielded; stop_when(row, id) being True, which is asked about
    every other id; max_new_tokens; the context limit. Of a context of N positions a prompt of n
    tokens leaves N - n + 1 new ones, since the last one is never fed back: a prompt that fills the
    context still gets one.

    sampling: temperature (default 1), top_k, top_p, min_p, repetition_penalty, as in
    process_logits. logit_bias is added to the scores of its ids; forbidden_ids never come. What is
    drawn depends on the seed and the row's place alone, not on the other rows.

    compile: take the compiled decode step. On a CPU that is decode.cpp's, if it is loaded and made
    for this model and batch (decode.step_of). On CUDA torch.compile's, but not before COMPILE_AFTER
    tokens: an answer that ends sooner does not wait for it; rows that have ended then stay in the
    batch, since another batch size would be another compilation.

    cache: for one prompt and one sample, a cache that holds the prompt's beginning, which is then
    not computed again. At the end it holds the prompt and all new tokens but the last. None: one is
    made to measure.

    Runs in eval mode and restores the mode at the end. Raises UserError (a ValueError) at the first
    step: for options out of range, a prompt that is empty, too long or outside the vocabulary, and
    for a cache that memory does not hold; at any step for scores that are NaN.
    """
    check_options(max_new_tokens=max_new_tokens, num_samples=num_samples, **sampling)
    check_prompts(model, prompts)
    if not prompts:
        return
    device, V = model.model.embed_tokens.weight.device, model.config.vocab_size
    captured = compile and device.type == "cuda"  # the step becomes a graph, of fixed shapes
    limit, stop_ids = model.config.max_position_embeddings, frozenset(stop_ids)
    prompt_of = [p for p in range(len(prompts)) for _ in range(num_samples)]  # by row
    left = [min(max_new_tokens, limit + 1 - len(prompts[p])) for p in prompt_of]  # tokens, by row

    input_ids, mask = left_padded(prompts, device)  # (prompts, T)
    needed = input_ids.shape[1] + max(left) - 1
    if cache is None:
        # On a GPU one of a few lengths: the next request may then find its step compiled.
        length = rounded_up(needed) if captured else needed
        cache = make_cache(model, len(prompts), length, num_samples)
    elif len(left) > 1 or cache.length >= input_ids.shape[1] or needed > cache.max_length:
        raise ValueError(
            f"a cache that holds {cache.length} of at most {cache.max_length} tokens cannot serve "
            f"{len(left)} rows of {input_ids.shape[1]} tokens and up to {max(left)} new ones"
        )
    bias = bias_of(logit_bias or {}, forbidden_ids, V, device)
    seen = generators = None
    if sampling.get("repetition_penalty", 1) != 1:
        seen = torch.zeros(len(left), V, dtype=torch.bool)
        for row, p in enumerate(prompt_of):
            seen[row, prompts[p]] = True
        seen = seen.to(device)  # (B, V)
    if sampling.get("temperature", 1) > 0:
        places = [(p, row % num_samples) for row, p in enumerate(prompt_of)]
        generators = [row_generator(seed, p, sample, device) for p, sample in places]
    was_training = model.training
    model.eval()
    try:
        new_ids = input_ids[:, cache.length :]
        logits = model(new_ids, attention_mask=mask, cache=cache, logits_to_keep=1)[:, -1]  # (B, V)
        if num_samples > 1:  # one prefill for all samples of a prompt
            copies = torch.tensor(prompt_of, device=device)
            cache.select_rows(copies)
            logits = logits[copies]
        steps, step = 0, first_step(model, cache, compile)
        batch = list(range(len(left)))  # the rows that are in the batch
        while True:
            ids = pick(process_logits(logits, bias, seen, **sampling), generators)  # (B,)
            new = ids.tolist()  # the one place where the host waits for the device
            if min(new) < 0:
                raise UserError(
                    "the model's scores are not numbers: its weights are damaged, or too large for "
                    f"{logits.dtype} (--dtype=fp32 or bf16 bears larger ones)"
                )
            if seen is not None:
                seen.scatter_(1, ids[:, None], True)
            made = [(row, id) for row, id in zip(batch, new, strict=True) if left[row]]
            for row, id in made:
                stopped = id in stop_ids or (stop_when is not None and stop_when(row, id))
                left[row] = 0 if stopped else left[row] - 1
            yield made
            alive = [place for place, row in enumerate(batch) if left[row]]
            if not alive:
                return
            if len(alive) <= len(batch) // 2 and not (captured and steps >= COMPILE_AFTER):
                # To drop rows costs a copy of the cache: worth it once half of them have ended.
                keep = torch.tensor(alive, device=device)
                cache.select_rows(keep)
                ids = ids[keep]
                seen = seen[keep] if seen is not None else None
                generators = [generators[place] for place in alive] if generators else None
                batch = [batch[place] for place in alive]
                step = first_step(model, cache, compile)
            steps += 1
            if captured and steps == COMPILE_AFTER:
                step = compiled_step(model, cache)
            logits = step(ids[:, None])[:, -1]
    finally:
        model.train(was_training)


def generate(
    model: GPT, prompts: list[list[int]], max_new_tokens: int, *, num_samples: int = 1, **options
) -> list[list[int]]:
    """The new ids of each row, a stop id included; row p * num_samples + s is sample s of prompt p.

    Options and errors are those of generate_stream.
    """
    new: list[list[int]] = [[] for _ in range(len(prompts) * num_samples)]
    for made in generate_stream(model, prompts, max_new_tokens, num_samples=num_samples, **options):
        for row, id in made:
            new[row].append(id)
    return new


def first_step(model: GPT, cache: KVCache, compile: bool) -> Callable[[Tensor], Tensor]:
    """From the last ids (B, 1) to the next logits (B, 1, V): by decode.cpp, or the plain step."""
    step = decode.step_of(model, cache) if compile else None
    return step or (lambda ids: model(ids, cache=cache))


def compiled_step(model: GPT, cache: KVCache) -> Callable[[Tensor], Tensor]:
    """The same on a GPU by torch.compile, for all positions.

    A graph has fixed shapes: the step reads the smallest of a few capacities that holds the row, is
    compiled once for each, and captured.
    """
    device = cache.real.device
    compiled = torch.compile(model.decode_step, fullgraph=True, dynamic=False)
    call = CudaGraphs(compiled) if device.type == "cuda" else compiled
    slot = torch.tensor([cache.length], device=device)

    def step(ids: Tensor) -> Tensor:
        length = cache.length + 1
        logits = call(ids, cache, slot, cache.capacity(length))
        slot.add_(1)
        cache.length = length
        return logits

    return step


class CudaGraphs:
    """A decode step that is launched as one graph, not kernel by kernel: one for each num_keys."""

    def __init__(self, call: Callable[..., Tensor]):
        self.call = call
        self.warm: set[int] = set()
        self.graphs: dict[int, tuple] = {}

    def __call__(self, ids: Tensor, cache: KVCache, slot: Tensor, num_keys: int) -> Tensor:
        if num_keys not in self.warm:  # the first call compiles and cannot be captured
            self.warm.add(num_keys)
            return self.call(ids, cache, slot, num_keys)
        if num_keys not in self.graphs:
            graph, graph_ids = torch.cuda.CUDAGraph(), ids.clone()
            with torch.cuda.graph(graph):  # records, and runs nothing
                logits = self.call(graph_ids, cache, slot, num_keys)
            self.graphs[num_keys] = graph, graph_ids, logits
        graph, graph_ids, logits = self.graphs[num_keys]
        graph_ids.copy_(ids)
        graph.replay()
        return logits


def left_padded(prompts: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor | None]:
    """ids (B, T) with every prompt at the right end, and the mask (B, T), None if none is needed.

    At the right end, because the next token of every row then goes to the same slot.
    """
    T = max(map(len, prompts))
    ids = torch.tensor([[0] * (T - len(prompt)) + list(prompt) for prompt in prompts])
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    mask = torch.arange(T) >= T - lengths[:, None]
    return ids.to(device), None if bool(mask.all()) else mask.to(device)


def bias_of(
    logit_bias: dict[int, float], forbidden_ids: Iterable[int], V: int, device: torch.device
) -> Tensor | None:
    """What to add to the logits, (V,) fp32, -inf for what must not come; None: nothing."""
    values = logit_bias | dict.fromkeys(forbidden_ids, NEVER)
    for id, value in values.items():
        if not (0 <= id < V and value < float("inf")):
            raise UserError(f"logit_bias {value} of id {id}: ids are 0 to {V - 1}, biases finite")
    if list(values.values()).count(NEVER) == V:
        raise UserError(f"all {V} ids are forbidden: there is nothing to generate")
    if not values:
        return None
    bias = torch.zeros(V)
    bias[list(values)] = torch.tensor(list(values.values()))
    return bias.to(device)


def make_cache(model: GPT, rows: int, length: int, copies: int = 1) -> KVCache:
    """A cache like the weights; UserError with its bytes if memory does not hold `copies` of it."""
    config, weight = model.config, model.model.embed_tokens.weight
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    size = per_token * weight.element_size() * rows * copies * length  # bytes
    # A CPU promises memory that it does not have, and then kills who believed it.
    there = physical_memory() if weight.device.type == "cpu" else size
    try:
        if size > there:
            raise MemoryError
        with torch.inference_mode():  # made outside of it, it would be compiled for once more
            return KVCache(config, rows, length, device=weight.device, dtype=weight.dtype)
    except (RuntimeError, MemoryError) as error:
        raise UserError(
            f"the cache of {rows * copies} rows of {length} tokens needs {size / 2**30:,.1f} GiB, "
            f"which {weight.device} does not have: take fewer prompts, samples or new tokens"
        ) from error


def rounded_up(length: int) -> int:
    """The first of 256, 512, 1024, ... that holds `length`."""
    return max(256, 1 << (length - 1).bit_length())


def check_options(**options: float) -> None:
    """Refuse numbers outside their range, NaN too, by name. Raises UserError."""
    infinity = float("inf")
    ranges = {
        "max_new_tokens": (1, infinity),
        "num_samples": (1, 65536),  # each is a row, in lists that are made before any check
        "temperature": (0, 1e6),
        "top_k": (0, infinity),
        "top_p": (0, 1),
        "min_p": (0, 1),
        "repetition_penalty": (1e-6, 1e6),
    }
    for name, value in options.items():
        if name not in ranges:
            raise TypeError(f"there is no option {name}")
        least, most = ranges[name]
        if not least <= value <= most:
            rule = f"at least {least}" if most == infinity else f"from {least:g} to {most:g}"
            raise UserError(f"{name} is {value}, but it must be {rule}")


def check_prompts(model: GPT, prompts: list[list[int]]) -> None:
    """Refuse prompts that cannot be continued, by number. Raises UserError."""
    limit, V = model.config.max_position_embeddings, model.config.vocab_size
    for number, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise UserError(f"prompt {number} is empty: there must be a token to start from")
        if len(prompt) > limit:
            raise UserError(
                f"prompt {number} has {len(prompt)} tokens, but the model's context is only "
                f"{limit}; shorten it"
            )
        if not 0 <= min(prompt) <= max(prompt) < V:
            outside = next(id for id in prompt if not 0 <= id < V)
            raise UserError(f"prompt {number} has the id {outside}, but ids are 0 to {V - 1}")


# ----------------------------------------------------------------------- tokens become text


class Completion:
    """One row as text: whole characters only, cut before a stop string, and why it ended."""

    def __init__(self, writer: "Writer", prompt: list[int]):
        self.writer = writer
        self.ids: list[int] = []
        self.text = ""  # what is certain: it only grows
        self.stop_reason = ""  # "" while it goes on
        # Positions that the context has left, and one: the last token is not fed back.
        self.room = writer.model.config.max_position_embeddings + 1 - len(prompt)
        self.decoder = codecs.getincrementaldecoder("utf-8")(
            "replace"
        )  # waits for whole characters
        self.held = ""  # text that may yet turn out to be the beginning of a stop string

    def push(self, id: int) -> bool:
        """Take the next id; True if the row ends here."""
        self.ids.append(id)
        if id in self.writer.stop_ids:
            return self.stop("end of text")
        new_bytes = self.writer.tokenizer.decode_bytes([id], skip_special=True)
        self.held += self.decoder.decode(new_bytes)
        found = [self.held.find(stop) for stop in self.writer.config.stop if stop in self.held]
        if found:
            self.held = self.held[: min(found)]
            return self.stop("stop string")
        if len(self.ids) == self.writer.config.max_new_tokens:
            return self.stop("max_new_tokens")
        if len(self.ids) == self.room:
            return self.stop("the context is full")
        self.release(len(self.held) - self.doubtful())
        return False

    def stop(self, reason: str) -> bool:
        """End the row. What was held is text after all; half a character at the end is not."""
        self.release(len(self.held))
        self.stop_reason = reason
        return True

    def release(self, characters: int) -> None:
        self.text += self.held[:characters]
        self.held = self.held[characters:]

    def doubtful(self) -> int:
        """How many characters at the end of `held` could begin a stop string."""
        begins = (stop[:n] for stop in self.writer.config.stop for n in range(1, len(stop)))
        return max((len(begin) for begin in begins if self.held.endswith(begin)), default=0)


@dataclass
class Writer:
    """A model with all that it needs to write text."""

    model: GPT
    tokenizer: Tokenizer
    config: SampleConfig  # with a seed
    stop_ids: list[int]
    forbidden_ids: list[int]

    def write(
        self,
        prompts: list[list[int]],
        seed: int,
        leads: list[str] | None = None,
        cache: KVCache | None = None,
    ) -> tuple[list[Completion], str]:
        """Continue prompts; returns the completions and a sentence: the speed, and why they ended.

        With leads, prints every row behind its lead, as it comes. Ctrl-C ends all rows early.
        """
        config = self.config
        rows = [Completion(self, prompt) for prompt in prompts for _ in range(config.num_samples)]
        stream = generate_stream(
            self.model,
            prompts,
            config.max_new_tokens,
            num_samples=config.num_samples,
            seed=seed,
            forbidden_ids=self.forbidden_ids,
            stop_when=lambda row, id: rows[row].push(id),
            compile=config.compile,
            cache=cache,
            **{name: getattr(config, name) for name in SAMPLING},
        )
        printer = Printer(leads) if leads is not None else lambda rows: None
        prefilled = sum(map(len, prompts)) - (cache.length if cache is not None else 0)
        start = prefill_end = time.perf_counter()
        try:
            with contextlib.closing(stream):
                for step, _ in enumerate(stream):
                    if step == 0:
                        prefill_end = time.perf_counter()
                    printer(rows)
        except KeyboardInterrupt:
            for row in rows:
                if not row.stop_reason:
                    row.stop("interrupted")
            printer(rows)
        report = f"prefill {speed(prefilled, prefill_end - start)}"
        decoded = sum(len(row.ids[1:]) for row in rows)  # the first of each came from the prefill
        if decoded > 0:
            report += f"; decode {speed(decoded, time.perf_counter() - prefill_end)}"
        counts = Counter(row.stop_reason for row in rows)
        reasons = [f"{n} x {reason}" if len(rows) > 1 else reason for reason, n in counts.items()]
        return rows, f"{report}; ended: {', '.join(reasons)}"

    @torch.inference_mode()
    def prepare_cache(self, cache: KVCache | None, keep: int, prompt_length: int) -> KVCache:
        """A cache with the first `keep` tokens of the given one, and room for prompt and answer.

        One that is too small is copied into one of twice the size or more, so that a long
        conversation copies each token once or twice, and a short one takes little memory.
        """
        limit = self.model.config.max_position_embeddings
        needed = min(limit, prompt_length + self.config.max_new_tokens - 1)
        if cache is not None:
            cache.truncate(keep)
            if needed <= cache.max_length:
                return cache
        larger = make_cache(self.model, 1, min(rounded_up(needed), limit))
        if cache is not None:
            cache.copy_to(larger)
        return larger


def speed(tokens: int, seconds: float) -> str:
    return f"{tokens} tokens, {tokens / max(seconds, 1e-9):,.0f} tokens/s"


class Printer:
    """Prints rows one after the other though all are being written: the first one streams, and the
    next goes on from where it is by then."""

    def __init__(self, leads: list[str]):
        self.leads = leads  # what is printed before each row
        self.row = 0
        self.printed = -1  # characters of the current row; -1: not even its lead

    def __call__(self, rows: list[Completion]) -> None:
        while self.row < len(rows):
            row = rows[self.row]
            if self.printed < 0:
                gap = "\n\n" if self.row > 0 else ""
                print(gap + self.leads[self.row], end="")
                self.printed = 0
            print(row.text[self.printed :], end="", flush=True)
            self.printed = len(row.text)
            if not row.stop_reason:
                return
            self.row, self.printed = self.row + 1, -1


# -------------------------------------------------------------------------- the command line


def main(arguments: list[str]) -> None:
    warnings.filterwarnings("ignore")  # of libraries, about themselves; ours are errors
    config = parse_config(SampleConfig, arguments)
    refuse_contradictions(config)
    rows = [] if config.chat else read_rows(config)  # before the model: mistakes show at once
    # A CPU reads weights in huge pages a third faster. torch looks at this with its first tensor.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    dtype = "bf16" if config.dtype == "int8" else config.dtype
    device, dtype, why = choose_device(config.device, dtype)
    model, tokenizer, directory = load_model(config.checkpoint, device, dtype)
    int8 = config.dtype == "int8"
    prepare_weights(model, int8)
    name = "int8" if int8 else str(dtype).removeprefix("torch.")
    if config.seed is None:
        config.seed = random.SystemRandom().getrandbits(31)
    note(f"{directory} on {device} in {name} ({why}); seed {config.seed}")
    config.compile = decide_compile(config, device)
    unused = [*tokenizer.unused_ids, *range(tokenizer.vocab_size, model.config.vocab_size)]
    writer = Writer(model, tokenizer, config, stop_ids_of(directory, tokenizer), unused)
    if config.chat:
        if not tokenizer.has_chat_template:
            raise UserError(
                f"{directory} is a base model without a chat template: it continues text, with "
                "--prompt, but was not made to answer"
            )
        talk(writer, config.prompt)
    else:
        complete(writer, rows)


def prepare_weights(model: GPT, int8: bool) -> None:
    """Make a loaded model's weights ready for decoding: rounded, if int8; on a CPU in one block."""
    if int8:
        quantize_int8(model)
    if model.model.embed_tokens.weight.device.type == "cpu":
        decode.pack(model)


def decide_compile(config: SampleConfig, device: torch.device) -> bool:
    """Whether to take the compiled step: as asked, or if it pays; if there is a compiler."""
    if device.type == "cuda":
        long = config.max_new_tokens >= LONG_ANSWER
        wanted = long if config.compile is None else config.compile
        why_not = None if importlib.util.find_spec("triton") else "torch.compile needs triton"
    else:
        wanted = device.type == "cpu" and config.compile is not False
        why_not = decode.load(note) if wanted else None
    if wanted and why_not:
        note(f"going on with the plain step: {why_not}")
    if wanted and not why_not and device.type == "cuda":
        note(f"after {COMPILE_AFTER} tokens the decode step is compiled: that takes seconds")
    return wanted and not why_not


def complete(writer: Writer, rows: list[dict]) -> None:
    """Continue all rows in one batch: printed as they come, or, of a file, as JSONL at the end."""
    config, streams = writer.config, writer.config.prompts_file is None
    file = config.prompts_file
    prompts = [
        row_ids(writer.tokenizer, row, f"{file}, prompt {number}" if file else "the prompt")
        for number, row in enumerate(rows, start=1)
    ]
    leads = [rows[0]["prompt"]] * config.num_samples if streams else None
    completions, report = writer.write(prompts, config.seed, leads)
    lines = []
    for place, completion in enumerate(completions):
        line = rows[place // config.num_samples] | {
            "sample": place % config.num_samples,
            "completion": completion.text,
            "new_tokens": len(completion.ids),
            "stop_reason": completion.stop_reason,
        }
        lines.append(json.dumps(line, ensure_ascii=False) + "\n")
    if streams:
        print(flush=True)
    elif config.output is None:
        print("".join(lines), end="", flush=True)
    else:
        write_whole(Path(config.output), "".join(lines))
        note(f"{len(lines)} completions are in {config.output}")
    note(report)
    if any(completion.stop_reason == "interrupted" for completion in completions):
        sys.exit(130)  # as the shell has it for Ctrl-C


def refuse_contradictions(config: SampleConfig) -> None:
    """Options that are out of range or do not go together. Raises UserError."""
    counted = ("max_new_tokens", "num_samples", *SAMPLING)
    check_options(**{name: getattr(config, name) for name in counted})
    if "" in config.stop:
        raise UserError("--stop is empty, so there would be no text at all")
    if config.prompts_file is not None and (config.chat or config.prompt is not None):
        raise UserError("--prompts_file goes with neither --prompt nor --chat")
    if config.chat and config.num_samples > 1:
        raise UserError("--chat has one answer at a time: leave out --num_samples")
    if config.output is not None and config.prompts_file is None:
        raise UserError("--output is for the completions of --prompts_file; redirect stdout")
    if config.output is not None:
        output = Path(config.output).absolute()
        if not os.path.isdir(output.parent):  # unlike Path's, it bears names that no file can have
            raise UserError(f"--output={shown(config.output)}: that directory does not exist")
        if os.path.isdir(output):
            raise UserError(f"--output={config.output} is a directory, not a file")
        try:
            is_long = len(os.fsencode(output.name)) > LONGEST_NAME
        except UnicodeEncodeError as error:  # half a surrogate pair
            raise UserError(f"--output={shown(config.output)}: no file has that name") from error
        if is_long:
            raise UserError(f"--output={shown(config.output)}: that name is too long for a file")


def read_rows(config: SampleConfig) -> list[dict]:
    """What is to be continued: {"prompt"}, {"text"} or {"messages"} each. Raises UserError."""
    if config.prompts_file is None:
        return [{"prompt": read_prompt(config.prompt or "")}]
    rows = []
    for number, line in enumerate(read_text(config.prompts_file).split("\n"), start=1):
        if line.strip():
            where = f"{config.prompts_file}, line {number}"
            try:
                rows.append(json.loads(line))
            except (ValueError, RecursionError) as error:
                raise UserError(f"{where}: this is not JSON: {error}") from error
            check_row(rows[-1], where)
    if not rows:
        raise UserError(f"{config.prompts_file} holds no prompts")
    return rows


def check_row(row: Any, where: str) -> None:
    fields = ("prompt", "text", "messages")
    given = [name for name in fields if isinstance(row, dict) and name in row]
    if len(given) != 1:
        raise UserError(f'{where}: a row has one of "prompt", "text" and "messages"')
    if is_deeper(row, DEEPEST_JSON):
        raise UserError(f"{where}: nested deeper than {DEEPEST_JSON} levels")
    field, value = given[0], row[given[0]]
    if field != "messages":
        if not isinstance(value, str):
            raise UserError(f'{where}: "{field}" is {shown(value)}, not a text')
        return
    try:
        messages = chat_messages(row, "messages")
    except RowError as error:
        raise UserError(f"{where}: {error}") from error
    if messages[-1]["role"] == "assistant":
        raise UserError(f'{where}: the last of "messages" is an answer already')


def row_ids(tokenizer: Tokenizer, row: dict, where: str) -> list[int]:
    """The ids of a row that check_row passed, with what training put before a document or around a
    chat. UserError, naming where the row stands, for a chat that the tokenizer cannot write."""
    if "messages" not in row:
        return tokenizer.encode_prompt(row["prompt"] if "prompt" in row else row["text"])
    try:
        messages = chat_messages(row, "messages")
        return tokenizer.render_chat(messages, add_generation_prompt=True)[0]
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def read_prompt(prompt: str) -> str:
    """--prompt: a text, @file, or - for standard input; of both without the last line break."""
    if prompt == "-":
        return sys.stdin.read().removesuffix("\n")
    if prompt.startswith("@"):
        return read_text(prompt[1:]).removesuffix("\n")
    return prompt


def read_text(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not UTF-8 (byte {error.start})") from error
    except ValueError as error:  # a name with a null byte
        raise UserError(f"{file!r} cannot be read: {error}") from error


def write_whole(file: Path, text: str) -> None:
    """Write a file so that it is there whole or not at all. Raises UserError."""
    partial = file.with_name(f".{secrets.token_hex(8)}.partial")  # a name that is nobody's
    try:
        with open(partial, "x", encoding="utf-8", errors="replace") as opened:
            opened.write(text)
        partial.replace(file)
    except OSError as error:
        raise UserError(f"{file} cannot be written: {error.strerror}") from error
    finally:
        partial.unlink(missing_ok=True)  # of a failure, or of Ctrl-C


def stop_ids_of(directory: Path, tokenizer: Tokenizer) -> list[int]:
    """The ids that end a text: the checkpoint's own, or else the tokenizer's."""
    file = Path(directory) / "generation_config.json"
    if not file.is_file():
        return tokenizer.stop_ids
    try:
        stated = read_json(file.parent, file.name).get("eos_token_id")
    except ValueError as error:
        raise UserError(str(error)) from error
    if stated is None:
        return tokenizer.stop_ids
    ids = stated if isinstance(stated, list) else [stated]
    if not all(type(id) is int for id in ids):
        raise UserError(
            f"{file}: eos_token_id is {shown(stated)}, but it must be an id or a list of ids"
        )
    return ids


if __name__ == "__main__":
    run_program(main)
