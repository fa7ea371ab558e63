"""Every reader on files that are almost right: valid ones, with a few bytes or JSON values changed.

A reader either reads such a file or says in one sentence what is wrong with it: a UserError, a
ValueError of its own or a FileNotFoundError, which names the file. Anything else is a traceback
that a person would see. tests/fuzz_readers.py runs the same readers for hours (atheris).
"""

import contextlib
import copy
import itertools
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
import pretrained
import report
import sample
import train
from config import SampleConfig, TrainConfig, UserError, check_values, parse_config
from data.dataset import load_dataset
from data.tokenizer import Tokenizer
from model import GPT, GPTConfig
from tests.test_sources import write
from tests.test_tokenizer import TOOLS_TEMPLATE, qwen_like

FEW = settings(max_examples=60, deadline=None, derandomize=True, database=None)

# ----- mutations ----------------------------------------------------------------------------------

NESTED = "a list in a list in a list, and so on 500 times"  # in words: few things can print it
VALUES = [None, True, False, -1, 0, 1, 7, 2**31, 2**63, 10**12, 10**30, 0.5, -0.0, 1e308]
VALUES += [10**400, 10**4000]  # no float is as large; longer than any sentence
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


def make_index(directory: Path) -> None:
    make_checkpoint(directory)
    where = {name: "model.safetensors" for name in pretrained.tensor_files(directory)}
    index = {"metadata": {"total_size": 1}, "weight_map": where}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def make_sums(directory: Path) -> None:
    (directory / "a.bin").write_bytes(b"a")
    (directory / checkpoint.SUMS).write_text(f"{checkpoint.sha256(directory / 'a.bin')}  a.bin\n")


def read_sums(directory: Path) -> None:
    checkpoint.check(directory, ["a.bin"])


def make_tokenizer(directory: Path) -> None:
    qwen_like(directory, TOOLS_TEMPLATE)


def make_template(directory: Path) -> None:
    make_tokenizer(directory)
    (directory / "chat_template.jinja").write_text(TOOLS_TEMPLATE)


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
    for line in report.read_metrics(directory):
        assert line["step"] >= 0
        json.dumps(line)


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
        json.dumps(row)  # as it is done with the completion beside it
        ids = sample.row_ids(BYTES, row, "the row")
        chats = len(row["messages"]) + 1 if "messages" in row else 0
        assert (ids.count(2), ids.count(3)) == (chats, max(0, chats - 1))


def make_state(directory: Path) -> None:
    """What a run has saved after its first step."""
    torch.save(take_step(make_optimizers()), directory / "training_state.pt")


def make_optimizers() -> list[torch.optim.Optimizer]:
    return train.make_optimizers(GPT(GPTConfig(8, 2, 1, 1, 2)), TrainConfig())


def take_step(optimizers: list[torch.optim.Optimizer], progress=None, scaler=None) -> dict:
    """Use all that a run does of its state, and return it as it is saved."""
    progress = progress or train.Progress()
    scaler = scaler or torch.amp.GradScaler("cpu")
    for optimizer in optimizers:
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            parameter.grad = torch.ones_like(parameter)
        scaler.scale(torch.ones(1))
        scaler.unscale_(optimizer)
        optimizer.step()
    scaler.update()
    progress.step += 1
    progress.seconds += 1.5
    json.dumps(vars(progress))
    states = [optimizer.state_dict() for optimizer in optimizers]
    rest = {"scaler": scaler.state_dict(), "data": "0123"}
    return {"progress": vars(progress), "optimizers": states} | rest


def read_state(directory: Path) -> None:
    """As train.py reads it."""
    optimizers, scaler = make_optimizers(), torch.amp.GradScaler("cpu")
    state = checkpoint.load_training_state(directory)
    checkpoint.check_state(state, directory, train.Progress, optimizers)
    progress = train.Progress(**state["progress"])
    for optimizer, saved in zip(optimizers, state["optimizers"] or [], strict=False):
        train.load_optimizer(optimizer, saved)
    if state["scaler"]:
        scaler.load_state_dict(state["scaler"])
    take_step(optimizers, progress, scaler)


