"""The training loop: the right loss, exact resume, nothing lost, and a sentence for each mistake.

Everything runs the real program, `train.main`, on a little corpus in tmp_path.
"""

import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch._dynamo.utils import counters

import checkpoint
import sharding
import train
from config import TrainConfig, UserError, parse_config, run_program
from data.batches import Batches
from model import GPT, GPTConfig

REPO = Path(__file__).parent.parent
SHAPE = ["--hidden_size=16", "--num_hidden_layers=2", "--num_attention_heads=2"]
SHAPE += ["--num_key_value_heads=1", "--intermediate_size=24", "--max_seq_len=24"]
QUICK = ["--tokenizer=bytes", "--batch_size=4", "--device=cpu", "--warmup_steps=2"]
QUICK += ["--sample_tokens=4", "--learning_rate=1e-2"]
SOFT = ["--ngram_weight=0.9", "--ngram_last_weight=0.3", "--ngram_order=3"]


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_corpus(tmp_path / "corpus")


def write_corpus(directory: Path) -> Path:
    """A directory with 40 texts of 3 to 20 characters to train on and 8 to validate on."""
    rng = random.Random(0)
    texts = ["".join(rng.choice("abcde ") for _ in range(rng.randint(3, 20))) for _ in range(48)]
    directory.mkdir()
    for name, part in (("train", texts[:40]), ("val", texts[40:])):
        rows = "".join(json.dumps({"text": text}) + "\n" for text in part)
        (directory / f"{name}.jsonl").write_text(rows)
    return directory


def run(corpus: Path, out_dir: str, *flags: str) -> Path:
    train.main([f"--data={corpus}", f"--out_dir={out_dir}", *SHAPE, *QUICK, *flags])
    return checkpoint.saved_steps(Path(out_dir))[-1]


def digest(step: Path) -> str:
    return hashlib.sha256((step / "model.safetensors").read_bytes()).hexdigest()


def metrics(out_dir: str) -> list[dict]:
    return [json.loads(line) for line in (Path(out_dir) / "metrics.jsonl").read_text().splitlines()]


@contextlib.contextmanager
def before_step(number: int, act):
    """Within the block, act() is called before the training step of this number, from 1 on."""
    with pytest.MonkeyPatch.context() as patch:
        real, calls = train.take_step, []

        def take_step(*arguments):
            calls.append(None)
            if len(calls) == number:
                act()
            return real(*arguments)

        patch.setattr(train, "take_step", take_step)
        yield


def interrupt(number: int = signal.SIGINT) -> None:
    os.kill(os.getpid(), number)


def killed() -> None:
    raise KeyboardInterrupt


def assert_same_end(step: Path, other: Path) -> None:
    """The same weights and the same optimizer state, bit for bit."""
    assert step.name == other.name
    assert digest(step) == digest(other)
    states = [checkpoint.load_training_state(s)["optimizers"] for s in (step, other)]
    first, second = map(sharding.named, states)
    assert first.keys() == second.keys() and len(first) > 2
    assert all(torch.equal(first[name], second[name]) for name in first)


def failure(capsys, *arguments: str) -> str:
    """Run the program as the command line does; return the sentence that it ends with."""
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(sys, "argv", ["train.py", *arguments])
        run_program(train.main)
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert "Traceback" not in printed
    return printed


# ------------------------------------------------------------------------------ the right loss


def ragged_batch(rows: int = 8, T: int = 12) -> dict:
    """Rows with 0 to T - 1 supervised targets; the first has none (invariant 11)."""
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(0, 50, (rows, T), generator=generator)
    labels = input_ids.clone()
    for row in range(rows):
        labels[row, row + 1 :] = -100
    return {"input_ids": input_ids, "labels": labels, "num_tokens": rows * T}


def soft_batch() -> dict:
    """The ragged batch, but a distribution for each target."""
    logits = torch.randn(8, 12, 50, generator=torch.Generator().manual_seed(1))
    return ragged_batch() | {"soft_labels": logits.softmax(-1)}


def rows_of(batch: dict, start: int, stop: int) -> dict:
    part = {name: batch[name][start:stop] for name in batch if name != "num_tokens"}
    return part | {"num_tokens": part["input_ids"].numel()}


def tiny_gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(50, 16, 2, 2, 24, num_key_value_heads=1))


