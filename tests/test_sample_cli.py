"""sample.py and chat.py as a person meets them: text, streams, files, conversations, mistakes.

The checkpoint is a random model with a tokenizer of bytes. Most tests call main() in this process;
what belongs to a process (exit codes, a real Ctrl-C) is tested on one.
"""

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import random_model, tiny

import sample
from chat import Chat, append_line, chat_ids
from config import SampleConfig, UserError
from data.sources import parse
from data.tokenizer import ChatStyle, Tokenizer
from sample import Completion, Writer, generate
from tests.test_tokenizer import TOOLS_TEMPLATE, qwen_like

ROOT = Path(__file__).parent.parent
EOS, BOS, IM_START, IM_END = range(4)


def save_checkpoint(directory: Path, **changes) -> Path:
    tokenizer = Tokenizer.load("bytes")
    tokenizer.learn_chats()
    shape = dict(vocab_size=tokenizer.vocab_size + 4, tie_word_embeddings=False)  # 4 unused rows
    random_model(tiny(**shape | changes)).save_pretrained(directory)
    tokenizer.save(directory)
    return directory


def without_chat_tokens(checkpoint: Path) -> None:
    """Take <|im_start|> and <|im_end|>, ids 2 and 3, from its tokenizer."""
    content = json.loads((checkpoint / "tokenizer.json").read_text())
    content["added_tokens"] = content["added_tokens"][:2]
    for name in ("<|im_start|>", "<|im_end|>"):
        del content["model"]["vocab"][name]
    (checkpoint / "tokenizer.json").write_text(json.dumps(content))
    config = json.loads((checkpoint / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint"), max_position_embeddings=200)


@pytest.fixture
def run(checkpoint, capsys, monkeypatch):
    """run("--prompt", "x", stdin=..., ...) -> (stdout, stderr) of main()."""

    def run(*arguments, stdin="", checkpoint=checkpoint):
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        where = [] if checkpoint is None else [f"--checkpoint={checkpoint}"]
        sample.main([*map(str, arguments), *where, "--device=cpu"])
        captured = capsys.readouterr()
        return captured.out, captured.err

    return run


# ------------------------------------------------------------------------------------ a prompt


def test_a_prompt_is_continued_text_on_stdout_the_rest_on_stderr(run, checkpoint):
    out, err = run("--prompt", "One day", "--max_new_tokens=20", "--temperature=0")
    model, tokenizer = sample.GPT.from_pretrained(checkpoint), Tokenizer.load(checkpoint)
    prompt = tokenizer.encode_prompt("One day")
    assert prompt[0] == BOS
    forbidden = range(tokenizer.vocab_size, model.config.vocab_size)
    options = {"temperature": 0, "stop_ids": [EOS, IM_END], "forbidden_ids": forbidden}
    (new,) = generate(model, [prompt], 20, **options)
    assert out.startswith("One day")
    assert out.rstrip("\n") == ("One day" + tokenizer.decode(new, skip_special=True)).rstrip("\n�")
    assert "cpu in float32" in err and "seed" in err and str(checkpoint) in err
    assert (
        "prefill 8 tokens" in err and "decode 19 tokens" in err and "ended: max_new_tokens" in err
    )


def test_the_same_seed_gives_the_same_text_and_none_another_each_time(run):
    seeded = [run("--prompt=x", "--seed=5", "--max_new_tokens=40")[0] for _ in range(2)]
    assert seeded[0] == seeded[1]
    other, err = run("--prompt=x", "--max_new_tokens=40")
    printed = err.split("seed ")[1].split()[0]
    assert run("--prompt=x", f"--seed={printed}", "--max_new_tokens=40")[0] == other
    assert other != seeded[0]


def test_a_prompt_comes_from_a_file_or_from_standard_input(run, tmp_path):
    (tmp_path / "prompt.txt").write_text("Once 你好\n", encoding="utf-8")
    options = ("--temperature=0", "--max_new_tokens=10")
    expected, _ = run("--prompt", "Once 你好", *options)
    assert run("--prompt", f"@{tmp_path}/prompt.txt", *options)[0] == expected
    assert run("--prompt", "-", *options, stdin="Once 你好\n")[0] == expected
    assert run("--prompt", "notes.py", *options)[0].startswith("notes.py")  # no config file


def test_without_a_prompt_the_text_begins_where_documents_do(run):
    out, err = run("--max_new_tokens=5", "--seed=1")
    assert out and "prefill 1 tokens" in err


def test_samples_are_printed_one_after_the_other(run):
    options = ("--prompt=x", "--seed=5", "--max_new_tokens=30")
    one, _ = run(*options)
    three, err = run(*options, "--num_samples=3")
    assert three.startswith(one.rstrip("\n") + "\n\nx")
    assert "3 x" in err or "1 x" in err


def test_stop_strings_end_the_text_before_them(run):
    options = ("--prompt=x", "--temperature=0", "--max_new_tokens=150")
    out, _ = run(*options)
    stop = out[60:63]
    cut, err = run(*options, "--stop", stop, "--stop=never this")
    assert cut == out[: out.index(stop, 1)] + "\n"
    assert "ended: stop string" in err


def test_the_context_limit_is_a_stop_reason(run):
    _, err = run("--prompt=" + "x" * 195, "--max_new_tokens=50", "--temperature=0")
    assert "ended: the context is full" in err and "decode 4 tokens" in err  # 196 + 5 - 1 = 200


def test_the_checkpoint_says_where_texts_end(run, tmp_path):
    checkpoint = save_checkpoint(tmp_path / "own")
    options = ("--prompt=x", "--temperature=0", "--max_new_tokens=30")
    out, _ = run(*options, checkpoint=checkpoint)
    end = Tokenizer.load("bytes").encode(out[6])[0]
    for stated in (end, [0, end]):
        content = json.dumps({"eos_token_id": stated})
        (checkpoint / "generation_config.json").write_text(content)
        cut, err = run(*options, checkpoint=checkpoint)
        assert cut == out[: out.index(out[6], 1)] + "\n"
        assert "ended: end of text" in err


def test_ids_that_stand_for_nothing_never_come(run, tmp_path, monkeypatch):
    without_chat_tokens(save_checkpoint(tmp_path))
    seen = []
    push = Completion.push
    monkeypatch.setattr(Completion, "push", lambda self, id: seen.append(id) or push(self, id))
    run("--prompt=x", "--num_samples=40", "--temperature=50", "--seed=1", checkpoint=tmp_path)
    assert len(set(seen)) > 200
    assert set(seen) <= {0, 1, *range(4, 260)}


# -------------------------------------------------------------------------------------- files


def test_many_prompts_in_one_batch_from_jsonl_to_jsonl(run, tmp_path):
    rows = [
        {"prompt": "One day", "id": 7},
        {"text": "你"},
        {"messages": [{"role": "user", "content": "Who?"}]},
    ]
    file, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    file.write_text("\n\n".join(json.dumps(row) for row in rows))
    options = (f"--prompts_file={file}", "--num_samples=2", "--max_new_tokens=12", "--seed=3")
    out, err = run(*options, f"--output={output}")
    assert out == ""
    assert "6 completions are in" in err and "5 x max_new_tokens" in err
    lines = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert [line["sample"] for line in lines] == [0, 1] * 3
    for place, line in enumerate(lines):
        assert {name: line[name] for name in rows[place // 2]} == rows[place // 2]
        whole = line["stop_reason"] == "max_new_tokens"
        assert whole == (line["new_tokens"] == 12) and (
            whole or line["stop_reason"] == "end of text"
        )
    single, _ = run("--prompt=One day", "--seed=3", "--max_new_tokens=12")
    assert single == "One day" + lines[0]["completion"] + "\n"
    assert list(tmp_path.iterdir()) in ([file, output], [output, file])  # no partial file is left
    out, _ = run(*options)
    assert [json.loads(line) for line in out.splitlines()] == lines


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": "x"}\nprompt', "line 2: this is not JSON"),
        ('["x"]', 'line 1: a row has one of "prompt", "text" and "messages"'),
        ('{"prompt": "x", "text": "y"}', "line 1: a row has one of"),
        ('\n{"text": 5}', 'line 2: "text" is 5, not a text'),
        ('{"messages": 7}', "line 1: field 'messages': expected a list, found a number"),
        ('{"messages": []}', "line 1: field 'messages': the list is empty"),
        ('{"messages": ["x"]}', r"field 'messages\[0\]': expected an object, found a string"),
        ('{"messages": [{"role": "user"}]}', r"field 'messages\[0\].content': missing"),
        ('{"messages": [{"role": "bear", "content": "x"}]}', "unknown role 'bear'"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "is an answer already"),
        ("\n", "holds no prompts"),
        (b"\xff\xfe", "is not UTF-8"),
        (json.dumps({"text": "x"}) + "\n" + json.dumps({"text": "x" * 200}), "prompt 1 has 201"),
    ],
)
def test_mistakes_in_a_file_of_prompts_name_the_place(run, tmp_path, content, message):
    file = tmp_path / "in.jsonl"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=message):
        run(f"--prompts_file={file}", f"--output={tmp_path}/out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


USER = {"role": "user", "content": "Who?"}
TOOL_FIELDS = {
    "tools that are a number": ({"role": "system", "content": "x", "tools": 7}, r"[0].tools'"),
    "tools of nothing": ({"role": "system", "content": "x", "tools": "f("}, r"[0].tools'"),
    "a call that is a number": ({"role": "assistant", "tool_calls": [7]}, r"[0].tool_calls[0]'"),
    "calls that are one": ({"role": "assistant", "tool_calls": {"name": "f"}}, r"[0].tool_calls'"),
    "a call without arguments": (
        {"role": "assistant", "content": "x", "tool_calls": [{"name": "f"}]},
        r"[0].tool_calls[0].arguments'",
    ),
    "a call without a name": (
        {"role": "assistant", "content": "x", "tool_calls": [{"arguments": {}}]},
        r"[0].tool_calls[0].name'",
    ),
    "a user who calls": (
        {**USER, "tool_calls": [{"name": "f", "arguments": {}}]},
        r"[0].tool_calls'",
    ),
    "reasoning that is a number": (
        {"role": "assistant", "content": "x", "reasoning_content": 7},
        r"[0].reasoning_content'",
    ),
}


@pytest.mark.parametrize("name", TOOL_FIELDS)
def test_bad_fields_of_tools_name_the_line_and_the_field(tmp_path, name):
    message, place = TOOL_FIELDS[name]
    file = tmp_path / "in.jsonl"
    rows = [{"prompt": "x"}, {"messages": [message, USER]}]
    file.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(UserError) as error:
        sample.read_rows(SampleConfig(prompts_file=str(file)))
    assert str(error.value).startswith(f"{file}, line 2: field 'messages{place}: "), error.value


def test_prompts_with_tools_are_written_as_in_training(tmp_path):
    tokenizer = Tokenizer.load(qwen_like(tmp_path / "tokenizer", TOOLS_TEMPLATE))
    call = {"name": "f", "arguments": {"x": 1}}
    plain = [
        {"role": "system", "content": "x", "tools": [{"name": "f"}]},
        USER,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "1"},
    ]
    other = [
        {**plain[0], "tools": json.dumps(plain[0]["tools"])},
        {"from": "human", "value": "Who?"},
        {"role": "assistant", "tool_calls": json.dumps([{"type": "x", "function": call}])},
        plain[3],
    ]
    file = tmp_path / "in.jsonl"
    file.write_text("\n".join(json.dumps({"messages": messages}) for messages in (plain, other)))
    rows = sample.read_rows(SampleConfig(prompts_file=str(file)))
    expected = tokenizer.render_chat(plain, add_generation_prompt=True)[0]
    assert [sample.row_ids(tokenizer, row, "the row") for row in rows] == [expected, expected]
    with pytest.raises(UserError, match="^in.jsonl, prompt 0: this tokenizer's chat template has"):
        sample.row_ids(Tokenizer.load("bytes"), rows[0], "in.jsonl, prompt 0")


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    """On a full disk, and on Ctrl-C, too; files of the person's own stay as they are."""
    output, own = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
    sample.write_whole(output, "old")
    own.write_text("mine")
    for error, expected in (
        (OSError(28, "No space left on device"), UserError),
        (KeyboardInterrupt,) * 2,
    ):

        def write(self, target, error=error):
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", write)
            with pytest.raises(expected):
                sample.write_whole(output, "new")
    assert output.read_text() == "old" and own.read_text() == "mine"
    sample.write_whole(output, "new")
    assert output.read_text() == "new" and own.read_text() == "mine"
    assert sorted(tmp_path.iterdir()) == [output, own]


# ----------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "x" * 200], "prompt 0 has 201 tokens, but the model's context is only 200"),
        (["--prompt=@no/such/file"], "no/such/file cannot be read: No such file"),
        (["--prompts_file=no.jsonl"], "no.jsonl cannot be read"),
        (["--temperature=-1"], "temperature is -1.0, but it must be from 0"),
        (["--top_p=2"], "top_p is 2.0"),
        (["--max_new_tokens=0"], "max_new_tokens is 0, but it must be at least 1"),
        (["--stop="], "--stop is empty"),
        (["--chat", "--num_samples=2"], "one answer at a time"),
        (["--chat", "--prompts_file=x"], "goes with neither"),
        (["--prompt=x", "--output=x"], "--output is for"),
        (["--prompts_file=x", "--output=no/such/x"], "that directory does not exist"),
        (["--prompts_file=x", f"--output={'x' * 300}"], "that name is too long for a file"),
        (["--prompts_file=x", "--output=\ud800"], "no file has that name"),
        (["--prompts_file=x", f"--output={'x' * 300}/y"], "that directory does not exist"),
        (["--prompt=x", "--num_samples=1000000000"], "num_samples is 1000000000, but it must be"),
        (["--temprature=1"], "did you mean --temperature"),
    ],
)
def test_mistakes_are_sentences(run, arguments, message):
    with pytest.raises(UserError, match=message):
        run(*arguments)


