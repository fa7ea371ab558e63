"""muon.py: the same numbers as torch.optim.Muon, and what its orthogonal matrices should be."""

import pytest
import torch

import muon
from muon import Muon, orthogonal

SHAPES = [(12, 12), (6, 12), (6, 12), (32, 12), (32, 12), (32, 12), (12, 32), (1, 5), (5, 1)]


def weights() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def set_gradients(parameters: list[torch.nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("stack_entries", [2**25, 2 * 6 * 12, 1])
def test_steps_are_those_of_torch(stack_entries, monkeypatch):
    monkeypatch.setattr(muon, "STACK_ENTRIES", stack_entries)
    ours, theirs = weights(), weights()
    stacked = Muon(ours, lr=0.02, weight_decay=0.1)
    single = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for step in range(4):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        stacked.step()
        single.step()
        for a, b in zip(ours, theirs, strict=True):
            # bf16 products may be summed in another order: a few of its roundings of the step,
            # whose size is 0.02 * 0.2 * sqrt(32) at most
            torch.testing.assert_close(a, b, rtol=0, atol=5e-4)


def test_either_reads_the_others_state():
    ours, theirs = weights(), weights()
    stacked = Muon(ours, lr=0.02, weight_decay=0.1)
    single = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    set_gradients(ours, 0)
    stacked.step()
    single.load_state_dict(stacked.state_dict())
    assert single.state_dict()["param_groups"] == stacked.state_dict()["param_groups"]
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(stacked.state[a]["momentum_buffer"], single.state[b]["momentum_buffer"])
    stacked.load_state_dict(single.state_dict())


def test_without_a_gradient_nothing_moves():
    parameters = weights()
    set_gradients(parameters, 0)
    parameters[1].grad = None
    before = [parameter.detach().clone() for parameter in parameters]
    Muon(parameters, lr=0.02, weight_decay=0.1).step()
    moved = [not torch.equal(a, b) for a, b in zip(parameters, before, strict=True)]
    assert moved == [True, False] + [True] * (len(SHAPES) - 2)


@pytest.mark.parametrize("shape", [(8, 8), (24, 8), (8, 24)])
def test_singular_values_come_near_one_and_vectors_stay(shape):
    generator = torch.Generator().manual_seed(1)
    matrices = torch.randn(3, *shape, generator=generator, dtype=torch.float64)
    results = orthogonal(matrices, torch.float64)
    for matrix, result in zip(matrices, results, strict=True):
        u, s, vt = torch.linalg.svd(matrix, full_matrices=False)
        assert s.min() / s.norm() > 1e-3  # smaller ones would need more iterations
        inside = u.T @ result @ vt.T  # diagonal where the singular vectors are the same
        assert torch.allclose(inside, torch.diag(inside.diagonal()), atol=1e-9)
        assert inside.diagonal().min() > 0.3
        assert inside.diagonal().max() < 1.3


def test_zeros_stay_zeros():
    assert torch.equal(orthogonal(torch.zeros(2, 3, 4)).float(), torch.zeros(2, 3, 4))