def gradients(window: list[dict]) -> tuple[float, dict[str, torch.Tensor]]:
    """(loss, gradients) of one step over the micro-batches, as take_step makes them."""
    model = tiny_gpt()
    config = TrainConfig(grad_clip=0)
    machine = train.Machine(torch.device("cpu"), torch.float32, "", 0, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    step = train.take_step(model, [optimizer], scaler, window, machine, config)
    return step.loss, {name: before[name] - p.detach() for name, p in model.named_parameters()}


def test_inv10_micro_batches_give_the_gradient_of_the_whole_batch():
    batch = ragged_batch()
    model = tiny_gpt()
    logits = model(batch["input_ids"])[:, :-1].flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, batch["labels"][:, 1:].flatten())
    expected.backward()
    for size in (8, 4, 3, 1):
        window = [rows_of(batch, start, start + size) for start in range(0, 8, size)]
        loss, grads = gradients(window)
        assert loss == pytest.approx(expected.item(), abs=1e-6)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(grads[name], parameter.grad, atol=1e-6, rtol=1e-4)


def test_inv11_a_step_without_targets_is_finite_and_changes_nothing():
    batch = ragged_batch()
    batch["labels"].fill_(-100)
    loss, grads = gradients([batch])
    assert loss == 0
    assert all((grad == 0).all() for grad in grads.values())


# -------------------------------------------------------------------------------- exact resume


@pytest.mark.parametrize("more", [["--optimizer=adamw"], ["--optimizer=muon"], SOFT])
def test_inv12_resuming_gives_the_bits_of_the_undisturbed_run(corpus, more):
    """Across an epoch boundary (40 rows, batches of some 4), with dropout and accumulation."""
    flags = [*more, "--dropout=0.1", "--grad_accum=2", "--schedule=wsd"]
    flags += ["--save_every=7", "--eval_every=5", "--log_every=1", "--max_steps=14"]
    whole = run(corpus, "whole", *flags)
    # After the checkpoint of step 7, with steps 8 and 9 already logged.
    with before_step(10, killed), pytest.raises(KeyboardInterrupt):
        run(corpus, "halves", *flags)
    assert [step.name for step in checkpoint.saved_steps(Path("halves"))] == ["step_00000007"]
    resumed = run(corpus, "halves", *flags, "--resume=True")
    assert whole.name == "step_00000014"
    assert_same_end(resumed, whole)
    for name in ("loss", "val_loss", "lr", "grad_norm", "tokens", "targets"):
        first = [line.get(name) for line in metrics("whole")]
        assert [line.get(name) for line in metrics("halves")] == first