def test_a_base_model_without_a_chat_template_says_so(run, tmp_path):
    without_chat_tokens(save_checkpoint(tmp_path))
    with pytest.raises(UserError, match="base model without a chat template"):
        run("--chat", checkpoint=tmp_path)


def test_no_run_to_sample_from(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="python train.py configs/tiny.py"):
        run("--prompt=x", checkpoint=None)


def start(*arguments, **options) -> subprocess.Popen:
    command = [sys.executable, str(ROOT / "sample.py"), *map(str, arguments), "--device=cpu"]
    pipes = {name: subprocess.PIPE for name in ("stdin", "stdout", "stderr")}
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "LC_ALL": "C"}
    return subprocess.Popen(command, **pipes, env=environment, **options)


def test_as_a_process_a_mistake_is_one_sentence_and_code_2(tmp_path):
    process = start("--prompt=x", cwd=tmp_path)
    out, err = process.communicate()
    assert (process.returncode, out) == (2, b"")
    assert err.startswith(b"error: there is no run under out/") and err.count(b"\n") == 1


# -------------------------------------------------------------------------- tokens become text


def completion_of(pieces: list[bytes], stops=(), max_new_tokens=10**6) -> tuple[Completion, list]:
    """A completion after ids 0, 1, ... that stand for `pieces`, and its text after each."""
    writer = SimpleNamespace(
        model=SimpleNamespace(config=SimpleNamespace(max_position_embeddings=10**6)),
        tokenizer=SimpleNamespace(decode_bytes=lambda ids, skip_special: pieces[ids[0]]),
        config=SimpleNamespace(stop=stops, max_new_tokens=max_new_tokens),
        stop_ids=[-1],
    )
    completion, texts = Completion(writer, [0]), []
    for id in range(len(pieces)):
        texts.append(completion.text)
        if completion.push(id):
            break
    texts.append(completion.text)
    return completion, texts


