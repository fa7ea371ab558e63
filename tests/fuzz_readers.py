"""The readers of test_fuzz.py under atheris, which sees which edits reach new code. Outside CI:

    pip install atheris
    python tests/fuzz_readers.py tokenizer.json -max_total_time=600 -rss_limit_mb=4096

The first argument is the name of a reader (test_fuzz.READERS), or data.jsonl, data.csv, ..., or a
program whose command line is read, train.py or sample.py; the rest is libFuzzer's. An input that
brings a traceback is kept as crash-*, and given again as the last argument it brings it again.
"""

import contextlib
import io
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path

import atheris
import torch

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
OURS = [
    "data",
    "files",
    "locks",
    "pretrained",
    "config",
    "checkpoint",
    "report",
    "sample",
    "chat",
    "train",
]
with atheris.instrument_imports(include=OURS):
    import test_fuzz

ROUNDS = 4  # at most so many edits of one file, or words of a command line


def main() -> None:
    name, directory = sys.argv.pop(1), Path(tempfile.mkdtemp())
    check = command_line_check if name in test_fuzz.PROGRAMS else file_check
    check_one = check(name, directory)

    def one_input(content: bytes) -> None:
        try:
            check_one(atheris.FuzzedDataProvider(content))
        except Exception:
            traceback.print_exc()  # with the error that was not a sentence; atheris leaves that out
            raise

    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()


def file_check(name: str, directory: Path):
    """A check of what the reader of that name makes of an edited file."""
    if name.startswith("data."):
        test_fuzz.make_data(directory / name)
    else:
        make, read, _ = test_fuzz.READERS[name]
        make(directory)
    valid = (directory / name).read_bytes()

    def check_one(provider) -> None:
        changed = draw_edits(provider, valid, *FORMS.get(Path(name).suffix, (None, None)))
        if name.startswith("data."):
            on_bad_row = "skip" if provider.ConsumeBool() else "stop"
            test_fuzz.check_data(directory / name, changed, on_bad_row)
            return
        (directory / name).write_bytes(changed)
        try:
            read(directory)
        except Exception as error:
            test_fuzz.check_refusal(error, directory)

    return check_one


def load_state(content: bytes):
    return torch.load(io.BytesIO(content), weights_only=True)


def dump_state(value) -> bytes:
    torch.save(value, content := io.BytesIO())
    return content.getvalue()


# By a file's ending: from its bytes to its values, and back.
FORMS = {
    ".json": (json.loads, lambda value: json.dumps(value).encode()),
    ".pt": (load_state, dump_state),
}


def draw_edits(provider, valid: bytes, load, dump) -> bytes:
    """The valid file after a few edits, of its bytes or, where there is `load`, of its values."""
    value = load(valid) if load and provider.ConsumeBool() else None
    for _ in range(provider.ConsumeIntInRange(1, ROUNDS)):
        if value is not None:
            kind = provider.PickValueInList(["replace", "delete", "repeat", "add"])
            path = [provider.ConsumeIntInRange(0, 400) for _ in range(1 + provider.ConsumeBool())]
            path += [provider.ConsumeIntInRange(0, 9) for _ in range(provider.ConsumeBool())]
            if provider.ConsumeBool():
                new = provider.PickValueInList(test_fuzz.VALUES)
            else:
                new = provider.ConsumeUnicode(20)
            value = test_fuzz.edit_json(value, [(kind, path, new)])
        else:
            kind = provider.PickValueInList(["flip", "delete", "repeat", "insert", "cut"])
            place, length = provider.ConsumeIntInRange(0, 10**6), provider.ConsumeIntInRange(1, 60)
            junk = provider.ConsumeBytes(8)
            valid = test_fuzz.edit_bytes(valid, [(kind, place, length, junk)])
    try:
        return valid if value is None else dump(value)
    except RecursionError:  # of pickle: no such file can be made
        return valid


def command_line_check(program: str, directory: Path):
    """A check of what the program makes of a few options, values and words of no meaning."""
    os.chdir(directory)

    def draw_word(provider) -> str:
        kind = provider.ConsumeIntInRange(0, 4)
        if kind == 0:
            return provider.PickValueInList(test_fuzz.WORDS)
        if kind == 1:
            return provider.ConsumeUnicode(8)
        if kind == 2:
            return str(provider.PickValueInList(test_fuzz.VALUES[:-1]))
        flag = provider.PickValueInList(test_fuzz.flags_of(program))
        return flag if kind == 3 else f"{flag}={draw_word(provider)}"

    def check_one(provider) -> None:
        words = [draw_word(provider) for _ in range(provider.ConsumeIntInRange(1, 2 * ROUNDS))]
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            test_fuzz.check_command_line(program, words)

    return check_one


if __name__ == "__main__":
    main()