@pytest.fixture(scope="module")
def code_caches(tmp_path_factory) -> list[Path]:
    """Where torch.compile keeps its code: one for runs that are not stopped, one for resumed ones,
    as if these went on elsewhere."""
    return [tmp_path_factory.mktemp("code") for _ in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_inv12_a_compiled_run_resumes_with_the_same_bits(
    corpus, monkeypatch, code_caches, optimizer
):
    """Though the resumed process compiles again, and begins with a batch of another shape."""
    flags = [f"--optimizer={optimizer}", "--dropout=0.1", "--grad_accum=2", "--max_steps=14"]
    flags += ["--save_every=7", "--eval_every=7", "--compile=True", "--num_hidden_layers=1"]
    rows, _, _ = train.load_rows(
        TrainConfig(data=str(corpus), max_seq_len=24), train.Tokenizer.load("bytes")
    )
    batches = Batches(rows, 4, 24, seed=1337)
    assert len(batches.shapes) > 1
    assert batches[0]["input_ids"].shape != batches[14]["input_ids"].shape

    def run_compiled(out_dir: str, cache: Path, *more: str) -> Path:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
        torch.compiler.reset()
        counters.clear()
        step = run(corpus, out_dir, *flags, *more)
        assert counters["stats"]["unique_graphs"] == 1  # for batches of all shapes
        return step

    whole = run_compiled("whole", code_caches[0])
    with before_step(10, killed), pytest.raises(KeyboardInterrupt):
        run_compiled("halves", code_caches[0])
    assert_same_end(run_compiled("halves", code_caches[1], "--resume"), whole)


def test_resume_keeps_the_runs_own_options(corpus):
    run(corpus, "out/a", "--max_steps=3", "--dropout=0.25")
    config = parse_config(TrainConfig, ["--out_dir=out/a", "--resume=True", "--max_steps=9"])
    assert (config.dropout, config.hidden_size, config.max_steps) == (0.25, 16, 9)


def test_a_run_goes_on_where_it_lies_whatever_its_options_say(corpus):
    """A stranger's train_config.json may name another directory, to write and to sweep there."""
    run(corpus, "out/a", "--max_steps=1")
    options = json.loads(Path("out/a/train_config.json").read_text())
    options |= {"out_dir": "elsewhere", "resume": False}
    Path("out/a/train_config.json").write_text(json.dumps(options))
    Path("elsewhere").mkdir()
    Path("elsewhere/.partial_precious").touch()
    Path("a.py").write_text("max_steps = 1\n")
    train.main(["a.py", "--resume", "--max_steps=2"])
    assert [path.name for path in Path("elsewhere").iterdir()] == [".partial_precious"]
    assert [step.name for step in checkpoint.saved_steps(Path("out/a"))][-1] == "step_00000002"
    assert json.loads(Path("out/a/train_config.json").read_text())["out_dir"] == "out/a"


def test_resume_refuses_to_change_what_the_run_is(corpus):
    run(corpus, "out/a", "--max_steps=2")
    with pytest.raises(UserError, match="seed = 1337.*out_dir"):
        run(corpus, "out/a", "--max_steps=4", "--resume=True", "--seed=2")
    run(corpus, "out/a", "--max_steps=4", "--resume=True")  # longer is allowed
    assert metrics("out/a")[-1]["step"] == 4


def test_resume_where_there_is_no_run_starts_one(corpus):
    assert run(corpus, "out/new", "--max_steps=2", "--resume=True").name == "step_00000002"


def test_ctrl_c_finishes_the_step_saves_and_resumes_exactly(corpus, capsys):
    flags = ["--max_steps=6", "--save_every=100", "--eval_every=100"]
    whole = run(corpus, "whole", *flags)
    with before_step(1, interrupt):
        stopped = run(corpus, "stopped", *flags)
    assert stopped.name == "step_00000001"
    assert "--resume" in capsys.readouterr().out
    assert digest(run(corpus, "stopped", *flags, "--resume=True")) == digest(whole)


def test_a_second_ctrl_c_ends_at_once_but_not_under_torchrun(monkeypatch):
    """There each process gets one from the terminal, and the same one again from torchrun."""
    for patient in (False, True):
        stop = train.StopSignal(patient)
        os.kill(os.getpid(), signal.SIGINT)
        with contextlib.nullcontext() if patient else pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert stop.asked
        stop.stop_listening()


# --------------------------------------------------------------------------------- nothing lost


def test_a_gradient_that_is_not_finite_skips_the_step_and_is_counted(corpus, monkeypatch):
    real = train.take_step
    calls = []

    def poisoned(forward, *rest):
        calls.append(None)
        weight = forward.model.norm.weight
        if len(calls) == 2:
            kept = weight.detach().clone()
            weight.data.fill_(float("inf"))
            result = real(forward, *rest)
            weight.data.copy_(kept)
            return result
        return real(forward, *rest)

    monkeypatch.setattr(train, "take_step", poisoned)
    step = run(corpus, "out/a", "--max_steps=3", "--log_every=1")
    lines = metrics("out/a")
    assert [line["skipped_steps"] for line in lines] == [0, 1, 1]
    assert all(t.isfinite().all() for t in load_file(step / "model.safetensors").values())


def test_a_loss_that_is_not_finite_is_counted_though_its_gradient_is(corpus, monkeypatch):
    monkeypatch.setattr(train, "take_step", lambda *_: train.Step(float("inf"), 1.0, 1, 1))
    run(corpus, "out/a", "--max_steps=2", "--log_every=1")
    assert [line["skipped_steps"] for line in metrics("out/a")] == [1, 2]


def test_too_many_bad_steps_in_a_row_stop_with_the_last_good_checkpoint(corpus, monkeypatch):
    real = train.take_step
    bad = train.Step(float("nan"), float("nan"), 1, 1)
    calls = []

    def poisoned(*arguments):
        calls.append(None)
        return real(*arguments) if len(calls) <= 2 else bad

    monkeypatch.setattr(train, "take_step", poisoned)
    # 22 steps of 2 micro-batches: the last ones are numbers 42 and 43
    flags = ["--max_steps=99", "--save_every=2", "--grad_accum=2"]
    with pytest.raises(UserError, match="20 times in a row.*step_00000002") as raised:
        run(corpus, "out/a", *flags)
    tokenizer = train.Tokenizer.load("bytes")
    config = TrainConfig(data=str(corpus), max_seq_len=24)
    batches = Batches(train.load_rows(config, tokenizer)[0], 4, 24, seed=1337)
    rows = [row for g in (42, 43) for row in batches.rows_of(g)]
    named = ", ".join(map(str, rows))
    assert f"step 22, whose {len(rows)} rows are {named} of the training" in str(raised.value)
    assert "micro-batches 42 to 43" in str(raised.value)
    assert checkpoint.saved_steps(Path("out/a"))[-1].name == "step_00000002"


def test_rows_of_a_micro_batch_are_the_rows_in_it(corpus):
    config = TrainConfig(data=str(corpus), max_seq_len=24)
    rows, _, _ = train.load_rows(config, train.Tokenizer.load("bytes"))
    batches = Batches(rows, 4, 24, seed=5)
    for g in (0, batches.per_epoch - 1, 3 * batches.per_epoch + 1):
        padded = batches[g]["input_ids"].tolist()
        expected = [rows[i][0].tolist() for i in batches.rows_of(g)]
        assert sum(map(len, expected)) == batches[g]["num_tokens"]
        for ids in expected:
            assert any(row[: len(ids)] == ids for row in padded)


def test_fp16_finds_its_scale_while_it_skips_steps():
    """From a scale at which gradients pass 65,504, the largest fp16 number, it halves with each
    skipped step until they fit, for Muon and AdamW together. From the usual 65,536 it comes down
    to 1 in 16 steps, so that the search alone is never BAD_STEPS_IN_A_ROW."""
    model = tiny_gpt()
    machine = train.Machine(torch.device("cpu"), torch.float16, "", 0, 1)
    optimizers = train.make_optimizers(model, TrainConfig(learning_rate=1e-3, optimizer="muon"))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**26)
    good = []
    for _ in range(16):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        scale = scaler.get_scale()
        step = train.take_step(
            model, optimizers, scaler, [ragged_batch()], machine, TrainConfig(grad_clip=0)
        )
        good.append(step.is_good)
        same = [torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)]
        assert not any(same) if step.is_good else all(same)
        assert scaler.get_scale() == (scale if step.is_good else scale / 2)
    searched = good.index(True)
    assert searched > 0 and good == [False] * searched + [True] * (16 - searched)
    assert 2**16 * 0.5**train.BAD_STEPS_IN_A_ROW < 1


