"""Every reader on files that are almost right: valid ones, with a few bytes or JSON values changed.

A reader either reads such a file or says in one sentence what is wrong with it: a UserError, a
ValueError of its own or a FileNotFoundError, which names the file. Anything else is a traceback
that a person would see. tests/fuzz_readers.py runs the same readers for hours (atheris).
"""

import contextlib
import copy
import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from reference import random_model, tiny

import checkpoint
import config as config_module
import report
import sample
from config import SampleConfig, TrainConfig, UserError, check_values, parse_config
from data.dataset import load_dataset
from data.tokenizer import Tokenizer
from model import GPT
from tests.test_sources import write
from tests.test_tokenizer import TOOLS_TEMPLATE, qwen_like

FEW = settings(max_examples=60, deadline=None, derandomize=True, database=None)

# ----- mutations ----------------------------------------------------------------------------------

NESTED = "a list in a list in a list, and so on 500 times"  # in words: few things can print it
VALUES = [None, True, False, -1, 0, 1, 7, 2**31, 2**63, 10**12, 10**30, 0.5, -0.0, 1e308]
VALUES += [math.nan, math.inf, "", "x", "é" * 500, "\ud800", "\0", "../x", "/etc/passwd", "<bos>"]
VALUES += [[], {}, [[]], [1, "a"], {"a": None}, {"content": 3}, NESTED, [0] * 1000]
JSON_EDITS = st.lists(
    st.tuples(
        st.sampled_from(["replace", "delete", "repeat", "add"]),
        st.lists(st.integers(0, 400), min_size=1, max_size=6),  # which child, level by level
        st.sampled_from(VALUES),
    ),
    min_size=1,
    max_size=3,
)
BYTE_EDITS = st.lists(
    st.tuples(
        st.sampled_from(["flip", "delete", "repeat", "insert", "cut"]),
        st.integers(0, 10**6),
        st.integers(1, 60),
        st.binary(max_size=8) | st.sampled_from([b"\xff" * 8, b"\0" * 8, b'"', b"[" * 2000]),
    ),
    min_size=1,
    max_size=3,
)


def edit_json(value, edits):
    """`value` (which is changed) with other values in some places."""
    for kind, path, new in edits:
        new = json.loads("[" * 500 + "]" * 500) if new == NESTED else copy.deepcopy(new)
        parent, key = None, None
        here = value
        for step in path:
            if not isinstance(here, dict | list) or not here:
                break
            parent, key = here, (list(here) if isinstance(here, dict) else range(len(here)))
            key = key[step % len(key)]
            here = parent[key]
        if parent is None:
            value = new
        elif kind == "delete":
            del parent[key]
        elif kind == "repeat" and isinstance(parent, list):
            parent.insert(key, here)
        elif kind == "add" and isinstance(here, dict):
            here["added"] = new
        else:
            parent[key] = new
    return value


def edit_bytes(content: bytes, edits) -> bytes:
    for kind, place, length, junk in edits:
        place %= len(content) + 1
        before, piece, after = content[:place], content[place:][:length], content[place + length :]
        if kind == "flip":
            piece = bytes(byte ^ (1 << length % 8) for byte in piece)
        content = (
            before
            + {
                "flip": piece + after,
                "delete": after,
                "repeat": piece + piece + after,
                "insert": junk + piece + after,
                "cut": b"",
            }[kind]
        )
    return content


def edited(content: bytes, edits, in_json: bool) -> bytes:
    if not in_json:
        return edit_bytes(content, edits)
    return json.dumps(edit_json(json.loads(content), edits)).encode()


# ----- readers: make a valid file in a directory, read what is there ------------------------------

CHAT = [{"role": "user", "content": "Hi <|im_end|>"}, {"role": "assistant", "content": "Ho"}]


def make_checkpoint(directory: Path) -> None:
    random_model(tiny()).save_pretrained(directory)


def read_checkpoint(directory: Path) -> None:
    model = GPT.from_pretrained(directory)
    with torch.no_grad():
        model(torch.tensor([[1, 2, 3]]))


def make_tokenizer(directory: Path) -> None:
    qwen_like(directory, TOOLS_TEMPLATE)


def read_tokenizer(directory: Path) -> None:
    tokenizer = Tokenizer.load(directory)
    ids = tokenizer.encode_document("The cat <|im_end|> é\n")
    if tokenizer.chat_style:
        ids += tokenizer.render_chat(CHAT)[0]
    assert all(0 <= i < tokenizer.vocab_size for i in ids)
    tokenizer.decode(ids)
    tokenizer.save(directory / "again")


