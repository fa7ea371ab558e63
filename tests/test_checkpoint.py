"""Checkpoints on bad disks: damaged ones are noticed, full and read-only disks lose nothing.

Everything here calls checkpoint.py itself, on a tiny model; tests/test_kill.py trains, and kills.
"""

import contextlib
import errno
import os
import shutil
import subprocess
import tracemalloc
import zipfile
from pathlib import Path

import pytest
import safetensors.torch
import torch

import checkpoint
import train
from config import TrainConfig, UserError
from data.tokenizer import Tokenizer
from model import GPT, GPTConfig

FILES = [*checkpoint.MODEL_FILES, "training_state.pt"]


def state_at(step: int, val_loss: float | None = None) -> dict:
    progress = {"step": step, "val_loss": val_loss}
    return {"progress": progress, "optimizers": [{"momentum": torch.full((8, 4), float(step))}]}


def save(run: Path, step: int, keep: int = 9, val_loss: float | None = None, **options) -> Path:
    """A checkpoint whose weights all are its step."""
    model = GPT(GPTConfig(300, 16, 1, 2, 24))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(step)
    tokenizer, state = Tokenizer.load("bytes"), state_at(step, val_loss)
    return checkpoint.save_checkpoint(run, model, tokenizer, state, keep, **options)


def numbers(run: Path) -> list[int]:
    """The steps of the run's checkpoints, each of which is opened."""
    found = []
    for step in checkpoint.saved_steps(run):
        model, _, _ = checkpoint.load_model(str(step), "cpu", None)
        state = checkpoint.load_training_state(step)
        found.append(state["progress"]["step"])
        assert step.name == f"step_{found[-1]:08d}"
        assert all((p == found[-1]).all() for p in model.parameters())
        assert (state["optimizers"][0]["momentum"] == found[-1]).all()
    return found


def files_in(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


# ------------------------------------------------------------------------------------- checksums


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("two") / "run"
    save(run, 1), save(run, 2)
    return run


@pytest.fixture
def run(two_steps: Path, tmp_path: Path) -> Path:
    """A copy, to spoil, of a run with two checkpoints."""
    return Path(shutil.copytree(two_steps, tmp_path / "run"))


def spoil(file: Path, how: str) -> None:
    content = bytearray(file.read_bytes())
    if how == "cut":
        del content[-1:]
    elif how == "empty":
        content.clear()
    else:
        content[int(how) % len(content)] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("how", ["0", "12345", "-1", "cut", "empty", "gone"])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_named_and_the_checkpoint_before_is_offered(run, name, how):
    step = run / "step_00000002"
    spoil(step / name, how) if how != "gone" else (step / name).unlink()
    with pytest.raises(UserError) as error:
        if name == "training_state.pt":
            checkpoint.load_model(str(step), "cpu", None)  # the weights are not damaged
            checkpoint.load_training_state(step)
        else:
            checkpoint.load_model(str(run), "cpu", None)
    assert f"{step / name} is missing or damaged" in str(error.value)
    assert f"the checkpoint before it is {run / 'step_00000001'}" in str(error.value)
    shutil.rmtree(step)  # what the sentence says
    assert numbers(run) == [1]


def test_of_the_first_checkpoint_none_is_offered(run):
    spoil(run / "step_00000001" / "model.safetensors", "-1")
    with pytest.raises(UserError, match="there is no checkpoint before it"):
        checkpoint.load_model(str(run / "step_00000001"), "cpu", None)


@pytest.mark.parametrize("how", ["0", "70", "empty"])
def test_damaged_checksums_are_not_taken_for_none(run, how):
    step = run / "step_00000002"
    spoil(step / checkpoint.SUMS, how)
    with pytest.raises(UserError, match="is missing or damaged"):
        checkpoint.load_model(str(run), "cpu", None)
        checkpoint.load_training_state(step)


def test_a_file_that_was_changed_on_purpose_can_be_opened(run):
    step = run / "step_00000002"
    with (step / "config.json").open("a") as file:
        file.write("\n")
    with pytest.raises(UserError, match=f"if you changed it yourself, remove {step}/step.sha256"):
        checkpoint.load_model(str(step), "cpu", None)
    (step / checkpoint.SUMS).unlink()
    assert numbers(run) == [1, 2]


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="needs sha256sum")
def test_the_checksums_are_those_of_sha256sum_and_of_all_files(two_steps):
    step = two_steps / "step_00000002"
    told = subprocess.run(
        ["sha256sum", "--check", "--strict", checkpoint.SUMS],
        cwd=step,
        capture_output=True,
        text=True,
        check=True,
    )
    checked = [line.removesuffix(": OK") for line in told.stdout.splitlines()]
    assert sorted([*checked, checkpoint.SUMS]) == sorted(files_in(step))
    assert set(FILES) < set(checked)


