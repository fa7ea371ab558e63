"""The readers: every format gives the same rows, every bad input its sentence, and no input at all
crashes them or costs a good row.
"""

import csv
import gzip
import json
import random
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from config import UserError
from data import sources
from data.sources import RowError, Source, find_sources, parse, read_chunks, sentence
from data.tokenizer import ChatStyle

QUIET = settings(max_examples=200, deadline=None, derandomize=True, database=None)


def read(path: Path):
    """(good rows, sentences about the bad ones) of a file."""
    good, bad = [], []
    for chunk in read_chunks(Source(path.name, path)):
        for number, item in chunk.items:
            try:
                good.append(parse(item))
            except RowError as error:
                bad.append(sentence(chunk, number, error))
    return good, bad


def texts(path: Path) -> list[str]:
    good, bad = read(path)
    assert not bad
    return [row.text for row in good]


def lines(*rows) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


# ----- formats ------------------------------------------------------------------------------------

ROWS = [{"text": "2020-01-02"}, {"text": "12"}, {"text": 'a,b\n"c"'}, {"text": " null é 猫\t"}]


def write(path: Path, rows: list[dict]) -> Path:
    """rows in the format that the name of path asks for."""
    name = path.name
    if name.endswith(".parquet"):
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif name.endswith(".csv"):
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        content = lines(*rows) if ".jsonl" in name else json.dumps(rows, indent=1).encode()
        path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return path


@pytest.mark.parametrize("ending", ["jsonl", "json", "jsonl.gz", "json.gz", "csv", "parquet"])
def test_every_format_gives_the_same_texts_and_guesses_no_types(tmp_path, ending):
    path = write(tmp_path / f"data.{ending}", ROWS)
    assert texts(path) == [row["text"] for row in ROWS]


