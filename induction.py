"""How the weights may begin: with what an induction head is made of, but for what it looks for.

After "the red ball" a model that meets "the red" again should say "ball". That takes two heads, one
behind the other (Elhage et al. 2021, Olsson et al. 2022): the first tells each token which token
stood before it; the second looks for a place whose token before was the present one, and says what
stands there. Neither earns anything without the other, so a small model finds the pair late or
never. Here the first heads are there from the start, and later heads say what they look at; what to
look for they then learn, at tiny's shape within some hundred steps (docs/recipes.md).

A chat asks the other way round, "Who has the ball?", and that no model had learned from chats here.
So fine-tuning may begin with some heads of a trained model drawn anew. Those of the first layer
note at each word which words stand in front of it; three groups behind them read these notes
(begin_to_look_back).

These are only other first values (after Trockman and Kolter 2023, who call it mimetic
initialisation): training may change them all, and the checkpoint is a Qwen3 model like any other.
"""

import math
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model import GPT, Attention, Block
from rope import rope_frequencies

EMBEDDING_LENGTH = 2.4  # of the part that tells tokens apart, and of the part that all share
MIX = 0.9  # weight of a structure beside the noise; its square is the share of the variance

# The heads of the first layer that look back.
ONE, TWO, THREE, FOUR = range(4)  # by how far back they look
FAST_PAIRS = 5  # of RoPE's rotations, the fastest: slower ones cannot tell neighbours apart
SHARPNESS = 1.5  # q_norm and k_norm: how sharply they look
LOOK_MIX = 0.99  # MIX of their queries

# Where heads begin anew: how loud they are, and what else is.
NOTES = 0.5  # length of the columns of the first layer's o_proj (less if H * D is above C)
FIRST_MLP = 0.1  # what is left of what the first MLP adds


@torch.no_grad()
def begin_with_induction(model: GPT) -> None:
    """Change three kinds of the first weights of `model`, in place: fp32, or on the meta device.

    1. The embedding is loud, so that what a token is can still be read beside what the blocks add
       to it; and all tokens share a direction, by which a head may look at any of them. Where the
       head is tied to it, the first logits are as loud, and the first loss is about
       EMBEDDING_LENGTH**2 / 2, or 3, above ln V. An id that training never shows stays loud: the
       marks of a chat, say, so that fine-tuning too begins with a high loss.
    2. In the first layer the first four heads look 1, 2, 3 and 4 tokens back, and q_norm and k_norm
       are sharper: with heads of 32 and rows of 256 tokens some two thirds of their attention goes
       there. Below a head_dim of 16 there are too few fast rotations, and little of this.
    3. In the layers behind it a head says what it looks at: with o_proj near the transpose of
       v_proj, what it adds to the stream is like the embedding of that token.

    A model of one layer has no later heads, and no use for it.
    """
    embedding = model.model.embed_tokens.weight  # (V, C)
    C = embedding.shape[1]
    shared = F.normalize(torch.randn(C, device=embedding.device), dim=0)  # (C,) of length 1
    embedding.normal_(0.0, EMBEDDING_LENGTH / math.sqrt(C))
    embedding.add_(shared * EMBEDDING_LENGTH)
    first, *others = [cast(Block, layer).self_attn for layer in model.model.layers]
    look_back(first, shared)
    for attention in others:
        say_what_is_seen(attention)


