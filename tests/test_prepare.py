"""The prepare scripts, offline: each on a small local file in the format of what it downloads, run
as a person runs it, and its result read by `load_dataset`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from data.dataset import load_dataset
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
    assert sorted(path.name for path in out.iterdir()) == ["train.jsonl", "val.jsonl"]
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
    said, code = run(tmp_path, "fineweb_edu", f"--directory={out}", source, "--tokens=10000")
    assert code == 0 and "50 pages" in said and "The source held no more" in said


@pytest.mark.parametrize("script", ["shakespeare", "tinystories", "minimind", "fineweb_edu"])
def test_a_source_that_is_not_there_is_one_sentence_and_leaves_nothing(tmp_path, script):
    options = ["--stage=sft"] if script == "minimind" else []
    source = "--source=nobody/nothing" if script == "fineweb_edu" else f"--source={tmp_path}/none"
    said, code = run(tmp_path, script, f"--directory={tmp_path}/out", source, *options)
    assert code == 2, said
    assert "error: " in said and "Traceback" not in said
    assert not list((tmp_path / "out").iterdir())
