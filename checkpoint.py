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
import pickletools
import platform
import re
import shutil
import zipfile
from dataclasses import asdict
from pathlib import Path
from typing import get_type_hints

import torch
from safetensors import SafetensorError
from torch import Tensor

from config import TrainConfig, UserError, checked, read_saved_options
from data.tokenizer import Tokenizer
from files import own_file, read_file, read_json, shown, sync
from locks import file_lock
from model import GPT
from pretrained import local_directory
from report import read_metrics

STEP_NAME = re.compile(r"step_\d{8,}")
SUMS = "step.sha256"  # `sha256sum -c step.sha256` checks it too
HOLDER = ".lock_holder"
MODEL_FILES = (
    "config.json model.safetensors tokenizer.json tokenizer_config.json generation_config.json"
).split()


def saved_steps(run: Path) -> list[Path]:
    """The run's whole checkpoints, oldest first. UserError where we may not look for them."""
    if not os.path.isdir(run):
        return []
    try:
        steps = [entry for entry in run.iterdir() if STEP_NAME.fullmatch(entry.name)]
    except OSError as error:
        raise UserError(f"{run} cannot be read: {error.strerror}") from error
    return sorted(steps, key=lambda step: int(step.name.removeprefix("step_")))


def find_checkpoint(path: str | None) -> Path | str:
    """The model directory that a person means by `path`; None: the newest run under out/.

    A run stands for its newest checkpoint. What does not exist here and looks like a hub id is
    returned as it is. Raises UserError where there is nothing.
    """
    if path is None:
        newest: list[Path] = []
        for run in Path("out").glob("*"):
            with contextlib.suppress(UserError):  # somebody else's
                newest += [step for step in saved_steps(run)[-1:] if os.path.exists(step)]
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
        if left.is_dir() and not left.is_symlink():
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


# What torch.save calls for plain values and fp32 tensors. torch.load would call more: bytearray.
CALLED = {"collections OrderedDict", "torch._utils _rebuild_tensor_v2", "torch FloatStorage"}


def load_training_state(step: Path) -> dict:
    """What save_checkpoint was given, on the CPU. Data only: nothing in the file can run, or takes
    more memory than the file has bytes. `check_state` says whether a run can go on from it."""
    file = step / "training_state.pt"
    shards = [path.relative_to(step).as_posix() for path in (step / "training_state").glob("*")]
    check(step, [file.name, *shards])
    try:
        check_archive(file)
        state = torch.load(file, map_location="cpu", weights_only=True)
        if not isinstance(state, dict) or not isinstance(state.get("progress"), dict):
            raise ValueError("it is not what a run leaves to go on from")
        return state
    except Exception as error:  # a damaged file raises almost anything
        raise UserError(f"{file} is missing or damaged; {way_out(step)}") from error


def check_archive(file: Path) -> None:
    """Refuse a file of torch.save's that would take more memory than room. Raises almost anything.

    It is a zip file, in which torch packs nothing; torch.load reads what begins otherwise too.
    """
    with file.open("rb") as opened, zipfile.ZipFile(opened) as archive:
        entries = archive.infolist()
        if sum(entry.file_size for entry in entries) > file.stat().st_size:
            raise ValueError("what is in it is larger than the file")
        for entry in entries:
            if entry.filename.lower().endswith(".pkl"):
                codes = pickletools.genops(archive.read(entry))
                called = {name for code, name, _ in codes if code.name == "GLOBAL"}
                if not called <= CALLED:
                    raise ValueError(f"it would call {called - CALLED}")
        opened.seek(0)
        if opened.read(4) != b"PK\3\4":
            raise ValueError("it does not begin as a zip file")


def check_state(
    state: dict, step: Path, progress: type, optimizers: list[torch.optim.Optimizer]
) -> None:
    """Refuse, by its field, what a run of this shape does not save: the file may be anybody's.

    `state` is what load_training_state gave, `progress` the class of its "progress". "optimizers"
    may be None: the moments lie beside it then, in parts, and are for `check_moments`.
    Raises UserError.
    """
    file = step / "training_state.pt"
    scaler = torch.amp.GradScaler("cpu").state_dict()
    parts = {"progress": get_type_hints(progress)}
    parts["scaler"] = {name: type(value) for name, value in scaler.items()}
    try:
        for part, kinds in parts.items():
            found = checked(state.get(part), dict, f"{file}: {part}")
            if part == "scaler" and not found:
                continue  # the run was not in fp16
            for name, kind in kinds.items():
                value = checked(found.get(name), kind, f"{file}: {part}.{name}")
                most = 2**31 if name == "_growth_tracker" else 2**63  # which torch keeps as int32
                if kind in (int, float) and not 0 <= value < most:
                    raise UserError(f"{file}: {part}.{name} = {shown(value)} is out of range")
            if len(found) > len(kinds):
                raise UserError(f"{file}: {part} holds more than {', '.join(kinds)}")
        checked(state.get("data"), str, f"{file}: data")
        if state.get("optimizers", "missing") is not None:
            check_moments(state.get("optimizers"), file, optimizers)
    except UserError as error:
        raise UserError(f"{error}; {way_out(step)}") from error