@torch.no_grad()
def begin_to_look_back(model: GPT) -> None:
    """Draw some heads of a trained model anew, in place: for fine-tuning on questions.

    model: fp32, or on the meta device, with at least 3 layers, 4 heads and 2 key/value heads
    (train.py refuses a smaller one).

    A question asks from a word to what stood around it. A story hardly asks so, and its model has
    no heads for it: these. What they did before is lost, and has to be learned again.

    - First layer, all heads: the first four look 1, 2, 3 and 4 tokens back, and note at each word
      which words stand there.
    - Second layer, first group. Behind "The ball is": where stands the word that is now one back,
      and what stands one back of it? "Red."
    - Second layer, second group. Behind "The ball is with": where stands the word that is now two
      back, and what stands four back of it? "Tom", in "Tom has a red ball".
    - Third layer, first group. Behind "As Tom came to the": which word has four back of it what is
      now three back? "River", in "Tom went to the river". (Only where the heads THREE and FOUR
      share a key/value head: two of them have two codes for a word.)

    What a group says is a token, if head and embedding are tied. What the first MLP adds would
    speak over the notes, and is turned down.
    """
    layers = [cast(Block, layer) for layer in model.model.layers[:3]]
    first, second, third = [layer.self_attn for layer in layers]
    embedding = model.model.embed_tokens.weight  # (V, C)
    for projection in (first.q_proj, first.k_proj):
        draw(projection.weight)
    look_back(first, common(layers[0].input_layernorm(embedding)))
    codes, decoders, notes = take_notes(first, embedding)

    look_for(second, 0, query=notes[ONE], key=codes[ONE])
    say(second, 0, notes[ONE], decoders[ONE])
    look_for(second, 1, query=notes[TWO], key=codes[TWO])
    say(second, 1, notes[FOUR], decoders[FOUR])
    look_for(third, 0, query=notes[THREE], key=notes[FOUR])
    say(third, 0, codes[FOUR], decoders[FOUR])
    layers[0].mlp.down_proj.weight.mul_(FIRST_MLP)


def common(tokens: Tensor) -> Tensor:
    """(C,) of length 1: the direction of which all tokens (V, C) have most nearly as much.

    Not their mean: training turns the commonest, such as "the", against that. Least squares for 1.
    """
    squares = tokens.T @ tokens / len(tokens)  # (C, C)
    ridge = 0.01 * torch.eye(len(squares), device=tokens.device)
    return F.normalize(torch.linalg.solve(squares + ridge, tokens.mean(0)), dim=0)


