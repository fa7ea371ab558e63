"""How the weights may begin: with what an induction head is made of, but for what it looks for.

After "the red ball" a model that meets "the red" again should say "ball". That takes two heads, one
behind the other (Elhage et al. 2021, Olsson et al. 2022): the first tells each token which token
stood before it; the second looks for a place whose token before was the present one, and says what
stands there. Neither earns anything without the other, so a small model finds the pair late or
never. Here the first head is there from the start, and later heads say what they look at; what to
look for they then learn, at tiny's shape within some hundred steps (docs/recipes.md).

A chat asks the other way round, "What colour is the ball?", and that no model had learned from
chats here. So a model that began like this may begin its fine-tuning with one group of heads drawn
anew, which says what stood in front of what it looks at: begin_to_look_back.

These are only other first values (after Trockman and Kolter 2023, who call it mimetic
initialisation): training may change them all, and the checkpoint is a Qwen3 model like any other.
"""

import math
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from model import GPT, Attention, Block
from rope import rope_frequencies

EMBEDDING_LENGTH = 2.4  # of the part that tells tokens apart, and of the part that all share
FAST_PAIRS = 5  # of RoPE's rotations, the fastest: slower ones cannot tell neighbours apart
MIX = 0.9  # weight of the structure beside the noise; MIX**2 is its share of the variance


@torch.no_grad()
def begin_with_induction(model: GPT) -> None:
    """Change three kinds of the first weights of `model`, in place: fp32, or on the meta device.

    1. The embedding is loud, so that what a token is can still be read beside what the blocks add
       to it; and all tokens share a direction, by which a head may look at any of them. Where the
       head is tied to it, the first logits are as loud, and the first loss is about
       EMBEDDING_LENGTH**2 / 2, or 3, above ln V. An id that training never shows stays loud: the
       marks of a chat, say, so that fine-tuning too begins with a high loss.
    2. In the first layer the heads of the first key/value head look at the token before more than
       at any other: with heads of 32 and 256 tokens, 0.25 of their attention. Below a head_dim of
       16 there are too few fast pairs, and next to nothing of this.
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
    look_one_back(first, shared)
    for attention in others:
        say_what_is_seen(attention)


@torch.no_grad()
def begin_to_look_back(model: GPT) -> None:
    """Draw one group of heads of a trained model anew, in place: for fine-tuning on questions.

    For a model that began with begin_with_induction; in another, the heads that it reads from do
    not look one back, and a group that was of use is lost for nothing.

    "What colour is the ball?" asks from a word to what stood in front of it. At the ball the stream
    holds that, where the first layer's first group has written it (begin_with_induction); but a
    story hardly asks so, and its model has no head that reads there. The last key/value head of the
    second layer and its query heads begin to: v_proj reads what was written there, o_proj says the
    token of which it was written (if head and embedding are tied). Where to look, they then learn
    (docs/recipes.md).
    """
    first, second = (cast(Block, layer).self_attn for layer in model.model.layers[:2])
    config = first.config
    D = config.head_dim
    group = config.num_attention_heads // config.num_key_value_heads
    told = first.v_proj.weight[:D]  # (D, C): what of the token before is told, and where
    written = first.o_proj.weight[:, : group * D].unflatten(1, (group, D)).sum(1)  # (C, D)
    shared = F.normalize(model.model.embed_tokens.weight.mean(0), dim=0)  # (C,)
    told = told - torch.outer(told @ shared, shared)  # less what all tokens have in common

    second.q_proj.weight[-group * D :].normal_(0.0, 0.02)
    second.k_proj.weight[-D:].normal_(0.0, 0.02)
    values, out = second.v_proj.weight[-D:], second.o_proj.weight[:, -group * D :]
    for weight, structure in ((values, written.T), (out, told.T.repeat(1, group))):
        std = weight.std()
        weight.normal_()
        mix_in(weight, structure / structure.std())
        weight.mul_(std)


def look_one_back(attention: Attention, shared: Tensor) -> None:
    """Queries and keys of the first group that depend on where a token is, hardly on which.

    shared: (C,), what all embeddings have in common; these heads read little else. The key is
    (u, 0) in the pairs that RoPE turns (rope.py), the query the same turned back by one position:
    RoPE turns a query d positions behind its key forward by d, so the two agree where d is 1.
    """
    config = attention.config
    D = config.head_dim
    group = config.num_attention_heads // config.num_key_value_heads
    frequencies, _ = rope_frequencies(config, shared.device)  # (D/2,)
    u = torch.zeros_like(frequencies)
    u[:FAST_PAIRS] = 1.0
    u *= math.sqrt(D) / u.norm()  # (D/2,): entries of root mean square 1 in the head
    key = torch.cat((u, torch.zeros_like(u)))  # (D,)
    query = torch.cat((u * frequencies.cos(), -u * frequencies.sin()))  # (D,)
    mix_in(attention.k_proj.weight[:D], torch.outer(key, shared))
    mix_in(attention.q_proj.weight[: group * D], torch.outer(query.repeat(group), shared))


def say_what_is_seen(attention: Attention) -> None:
    """o_proj near the transpose of v_proj, each query head with its group's values."""
    config = attention.config
    C, D, K = config.hidden_size, config.head_dim, config.num_key_value_heads
    group = config.num_attention_heads // K
    values = attention.v_proj.weight.view(K, 1, D, C)
    values = values.expand(K, group, D, C).reshape(-1, C)  # (H * D, C): each for its query heads
    out = attention.o_proj.weight  # (C, H * D)
    mix_in(out, values.T * (out.std() / values.std()))


def mix_in(weight: Tensor, structure: Tensor) -> None:
    """Mix a structure of the same mean square into the noise that the weight is."""
    weight.mul_(math.sqrt(1 - MIX**2)).add_(structure, alpha=MIX)