def cut(data: bytes, places: list[int]) -> list[bytes]:
    ends = [0, *sorted({place % (len(data) + 1) for place in places}), len(data)]
    return [data[a:b] for a, b in zip(ends, ends[1:], strict=False)]


@given(st.text(st.sampled_from("aé你🙂👩‍🚀\n"), max_size=20), st.lists(st.integers(0, 99)))
def test_half_a_character_is_never_shown(text, places):
    completion, texts = completion_of(cut(text.encode(), places))
    assert completion.text == text
    for shown, longer in zip(texts, texts[1:], strict=False):
        assert longer.startswith(shown)


def test_half_a_character_at_the_end_is_left_out():
    completion, _ = completion_of([b"a", "🙂".encode()[:2]], max_new_tokens=2)
    assert (completion.text, completion.stop_reason) == ("a", "max_new_tokens")
    completion, _ = completion_of([b"a", b"\xff", b"b"])  # what can be no character is marked
    assert completion.text == "a\ufffdb"


@settings(max_examples=300)
@given(
    st.text("ab", max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(0, 99)),
)
def test_stop_strings_straddle_tokens_and_no_part_of_one_is_shown(text, stops, places):
    pieces = cut(text.encode(), places)
    completion, texts = completion_of(pieces, stops)
    # By hand: the text after each token, up to the first that holds a stop string.
    expected, sofar = text, ""
    for piece in pieces:
        sofar += piece.decode()
        found = [sofar.index(stop) for stop in stops if stop in sofar]
        if found:
            expected = sofar[: min(found)]
            break
    assert (completion.stop_reason == "stop string") == any(stop in text for stop in stops)
    if not completion.stop_reason:
        completion.stop("interrupted")  # then what was held back is shown
    assert completion.text == expected
    assert all(expected.startswith(shown) for shown in texts)