def test_transformers_opens_a_checkpoint(two_steps):
    import transformers

    step = two_steps / "step_00000002"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(step)
    ours, _, _ = checkpoint.load_model(str(step), "cpu", None)
    assert {name: t.tolist() for name, t in theirs.state_dict().items()} == {
        name: t.tolist() for name, t in ours.state_dict().items()
    }
    assert len(transformers.AutoTokenizer.from_pretrained(step)("ab").input_ids) == 2


def test_nothing_outside_the_directory_is_read(run, tmp_path):
    step = run / "step_00000002"
    (step / "training_state.pt").rename(tmp_path / "elsewhere.pt")
    (step / "training_state.pt").symlink_to(tmp_path / "elsewhere.pt")
    with pytest.raises(UserError, match="leads out of its directory"):
        checkpoint.load_training_state(step)


def test_the_shards_of_several_processes_are_checked_too(tmp_path):
    run = tmp_path / "run"
    save(run, 1)
    shards = run / ".partial_training_state"
    shards.mkdir()
    (shards / "part.safetensors").write_bytes(b"numbers")
    step = save(run, 2, shards=shards)
    assert not shards.exists() and numbers(run) == [1, 2]
    spoil(step / "training_state" / "part.safetensors", "3")
    with pytest.raises(UserError, match="part.safetensors is missing or damaged.*step_00000001"):
        checkpoint.load_training_state(step)


# --------------------------------------------------------------- what --resume can go on from


def resumable(optimizer: str) -> tuple[list, dict]:
    """(optimizers, what a run would save of them) after a step of a tiny model."""
    model = GPT(GPTConfig(64, 8, 1, 2, 12))
    optimizers = train.make_optimizers(model, TrainConfig(optimizer=optimizer))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for one in optimizers:
        one.step()
    state = {
        "progress": vars(train.Progress(step=2, val_loss=float("nan"))),
        "optimizers": [one.state_dict() for one in optimizers],
        "scaler": torch.amp.GradScaler("cpu").state_dict(),
        "data": "0123",
    }
    return optimizers, state


def check_saved(step: Path, state: dict, optimizers: list) -> None:
    torch.save(state, step / "training_state.pt")
    loaded = checkpoint.load_training_state(step)
    checkpoint.check_state(loaded, step, train.Progress, optimizers)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_state_of_ours_is_one_to_go_on_from(tmp_path, optimizer):
    optimizers, state = resumable(optimizer)
    untouched = [{"state": {}, "param_groups": []} for _ in optimizers]
    for change in ({}, {"optimizers": None}, {"optimizers": untouched}, {"scaler": {}}):
        check_saved(tmp_path, state | change, optimizers)


