"""Where a token is: rotary position embeddings (RoPE), and YaRN, which stretches them.

Su et al. 2021: turn each pair of entries of a query and of a key by an angle that grows with the
position; their dot product then depends on how far apart the two tokens are, and on nothing else.
`rotate` is what is done to a vector, `rope_tables` by which angles, `rope_frequencies` why those.
"""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from model import GPTConfig  # which imports this file


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (i, i + D/2) of x (B, heads, T, D) by its position's angle.

    This is Hugging Face's `rotate_half` pairing. Pairing neighbours (2i, 2i + 1), as the paper
    draws it, is a different function: weights trained with one are wrong in the other.
    """
    first, second = x.chunk(2, dim=-1)  # (B, heads, T, D/2) each
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.type_as(x)


def rope_tables(config: "GPTConfig", positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin for positions (B or 1, T): two fp32 tensors (B or 1, 1, T, D/2).

    Made anew in each forward, always in fp32: there is no buffer that `model.to(bfloat16)` could
    round (at position 30,000 a bf16 angle is off by whole turns) or that meta-device
    initialisation could leave empty.
    """
    frequencies, attention_factor = rope_frequencies(config, positions.device)
    angles = positions[:, None, :, None].float() * frequencies  # (B, 1, T, D/2)
    return angles.cos() * attention_factor, angles.sin() * attention_factor


def rope_frequencies(config: "GPTConfig", device: torch.device) -> tuple[Tensor, float]:
    """Angle per position of each rotated pair, (D/2,) fp32, and the factor on cos and sin.

    RoPE (Su et al. 2021, section 3.2.2): theta ** (-2i / D). With rope_scaling, YaRN (Peng et al.
    2023, section 3.2): slow pairs, which turn less than `beta_slow` times within the original
    context, are slowed by `factor`; fast ones, above `beta_fast` turns, stay; a ramp in between.
    """
    D = config.head_dim
    pair = torch.arange(0, D, 2, device=device, dtype=torch.float32)
    frequencies = 1.0 / config.rope_theta ** (pair / D)
    if config.rope_scaling is None:
        return frequencies, 1.0
    scaling = config.rope_scaling
    factor = scaling["factor"]
    original = scaling.get("original_max_position_embeddings") or config.max_position_embeddings

    def pair_that_turns(turns: float) -> float:
        return D * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    low = pair_that_turns(scaling.get("beta_fast") or 32)
    high = pair_that_turns(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, D - 1)
    ramp = (torch.arange(D // 2, device=device) - low) / max(high - low, 0.001)
    slowed = ramp.clamp(0, 1)
    frequencies = frequencies / factor * slowed + frequencies * (1 - slowed)
    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        attention_factor = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
        mscale, mscale_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
        if mscale and mscale_all and factor > 1:
            attention_factor = (0.1 * mscale * math.log(factor) + 1.0) / (
                0.1 * mscale_all * math.log(factor) + 1.0
            )
    return frequencies, attention_factor
