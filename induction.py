"""How the weights may begin: with the first half of an induction head.

After "the red ball" a model that meets "the red" again should say "ball". That takes two heads, one
behind the other (Elhage et al. 2021, Olsson et al. 2022): the first tells each token which token
stood before it; the second looks for a place whose token before was the present one, and says what
stands there. Neither earns anything without the other, so a small model finds the pair late or
never. Where the first is there from the start, the second follows within a few hundred steps.

So these are only other first values (after Trockman and Kolter 2023, who call it mimetic
initialisation): training may change them all, and the checkpoint is a Qwen3 model like any other.
docs/recipes.md says what it brings.
"""

import math
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from model import GPT, Attention, Block
from rope import rope_frequencies

LOGITS_STD = 2.4  # of the first logits, where head and embedding are tied
FAST_PAIRS = 5  # of RoPE's rotations, the fastest: slower ones cannot tell neighbours apart
MIX = 0.9  # how much of a matrix is what is said here; squared, the share of its entries' variance


@torch.no_grad()
def begin_with_induction(model: GPT) -> None:
    """Change the first weights of `model`, just initialised, in three places.

    1. The embedding is loud, so that what a token is can still be read beside what the blocks add
       to it; and all tokens share a direction, by which a head may look at any of them. The first
       loss is higher for it: with tied embeddings by LOGITS_STD**2 / 2, about 2.9, for some
       twenty steps.
    2. In the first layer the heads of the first key/value head look at the token before.
    3. In the layers behind it a head says what it looks at: with o_proj near the transpose of
       v_proj, what it adds to the stream is like the embedding of that token.
    """
    embedding = model.model.embed_tokens.weight  # (V, C)
    C = embedding.shape[1]
    shared = F.normalize(torch.randn(C, device=embedding.device), dim=0)  # (C,) of length 1
    std = LOGITS_STD / math.sqrt(C)
    embedding.normal_(0.0, std)
    embedding.add_(shared * std * math.sqrt(C))  # as long as what tells the tokens apart
    first, *others = [cast(Block, layer).self_attn for layer in model.model.layers]
    look_one_back(first, shared)
    for attention in others:
        say_what_is_seen(attention)


def look_one_back(attention: Attention, shared: Tensor) -> None:
    """Queries and keys of the first group, nearly the same for all tokens; shared is (C,).

    The key is k = (u, 0) in the pairs that RoPE turns (rope.py), the query k turned back by one
    position. Between positions p and q RoPE adds a turn of p - q, so their product is largest
    where the key stands one before the query.
    """
    config = attention.config
    D = config.head_dim
    group = config.num_attention_heads // config.num_key_value_heads
    frequencies, _ = rope_frequencies(config, shared.device)  # (D/2,)
    u = torch.zeros_like(frequencies)
    u[:FAST_PAIRS] = 1.0
    u *= math.sqrt(D) / u.norm()  # root mean square 1 over the head, as QK-Norm will have it
    key = torch.cat((u, torch.zeros_like(u)))  # (D,)
    query = torch.cat((u * frequencies.cos(), -u * frequencies.sin()))  # (D,)
    mix_in(attention.k_proj.weight[:D], torch.outer(key, shared))
    for head in range(group):
        rows = attention.q_proj.weight[head * D : (head + 1) * D]
        mix_in(rows, torch.outer(query, shared))


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
    """Make `weight` MIX of the structure, and so much of what it was that the variance stays."""
    weight.mul_(math.sqrt(1 - MIX**2)).add_(structure, alpha=MIX)