GONE = object()
MUON, ADAM = ("optimizers", 0, "state", 0), ("optimizers", 1, "state", 0)
STRANGE = [
    ("data", GONE),
    ("data", torch.ones(2)),
    ("scaler", GONE),
    ("scaler", torch.ones(2)),
    ("scaler", "scale", "1"),
    ("scaler", "_growth_tracker", 2**40),
    ("progress", "step", "2"),
    ("progress", "step", -5),
    ("progress", "step", True),
    ("progress", "step", GONE),
    ("progress", "tokens", None),
    ("progress", "seconds", float("nan")),
    ("progress", "val_loss", "1"),
    ("progress", "x", 1),
    ("optimizers", GONE),
    ("optimizers", []),
    ("optimizers", {}),
    ("optimizers", [1, 2]),
    ("optimizers", 0, "state", 7),
    (*MUON, GONE),
    (*MUON, [1]),
    (*MUON, "momentum_buffer", GONE),
    (*MUON, "momentum_buffer", torch.zeros(3)),
    (*MUON, "momentum_buffer", torch.zeros(1, 1).expand(8, 8)),  # one number, as often as 64
    (*ADAM, "step", 3),
    (*ADAM, "exp_avg", torch.zeros(64, 9)),
    (*ADAM, "more", torch.zeros(64, 8)),
]


@pytest.mark.parametrize("place", STRANGE, ids=lambda place: ".".join(map(str, place[:-1])))
def test_a_state_that_no_run_left_is_refused_by_its_field(run, place):
    optimizers, state = resumable("muon")
    step = run / "step_00000002"
    (step / checkpoint.SUMS).unlink()
    *path, key, value = place
    inner = state
    for name in path:
        inner = inner[name]
    if value is GONE:
        del inner[key]
    else:
        inner[key] = value
    with pytest.raises(UserError) as error:
        check_saved(step, state, optimizers)
    assert f"{step / 'training_state.pt'}: {place[0]}" in str(error.value)
    assert f"the checkpoint before it is {run / 'step_00000001'}" in str(error.value)
    assert len(str(error.value)) < 600


def unpacks_to_much(file: Path) -> None:
    torch.save({"progress": {}, "x": torch.zeros(1000)}, file)
    with zipfile.ZipFile(file) as stored:
        entries = [(entry.filename, stored.read(entry)) for entry in stored.infolist()]
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, content in entries:
            packed.writestr(name, content)


class Room:
    """Unpickled, it is a gigabyte, of a file of a kilobyte; torch.load allows that."""

    def __reduce__(self):
        return bytearray, (10**9,)


def in_torchs_older_format(file: Path) -> None:
    """Which torch.load reads where the file does not begin as a zip file, whatever follows."""
    torch.save({"progress": {}}, file)
    zipped = file.read_bytes()
    torch.save({"progress": {}, "x": Room()}, file, _use_new_zipfile_serialization=False)
    file.write_bytes(file.read_bytes() + zipped)


