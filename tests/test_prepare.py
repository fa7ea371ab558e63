"""The prepare scripts, offline: each on a small local file in the format of what it downloads, run
as a person runs it, and its result read by `load_dataset`.
"""

import errno
import http.server
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import datasets
import pytest

from config import UserError
from data import prepare_fineweb_edu, prepare_minimind, prepare_shakespeare, prepare_tinystories
from data.dataset import load_dataset
from data.download import alone_in, fetch, written_whole
from data.tokenizer import Tokenizer

ROOT = Path(__file__).parents[1]


def run(tmp_path, script, *options):
    """What a script printed, and its exit code."""
    done = subprocess.run(
        [sys.executable, "-m", f"data.prepare_{script}", *options],
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "200"},
        capture_output=True,
        text=True,
    )
    return done.stdout + done.stderr, done.returncode


def load(tmp_path, data, **options):
    return load_dataset(
        data,
        tokenizer=Tokenizer.load("bytes"),
        max_seq_len=256,
        cache_dir=tmp_path / "cache",
        progress=False,
        **options,
    )


def texts(rows):
    tokenizer = Tokenizer.load("bytes")
    return [tokenizer.decode(rows[i][0], skip_special=True) for i in range(len(rows))]


def test_shakespeare(tmp_path):
    (tmp_path / "input.txt").write_text("First Citizen:\nSpeak, speak.\n" * 5)
    out = tmp_path / "out"
    said, code = run(
        tmp_path, "shakespeare", f"--directory={out}", f"--source={tmp_path}/input.txt"
    )
    assert code == 0, said
    assert f"{out}/tinyshakespeare.txt: 145 characters, 18 distinct" in said
    assert f"python train.py configs/shakespeare_char.py --data={out}/tinyshakespeare.txt" in said
    assert len(load(tmp_path, out / "tinyshakespeare.txt")[0]) == 1


def test_tinystories(tmp_path):
    stories = ["Once there was a cat.\n\nIt sat.", "Tom was sad.", "Lily ran. “Stop!”"]
    train = "\n<|endoftext|>\n".join(stories[:2]) + "\n<|endoftext|>\n\n<|endoftext|>\n"
    (tmp_path / "TinyStoriesV2-GPT4-train.txt").write_text(train)
    (tmp_path / "TinyStoriesV2-GPT4-valid.txt").write_text(stories[2])
    out = tmp_path / "out"
    said, code = run(tmp_path, "tinystories", f"--directory={out}", f"--source={tmp_path}")
    assert code == 0, said
    assert f"{out}/train.jsonl: 2 stories" in said and f"--data={out}" in said
    assert sorted(path.name for path in out.iterdir()) == [".lock", "train.jsonl", "val.jsonl"]
    train_rows, val_rows = load(tmp_path, out)
    assert (texts(train_rows), texts(val_rows)) == (stories[:2], stories[2:])


def test_minimind(tmp_path):
    rows = [{"text": f"<|im_start|>鉴别一组中文文章{i}。"} for i in range(40)]
    chats = [
        {
            "conversations": [
                {"role": "user", "content": f"你好{i}"},
                {"role": "assistant", "content": "再见"},
            ]
        }
        for i in range(40)
    ]
    broken = {"conversations": [{"role": "user", "content": "?"}]}
    for name, content in (("pretrain_t2t_mini", rows), ("sft_t2t_mini", [*chats, broken])):
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in content)
        (tmp_path / f"{name}.jsonl").write_text(lines)
    out = tmp_path / "out"
    for stage, summary, options in (
        ("pretrain", "40 text\n", ["--val_fraction=0.005\n"]),
        ("sft", "40 conversations, 1 bad\n", ["--on_bad_row=skip", "--init_from=", "line 41"]),
    ):
        said, code = run(
            tmp_path, "minimind", f"--stage={stage}", f"--directory={out}", f"--source={tmp_path}"
        )
        assert code == 0, said
        assert f"{out}/{stage}_t2t_mini.jsonl: {summary}" in said
        assert all(option in said for option in options)
    load(tmp_path, out / "pretrain_t2t_mini.jsonl", val_fraction=0.3)
    load(tmp_path, out / "sft_t2t_mini.jsonl", val_fraction=0.3, on_bad_row="skip")


