"""The readers of test_fuzz.py under atheris, which sees which edits reach new code. Outside CI:

    pip install atheris
    python tests/fuzz_readers.py tokenizer.json -max_total_time=600 -rss_limit_mb=4096

The first argument is the name of a reader (test_fuzz.READERS) or data.jsonl, data.csv, ...; the
rest is libFuzzer's. An input that brings a traceback is kept as crash-*, and given again as the
last argument it brings it again.
"""

import json
import sys
import tempfile
from pathlib import Path

import atheris

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
OURS = ["data", "files", "locks", "pretrained", "config", "checkpoint", "report", "sample", "chat"]
with atheris.instrument_imports(include=OURS):
    import test_fuzz

ROUNDS = 4  # at most so many edits of one file


def main() -> None:
    name, directory = sys.argv.pop(1), Path(tempfile.mkdtemp())
    if name.startswith("data."):
        file = directory / name
        if name == "data.txt":
            file.write_bytes("é\r\n猫".encode() * 20)
        else:
            rows = test_fuzz.ROWS[1:2] * 9 if name == "data.csv" else test_fuzz.ROWS
            test_fuzz.write(file, rows)
    else:
        make, read, _ = test_fuzz.READERS[name]
        make(directory)
    valid = (directory / name).read_bytes()

    def one_input(content: bytes) -> None:
        provider = atheris.FuzzedDataProvider(content)
        changed = draw_edits(provider, valid, is_json=name.endswith(".json"))
        if name.startswith("data."):
            on_bad_row = "skip" if provider.ConsumeBool() else "stop"
            test_fuzz.check_data(directory / name, changed, on_bad_row)
            return
        (directory / name).write_bytes(changed)
        try:
            read(directory)
        except Exception as error:
            test_fuzz.check_refusal(error, directory)

    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()


def draw_edits(provider, valid: bytes, is_json: bool) -> bytes:
    """The valid file after a few edits, of its values or of its bytes."""
    value = json.loads(valid) if is_json and provider.ConsumeBool() else None
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
    return valid if value is None else json.dumps(value).encode()


if __name__ == "__main__":
    main()
