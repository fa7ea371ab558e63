"""A run on disk: out/<run>/, and how its checkpoints are written whole, found again and pruned.

out/<run>/train_config.json        the options that the run was started with
out/<run>/metrics.jsonl, loss.png  its figures, and their picture
out/<run>/step_00002000/           a Hugging Face model directory: config.json, model.safetensors,
                                   tokenizer.json, tokenizer_config.json, generation_config.json,
                                   and what --resume needs besides: training_state.pt

A checkpoint is written into a directory of another name, synced to disk, and renamed: at any
instant, also after `kill -9`, a directory called step_* is whole.
"""

import json
import os
import pickle
import re
import shutil
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError

from config import TrainConfig, UserError, read_saved_options
from data.tokenizer import Tokenizer
from model import GPT
from pretrained import local_directory
from report import read_metrics

STEP_NAME = re.compile(r"step_\d{8,}")


def saved_steps(run: Path) -> list[Path]:
    """The run's whole checkpoints, oldest first."""
    if not run.is_dir():
        return []
    steps = [entry for entry in run.iterdir() if STEP_NAME.fullmatch(entry.name)]
    return sorted(steps, key=lambda step: int(step.name.removeprefix("step_")))


def find_checkpoint(path: str | None) -> Path | str:
    """The model directory that a person means by `path`; None: the newest run under out/.

    A run stands for its newest checkpoint. What does not exist here and looks like a hub id is
    returned as it is. Raises UserError where there is nothing.
    """
    if path is None:
        newest = [saved_steps(run)[-1] for run in Path("out").glob("*") if saved_steps(run)]
        if not newest:
            raise UserError(
                "there is no run under out/ to sample from; train one first: "
                "python train.py configs/tiny.py"
            )
        return max(newest, key=lambda step: step.stat().st_mtime)
    directory = Path(path)
    if (directory / "config.json").is_file():
        return directory
    if saved_steps(directory):
        return saved_steps(directory)[-1]
    if directory.exists():
        raise UserError(f"{path} holds no checkpoint: neither step_* directories nor a config.json")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", path) and not path.startswith(("out/", ".")):
        return path
    raise UserError(f"{path} does not exist")


def load_model(path: str | None, device: torch.device | str, dtype: torch.dtype | None) -> tuple:
    """(model, tokenizer, its directory) of a run, a checkpoint or a hub id. Raises UserError."""
    try:
        directory = local_directory(find_checkpoint(path))
        model = GPT.from_pretrained(directory, device=device, dtype=dtype)
    except (FileNotFoundError, ValueError) as error:
        raise UserError(str(error)) from error
    tokenizer = Tokenizer.load(directory)
    if tokenizer.vocab_size > model.config.vocab_size:
        raise UserError(
            f"{directory}: its tokenizer has ids up to {tokenizer.vocab_size - 1}, but the model's "
            f"embedding only {model.config.vocab_size} rows; they are not of the same model"
        )
    return model, tokenizer, directory


def save_checkpoint(run: Path, model: GPT, tokenizer: Tokenizer, state: dict, keep: int) -> Path:
    """Write run/step_XXXXXXXX whole, then remove all but the newest `keep` and the best.

    `state` is what --resume needs: plain values and tensors. Its "progress" has the step, and
    the validation loss at that step or None, which says which checkpoint is the best.
    Raises UserError where the disk does not take it; the earlier checkpoints are untouched then.
    """
    step, val_loss = state["progress"]["step"], state["progress"]["val_loss"]
    final = run / f"step_{step:08d}"
    partial = run / f".partial_{final.name}"
    shutil.rmtree(partial, ignore_errors=True)
    special_ids = {"eos_token_id": tokenizer.stop_ids, "pad_token_id": tokenizer.pad_token_id}
    if tokenizer.bos_token_id is not None:
        special_ids["bos_token_id"] = tokenizer.bos_token_id
    try:
        model.save_pretrained(partial)
        tokenizer.save(partial)
        write_json(partial / "generation_config.json", special_ids)
        write_json(partial / "step.json", {"step": step, "val_loss": val_loss})
        torch.save(state, partial / "training_state.pt")
        for file in partial.iterdir():
            sync(file)
        sync(partial)
        if final.exists():  # the same step, saved again
            shutil.rmtree(final)
        partial.rename(final)
        sync(run)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch wraps a full disk in both
        shutil.rmtree(partial, ignore_errors=True)
        earlier = saved_steps(run)
        raise UserError(
            f"could not save {final}: {error}; "
            f"the last good checkpoint is {earlier[-1] if earlier else 'none'}"
        ) from error
    prune(run, keep)
    return final


def prune(run: Path, keep: int) -> None:
    """Remove all checkpoints but the newest `keep` and the one with the lowest validation loss."""
    steps = saved_steps(run)
    losses = {step: val_loss_of(step) for step in steps}
    evaluated = [step for step in steps if losses[step] is not None]
    best = min(evaluated, key=losses.get, default=None)
    for step in steps[:-keep]:
        if step != best:
            doomed = run / f".partial_{step.name}"
            step.rename(doomed)  # so that a half-removed directory is not called step_*
            shutil.rmtree(doomed)


def val_loss_of(step: Path) -> float | None:
    """The validation loss at a checkpoint; None where it is not known."""
    try:
        return json.loads((step / "step.json").read_text())["val_loss"]
    except (OSError, ValueError, TypeError, LookupError):
        return None


def load_training_state(step: Path) -> dict:
    """What save_checkpoint was given, on the CPU. Data only: nothing in the file can run."""
    file = step / "training_state.pt"
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
        raise UserError(
            f"{file} is missing or damaged, so the run cannot go on from there; remove {step} to "
            f"go on from the checkpoint before it, or start anew from its weights with --init_from"
        ) from error


def read_run(run: Path) -> dict | None:
    """The options that the run in this directory was started with; None where there is no run."""
    file = run / "train_config.json"
    if not file.is_file():
        if saved_steps(run):
            raise UserError(f"{run} holds checkpoints but no train_config.json: not a run to go on")
        return None
    return read_saved_options(file)


def start_run(run: Path, config: TrainConfig, step: int) -> None:
    """Make the run's directory; write its options; forget figures behind `step`, where it starts.

    A run that was killed may have logged steps that it is now about to repeat.
    """
    run.mkdir(parents=True, exist_ok=True)
    partial = run / ".partial_train_config.json"
    write_json(partial, asdict(config))
    partial.replace(run / "train_config.json")
    kept = [json.dumps(line) for line in read_metrics(run) if line["step"] <= step]
    partial = run / ".partial_metrics.jsonl"
    partial.write_text("".join(line + "\n" for line in kept))
    partial.replace(run / "metrics.jsonl")


def free_name(run: Path) -> Path:
    """A directory beside the run that does not exist yet: out/tiny_2, out/tiny_3, ..."""
    number = 2
    while run.with_name(f"{run.name}_{number}").exists():
        number += 1
    return run.with_name(f"{run.name}_{number}")


def write_json(file: Path, value: dict) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n")


def sync(path: Path) -> None:
    """Wait until a file, or a directory's list of names, is on the disk."""
    if path.is_dir() and os.name == "nt":
        return  # Windows cannot open a directory
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
