"""matvec.py: the product of matvec.cpp against float64 and against torch's own, inside and outside
of torch.compile; when it is used; where weights are packed; and how compiled code is kept."""

import os
import stat

import pytest
import torch
from reference import random_model, tiny

import matvec
from model import Linear
from quantize import quantize_int8
from sample import generate

SIZES = [(1, 1), (7, 5), (33, 200), (64, 64), (65, 129), (300, 257), (0, 4), (4, 0)]
BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def compiled():
    why_not = matvec.load()
    if why_not is not None:
        pytest.skip(why_not)


@pytest.fixture
def never_called(monkeypatch):
    """As after load(), but with an operator that fails the test that calls it."""

    def fail(*_):
        pytest.fail("matvec.cpp was used")

    monkeypatch.setattr(matvec, "loaded", True)
    monkeypatch.setattr(torch.ops, "gpt", type("Operators", (), {"matvec": staticmethod(fail)}))


@pytest.mark.parametrize("outputs, inputs", SIZES)
@torch.no_grad()
def test_the_product_is_that_of_float64(compiled, outputs, inputs):
    torch.manual_seed(0)
    weight, x = torch.randn(outputs, inputs).to(BF16), torch.randn(1, 1, inputs).to(BF16)
    y = matvec.one_row(weight, x)
    assert y.shape == (1, 1, outputs) and y.dtype == BF16
    exact = x.double() @ weight.double().T
    # fp32 sums: each addition is off by at most 2**-24 of the sum of the magnitudes; then bf16
    sums = 2**-24 * inputs * (x.double().abs() @ weight.double().abs().T)
    assert ((y.double() - exact).abs() <= sums + 2**-8 * exact.abs()).all()


@torch.no_grad()
def test_threads_share_the_rows(compiled):
    weight, x = torch.randn(999, 301).to(BF16), torch.randn(1, 301).to(BF16)
    alone = matvec.one_row(weight, x)
    torch.set_num_threads(3)
    try:
        assert torch.equal(matvec.one_row(weight, x), alone)
    finally:
        torch.set_num_threads(1)


@torch.no_grad()
def test_the_operator_is_what_torch_compile_is_told(compiled):
    weight, x = torch.randn(33, 200).to(BF16), torch.randn(1, 200).to(BF16)
    call = torch.compile(matvec.one_row, fullgraph=True, backend="aot_eager")
    assert torch.equal(call(weight, x), matvec.one_row(weight, x))
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.gpt.matvec.default, (weight, x[0]), test_utils=checks)


@torch.no_grad()
def test_an_input_of_another_size_is_an_error(compiled):
    with pytest.raises(RuntimeError, match="inputs"):
        matvec.one_row(torch.randn(4, 5).to(BF16), torch.randn(1, 6).to(BF16))


@torch.no_grad()
def test_a_model_decodes_with_it_as_without(compiled, monkeypatch):
    model = random_model(tiny()).to(BF16)
    ids = torch.tensor([[7]])
    monkeypatch.setattr(matvec, "loaded", True)
    with_it = model(ids)
    monkeypatch.setattr(matvec, "loaded", False)
    assert torch.allclose(model(ids), with_it, rtol=0.05, atol=0.05)


def test_it_is_for_inference_on_plain_arrays_of_bf16(never_called):
    linear, x = Linear(6, 5).to(BF16), torch.randn(1, 6).to(BF16)
    y = linear.eval()(x)
    y.sum().backward()
    assert torch.equal(linear.weight.grad, x.expand(5, 6))
    with torch.no_grad():
        linear.train()
        assert torch.allclose(linear(x), y, rtol=0.02)
        linear.eval()
        assert linear(x.expand(2, 6)).shape == (2, 5)
        transposed = linear.weight.T.contiguous().T
        assert torch.allclose(matvec.one_row(transposed, x), y, rtol=0.02)
        for dtype in (torch.float32, torch.float16):
            assert linear.to(dtype)(x.to(dtype)).dtype == dtype


# ------------------------------------------------------------------------------- packing


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("int8", [False, True])
def test_packed_weights_are_the_same_in_one_block(tied, int8):
    model = random_model(tiny(tie_word_embeddings=tied))
    if int8:
        quantize_int8(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tokens = generate(model, [[1, 2, 3]], 20, temperature=0)
    matvec.pack(model)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert len({tensor.untyped_storage().data_ptr() for tensor in after.values()}) == 1
    assert generate(model, [[1, 2, 3]], 20, temperature=0) == tokens
    if tied and not int8:
        assert model.lm_head.weight is model.model.embed_tokens.weight


# ---------------------------------------------------------------------- how the code is kept


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A cache of its own, and in the place of g++ a program that writes "compiled"."""
    if matvec.platform.system() != "Linux":
        pytest.skip("matvec.cpp is for Linux")
    fake = tmp_path / "fake++"
    fake.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\nprintf compiled > "$2"\n')
    fake.chmod(0o700)
    monkeypatch.setenv("CXX", str(fake))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(matvec.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(matvec, "loaded", False)
    monkeypatch.setattr(torch.library, "register_fake", lambda *_: None)

    def load_library(file):  # as torch does, of a library that says "compiled"
        if not os.path.exists(file) or open(file).read() != "compiled":
            raise OSError(f"{file}: cannot open shared object file")

    monkeypatch.setattr(torch.ops, "load_library", load_library)
    return tmp_path


def load_anew(tell=lambda text: None) -> str | None:
    matvec.loaded = False  # not what an earlier call found
    return matvec.load(tell)


def test_it_is_compiled_once_and_again_where_the_file_is_damaged(workplace):
    told: list[str] = []
    assert load_anew(told.append) is None and matvec.loaded
    file = matvec.library()
    assert file.read_text() == "compiled"
    assert os.listdir(file.parent) == [file.name]  # nothing half made lies beside it
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    made = file.stat().st_ino
    assert load_anew(told.append) is None and file.stat().st_ino == made and len(told) == 1
    file.write_text("comp")
    assert load_anew(told.append) is None and file.read_text() == "compiled" and len(told) == 2


def test_other_code_or_another_torch_is_another_file(workplace, monkeypatch):
    names = {matvec.library()}
    monkeypatch.setattr(torch, "__version__", "3.0")
    names.add(matvec.library())
    other = workplace / "other.cpp"
    other.write_text("int main() {}")
    monkeypatch.setattr(matvec, "SOURCE", other)
    names.add(matvec.library())
    assert len(names) == 3


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_without_a_compiler_that_works_it_says_so_and_torch_does_the_product(
    workplace, monkeypatch, compiler
):
    monkeypatch.setenv("CXX", compiler)
    assert compiler in load_anew() and not matvec.loaded
    with torch.no_grad():
        ones = torch.ones(2, 3, dtype=BF16)
        assert matvec.one_row(ones, ones[:1]).tolist() == [[3, 3]]


def test_code_is_not_taken_from_where_others_could_have_put_it(workplace):
    directory = workplace / "cache" / "gpt"
    directory.mkdir(parents=True)
    directory.chmod(0o777)
    assert str(directory) in load_anew() and not matvec.loaded
    directory.rename(workplace / "elsewhere")
    directory.symlink_to(workplace / "elsewhere")
    (workplace / "elsewhere").chmod(0o700)
    assert str(directory) in load_anew() and not matvec.loaded
