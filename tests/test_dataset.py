"""Rows on disk: what each row holds, what is dropped, the split, the cache, and many processes.

The expected rows are computed here from the documents by hand, with bytes as tokens (id = 4 + byte,
0 end, 1 beginning), so that nothing of the code under test is used to check it.
"""

import hashlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import regex

from config import UserError
from data import dataset
from data.dataset import load_dataset, training_texts
from data.sources import Row
from data.tokenizer import CHATML_TEMPLATE, PATTERNS, Tokenizer
from tests.test_tokenizer import qwen_like

REAL = Path(__file__).parents[2] / "shared" / "data"
EOS, BOS, START, END = range(4)


@pytest.fixture(scope="module")
def by_bytes():
    return Tokenizer.load("bytes")


def write_lines(path: Path, rows) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


def load(tmp_path, data, val=None, tokenizer=None, max_seq_len=64, **options):
    return load_dataset(
        data,
        val,
        options.pop("val_fraction", 0.1),
        tokenizer=tokenizer or Tokenizer.load("bytes"),
        max_seq_len=max_seq_len,
        cache_dir=tmp_path / "cache",
        **{"progress": False, **options},
    )


def prepared(tmp_path) -> list[str]:
    """What lies in the cache besides the locks, which stay."""
    entries = (tmp_path / "cache").iterdir()
    return sorted(entry.name for entry in entries if entry.suffix != ".lock")


def documents(n, seed=0, longest=40):
    rng = random.Random(seed)
    return [
        {"text": f"{i} " + "".join(rng.choices("ab é\n", k=rng.randrange(longest)))}
        for i in range(n)
    ]


def ids_of(text: str) -> list[int]:
    return [BOS, *(4 + byte for byte in text.encode()), EOS]


def all_rows(rows):
    return [tuple(part.tolist() for part in rows[i]) for i in range(len(rows))]


def chat(*turns, system=None):
    messages = [{"role": "system", "content": system}] if system else []
    for question, answer in turns:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
    return {"messages": messages}


# ----- pretraining rows (invariants 15, 16) -------------------------------------------------------


@pytest.mark.parametrize("max_seq_len", [2, 3, 7, 16, 1000])
def test_every_token_after_the_first_is_a_target_once(tmp_path, max_seq_len):
    texts = documents(60)
    data = write_lines(tmp_path / "data.jsonl", texts[:50])
    val = write_lines(tmp_path / "val.jsonl", texts[50:])
    rows, _ = load(tmp_path, data, val, max_seq_len=max_seq_len)

    expected = [ids_of(row["text"]) for row in texts[:50]]
    assert rows.num_documents == 50
    assert rows.num_tokens == sum(map(len, expected))
    assert rows.num_targets == sum(len(ids) - 1 for ids in expected)
    assert rows.target_bytes == sum(len(row["text"].encode()) for row in texts[:50])
    assert rows.lengths.tolist() == [len(input_ids) for input_ids, _ in all_rows(rows)]
    assert rows.lengths.min() >= 2 and rows.lengths.max() <= max_seq_len

    predicted, document = [], []
    for input_ids, labels in all_rows(rows):
        assert labels[0] == -100
        # the loss at position t predicts labels[t + 1], which is the token that follows
        assert labels[1:] == input_ids[1:]
        if input_ids[0] == BOS:
            document.append(BOS)
        assert input_ids[0] == document[-1]  # the overlap: one token, already a target
        document += labels[1:]
        if input_ids[-1] == EOS:
            predicted.append(document)
            document = []
    assert predicted == expected
    targets = [sum(label != -100 for label in labels) for _, labels in all_rows(rows)]
    assert sum(targets) == rows.num_targets


def test_the_end_is_supervised_though_it_is_also_the_pad(tmp_path, by_bytes):
    assert by_bytes.pad_token_id == by_bytes.eos_token_id
    data = write_lines(tmp_path / "d.jsonl", [{"text": "ab"}])
    val = write_lines(tmp_path / "v.jsonl", [{"text": "xy"}])
    rows, _ = load(tmp_path, data, val)
    assert all_rows(rows) == [([BOS, 101, 102, EOS], [-100, 101, 102, EOS])]