def take_notes(
    first: Attention, embedding: Tensor
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """New values and outputs of the first layer: each head writes a code of the token it sees.

    Returns for each head what reads a token's code from its embedding (D, C), what makes an
    embedding of a code (C, D), and what reads the head's note from the stream (D, C). A code is a
    random part of the whitened embedding, so that it tells apart words whose embeddings are much
    alike, as those of all nouns.
    """
    config = first.config
    C, D, K = config.hidden_size, config.head_dim, config.num_key_value_heads
    group = config.num_attention_heads // K
    mean = F.normalize(embedding.mean(0), dim=0)  # (C,): it tells no token from another
    tokens = less(mean, embedding)  # (V, C)
    squares, axes = torch.linalg.eigh(tokens.T @ tokens / len(tokens))  # (C,), (C, C)
    sizes = squares.clamp(min=squares.mean() / 100).sqrt()  # (C,)
    codes, decoders = [], []
    for _ in range(K):
        part = nn.init.orthogonal_(embedding.new_empty(D, C))
        codes.append(less(mean, (part / sizes) @ axes.T))  # (D, C)
        decoders.append(axes @ (part * sizes).T)  # (C, D)
    first.v_proj.weight.copy_(torch.cat(codes) * sizes.square().mean().sqrt())
    outputs = nn.init.orthogonal_(torch.empty_like(first.o_proj.weight))  # (C, H * D)
    first.o_proj.weight.copy_(outputs * NOTES)
    notes = outputs.T.unflatten(0, (-1, D))  # (H, D, C)
    heads = range(config.num_attention_heads)
    return [codes[h // group] for h in heads], [decoders[h // group] for h in heads], list(notes)


def look_back(attention: Attention, shared: Tensor) -> None:
    """Queries and keys of the first heads that depend on where a token is, hardly on which.

    shared: (C,), what all embeddings have in common; these heads read little else. The key is
    (u, 0) in the pairs that RoPE turns (rope.py), the query the same turned back by n positions:
    RoPE turns a query d positions behind its key forward by d, so the two agree where d is n.
    """
    config = attention.config
    D, H = config.head_dim, config.num_attention_heads
    group = H // config.num_key_value_heads
    frequencies, _ = rope_frequencies(config, shared.device)  # (D/2,)
    u = torch.zeros_like(frequencies)
    u[:FAST_PAIRS] = 1.0
    key = torch.cat((u, torch.zeros_like(u)))  # (D,)
    heads = range(min(H, 4))
    for head in heads:
        turn = frequencies * (head + 1)
        query = torch.cat((u * turn.cos(), -u * turn.sin()))  # (D,)
        weight = attention.q_proj.weight[head * D : (head + 1) * D]
        mix_in(weight, torch.outer(query, shared), LOOK_MIX)
    for k in range(heads[-1] // group + 1):
        mix_in(attention.k_proj.weight[k * D : (k + 1) * D], torch.outer(key, shared), MIX)
    attention.q_norm.weight.fill_(SHARPNESS)
    attention.k_norm.weight.fill_(SHARPNESS)


def say_what_is_seen(attention: Attention) -> None:
    """o_proj near the transpose of v_proj, each query head with its group's values."""
    config = attention.config
    C, D, K = config.hidden_size, config.head_dim, config.num_key_value_heads
    group = config.num_attention_heads // K
    values = attention.v_proj.weight.view(K, 1, D, C)
    values = values.expand(K, group, D, C).reshape(-1, C)  # (H * D, C): each for its query heads
    mix_in(attention.o_proj.weight, values.T, MIX)


def look_for(attention: Attention, number: int, query: Tensor, key: Tensor) -> None:
    """New queries and keys of a group of heads: a query looks for a key that reads the same.

    query, key: (D, C), what is read for either. Half of it is compared, in RoPE's slow pairs: the
    fast ones would turn it.
    """
    D = attention.config.head_dim
    slow = [*range(D // 4, D // 2), *range(D // 2 + D // 4, D)]
    compare = query.new_zeros(D, D)
    compare[slow] = nn.init.orthogonal_(query.new_empty(len(slow), D))
    queries, keys, _, _ = group_of(attention, number)
    draw(queries)
    draw(keys)
    mix_in(queries, (compare @ query).repeat(len(queries) // D, 1), MIX)
    mix_in(keys, compare @ key, MIX)


def say(attention: Attention, number: int, code: Tensor, decoder: Tensor) -> None:
    """New values of a group read a code from the stream (D, C); its new o_proj says the token that
    the code is of (C, D)."""
    _, _, values, out = group_of(attention, number)
    draw(values)
    draw(out)
    mix_in(values, code, MIX)
    mix_in(out, decoder.repeat(1, out.shape[1] // decoder.shape[1]), MIX)


def group_of(attention: Attention, number: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Views of the weights of one key/value head and its query heads: q, k, v and o."""
    D = attention.config.head_dim
    group = attention.config.num_attention_heads // attention.config.num_key_value_heads
    rows = slice(number * D, (number + 1) * D)
    heads = slice(number * group * D, (number + 1) * group * D)
    return (
        attention.q_proj.weight[heads],  # (group * D, C)
        attention.k_proj.weight[rows],  # (D, C)
        attention.v_proj.weight[rows],  # (D, C)
        attention.o_proj.weight[:, heads],  # (C, group * D)
    )


def less(direction: Tensor, weight: Tensor) -> Tensor:
    """Rows of weight (D, C) without what they have of a direction, (C,) of length 1."""
    return weight - torch.outer(weight @ direction, direction)


def draw(weight: Tensor) -> None:
    """Noise instead of a weight, in place, as large as it was."""
    std = weight.std()
    weight.normal_().mul_(std)


def mix_in(weight: Tensor, structure: Tensor, share: float) -> None:
    """Mix a structure into the noise that the weight is, in place: the mean square stays."""
    structure = structure * (weight.std() / structure.square().mean().sqrt())
    weight.mul_(math.sqrt(1 - share**2)).add_(structure, alpha=share)