# --------------------------------------------------------------------------------------- chat


def chat_of(tokenizer=None, letters="abcdefgh", stop_ids=(EOS, IM_END), **options) -> Chat:
    """A conversation with a random model that answers in `letters` and ends its turns."""
    tokenizer = tokenizer or Tokenizer.load("bytes")
    allowed = {IM_END, *stop_ids}
    for id in range(tokenizer.vocab_size):
        piece = tokenizer.decode_bytes([id], skip_special=True).decode("latin-1")
        if piece and set(piece) <= set(letters):
            allowed.add(id)
    shape = {"max_position_embeddings": 400, "vocab_size": tokenizer.vocab_size}
    limit = {name: options.pop(name) for name in shape if name in options}
    model = random_model(tiny(tie_word_embeddings=False, **shape | limit))
    config = SampleConfig(**{"seed": 1, "max_new_tokens": 20, "temperature": 1.0} | options)
    forbidden = [id for id in range(tokenizer.vocab_size) if id not in allowed]
    return Chat(Writer(model, tokenizer, config, list(stop_ids), forbidden))


def ask(chat: Chat, text: str) -> str:
    chat.messages.append({"role": "user", "content": text})
    chat.answer()
    return chat.messages[-1]["content"]


def rendered(chat: Chat, messages: list[dict]) -> list[int]:
    return chat.writer.tokenizer.render_chat(messages, add_generation_prompt=True)[0]


