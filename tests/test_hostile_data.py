"""More of tests/test_hostile.py: small files that would become large in memory.

Chat templates that make much of little, then data and tokenizers: each is refused in a sentence,
and the last test measures what a process takes for them all.
"""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from config import UserError
from data import sources, tokenizer
from data.sources import RowError, Source, parse, read_chunks
from data.template import Template
from data.tokenizer import CHATML_TEMPLATE, Tokenizer
from tests.test_hostile import refused
from tests.test_tokenizer import qwen_like

ROOT = Path(__file__).parents[1]

NESTED = "{% set a = namespace(x='a') %}" + "{% set a = namespace(x=a, y=a) %}" * 14
TEXT = "{% set x = 'a' %}" + "{% set x = x + x %}" * 12
BOMBS = {
    "tojson of tojson": "{% set x = '\"' " + "| tojson " * 14 + "%}",
    "tojson, one at a time": "{% set x = '\"' %}" + "{% set x = x | tojson %}" * 14,
    "tojson of a list": TEXT + "{% set y = x.split('z') + x.split('z') %}" * 2
    + "{% set y = y + y %}" * 4 + "{% set z = y | tojson %}",
    "a list as text": "{% set x = '\\\\' %}" + "{% set x = x.split('z') | trim %}" * 14,
    "a namespace as text": NESTED + "{% set x = a | lower %}",
    "many splits": TEXT + "".join(f"{{% set x{i} = x.split('a') %}}" for i in range(100)),
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_a_template_ends_and_stays_small(tmp_path, name):
    directory = qwen_like(tmp_path / "tokenizer", BOMBS[name] + CHATML_TEMPLATE)
    refused(lambda: Tokenizer.load(directory), "tokenizer.json: its chat template cannot be")


def test_what_a_template_complains_of_is_text():
    with pytest.raises(ValueError, match="^it refuses the chat$"):
        Template(NESTED + "{{ raise_exception(a) }}").render([{"content": "x"}], False, None)


def test_a_template_may_use_what_real_ones_do(tmp_path):
    """Short texts through every filter and method that is paid for."""
    harmless = (
        "{% set ns = namespace(n=0) %}{% set x = ' A,b '.strip().split(',')[-1] | upper %}"
        "{% set x = x | lower | trim | tojson %}{% if x.startswith('\"') %}{% set ns.n = 1 %}"
        "{% endif %}{% set y = messages[0].get('content') %}"
    )
    directory = qwen_like(tmp_path / "tokenizer", harmless + CHATML_TEMPLATE)
    assert Tokenizer.load(directory).chat_style is not None


# ----- data ---------------------------------------------------------------------------------------


def problems(file: Path) -> list[str]:
    found = []
    for chunk in read_chunks(Source(file.name, file)):
        for number, item in chunk.items:
            try:
                parse(item)
            except RowError as error:
                found.append(sources.sentence(chunk, number, error))
    return found


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_a_row_of_many_lists_is_not_read(tmp_path, monkeypatch, name):
    monkeypatch.setattr(sources, "JSON_WINDOW", 100)
    monkeypatch.setattr(sources, "MOST_LISTS", 1000)
    read = []
    decode = json.JSONDecoder.decode
    monkeypatch.setattr(
        json.JSONDecoder, "decode", lambda self, text: read.append(text) or decode(self, text)
    )
    row = '{"text": "a", "x": [' + "[]," * 1000 + "{}]}"
    good = '{"text": "a"}'
    if name == "a.json":
        content, where = f"[{good},\n{row},\n{good}]", "a.json, row 2"
    else:
        content, where = f"{good}\n{row}\n{good}\n", "a.jsonl, line 2"
    (tmp_path / name).write_text(content)
    (problem,) = problems(tmp_path / name)
    assert problem.startswith(f"{where}: it holds more than 1,000 lists and objects. Cut it in")
    assert row not in read


def test_json_within_a_field_has_the_same_limit(monkeypatch):
    monkeypatch.setattr(sources, "MOST_LISTS", 100)
    turns = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
    parse({"messages": turns, "tools": "[" + "{}," * 98 + "{}]"})
    with pytest.raises(RowError, match="more than 100 lists and objects"):
        parse({"messages": turns, "tools": "[" + "{}," * 99 + "{}]"})


def test_a_csv_row_of_many_fields(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "MOST_LISTS", 1000)
    (tmp_path / "a.csv").write_text("text\n" + '"a,b"\n' * 2000 + "," * 1001)
    (problem,) = problems(tmp_path / "a.csv")
    assert problem.startswith("a.csv, row 2001: the row has more than 1,000 commas; what follows")


def test_a_tokenizer_of_many_lists_is_not_read(tmp_path, monkeypatch):
    directory = qwen_like(tmp_path / "tokenizer")
    content = (directory / "tokenizer.json").read_text()
    lists = content.count("[") + content.count("{")
    monkeypatch.setattr(tokenizer, "MOST_LISTS", lists)
    Tokenizer.load(directory)
    monkeypatch.setattr(tokenizer, "MOST_LISTS", lists - 1)
    with pytest.raises(UserError, match=f"tokenizer.json holds more than {lists - 1:,} lists"):
        Tokenizer.load(directory)


# What a process takes: files that unpack to 12 MB and took it from 20 to 50 times that.
CHILD = """
import resource, sys
from pathlib import Path
from data.dataset import load_dataset, training_texts
from data.tokenizer import Tokenizer

def peak():
    unit = 1 if sys.platform == "darwin" else 1024  # bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

bytes_ = Tokenizer.load("bytes")
before = peak()
for name in sys.argv[1:]:
    try:
        if name == "tokenizer.json":
            Tokenizer.load(name)
        else:
            list(training_texts(name))
            load_dataset(name, tokenizer=bytes_, max_seq_len=256, cache_dir="cache", progress=False)
        print(name, "was read")
    except ValueError as error:
        print(error)
print(peak() - before)
"""


def test_the_memory_of_a_process_that_reads_them(tmp_path):
    pytest.importorskip("resource")
    lists = b"{}," * 4_000_000 + b"{}]"
    contents = {
        "a.json.gz": b"[[" + lists + b"]",
        "b.json.gz": b'[{"text": [' + lists + b"}]",
        "a.jsonl.gz": b"[" + lists,
        "b.jsonl.gz": b'{"messages": "' + b"a " * 6_000_000 + b'"}\n',
        "a.txt.gz": b"ab" * 6_000_000,
        "c.jsonl.gz": b'{"text": "' + b"ab" * 6_000_000 + b'"}\n',
        "d.jsonl.gz": b'{"instruction": "a", "output": "' + b"a " * 6_000_000 + b'"}\n',
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(gzip.compress(content, 1))
    (tmp_path / "tokenizer.json").write_bytes(b'{"x": [' + lists + b"}")
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *contents, "tokenizer.json"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    *sentences, peak = done.stdout.splitlines()
    for name, sentence in zip([*contents, "tokenizer.json"], sentences, strict=True):
        assert sentence.startswith(name) and not sentence.endswith("was read"), sentence
    assert int(peak) < 200e6, peak
