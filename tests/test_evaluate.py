"""The programs beside the two main ones: evaluate.py, its two figures against what can be counted
by hand; docs/curves.py, the pictures that it draws and those that it refuses to."""

import importlib.util
import json
import math
import re
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure

import checkpoint
import evaluate
from config import UserError
from data import tinyworld
from data.tokenizer import Tokenizer
from model import GPT, GPTConfig


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    directory = tmp_path_factory.mktemp("world") / "tinyworld"
    tinyworld.prepare(directory, num_stories=400, num_chats=610, progress=False)
    return directory


@pytest.fixture
def model_and_tokenizer():
    tokenizer = Tokenizer.load("bytes")
    torch.manual_seed(0)
    config = GPTConfig(math.ceil(tokenizer.vocab_size / 64) * 64, 16, 1, 2, 32)
    config.max_position_embeddings = 1024
    return GPT(config), tokenizer


def test_the_loss_of_an_even_guess_is_ln_v_and_the_floor_that_of_the_grammar(
    world, model_and_tokenizer
):
    model, tokenizer = model_and_tokenizer
    with torch.no_grad():
        model.model.norm.weight.zero_()  # all logits are 0
    loss, floor = evaluate.story_loss(model, tokenizer, world)
    assert math.isclose(loss, math.log(model.config.vocab_size), rel_tol=1e-5)
    texts = (world / "stories" / "val.jsonl").read_text().splitlines()
    # a story of n bytes has n targets, and one more: its end
    targets = sum(len(json.loads(line)["text"].encode()) + 1 for line in texts)
    nats = json.loads((world / "stories" / "floor.json").read_text())["val_nats"]
    assert math.isclose(floor, nats / targets)