def test_without_bos_none_is_added_and_the_end_stays(tmp_path, by_bytes):
    by_bytes.save(tmp_path / "tokenizer")
    config = json.loads((tmp_path / "tokenizer" / "tokenizer_config.json").read_text())
    config["bos_token"] = None
    (tmp_path / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(config))
    data = write_lines(tmp_path / "d.jsonl", [{"text": "ab"}, {"text": "c"}])
    val = write_lines(tmp_path / "v.jsonl", [{"text": "xy"}])
    rows, _ = load(tmp_path, data, val, Tokenizer.load(tmp_path / "tokenizer"))
    assert all_rows(rows) == [([101, 102, EOS], [-100, 102, EOS]), ([103, EOS], [-100, EOS])]
    assert rows.target_bytes == 1


# ----- chats --------------------------------------------------------------------------------------


def test_only_answers_and_their_ends_are_supervised(tmp_path, by_bytes):
    one = chat(("q", "a1"), ("r", "a2"), system="s")
    data = write_lines(tmp_path / "d.jsonl", [one])
    val = write_lines(tmp_path / "v.jsonl", [chat(("v", "w"))])
    rows, _ = load(tmp_path, data, val, max_seq_len=200)
    input_ids, labels = all_rows(rows)[0]
    assert by_bytes.decode(input_ids) == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
        "a1<|im_end|>\n<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\na2<|im_end|>\n"
    )
    told = [label for label in labels if label != -100]
    assert by_bytes.decode(told) == "a1<|im_end|>a2<|im_end|>"
    assert all(i == label for i, label in zip(input_ids, labels, strict=True) if label != -100)
    assert (rows.num_targets, rows.target_bytes) == (6, 4)


def test_documents_and_chats_may_stand_in_one_file(tmp_path):
    data = write_lines(tmp_path / "d.jsonl", [{"text": "ab"}, chat(("q", "a"))])
    val = write_lines(tmp_path / "v.jsonl", [{"text": "xy"}])
    rows, _ = load(tmp_path, data, val)
    assert [sum(label != -100 for label in labels) for _, labels in all_rows(rows)] == [3, 2]
    assert "2 rows: 1 messages, 1 text" in rows.report


def length(*contents_and_roles):
    """Tokens of turns under bytes: <|im_start|>, role, break, content, <|im_end|>, break."""
    return sum(len(role) + len(content) + 4 for role, content in contents_and_roles)


def test_a_long_chat_loses_whole_oldest_turns_first_and_keeps_its_system_message(
    tmp_path, by_bytes
):
    turns = [("u" * 10, "a" * 20), ("v" * 10, "b" * 20), ("w" * 10, "c" * 20)]
    data = write_lines(tmp_path / "d.jsonl", [chat(*turns, system="sys")])
    val = write_lines(tmp_path / "v.jsonl", [chat(("q", "a"))])
    system = length(("system", "sys"))
    pair = length(("user", "u" * 10), ("assistant", "a" * 20))
    for limit, kept, cut in (
        (system + 3 * pair, turns, False),
        (system + 3 * pair - 1, turns[1:], True),
        (system + 2 * pair, turns[1:], True),
        (system + 2 * pair - 1, turns[2:], True),
        (system + pair, turns[2:], True),
    ):
        rows, _ = load(tmp_path, data, val, max_seq_len=limit)
        expected, _ = by_bytes.render_chat(chat(*kept, system="sys")["messages"])
        assert rows[0][0].tolist() == expected
        assert ("1 cut to fit" in rows.report) == cut


def test_what_is_still_too_long_is_cut_and_what_keeps_no_answer_is_dropped(tmp_path):
    data = write_lines(tmp_path / "d.jsonl", [chat(("q", "abcdef")), chat(("q" * 9, "abc"))])
    val = write_lines(tmp_path / "v.jsonl", [chat(("v", "w"))])
    prompt = length(("user", "q")) + len("S") + len("assistant\n")
    for limit, targets in ((prompt + 4, 4), (prompt + 1, 1)):
        rows, _ = load(tmp_path, data, val, max_seq_len=limit)
        assert len(rows) == 1 and len(rows[0][0]) == limit
        assert (rows[0][1] != -100).sum() == targets
        assert "2 rows: messages" in rows.report and "1 dropped, 2 cut to fit" in rows.report
    with pytest.raises(UserError, match="no row is left to train on.*\n.*2 dropped"):
        load(tmp_path, data, val, max_seq_len=prompt)


