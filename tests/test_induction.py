"""induction.py: the heads begin as it says, and what they are for is then learned at once."""

import math

import pytest
import torch

import train
from config import TrainConfig, UserError
from induction import begin_with_induction
from model import GPT, GPTConfig

V, T = 64, 48


def new_model(seed: int = 0, **shape) -> GPT:
    torch.manual_seed(seed)
    shape = dict(num_attention_heads=4, num_key_value_heads=2, rope_theta=1e4) | shape
    return GPT(
        GPTConfig(
            vocab_size=V,
            hidden_size=64,
            num_hidden_layers=2,
            intermediate_size=128,
            max_position_embeddings=T,
            **shape,
        )
    )


def prepared_model(seed: int = 0, **shape) -> GPT:
    model = new_model(seed, **shape)
    begin_with_induction(model)
    return model


SHAPES = {
    "GQA": {},
    "MHA": {"num_key_value_heads": 4},
    "MQA": {"num_key_value_heads": 1},
    "wide heads": {"head_dim": 36},
    "theta 1e6": {"rope_theta": 1e6},
    "untied": {"tie_word_embeddings": False},
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_the_first_group_looks_at_the_token_before(shape):
    model = prepared_model(**shape)
    ids = torch.randint(V, (8, T), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        weights = model.attention_weights(ids)[0]  # (B, H, T, T)
    group = model.config.num_attention_heads // model.config.num_key_value_heads
    # Each query from the 16th on, by how far back it looks.
    for head in range(model.config.num_attention_heads):
        seen = [
            weights[:, head].diagonal(-d, dim1=1, dim2=2)[:, 16 - d :].mean().item()
            for d in range(16)
        ]
        best = max(range(16), key=lambda d: seen[d])
        if head < group:
            assert best == 1, (head, seen)
            assert seen[1] > 1.3 * max(seen[0], seen[2]), (head, seen)
        else:
            assert max(seen) < 0.15, (head, seen)  # as it was: no distance stands out


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_a_later_head_says_what_it_looks_at(shape):
    model = prepared_model(**shape)
    embedding = model.model.embed_tokens.weight.detach()
    tokens = embedding - embedding.mean(dim=0)  # what tells them apart
    D, H, K = (
        getattr(model.config, name)
        for name in ("head_dim", "num_attention_heads", "num_key_value_heads")
    )
    for number, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        for head in range(H):
            kv = head // (H // K)
            value = attention.v_proj.weight.detach()[kv * D : (kv + 1) * D]
            out = attention.o_proj.weight.detach()[:, head * D : (head + 1) * D]
            said = tokens @ (out @ value).T  # (V, C): what it adds to the stream for each token
            right = (said @ tokens.T).argmax(dim=1) == torch.arange(V)
            if number == 0:
                assert right.float().mean() < 0.2
            else:
                assert right.float().mean() > 0.6  # by chance 1 in 64


def test_sizes_stay_and_the_first_loss_is_what_it_says():
    before, after = new_model(), prepared_model()
    for (name, old), new in zip(before.named_parameters(), after.parameters(), strict=True):
        if "o_proj" in name or "v_proj" in name:
            assert new.std().item() == pytest.approx(old.std().item(), rel=0.05), name
        if "norm" in name:
            assert torch.all(new == 1), name
    changed = {
        name
        for (name, old), new in zip(before.named_parameters(), after.parameters(), strict=True)
        if not torch.equal(old, new)
    }
    assert changed == {
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.self_attn.k_proj.weight",
        "model.layers.1.self_attn.o_proj.weight",
    }
    # Many tokens, or one draw of the shared direction would decide.
    ids = torch.randint(V, (64, T), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        loss, count = after(ids, labels=ids)
    assert 1.0 < loss / count - math.log(V) < 5.0


def test_on_the_meta_device_it_costs_nothing_and_changes_no_shape():
    """As in every process but the first of a sharded run."""
    with torch.device("meta"):
        model = prepared_model()
    assert all(parameter.is_meta for parameter in model.parameters())


def copies(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """ids and labels (16, T): 24 different tokens, then the same again, which alone count."""
    rng = torch.Generator().manual_seed(step)
    rows = [torch.randperm(V, generator=rng)[: T // 2].repeat(2) for _ in range(16)]
    ids = torch.stack(rows)
    labels = ids.clone()
    labels[:, : T // 2 + 1] = -100
    return ids, labels


def test_copying_is_learned_at_once_and_without_it_later():
    ends = {}
    for induction in (True, False):
        model = prepared_model() if induction else new_model()
        config = TrainConfig(
            max_steps=200,
            warmup_steps=10,
            learning_rate=2e-2,
            embedding_learning_rate=5e-3,
            momentum=0.7,
        )
        optimizers = train.make_optimizers(model, config)
        machine = train.Machine(torch.device("cpu"), torch.float32, "as the test asks", 0, 1)
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        for step in range(75):
            train.set_learning_rate(optimizers, step, config)
            ids, labels = copies(step)
            window = [{"input_ids": ids, "labels": labels, "num_tokens": ids.numel()}]
            made = train.take_step(model, optimizers, scaler, window, machine, config)
        ends[induction] = made.loss
    assert ends[True] < 0.1 and ends[False] > 1.0, ends


def test_a_run_begins_with_it_and_keeps_it(tmp_path):
    """The option reaches the weights, and a run cannot change it when it goes on."""
    (tmp_path / "train.txt").write_text("the red ball, the red ball. " * 200)
    flags = [
        f"--data={tmp_path / 'train.txt'}",
        "--tokenizer=bytes",
        "--max_steps=1",
        "--learning_rate=0",
        "--max_seq_len=32",
        "--batch_size=2",
        "--sample_tokens=0",
        "--device=cpu",
        "--hidden_size=32",
        "--num_hidden_layers=2",
        "--intermediate_size=64",
    ]
    spread = {}
    for name in ("plain", "induction"):
        options = [f"--out_dir={tmp_path / name}"]
        if name == "induction":
            options.append("--induction_init=True")
        train.main(flags + options)
        model = GPT.from_pretrained(tmp_path / name / "step_00000001")
        spread[name] = model.model.embed_tokens.weight.std().item()
    assert spread["induction"] > 5 * spread["plain"]
    with pytest.raises(UserError, match="induction_init"):
        train.main([*flags, f"--out_dir={tmp_path / 'plain'}", "--resume", "--induction_init=True"])