def test_answers_are_counted_by_kind(world, model_and_tokenizer, monkeypatch):
    """A player that knows every answer but says yes for no: wrong in these, right in all others."""
    model, tokenizer = model_and_tokenizer
    tokenizer.learn_chats()
    lines = (world / "chats" / "val.jsonl").read_text().splitlines()
    chats = [json.loads(line)["messages"] for line in lines] * 20
    known = {}
    for messages in chats:
        for turn in range(1, len(messages), 2):
            prompt = tokenizer.render_chat(messages[:turn], add_generation_prompt=True)[0]
            said = messages[turn]["content"].replace("so no.", "so yes.")
            known[tuple(prompt)] = [*tokenizer.encode(said), tokenizer.stop_ids[0]]

    def generate(model, prompts, max_new_tokens, **options):
        assert options["temperature"] == 0
        return [known[tuple(prompt)] for prompt in prompts]

    monkeypatch.setattr(evaluate, "generate", generate)
    counts = evaluate.exact_answers(model, tokenizer, chats, 60)
    right, total = counts["all"]
    assert total == 60
    assert counts["no"][0] == 0 and right == total - counts["no"][1]
    kinds = {"who", "what", "where", "gave", "colour", "yes", "no"}
    assert sum(counts[kind][1] for kind in kinds & set(counts)) == total
    assert 0 < counts["held out"][1] < total
    turns = [turn for messages in chats for turn in range(len(messages) // 2)][:60]
    assert counts["first"][1] == turns.count(0)
    assert counts["one thing"][1] + counts["two things"][1] == total


def test_a_text_of_two_things_is_told_from_one_of_one(model_and_tokenizer, monkeypatch):
    model, tokenizer = model_and_tokenizer
    tokenizer.learn_chats()
    one = "Zoe has a red ball. Zoe gave the ball to Tom. What colour is the ball?"
    two = "Zoe has a red ball. Tom had an old... no, a red kite. What colour is the ball?"
    chats = [
        [{"role": "user", "content": text}, {"role": "assistant", "content": "The ball is red."}]
        for text in (one, two, two)
    ]
    right = [*tokenizer.encode("The ball is red."), tokenizer.stop_ids[0]]
    monkeypatch.setattr(evaluate, "generate", lambda *_, **__: [[], right, right])
    counts = evaluate.exact_answers(model, tokenizer, chats, 3)
    assert (counts["one thing"], counts["two things"]) == ((0, 1), (2, 2))


def test_every_kind_of_question_is_told_apart():
    words = {"T.the": "the red ball", "T.short": "the ball", "A": "Mia"}
    for kind in tinyworld.ANSWERS:  # those of a chat
        answer = f"The ball is with Tom, so {kind}." if kind in ("yes", "no") else "Tom."
        for way in tinyworld.QUESTIONS[kind]:
            for slot, word in words.items():
                way = way.replace("{" + slot + "}", word)
            assert evaluate.kind_of(way, answer) == kind


def test_a_random_model_answers_nothing(world, model_and_tokenizer):
    model, tokenizer = model_and_tokenizer
    tokenizer.learn_chats()
    chats = [json.loads((world / "chats" / "val.jsonl").read_text().splitlines()[0])["messages"]]
    counts = evaluate.exact_answers(model, tokenizer, chats, 1)
    assert counts["all"] == (0, 1)


@pytest.mark.parametrize("chats", [False, True])
def test_what_the_program_prints(world, model_and_tokenizer, tmp_path, monkeypatch, capsys, chats):
    model, tokenizer = model_and_tokenizer
    if not chats:
        tokenizer.chat_style = None
    monkeypatch.setattr(evaluate, "WORLD", world)
    monkeypatch.setattr(tinyworld, "prepare", lambda directory: None)  # it is there
    monkeypatch.setattr(checkpoint, "load_model", lambda *_: (model, tokenizer, tmp_path))
    evaluate.main([str(tmp_path), "--questions=3"])
    first, stories, *answers = capsys.readouterr().out.splitlines()
    assert first == f"checkpoint  {tmp_path}, {model.num_parameters():,} parameters"
    loss, floor, above = (float(number) for number in re.findall(r"\d+\.\d+", stories))
    assert loss > floor > 0 and above == pytest.approx(loss - floor, abs=2e-4)
    if chats:
        assert answers[0] == "all             0 of     3 exact, 0.0%"
    else:
        assert answers == ["answers     none: it was not trained on chats"]


@pytest.mark.parametrize("device", ["foo", "cuda:99", "meta"])
def test_a_device_that_is_none_is_one_sentence(device):
    with pytest.raises(UserError, match=f"--device={device}"):
        evaluate.main(["nowhere", f"--device={device}"])


def test_other_mistakes_are_sentences_too(tmp_path):
    with pytest.raises(UserError, match="--questions=0, but at least 1"):
        evaluate.main(["nowhere", "--questions=0"])
    file = tmp_path / "val.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "Who?"}')
    with pytest.raises(UserError, match="val.jsonl, line 1: not valid JSON"):
        evaluate.read_chats(file)


def test_a_floor_that_is_none_is_one_sentence(model_and_tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where the cache goes
    stories = tmp_path / "stories"
    stories.mkdir()
    for name in ("train.jsonl", "val.jsonl"):
        (stories / name).write_text(json.dumps({"text": name}) + "\n")
    for content in ("", "[]", "{}", '{"val_nats": "7"}', '{"val_nats": 1' + "0" * 400 + "}"):
        (stories / "floor.json").write_text(content)
        with pytest.raises(UserError, match="floor.json"):
            evaluate.story_loss(*model_and_tokenizer, tmp_path)


# ----- docs/curves.py -----------------------------------------------------------------------------

spec = importlib.util.spec_from_file_location(
    "curves", Path(__file__).parents[1] / "docs" / "curves.py"
)
curves = importlib.util.module_from_spec(spec)
spec.loader.exec_module(curves)

LINE = {"step": 5, "loss": 2.5, "val_loss": 2.25, "floor": 1.5, "seconds": 1.5}


def a_run(directory: Path, *lines: dict, data="x.txt") -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (directory / "train_config.json").write_text(json.dumps({"data": data}))
    return directory


def drawn(tmp_path, monkeypatch, *arguments) -> list[tuple]:
    """(x, y, label) of the lines in both halves of the picture, which is written too."""
    figures = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *a, **k: figures.append(self) or save(self, *a, **k)
    )
    curves.main([*map(str, arguments), f"--out={tmp_path}/new/a.png"])
    assert (tmp_path / "new" / "a.png").read_bytes().startswith(b"\x89PNG")
    lines = [line for axes in figures[0].axes for line in axes.get_lines()]
    return [(*map(list, line.get_data()), line.get_label()) for line in lines]


def test_the_curves_are_those_of_the_runs(tmp_path, monkeypatch, capsys):
    later = LINE | {"step": 9, "val_loss": 2, "seconds": 3}
    no_evaluation = {"step": 7, "loss": 2.5, "seconds": 2}
    one = a_run(tmp_path / "o$n$e", LINE, no_evaluation, later)
    two = a_run(tmp_path / "two", LINE)
    first, second, floor, *by_seconds = drawn(tmp_path, monkeypatch, one, two)
    assert first == ([5, 9], [2.25, 2], r"o\$n\$e (2.0000 at the end)")
    assert second == ([5], [2.25], "two (2.2500 at the end)")
    assert floor[1:] == ([1.5, 1.5], "floor (1.5000)")
    assert [line[0] for line in by_seconds[:2]] == [[1.5, 3], [1.5]]
    assert capsys.readouterr().out == f"{tmp_path}/new/a.png\n"


def test_figures_that_are_no_numbers_are_left_out(tmp_path, monkeypatch):
    """As report.py writes those that are not finite, and as json reads them."""
    odd = [
        LINE | {name: value} for name in ("val_loss", "seconds") for value in ("nan", True, None)
    ]
    odd += [LINE | {"val_loss": float("inf")}, LINE | {"val_loss": 10**400}]
    run = a_run(tmp_path / "run", LINE, *odd, LINE | {"step": 9, "floor": "inf"})
    lines = drawn(tmp_path, monkeypatch, run, "--nanogpt")
    assert lines[0][:2] == ([5, 9], [2.25, 2.25])
    assert not any("floor" in label for _, _, label in lines)
    assert sum("nanoGPT" in label for _, _, label in lines) == 4


@pytest.mark.parametrize(
    "name, content, complaint",
    [
        ("metrics.jsonl", None, "metrics.jsonl has no line with a validation loss and seconds"),
        ("metrics.jsonl", b"", "metrics.jsonl has no line with a validation loss and seconds"),
        ("metrics.jsonl", b'{"step": 1, "val_loss": 2.0}', "no line with a validation loss and"),
        ("metrics.jsonl", b"\xff", "metrics.jsonl is not UTF-8"),
        ("metrics.jsonl", b'{"step"}\n{"step": 1}', "metrics.jsonl, line 1: not a line of metrics"),
        ("train_config.json", None, "train_config.json cannot be read: No such file"),
        ("train_config.json", b"{", "train_config.json is not valid JSON"),
        ("train_config.json", b"{}", "train_config.json: data is None, not a name"),
        ("train_config.json", b'{"data": ["x"]}', r"train_config.json: data is \['x'\], not a"),
        ("train_config.json", b"\xff", "train_config.json is not valid JSON"),
    ],
)
def test_a_run_that_cannot_be_drawn_is_one_sentence(tmp_path, name, content, complaint):
    run = a_run(tmp_path / "run", LINE)
    (run / name).unlink()
    if content is not None:
        (run / name).write_bytes(content)
    with pytest.raises(UserError, match=complaint):
        curves.main([str(run), f"--out={tmp_path}/a.png"])
    assert not (tmp_path / "a.png").exists()


def test_other_data_and_pictures_that_cannot_be_written(tmp_path):
    runs = [str(a_run(tmp_path / name, LINE, data=name)) for name in ("a", "b")]
    with pytest.raises(UserError, match=r"on different data \(a, b\)"):
        curves.main([*runs, f"--out={tmp_path}/a.png"])
    (tmp_path / "file").write_text("x")
    for out in (
        f"{tmp_path}/o.foo",
        f"{tmp_path}/file/a.png",
        f"{tmp_path}/a\0.png",
    ):
        with pytest.raises(UserError, match="--out=.* cannot be written: "):
            curves.main([runs[0], f"--out={out}"])