def test_fineweb_edu(tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows = [
        {"text": f"Page {i}. " + "word " * i, "id": str(i), "token_count": 100} for i in range(50)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "000_00000.parquet")
    out, source = tmp_path / "out", f"--source={tmp_path}/000_00000.parquet"
    said, code = run(tmp_path, "fineweb_edu", f"--directory={out}", source, "--tokens=2950")
    assert code == 0, said
    assert f"{out}/pages.jsonl: 30 pages, 3,000 tokens" in said
    lines = (out / "pages.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"text": row["text"]} for row in rows[:30]]
    (tmp_path / "pages.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = f"--source={tmp_path}/pages.jsonl"
    said, code = run(tmp_path, "fineweb_edu", f"--directory={out}", source, "--tokens=10000")
    assert code == 0 and "50 pages" in said and "The source held no more" in said


@pytest.mark.parametrize("script", ["shakespeare", "tinystories", "minimind", "fineweb_edu"])
def test_a_source_that_is_not_there_is_one_sentence_and_leaves_nothing(tmp_path, script):
    options = ["--stage=sft"] if script == "minimind" else []
    source = "--source=nobody/nothing" if script == "fineweb_edu" else f"--source={tmp_path}/none"
    said, code = run(tmp_path, script, f"--directory={tmp_path}/out", source, *options)
    assert code == 2, said
    assert "error: " in said and "Traceback" not in said
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".lock"]


def test_a_text_that_is_not_utf_8(tmp_path):
    (tmp_path / "input.txt").write_bytes(b"First Citizen:\n\xff")
    with pytest.raises(UserError, match="tinyshakespeare.txt is not UTF-8 .byte 15"):
        prepare_shakespeare.prepare(tmp_path / "out", f"{tmp_path}/input.txt")


def test_files_without_anything_to_train_on(tmp_path):
    (tmp_path / "TinyStoriesV2-GPT4-train.txt").write_text("<|endoftext|>\n\n<|endoftext|>\n")
    with pytest.raises(UserError, match="TinyStoriesV2-GPT4-train.txt holds no story"):
        prepare_tinystories.prepare(tmp_path / "stories", str(tmp_path))
    assert not list((tmp_path / "stories").glob("*.jsonl"))
    (tmp_path / "pretrain_t2t_mini.jsonl").write_text('{"text": 3}\n{"words": "a"}\n')
    with pytest.raises(UserError, match="pretrain_t2t_mini.jsonl holds no good row"):
        prepare_minimind.prepare("pretrain", tmp_path / "minimind", str(tmp_path))


@pytest.mark.parametrize(
    "rows, problem",
    [
        ([{"text": "a", "token_count": 1}, {"text": 3, "token_count": 1}], "line 2: .*Fix or re"),
        ([{"text": "a"}], "line 1 is not FineWeb-Edu: no 'text' and 'token_count'"),
        ([{"prompt": "a", "token_count": 1}], "line 1: no known field"),
    ],
)
def test_pages_that_are_none_leave_nothing(tmp_path, rows, problem):
    source = tmp_path / "pages.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError, match=problem):
        prepare_fineweb_edu.prepare(tmp_path / "out", source=str(source))
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".lock"]


def test_the_pages_of_the_hub(tmp_path, monkeypatch):
    """With a stand-in for the hub, which gives three pages, and then none."""
    pages = [{"text": f"Page {i}.", "token_count": 10} for i in range(3)]
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: iter(pages))
    prepare_fineweb_edu.prepare(tmp_path / "out", tokens=15)
    written = (tmp_path / "out" / "pages.jsonl").read_text().splitlines()
    assert [json.loads(line)["text"] for line in written] == ["Page 0.", "Page 1."]
    pages.clear()
    with pytest.raises(UserError, match="HuggingFaceFW/fineweb-edu holds no page"):
        prepare_fineweb_edu.prepare(tmp_path / "none")
    assert [path.name for path in (tmp_path / "none").iterdir()] == [".lock"]


def test_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path):
    with pytest.raises(UserError, match="file cannot be written: No space left on device"):
        with written_whole(tmp_path / "file") as beside:
            beside.write_text("half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert not list(tmp_path.iterdir())


class Broken(http.server.BaseHTTPRequestHandler):
    """A server on this machine that promises more than it sends, or nonsense."""

    def do_GET(self):
        self.send_response(200 if self.path != "/missing" else 404)
        lengths = {"/short": "10", "/nonsense": "ten"}
        self.send_header("Content-Length", lengths.get(self.path, "5"))
        self.end_headers()
        self.wfile.write(b"12345")

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def address():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Broken) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(
    "page, problem",
    [
        ("short", "the connection broke after 5 of 10 bytes"),
        ("nonsense", "invalid literal"),
        ("missing", "HTTP Error 404"),
    ],
)
def test_a_download_that_breaks_off_is_no_file(tmp_path, address, page, problem):
    with alone_in(tmp_path), pytest.raises(UserError, match=f"{page} could not be.*{problem}"):
        fetch(f"{address}/{page}", tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_what_is_here_is_not_fetched_again(tmp_path, address, capsys):
    fetch(f"{address}/good", tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b"12345"
    fetch(f"{address}/missing", tmp_path / "file")
    assert "is here already; remove it" in capsys.readouterr().out


def test_of_two_scripts_on_one_directory_the_second_waits(tmp_path):
    (tmp_path / "input.txt").write_text("First Citizen:\n")
    out, command = tmp_path / "out", [sys.executable, "-m", "data.prepare_shakespeare"]
    options = [f"--directory={out}", f"--source={tmp_path}/input.txt"]
    with alone_in(out):
        other = subprocess.Popen([*command, *options], cwd=ROOT, stderr=subprocess.PIPE, text=True)
        line = other.stderr.readline()
        assert line == f"another process is filling {out}; waiting for it\n"
        (out / "tinyshakespeare.txt").write_text("what we prepared")
    assert other.communicate(timeout=60)[1] == "" and other.returncode == 0
    assert (out / "tinyshakespeare.txt").read_text() == "what we prepared"


def test_a_directory_that_is_none_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("x")
    said, code = run(tmp_path, "shakespeare", f"--directory={tmp_path}/file")
    assert code == 2 and "error: " in said and "cannot be written" in said
