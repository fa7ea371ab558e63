"""Training really learns: what only a run can show, on problems that take seconds.

A batch learned by heart, noise not learned, the same end in bf16 as in fp32, more from soft labels
than from hard ones. Steps are those of train.py (take_step, its optimizers, its schedule), so that
a mistake in any of them, in the loss or in the model shows here as a number.
"""

import math

import numpy as np
import pytest
import torch

import train
from config import TrainConfig
from data.dataset import TokenRows
from model import GPT, GPTConfig
from ngrams import NGrams

V, T = 32, 24


def tiny_model(seed: int = 0) -> GPT:
    torch.manual_seed(seed)
    return GPT(
        GPTConfig(
            vocab_size=V,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            intermediate_size=64,
            max_position_embeddings=T,
        )
    )


Rows = tuple[torch.Tensor, ...]  # input_ids, labels, and soft_labels if there are any


def learn(
    batches, steps: int, dtype=torch.float32, model: GPT | None = None, **options
) -> tuple[list[float], GPT]:
    """Losses before each of `steps` steps over the Rows batches(step), and the model."""
    config = TrainConfig(**({"max_steps": steps, "warmup_steps": 5} | options))
    machine = train.Machine(torch.device("cpu"), dtype, "as the test asks", 0, 1)
    model = model or tiny_model()
    optimizers = train.make_optimizers(model, config)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    losses = []
    for step in range(steps):
        train.set_learning_rate(optimizers, step, config)
        names = ("input_ids", "labels", "soft_labels")
        batch: dict = dict(zip(names, batches(step), strict=False))
        window = [batch | {"num_tokens": batch["input_ids"].numel()}]
        made = train.take_step(model, optimizers, scaler, window, machine, config)
        losses.append(made.loss)
    return losses, model


def noise(step: int) -> Rows:
    """The same four rows of noise at every step: nothing to learn but the rows themselves."""
    ids = torch.randint(V, (4, T), generator=torch.Generator().manual_seed(7))
    return ids, ids


def chain(step: int) -> Rows:
    """(16, T), other rows at every step: after i comes 2i or 2i + 1 (mod V), each as often.

    So the loss of a perfect model is ln 2.
    """
    rng = torch.Generator().manual_seed(step)
    rows = [torch.randint(V, (16,), generator=rng)]
    for _ in range(T - 1):
        rows.append((2 * rows[-1] + torch.randint(2, (16,), generator=rng)) % V)
    ids = torch.stack(rows, dim=1)
    return ids, ids


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_one_batch_is_learned_by_heart(optimizer):
    losses, _ = learn(noise, 120, optimizer=optimizer, learning_rate=2e-2, weight_decay=0.0)
    assert abs(losses[0] - math.log(V)) < 0.2  # the first guess is even
    assert losses[-1] < 0.02


def test_a_batch_of_other_noise_at_every_step_teaches_nothing():
    """The opposite: if this loss fell, the model would see the token that it is asked for."""

    def other_noise(step: int) -> Rows:
        ids = torch.randint(V, (16, T), generator=torch.Generator().manual_seed(step))
        return ids, ids

    losses, _ = learn(other_noise, 60, optimizer="muon", learning_rate=1e-2)
    assert min(losses) > math.log(V) - 0.05


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_bf16_ends_where_fp32_does(optimizer):
    """Over fp32 weights, as --dtype=bf16 trains: both come to the floor, and to each other."""
    ends = {}
    for dtype in (torch.float32, torch.bfloat16):
        losses, model = learn(chain, 150, dtype, optimizer=optimizer, learning_rate=1e-2)
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        ends[dtype] = sum(losses[-20:]) / 20
    assert max(ends.values()) < math.log(2) + 0.02, ends
    assert abs(ends[torch.float32] - ends[torch.bfloat16]) < 0.005, ends


def test_soft_labels_teach_more_of_the_same_text():
    """2,000 tokens, each drawn by the one before it: what comes of it on other text of that kind.

    Learned from labels alone, from what counts expect (ngrams.py), and from half of both.
    """
    rng = np.random.default_rng(0)
    follow = rng.dirichlet(np.full(16, 0.5), 16).cumsum(1)  # (16, 16): who follows whom, summed up

    def text(length: int) -> np.ndarray:
        tokens = [0]
        for draw in rng.random(length - 1):
            tokens.append(min(int(np.searchsorted(follow[tokens[-1]], draw)), 15))
        return np.array(tokens, np.uint16)

    size = 2000 // T
    lengths = np.full(size, T, np.int32)
    starts = np.arange(size) * (T - 1)  # one document: rows share a token
    rows = TokenRows(text(2000), None, starts, lengths, 1, 0, 0, 0, "", "")
    ngrams = NGrams(rows, V, order=2)
    others = torch.from_numpy(text(200 * T).astype(np.int64)).view(200, T)

    def loss_after(weight: float) -> float:
        def some_rows(step: int) -> Rows:
            chosen = np.random.default_rng(step).choice(size, 8)
            ids = torch.stack([torch.from_numpy(rows[i][0]) for i in chosen])
            labels = torch.stack([torch.from_numpy(rows[i][1]) for i in chosen])
            return ids, labels, ngrams.soft_labels(chosen, (8, T), weight)

        _, model = learn(some_rows, 60, optimizer="muon", learning_rate=1e-2, momentum=0.8)
        with torch.no_grad():
            loss_sum, targets = model(others, labels=others)
        return float(loss_sum / targets)

    alone, both, counts = (loss_after(weight) for weight in (0.0, 0.5, 1.0))
    assert both < alone - 0.05 and counts < alone - 0.1, (alone, both, counts)