def test_each_turn_computes_only_what_is_new_and_answers_as_if_computed_anew():
    chat = chat_of(temperature=0.0)
    endings = set()
    for turn in range(12):
        before = len(chat.cached)
        last_fed = chat.messages[-1]["ids"] if chat.messages else []
        question = f"Who has the ball {turn % 5}?"
        answer = ask(chat, question)
        prompt = rendered(chat, chat.messages[:-1])
        # New are the marks, the question, and the answer's last token, which was never fed back.
        # An answer that ended by <|im_end|> has all its own tokens in the cache.
        assert chat.prefilled == len(prompt) - before
        marks = len(rendered(chat, [{"role": "user", "content": question}]))
        expected = marks + len([IM_END, "\n"]) + (len(last_fed) == 20) if turn else marks
        assert chat.prefilled == expected
        writer = chat.writer
        options = {"stop_ids": writer.stop_ids, "forbidden_ids": writer.forbidden_ids}
        (fresh,) = generate(writer.model, [prompt], 20, temperature=0, **options)
        assert writer.tokenizer.decode(fresh, skip_special=True) == answer
        endings.add(len(chat.messages[-1]["ids"]) == 20)
        if len(prompt) > 300:
            break
    assert endings == {True, False} or endings == {True}


def test_an_answer_keeps_the_tokens_that_it_was_written_with():
    tokenizer = Tokenizer.train(["ab abab abababab " * 20], 264, progress=False)
    chat = chat_of(tokenizer, letters="ab", temperature=3.0, max_position_embeddings=2000)
    other_tokens = 0
    for turn in range(12):
        question = f"Who {turn % 10}?"
        marks = len(rendered(chat, [{"role": "user", "content": question}]))
        cut_short = bool(chat.messages) and len(chat.messages[-1]["ids"]) == 20
        ask(chat, question)
        assert chat.prefilled == (marks + 2 + cut_short if turn else marks)
        ids = chat.messages[-1]["ids"]
        other_tokens += ids != tokenizer.encode(chat.messages[-1]["content"])
    assert other_tokens > 1


