"""A matrix times one vector on a CPU: what nearly all of decoding's time goes to.

  1. one_row   the product, by matvec.cpp or by torch
  2. pack      where the weights lie in memory, which matters more
  3. load      compiles matvec.cpp, once on each machine
  4. library   where the result is kept: it is code, so in a directory that is the user's alone

Where it cannot be compiled, nothing changes but the speed.
"""

import hashlib
import itertools
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn as nn
from torch import Tensor

SOURCE = Path(__file__).with_suffix(".cpp")
FLAGS = "-std=c++17 -O3 -march=native -mprefer-vector-width=512 -fopenmp-simd -shared -fPIC".split()

loaded = False  # whether this process has the operator torch.ops.gpt.matvec


def one_row(weight: Tensor, x: Tensor) -> Tensor:
    """weight (outputs, inputs) times x (..., inputs) of one row -> (..., outputs).

    matvec.cpp is for bf16, where it makes whole steps 1.3 times as fast; in fp32 torch's own is no
    slower. It has no gradient, and so is not used where one may be asked for.
    """
    row = x.flatten()  # (inputs,)
    bf16 = weight.dtype == row.dtype == torch.bfloat16
    if loaded and bf16 and weight.is_contiguous() and not torch.is_grad_enabled():
        out = torch.ops.gpt.matvec(weight, row)
    else:
        # Faster than torch's matrix product; and unlike `mv`, torch.compile calls it as it is.
        out = torch.addmv(row.new_empty(weight.shape[0]), weight, row, beta=0)
    return out.view(*x.shape[:-1], weight.shape[0])


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


def load(tell: Callable[[str], None] = lambda text: None) -> str | None:
    """Let one_row use matvec.cpp from now on: compiled once on a machine, which it tells.

    Returns None, or if that cannot be, a sentence that says why.
    """
    global loaded
    if loaded:
        return None
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return "matvec.cpp is for Linux on x86-64"
    try:
        file = library()
        try:
            torch.ops.load_library(file)
        except OSError:  # not there yet, or damaged
            tell("compiling matvec.cpp: a few seconds, once on this machine")
            compile_to(file)
            torch.ops.load_library(file)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        return f"matvec.cpp could not be compiled: {error}"
    torch.library.register_fake("gpt::matvec", lambda weight, x: x.new_empty(len(weight)))
    loaded = True
    return None


def library() -> Path:
    """The file of the compiled code, whose name changes with all that the code depends on.

    Raises PermissionError if others than the user could write it.
    """
    about_cpu = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    cpu = [line for line in about_cpu if "flags" in line]
    made_of = [SOURCE.read_text(encoding="utf-8"), compiler(), *FLAGS, torch.__version__, cpu[0]]
    name = hashlib.sha256("\n".join(made_of).encode()).hexdigest()[:16]
    directory = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "gpt")
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.lstat()
    private = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077
    if not private or status.st_uid != os.getuid():
        raise PermissionError(f"{directory} is not a directory of this user alone (chmod 700)")
    return directory / f"matvec-{name}.so"


def compile_to(file: Path) -> None:
    """Compile matvec.cpp beside the file and rename the result: it is there whole or not at all.

    Raises OSError and subprocess.SubprocessError.
    """
    torch_files = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory(dir=file.parent) as workshop:
        made = Path(workshop) / file.name
        paths = [f"-I{torch_files}/include", str(SOURCE), "-o", str(made), f"-L{torch_files}/lib"]
        command = [compiler(), *FLAGS, *paths, "-ltorch_cpu"]
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