def test_a_full_disk_leaves_the_last_good_checkpoint_and_says_so(corpus, monkeypatch):
    run(corpus, "out/a", "--max_steps=2")
    before = digest(Path("out/a/step_00000002"))

    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(UserError, match="No space left.*last good checkpoint is .*step_00000002"):
        run(corpus, "out/a", "--max_steps=4", "--resume=True")
    assert digest(Path("out/a/step_00000002")) == before
    assert [path.name for path in Path("out/a").glob(".partial*")] == []


def test_the_newest_checkpoints_and_the_best_are_kept(corpus, monkeypatch):
    losses = iter([3.0, 1.0, 2.0, 2.5, 2.7])
    monkeypatch.setattr(train, "evaluate", lambda *_: next(losses))
    run(corpus, "out/a", "--max_steps=5", "--eval_every=1", "--save_every=1")
    kept = [int(step.name[5:]) for step in checkpoint.saved_steps(Path("out/a"))]
    assert kept == [2, 4, 5]


def test_the_last_step_evaluates_and_saves(corpus):
    """Invariant 13, with intervals that do not divide the number of steps."""
    step = run(corpus, "out/a", "--max_steps=5", "--eval_every=3", "--save_every=4")
    assert step.name == "step_00000005"
    evaluated = [line["step"] for line in metrics("out/a") if "val_loss" in line]
    assert evaluated == [3, 5]
    assert (Path("out/a") / "loss.png").stat().st_size > 1000


def test_evaluation_is_the_mean_over_all_targets(corpus):
    step = run(corpus, "out/a", "--max_steps=2", "--batch_size=1")
    model = GPT.from_pretrained(step)
    total = targets = 0
    for line in (corpus / "val.jsonl").read_text().splitlines():
        tokenizer = train.Tokenizer.load(step)
        input_ids = torch.tensor([tokenizer.encode_document(json.loads(line)["text"])])
        logits = model(input_ids)[0, :-1]
        total += torch.nn.functional.cross_entropy(logits, input_ids[0, 1:], reduction="sum").item()
        targets += input_ids.shape[1] - 1
    assert metrics("out/a")[-1]["val_loss"] == pytest.approx(total / targets, abs=1e-5)


