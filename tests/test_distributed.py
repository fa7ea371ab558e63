"""Several processes: DDP and FSDP2 on gloo give what one gives, and none is left waiting.

A job is a function that all its processes run: each leaves what it found in a file, and the tests
below compare that with what one process gives. To start processes is slow, so there are two jobs,
of two and of four processes, that do many things each; they fork after the imports. By hand:
python tests/test_distributed.py two 2 DIRECTORY. Only the last tests go through torchrun.
"""

import contextlib
import itertools
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

REPO = Path(__file__).parent.parent
sys.path[:0] = [str(REPO), str(REPO / "tests")]

import test_train as one  # noqa: E402  what one process does

import checkpoint  # noqa: E402
import muon  # noqa: E402
import sharding  # noqa: E402
import train  # noqa: E402
from config import TrainConfig, UserError  # noqa: E402
from data.batches import Batches  # noqa: E402
from data.tokenizer import Tokenizer  # noqa: E402

KINDS = ("ddp", "fsdp")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
RUN = ["--max_steps=6", "--save_every=3", "--eval_every=3", "--log_every=1", "--grad_accum=2"]


# ------------------------------------------------------------------------- what processes do


def run_job(job: str, processes: int, directory: Path) -> list[dict]:
    """What each process of the job found."""
    command = [sys.executable, __file__, job, str(processes), str(directory)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    files = [directory / f"{job}_{rank}.pt" for rank in range(processes)]
    return [torch.load(file, weights_only=True) for file in files]


def process(rank: int, job: str, processes: int) -> None:
    """One process of a job. They meet in a file, which unlike a port is nobody else's."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
    init, meetings = dist.init_process_group, itertools.count()

    def init_by_file(backend: str, store: None, **place) -> None:
        init(backend, store=dist.FileStore(f"{job}_meeting_{next(meetings)}"), **place)

    dist.init_process_group = init_by_file
    torch.save(JOBS[job](rank, processes), f"{job}_{rank}.pt")


def figures(machine: train.Machine) -> dict:
    return {
        "ragged": gradients(machine, one.ragged_batch()),
        "soft": gradients(machine, one.soft_batch()),
        "empty here": gradients(machine, empty_from(4)),
        "val_loss": validation_loss(machine),
    }


def job_of_two(rank: int, processes: int) -> dict:
    found = {}
    for kind in KINDS:
        with job_machine(kind) as machine:
            found[kind] = figures(machine) | {"empty": gradients(machine, empty_from(0))}
    with job_machine("fsdp") as machine:
        found["muon"] = muon_step(machine, one.ragged_batch())
        with exact_newton_schulz():
            found["exact muon"] = muon_step(machine, one.ragged_batch())
        model, _ = placed_gpt(machine)
        found["parts"] = {n: (p.to_local().numel(), p.numel()) for n, p in model.named_parameters()}
        found["tied"] = model.lm_head.weight is model.model.embed_tokens.weight
        half = replace(machine, dtype=torch.bfloat16)
        found["fsdp"]["bf16"] = gradients(half, one.ragged_batch())
    with exact_newton_schulz():
        for kind in KINDS:
            run(kind, f"--parallel={kind}")
        if rank == 0:
            copy_of_half("fsdp", "fsdp_again")
            copy_of_half("ddp", "ddp_to_fsdp")
        with job_machine("ddp") as machine:
            machine.gather(rank)  # nobody goes on before the copies are whole
        run("fsdp_again", "--parallel=fsdp", "--resume")
        run("ddp_to_fsdp", "--parallel=fsdp", "--resume", "--recompute_activations")
    found["stopped"] = stopped_run(rank)
    found["failures"] = failures(rank)
    return found


def job_of_four(rank: int, processes: int) -> dict:
    found = {}
    for kind in KINDS:
        with job_machine(kind) as machine:
            found[kind] = figures(machine)
    with exact_newton_schulz():
        run("fsdp_2_to_4", "--parallel=fsdp", "--resume")
    return found


def job_of_compiled(rank: int, processes: int) -> dict:
    with exact_newton_schulz():
        for kind in KINDS:
            run(f"{kind}_compiled", f"--parallel={kind}", "--compile=True")
    return {}


JOBS = {"two": job_of_two, "four": job_of_four, "compiled": job_of_compiled}


@contextlib.contextmanager
def job_machine(kind: str):
    machine = train.Machine.start(TrainConfig(device="cpu", parallel=kind))
    yield machine
    machine.stop()


def placed_gpt(machine: train.Machine):
    with machine.birthplace:
        model = one.tiny_gpt()
    return train.place(model, machine, compiled=False)


def empty_from(row: int) -> dict:
    """The ragged batch, of which the rows from `row` on have no target."""
    batch = one.ragged_batch()
    batch["labels"][row:] = -100
    return batch


def window_of(batch: dict, machine: train.Machine) -> list[dict]:
    """This process's rows, in two micro-batches of unequal size; of two processes, unequal too."""
    bounds = {1: (0, 8), 2: (0, 3, 8), 4: (0, 2, 4, 6, 8)}[machine.world_size]
    mine = one.rows_of(batch, bounds[machine.rank], bounds[machine.rank + 1])
    return [one.rows_of(mine, 0, 1), one.rows_of(mine, 1, 9)]


def weights(model: torch.nn.Module) -> dict:
    """Whole, though the model may be in parts."""
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in model.named_parameters()
    }


