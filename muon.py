"""Muon for the matrices of the blocks, with matrices of one shape taken together.

Muon (Jordan et al. 2024) replaces a matrix's momentum by the nearest orthogonal matrix, so that
rare directions move as far as common ones. torch.optim.Muon takes one matrix at a time: fifteen
small products each, and most of their time goes into starting them. Stacked, they are three per
iteration for all. State and settings are torch.optim.Muon's own, so its checkpoints are these.
"""

import math
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

# Entries in a stack: 64 MiB in bf16. More memory would not make the products faster.
STACK_ENTRIES = 2**25


class Muon(torch.optim.Muon):
    """torch.optim.Muon with adjust_lr_fn="match_rms_adamw" (Liu et al. 2025, section 2.2), stacked.

    Its weights are the same to the last bit. A step's entries have a root mean square of about 0.2
    times the learning rate, as AdamW's have.
    """

    def __init__(
        self, params: Iterable[Tensor], lr: float, weight_decay: float, momentum: float = 0.95
    ):
        super().__init__(params, lr, weight_decay, momentum, adjust_lr_fn="match_rms_adamw")

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[parameter.shape].append(parameter)
            for shape, parameters in by_shape.items():
                together = max(1, STACK_ENTRIES // shape.numel())
                for i in range(0, len(parameters), together):
                    self.move(parameters[i : i + together], group)

    def move(self, parameters: list[Tensor], group: dict) -> None:
        """One step of n matrices of one shape (R, C)."""
        for parameter in parameters:
            if "momentum_buffer" not in self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter.grad)
        grads = [parameter.grad for parameter in parameters]
        buffers = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        momentum = group["momentum"]
        torch._foreach_lerp_(buffers, grads, 1 - momentum)
        ahead = torch._foreach_lerp(grads, buffers, momentum)  # Nesterov's look ahead
        if isinstance(ahead[0], DTensor):
            updates = [orthogonal(update[None])[0] for update in ahead]  # parts are not stacked
        else:
            updates = list(orthogonal(torch.stack(ahead)).unbind())
        size = 0.2 * math.sqrt(max(parameters[0].shape))
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(parameters, updates, alpha=-group["lr"] * size)


def orthogonal(matrices: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Each matrix with its singular values brought near 1. (n, R, C) -> (n, R, C) in `dtype`.

    Five Newton-Schulz iterations X <- a X + b (X X^T) X + c (X X^T)^2 X, which act on the singular
    values alone: the quintic's coefficients are chosen for steepness at 0, so that small ones rise
    fast, and leave them within about 0.7 to 1.2. Precise enough for bf16 (Jordan et al. 2024).
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.to(dtype)
    x = x.mT if is_tall else x  # the Gram matrix is then the smaller of the two
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)  # no singular value is above 1
    for _ in range(5):
        gram = x @ x.mT  # (n, r, r)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if is_tall else x
