"""The README is a test: each command in it runs, each option, file and label that it names exists.

`COMMANDS` says how each command is run: by .ci/run, by another test, or here. Here it runs as it
stands, in a directory where PATH and the ids of the hub lead to small local files, and only made
short by the options behind it. A command that gets into the README needs its line there.
"""

import functools
import io
import json
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from reference import random_model, tiny

import evaluate
import sample
import train
from config import SampleConfig, TrainConfig
from data import tinyworld
from data.tokenizer import Tokenizer
from tests.test_tokenizer import qwen_like

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
PROSE = re.sub(r"^```.*?^```", "", README, flags=re.MULTILINE | re.DOTALL)

BY_CI = "by .ci/run"
SHORT = "--max_steps=2 --eval_every=2 --save_every=2 --sample_tokens=4 --device=cpu"
FEW = "--max_new_tokens=4 --device=cpu"
DRAWN = FEW + " --seed=1"  # the answer of a barely trained model may be empty: always the same draw
BENCH = "tests/test_readme.py::test_the_benchmarks_run"
# The command, and: who runs it, or what is written behind it to run it here.
COMMANDS = {
    "pip install -r requirements.txt": BY_CI,
    "pip install -r requirements-dev.txt": BY_CI,
    "pytest -n 2": BY_CI,
    "pytest tests/test_model.py": "tests/test_model.py",
    "python train.py configs/tiny.py": SHORT,
    'python sample.py --prompt "One day"': DRAWN,
    'python sample.py --checkpoint=out/tiny --prompt "One day" --seed=6': FEW,
    "python train.py configs/tiny_easy.py": SHORT,
    "python train.py configs/tiny_sft.py": SHORT,
    "python sample.py --chat": DRAWN,
    "python evaluate.py out/tiny_sft": "--questions=4",
    "python train.py configs/shakespeare_char.py --data=PATH/tinyshakespeare.txt": SHORT,
    "python train.py configs/shakespeare_cpu.py --data=PATH/tinyshakespeare.txt": (
        SHORT + " --compile=False"
    ),
    "python train.py configs/instructions_sft.py"
    " --data=PATH/instructions.json --init_from=out/tiny": SHORT,
    "python sample.py --chat --checkpoint=jingyaogong/minimind-3": DRAWN,
    "python sample.py --chat --checkpoint=Qwen/Qwen3-0.6B --dtype=bf16": DRAWN,
    "python train.py configs/minimind_sft.py --init_from=Qwen/Qwen3-0.6B --data=PATH/chats.jsonl": (
        SHORT + " --max_seq_len=128 --val_fraction=0.3"
    ),
    "torchrun --nproc_per_node=N train.py ...": (
        "tests/test_distributed.py::"
        "test_torchrun_restarts_from_the_last_checkpoint_when_a_worker_is_killed"
    ),
    "python bench.py loss": "tests/test_readme.py::test_the_loss_takes_the_memory_that_is_stated",
    "python bench.py train": BENCH,
    "python bench.py train --rounds=9": BENCH,
    "python bench.py decode": BENCH,
    "python bench.py decode --rounds=3": BENCH,
    "python bench.py decode --checkpoint=out/tiny": BENCH,
}


def commands() -> list[str]:
    """The README's commands, as one types them, in its order."""
    found = {}
    for block in re.finditer(r"^```sh\n(.*?)^```", README, re.MULTILINE | re.DOTALL):
        for number, line in enumerate(block[1].splitlines()):
            found[block.start() + number] = line
    for code in re.finditer(r"`([^`]+)`", PROSE):
        if re.match(r"(python|pip|pytest|torchrun|hf) ", code[1]):
            found[README.index(code[0])] = code[1]
    typed = (" ".join(found[place].partition(" #")[0].split()) for place in sorted(found))
    return list(dict.fromkeys(typed))


