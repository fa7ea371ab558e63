"""Hugging Face model directories: what model.py reads and writes, checked before it is believed.

`decoder_fields` and `read_config` turn a config.json into the shape of the decoder, or refuse it by
name; `read` and `write` move the tensors; `local_directory` finds the files, here or on the hub.
Only JSON and safetensors files are opened, which are data and never code; only those that lie in
the directory; and what they claim is compared with their size before memory is taken for it.
"""

import json
import math
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from files import own_file, read_json, shown

if TYPE_CHECKING:
    from model import GPTConfig  # which imports this file

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
LARGEST = 10**15  # of any number in a config.json; torch takes whole ones of 64 bits
MOST_LAYERS = 1024  # no model has as many; each takes memory before its tensors are compared


def decoder_fields(config: dict, known: list[str]) -> dict:
    """The `known` fields of a config.json, in one spelling. ValueError for another architecture."""
    model_type = config.get("model_type")
    if model_type not in ("qwen3", "minimind"):
        raise ValueError(
            f"model_type is {shown(model_type)}: only dense Qwen3 and MiniMind-3 can be read"
        )
    if model_type == "qwen3":
        config = QWEN3_LEFT_OUT | config
    # transformers 5 keeps theta and scaling together in `rope_parameters`; before, in two fields.
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ValueError(f"rope_parameters must be an object, not {shown(rope)}")
    rope = dict(rope)
    kinds = config.get("layer_types") or []
    kinds = kinds if isinstance(kinds, list) else [kinds]
    refused = {
        "attention_bias": config.get("attention_bias", False),
        "use_sliding_window": config.get("use_sliding_window", False),
        "use_moe": config.get("use_moe", False),
        "quantization_config": config.get("quantization_config"),
        "layer_types": [kind for kind in kinds if kind != "full_attention"],
        "hidden_act": config.get("hidden_act", "silu") != "silu" and config["hidden_act"],
        "partial_rotary_factor": rope.get("partial_rotary_factor", 1) != 1,
    }
    for name, value in refused.items():
        if value:
            raise ValueError(f"{name} = {shown(value)} is another architecture than this decoder's")
    missing = [name for name in REQUIRED if config.get(name) is None]
    if missing:
        raise ValueError(f"these fields are missing: {', '.join(missing)}")
    if config.get("max_position_embeddings", 1) is None:
        raise ValueError("max_position_embeddings must be a whole number above 0, not null")
    values = {name: value for name, value in config.items() if name in known}
    if "rope_theta" in rope:
        values["rope_theta"] = rope.pop("rope_theta")
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    values["rope_scaling"] = None if rope_type == "default" else rope
    check_numbers(values)
    return values


# The numbers of rope_scaling that may be there, and the least that each may be.
ROPE_NUMBERS = {"factor": 1e-6, "original_max_position_embeddings": 0, "beta_fast": 0}
ROPE_NUMBERS |= {"beta_slow": 0, "attention_factor": 0, "mscale": 0, "mscale_all_dim": 0}


def check_numbers(values: dict) -> None:
    """Refuse, by name, what the decoder would fail to compute with, only much later."""
    scaling = values["rope_scaling"] or {}
    numbers = {name: (values[name], 1e-30) for name in ("rms_norm_eps",) if name in values}
    if "rope_theta" in values:  # YaRN divides by its logarithm
        numbers["rope_theta"] = (values["rope_theta"], 1.001 if scaling else 1e-6)
    for name, least in ROPE_NUMBERS.items():
        if scaling.get(name) is not None:
            numbers[name] = (scaling[name], least)
    for name, (value, least) in numbers.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not least <= value <= LARGEST:
            raise ValueError(
                f"{name} must be a number from {least:g} to {LARGEST:g}, not {shown(value)}"
            )
    for name, value in values.items():
        if type(value) is int and value > LARGEST:
            raise ValueError(f"{name} must be at most {LARGEST:g}, not {shown(value)}")
    tied = values.get("tie_word_embeddings", True)
    if not isinstance(tied, bool):
        raise ValueError(f"tie_word_embeddings must be true or false, not {shown(tied)}")


def read_config(directory: Path, from_dict: "Callable[[dict], GPTConfig]") -> "GPTConfig":
    """from_dict of the directory's config.json; ValueError that names the file and the field.

    What it claims is compared with what is stored before a model of that shape is built, though it
    be on the meta device.
    """
    file = directory / "config.json"
    content = read_json(directory, "config.json")
    try:
        config = from_dict(content)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{file}: {str(error)[:300]}") from error
    layers = config.num_hidden_layers
    if layers > MOST_LAYERS:
        raise ValueError(f"{file}: num_hidden_layers is {layers}, but at most {MOST_LAYERS} count")
    claimed = matrix_entries(config)
    stored = sum(math.prod(shape) for _, shape in tensor_files(directory).values())
    if claimed > 100 * stored:  # a tensor that is merely missing is named by `read`
        raise ValueError(
            f"{file}: vocab_size, hidden_size, num_hidden_layers, num_attention_heads, head_dim "
            f"and intermediate_size make {claimed:,} parameters, but only {stored:,} are stored"
        )
    return config