def test_chats_with_a_tokenizer_that_cannot_write_them(tmp_path, by_bytes):
    by_bytes.save(tmp_path / "tokenizer")
    content = (tmp_path / "tokenizer" / "tokenizer.json").read_text()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text(content.replace("<|im_start|>", "<x>"))
    data = write_lines(tmp_path / "d.jsonl", [chat(("q", "a"))])
    with pytest.raises(UserError, match=r"d.jsonl, line 1: .* has no <\|im_start\|>"):
        load(tmp_path, data, data, Tokenizer.load(tmp_path / "tokenizer"))


# ----- reports and bad rows -----------------------------------------------------------------------


def test_the_report_says_what_a_file_gave(tmp_path):
    rows = [
        {"instruction": "I", "input": "J", "output": "O", "id": i, "q": str(i)} for i in range(1100)
    ]
    for i, row in enumerate(rows):
        row["instruction"] += str(i)
    data = write_lines(tmp_path / "d.jsonl", rows)
    val = write_lines(tmp_path / "v.jsonl", rows[:100])
    train, held = load(tmp_path, data, val, max_seq_len=100)
    assert train.report == (
        f"{data}: 1,000 rows: instruction/input/output, {train.num_tokens:,} tokens, "
        "2,000 supervised, 0 dropped, 100 left out because they validate, fields not used: id q"
    )
    assert held.report.startswith(f"{val}: 100 rows: instruction/input/output, ")
    moved = data.rename(tmp_path / "moved.jsonl")
    assert load(tmp_path, moved, val, max_seq_len=100)[0].report.startswith(f"{moved}: 1,000 rows")
    assert len(list((tmp_path / "cache").glob("*.lock"))) == 2  # the same two preparations


def test_bad_rows_stop_or_are_skipped_counted_and_named(tmp_path):
    texts = documents(30)
    path = write_lines(tmp_path / "d.jsonl", texts)
    path.write_bytes(path.read_bytes() + b'{"text": 12}\n{"text": null}\n{"text": "good"}\n')
    val = write_lines(tmp_path / "v.jsonl", [{"text": "xy"}])
    with pytest.raises(UserError) as error:
        load(tmp_path, path, val)
    assert str(error.value) == (
        f"{path}, line 31, field 'text': expected a string, found a number (12). "
        "Fix it or pass --on_bad_row=skip."
    )
    assert [entry.name for entry in (tmp_path / "cache").glob("*.building")] == []
    rows, _ = load(tmp_path, path, val, on_bad_row="skip")
    assert rows.num_documents == 31
    assert "2 bad skipped (first: line 31: field 'text': expected a string" in rows.report


@pytest.mark.parametrize(
    "options, complaint",
    [
        ({"val_fraction": 0.0}, r"--val_fraction \(0.0\) must lie between 0 and 1"),
        ({"val_fraction": 1}, "val_fraction"),
        ({"max_seq_len": 1}, r"--max_seq_len \(1\) must be at least 2"),
        ({"on_bad_row": "ignore"}, "--on_bad_row"),
    ],
)
def test_settings_are_checked(tmp_path, options, complaint):
    data = write_lines(tmp_path / "d.jsonl", documents(5))
    with pytest.raises(UserError, match=complaint):
        load(tmp_path, data, **options)


def test_nothing_left_to_validate_on(tmp_path):
    data = write_lines(tmp_path / "d.jsonl", documents(1))
    with pytest.raises(UserError, match="no row is left to .* on"):
        load(tmp_path, data, val_fraction=1e-9)


# ----- the split ----------------------------------------------------------------------------------


def texts_of(rows, by_bytes):
    return [by_bytes.decode(ids[1:-1]) for ids, _ in all_rows(rows)]


def test_the_split_is_by_content_and_stays_when_rows_are_added(tmp_path, by_bytes):
    texts = documents(1000)
    some = write_lines(tmp_path / "some.jsonl", texts[:600])
    more = write_lines(tmp_path / "more.jsonl", texts[::-1] + texts[:50])
    train, val = (texts_of(side, by_bytes) for side in load(tmp_path, some))
    more_train, more_val = (texts_of(side, by_bytes) for side in load(tmp_path, more))
    assert sorted(train + val) == sorted(row["text"] for row in texts[:600])
    assert set(train) < set(more_train) and set(val) < set(more_val)
    assert not set(more_train) & set(more_val)  # though 50 rows occur twice
    assert 40 <= len(val) <= 80  # 60 expected
    assert len(load(tmp_path, some, val_fraction=0.5)[1]) > 250