def check_moments(moments: object, file: Path, optimizers: list[torch.optim.Optimizer]) -> None:
    """Refuse moments that these optimizers do not have: of each parameter all that it keeps, in its
    shape, or nothing of any, as before the first step. Raises UserError."""
    if not isinstance(moments, list) or len(moments) != len(optimizers):
        raise UserError(f"{file}: optimizers is not a list of {len(optimizers)} states")
    for number, (optimizer, saved) in enumerate(zip(optimizers, moments, strict=True)):
        where = f"{file}: optimizers.{number}"
        states = checked(checked(saved, dict, where).get("state"), dict, f"{where}.state")
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if len(states) not in (0, len(parameters)):
            raise UserError(f"{where}.state is of {len(states)} parameters, not {len(parameters)}")
        for place, parameter in enumerate(parameters[: len(states)]):
            expected = {name: parameter.shape for name in ("exp_avg", "exp_avg_sq")} | {"step": ()}
            if isinstance(optimizer, torch.optim.Muon):
                expected = {"momentum_buffer": parameter.shape}
            kept = checked(states.get(place), dict, f"{where}.state.{place}")
            if kept.keys() != expected.keys():
                raise UserError(
                    f"{where}.state.{place} has {shown(list(kept))}, not {', '.join(expected)}"
                )
            for name, shape in expected.items():
                value = kept[name]
                if not isinstance(value, Tensor) or value.shape != shape:
                    raise UserError(f"{where}.state.{place}.{name} is no tensor {list(shape)}")
                if not value.is_contiguous():  # one number may stand for all, and then not change
                    raise UserError(f"{where}.state.{place}.{name} has strides {value.stride()}")


def check(directory: Path, names: list[str]) -> None:
    """Raise UserError, naming the file, where one is not what save_checkpoint wrote.

    All of a file is read, though its size would tell that it was cut short: one flipped bit makes
    a model that is worse, or wrong, and says nothing. SHA-256, because processors have instructions
    for it: 4 GB take some 3 s, less than to read them from most disks, and the reading that follows
    finds them in memory. Without such instructions they take some 10 s.
    A directory that has no checksums, as those of others, is taken as it is. One that has them for
    a file of terabytes, as a file of holes can be, is read for as long as that takes: end it.
    """
    sums = directory / SUMS
    try:
        files = {name: own_file(directory, name) for name in names}
        if not os.path.lexists(sums):
            return
        written = read_file(directory, SUMS, 1 << 20).decode("utf-8", "replace").splitlines()
    except ValueError as error:
        raise UserError(str(error)) from error
    for name, file in files.items():
        try:
            is_whole = f"{sha256(file)}  {name}" in written
        except OSError:  # it is gone, or the disk does not give it back
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
        try:
            if make_directory:
                self.run.mkdir(parents=True, exist_ok=True)
            if not self.run.is_dir():
                return
            self.enter_context(file_lock(self.run / ".lock", wait=False))
            replace(self.run / HOLDER, f"process {os.getpid()} on {platform.node()}")
        except BlockingIOError as error:
            raise UserError(
                f"{self.holder()} is training in {self.run} now: wait until it ends, or start "
                f"another run beside it with --out_dir={free_name(self.run)}"
            ) from error
        except (OSError, ValueError) as error:  # ValueError: a null byte in the name
            raise UserError(f"--out_dir={self.run} cannot be written to: {error}") from error
        if make_directory and read_run(self.run) is not None:
            raise UserError(
                f"another process began a run in {self.run} while this one was starting; go on "
                f"with it by --resume, or start another one with --out_dir={free_name(self.run)}"
            )
        self.is_taken = True

    def holder(self) -> str:
        """Who has the lock, as it says."""
        try:
            return read_file(self.run, HOLDER, 1000).decode("utf-8", "replace")
        except ValueError:  # it has not said so yet
            return "another process"


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
    partial.unlink(missing_ok=True)  # a link there would lead us elsewhere
    partial.write_text(text, encoding="utf-8", newline="\n")
    sync(partial)
    partial.replace(file)


def sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