def test_metrics_have_the_fields_of_the_contract(corpus):
    (corpus / "floor.json").write_text(json.dumps({"val_nats": 10.0, "val_stories": 8}))
    run(corpus, "out/a", "--max_steps=4", "--log_every=1", "--eval_every=4")
    last = metrics("out/a")[-1]
    contract = "step loss val_loss val_ppl floor lr grad_norm tokens targets seconds"
    assert set(contract.split()) <= set(last)
    targets = sum(len(json.loads(x)["text"]) + 1 for x in (corpus / "val.jsonl").open())
    assert last["floor"] == pytest.approx(10.0 / targets)


NOT_NATS = ['"ten"', "true", "null", "-1", "NaN", "Infinity", "1" + "0" * 400, "[1]"]


@pytest.mark.parametrize("content", [f'{{"val_nats": {x}}}' for x in NOT_NATS] + ["{}", "[1]", "{"])
def test_a_floor_that_is_none_is_a_sentence(corpus, content):
    (corpus / "floor.json").write_text(content)
    with pytest.raises(UserError, match="floor.json"):
        run(corpus, "out/a", "--max_steps=1")


def test_a_model_that_memory_does_not_hold_is_refused_before_the_data(corpus):
    with pytest.raises(UserError, match="the weights of this shape need .* GiB, but this machine"):
        run(corpus, "out/a", "--hidden_size=2000000000")
    assert not Path("out").exists()


@pytest.mark.parametrize("name", ["x" * 300, "y/" + "x" * 300])
def test_a_run_under_a_name_that_is_too_long_is_refused(corpus, name):
    with pytest.raises(UserError, match="--out_dir="):
        run(corpus, name, "--max_steps=1")


# ----------------------------------------------------------------------- schedule and optimizers


def test_inv13_the_learning_rate_is_a_function_of_the_step_alone():
    cosine = TrainConfig(max_steps=100, warmup_steps=10, schedule="cosine", min_lr_ratio=0.1)
    assert train.schedule(0, cosine) == pytest.approx(0.1)
    assert train.schedule(9, cosine) == 1.0
    assert train.schedule(55, cosine) == pytest.approx(0.1 + 0.9 * 0.5)
    assert train.schedule(100, cosine) == pytest.approx(0.1)
    wsd = TrainConfig(max_steps=100, warmup_steps=10, schedule="wsd", decay_fraction=0.2)
    assert [train.schedule(step, wsd) for step in (9, 50, 80)] == [1.0, 1.0, 1.0]
    assert train.schedule(90, wsd) == pytest.approx(0.5)
    assert train.schedule(100, wsd) == pytest.approx(0.0)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("tied", [True, False])
def test_every_parameter_is_optimised_once_and_only_matrices_decay(optimizer, tied):
    model = GPT(GPTConfig(50, 16, 2, 2, 24, tie_word_embeddings=tied))
    config = TrainConfig(optimizer=optimizer, weight_decay=0.1)
    groups = [g for o in train.make_optimizers(model, config) for g in o.param_groups]
    ids = [id(p) for group in groups for p in group["params"]]
    assert sorted(ids) == sorted({id(p) for p in model.parameters()})
    for group in groups:
        for parameter in group["params"]:
            assert group["weight_decay"] == (0.1 if parameter.dim() == 2 else 0.0)


def test_the_share_of_the_counts_falls_in_a_straight_line_over_the_run(corpus):
    options = {"ngram_weight": 0.9, "ngram_last_weight": 0.1, "ngram_order": 2, "max_steps": 8}
    config = TrainConfig(data=str(corpus), max_seq_len=24, grad_accum=2, **options)
    rows, _, _ = train.load_rows(config, train.Tokenizer.load("bytes"))
    batch = np.arange(4), (4, 24)
    hard, counted = (train.NGrams(rows, 320, order=2).soft_labels(*batch, w) for w in (0.0, 1.0))
    soften = train.softener(config, rows, 320)
    for g, share in ((0, 0.9), (1, 0.9), (8, 0.5), (16, 0.1), (50, 0.1)):  # two a step
        torch.testing.assert_close(soften(g, *batch), share * counted + (1 - share) * hard)
    assert train.softener(TrainConfig(), rows, 320) is None