def test_where_the_template_leaves_something_out_the_template_counts():
    tokenizer = Tokenizer.load("bytes")
    tokenizer.chat_style = ChatStyle(prompt="empty", last=True, splits=True)
    thought = "<think>\nhm\n</think>\n\nabc"
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": thought, "ids": tokenizer.encode(thought)},
        {"role": "user", "content": "y"},
    ]
    ids = chat_ids(tokenizer, messages)
    assert ids == tokenizer.render_chat(messages, add_generation_prompt=True)[0]
    assert "hm" not in tokenizer.decode(ids)


def test_retry_answers_again_and_computes_one_token():
    chat = chat_of()
    first = ask(chat, "Who?")
    assert chat.command("/retry")
    chat.answer()
    assert chat.prefilled == 1
    assert [message["role"] for message in chat.messages] == ["user", "assistant"]
    assert chat.messages[-1]["content"] != first


def test_system_and_reset(capsys):
    chat = chat_of()
    ask(chat, "Who?")
    assert not chat.command("/system Be brief.")
    assert [m["role"] for m in chat.messages] == ["system", "user", "assistant"]
    chat.command("/system Be kind.")
    assert chat.messages[0]["content"] == "Be kind."
    ask(chat, "And?")
    chat.command("/reset")
    assert [m["content"] for m in chat.messages] == ["Be kind."]
    ask(chat, "Who?")
    assert chat.prefilled < len(rendered(chat, chat.messages[:-1]))  # the system message was kept
    chat.command("/system")
    assert [m["role"] for m in chat.messages] == ["user", "assistant"]
    chat.command("/reset")
    chat.command("/retry")
    assert chat.messages == [] and "no answer to try again" in capsys.readouterr().err