def matrix_entries(config: "GPTConfig") -> int:
    """How many numbers the matrices of such a model hold, a head like the embedding not counted."""
    heads = 2 * config.num_attention_heads + 2 * config.num_key_value_heads
    block = 3 * config.intermediate_size + heads * config.head_dim
    return (config.vocab_size + config.num_hidden_layers * block) * config.hidden_size


def write(directory: Path, config: dict, tensors: dict[str, Tensor]) -> None:
    """Write config.json and model.safetensors."""
    directory.mkdir(parents=True, exist_ok=True)
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    content = json.dumps(QWEN3 | config | {"dtype": dtype}, indent=2)
    (directory / "config.json").write_text(content + "\n", encoding="utf-8", newline="\n")
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    # It is written through a temporary file, which only its owner may read.
    shutil.copymode(directory / "config.json", directory / "model.safetensors")


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
    check_memory(directory, where, device, dtype)
    tensors = {}
    for name, (file, _) in where.items():
        # Opened anew for each: one handle would keep every page that it has read in memory.
        with safe_open(file, framework="pt") as opened:
            stored = opened.get_tensor(name)
        tensors[name] = torch.empty(stored.shape, dtype=dtype or stored.dtype, device=device)
        tensors[name].copy_(stored)
    return tensors


def check_memory(
    directory: Path,
    where: dict[str, tuple[Path, tuple[int, ...]]],
    device: torch.device | str,
    dtype: torch.dtype | None,
) -> None:
    """Refuse weights that memory does not hold. A file may have holes, and be larger than a disk.

    A CPU promises memory that it does not have, and then kills who believed it; GPUs say no.
    """
    size = sum(math.prod(shape) for _, shape in where.values())
    size *= dtype.itemsize if dtype else 2  # stored: float16 or larger
    if torch.device(device).type == "cpu" and size > physical_memory():
        raise ValueError(
            f"{directory}: the weights need {size / 2**30:,.1f} GiB, but this machine has "
            f"{physical_memory() / 2**30:,.1f} GiB of memory"
        )


def physical_memory() -> float:
    """Bytes of memory in this machine; where the system does not say, infinity."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return float("inf")


def local_directory(directory_or_hub_id: str | Path) -> Path:
    """The directory itself, or the hub's files for an id such as "Qwen/Qwen3-0.6B"."""
    directory = Path(directory_or_hub_id)
    if not os.path.exists(directory):  # False, too, for what no file can be called
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (
            HfHubHTTPError,
            HFValidationError,
            LocalEntryNotFoundError,
        )

        try:
            wanted = ["*.json", "*.safetensors", "chat_template.jinja"]
            return Path(snapshot_download(str(directory_or_hub_id), allow_patterns=wanted))
        except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
            raise FileNotFoundError(
                f"{directory_or_hub_id} is not a directory here, and the Hugging Face hub gave none"
            ) from error
    if not os.path.isfile(directory / "config.json"):  # False, too, where we may not look
        raise FileNotFoundError(f"{directory} holds no config.json: it is not a model directory")
    return directory


def tensor_files(directory: Path) -> dict[str, tuple[Path, tuple[int, ...]]]:
    """Each stored tensor's file and shape, read from the headers of the safetensors files alone."""
    index = directory / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.is_file():
        try:
            names = sorted(set(read_json(directory, index.name)["weight_map"].values()))
        except (TypeError, LookupError, AttributeError) as error:
            raise ValueError(f"{index} is not an index of safetensors files ({error})") from error
    where: dict[str, tuple[Path, tuple[int, ...]]] = {}
    for name in names:
        # A bare name: a path could lead out of the directory.
        if not isinstance(name, str) or not re.fullmatch(r"[^/\\]+\.safetensors", name):
            raise ValueError(f"{index}: {shown(name)} is not a safetensors file of this directory")
        file = own_file(directory, name)
        if not file.is_file():
            raise FileNotFoundError(f"{file} is missing")
        try:
            with safe_open(file, framework="pt") as tensors:
                for key in tensors.keys():
                    stored = tensors.get_slice(key)
                    if stored.get_dtype() not in ("F64", "F32", "BF16", "F16"):
                        raise ValueError(f"{file}: tensor {key} is {stored.get_dtype()}, not float")
                    if key in where:
                        raise ValueError(f"{file}: tensor {key} is in {where[key][0].name} too")
                    where[key] = (file, tuple(stored.get_shape()))
        except SafetensorError as error:
            raise ValueError(f"{file} is cut short or not a safetensors file ({error})") from error
        except (OSError, RuntimeError) as error:  # no permission; larger than any address space
            raise ValueError(f"{file} cannot be opened ({error})") from error
    return where
