"""Hugging Face directories: what we write transformers opens, what it writes we open.

Then the refusals: another architecture, tensors that are missing, extra or misshapen, damaged
files; and the hostile ones: nothing in a checkpoint may run, or be read outside its directory.
Last, the memory that loading takes (slow: a checkpoint of 1 GB).
"""

import json
import os
import pickle
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from reference import YARN, largest_difference, peer, random_ids, random_model, tiny
from safetensors.torch import load_file, save_file

from model import GPT, GPTConfig

SHAPES = {
    "tied": {},
    "untied": dict(tie_word_embeddings=False),
    "mha, no head_dim": dict(num_key_value_heads=None, head_dim=None),
    "YaRN": dict(rope_scaling=YARN, rope_theta=1e6),
}


@pytest.fixture
def saved(tmp_path):
    """A directory that holds a small model; tests damage it."""
    random_model(tiny()).save_pretrained(tmp_path)
    return tmp_path


def edit_config(directory: Path, **changes) -> None:
    file = directory / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in config.items() if value != "absent"}))


def edit_tensors(directory: Path, change) -> None:
    file = directory / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        out = model(torch.arange(24).view(2, 12))
    return out if isinstance(out, torch.Tensor) else out.logits


# ------------------------------------------------------------------------------- there and back


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_transformers_opens_what_we_write(shape, dtype, tmp_path):
    model = random_model(tiny(**SHAPES[shape])).to(dtype)
    model.save_pretrained(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(theirs) is transformers.Qwen3ForCausalLM and theirs.dtype == dtype
    assert theirs.state_dict().keys() == model.state_dict().keys()
    assert largest_difference(logits(model.float()), logits(theirs.float())) < 1e-5


@pytest.mark.skipif(os.name == "nt", reason="Windows has no modes of files")
def test_the_umask_says_who_may_read_what_we_write(tmp_path):
    before = os.umask(0o027)
    try:
        random_model(tiny()).save_pretrained(tmp_path)
    finally:
        os.umask(before)
    modes = {file.name: oct(file.stat().st_mode & 0o777) for file in tmp_path.iterdir()}
    assert modes == {"config.json": "0o640", "model.safetensors": "0o640"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shard_size", ["10GB", "10KB"])
@pytest.mark.parametrize("shape", SHAPES)
def test_we_open_what_transformers_writes(shape, shard_size, dtype, tmp_path):
    theirs = peer(random_model(tiny(**SHAPES[shape])).to(dtype))
    theirs.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "10KB")
    model = GPT.from_pretrained(tmp_path)
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert all(p.requires_grad for p in model.parameters()) and not model.training
    assert largest_difference(logits(model.float()), logits(theirs.float())) < 1e-5
    tied = model.config.tie_word_embeddings
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert model.num_parameters() == theirs.num_parameters()


@pytest.mark.parametrize("shape", SHAPES)
def test_writing_and_reading_gives_the_same_bits_and_config(shape, tmp_path):
    model = random_model(tiny(**SHAPES[shape], dropout=0.1))
    model.save_pretrained(tmp_path)
    again = GPT.from_pretrained(tmp_path)
    assert again.config == model.config
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name


def test_reading_converts_to_the_dtype_asked_for_and_the_copy_is_ours(saved):
    exact = GPT.from_pretrained(saved)
    half = GPT.from_pretrained(saved, dtype=torch.bfloat16)
    for name, tensor in exact.state_dict().items():
        assert torch.equal(half.state_dict()[name], tensor.bfloat16()), name
    with torch.no_grad():
        exact.model.norm.weight.fill_(9.0)
    assert not torch.all(GPT.from_pretrained(saved).model.norm.weight == 9.0)


def test_a_loaded_model_trains_and_its_tied_head_with_it(saved):
    model = GPT.from_pretrained(saved).train()
    ids = random_ids(model.config, 2, 6)
    model(ids, labels=ids)[0].backward()
    assert len(list(model.parameters())) == len({id(p) for p in model.parameters()})
    assert all(parameter.grad is not None for parameter in model.parameters())


OLDER = dict(rope_parameters="absent", rope_theta=1e6, rope_scaling=YARN)
SPELLINGS = {
    "older": OLDER,
    "oldest": OLDER | dict(rope_scaling={"type": "yarn"} | {k: YARN[k] for k in list(YARN)[1:]}),
    "newer": dict(rope_parameters=YARN | {"rope_theta": 1e6}),
    "older, off": dict(rope_parameters="absent", rope_theta=1e6, rope_scaling=None),
    "newer, off": dict(rope_parameters={"rope_theta": 1e6, "rope_type": "default"}),
    "left out": dict(rope_parameters="absent"),
    "without head_dim": dict(rope_parameters="absent", head_dim="absent"),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_config_means_what_it_means_to_transformers(spelling, tmp_path):
    """The frequencies that transformers makes of the same file, and the logits."""
    head_dim = 128 if spelling == "without head_dim" else 8
    peer(random_model(tiny(head_dim=head_dim))).save_pretrained(tmp_path)
    edit_config(tmp_path, **SPELLINGS[spelling])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert largest_difference(logits(GPT.from_pretrained(tmp_path)), logits(theirs)) < 1e-5


def test_minimind_3_s_own_config_is_read_with_its_own_defaults(saved):
    """MiniMind's file has its model_type, and neither dense nor MoE files say what ties."""
    expected = logits(GPT.from_pretrained(saved))
    edit_config(
        saved,
        model_type="minimind",
        architectures=["MiniMindForCausalLM"],
        auto_map={"AutoModelForCausalLM": "model_minimind.MiniMindForCausalLM"},
        use_moe=False,
        num_experts=4,
        flash_attn=True,
        inference_rope_scaling=False,
        tie_word_embeddings="absent",
    )
    assert torch.equal(logits(GPT.from_pretrained(saved)), expected)
    config = json.loads((saved / "config.json").read_text())
    del config["rope_theta"]
    assert GPTConfig.from_dict(config).rope_theta == 1e6


def test_a_tied_head_may_be_stored_twice(saved):
    def store_head(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    expected = logits(GPT.from_pretrained(saved))
    edit_tensors(saved, store_head)
    assert torch.equal(logits(GPT.from_pretrained(saved)), expected)


# ------------------------------------------------------------------------------------- refusals


def refusal(directory: Path, *words: str, kind=ValueError) -> None:
    with pytest.raises(kind) as error:
        GPT.from_pretrained(directory)
    for word in (str(directory), *words):
        assert word in str(error.value), f"{word!r} is not in {str(error.value)!r}"


@pytest.mark.parametrize(
    "changes, word",
    [
        ({"model_type": "llama"}, "llama"),
        ({"model_type": "qwen3_moe"}, "qwen3_moe"),
        ({"model_type": "absent"}, "model_type"),
        ({"attention_bias": True}, "attention_bias"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"model_type": "minimind", "use_moe": True}, "use_moe"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "linear"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "factor"),
        ({"num_hidden_layers": "absent"}, "num_hidden_layers"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"hidden_size": "32"}, "hidden_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"rope_theta": "1e6"}, "rope_theta"),
        ({"rms_norm_eps": None}, "rms_norm_eps"),
    ],
)
def test_another_architecture_is_refused_by_name(saved, changes, word):
    edit_config(saved, **changes)
    refusal(saved, "config.json", word)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"qwen3"', "\x00"])
def test_a_config_that_is_not_one_is_refused(saved, text):
    (saved / "config.json").write_text(text)
    refusal(saved, "config.json")


NAME = "model.layers.1.mlp.up_proj.weight"


def test_a_missing_tensor_is_named(saved):
    edit_tensors(saved, lambda tensors: tensors.pop(NAME))
    refusal(saved, NAME, "missing")


def test_an_untied_head_that_is_missing_is_named(saved):
    edit_config(saved, tie_word_embeddings=False)
    refusal(saved, "lm_head.weight", "missing")


def test_an_extra_tensor_is_named(saved):
    edit_tensors(saved, lambda tensors: tensors.update({"model.layers.0.bias": torch.ones(3)}))
    refusal(saved, "model.safetensors", "model.layers.0.bias")


@pytest.mark.parametrize("shape", [(48, 31), (32, 48), (48,), (0, 32), (48, 32, 1)])
def test_a_misshapen_tensor_is_named_with_both_shapes(saved, shape):
    edit_tensors(saved, lambda tensors: tensors.update({NAME: torch.ones(shape)}))
    refusal(saved, "model.safetensors", NAME, str(shape), "(48, 32)")


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool, torch.float8_e4m3fn])
def test_a_tensor_that_is_not_of_floating_point_numbers_we_compute_in_is_named(saved, dtype):
    edit_tensors(saved, lambda tensors: tensors.update({NAME: torch.ones(48, 32).to(dtype)}))
    refusal(saved, "model.safetensors", NAME)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_a_file_that_is_cut_short_is_named(saved, share):
    file = saved / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * share)])
    refusal(saved, "model.safetensors")


