"""Extremes: learning rates of zero and beyond all measure, the smallest models, batches, documents
and contexts, and one token a hundred thousand times. Each has a defined result.
"""

import hashlib
import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import checkpoint
import train
from config import TrainConfig, UserError
from kv_cache import KVCache
from machine import Machine
from model import GPT, GPTConfig
from sample import generate

FLAGS = (
    "--tokenizer=bytes --hidden_size=16 --num_hidden_layers=2 --num_attention_heads=2 "
    "--num_key_value_heads=1 --intermediate_size=24 --max_seq_len=24 --batch_size=4 --device=cpu "
    "--warmup_steps=0 --sample_tokens=4 --log_every=1 --keep_checkpoints=99"
).split()
TEXTS = ["abcabc" * (1 + n % 3) + str(n) for n in range(20)]


def run(*flags: str, texts: list[str] = TEXTS) -> list[Path]:
    """Train on `texts` in the directory where the test is; its checkpoints, oldest first."""
    for name, part in (("train", texts), ("val", ["cba"])):
        Path(f"{name}.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in part))
    data = ["--data=train.jsonl", "--val_data=val.jsonl", "--out_dir=run"]
    train.main([*data, *FLAGS, *flags])
    return checkpoint.saved_steps(Path("run"))


def metrics() -> list[dict]:
    return [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]


def all_finite(step: Path) -> bool:
    return all(tensor.isfinite().all() for tensor in load_file(step / "model.safetensors").values())


@pytest.fixture
def here(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


def model_of(**shape) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(**shape))


SMALLEST = dict(
    vocab_size=2,
    hidden_size=2,
    num_hidden_layers=1,
    num_attention_heads=1,
    intermediate_size=1,
    max_position_embeddings=16,
)

# ------------------------------------------------------------------------------- learning rates


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_learning_rate_of_zero_moves_nothing(here, optimizer):
    """Weight decay is decoupled: it is multiplied by the learning rate."""
    flags = [f"--optimizer={optimizer}", "--learning_rate=0", "--weight_decay=0.5"]
    steps = run("--max_steps=4", "--save_every=1", *flags)
    weights = [(step / "model.safetensors").read_bytes() for step in steps]
    assert len({hashlib.sha256(each).hexdigest() for each in weights}) == 1
    assert metrics()[-1]["skipped_steps"] == 0


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_huge_learning_rate_ends_with_a_sentence_and_finite_weights(here, optimizer):
    flags = [f"--optimizer={optimizer}", "--learning_rate=1e6"]
    with pytest.raises(UserError, match="not finite 20 times in a row.*lower --learning_rate"):
        run("--max_steps=60", "--save_every=1", *flags)
    steps = checkpoint.saved_steps(Path("run"))
    assert steps and all(map(all_finite, steps))


@pytest.mark.parametrize("max_steps", [3, 60])
def test_weights_that_are_not_finite_are_never_saved(here, max_steps):
    """A first step with a finite loss and gradient that throws the weights beyond fp32."""
    with pytest.raises(UserError, match="not finite"):
        run(f"--max_steps={max_steps}", "--save_every=1", "--learning_rate=1e38")
    assert all(map(all_finite, checkpoint.saved_steps(Path("run"))))


# ---------------------------------------------------------------------- the smallest of each kind


def test_one_layer_one_head_and_two_ids():
    """The loss is the logits' cross-entropy; both attentions agree; a cache gives the same."""
    model, ids = model_of(**SMALLEST), torch.tensor([[0, 1, 1, 0, 1]])
    loss_sum, targets = model(ids, labels=ids)
    logits = model(ids)
    expected = F.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum")
    torch.testing.assert_close(loss_sum, expected)
    assert targets == 4 and logits.shape == (1, 5, 2)
    assert loss_sum.item() / 4 == pytest.approx(math.log(2), abs=0.1)
    ours = torch.autograd.grad(loss_sum, list(model.parameters()))
    theirs = torch.autograd.grad(expected, list(model.parameters()))
    for gradient, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(gradient, other)
    cache = KVCache(model.config, 1, 5)
    one_by_one = [model(ids[:, t : t + 1], cache=cache) for t in range(5)]
    torch.testing.assert_close(torch.cat(one_by_one, dim=1), logits)
    model.config.attention = "manual"
    torch.testing.assert_close(model(ids), logits)


def test_a_row_of_one_token_has_no_target():
    model, ids = model_of(**SMALLEST), torch.tensor([[1]])
    loss_sum, targets = model(ids, labels=ids)
    assert loss_sum == 0 and targets == 0
    loss_sum.backward()
    assert all((parameter.grad == 0).all() for parameter in model.parameters())


def test_documents_of_one_character_in_batches_of_one_through_one_layer_and_head(here):
    flags = ["--batch_size=1", "--num_hidden_layers=1", "--num_attention_heads=1"]
    flags += ["--hidden_size=2", "--intermediate_size=1", "--max_seq_len=2"]
    (step,) = run("--max_steps=4", *flags, texts=list("abcdef"))
    lines = metrics()
    assert all_finite(step) and [line["tokens"] for line in lines] == [2, 4, 6, 8]
    assert all(math.isfinite(line["loss"]) for line in lines)


def test_a_context_of_one_holds_the_prompt_and_gives_one_token():
    model = model_of(**SMALLEST | {"max_position_embeddings": 1})
    likeliest = model(torch.tensor([[1]])).argmax().item()
    assert generate(model, [[1]], 5, temperature=0) == [[likeliest]]
    assert [len(new) for new in generate(model, [[0], [1]], 5, num_samples=2)] == [1, 1, 1, 1]
    with pytest.raises(UserError, match="prompt 0 has 2 tokens, but the model's context is only 1"):
        generate(model, [[0, 1]], 5)


def test_prompts_of_only_special_tokens_are_continued():
    model = model_of(**SMALLEST | {"vocab_size": 260})
    prompts = [[0], [1], [3, 3, 3], [0, 1, 2, 3]]  # the special ids of the tokenizers made here
    for prompt, new in zip(prompts, generate(model, prompts, 5, temperature=0), strict=True):
        ids = list(prompt)
        for _ in range(5):
            ids.append(model(torch.tensor([ids]))[0, -1].argmax().item())
        assert new == ids[len(prompt) :]


# ---------------------------------------------------------------------------------- all masked


def step_with(window: list[dict], optimizer: str) -> tuple[float, list[torch.Tensor]]:
    """(loss, weights after) of one training step of the same model."""
    model = model_of(**SMALLEST | {"vocab_size": 50, "hidden_size": 16})
    config = TrainConfig(optimizer=optimizer, weight_decay=0.0)
    machine = Machine(torch.device("cpu"), torch.float32, "", 0, 1)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    optimizers = train.make_optimizers(model, config)
    step = train.take_step(model, optimizers, scaler, window, machine, config)
    return step.loss, [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_micro_batch_with_all_labels_masked_changes_nothing(optimizer):
    ids = torch.arange(24).view(3, 8)
    real = {"input_ids": ids, "labels": ids, "num_tokens": 24}
    masked = real | {"labels": torch.full_like(ids, -100)}
    loss, weights = step_with([real], optimizer)
    for window in ([real, masked], [masked, real]):
        loss_too, weights_too = step_with(window, optimizer)
        assert loss_too == loss > 0
        assert all(map(torch.equal, weights_too, weights))
    loss, weights = step_with([masked], optimizer)  # without any target
    assert loss == 0
    before = list(model_of(**SMALLEST | {"vocab_size": 50, "hidden_size": 16}).parameters())
    assert all(map(torch.equal, weights, before))


# ---------------------------------------------------------------------------- one token, forever

LONG = [20_000, pytest.param(100_000, marks=pytest.mark.slow)]


@pytest.mark.parametrize("length", LONG)
def test_equal_tokens_have_equal_outputs_at_all_positions(length):
    """RoPE turns queries and keys, so scores differ by distance; but values do not, and a weighted
    mean of equal values is that value."""
    shape = SMALLEST | {"vocab_size": 5, "hidden_size": 4, "max_position_embeddings": length}
    model, ids = model_of(**shape), torch.full((1, length), 3)
    with torch.no_grad():
        whole = model(ids)
        cache = KVCache(model.config, 1, length)
        chunks = [model(chunk, cache=cache) for chunk in ids[:, :6000].split(2000, dim=1)]
    assert (whole - whole[:, :1]).abs().max() < 1e-6
    assert (torch.cat(chunks, dim=1) - whole[:, :1]).abs().max() < 1e-6


@pytest.mark.parametrize("tokenizer, length", [("bytes", 100_000), ("bpe", 10_000)])
def test_a_document_of_one_letter_trains(here, tokenizer, length):
    flags = [f"--tokenizer={tokenizer}", "--vocab_size=270", "--max_seq_len=512", "--batch_size=2"]
    (step,) = run("--max_steps=2", *flags, texts=["a" * length])
    assert all_finite(step) and metrics()[-1]["skipped_steps"] == 0