BOMBS = {
    "packed": unpacks_to_much,
    "room": lambda file: torch.save({"progress": {}, "x": Room()}, file),
    "older": in_torchs_older_format,
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_training_state_takes_no_more_memory_than_its_file(tmp_path, bomb):
    file = tmp_path / "training_state.pt"
    BOMBS[bomb](file)
    tracemalloc.start()
    with pytest.raises(UserError, match="training_state.pt is missing or damaged"):
        checkpoint.load_training_state(tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10e6


# ------------------------------------------------------------------------- what we may not read


@contextlib.contextmanager
def unreadable(path: Path):
    """Within the block nobody may read it; root, who always may, is somebody else."""
    if not hasattr(os, "geteuid"):
        pytest.skip("Windows has other permissions")
    mode, user = path.stat().st_mode, os.geteuid()
    path.chmod(0)
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        if user == 0:
            os.seteuid(user)
        path.chmod(mode)


@pytest.fixture
def in_out(run, monkeypatch):
    """Inside a directory with the runs out/old and out/new, which everybody may read."""
    root = run.parent
    (root / "out").mkdir()
    shutil.copytree(run, root / "out" / "old")
    run.rename(root / "out" / "new")
    os.utime(root / "out" / "new" / "step_00000002", (2e9, 2e9))
    root.chmod(0o755)
    monkeypatch.chdir(root)
    return Path("out")


def test_a_run_that_we_may_not_read_is_a_sentence_and_not_in_the_way_of_others(in_out):
    assert checkpoint.find_checkpoint(None) == in_out / "new" / "step_00000002"
    with unreadable(in_out / "new"):
        assert checkpoint.find_checkpoint(None) == in_out / "old" / "step_00000002"
        with pytest.raises(UserError, match="out/new cannot be read: Permission denied"):
            checkpoint.load_model("out/new", "cpu", None)
    for name in ("step_00000002", "step_00000002/config.json", "step_00000002/tokenizer.json"):
        with unreadable(in_out / "new" / name), pytest.raises(UserError, match="out/new"):
            checkpoint.load_model("out/new", "cpu", None)
    checkpoint.start_run(in_out / "new", TrainConfig(), 2)
    with unreadable(in_out / "new" / "metrics.jsonl"):
        with pytest.raises(UserError, match="metrics.jsonl cannot be read: Permission denied"):
            checkpoint.start_run(in_out / "new", TrainConfig(), 2)


# -------------------------------------------------------------------------- what a run keeps


def test_a_step_that_is_saved_again_stays_whole_at_every_instant(run):
    before = files_in(run / "step_00000002")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "save", None)  # nothing is written, so nothing can be lost
        assert save(run, 2, keep=1) == run / "step_00000002"
    assert files_in(run / "step_00000002") == before
    assert numbers(run) == [2]


def test_the_checkpoint_that_a_run_goes_on_from_stays_until_a_new_one_is_whole(run, monkeypatch):
    checkpoint.start_run(run, TrainConfig(), 2)
    assert numbers(run) == [1, 2]
    real, seen = os.rename, []

    def rename(old, new):
        seen.append((Path(new).name, numbers(run)))
        real(old, new)

    monkeypatch.setattr(os, "rename", rename)
    save(run, 3, keep=1)
    assert seen[0] == ("step_00000003", [1, 2])
    assert {name: there for name, there in seen[1:]} == {
        ".partial_step_00000001": [1, 2, 3],
        ".partial_step_00000002": [2, 3],
    }
    assert numbers(run) == [3]


def test_a_loss_that_is_not_finite_is_nobodys_best(tmp_path):
    for step, val_loss in enumerate([float("nan"), 2.0, 1.0, float("inf"), None, 3.0], start=1):
        save(tmp_path, step, keep=1, val_loss=val_loss)
    assert numbers(tmp_path) == [3, 6]


def test_what_cannot_be_removed_is_tried_again_with_the_next_save(tmp_path, monkeypatch):
    save(tmp_path, 1)
    with monkeypatch.context() as patch:
        for name in ("rmdir", "unlink"):
            patch.setattr(os, name, raise_error(errno.EBUSY))
        save(tmp_path, 2, keep=1)
    assert numbers(tmp_path) == [2]
    assert [path.name for path in tmp_path.glob(".partial*")] == [".partial_step_00000001"]
    with monkeypatch.context() as patch:
        real = os.rename
        old_ones = lambda new: Path(new).name.startswith(".partial")  # noqa: E731
        patch.setattr(
            os, "rename", lambda a, b: raise_error(errno.EACCES)() if old_ones(b) else real(a, b)
        )
        save(tmp_path, 3, keep=1)
    assert numbers(tmp_path) == [2, 3]
    save(tmp_path, 4, keep=1)
    assert numbers(tmp_path) == [4]
    assert not list(tmp_path.glob(".partial*"))


def test_a_run_that_goes_on_sweeps_what_a_kill_left(run):
    (run / ".partial_step_00000003").mkdir()
    (run / ".partial_step_00000003" / "model.safetensors").write_bytes(b"half")
    for name in (".partial_metrics.jsonl", ".partial_loss.png", "notes.txt", ".mine"):
        (run / name).write_text("x")
    checkpoint.start_run(run, TrainConfig(), 2)
    names = {path.name for path in run.iterdir()}
    assert names >= {"notes.txt", ".mine", "train_config.json", "metrics.jsonl"}
    assert not [name for name in names if name.startswith(".partial")]
    assert numbers(run) == [1, 2]


def test_ctrl_c_in_a_save_leaves_what_is_hidden_and_swept_later(run, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", interrupt)
        with pytest.raises(KeyboardInterrupt):
            save(run, 3)
    assert (run / ".partial_step_00000003" / "model.safetensors").exists()
    assert numbers(run) == [1, 2]
    checkpoint.start_run(run, TrainConfig(), 2)
    assert not list(run.glob(".partial*"))
    save(run, 3)
    assert numbers(run) == [1, 2, 3]


# ------------------------------------------------------------------- disks that take nothing more


def raise_error(number: int):
    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    return fail


WRITERS = [(os, "fsync"), (os, "mkdir"), (os, "rename"), (Path, "write_text"), (torch, "save")]
WRITERS += [(safetensors.torch, "serialize_file")]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.EDQUOT])
def test_whichever_write_fails_the_checkpoints_stay_and_the_last_is_named(run, number):
    for failing in range(99):
        calls = []

        def counted(function, failing=failing, calls=calls):
            def call(*arguments, **options):
                calls.append(function)
                if len(calls) - 1 == failing:
                    raise_error(number)()
                return function(*arguments, **options)

            return call

        with pytest.MonkeyPatch.context() as patch:
            for owner, name in WRITERS:
                patch.setattr(owner, name, counted(getattr(owner, name)))
            try:
                save(run, 3)
            except UserError as error:
                assert os.strerror(number) in str(error)
                assert str(error).endswith(f"the last good checkpoint is {run / 'step_00000002'}")
        if (run / "step_00000003").exists():  # only what came after the rename has failed
            assert numbers(run) == [1, 2, 3]
            shutil.rmtree(run / "step_00000003")
        assert numbers(run) == [1, 2]
        assert not list(run.glob(".partial*"))
        if len(calls) == failing:
            break  # all of them went well
    assert failing > 20


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
@pytest.mark.parametrize("owner, name", [(Path, "write_text"), (os, "replace"), (os, "fsync")])
def test_a_run_that_cannot_be_started_says_so(run, monkeypatch, owner, name, number):
    checkpoint.start_run(run, TrainConfig(), 2)
    before = files_in(run)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, raise_error(number))
        with pytest.raises(UserError, match=f"cannot be written to.*{os.strerror(number)}"):
            checkpoint.start_run(run, TrainConfig(seed=2), 2)
    left = {name: text for name, text in files_in(run).items() if name[:8] != ".partial"}
    assert left == before
    assert numbers(run) == [1, 2]


