"""Weights as 8-bit integers, for decoding: a token then reads half the bytes of bf16.

`python sample.py --dtype=int8` loads a checkpoint in bf16 and calls `quantize_int8`, which puts an
`Int8Linear` in the place of each matrix product. Activations, norms, embedding and cache stay bf16.
The gain is decode.cpp's, which reads the bytes as they are; here they are widened for each product.
(torch has a product for them, `_weight_int8pack_mm`, but with 72 inputs in bf16 it crashes.)
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from model import GPT, Linear


class Int8Linear(nn.Module):
    """A matrix product, (..., inputs) -> (..., outputs), with weights in 8 bits.

    rounded (outputs, inputs) int8; scale (outputs,), in the dtype that the weights had; `weight`
    is what they stand for, made anew each time: the loss takes the head's.

    An output's scale is its largest weight / 127, so that no weight is cut off and each is off by
    half a step at most (Dettmers et al. 2022, section 2.1, by rows and without outliers).
    """

    rounded: Tensor
    scale: Tensor

    def __init__(self, linear: Linear):
        super().__init__()
        weight = linear.weight.detach().float()
        scale = weight.abs().amax(dim=1).clamp(min=1e-12) / 127  # (outputs,)
        rounded = (weight / scale[:, None]).round().to(torch.int8)
        self.register_buffer("rounded", rounded)
        self.register_buffer("scale", scale.to(linear.weight.dtype))

    @property
    def weight(self) -> Tensor:
        return self.rounded.to(self.scale.dtype) * self.scale[:, None]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.rounded.to(x.dtype)) * self.scale


@torch.no_grad()
def quantize_int8(model: GPT) -> GPT:
    """Replace each Linear of the model by its Int8Linear, in place, one at a time; also the head,
    while a tied embedding stays as it is. For generation only: there is no gradient."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, Linear):
                setattr(module, name, Int8Linear(child))
    return model.eval()
