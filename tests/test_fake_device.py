"""Tensors on the wrong device, and hidden waits for the device, found without a GPU.

PROGRAM runs in a process of its own on a fake device, whose tensors have shapes but no values: an
operation between it and the CPU raises, and every look at a value from the host is recorded. It
prints a JSON object: for each thing that was run, what the host looked at, or the error. Numbers
and kernels are not tested by that (tests/test_gpu.py does, on a card).
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils import backend_registration

import train
from config import TrainConfig
from machine import Machine
from model import GPT, GPTConfig
from sample import pick, process_logits

ROOT = Path(__file__).parent.parent

PROGRAM = """
import json, warnings
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from config import TrainConfig
from machine import Machine
from kv_cache import KVCache
from model import GPT, GPTConfig
import sample, train

warnings.filterwarnings("ignore")
_setup_privateuseone_for_python_backend("fake_gpu")
device = torch.device("fake_gpu")
# What autocast asks a device for; its casts themselves pass through.
torch.fake_gpu.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
autocast = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")
autocast.fallback(torch.library.fallthrough_kernel)

aten = torch.ops.aten
looks = []  # of the host at values on the device


def is_on_device(value):
    return isinstance(value, torch.Tensor) and value.device.type == "fake_gpu"


class Watch(TorchDispatchMode):
    # Answers each look with 1.
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        from_device = any(map(is_on_device, args))
        if func in (aten._local_scalar_dense.default, aten.item.default, aten.is_nonzero.default):
            looks.extend(["item"] * from_device)
            return 1
        result = func(*args, **(kwargs or {}))
        if from_device and isinstance(result, torch.Tensor) and result.device.type == "cpu":
            looks.append("copy")
        return result


def tolist(tensor):  # FakeTensor's own takes one look for each number
    looks.extend(["tolist"] * is_on_device(tensor))
    return [1] * tensor.numel()


def exponential_(tensor, generator):  # the fake one takes no generator
    return tensor.uniform_()


FakeTensor.tolist = tolist
FakeTensor.exponential_ = exponential_


def new_model(**changes):
    shape = dict(num_key_value_heads=2, max_position_embeddings=64) | changes
    with device:
        return GPT(GPTConfig(64, 32, 2, 4, 48, **shape))


def batch():
    ids = torch.zeros(2, 8, dtype=torch.long)  # as Batches makes them, on the host
    return {"input_ids": ids, "labels": ids.clone(), "num_tokens": 16}


def forward_and_backward(**changes):
    model = new_model(**changes).train()
    model.model.recompute_activations = "dropout" in changes
    ids = torch.zeros(2, 8, dtype=torch.long, device=device)
    model(ids, labels=ids)[0].backward()
    model(ids, labels=ids, attention_mask=torch.ones_like(ids))[0].backward()


def prefill_and_decode(padded):
    model = new_model().eval()
    cache = KVCache(model.config, 2, 32, device=device)
    ids = torch.zeros(2, 8, dtype=torch.long, device=device)
    with torch.no_grad():
        mask = torch.ones_like(ids) if padded else None
        model(ids, cache=cache, attention_mask=mask, logits_to_keep=1)
        model(ids[:, :1], cache=cache)
        model(ids[:, :3], cache=cache)
        slot = torch.full((1,), cache.length, dtype=torch.long, device=device)
        model.decode_step(ids[:, :1], cache, slot, cache.capacity(cache.length + 1))
        model.attention_weights(ids, mask)
        cache.truncate(3)
        cache.select_rows(torch.zeros(1, dtype=torch.long, device=device))
        cache.reset()


def training_step(optimizer, dtype):
    model, config = new_model().train(), TrainConfig(optimizer=optimizer)
    optimizers = train.make_optimizers(model, config)
    machine = Machine(device, dtype, "", 0, 1)
    scaler = torch.amp.GradScaler("fake_gpu", enabled=dtype == torch.float16)
    train.take_step(model, optimizers, scaler, [batch(), batch()], machine, config)


class TwoBatches:
    per_epoch = 2

    def __getitem__(self, number):
        return batch()


def evaluation():
    machine = Machine(device, torch.bfloat16, "", 0, 1)
    train.evaluate(new_model(), TwoBatches(), None, machine)


def samplers():
    logits = torch.zeros(2, 64, device=device)
    seen = torch.zeros(2, 64, dtype=torch.bool, device=device)
    scores = sample.process_logits(
        logits, logits[0], seen, repetition_penalty=1.2, temperature=0.7, top_k=9, top_p=0.9,
        min_p=0.1,
    )
    sample.pick(scores, None)
    sample.pick(scores, [torch.Generator(), torch.Generator()])