def test_a_txt_is_one_document_with_unix_line_ends(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n\r\n\xc3\xa9")
    assert texts(path) == ["one\ntwo\n\né"]
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert texts(tmp_path / "a.txt.gz") == ["one\ntwo\n\né"]


def test_json_may_hold_lines_too(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(lines(*ROWS))
    assert texts(path) == [row["text"] for row in ROWS]


def test_marks_line_ends_and_blank_lines_are_no_mistakes(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n   \n{"text": "b"}\n\n{"text": "c"}')
    assert texts(path) == ["a", "b", "c"]


@pytest.mark.parametrize("ending", ["jsonl", "json", "csv", "jsonl.gz"])
def test_chunks_are_bounded_and_account_for_the_whole_file(tmp_path, monkeypatch, ending):
    monkeypatch.setattr(sources, "CHUNK_BYTES", 1000)
    rows = [{"text": f"row {i} " + "x" * 90} for i in range(500)]
    path = write(tmp_path / f"a.{ending}", rows)
    chunks = list(read_chunks(Source("a", path)))
    assert len(chunks) > (1 if ending == "jsonl.gz" else 3)
    assert sum(chunk.size for chunk in chunks) == pytest.approx(path.stat().st_size, rel=0.01)
    assert chunks[-1].items[-1][0] == len(rows)
    assert texts(path) == [row["text"] for row in rows]


# ----- kinds of rows ------------------------------------------------------------------------------


def roles_and_contents(row):
    return [(m["role"], m["content"]) for m in row.messages]


def test_kinds_of_rows():
    chat = [("system", "S"), ("user", "Q"), ("assistant", "A")]
    messages = [{"role": role, "content": content} for role, content in chat]
    shared = [{"from": role, "value": content} for role, content in chat]
    shared[1]["from"], shared[2]["from"] = "human", "gpt"
    for item, kind in (
        ({"messages": messages}, "messages"),
        ({"conversations": messages}, "conversations"),
        ({"conversations": shared}, "conversations"),
        ({"conversations": shared[1:], "system": "S"}, "conversations"),
        ({"text": None, "messages": messages, "tools": []}, "messages"),
        ({"instruction": "Q", "output": "A", "system": "S"}, "instruction/output"),
    ):
        row = parse(item)
        assert (row.kind, roles_and_contents(row), row.unused) == (kind, chat, ())


def test_instructions():
    with_input = parse({"instruction": "Add.", "input": "1 2", "output": "3"})
    assert roles_and_contents(with_input) == [("user", "Add.\n\n1 2"), ("assistant", "3")]
    assert with_input.kind == "instruction/input/output"
    for nothing in ("", None):
        row = parse({"instruction": "Hi.", "input": nothing, "output": "Ho."})
        assert roles_and_contents(row) == [("user", "Hi."), ("assistant", "Ho.")]


def test_reasoning_is_kept_and_unused_fields_are_named():
    turns = [
        {"role": "user", "content": "Q", "id": 7},
        {"role": "assistant", "content": "A", "reasoning_content": "R"},
    ]
    row = parse({"messages": turns, "source": "web", "note": None})
    assert row.messages[1]["reasoning_content"] == "R"
    assert row.unused == ("id", "source")


def test_tools_are_kept_in_every_form():
    call = {"name": "f", "arguments": {"x": 1}}
    turns = [
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "1"},
        {"role": "assistant", "content": "A"},
    ]
    system = {"role": "system", "content": "", "tools": [{"name": "f"}]}
    for item, first in (
        ({"messages": turns, "tools": [{"name": "f"}]}, {**system, "content": None}),
        ({"messages": [{**system, "tools": json.dumps(system["tools"])}, *turns]}, system),
        ({"messages": turns, "system": "S", "tools": system["tools"]}, {**system, "content": "S"}),
    ):
        assert parse(item).messages == [first, *turns]
    spelled = [{**turns[1], "content": None, "tool_calls": json.dumps([{"function": call}])}]
    assert parse({"messages": [turns[0], *spelled, *turns[2:]]}).messages == turns


def test_the_same_content_is_the_same_row_whatever_its_form():
    a = parse({"instruction": "Q", "output": "A"})
    b = parse({"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]})
    assert a.content == b.content != parse({"instruction": "Q", "output": "a"}).content


# ----- bad input: the sentences -------------------------------------------------------------------

U, A = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}
CALL = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"x": 1}}]}
GOOD = b'{"text": "good"}\n'
BAD_LINES = {
    "broken JSON": (b'{"text": "a"', ": not valid JSON (Expecting ',' delimiter at column 13)"),
    "not JSON at all": (b"hello", ": not valid JSON (Expecting value at column 1)"),
    "a number too long": (b"9" * 5000, ": not valid JSON (Exceeds the limit"),
    "nested too deep": (b"[" * 100_000, ": not valid JSON (maximum recursion depth exceeded"),
    "a list": (b"[1, 2]", ": expected an object with fields, found a list ([1, 2])"),
    "no field": (
        b"{}",
        ": no known field: expected text, messages, conversations, or "
        "instruction and output, found no field",
    ),
    "unknown fields": (
        b'{"body": "x", "id": 3}',
        ": no known field: expected text, messages, conversations, or "
        "instruction and output, found 'body', 'id'",
    ),
    "null": (b'{"text": null}', ", field 'text': expected something, found null"),
    "a number": (b'{"text": 12}', ", field 'text': expected a string, found a number (12)"),
    "a boolean": (b'{"text": true}', ", field 'text': expected a string, found a boolean (true)"),
    "an object": (
        b'{"text": {"a": 1}}',
        ", field 'text': expected a string, found an object ({\"a\": 1})",
    ),
    "empty text": (b'{"text": " \\n"}', ", field 'text': the text is empty"),
    "half a surrogate pair": (
        b'{"text": "a\\ud800"}',
        ", field 'text': half of a surrogate pair (\\ud800) is no character",
    ),
    "invalid UTF-8": (b'{"text": "a\xff"}', ": invalid UTF-8 (byte 0xff at position 11)"),
    "missing output": (b'{"instruction": "a"}', ", field 'output': missing"),
    "missing instruction": (b'{"output": "a"}', ", field 'instruction': missing"),
    "null output": (
        b'{"instruction": "a", "output": null}',
        ", field 'output': expected a string, found null",
    ),
    "empty output": (
        b'{"instruction": "a", "output": ""}',
        ", field 'output': the answer is empty",
    ),
    "input no string": (
        b'{"instruction": "a", "input": 3, "output": "b"}',
        ", field 'input': expected a string, found a number (3)",
    ),
    "chat no list": (
        b'{"messages": "hi"}',
        ", field 'messages': expected a list, found a string (hi)",
    ),
    "empty chat": (b'{"messages": []}', ", field 'messages': the list is empty"),
    "turn no object": (
        b'{"messages": ["hi"]}',
        ", field 'messages[0]': expected an object, found a string (hi)",
    ),
    "turn without role": (
        lines({"messages": [{"content": "a"}]}),
        ", field 'messages[0].role': missing",
    ),
    "turn without content": (
        lines({"messages": [{"role": "user"}]}),
        ", field 'messages[0].content': missing",
    ),
    "null content": (
        lines({"messages": [{"role": "user", "content": None}]}),
        ", field 'messages[0].content': expected a string, found null",
    ),
    "content in parts": (
        lines({"messages": [{"role": "user", "content": [{"type": "text"}]}]}),
        ', field \'messages[0].content\': expected a string, found a list ([{"type": "text"}])',
    ),
    "unknown role": (
        lines({"messages": [{"role": "wizard", "content": "a"}]}),
        ", field 'messages[0].role': unknown role 'wizard' (known: assistant, gpt, "
        "human, system, tool, user)",
    ),
    "two answers": (
        lines({"messages": [U, A, A]}),
        ", field 'messages[2]': two assistant turns in a row",
    ),
    "two questions": (
        lines({"conversations": [U, U, A]}),
        ", field 'conversations[1]': two user turns in a row",
    ),
    "late system": (
        lines({"messages": [U, A, {"role": "system", "content": "S"}]}),
        ", field 'messages[2]': a system message may only stand first",
    ),
    "answer first": (
        lines({"messages": [A, U]}),
        ", field 'messages[0]': expected the user to begin, found assistant",
    ),
    "no answer": (
        lines({"messages": [U]}),
        ", field 'messages': no assistant turn, so nothing to learn",
    ),
    "empty answer": (
        lines({"messages": [U, {"role": "assistant", "content": "\n"}]}),
        ", field 'messages[1].content': the assistant's answer is empty",
    ),
    "tools no list": (
        lines({"messages": [U, A], "tools": {"name": "f"}}),
        ", field 'tools': expected a list, found an object",
    ),
    "tools no JSON": (
        lines({"messages": [U, A], "tools": "f(x)"}),
        ", field 'tools': the text is not valid JSON",
    ),
    "functions": (
        lines({"messages": [U, A], "functions": [{"name": "f"}]}),
        ", field 'functions': not supported, and a chat would mean less without it",
    ),
    "functions in a turn": (
        lines({"messages": [{**U, "functions": [{"name": "f"}]}, A]}),
        ", field 'messages[0].functions': not supported",
    ),
    "tool call without arguments": (
        lines({"messages": [U, {**A, "tool_calls": [{"name": "f"}]}]}),
        ", field 'messages[1].tool_calls[0].arguments': expected an object, found null",
    ),
    "tool call without name": (
        lines({"messages": [U, {**A, "tool_calls": [{"arguments": {}}]}]}),
        ", field 'messages[1].tool_calls[0].name': missing",
    ),
    "tool call no object": (
        lines({"messages": [U, {**A, "tool_calls": ["f"]}]}),
        ", field 'messages[1].tool_calls[0]': expected an object, found a string (f)",
    ),
    "user calls": (
        lines({"messages": [{**U, "tool_calls": [{"name": "f", "arguments": {}}]}, A]}),
        ", field 'messages[0].tool_calls': only an assistant has this, not user",
    ),
    "tool unasked": (
        lines({"messages": [U, A, {"role": "tool", "content": "1"}]}),
        ", field 'messages[2]': a tool answers, but the assistant did not call one",
    ),
    "user behind a tool": (
        lines({"messages": [U, CALL, {"role": "tool", "content": "1"}, U]}),
        ", field 'messages[3]': user may not stand behind tool",
    ),
    "reasoning user": (
        lines({"messages": [{**U, "reasoning_content": "R"}, A]}),
        ", field 'messages[0].reasoning_content': only an assistant has this, not user",
    ),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_bad_lines(tmp_path, name):
    line, complaint = BAD_LINES[name]
    path = tmp_path / "data.jsonl"
    path.write_bytes(GOOD + line.rstrip(b"\n") + b"\n" + GOOD)
    good, bad = read(path)
    assert [row.text for row in good] == ["good", "good"]
    assert len(bad) == 1 and bad[0].startswith("data.jsonl, line 2" + complaint), bad
    assert bad[0].endswith(". Fix it or pass --on_bad_row=skip.") and "\n" not in bad[0]
    assert len(bad[0]) < 300


def test_a_50_mb_line_is_named_and_costs_nothing_else(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(GOOD + b'{"text": "' + b"x" * 50_000_000 + b'"}\n' + GOOD)
    good, bad = read(path)
    assert len(good) == 2
    assert bad[0].startswith("data.jsonl, line 2: the line is 50,000,013 bytes long")


def test_a_line_just_short_enough_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "LONGEST_LINE", 100)
    for extra, is_good in ((-1, True), (0, True), (1, False)):
        path = tmp_path / "data.jsonl"
        path.write_bytes(b'{"text": "' + b"x" * (88 + extra) + b'"}\n' + GOOD)
        good, bad = read(path)
        assert (len(good), len(bad)) == ((2, 0) if is_good else (1, 1))
        path.write_bytes(GOOD + b'{"text": "' + b"x" * (88 + extra) + b'"}')  # no line end
        good, bad = read(path)
        assert (len(good), len(bad)) == ((2, 0) if is_good else (1, 1))


@pytest.mark.parametrize("ending", ["jsonl", "json", "csv", "txt"])
@pytest.mark.parametrize("content", [b"", b"\n \r\n"])
def test_empty_files(tmp_path, ending, content):
    path = tmp_path / f"data.{ending}"
    path.write_bytes(content)
    good, bad = read(path)
    assert not good and len(bad) == 1
    if ending != "csv" or not content.strip(b"\r\n "):
        assert bad[0].startswith(f"data.{ending}")


def test_an_empty_list_is_an_empty_file(tmp_path):
    path = tmp_path / "data.json"
    path.write_bytes(b" [ ] \n")
    assert "the file is empty" in read(path)[1][0]


def test_a_gzip_cut_short_keeps_what_stands_before_the_cut(tmp_path):
    rows = [{"text": f"row {i} {i * 7919 % 1000}"} for i in range(2000)]
    whole = gzip.compress(lines(*rows))
    path = tmp_path / "data.jsonl.gz"
    path.write_bytes(whole[: len(whole) // 2])
    good, bad = read(path)
    assert len(bad) == 1 and "line" in bad[0]
    assert "no gzip, or cut short or damaged here; what follows cannot be read" in bad[0]
    assert 0 < len(good) < 2000
    assert [row.text for row in good] == [row["text"] for row in rows[: len(good)]]


def test_junk_behind_a_gzip_costs_no_row(tmp_path):
    path = tmp_path / "data.jsonl.gz"
    path.write_bytes(gzip.compress(lines(*ROWS)) + b"junk")
    good, bad = read(path)
    assert [row.text for row in good] == [row["text"] for row in ROWS]
    assert len(bad) == 1 and "cut short or damaged here" in bad[0]


def test_a_gz_that_is_none_and_other_damage(tmp_path):
    path = tmp_path / "data.jsonl.gz"
    path.write_bytes(GOOD)
    assert read(path)[1][0].startswith("data.jsonl.gz, line 1: the file is no gzip, or cut short")
    for name in ("data.json.gz", "data.txt.gz"):
        whole = gzip.compress(b"[" + b"1," * 5000)
        (tmp_path / name).write_bytes(whole[:-12])
        assert "the file is no gzip, or cut short or damaged" in read(tmp_path / name)[1][0]


@pytest.mark.parametrize("ending", ["jsonl", "json", "txt"])
def test_utf_16_is_named(tmp_path, ending):
    path = tmp_path / f"data.{ending}"
    path.write_bytes('{"text": "a"}\n'.encode("utf-16"))
    assert read(path)[1] == [
        f"data.{ending}: the file is UTF-16. Convert it to UTF-8. Fix the file or leave it out."
    ]


def test_invalid_utf_8_in_whole_files(tmp_path):
    for ending in ("txt", "json"):
        path = tmp_path / f"data.{ending}"
        path.write_bytes(b"[\nab\n\xfe]")
        assert "invalid UTF-8 in line 3 (byte 0xfe at position 5)" in read(path)[1][0]


@pytest.mark.parametrize(
    "content, rows, complaint",
    [
        ('[{"text": "a"}, {"text": "b"', 1, "row 2: not valid JSON"),
        ('[{"text": "a"} {"text": "b"}]', 1, "row 2: not valid JSON (expected , or ] at line 1)"),
        ('[{"text": "a"},\n{"text": tru}]', 1, "row 2: not valid JSON (Expecting value at line 2"),
        ('[{"text": "a"}] x', 1, "row 2: something follows the list (line 1)"),
        ('[{"text": "a"}, 3, {"text": "b"}]', 2, "row 2: expected an object with fields"),
        ('[{"text": "a"}, ' + "[" * 100_000, 1, "row 2: not valid JSON (maximum recursion"),
        ("[", 0, "row 1: not valid JSON"),
    ],
)
def test_a_broken_list_keeps_what_stands_before_the_break(tmp_path, content, rows, complaint):
    path = tmp_path / "data.json"
    path.write_text(content)
    good, bad = read(path)
    assert len(good) == rows
    assert len(bad) == 1 and bad[0].startswith("data.json, " + complaint), bad


@pytest.mark.parametrize("window", [1, 7, 40])
def test_a_list_read_in_windows_gives_the_same_rows(tmp_path, monkeypatch, window):
    """Elements longer and shorter than a window, numbers that its end cuts, any white space."""
    rng = random.Random(0)
    values = [{"text": "a" * 90 + "é\n"}, {"text": "b"}, 123456789, -1.25e17, [1, [2, "]"]], None]
    values = [rng.choice(values) for _ in range(200)]
    content = "[" + ",".join(json.dumps(v) + rng.choice(["", " ", "\n"]) for v in values) + "]"
    path = tmp_path / "a.json"
    path.write_text(content)
    monkeypatch.setattr(sources, "JSON_WINDOW", window)
    read = [item for chunk in read_chunks(Source("a", path)) for item in chunk.items]
    assert read == list(enumerate(values, 1))
    path.write_text(content[:-1] + ',\n{"text": }]')  # and the line and column of what is broken
    line, column = content.count("\n") + 2, len('{"text": ') + 1
    *_, (number, error) = [item for chunk in read_chunks(Source("a", path)) for item in chunk.items]
    assert number == 201
    assert str(error).startswith(
        f"not valid JSON (Expecting value at line {line}, column {column})"
    )


def test_an_element_has_the_limit_of_a_line(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "JSON_WINDOW", 25)
    monkeypatch.setattr(sources, "LONGEST_LINE", 100)
    path = tmp_path / "a.json"
    for extra, is_good in ((-1, True), (0, True), (1, False)):
        row = '{"text": "' + "x" * (88 + extra) + '"}'
        path.write_text(f'[{{"text": "b"}}, {row},' + '{"text": "c"}]')
        good, bad = read(path)
        assert (len(good), len(bad)) == ((3, 0) if is_good else (1, 1))
    assert bad[0].startswith(
        "a.json, row 2: not valid JSON, or longer than 100 characters (line 1)"
    )


def test_what_is_found_is_described_by_its_beginning():
    """And not by a million words of which a few are shown."""
    for value in (["a b " * 10**6], {"text": ["x"] * 10**6}, [[["y"]]] * 10**5):
        for item in ({"text": value}, {"messages": "a b " * 10**6}):
            tracemalloc.start()
            try:
                with pytest.raises(RowError) as error:
                    parse(item)
                peak = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
            assert len(str(error.value)) < 150 and str(error.value).endswith("...)")
            assert peak < 20e6, peak


def test_bad_csv(tmp_path):
    path = tmp_path / "data.csv"
    path.write_bytes(b'text,id\na,1\nb,2,3\n,4\nc\n\xff,5\n"d\n')
    good, bad = read(path)
    assert [row.text for row in good] == ["a", "c"]
    assert [line.removeprefix("data.csv, ").removesuffix(" " + sources.MEND) for line in bad] == [
        "row 2: 3 values, but the first line names 2 fields.",
        "row 3, field 'text': the text is empty.",
        "row 5, field 'text': invalid UTF-8 (byte 0xff).",
        "row 6: not valid CSV (unexpected end of data).",
    ]


ROOT = Path(__file__).parents[1]
EDITED_PARQUET = """
import sys
from pathlib import Path
from data.sources import find_sources, read_chunks

file = Path(sys.argv[1])
whole = file.read_bytes()
for place in range(len(whole)):
    file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    for source in find_sources(str(file))[0]:
        for chunk in read_chunks(source):
            list(chunk.items)
"""


def test_no_byte_of_a_parquet_ends_the_process(tmp_path):
    """pyarrow ends it for two of these, as the description of a column is read."""
    path = write(tmp_path / "data.parquet", [{"text": "a"}, {"text": "b"}])
    command = [sys.executable, "-c", EDITED_PARQUET, str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-500:]


def test_bad_parquet(tmp_path):
    path = tmp_path / "data.parquet"
    path.write_bytes(b"PAR1 no")
    assert read(path)[1][0].startswith("data.parquet: not a whole parquet file")
    whole = write(tmp_path / "whole.parquet", [{"text": "a"}, {"text": None}, {"text": "b"}])
    good, bad = read(whole)
    assert len(good) == 2 and "row 2, field 'text': expected something, found null" in bad[0]


# ----- what --data may name -----------------------------------------------------------------------


def names(found):
    return [source.name for source in found]


def test_directories_globs_and_files(tmp_path, monkeypatch):
    """Each file by the name that the person gave, or what follows from it."""
    monkeypatch.chdir(tmp_path)
    for name in ("b.jsonl", "a.txt", "sub/c.csv", "notes.md", ".hidden", "d.jsonl/e.md"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text("x")
    train, val = find_sources(tmp_path)
    here = [f"{tmp_path}/{name}" for name in ("a.txt", "b.jsonl", "sub/c.csv")]
    assert (names(train), val) == (here, [])
    assert names(find_sources("sub")[0]) == ["sub/c.csv"]
    train, val = find_sources("*.jsonl", tmp_path / "a.txt")
    assert (names(train), names(val)) == (["b.jsonl"], [f"{tmp_path}/a.txt"])
    for name in ("train.jsonl", "val.jsonl", "floor.json"):
        Path(name).write_text("x")
    train, val = find_sources(".")
    assert (names(train), names(val)) == (["train.jsonl"], ["val.jsonl"])
    assert names(find_sources("./b.jsonl", ".")[1]) == ["val.jsonl"]


def test_links_to_files_are_followed_wherever_they_lead(tmp_path):
    """As large files are often kept; links to directories within one are not."""
    outside, data = tmp_path / "outside", tmp_path / "data"
    outside.mkdir()
    data.mkdir()
    write(outside / "large.jsonl", ROWS)
    (data / "train.jsonl").symlink_to(outside / "large.jsonl")
    (data / "more").symlink_to(outside)
    (data / "gone.jsonl").symlink_to(outside / "nothing")
    train, val = find_sources(data)
    assert (names(train), val) == ([f"{data}/train.jsonl"], [])
    assert texts(train[0].path) == [row["text"] for row in ROWS]
    assert names(find_sources(data / "more")[0]) == [f"{data}/more/large.jsonl"]


def test_what_is_not_there(tmp_path):
    with pytest.raises(UserError, match=r"No such file or directory: --data=.*none\.jsonl"):
        find_sources(tmp_path / "none.jsonl")
    with pytest.raises(UserError, match="holds no data file. Known formats: .jsonl"):
        find_sources(tmp_path)
    with pytest.raises(UserError, match="No data file matches --data="):
        find_sources(f"{tmp_path}/*.jsonl")
    (tmp_path / "a.doc").write_text("x")
    with pytest.raises(UserError, match="unknown format"):
        find_sources(tmp_path / "a.doc")
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(UserError, match="--val_data="):
        find_sources(tmp_path / "a.txt", tmp_path / "none.txt")


def test_hub_names_go_through_datasets(monkeypatch):
    import datasets

    rows = [{"text": f"row {i}", "id": i} for i in range(2500)]
    splits = datasets.DatasetDict(
        train=datasets.Dataset.from_list(rows), validation=datasets.Dataset.from_list(rows[:3])
    )
    monkeypatch.setattr(datasets, "load_dataset", lambda name: splits)
    train, val = find_sources("owner/stories")
    assert (names(train), names(val)) == (["owner/stories/train"], ["owner/stories/validation"])
    items = [item for chunk in read_chunks(train[0]) for item in chunk.items]
    assert [(number, parse(item).text) for number, item in items] == [
        (i + 1, row["text"]) for i, row in enumerate(rows)
    ]


def test_a_hub_name_without_network(monkeypatch):
    import datasets

    def no_network(name):
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", no_network)
    with pytest.raises(UserError, match="owner/stories is no file here.*ConnectionError"):
        find_sources("owner/stories")


# ----- fuzz ---------------------------------------------------------------------------------------

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
TURNS = st.dictionaries(
    st.sampled_from(["role", "from", "content", "value", "reasoning_content", "tool_calls", "id"]),
    st.sampled_from(["user", "assistant", "system", "gpt", "tool", "", "\ud800"]) | JSON_VALUES,
)
FIELDS = ["text", "messages", "conversations", "instruction", "input", "output", "system", "tools"]
OBJECTS = st.dictionaries(
    st.sampled_from(FIELDS) | st.text(max_size=4), st.lists(TURNS, max_size=4) | JSON_VALUES
)
GOOD_LINES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8).map(
    lambda text: json.dumps({"text": text + "."}).encode()
)
BAD_BYTES = st.one_of(
    st.binary(max_size=20),
    OBJECTS.map(lambda value: json.dumps(value).encode()),
    GOOD_LINES.map(lambda line: line[: len(line) // 2]),
    st.sampled_from([line.strip() for line, _ in BAD_LINES.values() if len(line) < 500]),
).filter(lambda line: b"\n" not in line)


@QUIET
@given(JSON_VALUES | OBJECTS)
def test_any_value_is_a_row_or_gets_a_sentence(item):
    try:
        row = parse(item)
    except RowError as error:
        assert str(error) and "\n" not in str(error) and len(str(error)) < 300
        return
    contents = [row.text] if row.messages is None else [m["content"] for m in row.messages]
    for content in contents[1:] if row.messages and row.messages[0].get("tools") else contents:
        assert isinstance(content, str) and (content.encode() or content == "")
    if row.messages is not None:
        fields = {"role", "content", "reasoning_content", "tools", "tool_calls"}
        assert all(set(m) <= fields for m in row.messages)
        for piece in ChatStyle(splits=True, tools=True).pieces(row.messages, False):
            piece.text.encode()  # every chat that is accepted can be written
        assert any(m["role"] == "assistant" for m in row.messages)


@QUIET
@example([], 0, b"\n")
@given(
    st.lists(st.tuples(st.booleans(), GOOD_LINES, BAD_BYTES), max_size=8),
    st.integers(1, 60),
    st.sampled_from([b"\n", b"\r\n"]),
)
def test_no_lines_crash_the_reader_or_cost_a_good_row(tmp_path_factory, entries, chunk, end):
    path = tmp_path_factory.mktemp("fuzz") / "data.jsonl"
    path.write_bytes(b"".join((good if is_good else bad) + end for is_good, good, bad in entries))
    wanted = [json.loads(good)["text"] for is_good, good, _ in entries if is_good]
    if entries and not entries[0][0] and entries[0][2][:2] in (b"\xff\xfe", b"\xfe\xff"):
        wanted = []  # the file says that it is UTF-16
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "CHUNK_BYTES", chunk)
        good, bad = read(path)
    found = iter(row.text for row in good)
    assert all(text in found for text in wanted)  # in order; some of the bad are good after all
    for line in bad:
        assert (
            line.startswith("data.jsonl")
            and line.endswith((sources.MEND, sources.MEND_FILE))
            and "\n" not in line
        )
    if not entries:
        assert "empty" in bad[0]


@pytest.mark.parametrize("ending", ["json", "csv", "txt", "parquet", "jsonl.gz", "json.gz"])
def test_no_bytes_crash_the_other_readers(tmp_path, ending):
    path = tmp_path / f"data.{ending}"
    whole = write(path, ROWS).read_bytes() if ending != "txt" else "é\r\n猫".encode()

    @settings(QUIET, max_examples=150)
    @given(st.binary(max_size=30), st.integers(0, len(whole)), st.integers(0, 40))
    def run(junk, position, skipped):
        path.write_bytes(whole[:position] + junk + whole[position + skipped :])
        good, bad = read(path)
        assert good or bad
        for line in bad:
            assert line.startswith(path.name) and line.endswith((sources.MEND, sources.MEND_FILE))

    run()