def gradients(machine: train.Machine, batch: dict) -> dict:
    """One step of plain gradient descent at learning rate 1, by take_step."""
    model, forward = placed_gpt(machine)
    before = weights(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    step = one_step(forward, [optimizer], machine, batch)
    grads = {name: before[name] - after for name, after in weights(model).items()}
    return {"loss": step.loss, "norm": step.grad_norm, "targets": step.targets, "grads": grads}


def one_step(forward, optimizers: list, machine: train.Machine, batch: dict) -> train.Step:
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    config = TrainConfig(grad_clip=0)
    window = window_of(batch, machine)
    return train.take_step(forward, optimizers, scaler, window, machine, config)


def muon_step(machine: train.Machine, batch: dict) -> dict:
    """The weights after a step of Muon at a large learning rate."""
    model, forward = placed_gpt(machine)
    config = TrainConfig(optimizer="muon", learning_rate=0.1, embedding_learning_rate=0.0)
    one_step(forward, train.make_optimizers(model, config), machine, batch)
    return weights(model)


@contextlib.contextmanager
def exact_newton_schulz():
    """Muon's iteration in float64 instead of bfloat16."""

    exact = partial(muon.orthogonal, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(muon, "orthogonal", exact)
        yield


def validation_loss(machine: train.Machine) -> float:
    """Of 8 rows of many lengths, in batches that do not divide by the number of processes."""
    config = TrainConfig(data="corpus", max_seq_len=24)
    with machine.first_process_first():
        _, rows, _ = train.load_rows(config, Tokenizer.load("bytes"))
    ranks = {"rank": machine.rank, "world_size": machine.world_size}
    batches = Batches(rows, 3, 24, seed=0, shuffle=False, **ranks)
    assert any(len(batches.rows_of(g)) % 2 for g in range(batches.per_epoch))
    torch.manual_seed(0)
    with machine.birthplace:
        model = train.GPT(train.shape_of(TrainConfig(hidden_size=16), 260))
    model, _ = train.place(model, machine, compiled=False)
    return train.evaluate(model, batches, None, machine)


def run(out_dir: str, *flags: str) -> None:
    flags = [*one.SHAPE, *one.QUICK, *RUN, *flags]
    train.main(["--data=corpus", f"--out_dir={out_dir}", *flags])


def copy_of_half(finished: str, unfinished: str) -> None:
    """A run as it was after step 3 of 6."""
    shutil.copytree(finished, unfinished)
    shutil.rmtree(Path(unfinished) / "step_00000006")


def stopped_run(rank: int) -> str:
    """The last process gets a SIGTERM in step 2: where all of them stop."""
    step = 2 if rank == 1 else None
    with one.before_step(step, lambda: one.interrupt(signal.SIGTERM)):
        run("stopped")
    return checkpoint.saved_steps(Path("stopped"))[-1].name


def failures(rank: int) -> dict:
    """How a process ends when something fails in one of them."""

    def fail(*arguments, **options):
        raise UserError("a file is gone")

    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    def ending(out_dir: str, owner, name: str, replacement, on_rank: int, *flags) -> str:
        with pytest.MonkeyPatch.context() as patch:
            if rank == on_rank:
                patch.setattr(owner, name, replacement)
            try:
                run(out_dir, *flags)
                return "ended well"
            except (UserError, SystemExit) as error:
                dist.destroy_process_group()
                return f"{type(error).__name__}: {error}"

    writer = sharding.dcp.HuggingFaceStorageWriter
    return {
        "data in the first": ending("a", train, "load_rows", fail, 0),
        "data in another": ending("b", train, "load_rows", fail, 1),
        "other data": ending("c", train, "data_paths", lambda _: ("more", None), 1),
        "save": ending("d", torch, "save", full, 0),
        "save of parts": ending("e", writer, "write_data", full, 1, "--parallel=fsdp"),
    }


# -------------------------------------------------------------------------------- the tests


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The directory where all jobs work, with data."""
    directory = tmp_path_factory.mktemp("distributed")
    one.write_corpus(directory / "corpus")
    shutil.copytree(directory / "corpus", directory / "more")
    with (directory / "more" / "train.jsonl").open("a") as file:
        file.write('{"text": "one more"}\n')
    return directory


@pytest.fixture(scope="module")
def two(place):
    return run_job("two", 2, place)


@pytest.fixture(scope="module")
def four(place, two):
    with contextlib.chdir(place):
        copy_of_half("fsdp", "fsdp_2_to_4")
    return run_job("four", 4, place)


@pytest.fixture(scope="module")
def alone(place, two):
    """What one process finds, also of the runs of two."""
    machine = train.Machine(torch.device("cpu"), torch.float32, "", 0, 1)
    with contextlib.chdir(place), exact_newton_schulz():
        run("alone")
        for kind in KINDS:
            copy_of_half(kind, f"{kind}_2_to_1")
            run(f"{kind}_2_to_1", "--resume")
        return {"machine": machine, "val_loss": validation_loss(machine)}


def test_inv10_several_processes_give_the_gradient_of_one(two, four, alone):
    wholes = {"ragged": one.ragged_batch(), "soft": one.soft_batch()}
    wholes |= {"empty here": empty_from(4), "empty": empty_from(0)}
    for name, batch in wholes.items():
        expected = gradients(alone["machine"], batch)
        for found in [*two, *four]:
            for kind in KINDS:
                if name not in found[kind]:
                    continue
                seen = found[kind][name]
                assert seen["targets"] == expected["targets"]
                assert seen["loss"] == pytest.approx(expected["loss"], abs=1e-6)
                assert seen["norm"] == pytest.approx(expected["norm"], abs=1e-6)
                for parameter, grad in expected["grads"].items():
                    torch.testing.assert_close(seen["grads"][parameter], grad, atol=1e-6, rtol=1e-4)


def test_several_processes_with_uneven_rows_find_the_validation_loss_of_one(two, four, alone):
    for found in [*two, *four]:
        for kind in KINDS:
            assert found[kind]["val_loss"] == pytest.approx(alone["val_loss"], abs=1e-6)


def test_fsdp_gives_each_process_its_part_and_keeps_the_tie(two):
    for found in two:
        assert found["tied"]
        for name, (here, all_in_all) in found["parts"].items():
            assert here == all_in_all / 2, name


def test_blocks_in_bf16_give_the_gradient_of_autocast(two, alone):
    """Up to rounding: weights are gathered in bfloat16, where autocast makes copies of them."""
    machine = replace(alone["machine"], dtype=torch.bfloat16)
    expected = gradients(machine, one.ragged_batch())
    for found in two:
        seen = found["fsdp"]["bf16"]
        assert seen["loss"] == pytest.approx(expected["loss"], rel=1e-3)
        for name, grad in expected["grads"].items():
            assert (seen["grads"][name] - grad).norm() < 0.03 * grad.norm(), name


def test_muon_on_parts_is_muon_up_to_the_rounding_of_bf16(two, alone):
    """Muon multiplies matrices in bfloat16, parts in another order than wholes. At learning
    rate 0.1 that carries a weight some 2e-3 away; but from what float64 gives, where parts and
    wholes agree, one process is as far."""
    plain = muon_step(alone["machine"], one.ragged_batch())
    with exact_newton_schulz():
        exact = muon_step(alone["machine"], one.ragged_batch())
    rounding = farthest(plain, exact)
    assert rounding > 1e-4
    for found in two:
        assert farthest(found["exact muon"], exact) < 1e-6
        assert farthest(found["muon"], exact) < 2 * rounding


def farthest(some: dict, others: dict) -> float:
    """The largest difference between any two weights."""
    return max((some[name] - others[name]).abs().max().item() for name in some)


def end_of(run: Path) -> dict:
    """The weights after the last step."""
    step = checkpoint.saved_steps(run)[-1]
    assert step.name == "step_00000006"
    return one.load_file(step / "model.safetensors")


def test_a_run_resumed_on_another_number_of_processes_ends_like_one_that_was_not(
    two, four, alone, place
):
    """And with DDP like with FSDP. From step 3 to 6 the weights move by 1.5e-2."""
    expected = end_of(place / "alone")
    start = one.load_file(place / "alone" / "step_00000003" / "model.safetensors")
    assert farthest(expected, start) > 1e-2
    runs = "ddp fsdp ddp_2_to_1 fsdp_2_to_1 fsdp_2_to_4 ddp_to_fsdp".split()
    for name in runs:
        assert farthest(end_of(place / name), expected) < 2e-6, name
        losses = [line["loss"] for line in one.metrics(place / name)]
        expected_losses = [line["loss"] for line in one.metrics(place / "alone")]
        assert losses == pytest.approx(expected_losses, abs=1e-5)


def test_a_run_resumed_on_as_many_processes_ends_with_the_same_bits(two, place):
    last = [place / name / "step_00000006" for name in ("fsdp", "fsdp_again")]
    assert one.digest(last[0]) == one.digest(last[1])


def test_a_checkpoint_of_parts_has_the_files_of_any_other(two, place):
    """But for the optimizers' state: a file for each process, of tensors and nothing else."""
    whole, parts = (place / name / "step_00000006" for name in KINDS)
    names = sorted(file.name for file in whole.iterdir())
    assert sorted(file.name for file in parts.iterdir()) == sorted([*names, "training_state"])
    saved = [one.load_file(file) for file in (parts / "training_state").iterdir()]
    assert len(saved) == 2 and all(saved)
    assert (parts / "training_state.pt").stat().st_size < 4000
    config = (whole / "config.json").read_text()
    assert (parts / "config.json").read_text() == config
    assert end_of(place / "fsdp").keys() == end_of(place / "ddp").keys()


def test_a_checkpoint_that_lacks_a_part_is_refused(two, place, monkeypatch):
    monkeypatch.chdir(place)
    for number in (1, 2):
        copy_of_half("fsdp", f"part_{number}")
        step = place / f"part_{number}" / "step_00000003"
        next((step / "training_state").glob(f"shard-0000{number}*")).unlink()
        with pytest.raises(UserError, match="training_state.* missing or damaged"):
            run(f"part_{number}", "--resume")


def test_a_signal_to_one_process_stops_all_with_a_checkpoint(two):
    assert [found["stopped"] for found in two] == ["step_00000002"] * 2


def test_what_fails_in_one_process_ends_all_with_one_sentence(two):
    """The first process says it; nobody waits for the one that is gone."""
    first, other = (found["failures"] for found in two)
    assert set(other.values()) == {"SystemExit: 2"}
    assert first["data in the first"] == "UserError: a file is gone"
    assert first["data in another"] == "UserError: process 1: a file is gone"
    assert "process 1 has another training data than process 0" in first["other data"]
    assert "could not save d/step_00000003: [Errno 28]" in first["save"]
    assert "process 1: [Errno 28] No space left" in first["save of parts"]


@pytest.mark.slow
def test_torchrun_restarts_from_the_last_checkpoint_when_a_worker_is_killed(two, place):
    """Killed in step 5, restarted from step 3: it ends with the bits of the undisturbed run."""
    command = [*TORCHRUN, "--nproc_per_node=2", "--max-restarts=1", __file__, "elastic", "", "."]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=place, env=environment, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr
    assert "resuming    after step 3 of 6" in done.stdout
    steps = [place / name / "step_00000006" for name in ("ddp", "elastic")]
    assert one.digest(steps[0]) == one.digest(steps[1])


def killed_once() -> None:
    """What a worker of torchrun does in that test."""
    first_life = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    step = 5 if first_life and os.environ["RANK"] == "1" else None
    torch.set_num_threads(1)
    with exact_newton_schulz(), one.before_step(step, lambda: one.interrupt(signal.SIGKILL)):
        run("elastic", "--resume")


@pytest.mark.slow
def test_compiled_processes_end_where_plain_ones_do(two, alone, place):
    """Up to rounding. From step 3 to 6 the weights move by 1.5e-2."""
    run_job("compiled", 2, place)
    expected = end_of(place / "alone")
    for kind in KINDS:
        compiled = f"{kind}_compiled"
        assert farthest(end_of(place / compiled), expected) < 1e-5
        for name in ("loss", "grad_norm"):
            figures = [line[name] for line in one.metrics(place / "alone")]
            assert [line[name] for line in one.metrics(place / compiled)] == pytest.approx(figures)


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="groups of processes and their signals are POSIX's")
@pytest.mark.parametrize("send", [os.kill, os.killpg], ids=["torchrun", "its group"])
def test_ctrl_c_through_torchrun_saves_and_says_how_to_go_on(place, send):
    """The real program. A terminal signals the whole group; torchrun hands the signal on."""
    run = place / f"interrupted_by_{send.__name__}"
    flags = ["--data=corpus", f"--out_dir={run}", *one.SHAPE, *one.QUICK, "--log_every=1"]
    flags += ["--max_steps=1000000", "--save_every=1000000", "--eval_every=1000000"]
    command = [*TORCHRUN, "--nproc_per_node=2", str(REPO / "train.py"), *flags]
    options = dict(cwd=place, env=os.environ | {"OMP_NUM_THREADS": "1"}, text=True)
    log = place / f"{run.name}.log"
    with (
        log.open("w") as stderr,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=stderr, start_new_session=True, **options
        ) as job,
    ):
        wait_for_first_step(run, job)
        send(job.pid, signal.SIGINT)
        printed, _ = job.communicate(timeout=100)
    assert job.returncode == 1 and "SignalException" in log.read_text()  # torchrun has it so
    [step] = checkpoint.saved_steps(run)
    checkpoint.load_model(str(step), "cpu", None)  # both compare the checksums first
    state = checkpoint.load_training_state(step)
    assert state["progress"]["step"] == one.metrics(run)[-1]["step"] == int(step.name[5:])
    [said] = [line for line in printed.splitlines() if line.startswith("go on with")]
    launcher, *rest = shlex.split(said.removeprefix("go on with"))
    assert launcher == "torchrun" and rest[0] == "--nproc_per_node=2" and rest[-1] == "--resume"
    few_more = state["progress"]["step"] + 3
    done = subprocess.run(
        [*TORCHRUN, *rest, f"--max_steps={few_more}"], capture_output=True, timeout=100, **options
    )
    assert done.returncode == 0, done.stderr
    assert checkpoint.saved_steps(run)[-1].name == f"step_{few_more:08d}"


def wait_for_first_step(run: Path, job: subprocess.Popen) -> None:
    metrics = run / "metrics.jsonl"
    while not (metrics.is_file() and metrics.stat().st_size):
        assert job.poll() is None, "it ended before its first step"
        time.sleep(0.05)


if __name__ == "__main__":
    name, count, directory = sys.argv[1:]
    os.chdir(directory)
    if name == "elastic":
        killed_once()
    else:
        torch.use_deterministic_algorithms(True)  # imports what each process would import again
        start = torch.multiprocessing.start_processes
        start(process, (name, int(count)), nprocs=int(count), start_method="fork")
