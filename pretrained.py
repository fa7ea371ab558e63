"""Hugging Face model directories: what model.py reads and writes, checked before it is believed.

`decoder_fields` and `read_config` turn a config.json into the shape of the decoder, or refuse it by
name; `read` and `write` move the tensors; `local_directory` finds the files, here or on the hub.
Only JSON and safetensors files are opened, which are data and never code.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

Config = TypeVar("Config")

# What is written besides the shape, so that transformers opens the directory as Qwen3.
QWEN3 = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_act": "silu",
    "attention_bias": False,
    "use_sliding_window": False,
}
# What transformers takes for a field that a Qwen3 config.json leaves out.
QWEN3_LEFT_OUT = {"head_dim": 128, "rope_theta": 1e4, "tie_word_embeddings": False}
REQUIRED = "vocab_size hidden_size num_hidden_layers num_attention_heads intermediate_size".split()


def decoder_fields(config: dict, known: list[str]) -> dict:
    """The `known` fields of a config.json, in one spelling. ValueError for another architecture."""
    if not isinstance(config, dict):
        raise ValueError(f"it holds a {type(config).__name__} and not the fields of a model")
    model_type = config.get("model_type")
    if model_type not in ("qwen3", "minimind"):
        raise ValueError(
            f"model_type is {model_type!r}: only dense Qwen3 and MiniMind-3 can be read"
        )
    if model_type == "qwen3":
        config = QWEN3_LEFT_OUT | config
    # transformers 5 keeps theta and scaling together in `rope_parameters`; before, in two fields.
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    refused = {
        "attention_bias": config.get("attention_bias", False),
        "use_sliding_window": config.get("use_sliding_window", False),
        "use_moe": config.get("use_moe", False),
        "quantization_config": config.get("quantization_config"),
        "layer_types": set(config.get("layer_types") or []) - {"full_attention"},
        "hidden_act": config.get("hidden_act", "silu") != "silu" and config["hidden_act"],
        "partial_rotary_factor": rope.get("partial_rotary_factor", 1) != 1,
    }
    for name, value in refused.items():
        if value:
            raise ValueError(f"{name} = {value!r} is another architecture than this decoder's")
    missing = [name for name in REQUIRED if name not in config]
    if missing:
        raise ValueError(f"these fields are missing: {', '.join(missing)}")
    values = {name: value for name, value in config.items() if name in known}
    if "rope_theta" in rope:
        values["rope_theta"] = rope.pop("rope_theta")
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    values["rope_scaling"] = None if rope_type == "default" else rope
    return values


def read_config(directory: Path, from_dict: Callable[[dict], Config]) -> Config:
    """from_dict of the directory's config.json; ValueError that names the file and the field."""
    file = directory / "config.json"
    try:
        config = from_dict(json.loads(file.read_text()))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file}: {error}") from error
    layers, stored = config.num_hidden_layers, len(tensor_files(directory))
    if layers > stored:  # before a model of as many layers is built, if only on the meta device
        raise ValueError(
            f"{file}: num_hidden_layers is {layers}, but the weights are only {stored} tensors"
        )
    return config


def write(directory: Path, config: dict, tensors: dict[str, Tensor]) -> None:
    """Write config.json and model.safetensors."""
    directory.mkdir(parents=True, exist_ok=True)
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    content = json.dumps(QWEN3 | config | {"dtype": dtype}, indent=2)
    (directory / "config.json").write_text(content + "\n")
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def read(
    directory: Path,
    expected: dict[str, torch.Size],
    device: torch.device | str,
    dtype: torch.dtype | None,
) -> dict[str, Tensor]:
    """The tensors of these names and shapes, copied to the device; dtype None: as stored.

    All names and shapes are compared before any memory is taken. Then the tensors are copied one by
    one, so that the peak is the weights and one tensor.
    """
    where = tensor_files(directory)
    if "lm_head.weight" not in expected:
        where.pop("lm_head.weight", None)  # some releases store a tied head all the same
    for name in sorted(expected.keys() | where.keys()):
        if name not in where:
            raise ValueError(f"{directory}: tensor {name} is missing")
        file, shape = where[name]
        if name not in expected:
            raise ValueError(f"{file}: tensor {name} is not part of this model")
        if shape != tuple(expected[name]):
            raise ValueError(
                f"{file}: tensor {name} has shape {shape}, "
                f"but config.json asks for {tuple(expected[name])}"
            )
    tensors = {}
    for name, (file, _) in where.items():
        # Opened anew for each: one handle would keep every page that it has read in memory.
        with safe_open(file, framework="pt") as opened:
            stored = opened.get_tensor(name)
        tensors[name] = torch.empty(stored.shape, dtype=dtype or stored.dtype, device=device)
        tensors[name].copy_(stored)
    return tensors


def local_directory(directory_or_hub_id: str | Path) -> Path:
    """The directory itself, or the hub's files for an id such as "Qwen/Qwen3-0.6B"."""
    directory = Path(directory_or_hub_id)
    if not directory.exists():
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (
            HfHubHTTPError,
            HFValidationError,
            LocalEntryNotFoundError,
        )

        try:
            wanted = ["*.json", "*.safetensors"]
            return Path(snapshot_download(str(directory_or_hub_id), allow_patterns=wanted))
        except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
            raise FileNotFoundError(
                f"{directory_or_hub_id} is not a directory here, and the Hugging Face hub gave none"
            ) from error
    if not (directory / "config.json").is_file():
        raise FileNotFoundError(f"{directory} holds no config.json: it is not a model directory")
    return directory


def tensor_files(directory: Path) -> dict[str, tuple[Path, tuple[int, ...]]]:
    """Each stored tensor's file and shape, read from the headers of the safetensors files alone."""
    index = directory / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise ValueError(f"{index} is not an index of safetensors files ({error})") from error
    where = {}
    for name in names:
        # A bare name: a path could lead out of the directory.
        if not isinstance(name, str) or not re.fullmatch(r"[^/\\]+\.safetensors", name):
            raise ValueError(f"{index}: {name!r} is not a safetensors file of this directory")
        file = directory / name
        if not file.is_file():
            raise FileNotFoundError(f"{file} is missing")
        try:
            with safe_open(file, framework="pt") as tensors:
                for key in tensors.keys():
                    stored = tensors.get_slice(key)
                    if stored.get_dtype() not in ("F64", "F32", "BF16", "F16"):
                        raise ValueError(f"{file}: tensor {key} is {stored.get_dtype()}, not float")
                    where[key] = (file, tuple(stored.get_shape()))
        except SafetensorError as error:
            raise ValueError(f"{file} is cut short or not a safetensors file ({error})") from error
    return where
