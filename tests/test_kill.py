"""Kill training in the middle of every write, and at any moment: nothing is lost, not one bit.

The short tests train in children of a server that has imported everything (multiprocessing's
"forkserver"), so that a process costs a fork and no import. A child counts its `Writes`, and sends
SIGKILL to itself at a chosen one. The long tests (--slow) send SIGKILL from outside, at moments
that nobody chose, to `python train.py` and to one of two processes of torchrun.
"""

import contextlib
import hashlib
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch
from tqdm import tqdm

import checkpoint
import report
import train
from config import TrainConfig, UserError

TESTS = Path(__file__).parent
REPO = TESTS.parent
OPTIONS = dict(data="corpus", tokenizer="bytes", max_seq_len=16, batch_size=4, device="cpu")
OPTIONS |= dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
OPTIONS |= dict(intermediate_size=24, dropout=0.1, warmup_steps=2, eval_every=10**6)
OPTIONS |= dict(sample_tokens=0, log_every=1, save_every=1, keep_checkpoints=1)

needs_fork = pytest.mark.skipif(
    "forkserver" not in multiprocessing.get_all_start_methods(),
    reason="a process for each kill takes too long where a process cannot be forked",
)


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    """A directory with 20 short texts to train on and 4 to validate on; its runs go there too."""
    rng = random.Random(0)
    (tmp_path / "corpus").mkdir()
    for name, rows in (("train", 20), ("val", 4)):
        texts = ["".join(rng.choices("abcde ", k=rng.randint(3, 15))) for _ in range(rows)]
        lines = [json.dumps({"text": text}) for text in texts]
        (tmp_path / "corpus" / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def contents(step: Path) -> str:
    """A digest of the weights and of everything that --resume needs, but for the time it took."""
    state = checkpoint.load_training_state(step)
    del state["progress"]["seconds"]
    weights = (step / "model.safetensors").read_bytes()
    return hashlib.sha256(weights + repr(plain(state)).encode()).hexdigest()


def plain(value: object) -> object:
    """Tensors as lists of their numbers, which are exact as text."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {name: plain(inner) for name, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def losses(run: Path) -> list[tuple]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"], line.get("val_loss")) for line in lines]


def newest_whole(run: Path) -> int:
    """The step of the newest checkpoint, or 0; each that is there must be whole."""
    for step in checkpoint.saved_steps(run):
        checkpoint.load_model(str(step), "cpu", None)  # both compare the checksums first
        state = checkpoint.load_training_state(step)
        assert step.name == f"step_{state['progress']['step']:08d}"
    return newest_step(run)


def newest_step(run: Path) -> int:
    """The step that the newest checkpoint is called by, or 0."""
    return max((int(step.name[5:]) for step in checkpoint.saved_steps(run)), default=0)


# ---------------------------------------------------------------------------- at a chosen write


class Writes:
    """Counts the calls of this process that change the disk; kills it at the one that is `fatal`.

    half: in the middle of that one, if it writes a file; otherwise before it.
    os.fsync is not among them: it changes nothing that another process could see.
    """

    # The function, and which of its arguments is the path.
    OF_FILES = [
        (Path, "write_text", 0),
        (torch, "save", 1),
        (safetensors.torch, "serialize_file", 1),
    ]
    OF_NAMES = [(os, "rename", 1), (os, "replace", 1), (os, "unlink", 0), (os, "rmdir", 0)]
    OF_NAMES += [(os, "mkdir", 0)]

    def __init__(self, fatal: int | None, half: bool):
        self.done: list[tuple[str, str]] = []  # what was called, and for which file
        self.fatal = fatal
        for owner, name, place in self.OF_FILES + self.OF_NAMES:
            within = half and (owner, name, place) in self.OF_FILES
            setattr(owner, name, self.counted(getattr(owner, name), place, within))

    def counted(self, function, place: int, within: bool):
        def call(*arguments, **options):
            path = Path(arguments[place])
            self.done.append((function.__name__, path.name))
            is_fatal = len(self.done) - 1 == self.fatal
            if is_fatal and not within:
                os.kill(os.getpid(), signal.SIGKILL)
            result = function(*arguments, **options)
            if is_fatal:
                os.truncate(path, path.stat().st_size // 2)
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call


def train_in_child(workplace: Path, fatal: int | None, half: bool, options: dict) -> None:
    """What a child does: train.main with these options, in that directory."""
    os.chdir(workplace)
    torch.set_num_threads(1)
    # To be fast: the options come as they are, and neither a picture nor a physical disk matters.
    train.parse_config = lambda *_: TrainConfig(**options)
    report.draw_curve = lambda run: None
    os.fsync = lambda descriptor: None
    tqdm.set_lock(threading.RLock())  # its own is a semaphore, which a kill would leave behind
    writes = Writes(fatal, half)
    with open("log", "w") as log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        train.main([])
    with open("writes.json", "w") as file:
        json.dump(writes.done, file)


class Children:
    """Training runs in children of a server that has imported everything."""

    def __init__(self):
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["torch._inductor", "matplotlib.figure", "test_kill"])
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", os.pathsep.join([str(REPO), str(TESTS)]))
            self.run(int)  # which starts the server

    def run(self, function, *arguments) -> int:
        """Call it in a child. Returns the exit status; -9 for one that was killed."""
        process = self.context.Process(target=function, args=arguments)
        process.start()
        process.join()
        return process.exitcode

    def train(self, workplace: Path, run: str, *, fatal=None, half=False, **options) -> int:
        options = OPTIONS | {"out_dir": run} | options
        status = self.run(train_in_child, workplace, fatal, half, options)
        assert status in (0, -signal.SIGKILL), (workplace / "log").read_text()
        return status


@pytest.fixture(scope="module")
def children() -> Children:
    return Children()


@needs_fork
def test_killed_before_and_within_every_write_a_run_ends_as_if_undisturbed(workplace, children):
    steps = dict(max_steps=2)
    whole = workplace / "whole"
    children.train(workplace, "first", **steps)  # fills the cache of the data
    children.train(workplace, "whole", **steps)
    writes = json.loads((workplace / "writes.json").read_text())
    finals = [place for place, (call, name) in enumerate(writes) if name.startswith("step_0")]
    files = [name for _, name, _ in Writes.OF_FILES]
    moments = [(place, False) for place in range(len(writes))]
    moments += [(place, True) for place, (call, _) in enumerate(writes) if call in files]
    assert len(moments) > 50 and len(finals) >= 2
    for place, half in moments:
        run = workplace / f"run_{place}_{half}"
        where = f"{'within' if half else 'before'} {writes[place]}, number {place}"
        status = children.train(workplace, run.name, fatal=place, half=half, **steps)
        assert status == -signal.SIGKILL, where
        # What was renamed into place before that moment is found, whole, and nothing else.
        renamed = [
            name for call, name in writes[:place] if call == "rename" and name[:5] == "step_"
        ]
        assert newest_whole(run) == len(renamed), where
        if half and (run / "metrics.jsonl").exists():  # as if it had written only half of a line
            with (run / "metrics.jsonl").open("r+b") as file:
                file.truncate(max(0, file.seek(0, os.SEEK_END) - 10))
        children.train(workplace, run.name, resume=True, **steps)
        assert contents(run / "step_00000002") == contents(whole / "step_00000002"), where
        assert losses(run) == losses(whole), where
        assert not list(run.glob(".partial*")), where


@needs_fork
def test_killed_again_and_again_a_run_ends_as_if_undisturbed(workplace, children):
    """The resumed process is killed too, wherever it is by then."""
    rng = random.Random(0)
    steps = dict(max_steps=6, keep_checkpoints=2)
    children.train(workplace, "whole", **steps)
    kills, newest = 0, 0
    while children.train(
        workplace,
        "run",
        fatal=rng.randrange(50),
        half=rng.random() < 0.5,
        resume=True,
        **steps,
    ):
        kills += 1
        assert newest_whole(workplace / "run") >= newest
        newest = newest_whole(workplace / "run")
    assert kills >= 6
    whole, run = workplace / "whole", workplace / "run"
    assert contents(run / "step_00000006") == contents(whole / "step_00000006")
    assert losses(run) == losses(whole)


# ----------------------------------------------------------------------------------- two at once


def hold(run: Path, is_held, may_end) -> None:
    with checkpoint.RunLock(run) as lock:
        lock.take(make_directory=True)
        is_held.set()
        may_end.wait()


@needs_fork
@pytest.mark.parametrize("end", ["kill", "exit"])
def test_a_second_process_is_refused_until_the_first_has_ended(
    workplace, children, monkeypatch, end
):
    monkeypatch.chdir(workplace)
    run = workplace / "run"
    is_held, may_end = children.context.Event(), children.context.Event()
    first = children.context.Process(target=hold, args=(run, is_held, may_end))
    first.start()
    is_held.wait()
    with pytest.raises(UserError, match=f"process {first.pid} on .* training in .*run_2"):
        train.train(TrainConfig(out_dir=str(run), **OPTIONS))
    first.kill() if end == "kill" else may_end.set()
    first.join()
    with checkpoint.RunLock(run) as lock:
        lock.take()


def test_a_run_that_began_while_this_one_was_starting_is_not_overwritten(tmp_path):
    run = tmp_path / "run"
    with checkpoint.RunLock(run) as lock:
        lock.take()  # there is nothing yet
        assert not run.exists()
        checkpoint.start_run(run, TrainConfig(), 0)  # by another one, which has ended meanwhile
        with pytest.raises(UserError, match="another process began a run in .*--resume"):
            lock.take(make_directory=True)


def test_only_the_first_process_of_a_job_takes_the_lock(tmp_path, monkeypatch):
    with checkpoint.RunLock(tmp_path) as first, checkpoint.RunLock(tmp_path) as second:
        first.take()
        with pytest.raises(UserError, match="is training in"):
            second.take()
        monkeypatch.setenv("RANK", "1")
        second.take()


# ------------------------------------------------------------------------- at any moment (--slow)

PYTHON = [sys.executable, "-u"]
TORCHRUN = [*PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]


@contextlib.contextmanager
def started(workplace: Path, launcher: list[str], run: str, **options):
    """The real program; the block is left when it has ended."""
    flags = [f"--{name}={value}" for name, value in (OPTIONS | options).items()]
    process = subprocess.Popen(
        [*launcher, str(REPO / "train.py"), f"--out_dir={run}", "--resume=True", *flags],
        cwd=workplace,
        env=os.environ | {"OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"},
        stdout=subprocess.PIPE,
        stderr=(workplace / "log").open("w"),
        text=True,
    )
    try:
        yield process
    except BaseException:
        process.terminate()  # and not SIGKILL: torchrun takes its processes with it
        raise
    finally:
        process.communicate()


def finish(workplace: Path, launcher: list[str], run: str, **options) -> str:
    """Train to the end, saving seldom, which changes no bit. Returns the digest of the result."""
    with started(workplace, launcher, run, **options | {"save_every": 10**6}) as process:
        pass
    assert process.returncode == 0, (workplace / "log").read_text()[-2000:]
    return contents(workplace / run / f"step_{options['max_steps']:08d}")


def ranks_of(process: subprocess.Popen) -> dict[int, int]:
    """torchrun's processes: {rank: process id}."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    variables = {int(child): Path(f"/proc/{child}/environ").read_bytes() for child in children}
    found = {
        child: [v for v in text.split(b"\0") if v[:5] == b"RANK="]
        for child, text in variables.items()
    }
    return {int(rank[0][5:]): child for child, rank in found.items() if rank}


def kill_at_a_random_moment(
    workplace: Path, process: subprocess.Popen, rng: random.Random, rank: int | None
) -> None:
    """SIGKILL while it starts or, more often, in one of its next steps, each of which saves.

    Steps are counted and not seconds, so that a slow machine comes as far as a fast one.
    """
    awaited = rng.choice(["device", "training"] + 6 * ["model"])  # the last line before the loop
    for line in process.stdout:
        if line.startswith(awaited):
            break
    if awaited == "model":
        run = workplace / "run"
        step = newest_step(run) + rng.randrange(30)
        while newest_step(run) < step and process.poll() is None:
            time.sleep(0.01)
    time.sleep(rng.uniform(0, 0.2 if awaited == "model" else 2))
    ended = "it ended by itself: more steps are needed, or it failed:\n"
    assert process.poll() is None, ended + (workplace / "log").read_text()[-2000:]
    os.kill(process.pid if rank is None else ranks_of(process)[rank], signal.SIGKILL)


def kill_again_and_again(workplace, command, seed: int, ranks: list, **options) -> int:
    """Kill a run once for each of `ranks` (None: its only process), then let it end as if
    undisturbed. The newest step that it had by the last kill."""
    rng = random.Random(seed)
    expected = finish(workplace, command, "whole", **options)
    newest = 0
    for rank in ranks:
        with started(workplace, command, "run", **options) as process:
            kill_at_a_random_moment(workplace, process, rng, rank)
        assert newest_whole(workplace / "run") >= newest
        newest = newest_whole(workplace / "run")
    print(f"seed {seed}: {len(ranks)} kills up to step {newest}")
    assert finish(workplace, command, "run", **options) == expected
    assert losses(workplace / "run") == losses(workplace / "whole")
    return newest


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="SIGKILL is POSIX's")
@pytest.mark.parametrize("seed", range(10))
def test_ten_kills_at_random_moments(workplace, seed):
    newest = kill_again_and_again(workplace, PYTHON, seed, [None] * 10, max_steps=500)
    assert newest > 10


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the processes in /proc")
@pytest.mark.parametrize("seed", range(2))
def test_five_kills_of_one_of_two_ranks(workplace, seed):
    newest = kill_again_and_again(workplace, TORCHRUN, seed, [0, 1, 0, 1, 0], max_steps=300)
    assert newest > 5


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the processes in /proc")
def test_torchrun_restarts_a_run_with_a_killed_rank(workplace):
    """The new processes find the lock free, and go on from the newest checkpoint."""
    options = dict(max_steps=300)
    expected = finish(workplace, TORCHRUN, "whole", **options)
    with started(workplace, [*TORCHRUN, "--max_restarts=2"], "run", **options) as process:
        for rank in range(2):
            kill_at_a_random_moment(workplace, process, random.Random(rank), rank)
    assert process.returncode == 0, (workplace / "log").read_text()[-2000:]
    assert contents(workplace / "run" / "step_00000300") == expected
    assert losses(workplace / "run") == losses(workplace / "whole")
