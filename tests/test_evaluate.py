"""evaluate.py: the two figures of the small world, against what can be counted by hand."""

import json
import math
import re

import pytest
import torch

import checkpoint
import evaluate
from data import tinyworld
from data.tokenizer import Tokenizer
from model import GPT, GPTConfig


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    directory = tmp_path_factory.mktemp("world") / "tinyworld"
    tinyworld.prepare(directory, num_stories=400, num_chats=62, progress=False)
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
    """A player that knows every answer but says Yes for No: wrong in these, right in all others."""
    model, tokenizer = model_and_tokenizer
    tokenizer.learn_chats()
    lines = (world / "chats" / "val.jsonl").read_text().splitlines()
    chats = [json.loads(line)["messages"] for line in lines] * 20
    known = {}
    for messages in chats:
        for turn in range(1, len(messages), 2):
            prompt = tokenizer.render_chat(messages[:turn], add_generation_prompt=True)[0]
            said = messages[turn]["content"].replace("No.", "Yes.")
            known[tuple(prompt)] = [*tokenizer.encode(said), tokenizer.stop_ids[0]]

    def generate(model, prompts, max_new_tokens, **options):
        assert options["temperature"] == 0
        return [known[tuple(prompt)] for prompt in prompts]

    monkeypatch.setattr(evaluate, "generate", generate)
    counts = evaluate.exact_answers(model, tokenizer, chats, 60)
    right, total = counts["all"]
    assert total == 60
    assert counts["no"][0] == 0 and right == total - counts["no"][1]
    kinds = {"who", "what", "where", "where it", "gave", "colour", "yes", "no"}
    assert sum(counts[kind][1] for kind in kinds & set(counts)) == total
    assert 0 < counts["held out"][1] < total


def test_every_kind_of_question_is_told_apart():
    words = {"T.the": "the red ball", "T.short": "the ball", "A": "Mia"}
    for kind, ways in tinyworld.QUESTIONS.items():
        answer = kind.capitalize() + "." if kind in ("yes", "no") else "Tom."
        for way in ways:
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