BYTES = Tokenizer.load("bytes")


def make_generation_config(directory: Path) -> None:
    ids = {"eos_token_id": [0, 3], "pad_token_id": 0}
    (directory / "generation_config.json").write_text(json.dumps(ids))


def read_generation_config(directory: Path) -> None:
    assert all(type(i) is int for i in sample.stop_ids_of(directory, BYTES))


def make_metrics(directory: Path) -> None:
    lines = [{"step": step, "loss": 2.5, "lr": 1e-3} for step in (10, 20)]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))


def read_metrics(directory: Path) -> None:
    assert all(line["step"] + 0 is not None for line in report.read_metrics(directory))


def make_options(directory: Path) -> None:
    options = vars(TrainConfig(out_dir="out/x"))
    (directory / "train_config.json").write_text(json.dumps(options))


def read_options(directory: Path) -> None:
    options = config_module.read_saved_options(directory / "train_config.json")
    with contextlib.suppress(UserError):  # which names the option, since it may be a flag's
        check_values(TrainConfig(**options))


def make_step(directory: Path) -> None:
    (directory / "step.json").write_text(json.dumps({"step": 10, "val_loss": 2.5}))


def read_step(directory: Path) -> None:
    checkpoint.val_loss_of(directory)


def make_prompts(directory: Path) -> None:
    rows = [{"prompt": "One day"}, {"text": "é"}, {"messages": CHAT[:1]}]
    (directory / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def read_prompts(directory: Path) -> None:
    for row in sample.read_rows(SampleConfig(prompts_file=str(directory / "prompts.jsonl"))):
        ids = sample.row_ids(BYTES, row)
        chats = len(row["messages"]) + 1 if "messages" in row else 0
        assert (ids.count(2), ids.count(3)) == (chats, max(0, chats - 1))


def make_state(directory: Path) -> None:
    torch.save({"step": 3, "a": torch.ones(4)}, directory / "training_state.pt")


def read_state(directory: Path) -> None:
    checkpoint.load_training_state(directory)


READERS = {
    "config.json": (make_checkpoint, read_checkpoint, True),
    "model.safetensors": (make_checkpoint, read_checkpoint, False),
    "tokenizer.json": (make_tokenizer, read_tokenizer, True),
    "tokenizer_config.json": (make_tokenizer, read_tokenizer, True),
    "generation_config.json": (make_generation_config, read_generation_config, True),
    "train_config.json": (make_options, read_options, True),
    "step.json": (make_step, read_step, True),
    "metrics.jsonl": (make_metrics, read_metrics, False),
    "prompts.jsonl": (make_prompts, read_prompts, False),
    "training_state.pt": (make_state, read_state, False),
}


def check_refusal(error: Exception, directory: Path) -> None:
    """A sentence of ours, and no error of Python's that came through by chance."""
    assert type(error) in (UserError, ValueError, FileNotFoundError), repr(error)
    text = str(error)
    assert str(directory) in text, text
    assert len(text) < 1500, text[:3000]


@pytest.mark.parametrize("kind", ["json", "bytes"])
@pytest.mark.parametrize("name", READERS)
def test_an_almost_valid_file_is_read_or_refused_in_a_sentence(name, kind, tmp_path):
    make, read, is_json = READERS[name]
    if kind == "json" and not is_json:
        pytest.skip("not one JSON value")
    make(tmp_path)
    file = tmp_path / name
    valid = file.read_bytes()

    @FEW
    @given(JSON_EDITS if kind == "json" else BYTE_EDITS)
    def run(edits):
        file.write_bytes(edited(valid, edits, kind == "json"))
        try:
            read(tmp_path)
        except Exception as error:
            check_refusal(error, tmp_path)

    run()


# ----- data ---------------------------------------------------------------------------------------

ROWS = [
    {"text": "one\ntwo"},
    {"text": "é", "id": 3},
    {"messages": CHAT, "tools": [{"name": "f", "parameters": {"x": [1]}}]},
    {"instruction": "Add.", "input": "1 2", "output": "3"},
    {"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]},
]
FORMATS = ["jsonl", "json", "jsonl.gz", "json.gz", "csv", "parquet", "txt"]


def read_data(file: Path, on_bad_row: str) -> None:
    load_dataset(
        file,
        None,
        0.5,
        tokenizer=BYTES,
        max_seq_len=64,
        on_bad_row=on_bad_row,
        cache_dir=file.parent / "cache",
        progress=False,
    )


def check_data(file: Path, content: bytes, on_bad_row: str) -> None:
    file.write_bytes(content)
    try:
        read_data(file, on_bad_row)
    except UserError as error:
        check_refusal(error, file)
    left = [path.name for path in (file.parent / "cache").glob("*.building")]
    assert not left, "a half-written cache"


@pytest.mark.parametrize("ending", FORMATS)
def test_almost_valid_data_is_read_or_refused_in_a_sentence(ending, tmp_path):
    file = tmp_path / f"data.{ending}"
    if ending == "txt":
        file.write_bytes("é\r\n猫".encode() * 20)
    else:
        write(file, ROWS[1:2] * 9 if ending == "csv" else ROWS)
    valid = file.read_bytes()

    @settings(FEW, max_examples=40)
    @given(BYTE_EDITS, st.sampled_from(["stop", "skip"]))
    def run(edits, on_bad_row):
        check_data(file, edit_bytes(valid, edits), on_bad_row)

    run()


@pytest.mark.parametrize("on_bad_row", ["stop", "skip"])
def test_rows_of_any_values_are_read_or_refused_in_a_sentence(on_bad_row, tmp_path):
    @FEW
    @example([("replace", [2, 1, 0, 1, 1], NESTED)])
    @given(JSON_EDITS)
    def run(edits):
        rows = edit_json(json.loads(json.dumps(ROWS)), edits)
        check_data(tmp_path / "data.json", json.dumps(rows).encode(), on_bad_row)

    run()


# ----- command lines ------------------------------------------------------------------------------

WORDS = ["", "-", "--", "-1", "0", "1e400", "nan", "None", "True", "x.py", "a/b", "é", "\0", "@x"]
WORDS += ["x" * 5000, "9" * 5000, "1_0", "0x10", "[1]", "--help", "-h", "--data", "configs/tiny.py"]


def flags_of(config_class):
    names = [f"--{name}" for name in vars(config_class())]
    flag = st.sampled_from([*names, "--no_such", "--data.x", "--max-steps"])
    word = st.sampled_from(WORDS) | st.text(max_size=6)
    with_value = st.tuples(flag, st.sampled_from(["", "="]), word).map("".join)
    return st.lists(flag | word | with_value, max_size=5)


@pytest.mark.parametrize("config_class", [TrainConfig, SampleConfig])
def test_any_command_line_is_understood_or_refused(config_class, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    check = check_values if config_class is TrainConfig else check_sample_options

    @settings(FEW, max_examples=150)
    @given(flags_of(config_class))
    def run(arguments):
        try:
            check(parse_config(config_class, arguments))
        except UserError as error:
            assert str(error)
        except SystemExit as end:
            assert end.code in (0, 2)
        capsys.readouterr()
        assert not list(tmp_path.iterdir())  # nothing is written before all is understood

    run()


def check_sample_options(config: SampleConfig) -> None:
    sample.refuse_contradictions(config)
    if config.prompt != "-":
        sample.read_rows(config)


@pytest.mark.parametrize("name", sorted(vars(TrainConfig())))
def test_config_files_with_any_value(name, tmp_path):
    file = tmp_path / "recipe.py"
    for value in [*VALUES[:-2], -(2**40), (1, 2), b"x", 1j]:
        text = "float('nan')" if value != value else "float('inf')" if value == math.inf else value
        file.write_text(f"{name} = {text if isinstance(text, str) and 'fl' in text else value!r}\n")
        try:
            check_values(parse_config(TrainConfig, [str(file), "--out_dir=out/x"]))
        except UserError as error:
            assert name in str(error) and len(str(error)) < 1500


FINDERS = {
    "data": lambda name: read_data(Path(name), "stop"),
    "tokenizer": Tokenizer.load,
    "checkpoint": checkpoint.find_checkpoint,
    "prompt": lambda name: sample.read_prompt("@" + name),
    "config": lambda name: parse_config(TrainConfig, [name]),
}


@pytest.mark.parametrize("kind", FINDERS)
def test_any_path_is_found_or_refused(kind, tmp_path, monkeypatch):
    """Names that no file can have, too."""
    monkeypatch.chdir(tmp_path)

    @FEW
    @example("x" * 300)
    @example("x\0")
    @example("\udcff")
    @given(st.text(min_size=1, max_size=30).filter(lambda name: not name.startswith("-")))
    def run(name):
        with contextlib.suppress(UserError):
            FINDERS[kind](name)

    run()