def test_a_txt_is_split_by_position(tmp_path, by_bytes):
    text = "".join(f"line {i} é\n" for i in range(100))
    (tmp_path / "a.txt").write_text(text)
    train, val = load(tmp_path, tmp_path / "a.txt", max_seq_len=100_000)
    cut = round(len(text) * 0.9)
    assert (texts_of(train, by_bytes), texts_of(val, by_bytes)) == ([text[:cut]], [text[cut:]])
    assert "a.txt: 1 row: text" in train.report


def test_validation_data_of_its_own_never_trains(tmp_path, by_bytes):
    texts = documents(100)
    data = write_lines(tmp_path / "d.jsonl", texts)
    val = write_lines(tmp_path / "v.jsonl", texts[90:] + [{"text": "other"}])
    train, held = load(tmp_path, data, val)
    assert texts_of(train, by_bytes) == [row["text"] for row in texts[:90]]
    assert texts_of(held, by_bytes) == [row["text"] for row in texts[90:]] + ["other"]
    assert "10 left out because they validate" in train.report


def test_a_directory_with_train_and_val(tmp_path, by_bytes):
    (tmp_path / "corpus").mkdir()
    texts = documents(10)
    write_lines(tmp_path / "corpus" / "train.jsonl", texts[:8])
    write_lines(tmp_path / "corpus" / "val.jsonl", texts[8:])
    train, val = load(tmp_path, tmp_path / "corpus")
    assert (len(train), len(val)) == (8, 2)
    assert list(training_texts(tmp_path / "corpus")) == [row["text"] for row in texts[:8]]


def test_training_texts_are_those_of_the_training_split(tmp_path, by_bytes):
    data = write_lines(tmp_path / "d.jsonl", documents(300))
    train, _ = load(tmp_path, data)
    assert list(training_texts(data)) == texts_of(train, by_bytes)
    val = write_lines(tmp_path / "v.jsonl", documents(300)[200:])
    train, _ = load(tmp_path, data, val)
    assert list(training_texts(data, val)) == texts_of(train, by_bytes)
    (tmp_path / "a.txt").write_text("abcdefghij" * 10)
    assert "".join(training_texts(tmp_path / "a.txt")) == "abcdefghij" * 9
    chats = write_lines(tmp_path / "c.jsonl", [chat(("q", "a"), system="s")])
    assert list(training_texts(chats, val)) == ["s", "q", "a"]
    (tmp_path / "bad.jsonl").write_text('{"text": 1}\n{"text": "b"}\n')
    with pytest.raises(UserError, match="bad.jsonl, line 1"):
        list(training_texts(tmp_path / "bad.jsonl", val))
    assert list(training_texts(tmp_path / "bad.jsonl", val, on_bad_row="skip")) == ["b"]


def test_a_hub_data_set_is_cached_by_its_fingerprint(tmp_path, monkeypatch, by_bytes):
    import datasets

    rows = documents(1200)
    splits = datasets.DatasetDict(train=datasets.Dataset.from_list(rows))
    monkeypatch.setattr(datasets, "load_dataset", lambda name: splits)
    train, val = load(tmp_path, "owner/stories")
    texts = texts_of(train, by_bytes) + texts_of(val, by_bytes)
    assert sorted(texts) == sorted(row["text"] for row in rows)
    assert train.report.startswith("owner/stories/train: ")
    load(tmp_path, "owner/stories")
    assert len(prepared(tmp_path)) == 1
    splits["train"] = splits["train"].select(range(600))
    train, val = load(tmp_path, "owner/stories")
    assert len(train) + len(val) == 600


# ----- long texts ---------------------------------------------------------------------------------


