"""The decode step on a CPU, in one call of C++: decode.cpp, compiled once on each machine.

  1. step_of   a step for a model and a cache, from the last ids to the next logits
  2. pack      where the weights lie in memory, which matters as much
  3. load      compiles decode.cpp
  4. library   where the result is kept: it is code, so in a directory that is the user's alone

A step needs each weight once, so at best it takes as long as reading them. Module by module it
takes one and a half to four times as long as here: each product starts its threads, each call finds
its way through Python and torch, and meanwhile memory waits. Where decode.cpp cannot be compiled,
or does not fit, nothing changes but the speed.
"""

import ctypes
import hashlib
import itertools
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable
from ctypes import POINTER, c_double, c_int64, c_void_p
from pathlib import Path
from typing import cast

import torch
import torch.nn as nn
from torch import Tensor

from kv_cache import KVCache
from model import GPT, Block, Linear
from quantize import Int8Linear
from rope import rope_tables

SOURCE = Path(__file__).with_suffix(".cpp")
FLAGS = "-std=c++17 -O3 -march=native -mprefer-vector-width=512 -fopenmp -shared -fPIC".split()
MOST_ROWS = 16  # of more, torch's matrix products make more

call: Callable | None = None  # decode_step of decode.cpp, once it is loaded

# ------------------------------------------------- what decode.cpp is given (the same order)


class Matrix(ctypes.Structure):
    _fields_ = [("weight", c_void_p), ("scale", c_void_p)]


class Layer(ctypes.Structure):
    _fields_ = [(name, c_void_p) for name in ("input_norm", "q_norm", "k_norm", "post_norm")]
    _fields_ += [(name, Matrix) for name in ("q", "k", "v", "o", "gate", "up", "down")]
    _fields_ += [("keys", c_void_p), ("values", c_void_p)]


class Step(ctypes.Structure):
    _fields_ = [(name, c_int64) for name in ("bf16", "threads", "rows", "hidden", "heads")]
    _fields_ += [(name, c_int64) for name in ("kv_heads", "head_dim", "intermediate", "vocab")]
    _fields_ += [(name, c_int64) for name in ("layers", "capacity", "slot")]
    _fields_ += [("eps", c_double), ("layer", POINTER(Layer))]
    _fields_ += [("embedding", c_void_p), ("norm", c_void_p), ("head", Matrix)]
    _fields_ += [(name, c_void_p) for name in ("ids", "positions", "cos", "sin", "real", "logits")]


def matrix(linear: Linear | Int8Linear) -> Matrix:
    if isinstance(linear, Int8Linear):
        return Matrix(address(linear.rounded), address(linear.scale))
    return Matrix(address(linear.weight), None)


def address(tensor: Tensor) -> int:
    """Where a tensor's entries lie, one behind the other."""
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError("decode.cpp takes contiguous tensors on the CPU")
    return tensor.data_ptr()


# ------------------------------------------------------------------------------- the step


def step_of(model: GPT, cache: KVCache) -> Callable[[Tensor], Tensor] | None:
    """A function from the last ids (B, 1) to the next logits (B, 1, V), which appends to the cache.

    The step keeps model and cache and knows where they lie: after `cache.select_rows` another one
    is needed. It raises ValueError for a cache that is full or was changed so, and for ids of
    another shape, IndexError for an id outside the vocabulary.

    None: decode.cpp is not loaded or not made for this. It is for up to MOST_ROWS rows in fp32 or
    bf16, with weights of 8 bits or without, on a CPU.
    """
    config, dtype = model.config, model.model.embed_tokens.weight.dtype
    rows = len(cache.real)
    held = [*model.parameters(), *cache.keys, *cache.values]
    fits = {(tensor.dtype, tensor.device.type) for tensor in held} == {(dtype, "cpu")}
    known = dtype in (torch.float32, torch.bfloat16) and config.attention == "sdpa"
    if call is None or not (fits and known) or rows > MOST_ROWS:
        return None
    layers = (Layer * config.num_hidden_layers)()
    for i, module in enumerate(model.model.layers):
        block = cast(Block, module)
        attention, mlp = block.self_attn, block.mlp
        layers[i] = Layer(
            address(block.input_layernorm.weight),
            address(attention.q_norm.weight),
            address(attention.k_norm.weight),
            address(block.post_attention_layernorm.weight),
            matrix(attention.q_proj),
            matrix(attention.k_proj),
            matrix(attention.v_proj),
            matrix(attention.o_proj),
            matrix(mlp.gate_proj),
            matrix(mlp.up_proj),
            matrix(mlp.down_proj),
            address(cache.keys[i]),
            address(cache.values[i]),
        )
    # A token's position is at most its slot.
    cos, sin = rope_tables(config, torch.arange(cache.max_length)[None])  # (1, 1, slots, D/2)
    told = Step(
        bf16=dtype == torch.bfloat16,
        threads=torch.get_num_threads(),
        rows=rows,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        intermediate=config.intermediate_size,
        vocab=config.vocab_size,
        layers=len(layers),
        capacity=cache.max_length,
        eps=config.rms_norm_eps,
        layer=layers,
        embedding=address(model.model.embed_tokens.weight),
        norm=address(model.model.norm.weight),
        head=matrix(model.lm_head),
        positions=address(cache.row_lengths),
        real=address(cache.real),
    )

    def step(ids: Tensor) -> Tensor:
        cache.check_room(rows, 1)
        if cache.row_lengths.data_ptr() != told.positions:
            raise ValueError("the rows of the cache were changed: make a new step of it")
        if ids.shape != (rows, 1):
            raise ValueError(f"ids have shape {tuple(ids.shape)}, but there are {rows} rows")
        V = model.config.vocab_size
        if not 0 <= ids.min() <= ids.max() < V:
            raise IndexError(f"an id in {ids.flatten().tolist()} is not of 0 to {V - 1}")
        ids = ids.contiguous()
        logits = torch.empty(rows, 1, V, dtype=dtype)
        cache.real[:, cache.length] = True
        told.slot, told.ids, told.logits = cache.length, address(ids), address(logits)
        # Named here, these and the model live as long as the step: `told` has addresses only.
        told.cos, told.sin = address(cos), address(sin)
        cast(Callable, call)(ctypes.byref(told))
        cache.row_lengths += 1
        cache.length += 1
        return logits

    return step