def test_a_missing_directory_config_or_weights_file_is_named(saved, tmp_path):
    (saved / "model.safetensors").unlink()
    refusal(saved, "model.safetensors", kind=FileNotFoundError)
    (saved / "config.json").unlink()
    refusal(saved, "config.json", kind=FileNotFoundError)
    refusal(tmp_path / "not there", kind=FileNotFoundError)


PATTERNS = ["*.json", "*.safetensors", "chat_template.jinja"]


def test_from_the_hub_only_data_is_fetched(saved, monkeypatch):
    """Of a repository's files, JSON, safetensors and the chat template, which `data.template` asks
    without trust; a name that the hub has not is an error."""
    asked = {}

    def snapshot_download(name, allow_patterns):
        asked.update(name=name, patterns=allow_patterns)
        return str(saved)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert GPT.from_pretrained("Qwen/Qwen3-0.6B").config == tiny()
    assert asked == {"name": "Qwen/Qwen3-0.6B", "patterns": PATTERNS}
    monkeypatch.undo()
    with pytest.raises(FileNotFoundError, match="Qwen/Qwen3-0.6B"):
        GPT.from_pretrained("Qwen/Qwen3-0.6B")  # offline: HF_HUB_OFFLINE is set


def shard(directory: Path) -> dict:
    """Write the model as transformers would in shards; returns the index."""
    peer(random_model(tiny())).save_pretrained(directory, max_shard_size="10KB")
    (directory / "model.safetensors").unlink(missing_ok=True)
    return json.loads((directory / "model.safetensors.index.json").read_text())


