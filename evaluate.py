"""Measure a checkpoint in the small world:  python evaluate.py out/tiny_sft

Two figures that do not depend on taste. The loss over all validation stories, beside the floor,
the loss of a perfect model. And, for a model that was trained on chats, how many questions of the
validation chats it answers exactly, letter for letter, always taking the likeliest token. Each of
those chats is about a person and a thing that never met in training.
"""

import re
from collections import defaultdict
from pathlib import Path
from typing import Annotated

import torch
import tyro
from tqdm import tqdm

import checkpoint
from config import UserError, choose_device, run_program
from data import tinyworld
from data.batches import Batches
from data.dataset import load_dataset
from data.sources import RowError, Source, parse, read_chunks, sentence
from data.tokenizer import Tokenizer
from model import GPT
from sample import generate
from train import read_floor

WORLD = Path("data/cache/tinyworld")
POSITIONS_AT_ONCE = 8192  # of a batch of stories
PROMPTS_AT_ONCE = 64
LONGEST_ANSWER = 32  # tokens; the longest right one has 19


@torch.no_grad()
def story_loss(model: GPT, tokenizer: Tokenizer, world: Path) -> tuple[float, float]:
    """(mean loss, floor) over all validation stories, in nats per token."""
    context = model.config.max_position_embeddings
    stories = world / "stories"
    _, rows = load_dataset(stories, tokenizer=tokenizer, max_seq_len=context, progress=False)
    batches = Batches(rows, max(1, POSITIONS_AT_ONCE // context), context, seed=0, shuffle=False)
    device = model.lm_head.weight.device
    total = 0.0
    model.eval()
    for number in tqdm(range(batches.per_epoch), desc="stories", unit=" batches"):
        batch = batches[number]
        loss_sum, _ = model(batch["input_ids"].to(device), labels=batch["labels"].to(device))
        total += loss_sum.item()
    return total / rows.num_targets, read_floor(stories) / rows.num_targets


def read_chats(file: Path) -> list[list[dict]]:
    """The chats of a file, each a list of messages. UserError where it is damaged."""
    chats = []
    for chunk in read_chunks(Source(str(file), file)):
        for number, item in chunk.items:
            try:
                chats.append(parse(item).messages)
            except RowError as error:
                raise UserError(sentence(chunk, number, error)) from error
    return chats


def exact_answers(
    model: GPT, tokenizer: Tokenizer, chats: list[list[dict]], most: int
) -> dict[str, tuple[int, int]]:
    """For each kind of question, (answered exactly, asked), over the first `most` questions.

    Each question is asked behind the right answers to the earlier ones of its chat. "all" counts
    every question, "held out" those whose words bring together a person and a thing that never met
    in training, in the question itself or in the right answer to it. "one thing" and "two things":
    so many has the text, and only where there are two must a model tell them apart. "first": of its
    chat, so that no earlier answer says something about the same thing.
    """
    asked = [
        (messages[: turn + 1], messages[turn]["content"], messages[turn + 1]["content"])
        for messages in chats
        for turn in range(0, len(messages), 2)
    ][:most]
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for first in tqdm(range(0, len(asked), PROMPTS_AT_ONCE), desc="answers", unit=" batches"):
        some = asked[first : first + PROMPTS_AT_ONCE]
        prompts = [
            tokenizer.render_chat(chat, add_generation_prompt=True)[0] for chat, _, _ in some
        ]
        stops = tokenizer.stop_ids
        rows = generate(model, prompts, LONGEST_ANSWER, temperature=0, stop_ids=stops)
        for (chat, text, answer), row in zip(some, rows, strict=True):
            given = tokenizer.decode([id for id in row if id not in stops])
            question = text.split(". ")[-1].split("! ")[-1]
            kinds = ["all", kind_of(question, answer)]
            words = words_of(question + " " + answer)
            if any(p in words and words & set(nouns) for p, nouns in tinyworld.HELD_OUT.items()):
                kinds.append("held out")
            one = len(words_of(chat[0]["content"]) & set(tinyworld.NOUNS)) == 1
            kinds.append("one thing" if one else "two things")
            if len(chat) == 1:
                kinds.append("first")
            for kind in kinds:
                counts[kind][0] += given == answer
                counts[kind][1] += 1
    return {kind: (right, total) for kind, (right, total) in counts.items()}


def words_of(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))


def kind_of(question: str, answer: str) -> str:
    """Which of tinyworld.QUESTIONS this is, by the words that it begins with."""
    if question.startswith("Does"):
        return "yes" if answer.endswith("yes.") else "no"
    beginnings = {
        "Who has": "who",
        "What does": "what",
        "Where is": "where",
        "Who gave": "gave",
        "What colour": "colour",
    }
    return next(kind for begins, kind in beginnings.items() if question.startswith(begins))


def evaluate(
    checkpoint_path: Annotated[str, tyro.conf.Positional, tyro.conf.arg(name="checkpoint")],
    questions: int = 1000,
    device: str = "cpu",
) -> None:
    """Measure a checkpoint in the small world.

    Args:
        checkpoint_path: A run, a checkpoint directory or a hub id.
        questions: How many of the questions of the validation chats to ask.
        device: "auto" (CUDA, then MPS, then CPU), or a torch device such as "cuda".
    """
    if questions < 1:
        raise UserError(f"--questions={questions}, but at least 1 has to be asked")
    chosen, dtype, _ = choose_device(device, "fp32")
    model, tokenizer, directory = checkpoint.load_model(checkpoint_path, chosen, dtype)
    tinyworld.prepare(WORLD)
    print(f"checkpoint  {directory}, {model.num_parameters():,} parameters")
    loss, floor = story_loss(model, tokenizer, WORLD)
    print(f"stories     loss {loss:.4f}, floor {floor:.4f}, {loss - floor:.4f} above it")
    if tokenizer.chat_style is None:
        print("answers     none: it was not trained on chats")
        return
    chats = read_chats(WORLD / "chats" / "val.jsonl")
    counts = exact_answers(model, tokenizer, chats, questions)
    for kind, (right, total) in sorted(counts.items(), key=lambda item: -item[1][1]):
        print(f"{kind:<11} {right:5,} of {total:5,} exact, {right / total:.1%}")


def main(arguments: list[str]) -> None:
    tyro.cli(evaluate, prog="evaluate.py", args=arguments)


if __name__ == "__main__":
    run_program(main)
