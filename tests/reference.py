"""What the decoder is held against: slow, plain, and written without looking at model.py.

`tiny` and `random_model` make small models in which every weight matters (norm weights differ from
1, or the order of QK-Norm and RoPE could not be seen). `peer` is transformers' Qwen3 with the same
weights. `loop_attention` is attention as the sentence defines it, in float64, one row, head and
position at a time. `padded_batch` makes batches with padding on either side.
"""

import math

import torch
import transformers
from torch import Tensor

from model import GPT, GPTConfig

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


MINIMIND_3 = GPTConfig(
    vocab_size=6400,
    hidden_size=768,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=96,
    intermediate_size=2432,
)


def tiny(**changes) -> GPTConfig:
    """A GQA decoder of two layers, 4:2 heads of 8, in a stream of 32."""
    shape = dict(
        vocab_size=61,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        max_position_embeddings=64,
        rope_theta=1e4,
    )
    return GPTConfig(**shape | changes)


@torch.no_grad()
def random_model(config: GPTConfig, seed: int = 0) -> GPT:
    """Weights of unit-variance outputs, norm weights between 0.5 and 1.5; in eval mode."""
    generator = torch.Generator().manual_seed(seed)
    model = GPT(config)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.uniform_(0.5, 1.5, generator=generator)
        else:
            parameter.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)
    return model.eval()


def peer(model: GPT, attention: str = "sdpa") -> transformers.Qwen3ForCausalLM:
    """transformers' Qwen3 with the weights of `model`: name for name, none missing, none left."""
    config = model.config
    rope = {"rope_theta": config.rope_theta, "rope_type": "default"} | (config.rope_scaling or {})
    qwen = transformers.Qwen3Config(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        tie_word_embeddings=config.tie_word_embeddings,
        rope_parameters=rope,
        attn_implementation=attention,
    )
    twin = transformers.Qwen3ForCausalLM(qwen).eval()
    twin.load_state_dict(model.state_dict(), strict=True)
    twin.to(model.lm_head.weight.dtype)
    twin.model.rotary_emb = type(twin.model.rotary_emb)(config=qwen)  # .to rounded its frequencies
    return twin


def random_ids(config: GPTConfig, rows: int, length: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(config.vocab_size, (rows, length), generator=generator)


def padded_batch(
    config: GPTConfig, lengths: list[int], side: str, length: int, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """ids, labels and mask, each (B, length), rows of `lengths` real tokens; side: left or right.

    Pads hold random tokens, so that a leak shows; labels there are -100.
    """
    ids = random_ids(config, len(lengths), length, seed)
    mask = torch.zeros(len(lengths), length, dtype=torch.long)
    for row, real in enumerate(lengths):
        mask[row, :real] = 1
        if side == "left":
            mask[row] = mask[row].flip(0)
    return ids, ids.masked_fill(mask == 0, -100), mask


def positions_of(mask: Tensor) -> Tensor:
    """A token's position: how many real tokens stand before it in its row."""
    positions = torch.zeros_like(mask)
    for row in range(mask.shape[0]):
        for slot in range(mask.shape[1]):
            positions[row, slot] = int(mask[row, :slot].sum())
    return positions


def visible_by_rule(mask: Tensor, queries: int) -> Tensor:
    """(B, 1, queries, S) bool: the last `queries` slots look at all slots of `mask` (B, S)."""
    rows, slots = mask.shape
    positions = positions_of(mask)
    visible = torch.zeros(rows, 1, queries, slots, dtype=torch.bool)
    for row in range(rows):
        for query in range(queries):
            p = positions[row, slots - queries + query]
            for key in range(slots):
                visible[row, 0, query, key] = bool(mask[row, key]) and positions[row, key] <= p
    return visible


def loop_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """Attention in float64, one row, head and query at a time; differentiable.

    q (B, H, T, D), k and v (B, K, S, D), visible (B, 1, T, S)
    -> outputs (B, H, T, D) and weights (B, H, T, S).
    """
    q, k, v = q.double(), k.double(), v.double()
    B, H, T, D = q.shape
    K, S = k.shape[1:3]
    outputs, weights = [], []
    for b in range(B):
        for h in range(H):
            kv = h // (H // K)
            for t in range(T):
                seen = [s for s in range(S) if visible[b, 0, t, s]]
                output, row = torch.zeros(D, dtype=torch.double), torch.zeros(S).double()
                if seen:
                    scores = torch.stack([q[b, h, t].dot(k[b, kv, s]) for s in seen])
                    row = row.index_put((torch.tensor(seen),), (scores / math.sqrt(D)).softmax(0))
                    output = sum(row[s] * v[b, kv, s] for s in seen)
                outputs.append(output)
                weights.append(row)
    return torch.stack(outputs).view(B, H, T, D), torch.stack(weights).view(B, H, T, S)


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def largest_difference(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape, f"shapes {tuple(ours.shape)} and {tuple(theirs.shape)}"
    difference = (ours.double() - theirs.double()).abs().nan_to_num(math.inf)
    return difference.max().item() if difference.numel() else 0.0
