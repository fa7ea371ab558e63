"""A run on disk: out/<run>/, and how its checkpoints are written whole, found again and pruned.

out/<run>/train_config.json        the options that the run was started with
out/<run>/metrics.jsonl, loss.png  its figures, and their picture
out/<run>/step_00002000/           a Hugging Face model directory: config.json, model.safetensors,
                                   tokenizer.json, tokenizer_config.json, generation_config.json,
                                   and what --resume needs besides: training_state.pt, and under
                                   FSDP training_state/

A checkpoint is written into a directory of another name, synced to disk, and renamed: at any
instant, also after `kill -9`, a directory called step_* is whole. What a disk does to it later
shows when it is read: step.sha256 has the checksums of its files. One process at a time writes to
a run, the one with its RunLock.
"""

import contextlib
import hashlib
import json
import math
import os
import platform
import re
import shutil
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError

from config import TrainConfig, UserError, read_saved_options
from data.tokenizer import Tokenizer
from files import own_file, read_json
from locks import file_lock
from model import GPT
from pretrained import local_directory
from report import read_metrics

STEP_NAME = re.compile(r"step_\d{8,}")
SUMS = "step.sha256"  # `sha256sum -c step.sha256` checks it too
MODEL_FILES = (
    "config.json model.safetensors tokenizer.json tokenizer_config.json generation_config.json"
).split()


def saved_steps(run: Path) -> list[Path]:
    """The run's whole checkpoints, oldest first."""
    if not os.path.isdir(run):
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
    if os.path.isfile(directory / "config.json"):  # False, too, for what no file can be called
        return directory
    if saved_steps(directory):
        return saved_steps(directory)[-1]
    if os.path.exists(directory):
        raise UserError(f"{path} holds no checkpoint: neither step_* directories nor a config.json")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", path) and not path.startswith(("out/", ".")):
        return path
    raise UserError(f"{path} does not exist")


def load_model(path: str | None, device: torch.device | str, dtype: torch.dtype | None) -> tuple:
    """(model, tokenizer, its directory) of a run, a checkpoint or a hub id. Raises UserError."""
    try:
        directory = find_checkpoint(path)
        check(Path(directory), MODEL_FILES)
        directory = local_directory(directory)
        model = GPT.from_pretrained(directory, device=device, dtype=dtype)
    except (FileNotFoundError, ValueError) as error:
        raise UserError(str(error)) from error
    tokenizer = Tokenizer.load(directory)
    if tokenizer.vocab_size > model.config.vocab_size:
        raise UserError(
            f"{directory}: its tokenizer has {tokenizer.vocab_size} ids, but the embedding only "
            f"{model.config.vocab_size} rows: put the tokenizer.json there that these weights were "
            f"trained with, or train a new model with this one: --tokenizer={directory} "
            f"and no --init_from"
        )
    return model, tokenizer, directory


def save_checkpoint(
    run: Path,
    model: GPT,
    tokenizer: Tokenizer,
    state: dict,
    keep: int,
    shards: Path | None = None,
) -> Path:
    """Write run/step_XXXXXXXX whole, then remove all but the newest `keep` and the best.

    `state` is what --resume needs: plain values and tensors. Its "progress" has the step, and
    the validation loss at that step or None, which says which checkpoint is the best. `shards`
    is a directory of this run with more of it, and becomes the checkpoint's training_state/.
    A step that is on disk already stays as it is: a run passes each step once, and to replace a
    directory is to have none for an instant.
    Raises UserError where the disk does not take it; the earlier checkpoints are untouched then.
    """
    step, val_loss = state["progress"]["step"], state["progress"]["val_loss"]
    final = run / f"step_{step:08d}"
    if final.exists():
        prune(run, keep)
        return final
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
        if shards is not None:
            shards.rename(partial / "training_state")
        files = sorted(path for path in partial.rglob("*") if path.is_file())
        sums = [f"{sha256(file)}  {file.relative_to(partial).as_posix()}\n" for file in files]
        (partial / SUMS).write_text("".join(sums), encoding="utf-8", newline="\n")
        for path in [*partial.rglob("*"), partial]:
            sync(path)
        partial.rename(final)
        sync(run)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch wraps a full disk in both
        shutil.rmtree(partial, ignore_errors=True)
        earlier = [step for step in saved_steps(run) if step != final]
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
            # Renamed first: a half-removed directory must not be called step_*. Where that fails,
            # as on Windows while someone reads the checkpoint, the next save tries again.
            with contextlib.suppress(OSError):
                step.rename(run / f".partial_{step.name}")
    sweep(run)


def sweep(run: Path) -> None:
    """Remove what was being written, or removed, when a process was killed. Needs the RunLock."""
    for left in run.glob(".partial_*"):
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                left.unlink()


def val_loss_of(step: Path) -> float | None:
    """The validation loss at a checkpoint; None where it is not known, or not a finite number."""
    try:
        val_loss = read_json(step, "step.json").get("val_loss")
    except ValueError:
        return None
    return val_loss if isinstance(val_loss, float) and math.isfinite(val_loss) else None


def load_training_state(step: Path) -> dict:
    """What save_checkpoint was given, on the CPU. Data only: nothing in the file can run."""
    file = step / "training_state.pt"
    shards = [path.relative_to(step).as_posix() for path in (step / "training_state").glob("*")]
    check(step, [file.name, *shards])
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
        if not isinstance(state, dict) or not isinstance(state.get("progress"), dict):
            raise ValueError("it is not what a run leaves to go on from")
        return state
    except Exception as error:  # a damaged file raises almost anything
        raise UserError(f"{file} is missing or damaged; {way_out(step)}") from error


