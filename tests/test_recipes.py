"""The recipes in configs/: each parses, runs, states the right size, and reads what is prepared.

`reduced` makes a run of 3 small steps of a recipe and keeps the rest of its options, so that none
of them rots though most recipes are far too large for a test.
"""

import inspect
import json
import re
import runpy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import checkpoint
import train
from config import TrainConfig, parse_config
from data import prepare_fineweb_edu, prepare_minimind, prepare_shakespeare
from data.tokenizer import Tokenizer
from model import GPT

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.py"))
NAMES = [path.stem for path in CONFIGS]
RECIPES = dict(zip(NAMES, CONFIGS, strict=True))

TEXTS = [{"text": f"The {animal} sees a {thing}."} for animal in "ant bee cat dog".split()
         for thing in "ball cup hat key pot".split()]  # fmt: skip
CHATS = [
    {"conversations": [{"role": "user", "content": "?"}, {"role": "assistant", "content": letter}]}
    for letter in "abcdefghijklmnopqrst"
]
INSTRUCTIONS = [{"instruction": "?", "input": "", "output": letter} for letter in "abcdefghijklmno"]


def little_data(config: TrainConfig, directory: Path) -> Path:
    """A file of the kind that the recipe reads: one text, texts, chats or instructions."""
    if config.data.endswith(".txt"):
        file = directory / "text.txt"
        file.write_text("To be, or not to be, that is the question:\n" * 20)
        return file
    rows = TEXTS if config.init_from is None else CHATS
    if "instructions" in config.data:
        rows = INSTRUCTIONS
    file = directory / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def reduced(config: TrainConfig, directory: Path) -> TrainConfig:
    """The recipe with a small shape, little data, 3 steps and no compiler; else as it is."""
    tokenizer = config.tokenizer  # one that is trained stays so; others may be out of reach
    if config.init_from is None and tokenizer not in (None, "bpe"):
        tokenizer = "bytes"
    return replace(
        config,
        out_dir=str(directory / "run"),
        data=str(little_data(config, directory)),
        val_data=None,
        val_fraction=0.2,
        tokenizer=tokenizer,
        vocab_size=300,
        max_seq_len=32,
        max_position_embeddings=32,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=config.num_key_value_heads and 2,
        head_dim=config.head_dim and 8,
        intermediate_size=48,
        batch_size=2,
        max_steps=3,
        sample_tokens=4,
        device="cpu",
        compile=False,
    )


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A run of one step, for the recipes that start from another run."""
    directory = tmp_path_factory.mktemp("base")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        config = reduced(parse_config(TrainConfig, ["--tokenizer=bytes"]), directory)
        train.train(replace(config, max_steps=1))
    return directory / "run"


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_parses_and_runs_three_steps(name, base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = parse_config(TrainConfig, [str(RECIPES[name])])
    assert recipe.out_dir == f"out/{name}"
    config = reduced(recipe, tmp_path)
    if config.init_from is not None:
        config.init_from = str(base)
    train.train(config)
    (last,) = [json.loads(line) for line in Path(config.out_dir, "metrics.jsonl").open()]
    assert last["step"] == 3 and last["skipped_steps"] == 0 and last["val_loss"] > 0
    step = checkpoint.saved_steps(Path(config.out_dir))[-1]
    assert Tokenizer.load(step).has_chat_template == (recipe.init_from is not None)


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_that_starts_from_another_names_one_that_is_here(name):
    recipe = parse_config(TrainConfig, [str(RECIPES[name])])
    if recipe.init_from is not None:
        assert recipe.init_from.removeprefix("out/") in NAMES


# Ids of the tokenizers that a recipe may name but a test cannot reach.
PUBLISHED_IDS = {"gpt2": 50257, "data/minimind": 6400}


@pytest.mark.parametrize("name", NAMES)
def test_the_stated_number_of_parameters_is_the_models(name):
    """At full size, on the meta device."""
    said = re.findall(r"([\d,]+) parameters", runpy.run_path(str(RECIPES[name]))["__doc__"])
    recipe = parse_config(TrainConfig, [str(RECIPES[name])])
    if recipe.init_from is not None:
        recipe = parse_config(TrainConfig, [str(RECIPES[Path(recipe.init_from).name])])
    if recipe.tokenizer in (None, "bpe"):
        ids = recipe.vocab_size
    elif recipe.tokenizer == "bytes":
        ids = Tokenizer.load("bytes").vocab_size
    else:
        ids = PUBLISHED_IDS[recipe.tokenizer]
    with torch.device("meta"):
        model = GPT(train.shape_of(recipe, ids))
    assert set(said) <= {f"{model.num_parameters():,}"}
    if name in ("minimind", "minimind_sft", "gpt124m"):
        assert said


def directory_of(script) -> Path:
    """Where a prepare script writes if it is not told otherwise."""
    return inspect.signature(script.prepare).parameters["directory"].default


def test_the_recipes_read_what_the_scripts_prepare():
    data = {name: parse_config(TrainConfig, [str(RECIPES[name])]).data for name in NAMES}
    minimind = directory_of(prepare_minimind)
    assert Path(data["minimind"]) == minimind / prepare_minimind.FILES["pretrain"]
    assert Path(data["minimind_sft"]) == minimind / prepare_minimind.FILES["sft"]
    assert Path(data["gpt124m"]) == directory_of(prepare_fineweb_edu) / "pages.jsonl"
    assert Path(data["shakespeare_char"]).name == "tinyshakespeare.txt"
    assert directory_of(prepare_shakespeare) == Path("data/shakespeare")