@pytest.fixture
def small_disk(tmp_path: Path):
    """A file system of one megabyte, which the test may fill."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a file system can be mounted by root alone, on Linux")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_disk_that_is_really_full_loses_nothing(small_disk):
    """With less and less room left than a checkpoint needs: each file meets the end of the disk."""
    run, filler = small_disk / "run", small_disk / "filler"
    save(run, 1)
    needed = sum(path.stat().st_size // 4096 + 1 for path in (run / "step_00000001").iterdir())
    failures = 0
    for pages in range(needed + 4):
        free = os.statvfs(small_disk).f_bavail
        filler.write_bytes(bytes(4096 * max(0, free - pages)))
        try:
            save(run, 2)
            break
        except UserError as error:
            failures += 1
            assert str(error).endswith(f"the last good checkpoint is {run / 'step_00000001'}")
        assert numbers(run) == [1]
        assert not list(run.glob(".partial*"))
        filler.unlink()
    assert failures >= needed - 2
    assert numbers(run) == [1, 2]
    filler.unlink()
    save(run, 3, keep=1)
    assert numbers(run) == [3]


def test_a_disk_that_becomes_read_only_loses_nothing(small_disk):
    run = small_disk / "run"
    save(run, 1)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(UserError, match="Read-only file system.*last good.*step_00000001"):
        save(run, 2)
    with pytest.raises(UserError, match="cannot be written to.*Read-only"):
        checkpoint.start_run(run, TrainConfig(), 1)
    with checkpoint.RunLock(run) as lock, pytest.raises(UserError, match="cannot be written to"):
        lock.take()
    assert numbers(run) == [1]
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    save(run, 2)
    assert numbers(run) == [1, 2]