def check(directory: Path, names: list[str]) -> None:
    """Raise UserError, naming the file, where one is not what save_checkpoint wrote.

    All of a file is read, though its size would tell that it was cut short: one flipped bit makes
    a model that is worse, or wrong, and says nothing. SHA-256, because processors have instructions
    for it: 4 GB take some 3 s, less than to read them from most disks, and the reading that follows
    finds them in memory. Without such instructions they take some 10 s.
    A directory that has no checksums, as those of others, is taken as it is.
    """
    try:
        files = {name: own_file(directory, name) for name in names}
    except ValueError as error:
        raise UserError(str(error)) from error
    sums = directory / SUMS
    if not os.path.isfile(sums):
        return
    with sums.open(encoding="utf-8", errors="replace") as opened:
        written = opened.read(1 << 20).splitlines()
    for name, file in files.items():
        try:
            is_whole = file.is_file() and f"{sha256(file)}  {name}" in written
        except OSError:  # the disk does not give it back
            is_whole = False
        if not is_whole:
            raise UserError(
                f"{file} is missing or damaged: its checksum is not the one in {SUMS} (if you "
                f"changed it yourself, remove {sums}); {way_out(directory)}"
            )


def way_out(step: Path) -> str:
    """What a person can do about a damaged checkpoint."""
    steps = saved_steps(step.parent)
    before = steps[: steps.index(step)] if step in steps else []
    if not before:
        return "there is no checkpoint before it"
    return (
        f"the checkpoint before it is {before[-1]}: use that one, or remove {step} to go on "
        f"from there with --resume"
    )


def read_run(run: Path) -> dict | None:
    """The options that the run in this directory was started with; None where there is no run."""
    file = run / "train_config.json"
    if not os.path.isfile(file):  # unlike Path's, it bears names that no file can have
        if saved_steps(run):
            raise UserError(f"{run} holds checkpoints but no train_config.json: not a run to go on")
        return None
    return read_saved_options(file)


class RunLock(contextlib.ExitStack):
    """with RunLock(run) as lock: from lock.take() on, no other process writes to this run.

    It ends with the block, and with the process, also after `kill -9`. In a job of several
    processes the first one takes it for all.
    """

    def __init__(self, run: Path):
        super().__init__()
        self.run, self.is_taken = run, False

    def take(self, make_directory: bool = False) -> None:
        """Take it, if it is not ours yet. Where the run has no directory: nothing, or make it.

        Raises UserError where another process has it, or begins a run just as we do, and where
        the directory cannot be written to.
        """
        if self.is_taken or os.environ.get("RANK", "0") != "0":
            return
        holder = self.run / ".lock_holder"
        try:
            if make_directory:
                self.run.mkdir(parents=True, exist_ok=True)
            if not self.run.is_dir():
                return
            self.enter_context(file_lock(self.run / ".lock", wait=False))
            holder.write_text(f"process {os.getpid()} on {platform.node()}", encoding="utf-8")
        except BlockingIOError as error:
            who = holder.read_text(encoding="utf-8") if holder.is_file() else "another process"
            raise UserError(
                f"{who} is training in {self.run} now: wait until it ends, or start another run "
                f"beside it with --out_dir={free_name(self.run)}"
            ) from error
        except (OSError, ValueError) as error:  # ValueError: a null byte in the name
            raise UserError(f"--out_dir={self.run} cannot be written to: {error}") from error
        if make_directory and read_run(self.run) is not None:
            raise UserError(
                f"another process began a run in {self.run} while this one was starting; go on "
                f"with it by --resume, or start another one with --out_dir={free_name(self.run)}"
            )
        self.is_taken = True


def start_run(run: Path, config: TrainConfig, step: int) -> None:
    """Make the run's directory; write its options; forget figures behind `step`, where it starts.

    A run that was killed may have logged steps that it is now about to repeat, and have left files
    half-written. Needs the RunLock. Raises UserError where the disk does not take it.
    """
    kept = [json.dumps(line) for line in read_metrics(run) if line["step"] <= step]
    try:
        run.mkdir(parents=True, exist_ok=True)
        sweep(run)
        replace(run / "train_config.json", json.dumps(asdict(config), indent=2) + "\n")
        replace(run / "metrics.jsonl", "".join(line + "\n" for line in kept))
    except OSError as error:
        raise UserError(f"--out_dir={run} cannot be written to: {error}") from error


def free_name(run: Path) -> Path:
    """A directory beside the run that does not exist yet: out/tiny_2, out/tiny_3, ..."""
    number = 2
    while run.with_name(f"{run.name}_{number}").exists():
        number += 1
    return run.with_name(f"{run.name}_{number}")


def write_json(file: Path, value: dict) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8", newline="\n")


def replace(file: Path, text: str) -> None:
    """Write a file of the run; whoever reads it meanwhile, or is killed, has the old one whole."""
    partial = file.with_name(f".partial_{file.name}")
    partial.write_text(text, encoding="utf-8", newline="\n")
    sync(partial)
    partial.replace(file)


def sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Wait until a file, or a directory's list of names, is on the disk."""
    if path.is_dir() and os.name == "nt":
        return  # Windows cannot open a directory
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