def make_floor(directory: Path) -> None:
    (directory / "floor.json").write_text(json.dumps({"val_nats": 2.5, "val_stories": 8}))


def read_floor(directory: Path) -> None:
    assert 0 <= train.read_floor(directory) / 7 < math.inf


def make_wandb_id(directory: Path) -> None:
    report.wandb_id(directory)


def read_wandb_id(directory: Path) -> None:
    assert 0 < len(report.wandb_id(directory)) <= 100


def make_holder(directory: Path) -> None:
    (directory / checkpoint.HOLDER).write_text("process 7 on a machine")


def read_holder(directory: Path) -> None:
    assert len(checkpoint.RunLock(directory).holder()) <= 1000


READERS = {
    "config.json": (make_checkpoint, read_checkpoint, True),
    "model.safetensors": (make_checkpoint, read_checkpoint, False),
    "model.safetensors.index.json": (make_index, read_checkpoint, True),
    "step.sha256": (make_sums, read_sums, False),
    "tokenizer.json": (make_tokenizer, read_tokenizer, True),
    "tokenizer_config.json": (make_tokenizer, read_tokenizer, True),
    "chat_template.jinja": (make_template, read_tokenizer, False),
    "generation_config.json": (make_generation_config, read_generation_config, True),
    "train_config.json": (make_options, read_options, True),
    "step.json": (make_step, read_step, True),
    "metrics.jsonl": (make_metrics, read_metrics, False),
    "prompts.jsonl": (make_prompts, read_prompts, False),
    "training_state.pt": (make_state, read_state, False),
    "floor.json": (make_floor, read_floor, True),
    "wandb_id.txt": (make_wandb_id, read_wandb_id, False),
    ".lock_holder": (make_holder, read_holder, False),
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


@pytest.mark.parametrize("name", [name for name, (_, _, is_json) in READERS.items() if is_json])
def test_any_value_in_any_field_is_read_or_refused_in_a_sentence(name, tmp_path):
    make, read, _ = READERS[name]
    make(tmp_path)
    file = tmp_path / name
    valid = json.loads(file.read_bytes())
    places = [[i] for i in range(len(valid))]
    places += [[i, 0] for i, x in enumerate(valid.values()) if isinstance(x, dict | list)]
    for path, new in itertools.product(places, VALUES):
        changed = edit_json(copy.deepcopy(valid), [("replace", path, new)])
        file.write_text(json.dumps(changed))
        try:
            read(tmp_path)
        except Exception as error:
            check_refusal(error, tmp_path)


@pytest.mark.parametrize("state", [None, [1], torch.ones(3), {}, {"progress": 3}])
def test_a_training_state_of_something_else_is_refused(state, tmp_path):
    torch.save(state, tmp_path / "training_state.pt")
    with pytest.raises(UserError, match="training_state.pt is missing or damaged"):
        checkpoint.load_training_state(tmp_path)


def test_any_value_in_a_training_state_is_gone_on_from_or_refused(tmp_path):
    """Places of its dicts and lists, to which JSON's edits do as well."""
    make_state(tmp_path)
    valid = torch.load(tmp_path / "training_state.pt", weights_only=True)

    @settings(FEW, max_examples=150)
    @given(JSON_EDITS)
    def run(edits):
        torch.save(edit_json(copy.deepcopy(valid), edits), tmp_path / "training_state.pt")
        try:
            read_state(tmp_path)
        except Exception as error:
            check_refusal(error, tmp_path)

    run()


@pytest.mark.filterwarnings("ignore:overflow")
def test_a_curve_is_drawn_of_any_figures(tmp_path):
    lines = [
        json.dumps({"step": step, "loss": value, "val_loss": value, "floor": value}) + "\n"
        for step, value in enumerate(VALUES)
        if not isinstance(value, dict | list)
    ]
    run = tmp_path / "cost_$5_$6"
    run.mkdir()
    (run / "metrics.jsonl").write_text("".join(lines) + '{"step": 1000}\n')
    assert report.draw_curve(run).is_file()


# ----- data ---------------------------------------------------------------------------------------

ROWS = [
    {"text": "one\ntwo"},
    {"text": "é", "id": 3},
    {"messages": CHAT, "tools": [{"name": "f", "parameters": {"x": [1]}}]},
    {"instruction": "Add.", "input": "1 2", "output": "3"},
    {"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]},
]
FORMATS = ["jsonl", "json", "jsonl.gz", "json.gz", "csv", "parquet", "txt"]


def make_data(file: Path) -> None:
    if file.suffix == ".txt":
        file.write_bytes("é\r\n猫".encode() * 20)
    else:
        write(file, ROWS[1:2] * 9 if file.suffix == ".csv" else ROWS)


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
    make_data(file)
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


PROGRAMS = {"train.py": TrainConfig, "sample.py": SampleConfig}


def flags_of(program: str) -> list[str]:
    names = [f"--{name}" for name in vars(PROGRAMS[program]())]
    return [*names, "--no_such", "--data.x", "--max-steps"]


def command_lines(program: str):
    flag = st.sampled_from(flags_of(program))
    word = st.sampled_from(WORDS) | st.text(max_size=6)
    with_value = st.tuples(flag, st.sampled_from(["", "="]), word).map("".join)
    return st.lists(flag | word | with_value, max_size=5)


def check_command_line(program: str, arguments: list[str]) -> None:
    """In the present directory, which is empty and stays so until all is understood."""
    try:
        config = parse_config(PROGRAMS[program], arguments)
        if program == "train.py":
            check_values(config)
        else:
            sample.refuse_contradictions(config)
            if config.prompt != "-":
                sample.read_rows(config)
    except UserError as error:
        assert str(error)
    except SystemExit as end:
        assert end.code in (0, 2)
    assert not list(Path().iterdir())


@pytest.mark.parametrize("program", PROGRAMS)
def test_any_command_line_is_understood_or_refused(program, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    @settings(FEW, max_examples=150)
    @given(command_lines(program))
    def run(arguments):
        check_command_line(program, arguments)
        capsys.readouterr()

    run()


@pytest.mark.parametrize("name", sorted(vars(TrainConfig())))
def test_config_files_with_any_value(name, tmp_path):
    file = tmp_path / "recipe.py"
    values = [*VALUES[:-2], -(2**40), (1, 2), b"x", 1j]
    texts = [f"float('{v}')" if isinstance(v, float) else repr(v) for v in values]
    texts.append("__import__('numpy').ones(2)")
    for text in [*texts, "10**5000"]:  # which Python does not print
        file.write_text(f"{name} = {text}\n")
        try:
            check_values(parse_config(TrainConfig, [str(file), "--out_dir=out/x"]))
        except UserError as error:
            assert name in str(error) and len(str(error)) < 1500


FINDERS = {
    "data": lambda name: read_data(Path(name), "stop"),
    "tokenizer": Tokenizer.load,
    "checkpoint": checkpoint.find_checkpoint,
    "model": lambda name: checkpoint.load_model(name, "cpu", None),
    "run": lambda name: checkpoint.read_run(Path(name)),
    "resume": lambda name: parse_config(TrainConfig, ["--resume", f"--out_dir={name}"]),
    "prompt": lambda name: sample.read_prompt("@" + name),
    "config": lambda name: parse_config(TrainConfig, [name]),
}


@pytest.mark.parametrize("kind", FINDERS)
def test_any_path_is_found_or_refused(kind, tmp_path, monkeypatch):
    """Names that no file can have, too."""
    monkeypatch.chdir(tmp_path)

    @FEW
    @example("x" * 300)
    @example("x" * 300 + "/y")
    @example("x\0")
    @example("\udcff")
    @given(st.text(min_size=1, max_size=30).filter(lambda name: not name.startswith("-")))
    def run(name):
        with contextlib.suppress(UserError):
            FINDERS[kind](name)

    run()


@pytest.mark.parametrize("name", ["x" * 300, "x\0"])
def test_a_run_is_not_begun_under_a_name_that_no_directory_can_have(name, tmp_path):
    with pytest.raises(UserError, match="--out_dir=.*cannot be written to"):
        checkpoint.RunLock(tmp_path / name).take(make_directory=True)