def test_every_command_is_run_somewhere():
    assert sorted(commands()) == sorted(COMMANDS)
    ci = [shlex.split(line, comments=True) for line in (ROOT / ".ci/run").read_text().splitlines()]
    for command, how in COMMANDS.items():
        if how == BY_CI:  # there with options between, as pip's -q
            words = shlex.split(command)
            assert any(words == [w for w in line if w in words] for line in ci), command
        elif how.startswith("tests/"):
            file, _, name = how.partition("::")
            assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8") or not name, command


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A directory to type the commands in, with what they name that is not in the repository."""
    home = tmp_path_factory.mktemp("home")
    (home / "configs").symlink_to(ROOT / "configs")
    (home / "tinyshakespeare.txt").write_text("ROMEO:\nAy me, what light is this?\n" * 50)
    words = [f"word{number}" for number in range(60)]
    rows = [{"instruction": "Say it.", "input": "", "output": word} for word in words]
    (home / "instructions.json").write_text(json.dumps(rows))
    asks = {"role": "user", "content": "?"}
    chats = [{"messages": [asks, {"role": "assistant", "content": word}]} for word in words]
    (home / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    for name in ("minimind-3", "qwen3"):
        qwen_like(home / name)
        shape = tiny(vocab_size=576, max_position_embeddings=1024)
        assert Tokenizer.load(home / name).vocab_size <= shape.vocab_size
        random_model(shape).save_pretrained(home / name)
    config = json.loads((home / "minimind-3/config.json").read_text())
    config |= {"model_type": "minimind", "architectures": ["MiniMindForCausalLM"]}
    (home / "minimind-3/config.json").write_text(json.dumps(config))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        small = functools.partial(tinyworld.prepare, num_stories=400, num_chats=610, progress=False)
        patch.setattr(tinyworld, "prepare", small)
        yield home


def run(command: str, more: str, monkeypatch) -> None:
    """Run a command of the README in this process, in the home directory."""
    here = {"PATH/": "", "jingyaogong/minimind-3": "minimind-3", "Qwen/Qwen3-0.6B": "qwen3"}
    for there, name in here.items():
        command = command.replace(there, name)
    _, program, *arguments = shlex.split(f"{command} {more}")
    monkeypatch.setattr(sys, "stdin", io.StringIO("Who has the red ball?\n"))
    {"train.py": train, "sample.py": sample, "evaluate.py": evaluate}[program].main(arguments)


def test_the_commands_run_in_their_order(home, monkeypatch, capsys):
    printed = {}
    for command in commands():
        if COMMANDS[command].startswith("--"):
            run(command, COMMANDS[command], monkeypatch)
            captured = capsys.readouterr()
            printed[command] = captured.out + captured.err
            assert captured.out.strip(), command  # a text, an answer, what training says
            assert "sample.py" not in command or "; ended: " in captured.err, command

    # What the README shows of a run's end is what is printed, but for the numbers.
    (shown,) = (text for _, text in BLOCKS if "validation loss" in text)
    trained = without_numbers(printed["python train.py configs/tiny.py"])
    for line in without_numbers(shown).splitlines():
        assert line.startswith("done ") or line in trained
    assert "exact" in printed["python evaluate.py out/tiny_sft"]

    # And transformers opens the result as the README has it.
    (snippet,) = (text for language, text in BLOCKS if language == "python")
    names: dict = {}
    exec(re.sub(r"step_\d+", "step_00000002", snippet), names)
    ids = names["tokenizer"]("One day")["input_ids"]
    assert ids == Tokenizer.load(home / "out/tiny/step_00000002").encode("One day")
    assert names["model"].config.model_type == "qwen3"


def without_numbers(text: str) -> str:
    return re.sub(r"\d[\d,.]*", "#", text)


def test_every_option_and_file_that_it_names_exists():
    ours = {field.name for config in (TrainConfig, SampleConfig) for field in fields(config)}
    others = {"help", "nproc_per_node", "max_restarts", "rounds", "slow"}  # of other programs
    named = {name.replace("-", "_") for name in re.findall(r"--([a-z][a-z_-]+)", README)}
    assert named <= ours | others
    for name in re.findall(r"`([\w./*-]+\.(?:py|md|sh|png))`|\]\(([\w./-]+)\)", README):
        (path,) = filter(None, name)
        assert path == "loss.png" or list(ROOT.glob(path)), path


def test_the_tour_leaves_no_file_out():
    tour = README.partition("## The house")[2].partition("\n## ")[0]
    shown = {file for name in re.findall(r"`([^`]+\.py)`", tour) for file in ROOT.glob(name)}
    there = {*ROOT.glob("*.py"), *ROOT.glob("data/*.py")} - {ROOT / "data/__init__.py"}
    assert {str(file) for file in there} == {str(file) for file in shown}


@pytest.mark.slow
def test_the_loss_takes_the_memory_that_is_stated():
    """0.16 and 0.23 of that of plain logits; half a minute, and 8 GiB for the plain ones."""
    done = subprocess.run(
        [sys.executable, ROOT / "bench.py", "loss"], capture_output=True, text=True, check=True
    )
    ratios = [float(line.split("|")[4]) for line in done.stdout.splitlines() if "| 0." in line]
    assert ratios == pytest.approx([0.16, 0.23], abs=0.02), done.stdout


@pytest.mark.slow
def test_the_benchmarks_run(home, monkeypatch, capsys):
    """Of a tiny decoder: that they end, and print their tables."""
    import bench

    if not (home / "out/tiny").is_dir():
        run("python train.py configs/tiny.py", SHORT, monkeypatch)
    for name in bench.SHAPES:
        shape = tiny(vocab_size=128, num_hidden_layers=1, max_position_embeddings=8192)
        monkeypatch.setitem(bench.SHAPES, name, shape)
    for command, how in COMMANDS.items():
        if how == BENCH:
            bench.main(shlex.split(command)[2:] + ["--rounds=1"])
            assert "transformers" in capsys.readouterr().out, command
