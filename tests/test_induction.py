"""induction.py: the heads begin as it says, and what they are for is then learned at once."""

import math

import pytest
import torch

import train
from config import UserError
from induction import EMBEDDING_LENGTH, begin_to_look_back, begin_with_induction
from model import GPT, GPTConfig
from rope import rope_tables, rotate
from tests.test_learning import Rows, learn

V, T = 64, 48
EMBEDDING = "model.embed_tokens.weight"


def new_model(seed: int = 0, **shape) -> GPT:
    torch.manual_seed(seed)
    shape = dict(num_attention_heads=4, num_key_value_heads=2, rope_theta=1e4) | shape
    return GPT(
        GPTConfig(
            vocab_size=V,
            hidden_size=64,
            num_hidden_layers=3,
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
    for head in range(model.config.num_attention_heads):
        # By how far back, over the queries that have all of these to choose from.
        seen = [
            weights[:, head].diagonal(-d, dim1=1, dim2=2)[:, T // 2 - d :].mean().item()
            for d in range(T // 2)
        ]
        if head < group:
            assert seen[1] == max(seen), (head, seen)
            assert seen[1] > 1.3 * max(seen[:1] + seen[2:]), (head, seen)
        else:
            assert max(seen) < 0.15, (head, seen)  # as it was: no distance stands out


@pytest.mark.parametrize("theta", [1e2, 1e4, 1e6])
def test_the_query_is_the_key_turned_back_by_one(monkeypatch, theta):
    """Without noise, and for a token that is nothing but what all share: then exactly."""
    monkeypatch.setattr("induction.MIX", 1.0)
    model = prepared_model(rope_theta=theta, head_dim=36)
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        shared = torch.linalg.svd(attention.k_proj.weight[:36]).Vh[0]  # the one thing it reads
        key = attention.k_proj.weight[:36] @ shared
        cos, sin = rope_tables(model.config, torch.arange(2)[None])  # (1, 1, 2, D/2)
        for head in range(2):
            query = attention.q_proj.weight[head * 36 : (head + 1) * 36] @ shared
            turned = rotate(query.expand(1, 1, 2, 36), cos, sin)[0, 0, 1]  # by one position
            torch.testing.assert_close(turned, key, atol=1e-5, rtol=1e-5)
        assert key.norm().item() == pytest.approx(6.0, rel=1e-4)  # sqrt(D): as QK-Norm has it
        assert (key.abs() > 1e-4).sum().item() == 5  # the fast pairs alone


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_a_later_head_says_what_it_looks_at(shape):
    model = prepared_model(**shape)
    config = model.config
    D, H = config.head_dim, config.num_attention_heads
    group = H // config.num_key_value_heads
    embedding = model.model.embed_tokens.weight.detach()
    tokens = embedding - embedding.mean(dim=0)  # what tells them apart
    for number, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        for head in range(H):
            first = head // group * D
            value = attention.v_proj.weight.detach()[first : first + D]
            out = attention.o_proj.weight.detach()[:, head * D : (head + 1) * D]
            said = tokens @ (out @ value).T  # (V, C): what it adds to the stream for each token
            right = (said @ tokens.T).argmax(dim=1) == torch.arange(V)
            if number == 0:
                assert right.float().mean() < 0.2
            else:
                assert right.float().mean() > 0.6  # by chance 1 in 64


def test_what_changes_and_how_large_it_is():
    before, after = new_model(), prepared_model()
    changed = set()
    for (name, old), new in zip(before.named_parameters(), after.parameters(), strict=True):
        if torch.equal(old, new):
            continue
        changed.add(name)
        if "proj" in name:  # the same mean square as before
            assert new.std().item() == pytest.approx(old.std().item(), rel=0.05), name
    assert changed == {
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.self_attn.k_proj.weight",
        "model.layers.1.self_attn.o_proj.weight",
        "model.layers.2.self_attn.o_proj.weight",
    }
    embedding = after.model.embed_tokens.weight.detach()
    shared = embedding.mean(dim=0)
    own = embedding - shared
    assert shared.norm().item() == pytest.approx(EMBEDDING_LENGTH, rel=0.1)
    assert own.norm(dim=1).mean().item() == pytest.approx(EMBEDDING_LENGTH, rel=0.1)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_the_group_drawn_anew_says_what_stood_before(shape):
    model = prepared_model(**{"head_dim": 32} | shape)
    begin_to_look_back(model)
    config = model.config
    D, H = config.head_dim, config.num_attention_heads
    group = H // config.num_key_value_heads
    embedding = model.model.embed_tokens.weight.detach()
    tokens = embedding - embedding.mean(dim=0)
    first, second = (layer.self_attn for layer in model.model.layers[:2])
    with torch.no_grad():
        # what the first layer's first group writes where the token stood before, (V, C)
        heads = first.v_proj.weight[:D].repeat(group, 1)
        written = tokens @ (first.o_proj.weight[:, : group * D] @ heads).T
        value = second.v_proj.weight[-D:]
        for head in range(H - group, H):
            out = second.o_proj.weight[:, head * D : (head + 1) * D]
            said = written @ (out @ value).T
            right = (said @ tokens.T).argmax(dim=1) == torch.arange(V)
            assert right.float().mean() > 0.6  # by chance 1 in 64


def test_only_one_group_of_heads_begins_anew():
    before, after = prepared_model(), prepared_model()
    begin_to_look_back(after)
    D = before.config.head_dim
    changed = {}
    for (name, old), new in zip(before.named_parameters(), after.parameters(), strict=True):
        if not torch.equal(old, new):
            rows, columns = (old != new).nonzero(as_tuple=True)
            changed[name.removeprefix("model.layers.1.self_attn.")] = (
                rows.min().item(),
                columns.min().item(),
            )
            if name.endswith(("v_proj.weight", "o_proj.weight")):  # the same mean square as before
                assert new.std().item() == pytest.approx(old.std().item(), rel=0.05), name
    assert changed == {
        "q_proj.weight": (2 * D, 0),
        "k_proj.weight": (D, 0),
        "v_proj.weight": (D, 0),
        "o_proj.weight": (0, 2 * D),
    }


@pytest.mark.parametrize("tied", [True, False])
def test_the_first_loss_is_what_it_says(tied):
    above = []
    for seed in range(8):
        model = prepared_model(seed, tie_word_embeddings=tied)
        ids = torch.randint(V, (8, T), generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            loss, count = model(ids, labels=ids)
        above.append(loss.item() / count.item() - math.log(V))
    mean = sum(above) / len(above)
    assert mean == pytest.approx(EMBEDDING_LENGTH**2 / 2 if tied else 0.0, abs=0.5), above


def test_on_the_meta_device_it_costs_nothing_and_changes_no_shape():
    """As in every process but the first of a sharded run."""
    with torch.device("meta"):
        model = prepared_model()
    assert all(parameter.is_meta for parameter in model.parameters())


def copies(step: int) -> Rows:
    """ids and labels (16, T): 24 different tokens, then the same again, which alone count."""
    rng = torch.Generator().manual_seed(step)
    rows = [torch.randperm(V, generator=rng)[: T // 2].repeat(2) for _ in range(16)]
    ids = torch.stack(rows)
    labels = ids.clone()
    labels[:, : T // 2 + 1] = -100
    return ids, labels


def test_copying_is_learned_at_once_and_without_it_later():
    rates = {"learning_rate": 2e-2, "embedding_learning_rate": 5e-3, "momentum": 0.7}
    ends = {}
    for induction in (True, False):
        model = prepared_model() if induction else new_model()
        losses, _ = learn(copies, 75, model=model, max_steps=200, warmup_steps=10, **rates)
        ends[induction] = losses[-1]
    assert ends[True] < 0.1 and ends[False] > 1.0, ends


def lookups(step: int) -> Rows:
    """Three times "the colour noun .", then "noun is colour" for each; the first answer counts.

    So it cannot be had by elimination: a guess costs ln 3, 1.10.
    """
    rng = torch.Generator().manual_seed(step)
    the, stop, equals = V - 3, V - 2, V - 1
    rows = []
    for _ in range(16):
        colours = torch.randperm(12, generator=rng)[:3].tolist()
        nouns = (12 + torch.randperm(40, generator=rng)[:3]).tolist()
        told = [[the, colour, noun, stop] for colour, noun in zip(colours, nouns, strict=True)]
        asked = [[nouns[i], equals, colours[i]] for i in torch.randperm(3, generator=rng)]
        rows.append(sum(told + asked, []))
    ids = torch.tensor(rows)  # (16, 21)
    labels = torch.full_like(ids, -100)
    labels[:, 14] = ids[:, 14]
    return ids, labels


def test_looking_back_is_learned_at_once_and_without_it_later():
    rates = {"learning_rate": 1e-2, "embedding_learning_rate": 2.5e-3, "momentum": 0.7}
    ends = {}
    for back in (True, False):
        model = prepared_model(head_dim=32)
        if back:
            begin_to_look_back(model)
        losses, _ = learn(lookups, 150, model=model, max_steps=700, warmup_steps=10, **rates)
        ends[back] = sum(losses[-25:]) / 25
    assert ends[True] < 0.7 and ends[False] > 1.2, ends  # 0.35 and 1.6 when this was written


def test_a_run_begins_with_it_and_goes_on_without(tmp_path):
    """The option reaches a new model, and one group of heads of a loaded one; never on --resume."""
    (tmp_path / "train.txt").write_text("the red ball, the red ball. " * 200)
    flags = [
        f"--data={tmp_path / 'train.txt'}",
        "--learning_rate=0",  # so weights stay what they were at the start
        "--max_seq_len=32",
        "--batch_size=2",
        "--sample_tokens=0",
        "--device=cpu",
        "--hidden_size=32",
        "--num_hidden_layers=2",
        "--intermediate_size=64",
    ]

    def weights_after(name: str, steps: int, *more: str) -> dict[str, torch.Tensor]:
        train.main([*flags, f"--out_dir={tmp_path / name}", f"--max_steps={steps}", *more])
        model = GPT.from_pretrained(tmp_path / name / f"step_{steps:08}")
        return {name: weight.detach() for name, weight in model.named_parameters()}

    new = ["--tokenizer=bytes", "--induction_init=True"]
    plain = weights_after("plain", 1, "--tokenizer=bytes")
    loud = weights_after("loud", 1, *new)
    assert loud[EMBEDDING].std() > 5 * plain[EMBEDDING].std()
    resumed = weights_after("loud", 2, *new, "--resume")
    assert all(torch.equal(resumed[name], loud[name]) for name in loud)
    with pytest.raises(UserError, match="induction_init"):
        weights_after("plain", 2, *new, "--resume")

    tune = [f"--init_from={tmp_path / 'plain'}", "--induction_init=True"]
    tuned = weights_after("tuned", 1, *tune)
    changed = {name for name in plain if not torch.equal(plain[name], tuned[name])}
    assert changed == {f"model.layers.1.self_attn.{p}_proj.weight" for p in "qkvo"}
    resumed = weights_after("tuned", 2, *tune, "--resume")
    assert all(torch.equal(resumed[name], tuned[name]) for name in tuned)
    weights_after("flat", 1, "--tokenizer=bytes", "--num_hidden_layers=1")
    with pytest.raises(UserError, match="one layer.*induction_init"):
        weights_after("other", 1, f"--init_from={tmp_path / 'flat'}", "--induction_init=True")