def test_a_missing_shard_is_named(saved):
    name = shard(saved)["weight_map"][NAME]
    (saved / name).unlink()
    refusal(saved, name, kind=FileNotFoundError)


# ------------------------------------------------------------------------------------ hostile files


def header_of(file: Path) -> tuple[dict, bytes]:
    content = file.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + size]), content[8 + size :]


@pytest.mark.parametrize("lie", ["longer", "overlap", "shape", "beyond", "huge header", "no json"])
def test_a_header_that_lies_is_refused(saved, lie):
    file = saved / "model.safetensors"
    header, data = header_of(file)
    start, end = header[NAME]["data_offsets"]
    if lie == "longer":
        header[NAME]["data_offsets"] = [start, end + 4]
    elif lie == "overlap":
        header[NAME]["data_offsets"] = [0, end - start]
    elif lie == "shape":
        header[NAME]["shape"] = [48, 2**40]
    elif lie == "beyond":
        header[NAME]["data_offsets"] = [2**60, 2**60 + end - start]
    text = b"{" if lie == "no json" else json.dumps(header).encode()
    size = 2**62 if lie == "huge header" else len(text)
    file.write_bytes(struct.pack("<Q", size) + text + data)
    refusal(saved, "model.safetensors")


@pytest.mark.parametrize(
    "elsewhere", ["../outside/model.safetensors", "{absolute}", "..", "", "a/../../x", 7, None]
)
def test_an_index_that_points_outside_its_directory_is_refused(tmp_path, elsewhere):
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    random_model(tiny()).save_pretrained(outside)
    index = shard(inside)
    if elsewhere == "{absolute}":
        elsewhere = str(outside / "model.safetensors")
    index["weight_map"] = dict.fromkeys(index["weight_map"], elsewhere)
    (inside / "model.safetensors.index.json").write_text(json.dumps(index))
    refusal(inside, "model.safetensors.index.json")


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {}}'])
def test_an_index_that_is_not_one_is_refused(tmp_path, text):
    shard(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    refusal(tmp_path)


class Trap:
    """Unpickled, or imported, it leaves a file behind."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("disguise", ["pytorch_model.bin", "model.safetensors", "in the index"])
def test_a_checkpoint_cannot_execute_code(saved, disguise):
    """A pickle beside, or in place of, the weights; custom code named by the config."""
    mark = saved / "it ran"
    trap = pickle.dumps(Trap(mark))
    code = f"open({str(mark)!r}, 'w')\n"
    for name in ("modeling_evil.py", "configuration_evil.py", "__init__.py", "sitecustomize.py"):
        (saved / name).write_text(code)
    edit_config(
        saved,
        auto_map={
            "AutoConfig": "configuration_evil.Config",
            "AutoModelForCausalLM": "modeling_evil.Model",
        },
        trust_remote_code=True,
    )
    if disguise == "pytorch_model.bin":
        (saved / disguise).write_bytes(trap)
        assert GPT.from_pretrained(saved).config == tiny()  # the pickle beside is not looked at
        (saved / "model.safetensors").unlink()
        refusal(saved, "model.safetensors", kind=FileNotFoundError)
    elif disguise == "model.safetensors":
        (saved / disguise).write_bytes(trap)
        refusal(saved, disguise)
    else:
        (saved / "pytorch_model.bin").write_bytes(trap)
        index = {"weight_map": {NAME: "pytorch_model.bin"}}
        (saved / "model.safetensors.index.json").write_text(json.dumps(index))
        refusal(saved, "pytorch_model.bin")
    assert not mark.exists()
    pickle.loads(trap)
    assert mark.exists()  # the trap was armed


# ------------------------------------------------------------------------------------------ memory

MEASURE = """
import re, sys, threading, time
import torch
from model import GPT

def anonymous():
    return 1024 * int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1])

