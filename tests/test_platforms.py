"""Windows and macOS, as far as Linux can play them: in a process without what only POSIX has,
without CUDA, where the locale is no UTF-8 and processes are spawned, everything is done once:
data prepared by worker processes, a short training, resumed, a text and a chat.

Then what reading the sources can find: files opened without an encoding.
"""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted(file for part in (".", "data", "docs") for file in (ROOT / part).glob("*.py"))

# Hidden is what Windows or macOS lacks, behind the imports of torch and numpy, which are at home on
# Linux and need it there. Worker processes run these lines too: spawned, they begin with this.
PROGRAM = '''
import multiprocessing, os, signal, sys
import numpy
if __name__ == "__main__":
    import torch
    import torch._inductor.config  # which training imports; it looks at all of torch.cuda

for name in """fork forkpty register_at_fork sched_getaffinity sysconf getuid mkfifo killpg
setsid getpgid uname statvfs posix_fallocate posix_fadvise""".split():
    delattr(os, name)
for name in "SIGKILL SIGALRM SIGHUP SIGUSR1 setitimer alarm".split():
    delattr(signal, name)
for name in "fcntl resource readline termios pwd grp syslog".split():
    sys.modules[name] = None
multiprocessing.set_start_method("spawn", force=True)

def no_cuda(*_, **__):
    raise AssertionError("CUDA was used without asking whether it is there")

if __name__ == "__main__":
    torch.cuda.is_available = lambda: False
    for name in ("device_count", "current_device", "get_device_properties", "memory_allocated",
                 "max_memory_allocated", "synchronize", "set_device", "is_bf16_supported"):
        setattr(torch.cuda, name, no_cuda)
    import locale
    assert locale.getpreferredencoding(False).lower() not in ("utf-8", "utf8"), "not hidden"
    from data import dataset
    dataset.PARALLEL_ABOVE = 0
    dataset._processors = lambda: 2
    import sample
    import train
    from config import run_program

    def run(program, arguments):
        sys.argv[1:] = arguments
        run_program(program.main)

    options = ["--out_dir=run", "--data=data.jsonl", "--tokenizer=bytes", "--max_seq_len=64",
               "--batch_size=2", "--hidden_size=16", "--num_hidden_layers=1", "--eval_every=2",
               "--num_attention_heads=2", "--intermediate_size=16", "--save_every=2"]
    run(train, [*options, "--max_steps=2"])
    run(train, [*options, "--max_steps=4", "--resume"])
    run(sample, ["--checkpoint=run", "--prompt=Bär 猫", "--max_new_tokens=3", "--seed=1"])
    run(sample, ["--checkpoint=run", "--prompts_file=prompts.jsonl", "--output=out.jsonl",
                 "--max_new_tokens=3", "--seed=1"])
    print("ALL DONE")
'''


def test_a_day_without_posix_cuda_fork_and_utf_8(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    question = {"role": "user", "content": "Wer? 猫"}
    rows = [
        {"messages": [question, {"role": "assistant", "content": f"Bär {i} 猫🙂"}]}
        for i in range(60)
    ]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (tmp_path / "data.jsonl").write_text(text, encoding="utf-8")
    prompts = json.dumps({"messages": [question]}, ensure_ascii=False) + "\n"
    (tmp_path / "prompts.jsonl").write_text(prompts, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env=os.environ
        | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        | {"PYTHONUTF8": "0", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "WANDB_MODE": "offline"},
        capture_output=True,
        timeout=600,
    )
    said = done.stdout.decode("utf-8", "replace") + done.stderr.decode("utf-8", "replace")
    assert done.returncode == 0 and "ALL DONE" in said, said[-4000:]
    completion = json.loads((tmp_path / "out.jsonl").read_text(encoding="utf-8"))
    assert completion["messages"] == [question]
    for file in tmp_path.rglob("*"):
        if file.suffix in (".json", ".jsonl"):
            json.loads(file.read_text(encoding="utf-8").splitlines()[0] if "l" in file.suffix else
                       file.read_text(encoding="utf-8"))  # fmt: skip


def text_files_without_encoding(path: Path) -> list[str]:
    """The places where a program opens, reads or writes a text file and names no encoding."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        is_method = isinstance(node.func, ast.Attribute)
        name = node.func.attr if is_method else getattr(node.func, "id", "")
        owner = getattr(getattr(node.func, "value", None), "id", "")
        reads = is_method and name in ("read_text", "write_text")
        opens = name == "open" and owner not in ("gzip", "os") and (node.args or node.keywords)
        modes = [v.value for v in node.args if isinstance(v, ast.Constant)]
        if reads or (opens and not {"rb", "wb", "ab", "ab+", "r+b", "xb"} & set(modes)):
            if "encoding" not in [keyword.arg for keyword in node.keywords]:
                found.append(f"{path.name}:{node.lineno}")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_every_text_file_is_opened_as_utf_8(path):
    """Else it is the locale's: cp1252 on most of Windows."""
    assert not text_files_without_encoding(path)