@pytest.mark.parametrize("soft", [[], SOFT], ids=["labels", "soft labels"])
def test_inv14_a_compiled_run_writes_the_checkpoint_of_a_plain_one(corpus, monkeypatch, soft):
    plain = run(corpus, "out/plain", "--max_steps=2", *soft)
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model: real(model, backend="eager"))
    compiled = run(corpus, "out/compiled", "--max_steps=2", "--compile=True", *soft)
    first, second = (load_file(step / "model.safetensors") for step in (plain, compiled))
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor)
    run(corpus, "out/plain", "--max_steps=3", "--resume=True", "--compile=True")


def test_where_nothing_can_be_compiled_the_mend_is_named(corpus, capsys, monkeypatch):
    def backend(graph, inputs):
        raise RuntimeError("no C++ compiler")

    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model: real(model, backend=backend))
    flags = [f"--data={corpus}", "--out_dir=out", *SHAPE, *QUICK, "--compile=True"]
    said = failure(capsys, *flags)
    assert "no C++ compiler" in said and "--compile=False trains without it" in said
    assert not Path("out").exists()


# ------------------------------------------------------------------------------------- mistakes


def test_an_existing_run_is_neither_overwritten_nor_continued(corpus, capsys):
    step = run(corpus, "out/a", "--max_steps=2")
    before = digest(step)
    flags = [f"--data={corpus}", "--out_dir=out/a", *SHAPE, *QUICK]
    said = failure(capsys, *flags)
    assert "already holds a run" in said and "--resume" in said and "--out_dir=out/a_2" in said
    assert digest(step) == before


def test_mistakes_in_a_config_file_are_named(corpus, capsys):
    Path("c.py").write_text("max_stpes = 3\n")
    assert "no option max_stpes; did you mean max_steps?" in failure(capsys, "c.py")
    Path("c.py").write_text("max_steps = 3.5\n")
    assert "max_steps = 3.5, but it must be int" in failure(capsys, "c.py")
    Path("c.py").write_text("import numpy\nmax_steps = numpy.ones(2)\n")
    assert "max_steps = array([1., 1.]), but it must be int" in failure(capsys, "c.py")
    Path("c.py").write_text("max_steps = = 3\n")
    assert "c.py, line 1" in failure(capsys, "c.py")
    Path("c.py").write_text("max_steps = 1 / 0\n")
    assert "ZeroDivisionError" in failure(capsys, "c.py")
    assert "nowhere.py does not exist" in failure(capsys, "nowhere.py")


def test_mistakes_in_flags_are_named(corpus, capsys):
    assert "did you mean --max_steps?" in failure(capsys, "--max-stpes=3")
    assert "max_steps = 0" in failure(capsys, "--max_steps=0", f"--data={corpus}")
    assert "max-steps" in failure(capsys, "--max_steps=many")
    heads = ("--num_attention_heads=3", "--num_key_value_heads=2")
    said = failure(capsys, f"--data={corpus}", *SHAPE, *QUICK, *heads)
    assert "num_attention_heads (3)" in said and "num_key_value_heads (2)" in said
    assert "--device=cuda:77 cannot be used" in failure(capsys, "--device=cuda:77")


def test_mistakes_in_data_are_named_and_nothing_is_written(corpus, capsys):
    assert "missing.jsonl" in failure(capsys, "--data=missing.jsonl", *QUICK)
    Path("empty.jsonl").touch()
    assert "empty.jsonl" in failure(capsys, "--data=empty.jsonl", *QUICK)
    Path("bad.jsonl").write_text('{"text": "a"}\n{"text": 3}\n')
    said = failure(capsys, "--data=bad.jsonl", *QUICK)
    assert "bad.jsonl, line 2" in said and "text" in said
    said = failure(capsys, f"--data={corpus}", "--init_from=out/nothing", *QUICK)
    assert "out/nothing does not exist" in said
    assert not Path("out").exists()


def test_a_context_beyond_the_models_is_refused(corpus):
    run(corpus, "out/a", "--max_steps=1")
    with pytest.raises(UserError, match="max_seq_len.*24"):
        train.main([f"--data={corpus}", "--out_dir=out/b", "--init_from=out/a", "--max_seq_len=99"])