def test_a_long_text_in_parts_has_the_ids_of_the_whole(monkeypatch, tmp_path):
    rng = random.Random(0)
    words = [
        "cat",
        " dog",
        "\n",
        "\n\n",
        "  ",
        "\t",
        "é",
        "12",
        "'s",
        "!",
        " \n",
        "猫",
        "\r\n",
        "🙂",
        "。",
        ".",
        " (",
        "e\u0301",
        "\u0338",
        "<think>",
    ]
    text = "".join(rng.choices(words, k=20_000))
    trained = Tokenizer.train([text[:5000]], 400, progress=False)
    tokenizers = [trained, Tokenizer.load("bytes")]
    tokenizers.append(Tokenizer.load(qwen_like(tmp_path / "q", CHATML_TEMPLATE)))
    monkeypatch.setattr(dataset, "PART_CHARACTERS", 100)
    parts = list(dataset._parts(text))
    assert len(parts) > 100 and "".join(parts) == text
    for tokenizer in tokenizers:
        bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        ids = dataset._document_ids(text, tokenizer)
        assert ids.tolist() == [*bos, *tokenizer.encode(text), tokenizer.eos_token_id]


@pytest.mark.parametrize("name", PATTERNS)
def test_no_pattern_has_a_word_across_a_cut(name):
    """The words as the regex finds them, in texts dense in what the patterns turn on."""
    pieces = ["a", "B", "é", "猫", "ß", "7", "12", "²", "'s", "'LL", "'", "_", "-", "🙂", "e\u0301"]
    pieces += [
        "\u0338",
        "\r\n",
        "\r",
        "\t",
        "\u00a0",
        "\u3000",
        "  ",
        "/",
        *' \n.,;:!?()<>"、。，；：！？',
    ]
    rng, cuts = random.Random(0), 0
    for _ in range(300):
        text = "".join(rng.choices(pieces, k=60))
        ends = [0] + [found.end() for found in regex.finditer(PATTERNS[name], text)]
        assert ends[-1] == len(text)
        places = [cut.start() for cut in dataset._SAFE_CUT.finditer(text)]
        assert set(places) <= set(ends)
        for place in places[:3]:  # and the words behind it are the same without what stands before
            behind = [found.end() for found in regex.finditer(PATTERNS[name], text[place:])]
            assert [place + end for end in behind] == ends[ends.index(place) + 1 :]
        cuts += len(places)
    assert cuts > 2000


def test_an_added_token_is_not_cut_in_two(tmp_path, monkeypatch):
    directory = qwen_like(tmp_path / "q", CHATML_TEMPLATE)
    content = (directory / "tokenizer.json").read_text()
    for name, other in (("<think>", "ab cd."), ("</think>", "x "), ("<tool_call>", " y")):
        content = content.replace(f'"{name}"', f'"{other}"')
    (directory / "tokenizer.json").write_text(content)
    tokenizer = Tokenizer.load(directory)
    assert tokenizer.plain_added == {"ab cd.", "x ", " y", "</tool_call>"}
    monkeypatch.setattr(dataset, "PART_CHARACTERS", 20)
    text = "".join(
        random.Random(0).choices(["ab cd.", "ab ", "x ", "x", " y", "y.", "cd", "猫。"], k=3000)
    )
    assert len(list(dataset._parts(text, tokenizer.plain_added))) > 100
    ids = dataset._document_ids(text, tokenizer)
    assert ids.tolist() == [*tokenizer.encode(text), tokenizer.eos_token_id]


def test_a_word_too_long_to_tokenise_is_named_and_any_text_shorter_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(dataset, "PART_CHARACTERS", 100)
    monkeypatch.setattr(dataset, "LONGEST_PART", 400)
    tokenizer = Tokenizer.load("bytes")
    for text in ("x" * 400, "x" * 99 + " " + "y" * 300, ("x" * 250 + "。") * 9, "word " * 1000):
        ids = dataset._document_ids(text, tokenizer).tolist()
        assert ids == tokenizer.encode_document(text)
    complaint = "it goes on for 300 characters without a space, a line break or a punctuation mark"
    data = write_lines(tmp_path / "d.jsonl", [*documents(20), {"text": "y" * 401}])
    held = write_lines(tmp_path / "v.jsonl", documents(5, seed=1))
    (tmp_path / "a.txt").write_text("a b " * 100 + "x" * 500)
    for path, where in ((data, f"{data}, line 21: "), (tmp_path / "a.txt", f"{tmp_path}/a.txt: ")):
        for act in (
            lambda: load(tmp_path, path, held),  # noqa: B023
            lambda: list(training_texts(path, held)),  # noqa: B023
        ):
            with pytest.raises(UserError) as error:
                act()
            assert str(error.value).startswith(where + complaint), error.value
    assert "1 bad skipped" in load(tmp_path, data, held, on_bad_row="skip")[0].report
    assert len(list(training_texts(data, held, on_bad_row="skip"))) == 20
    chats = write_lines(tmp_path / "c.jsonl", [chat(("a b " * 101, "a"))])
    with pytest.raises(UserError, match="c.jsonl, line 1: the chat has more than 400 characters"):
        load(tmp_path, chats, held)


