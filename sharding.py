"""FSDP2: a model, and its optimizers' state, of which each process holds a part.

Every tensor is cut along its first dimension, a part for each process. A block's whole weights
exist only while the block computes, so a model may be larger than one device. Read in this order:
  1. shard_model, gather_model     a whole model to parts, and back
  2. save_moments, load_moments    the optimizers' state, written by any number of processes and
                                   read by any other; in safetensors files, which are never code
"""

import shutil
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from config import UserError
from model import GPT

# ------------------------------------------------------------------------------------ the model


def shard_model(whole: GPT, device: torch.device, dtype: torch.dtype, compile: bool) -> GPT:
    """The same model in fp32 parts on the devices of all processes: block by block, then the rest.

    whole: with its weights in the first process, on the meta device in the others. They go over one
    by one: no process but the first ever holds them all, and no device does.

    dtype is what the blocks' weights are gathered in: autocast's. Gathered in fp32, autocast would
    make copies of them, and keep the copies of all blocks from the forward to the backward. What
    stays fp32: the stream between the blocks, the embedding, the last norm, the head, and the sums
    of gradients over the processes. With bf16 the norms' weights inside the blocks are rounded
    while they compute, which autocast alone does not do.
    """
    with torch.device("meta"):
        model = GPT(whole.config)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    for block in model.model.layers:
        if compile:  # what lies between gathering and freeing
            block.forward = torch.compile(block.forward)
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh)
    model.to_empty(device=device)  # each process makes room for its parts alone
    weights = whole.state_dict()
    for name, part in model.named_parameters():
        tensor = weights[name]
        if dist.get_rank() == 0:
            tensor = tensor.to(device)
        else:
            tensor = torch.empty_like(tensor, device=device)
        part.data.copy_(distribute_tensor(tensor, mesh, cast(DTensor, part).placements))
    return model


def gather_model(model: GPT) -> GPT | None:
    """The whole model on the first process's CPU, to save it there; None in the others.

    All processes call it. The tensors are gathered one by one: a device holds its parts and one
    whole tensor at a time.
    """
    cast(FSDPModule, model).reshard()  # an evaluation leaves what is outside the blocks whole
    tensors = {}
    for name, part in model.named_parameters():
        tensor = cast(DTensor, part.detach()).full_tensor()
        if dist.get_rank() == 0:
            tensors[name] = tensor.cpu()
    if dist.get_rank() != 0:
        return None
    with torch.device("meta"):
        whole = GPT(model.config)
    whole.load_state_dict(tensors, assign=True, strict=False)  # a tied head is not among them
    whole.tie_weights()
    return whole


# ------------------------------------------------------------------------ the optimizers' state


def save_moments(
    optimizers: list[torch.optim.Optimizer], directory: Path, group: dist.ProcessGroup
) -> None:
    """Each process writes its part of the optimizers' state; all of them call it.

    Raises UserError in all processes if one could not write.
    """
    moments = named([optimizer.state_dict() for optimizer in optimizers])
    writer = dcp.HuggingFaceStorageWriter(str(directory), save_distributed=True)
    try:
        dcp.save(moments, storage_writer=writer, process_group=group)
    except dcp.api.CheckpointException as error:
        rank, (reason, _) = next(iter(error.failures.items()))
        shutil.rmtree(directory, ignore_errors=True)
        raise UserError(
            f"could not save {directory}: process {rank}: {reason}; "
            f"the checkpoints before it are untouched"
        ) from error


def load_moments(
    optimizers: list[torch.optim.Optimizer],
    whole: list[dict] | None,
    directory: Path,
    group: dist.ProcessGroup | None,
) -> list[dict]:
    """State dicts for these optimizers: in parts where their parameters are parts, else whole.

    They come from `whole`, the state dicts of a run whose processes held everything, or, where that
    is None, from what save_moments wrote into `directory`. Raises UserError where that is damaged.
    """
    parameters = [[p for g in o.param_groups for p in g["params"]] for o in optimizers]
    if whole is None:
        moments = read_moments(parameters, directory, group)
    else:
        moments = {
            name: like_parameter(value, parameter_of(name, parameters))
            for name, value in named(whole).items()
        }
    states = [{"state": {}, "param_groups": o.state_dict()["param_groups"]} for o in optimizers]
    for name, value in moments.items():
        place, number, key = name.split(".")
        states[int(place)]["state"].setdefault(int(number), {})[key] = value
    return states


def named(state_dicts: list[dict]) -> dict[str, Tensor]:
    """The tensors of optimizers' state dicts by "optimizer.parameter.name", as in "1.0.exp_avg"."""
    return {
        f"{place}.{number}.{name}": value
        for place, state_dict in enumerate(state_dicts)
        for number, state in state_dict["state"].items()
        for name, value in state.items()
    }


def parameter_of(name: str, parameters: list[list[Tensor]]) -> Tensor:
    """The parameter that a tensor of that name belongs to."""
    place, number, _ = name.split(".")
    return parameters[int(place)][int(number)].detach()


def read_moments(
    parameters: list[list[Tensor]], directory: Path, group: dist.ProcessGroup | None
) -> dict[str, Tensor]:
    """The tensors in `directory`, each cut as its parameter is. Raises UserError."""
    moments = {}
    try:
        reader = dcp.HuggingFaceStorageReader(str(directory))
        metadata = reader.read_metadata().state_dict_metadata
        for name, stored in cast(dict[str, TensorStorageMetadata], metadata).items():
            parameter = parameter_of(name, parameters)
            if stored.size not in (parameter.shape, torch.Size([])):  # (): AdamW counts its steps
                raise ValueError(f"{name} is {list(stored.size)}, not {list(parameter.shape)}")
            if sum(chunk.sizes.numel() for chunk in stored.chunks) != stored.size.numel():
                raise ValueError(f"a part of {name} is missing")
            room = parameter if stored.size == parameter.shape else torch.empty(())
            moments[name] = torch.zeros_like(room, dtype=stored.properties.dtype)
        dcp.load(moments, storage_reader=reader, process_group=group)
    except (Exception, dcp.api.CheckpointException) as error:
        raise UserError(f"{directory} is missing or damaged ({error})") from error
    return moments


def like_parameter(value: Tensor, parameter: Tensor) -> Tensor:
    """A whole tensor, cut as the parameter is where it has its shape."""
    if not isinstance(parameter, DTensor) or value.shape != parameter.shape:
        return value
    mesh, placements = parameter.device_mesh, parameter.placements
    part = distribute_tensor(value.to(parameter.device), mesh, placements, src_data_rank=None)
    return part.clone()  # which lets go of the whole