def test_save_appends_a_row_that_training_reads(tmp_path, capsys):
    chat = chat_of()
    ask(chat, "你好?")
    chat.command(f"/save {tmp_path}/chats.jsonl")
    ask(chat, "And?")
    chat.command(f"/save {tmp_path}/chats.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "chats.jsonl").open(encoding="utf-8")]
    assert [len(row["messages"]) for row in rows] == [2, 4]
    assert set(rows[1]["messages"][1]) == {"role", "content"}
    chat.command("/save")
    chat.command("/save no/such/directory/x")
    chat.command(f"/save {tmp_path}/a\0b")
    assert capsys.readouterr().err.count("/save needs a file that can be written") == 3


def test_save_leaves_out_what_training_would_not_read(tmp_path, capsys):
    chat, file = chat_of(), tmp_path / "chats.jsonl"
    chat.command(f"/save {file}")
    chat.command("/system Be brief.")
    chat.command(f"/save {file}")
    assert not file.exists() and capsys.readouterr().err.count("there is nothing to /save") == 2
    for answer in ("", "So.", " \n"):
        chat.messages.append({"role": "user", "content": f"before {answer!r}"})
        chat.messages.append({"role": "assistant", "content": answer, "ids": []})
    chat.command(f"/save {file}")
    (row,) = [parse(json.loads(line)) for line in file.read_text().splitlines()]
    contents = [message["content"] for message in row.messages]
    assert contents == ["Be brief.", "before 'So.'", "So."]
    assert f"the conversation is in {file}, all but 2 empty answers" in capsys.readouterr().err


FULL_DISK = """
import resource, sys
from chat import append_line
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
try:
    append_line(sys.argv[1], "x" * 5000)
except OSError as error:
    print(error.strerror)
"""


def test_a_line_that_the_disk_does_not_take_leaves_the_file_as_it_was(tmp_path):
    pytest.importorskip("resource")
    file = tmp_path / "a.jsonl"
    append_line(str(file), "1")
    with file.open("a") as opened:
        opened.write("2")  # an editor that left out the last line break
    append_line(str(file), "3")
    assert file.read_text() == "1\n2\n3\n"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", FULL_DISK, str(file)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout == "File too large\n", done.stderr
    assert file.read_text() == "1\n2\n3\n"


def test_when_the_context_is_full_the_oldest_turns_leave_with_a_notice(capsys):
    chat = chat_of(max_position_embeddings=150)
    chat.command("/system Be brief.")
    for turn in range(8):
        ask(chat, f"Who has ball {turn}?")
        assert len(rendered(chat, chat.messages[:-1])) <= 150 - 20
        assert chat.messages[0]["role"] == "system" and chat.messages[1]["role"] == "user"
        assert chat.messages[-2]["content"] == f"Who has ball {turn}?"
    assert len(chat.messages) < 1 + 2 * 8
    assert "the context of 150 tokens is full: the oldest turn has left" in capsys.readouterr().err
    # What is cached still is what a fresh computation gives.
    prompt = rendered(chat, chat.messages[:-1])
    assert chat.cached[: len(prompt)] == prompt
    assert chat.cache.length == len(chat.cached)


def test_a_message_longer_than_the_context_is_refused_and_the_chat_goes_on(run):
    talk = f"Hi\n{'x' * 300}\nWho?\n"
    out, err = run("--chat", "--max_new_tokens=5", "--temperature=0", stdin=talk)
    assert "tokens, but the model's context is 200; the message is not part" in err
    assert err.count("prefill") == 2 and "is full" not in err  # it never was in it


def test_the_cache_grows_with_the_conversation_not_to_the_limit():
    chat = chat_of(max_position_embeddings=30_000, temperature=0.0)
    ask(chat, "x")
    assert chat.cache.max_length == 256
    ask(chat, "x" * 300)
    assert chat.cache.max_length == 512
    prompt = rendered(chat, chat.messages[:-1])
    writer = chat.writer
    options = {"stop_ids": writer.stop_ids, "forbidden_ids": writer.forbidden_ids}
    assert chat.prefilled < len(prompt)
    (fresh,) = generate(writer.model, [prompt], 20, temperature=0, **options)
    assert writer.tokenizer.decode(fresh, skip_special=True) == chat.messages[-1]["content"]


def interrupt(chat: Chat, call: int, monkeypatch) -> None:
    """Ctrl-C in the middle of the forward number `call` from here: the cache is half written."""
    layer, calls = chat.writer.model.model.layers[1], []

    def forward(*arguments):
        calls.append(1)
        if len(calls) == call + 1:
            raise KeyboardInterrupt
        return type(layer).forward(layer, *arguments)

    monkeypatch.setattr(layer, "forward", forward)


@pytest.mark.parametrize("call", [0, 1, 4])
def test_after_an_interruption_the_conversation_and_its_cache_are_right(call, monkeypatch):
    chat = chat_of(temperature=0.0, stop_ids=[])
    ask(chat, "Who?")
    interrupt(chat, call, monkeypatch)
    assert len(ask(chat, "And?")) == call
    monkeypatch.undo()
    answer = ask(chat, "Then?")
    prompt, writer = rendered(chat, chat.messages[:-1]), chat.writer
    options = {"temperature": 0, "forbidden_ids": writer.forbidden_ids}
    (fresh,) = generate(writer.model, [prompt], 20, **options)
    assert writer.tokenizer.decode(fresh, skip_special=True) == answer


def test_an_interrupted_prefill_forgets_what_it_wrote_over(monkeypatch):
    chat = chat_of(temperature=0.0)
    first = ask(chat, "Who has the ball?")
    chat.command("/reset")
    interrupt(chat, 0, monkeypatch)
    ask(chat, "Who is that, and where?")
    monkeypatch.undo()
    chat.command("/reset")
    assert ask(chat, "Who has the ball?") == first


def test_a_piped_chat_answers_every_line_and_knows_its_commands(run):
    talk = "Hi\n\n/retry\n/unknown x\n/help\ntwo \\\nlines\n/quit\nnot read\n"
    out, err = run("--chat", "--max_new_tokens=8", "--seed=1", stdin=talk)
    assert err.count("prefill") == 3
    assert "there is no /unknown" in err and "/system TEXT" in err
    hello, _ = run("--chat", "--prompt=Hi", "--max_new_tokens=8", "--seed=1")
    assert out.startswith(hello)
    two, err = run("--chat", "--max_new_tokens=8", stdin="two \\\nlines")
    assert f"prefill {len('_user.two .lines_._assistant.')} tokens" in err


@pytest.mark.skipif(
    signal.getsignal(signal.SIGINT) == signal.SIG_IGN, reason="Ctrl-C is ignored here, as by nohup"
)
def test_ctrl_c_stops_the_answer_and_not_the_program(tmp_path):
    checkpoint = save_checkpoint(tmp_path, max_position_embeddings=50_000)
    (checkpoint / "generation_config.json").write_text('{"eos_token_id": []}')  # it never ends
    process = start(f"--checkpoint={checkpoint}", "--chat", "--max_new_tokens=40000", "--seed=1")
    process.stdin.write(b"Hi\n")
    process.stdin.flush()
    process.stdout.read(20)  # the answer has begun
    process.send_signal(signal.SIGINT)
    lines = iter(process.stderr.readline, b"")
    assert any(b"ended: interrupted" in line for line in lines)
    process.stdin.write(b"/reset\n/quit\n")
    out, err = process.communicate()
    assert process.returncode == 0
    assert b"the conversation starts anew" in err and b"Traceback" not in err


def test_ctrl_c_ends_a_single_text_with_code_130(run, monkeypatch, capsys):
    forward = sample.GPT.forward
    calls = []

    def interrupted(self, *arguments, **options):
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return forward(self, *arguments, **options)

    monkeypatch.setattr(sample.GPT, "forward", interrupted)
    with pytest.raises(SystemExit) as exit:
        run("--prompt=x", "--seed=1", "--max_new_tokens=50", "--compile=False")
    assert exit.value.code == 130
    captured = capsys.readouterr()
    assert captured.out.startswith("x") and "ended: interrupted" in captured.err


def test_a_random_model_chats_in_every_dtype(run):
    for dtype in ("bf16", "fp16"):
        _, err = run("--prompt=x", f"--dtype={dtype}", "--max_new_tokens=5")
        assert str({"bf16": torch.bfloat16, "fp16": torch.float16}[dtype])[6:] in err