def test_the_hash_of_a_long_text_is_that_of_its_json(monkeypatch):
    monkeypatch.setattr("data.sources.CHUNK_BYTES", 7)
    for text in ("", 'é\n"\\🙂猫\x00' * 20, "x" * 14):
        row = Row("text", text=text)
        assert row.content == json.dumps(text).encode()
        digest = hashlib.blake2b(row.content, digest_size=8).digest()
        assert dataset._hash(row) == int.from_bytes(digest, "little")


# ----- the cache ----------------------------------------------------------------------------------


def test_the_cache_is_used_until_content_or_settings_change(tmp_path, monkeypatch, by_bytes):
    data = write_lines(tmp_path / "d.jsonl", documents(50))
    built = []
    build = dataset._build

    def counting(*arguments):
        built.append(1)
        build(*arguments)

    monkeypatch.setattr(dataset, "_build", counting)

    def builds(**options):
        before = len(built)
        load(tmp_path, options.pop("data", data), **options)
        return len(built) - before

    assert builds() == 1
    assert builds() == 0
    os.utime(data)
    assert builds() == 0  # touched, the same content
    assert builds(max_seq_len=32) == 1
    assert builds(val_fraction=0.2) == 1
    assert builds(on_bad_row="skip") == 1
    assert builds(tokenizer=Tokenizer.train(["aa ab"], 261, progress=False)) == 1
    assert builds() == 0
    stat = data.stat()
    data.write_text(data.read_text().replace("a", "b"))
    os.utime(data, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert data.stat().st_size == stat.st_size
    assert builds() == 1  # the same size and time, other content
    val = write_lines(tmp_path / "v.jsonl", documents(5, seed=1))
    assert builds(val=val) == 2
    write_lines(val, documents(6, seed=1))
    assert builds(val=val) == 2  # what trains depends on what validates


def test_rows_from_the_cache_are_mapped_and_small(tmp_path):
    data = write_lines(tmp_path / "d.jsonl", documents(50))
    first, _ = load(tmp_path, data)
    second, _ = load(tmp_path, data)
    assert all_rows(first) == all_rows(second) and first.report == second.report
    assert isinstance(second.tokens, np.memmap) and second.tokens.dtype == np.uint16
    assert second.supervised is None
    files = sorted(f.name for f in (tmp_path / "cache").rglob("train/*"))
    assert files == ["hashes.npy", "lengths.npy", "starts.npy", "summary.json", "tokens.npy"]


def test_a_killed_build_leaves_nothing_that_looks_finished(tmp_path, monkeypatch):
    data = write_lines(tmp_path / "d.jsonl", documents(50))

    def killed(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(dataset._SideWriter, "close", killed)
        with pytest.raises(KeyboardInterrupt):
            load(tmp_path, data)
    assert prepared(tmp_path) == []
    assert len(load(tmp_path, data)[0]) > 30


KILLED = """
import os, sys
from data import dataset
from data.tokenizer import Tokenizer

if __name__ == "__main__":
    {how}
    dataset.load_dataset(sys.argv[1], tokenizer=Tokenizer.load("bytes"), max_seq_len=64,
                         cache_dir=sys.argv[2], progress=False)
"""


def run_killed(tmp_path, how: str, data: Path):
    """A process that prepares data and ends as by kill -9. Its output ends when all that hold it
    have ended, its workers too."""
    script = tmp_path / "killed.py"
    script.write_text(KILLED.format(how=how))
    command = [sys.executable, str(script), str(data), str(tmp_path / "cache")]
    root = str(Path(__file__).parents[1])
    return subprocess.run(
        command, env=os.environ | {"PYTHONPATH": root}, capture_output=True, text=True, timeout=120
    )


def test_what_kill_9_leaves_is_swept_by_the_next_preparation_of_anything(tmp_path):
    data = write_lines(tmp_path / "d.jsonl", documents(50))
    how = "dataset._SideWriter.close = lambda *_: os._exit(137)"
    assert run_killed(tmp_path, how, data).returncode == 137
    assert len(list((tmp_path / "cache").glob("*.building"))) == 1
    other = write_lines(tmp_path / "e.jsonl", documents(50, seed=1))
    load(tmp_path, other)
    assert len(prepared(tmp_path)) == 1
    assert len(load(tmp_path, data)[0]) > 30


def test_what_another_process_is_building_is_not_swept(tmp_path, monkeypatch):
    data = write_lines(tmp_path / "d.jsonl", documents(50))
    other = write_lines(tmp_path / "e.jsonl", documents(50, seed=1))
    build = dataset._build

    def build_both(*arguments):
        build(*arguments)
        monkeypatch.setattr(dataset, "_build", build)
        load(tmp_path, other)

    monkeypatch.setattr(dataset, "_build", build_both)
    assert len(load(tmp_path, data)[0]) > 30
    assert len(prepared(tmp_path)) == 2


def test_workers_end_with_a_parent_that_was_killed(tmp_path):
    data = write_lines(tmp_path / "d.jsonl", documents(50))
    how = (
        "dataset.PARALLEL_ABOVE, dataset._processors = 0, lambda: 2; "
        "dataset._SideWriter.append = lambda *_: os._exit(137)"
    )
    done = run_killed(tmp_path, how, data)  # a worker that stays would let this time out
    assert done.returncode == 137, done.stderr


def test_of_two_processes_one_prepares_and_the_other_waits(tmp_path, monkeypatch):
    """Ours builds only when the other one has said that it waits."""
    data = write_lines(tmp_path / "d.jsonl", documents(50))
    script = tmp_path / "other.py"
    script.write_text(KILLED.format(how="dataset._build = None  # it must not build"))
    command = [sys.executable, str(script), str(data), str(tmp_path / "cache")]
    root = str(Path(__file__).parents[1])
    build, others = dataset._build, []

    def build_while_another_waits(*arguments):
        other = subprocess.Popen(
            command, env=os.environ | {"PYTHONPATH": root}, stderr=subprocess.PIPE, text=True
        )
        others.append(other)
        line = other.stderr.readline()
        assert line == "another process is preparing the same data; waiting for it\n"
        build(*arguments)

    monkeypatch.setattr(dataset, "_build", build_while_another_waits)
    expected = all_rows(load(tmp_path, data)[0])
    (other,) = others
    assert other.communicate(timeout=120)[1] == "" and other.returncode == 0
    assert all_rows(load(tmp_path, data)[0]) == expected


def cut_in_half(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


FILES = ["tokens.npy", "supervised.npy", "starts.npy", "lengths.npy", "hashes.npy", "summary.json"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("side, damage", [("train", cut_in_half), ("val", Path.unlink)])
def test_a_damaged_entry_of_the_cache_is_made_anew(tmp_path, capsys, name, side, damage):
    rows = [chat((f"q{i}", "a" * (i % 7 + 1))) for i in range(60)]
    data = write_lines(tmp_path / "d.jsonl", rows)
    expected = [all_rows(rows) for rows in load(tmp_path, data, max_seq_len=100)]
    assert capsys.readouterr().err == ""
    (entry,) = (tmp_path / "cache" / name for name in prepared(tmp_path))
    damage(entry / side / name)
    assert [all_rows(rows) for rows in load(tmp_path, data, max_seq_len=100)] == expected
    assert capsys.readouterr().err == f"{entry} is damaged: it is made anew\n"
    load(tmp_path, data, max_seq_len=100)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("text", ["", "7", "[]", "{}", '{"counts": 7, "files": []}', "\udc80"])
def test_a_summary_that_is_none_is_made_anew(tmp_path, capsys, text):
    data = write_lines(tmp_path / "d.jsonl", documents(30))
    load(tmp_path, data)
    (entry,) = (tmp_path / "cache" / name for name in prepared(tmp_path))
    (entry / "train" / "summary.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    load(tmp_path, data)
    assert "is damaged" in capsys.readouterr().err


def test_an_entry_gets_its_name_when_all_of_it_is_on_the_disk(tmp_path, monkeypatch):
    if not Path("/proc/self/fd").is_dir():
        pytest.skip("which file is synced is read from /proc")
    synced, missing = set(), []
    fsync, rename = os.fsync, Path.rename
    monkeypatch.setattr(
        os, "fsync", lambda fd: synced.add(os.readlink(f"/proc/self/fd/{fd}")) or fsync(fd)
    )

    def checked_rename(self, target):
        missing.extend({str(self), *map(str, self.rglob("*"))} - synced)
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", checked_rename)
    load(tmp_path, write_lines(tmp_path / "d.jsonl", documents(50)))
    assert prepared(tmp_path) and missing == [] and str(tmp_path / "cache") in synced


def test_a_cache_that_cannot_be_written_is_one_sentence(tmp_path):
    data = write_lines(tmp_path / "d.jsonl", documents(50))
    (tmp_path / "cache").write_text("a file, not a directory")
    with pytest.raises(UserError, match="The cache .*cache cannot be written: "):
        load(tmp_path, data)


def test_a_file_that_cannot_be_read_is_one_sentence(tmp_path):
    data = tmp_path / "d.jsonl"
    data.symlink_to("/proc/self/mem")  # whose first byte cannot be read
    if not data.is_file():
        pytest.skip("/proc/self/mem is Linux's")
    with pytest.raises(UserError) as error:
        load(tmp_path, data)
    assert str(error.value).startswith(f"{data}: cannot be read (")
    assert str(error.value).endswith(". Fix the file or leave it out.")


def test_no_bar_stays_above_an_error(tmp_path, capsys):
    data = write_lines(tmp_path / "d.jsonl", [*documents(50), {"text": 1}])
    for act in (
        lambda: load(tmp_path, data, progress=True),
        lambda: Tokenizer.train(training_texts(data), 300, progress=True),
    ):
        with pytest.raises(UserError, match="line 51"):
            act()
        shown = capsys.readouterr().err.split("\r")
        assert any("tokeni" in line for line in shown) and not shown[-1].strip()


def test_large_vocabularies_take_four_bytes(tmp_path, by_bytes, monkeypatch):
    data = write_lines(tmp_path / "d.jsonl", documents(50))
    monkeypatch.setattr(by_bytes, "vocab_size", 65_537)
    assert load(tmp_path, data, tokenizer=by_bytes)[0].tokens.dtype == np.uint32


def test_many_processes_give_the_rows_of_one(tmp_path, monkeypatch):
    texts = documents(400) + [chat((f"q{i}", "a" * (i % 7 + 1))) for i in range(100)]
    data = write_lines(tmp_path / "d.jsonl", texts)
    data.write_bytes(data.read_bytes() + b"{}\n")
    (tmp_path / "e.txt").write_text("a whole text\n" * 10)
    pattern = str(tmp_path / "*.*")
    alone = load(tmp_path, pattern, on_bad_row="skip")
    monkeypatch.setattr(dataset, "PARALLEL_ABOVE", 0)
    monkeypatch.setattr(dataset, "_processors", lambda: 2)
    monkeypatch.setattr("data.sources.CHUNK_BYTES", 500)
    together = load_dataset(
        pattern,
        tokenizer=Tokenizer.load("bytes"),
        max_seq_len=64,
        on_bad_row="skip",
        cache_dir=tmp_path / "other",
        progress=False,
    )
    for ours, theirs in zip(alone, together, strict=True):
        assert all_rows(ours) == all_rows(theirs) and ours.report == theirs.report
        assert (ours.num_targets, ours.target_bytes) == (theirs.num_targets, theirs.target_bytes)
    with pytest.raises(UserError, match="line 501: no known field"):
        load(tmp_path, pattern)


# ----- real files ---------------------------------------------------------------------------------


def test_shakespeare_trains_on_its_first_tenths(tmp_path, by_bytes):
    path = REAL / "tinyshakespeare.txt"
    if not path.is_file():
        pytest.skip(f"{path} is not here")
    text = path.read_text()
    train, val = load(tmp_path, path, max_seq_len=256)
    assert train.num_targets == round(0.9 * len(text)) + 1
    assert train.num_tokens + val.num_tokens == len(text) + 4
    assert by_bytes.decode(train[0][0]) == "<|bos|>" + text[:255]


def test_instructions_are_all_read(tmp_path):
    path = REAL / "instructions.json"
    if not path.is_file():
        pytest.skip(f"{path} is not here")
    train, val = load(tmp_path, path, max_seq_len=512)
    assert len(train) + len(val) == 1100
    assert "rows: instruction/input/output" in train.report and "0 dropped" in train.report