@torch.no_grad()
def pack(model: nn.Module) -> None:
    """Move the weights of a model on the CPU, for inference, into one block of memory.

    With THP_MEM_ALLOC_ENABLE=1 torch asks for pages of 2 MiB, but only for what is as large; of
    weights one by one, or in a file that is mapped, most lie in pages of 4 KiB, whose addresses
    take so long to look up that a step takes 1.3 to 2 times as long.
    """
    tensors = [*model.parameters(), *model.buffers()]  # a tied one is there once
    starts = [0, *itertools.accumulate(-(-tensor.nbytes // 64) * 64 for tensor in tensors)]
    block = torch.empty(starts[-1], dtype=torch.uint8)
    for start, tensor in zip(starts, tensors, strict=False):
        place = block[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        tensor.data = place.copy_(tensor)


# ------------------------------------------------------------------------------ the library


def load(tell: Callable[[str], None] = lambda text: None) -> str | None:
    """Let step_of use decode.cpp from now on: compiled once on a machine, which it tells.

    Returns None, or if that cannot be, a sentence that says why.
    """
    global call
    if call is not None:
        return None
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return "decode.cpp is for Linux on x86-64"
    try:
        file = library()
        try:
            loaded = ctypes.CDLL(str(file))
        except OSError:  # not there yet, or damaged
            tell("compiling decode.cpp: a few seconds, once on this machine")
            compile_to(file)
            loaded = ctypes.CDLL(str(file))
        call = loaded.decode_step
    except (OSError, RuntimeError, AttributeError, subprocess.SubprocessError) as error:
        return f"decode.cpp could not be compiled: {error}"
    call.argtypes, call.restype = [POINTER(Step)], None
    return None


def library() -> Path:
    """The file of the compiled code, whose name changes with all that the code depends on.

    Raises PermissionError if others than the user could write it.
    """
    about_cpu = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    cpu = [line for line in about_cpu if "flags" in line][:1]
    made_of = [SOURCE.read_text(encoding="utf-8"), compiler(), *FLAGS, *cpu]
    name = hashlib.sha256("\n".join(made_of).encode()).hexdigest()[:16]
    directory = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "gpt")
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.lstat()
    private = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077
    if not private or status.st_uid != os.getuid():
        raise PermissionError(f"{directory} is not a directory of this user alone (chmod 700)")
    return directory / f"decode-{name}.so"


def compile_to(file: Path) -> None:
    """Compile decode.cpp beside the file and rename the result: it is there whole or not at all.

    Raises OSError and subprocess.SubprocessError.
    """
    with tempfile.TemporaryDirectory(dir=file.parent) as workshop:
        made = Path(workshop) / file.name
        command = [compiler(), *FLAGS, str(SOURCE), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if done.returncode:
            said = done.stderr.strip() or "it says nothing"
            raise OSError(f"{compiler()} ended with {done.returncode}: {said.splitlines()[0]}")
        made.replace(file)


def compiler() -> str:
    """The path of CXX, or of g++. Raises FileNotFoundError."""
    name = os.environ.get("CXX", "g++")
    path = shutil.which(name)
    if path is None:
        raise FileNotFoundError(f"{name}, a C++ compiler, is not here")
    return path