def with_a_weight_on_the_cpu():
    model = new_model()
    model.model.norm.weight = torch.nn.Parameter(torch.ones(32))
    model(torch.zeros(2, 8, dtype=torch.long, device=device))


def on_device():
    return torch.zeros(8, device=device)


mistakes = {
    "a weight on the CPU": with_a_weight_on_the_cpu,
    "ids on the CPU": lambda: new_model()(torch.zeros(2, 8, dtype=torch.long)),
    "a number made on the CPU": lambda: torch.as_tensor(3, device=device),
    "a mask as an index": lambda: on_device()[on_device() > 0],
    "item": lambda: on_device()[0].item(),
    "a question": lambda: bool((on_device() > 0).any()),
    "two lists": lambda: (on_device().tolist(), on_device().tolist()),
    "a copy": lambda: on_device().cpu(),
}
runs = {
    "forward and backward": forward_and_backward,
    "manual attention": lambda: forward_and_backward(attention="manual"),
    "dropout, recomputed": lambda: forward_and_backward(dropout=0.1),
    "yarn": lambda: forward_and_backward(rope_scaling={"rope_type": "yarn", "factor": 2.0}),
    "prefill and decode": lambda: prefill_and_decode(padded=False),
    "padded prefill and decode": lambda: prefill_and_decode(padded=True),
    "samplers": samplers,
    "four tokens": lambda: sample.generate(new_model(), [[1, 2, 3], [4]], 4, temperature=0),
    "evaluation": evaluation,
    "adamw fp32": lambda: training_step("adamw", torch.float32),
    "muon fp32": lambda: training_step("muon", torch.float32),
    "muon bf16": lambda: training_step("muon", torch.bfloat16),
    "muon fp16": lambda: training_step("muon", torch.float16),
} | mistakes
results = {}
for name, run in runs.items():
    looks.clear()
    with FakeTensorMode(), Watch():
        try:
            run()
            results[name] = list(looks)
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"[:300]
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def results() -> dict:
    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip("this torch cannot make a device in Python")  # 2.9 cannot
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "what",
    ["forward and backward", "manual attention", "dropout, recomputed", "yarn"]
    + ["prefill and decode", "padded prefill and decode", "samplers"],
)
def test_nothing_is_on_the_wrong_device_and_the_host_never_looks(results, what):
    assert results[what] == []


@pytest.mark.parametrize("what", ["adamw fp32", "muon fp32", "muon bf16", "muon fp16"])
def test_the_host_looks_once_in_a_training_step(results, what):
    """At the loss, the norm and the counts together, over two micro-batches."""
    assert results[what] == ["tolist"]


def test_the_host_looks_once_in_an_evaluation_and_once_for_each_new_token(results):
    assert results["evaluation"] == ["copy"]
    assert results["four tokens"] == 4 * ["tolist"]


def test_mistakes_would_be_seen(results):
    """The same device and the same record, with a mistake put in."""
    for what in ("a weight on the CPU", "ids on the CPU"):
        assert "same device" in results[what]
    assert "Error" in results["a number made on the CPU"]  # the copy of which would wait
    assert "nonzero" in results["a mask as an index"]
    assert results["item"] == results["a question"] == ["item"]
    assert results["two lists"] == ["tolist", "tolist"]
    assert results["a copy"] == ["copy"]


def test_a_training_step_and_the_samplers_name_the_device_of_what_they_make():
    """With meta as the default device, a tensor made without device= meets the CPU's and raises."""
    model = GPT(GPTConfig(64, 32, 2, 4, 48, num_key_value_heads=2)).train()
    ids = torch.arange(16).view(2, 8)
    batch = {"input_ids": ids, "labels": ids, "num_tokens": 16}
    machine = Machine(torch.device("cpu"), torch.float32, "", 0, 1)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    before = model.model.norm.weight.clone()
    logits, seen = torch.randn(2, 64), torch.zeros(2, 64, dtype=torch.bool)
    generators = [torch.Generator().manual_seed(row) for row in range(2)]
    with torch.device("meta"):
        optimizers = train.make_optimizers(model, TrainConfig())
        train.take_step(model, optimizers, scaler, [batch, batch], machine, TrainConfig())
        options = {"temperature": 0.7, "top_k": 9, "top_p": 0.9, "min_p": 0.1}
        scores = process_logits(logits, logits[0], seen, repetition_penalty=1.2, **options)
        picked = pick(scores, generators)
        assert torch.zeros(1).is_meta  # the control: this is what would have been made
    assert not torch.equal(model.model.norm.weight, before)
    assert picked.device.type == "cpu" and picked.shape == (2,)