GPT.from_pretrained(sys.argv[1] + "/warm")  # what the libraries take the first time
before, peak, done = anonymous(), [0], threading.Event()
def watch():
    while not done.is_set():
        peak[0] = max(peak[0], anonymous())
        time.sleep(0.002)
watcher = threading.Thread(target=watch)
watcher.start()
dtype = None if sys.argv[2] == "stored" else torch.bfloat16
model = GPT.from_pretrained(sys.argv[1] + "/large", dtype=dtype)
done.set(), watcher.join()
weights = sum(p.numel() * p.element_size() for p in model.parameters())
print(weights, max(peak[0], anonymous()) - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="RssAnon is Linux's")
@pytest.mark.parametrize("shards", ["one file", "sharded"])
@pytest.mark.parametrize("dtype", ["stored", "bfloat16"])
def test_loading_1_gb_takes_less_than_1_2_times_the_weights(dtype, shards, tmp_path):
    random_model(tiny()).save_pretrained(tmp_path / "warm")
    config = tiny(
        vocab_size=32000,
        hidden_size=1024,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=64,
        intermediate_size=3328,
    )
    with torch.device("meta"):
        model = GPT(config)
    model = model.to_empty(device="cpu")
    model.lm_head.weight = model.model.embed_tokens.weight
    model.init_weights()
    if shards == "one file":
        model.save_pretrained(tmp_path / "large")
    else:
        peer(model).save_pretrained(tmp_path / "large", max_shard_size="300MB")
    del model
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path), dtype],
        cwd=Path(__file__).parent.parent,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    weights, peak = map(int, done.stdout.split())
    print(f"{dtype}, {shards}: weights {weights / 1e9:.3f} GB, RssAnon {peak / weights:.3f} times")
    assert weights > (0.9e9 if dtype == "stored" else 0.45e9)
    assert peak < 1.2 * weights
