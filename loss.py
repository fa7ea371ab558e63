"""Cross entropy of the next token, without ever holding all the logits.

At Qwen3's vocabulary of 151,936 the logits of 4,096 tokens are 2.3 GiB in fp32, and their gradient
as much again: far more than all else in a training step. Only a few rows of them are ever needed at
a time.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Logits held at once, in fp32 entries: 2**26 are 256 MiB, 441 rows of Qwen3's vocabulary.
LOGITS_AT_ONCE = 2**26


class LinearCrossEntropy(torch.autograd.Function):
    """sum of cross_entropy(hidden @ weight.T, targets) without ever holding all the logits.

    hidden (N, C), weight (V, C), targets (N,) with -100 for "not counted", soft None or (N, V) fp32
    -> () fp32. With `soft` a row's target is that distribution, not the one token. The gradient of
    a chunk of rows is made while its logits are there, in the forward; the backward only scales it.
    Matrix products run in autocast's dtype, softmax and sums in fp32.
    """

    @staticmethod
    def forward(
        ctx,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        soft: Tensor | None,
        needs_grad: bool,
    ) -> Tensor:
        dtype = hidden.dtype
        if torch.is_autocast_enabled(hidden.device.type):
            dtype = torch.get_autocast_dtype(hidden.device.type)
        with torch.autocast(hidden.device.type, enabled=False):
            w = weight.to(dtype)
            loss = torch.zeros((), device=hidden.device, dtype=torch.float32)
            if needs_grad:
                grad_hidden = torch.empty_like(hidden)
                grad_weight = torch.zeros_like(weight, dtype=torch.float32)
            rows = max(1, LOGITS_AT_ONCE // weight.shape[0])
            start = 0
            while start < hidden.shape[0]:  # a range of it would be compiled for each length
                h = hidden[start : start + rows].to(dtype)  # (n, C)
                target = targets[start : start + rows, None]  # (n, 1)
                counted = target != -100
                target = target.clamp(min=0)
                logits = (h @ w.T).float()  # (n, V)
                total = logits.logsumexp(dim=-1, keepdim=True)
                if soft is None:
                    expected = logits.gather(1, target)
                else:
                    wanted = soft[start : start + rows]  # (n, V)
                    expected = (logits * wanted).sum(dim=-1, keepdim=True)
                loss += ((total - expected) * counted).sum()
                if needs_grad:
                    # d loss / d logits = softmax - target, in rows that count
                    grad = logits.sub_(total).exp_()
                    if soft is None:
                        grad.scatter_add_(1, target, torch.full_like(total, -1.0))
                    else:
                        grad.sub_(wanted)
                    grad = grad.mul_(counted).to(dtype)
                    del logits  # in bf16 grad is a copy: two of this size at once are enough
                    grad_hidden[start : start + rows] = grad @ w
                    grad_weight += grad.T @ h
                start += rows
        if needs_grad:
            ctx.save_for_backward(grad_hidden, grad_weight.to(weight.dtype))
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss: Tensor):
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grad_loss, grad_weight * grad_loss, None, None, None