def test_a_run_on_chats_makes_a_chat_model_of_a_base_model(corpus):
    base = run(corpus, "out/base", "--max_steps=1", "--max_seq_len=48")
    assert not train.Tokenizer.load(base).has_chat_template
    turns = [{"role": "user", "content": "ab?"}, {"role": "assistant", "content": "cd"}]
    for name in ("train", "val"):
        row = {"messages": [*turns, *turns] if name == "val" else turns}
        (corpus / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    flags = ["--init_from=out/base", "--max_steps=1", "--device=cpu", "--max_seq_len=48"]
    train.main([f"--data={corpus}", "--out_dir=out/chat", *flags])
    chat = checkpoint.saved_steps(Path("out/chat"))[-1]
    assert train.Tokenizer.load(chat).has_chat_template


def test_init_from_uses_the_checkpoints_weights_shape_and_tokenizer(corpus):
    first = run(corpus, "out/a", "--max_steps=1")
    train.main(
        [f"--data={corpus}", "--out_dir=out/b", "--init_from=out/a", "--max_seq_len=24"]
        + ["--max_steps=1", "--learning_rate=0", "--device=cpu", "--sample_tokens=0"]
    )
    assert digest(first) == digest(checkpoint.saved_steps(Path("out/b"))[-1])


def test_a_tokenizer_that_does_not_fit_the_weights_is_refused_with_the_mend(corpus, capsys):
    GPT(GPTConfig(64, 16, 1, 2, 24)).save_pretrained("other")
    train.Tokenizer.load("bytes").save(Path("other"))
    flags = [f"--data={corpus}", "--device=cpu", "--out_dir=out/a", "--max_seq_len=24"]
    said = failure(capsys, *flags, "--init_from=other")
    assert "other: its tokenizer has 260 ids, but the embedding only 64 rows" in said
    assert "--tokenizer=other and no --init_from" in said
    run(corpus, "out/a", "--max_steps=1", "--tokenizer=other")
    said = failure(capsys, *flags, "--out_dir=out/b", "--init_from=out/a", "--tokenizer=bytes")
    assert "out/a comes with its own" in said and "leave --tokenizer out" in said


@pytest.mark.parametrize(
    "flag",
    "eval_batches=0 eval_batches=-3 seed=-1 seed=99999999999 rope_theta=0 rms_norm_eps=nan "
    "learning_rate=inf embedding_learning_rate=-1 max_seq_len=1 val_fraction=1 data= out_dir= "
    "init_from= dropout=1.5 hidden_size=0 keep_checkpoints=0 num_hidden_layers=1025 ngram_order=0 "
    "ngram_weight=1.1 ngram_last_weight=-1".split(),
)
def test_a_value_out_of_range_is_named_before_anything_is_written(corpus, capsys, flag):
    flags = [f"--data={corpus}", *SHAPE, *QUICK, "--max_steps=1", f"--{flag}"]
    assert flag.split("=")[0] in failure(capsys, *flags)
    assert not Path("out").exists() and not Path("data").exists()


@pytest.mark.parametrize("name", ["data", "sample_prompt"])
def test_what_train_config_json_could_not_keep_is_refused_at_the_start(corpus, capsys, name):
    """A file's name of other bytes than UTF-8's, as Python has it."""
    flags = [f"--data={corpus}", "--out_dir=out/a", *SHAPE, *QUICK, f"--{name}=d\udcff.jsonl"]
    assert f"{name} = 'd\\udcff.jsonl' is not UTF-8" in failure(capsys, *flags)
    assert not Path("out").exists()


def test_what_is_no_config_file_is_named(corpus, capsys):
    assert "configs/tiny does not exist" in failure(capsys, "configs/tiny")
    assert "two dashes" in failure(capsys, "-max_steps=3")
    assert "one config file at a time" in failure(capsys, "a.py", "b.py")
    Path("c.py").write_text("import sys\nsys.exit(5)\n")
    assert "SystemExit" in failure(capsys, "c.py")


def test_an_out_dir_that_cannot_be_is_refused(corpus, capsys):
    Path("file").touch()
    for out_dir in ("file", "file/sub"):
        said = failure(capsys, f"--data={corpus}", *SHAPE, *QUICK, f"--out_dir={out_dir}")
        assert "not a directory" in said
    assert not Path("data").exists()


def test_resume_with_another_learning_rate_uses_it(corpus):
    run(corpus, "out/a", "--max_steps=2", "--schedule=wsd")
    flags = ["--max_steps=4", "--log_every=1", "--learning_rate=0.5", "--weight_decay=0.3"]
    step = run(corpus, "out/a", "--resume", *flags)
    assert metrics("out/a")[1]["lr"] == pytest.approx(0.5)
    for optimizer in checkpoint.load_training_state(step)["optimizers"]:
        for group in optimizer["param_groups"]:
            assert group["peak_lr"] == 0.5 and group["weight_decay"] in (0.3, 0.0)


def test_resume_behind_the_last_step_is_refused_and_changes_nothing(corpus):
    run(corpus, "out/a", "--max_steps=3")
    before = Path("out/a/train_config.json").read_text()
    with pytest.raises(UserError, match="at step 3 already"):
        run(corpus, "out/a", "--max_steps=2", "--resume")
    assert Path("out/a/train_config.json").read_text() == before


def test_resume_on_changed_data_is_refused(corpus):
    run(corpus, "out/a", "--max_steps=2")
    rows = (corpus / "train.jsonl").read_text().splitlines(keepends=True)
    (corpus / "train.jsonl").write_text("".join(rows[:-1]))
    with pytest.raises(UserError, match="has changed since"):
        run(corpus, "out/a", "--max_steps=4", "--resume")


@pytest.mark.parametrize("content", ["{", "", "[]", '{"foo": 1}', '{"max_steps": "x"}'])
def test_a_damaged_train_config_is_named(corpus, capsys, content):
    run(corpus, "out/a", "--max_steps=1")
    Path("out/a/train_config.json").write_text(content)
    flags = [f"--data={corpus}", "--out_dir=out/a", *SHAPE, *QUICK]
    assert "train_config.json" in failure(capsys, *flags, "--resume")
    assert "train_config.json" in failure(capsys, *flags)


@pytest.mark.parametrize("content", [None, b"", b"garbage", b"PK\x03\x04"])
def test_a_damaged_training_state_is_named(corpus, capsys, content):
    step = run(corpus, "out/a", "--max_steps=1")
    (step / "training_state.pt").unlink()
    if content is not None:
        (step / "training_state.pt").write_bytes(content)
    flags = [f"--data={corpus}", "--out_dir=out/a", *SHAPE, *QUICK, "--max_steps=2", "--resume"]
    assert "training_state.pt is missing or damaged" in failure(capsys, *flags)


def test_damaged_metrics_are_named_and_a_lost_step_json_costs_nothing(corpus, capsys):
    step = run(corpus, "out/a", "--max_steps=1")
    (step / "step.json").unlink()
    run(corpus, "out/a", "--max_steps=2", "--resume")
    for line in ("garbage}", "{}"):
        Path("out/a/metrics.jsonl").write_text(line + '\n{"step": 1, "loss": 1.0}\n')
        flags = [f"--data={corpus}", "--out_dir=out/a", *SHAPE, *QUICK, "--max_steps=3"]
        assert "metrics.jsonl, line 1" in failure(capsys, *flags, "--resume")


def test_a_validation_loss_that_is_not_finite_is_logged_and_ends_nothing(corpus, monkeypatch):
    monkeypatch.setattr(train, "evaluate", lambda *_: float("nan"))
    run(corpus, "out/a", "--max_steps=2")
    assert metrics("out/a")[-1]["val_loss"] == "nan"


def test_wandb_logs_offline_and_the_run_ends_well(corpus, capsys):
    run(corpus, "out/a", "--max_steps=2", "--wandb")
    assert list(Path("out/a/wandb").glob("offline-run-*"))
    assert "checkpoint  out/a/step_00000002" in capsys.readouterr().out


def test_wandb_continues_the_same_run(corpus, monkeypatch):
    """And a run of the same name elsewhere is another one."""
    started, logged, finished = [], [], []
    stub = types.SimpleNamespace(
        init=lambda **options: started.append(options) or stub,
        log=lambda line, step: logged.append((started[-1]["id"], step)),
        finish=lambda: finished.append(started[-1]["id"]),
        api=types.SimpleNamespace(api_key=None),
    )
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setitem(sys.modules, "wandb", stub)
    run(corpus, "out/a", "--max_steps=2", "--wandb", "--log_every=1")
    run(corpus, "out/a", "--max_steps=4", "--wandb", "--resume")
    shutil.move("out/a", "out/old")
    run(corpus, "out/a", "--max_steps=2", "--wandb")
    first, resumed, other = started
    assert first["id"] == resumed["id"] != other["id"]
    assert first["name"] == other["name"] == "out/a"
    assert {options["resume"] for options in started} == {"allow"}
    assert {options["mode"] for options in started} == {"offline"}  # there is no login
    assert [step for id, step in logged if id == first["id"]] == [1, 2, 3, 4]
    assert finished == [options["id"] for options in started]
