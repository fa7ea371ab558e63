"""quantize.py: each weight within half a step, each row of the product near the exact one, and a
generation loop that runs on it."""

import pytest
import torch
from reference import random_model, tiny

from model import Linear
from quantize import Int8Linear, quantize_int8
from sample import generate


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("inputs", [64, 72])  # torch's own product for int8 crashes with 72
def test_the_product_is_off_by_the_rounding_of_the_weights_alone(rows, inputs, dtype):
    torch.manual_seed(0)
    linear = Linear(inputs, 40).to(dtype)
    int8 = Int8Linear(linear)
    x = torch.randn(rows, inputs).to(dtype)
    exact = x.double() @ linear.weight.detach().double().T
    step = linear.weight.detach().double().abs().amax(dim=1) / 127  # (40,)
    bound = x.double().abs().sum(dim=1, keepdim=True) * step / 2  # (rows, 40)
    rounding = 0.02 if dtype == torch.bfloat16 else 1e-5
    assert ((int8(x).double() - exact).abs() <= bound + rounding * (1 + exact.abs())).all()


def test_no_weight_is_cut_off_and_a_row_of_zeros_stays_zero():
    linear = Linear(8, 3)
    with torch.no_grad():
        linear.weight[0] = 0.0
        linear.weight[1] = torch.linspace(-5, 2, 8)
    int8 = Int8Linear(linear)
    assert int8.rounded[0].eq(0).all() and int8.rounded[1].min() == -127
    assert torch.allclose(int8.weight, linear.weight, atol=5 / 127 / 2 + 1e-6)


def test_a_quantized_model_generates_and_a_tied_embedding_stays_exact():
    model = random_model(tiny()).to(torch.bfloat16)
    embedding = model.model.embed_tokens.weight.clone()
    quantize_int8(model)
    assert not any(isinstance(module, Linear) for module in model.modules())
    assert torch.equal(model.model.embed_tokens.weight, embedding)
    batch = generate(model, [[1, 2, 3], [4]], 10, temperature=0)
    assert [len(ids) for ids in batch] == [10, 10]


def test_the_loss_of_a_quantized_model_is_that_of_its_logits():
    model = quantize_int8(random_model(tiny()).to(torch.bfloat16))
    ids = torch.tensor([[1, 2, 3, 4, 5, 6]])
    with torch.no_grad():
        loss_sum, _ = model(ids, labels=ids)
        logits = model(ids)[0, :-1].float()
    expected = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum")
    assert abs(loss_sum - expected) < 0.02 * expected
