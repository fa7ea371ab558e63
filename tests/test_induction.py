"""induction.py: the heads begin as it says, and what they are for is then learned at once."""

import math

import pytest
import torch
import torch.nn.functional as F

import train
from config import UserError
from induction import (
    EMBEDDING_LENGTH,
    FIRST_MLP,
    begin_to_look_back,
    begin_with_induction,
    group_of,
    take_notes,
)
from model import GPT, GPTConfig
from rope import rope_tables, rotate
from tests.test_learning import Rows, learn

V, T = 64, 48
EMBEDDING = "model.embed_tokens.weight"


def new_model(seed: int = 0, **shape) -> GPT:
    torch.manual_seed(seed)
    usual = dict(
        vocab_size=V,
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        rope_theta=1e4,
    )
    shape = usual | shape
    return GPT(
        GPTConfig(
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


def how_far_back(model: GPT, tokens: int = V) -> torch.Tensor:
    """(H, T/2): mean attention of the first layer's heads by distance, over the later queries."""
    ids = torch.randint(tokens, (8, T), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        weights = model.attention_weights(ids)[0]  # (B, H, T, T)
    seen = [
        weights.diagonal(-d, dim1=2, dim2=3)[:, :, T // 2 - d :].mean(dim=(0, 2))
        for d in range(T // 2)
    ]
    return torch.stack(seen, dim=1)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_the_first_heads_look_one_to_four_back(shape):
    """In a new model, and in one whose first layer begins anew."""
    shape = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16} | shape
    new = prepared_model(**shape)
    again = prepared_model(1, **shape)
    if again.config.num_key_value_heads > 1:
        begin_to_look_back(again)
    group = new.config.num_attention_heads // new.config.num_key_value_heads
    for model in (new, again):
        for head, seen in enumerate(how_far_back(model)):
            if head < 4:
                others = torch.cat((seen[: head + 1], seen[head + 2 :]))
                assert seen[head + 1] > 1.3 * others.max(), (head, seen)
            else:  # no distance stands out; hardly one where the keys are those of the first four
                alone = head // group > 3 // group
                assert seen.max() < (0.15 if alone else 0.2), (head, seen)


def test_tokens_that_training_turned_away_look_back_too():
    """As training turns the commonest against what all tokens had in common."""
    model = prepared_model(hidden_size=128)
    with torch.no_grad():
        embedding = model.model.embed_tokens.weight
        shared = F.normalize(embedding.mean(dim=0), dim=0)
        embedding[:16] -= torch.outer(embedding[:16] @ shared, shared)
    assert how_far_back(model, tokens=16)[0, 1] < 0.1
    begin_to_look_back(model)
    for head, seen in enumerate(how_far_back(model, tokens=16)):
        assert seen[head + 1] > 0.3, (head, seen)


@pytest.mark.parametrize("theta", [1e2, 1e4, 1e6])
def test_the_query_is_the_key_turned_back(monkeypatch, theta):
    """By 1, 2, 3 and 4 positions; for a token that is nothing but what all share, exactly."""
    monkeypatch.setattr("induction.MIX", 1.0)
    monkeypatch.setattr("induction.LOOK_MIX", 1.0)
    D = 36
    model = prepared_model(rope_theta=theta, head_dim=D)
    attention = model.model.layers[0].self_attn
    cos, sin = rope_tables(model.config, torch.arange(5)[None])  # (1, 1, 5, D/2)
    with torch.no_grad():
        shared = torch.linalg.svd(attention.k_proj.weight[:D]).Vh[0]  # the one thing it reads
        for head in range(4):
            group = head // 2
            key = attention.k_proj.weight[group * D : (group + 1) * D] @ shared
            assert (key.abs() > 1e-4).sum().item() == 5  # the fast pairs alone
            query = attention.q_proj.weight[head * D : (head + 1) * D] @ shared
            turned = rotate(query.expand(1, 1, 5, D), cos, sin)[0, 0, head + 1]
            # QK-Norm takes the length away
            turned, key = F.normalize(turned, dim=0), F.normalize(key, dim=0)
            torch.testing.assert_close(turned, key, atol=1e-5, rtol=1e-5)


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
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.0.self_attn.k_norm.weight",
        "model.layers.1.self_attn.o_proj.weight",
        "model.layers.2.self_attn.o_proj.weight",
    }
    embedding = after.model.embed_tokens.weight.detach()
    shared = embedding.mean(dim=0)
    own = embedding - shared
    assert shared.norm().item() == pytest.approx(EMBEDDING_LENGTH, rel=0.1)
    assert own.norm(dim=1).mean().item() == pytest.approx(EMBEDDING_LENGTH, rel=0.1)


def read_by_layer(number: int, model: GPT, ids: torch.Tensor) -> torch.Tensor:
    """(B, T, C): the stream in front of a layer, as its attention's projections read it."""
    read = []
    attention = model.model.layers[number].self_attn
    hook = attention.q_proj.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))
    with torch.no_grad():
        model(ids)
    hook.remove()
    return read[0]


@pytest.mark.parametrize("shape", ["GQA", "MHA", "untied"])
def test_the_notes_say_which_words_stand_in_front(shape):
    model = prepared_model(hidden_size=128, **SHAPES[shape])
    first = model.model.layers[0].self_attn
    begin_to_look_back(model)
    with torch.no_grad():
        codes, decoders, notes = take_notes(first, model.model.embed_tokens.weight)
    ids = torch.randint(V, (8, T), generator=torch.Generator().manual_seed(1))
    stream = read_by_layer(1, model, ids)  # (B, T, C)
    embedding = model.model.embed_tokens.weight.detach()
    for back, (code, decoder, note) in enumerate(zip(codes, decoders, notes, strict=True), start=1):
        words = F.normalize(embedding @ code.T, dim=1)  # (V, D)
        read = F.normalize(stream @ note.T, dim=2)[:, back:]  # (B, T - back, D)
        right = (read @ words.T).argmax(dim=2) == ids[:, :-back]
        assert right.float().mean() > 0.6, back  # by chance 1 in 64
        said = (read @ decoder.T) @ (embedding - embedding.mean(dim=0)).T  # (B, T - back, V)
        assert (said.argmax(dim=2) == ids[:, :-back]).float().mean() > 0.3, back


@pytest.mark.parametrize("shape", ["GQA", "untied"])
@pytest.mark.parametrize(
    "layer, group, asked, found, said",
    [
        (1, 0, 1, 0, 1),  # the word that is one back: where it stands; one back of it
        (1, 1, 2, 0, 4),  # the word that is two back: where it stands; four back of it
        (2, 0, 3, 4, 0),  # the word that is three back: what has it four back; that itself
    ],
)
def test_the_groups_look_a_word_up_and_say_what_stands_there(
    layer, group, asked, found, said, shape
):
    """Each word of a row occurs once, but for one."""
    there, now, words = 20, 40, 512
    model = prepared_model(vocab_size=words, hidden_size=128, **SHAPES[shape])
    begin_to_look_back(model)
    rng = torch.Generator().manual_seed(1)
    ids = torch.stack([torch.randperm(words, generator=rng)[:T] for _ in range(256)])
    ids[:, now - asked] = ids[:, there - found]

    heads = slice(2 * group, 2 * group + 2)
    seen = model.attention_weights(ids)[layer][:, heads, now].mean(dim=(0, 1))  # (T,)
    others = [i for i in range(now - 5) if i != there]
    assert seen[there] > 1.5 * seen[others].mean(), seen

    _, _, values, out = group_of(model.model.layers[layer].self_attn, group)
    embedding = model.model.embed_tokens.weight
    with torch.no_grad():
        stream = read_by_layer(layer, model, ids)[:, there]  # (B, C)
        added = stream @ values.T @ out[:, : len(values)].T  # (B, C), by the group's first head
        logits = added @ (embedding - embedding.mean(dim=0)).T  # (B, words)
    louder = logits > logits.gather(1, ids[:, there - said, None])  # than the right word
    assert louder.float().mean() < 0.3  # by chance 0.5


def test_what_begins_anew_and_how_large_it_is():
    before, after = prepared_model(), prepared_model()
    begin_to_look_back(after)
    D = before.config.head_dim
    changed = {}
    for (name, old), new in zip(before.named_parameters(), after.parameters(), strict=True):
        if torch.equal(old, new):
            continue
        changed[name.removeprefix("model.layers.")] = new.std().item() / old.std().item()
    assert set(changed) == {
        *(f"{layer}.self_attn.{p}_proj.weight" for layer in (0, 1, 2) for p in "qkvo"),
        "0.mlp.down_proj.weight",
    }
    assert changed["0.mlp.down_proj.weight"] == pytest.approx(FIRST_MLP)
    for name, factor in changed.items():
        if name.startswith(("0.self_attn.q", "0.self_attn.k", "1.self_attn", "2.self_attn")):
            assert factor == pytest.approx(1.0, rel=0.05), name

    old, new = (model.model.layers[2].self_attn for model in (before, after))
    for p, kept in (("q", slice(2 * D, None)), ("k", slice(D, None)), ("v", slice(D, None))):
        was, now = (getattr(attention, f"{p}_proj").weight for attention in (old, new))
        assert torch.equal(was[kept], now[kept]), p  # the third layer's other group is as it was
    assert torch.equal(old.o_proj.weight[:, 2 * D :], new.o_proj.weight[:, 2 * D :])


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
    begin_to_look_back(model)
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
    """Three times "name had a noun .", then "noun is with name" for each; the first answer counts.

    So it cannot be had by elimination: a guess costs ln 3, 1.10.
    """
    rng = torch.Generator().manual_seed(step)
    had, a, stop, be, with_ = range(V - 5, V)
    rows = []
    for _ in range(16):
        names = torch.randperm(12, generator=rng)[:3].tolist()
        nouns = (12 + torch.randperm(40, generator=rng)[:3]).tolist()
        told = [[name, had, a, a, noun, stop] for name, noun in zip(names, nouns, strict=True)]
        asked = [[nouns[i], be, with_, names[i]] for i in torch.randperm(3, generator=rng)]
        rows.append(sum(told + asked, []))
    ids = torch.tensor(rows)  # (16, 30)
    labels = torch.full_like(ids, -100)
    labels[:, 21] = ids[:, 21]
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
    assert ends[True] < 0.7 and ends[False] > 1.2, ends  # 0.18 and 1.6 when this was written


def test_a_run_begins_with_it_and_goes_on_without(tmp_path):
    """The option reaches a new model, and some heads of a loaded one; never on --resume."""
    (tmp_path / "train.txt").write_text("the red ball, the red ball. " * 200)
    flags = [
        f"--data={tmp_path / 'train.txt'}",
        "--learning_rate=0",  # so weights stay what they were at the start
        "--max_seq_len=32",
        "--batch_size=2",
        "--sample_tokens=0",
        "--device=cpu",
        "--hidden_size=32",
        "--num_hidden_layers=3",
        "--num_attention_heads=4",
        "--num_key_value_heads=2",
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
    assert {name.split(".", 2)[2] for name in changed} == {
        *(f"{layer}.self_attn.{p}_proj.weight" for layer in (0, 1, 2) for p in "qkvo"),
        *(f"0.self_attn.{p}_norm.weight" for p in "qk"),
        "0.mlp.down_proj.weight",
    }
    resumed = weights_after("tuned", 2, *tune, "--resume")
    assert all(torch.equal(resumed[name], tuned[name]) for name in tuned)
    weights_after("flat", 1, "--tokenizer=bytes", "--num_hidden_layers=1")
    with pytest.raises(UserError, match="num_hidden_layers = 1,.*induction_init"):
        weights_after("other", 1, f"--init_from={tmp_path / 'flat'}", "--induction_init=True")
