"""Train a GPT:  python train.py configs/tiny.py   (--help lists every option)

One story. `train_run` is its spine; what it calls stands below it, in the order of the calls:
  1. the machine      device, dtype, processes (machine.py)
  2. the data         corpus, tokenizer, rows, batches
  3. the model        from scratch, from a checkpoint, or from where this run stopped
  4. the optimizers   AdamW, or Muon for the blocks' matrices; the learning rate's schedule
  5. the loop         take a step; evaluate and sample; save
"""

import contextlib
import math
import os
import shlex
import signal
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import checkpoint
from config import TrainConfig, UserError, check_values, parse_config, run_program
from data import tinyworld
from data.batches import Batches
from data.dataset import TokenRows, load_dataset, training_texts
from data.tokenizer import Tokenizer
from files import read_json, shown
from induction import begin_to_look_back, begin_with_induction
from machine import Machine, launcher
from model import GPT, GPTConfig
from muon import Muon
from ngrams import NGrams
from pretrained import MOST_LAYERS, matrix_entries, physical_memory
from report import Report, forward_flops, peak_flops
from sample import generate

CACHE = Path("data/cache")
BAD_STEPS_IN_A_ROW = 20  # after so many steps with a loss or gradient that is not finite, stop


@dataclass
class Progress:
    """How far a run has come. Saved with each checkpoint."""

    step: int = 0  # optimizer steps done
    tokens: int = 0  # real tokens seen, padding not counted
    targets: int = 0  # supervised ones among them
    seconds: float = 0.0  # of wall clock, evaluations included
    skipped_steps: int = 0  # whose loss or gradient was not finite
    val_loss: float | None = None  # at this step, where it was evaluated


def train(config: TrainConfig) -> None:
    """Run one configuration from its beginning, or from where it stopped, to its end.

    Raises UserError for a mistake in the configuration or the data; nothing is written then.
    """
    check_values(config)
    shape_of(config, config.vocab_size)  # refuses a shape that cannot be built, before the data
    with checkpoint.RunLock(Path(config.out_dir)) as lock:
        train_run(config, lock)


def train_run(config: TrainConfig, lock: checkpoint.RunLock) -> None:
    """The story. Nobody else writes to the run once `lock` is taken."""
    run = Path(config.out_dir)
    lock.take()
    resume_from = find_resume_point(run, config)

    # 1. the machine

    machine = Machine.start(config)
    machine.check_same("checkpoint to go on from", str(resume_from))
    say = print if machine.is_main else (lambda *_: None)
    say(f"device      {machine.device}, {machine.reason}")

    # 2. the data

    model, tokenizer = None, None
    begins_anew = config.induction_init and not resume_from
    if resume_from or config.init_from:
        source = str(resume_from or config.init_from)
        device = machine.birthplace if machine.sharded or begins_anew else machine.device
        with machine.first_process_first():
            model, tokenizer, directory = checkpoint.load_model(source, device, torch.float32)
        say(f"weights     {directory}")
    with machine.first_process_first():
        if resume_from is None:
            tokenizer = choose_tokenizer(config, tokenizer)
        train_rows, val_rows, floor = load_rows(config, tokenizer)
    machine.check_same("training data", train_rows.fingerprint)
    machine.check_same("validation data", val_rows.fingerprint)
    if train_rows.is_chat:
        tokenizer.learn_chats()
    say(f"tokenizer   {tokenizer.vocab_size:,} ids")
    say(f"training    {train_rows.report}")
    say(f"validation  {val_rows.report}")
    size = (config.batch_size, config.max_seq_len)
    ranks: dict = {"rank": machine.rank, "world_size": machine.world_size}
    num_logits = model.config.vocab_size if model else padded(tokenizer.vocab_size)
    soften = softener(config, train_rows, num_logits, progress=machine.is_main)
    train_batches = Batches(train_rows, *size, seed=config.seed, soften=soften, **ranks)
    val_batches = Batches(val_rows, *size, seed=0, shuffle=False, **ranks)

    # 3. the model

    torch.manual_seed(config.seed)
    if model is None:
        with machine.birthplace:
            model = GPT(shape_of(config, tokenizer.vocab_size))
            if config.induction_init:
                begin_with_induction(model)
    elif begins_anew:
        shape = model.config
        has = (shape.num_hidden_layers, shape.num_attention_heads, shape.num_key_value_heads)
        if any(number < least for number, least in zip(has, (3, 4, 2), strict=True)):
            raise UserError(
                f"{config.init_from} has num_hidden_layers = {has[0]}, num_attention_heads = "
                f"{has[1]} and num_key_value_heads = {has[2]}: with it, --induction_init needs at "
                "least 3, 4 and 2"
            )
        begin_to_look_back(model)
    if config.max_seq_len > model.config.max_position_embeddings:
        raise UserError(
            f"max_seq_len ({config.max_seq_len}) is beyond the model's context limit, "
            f"max_position_embeddings ({model.config.max_position_embeddings})"
        )
    compiled = config.compile
    if compiled is None:
        compiled = machine.device.type == "cuda"
    model, forward = place(model, machine, compiled)
    model.config.dropout = config.dropout
    model.config.attention = config.attention
    model.model.recompute_activations = config.recompute_activations
    model.train()
    say(f"model       {model.num_parameters():,} parameters")
    if compiled:
        say(f"compiling   for batches of {len(train_batches.shapes)} shapes")
        compile_ahead(forward, train_batches, machine)

    # 4. the optimizers

    optimizers = make_optimizers(model, config)
    scaler = torch.amp.GradScaler(machine.device.type, enabled=machine.dtype == torch.float16)
    progress = Progress()
    if resume_from:
        with machine.together():
            state = checkpoint.load_training_state(resume_from)
            checkpoint.check_state(state, resume_from, Progress, optimizers)
        if state["data"] != train_rows.fingerprint:
            raise UserError(
                f"{config.data} has changed since {run} was started, and with it the order of the "
                f"rows: put the file back, or start another run from {resume_from} with --init_from"
            )
        progress = Progress(**state["progress"])
        moments = state["optimizers"]
        if machine.sharded or moments is None:  # it goes to parts, or comes from parts
            import sharding

            shards = resume_from / "training_state"
            with machine.together():
                moments = sharding.load_moments(optimizers, moments, shards, machine.talk)
                checkpoint.check_moments(moments, shards, optimizers)
        for optimizer, saved in zip(optimizers, moments, strict=True):
            load_optimizer(optimizer, saved)
        if state["scaler"]:  # else the run was not in fp16 until now
            scaler.load_state_dict(state["scaler"])
        if progress.step > config.max_steps:
            raise UserError(
                f"{run} is at step {progress.step} already, beyond max_steps = {config.max_steps}"
            )
        say(f"resuming    after step {progress.step:,} of {config.max_steps:,}")
    with machine.together():
        if machine.is_main:
            lock.take(make_directory=True)
            checkpoint.start_run(run, config, progress.step)

    # 5. the loop

    def save() -> Path | None:
        """Write a checkpoint; its directory in the main process, None in the others."""
        state: dict = {
            "progress": asdict(progress),
            "optimizers": None,  # in parts, if the model is
            "scaler": scaler.state_dict(),
            "data": train_rows.fingerprint,
        }
        whole, shards, saved = model, None, None
        if machine.sharded:
            import sharding

            whole, shards = sharding.gather_model(model), run / ".partial_training_state"
        with machine.together():
            if machine.is_main and not all(bool(p.isfinite().all()) for p in whole.parameters()):
                report.close()
                raise UserError(
                    f"the weights are not finite after step {progress.step}, so they are not "
                    f"saved: lower --learning_rate; the last good checkpoint is "
                    f"{saved_in or 'none: nothing was saved yet'}"
                )
        if machine.sharded:
            with machine.together():
                sharding.save_moments(optimizers, shards, machine.talk)
        else:
            state["optimizers"] = [optimizer.state_dict() for optimizer in optimizers]
        with machine.together():
            if machine.is_main:
                keep = config.keep_checkpoints
                saved = checkpoint.save_checkpoint(run, whole, tokenizer, state, keep, shards)
        return saved

    peak = peak_flops(machine.device, machine.dtype)
    peak = peak and peak * machine.world_size
    report = Report(run, config, machine.is_main, progress.step, machine.device, peak)
    stop = StopSignal(patient=machine.world_size > 1)
    micro_batches = train_batches.stream(progress.step * config.grad_accum)
    started = time.perf_counter() - progress.seconds
    train_loss, train_targets = 0.0, 0  # since the last evaluation
    bad_in_a_row = 0
    saved_in = resume_from
    stopping = False
    while progress.step < config.max_steps and not stopping:
        # Dropout is a function of (seed, step, rank): nothing of it to save, and resuming is exact.
        machine.seed((config.seed * 1_000_003 + progress.step) * 1_009 + machine.rank)
        set_learning_rate(optimizers, progress.step, config)
        asked = time.perf_counter()
        window = [next(micro_batches) for _ in range(config.grad_accum)]
        wait_ms = (time.perf_counter() - asked) * 1000  # for data: near 0 unless it is the brake
        step = take_step(forward, optimizers, scaler, window, machine, config, stop)

        stopping = step.asked_to_stop
        progress.step += 1
        progress.tokens += step.tokens
        progress.targets += step.targets
        progress.seconds = time.perf_counter() - started
        progress.val_loss = None
        if step.is_good:  # else take_step has skipped it
            bad_in_a_row = 0
            train_loss += step.loss * step.targets
            train_targets += step.targets
        else:
            bad_in_a_row += 1
            progress.skipped_steps += 1
            if bad_in_a_row == BAD_STEPS_IN_A_ROW:
                report.close()
                first = (progress.step - 1) * config.grad_accum
                rows = rows_named(train_batches, first, first + config.grad_accum)
                with machine.together():
                    raise UserError(
                        f"loss or gradient was not finite {bad_in_a_row} times in a row, up to "
                        f"step {progress.step}, whose {rows}: lower --learning_rate or "
                        f"--grad_clip; the last good checkpoint is "
                        f"{saved_in or 'none: nothing was saved yet'}"
                    )
        line = asdict(progress) | {"loss": step.loss, "grad_norm": step.grad_norm}
        line["lr"] = optimizers[0].param_groups[0]["lr"]
        line["data_wait_ms"] = round(wait_ms, 3)
        shapes = [batch["input_ids"].shape for batch in window]
        flops = sum(3 * forward_flops(model.config, B, T) for B, T in shapes)
        report.step(line, flops * machine.world_size)

        last = progress.step == config.max_steps
        if last or progress.step % config.eval_every == 0:
            val_loss = evaluate(model, val_batches, config.eval_batches, machine)
            bits = val_loss / math.log(2) * val_rows.num_targets
            line |= {"val_loss": val_loss, "val_ppl": math.exp(min(val_loss, 700)), "floor": floor}
            line |= {"val_bpb": bits / max(val_rows.target_bytes, 1)}
            progress.val_loss = val_loss
            report.write(line)
            sample = ""
            if not machine.sharded:  # a token would gather all weights
                sample = sample_text(model, tokenizer, val_rows, config, progress.step)
            report.evaluation(line, train_loss / max(train_targets, 1), sample)
            train_loss, train_targets = 0.0, 0
            model.train()
        elif progress.step % config.log_every == 0:
            report.write(line)
        due = progress.step % config.save_every == 0 and bad_in_a_row == 0
        if last or stopping or due:
            saved_in = save()
    report.close()

    # the end

    command = shlex.join([*launcher(), *sys.argv, *([] if config.resume else ["--resume"])])
    if progress.step < config.max_steps:
        say(f"stopped     after step {progress.step:,}, saved in {saved_in}")
        say(f"go on with  {command}")
    else:
        say(f"done        in {progress.seconds / 60:.1f} minutes, {progress.tokens:,} tokens")
        say(f"checkpoint  {saved_in}")
        say(f"curve       {run / 'loss.png'}")
        say(f"sample      {sample_command(config, train_rows)}")
    machine.stop()
    stop.stop_listening()


# --------------------------------------------------------------------------------- 2. the data


def choose_tokenizer(config: TrainConfig, of_checkpoint: Tokenizer | None) -> Tokenizer:
    """The checkpoint's own tokenizer; from scratch, the one that is asked for, trained if "bpe"."""
    if of_checkpoint is not None:
        if config.tokenizer is not None:
            raise UserError(
                f"--tokenizer={config.tokenizer} goes with a new model; {config.init_from} "
                "comes with its own, which its weights were trained on: leave --tokenizer out"
            )
        return of_checkpoint
    if config.tokenizer in (None, "bpe"):
        data, val_data = data_paths(config)
        texts = training_texts(data, val_data, config.val_fraction, on_bad_row=config.on_bad_row)
        return Tokenizer.train(texts, config.vocab_size)
    return Tokenizer.load(config.tokenizer)


def data_paths(config: TrainConfig) -> tuple[str, str | None]:
    """Where the data lies. The embedded corpus is made here if it is not there yet."""
    parts = {
        "tinyworld": "stories",
        "tinyworld_chats": "chats",
        "tinyworld_easy": "easy",
    }
    if config.data not in parts:
        return config.data, config.val_data
    tinyworld.prepare(CACHE / "tinyworld")
    return str(CACHE / "tinyworld" / parts[config.data]), config.val_data


def load_rows(
    config: TrainConfig, tokenizer: Tokenizer
) -> tuple[TokenRows, TokenRows, float | None]:
    """Training rows, validation rows, and the loss of a perfect model where it is known."""
    data, val_data = data_paths(config)
    train_rows, val_rows = load_dataset(
        data,
        val_data,
        config.val_fraction,
        tokenizer=tokenizer,
        max_seq_len=config.max_seq_len,
        on_bad_row=config.on_bad_row,
        cache_dir=CACHE,
    )
    floor = None
    if val_data is None and os.path.isfile(Path(data) / "floor.json"):
        floor = read_floor(Path(data)) / val_rows.num_targets
    return train_rows, val_rows, floor


def softener(
    config: TrainConfig, rows: TokenRows, vocab_size: int, progress: bool = False
) -> Callable | None:
    """What makes the soft labels of micro-batch g (ngrams.py), (g, numbers of rows, (B, T)) ->
    (B, T, V); None where ngram_weight is 0. Raises UserError for a text that cannot be counted."""
    first, last = config.ngram_weight, config.ngram_last_weight
    if first == 0:
        return None
    ngrams = NGrams(rows, vocab_size, config.ngram_order, progress)

    def soften(g: int, chosen: np.ndarray, shape: tuple[int, int]) -> Tensor:
        done = g // config.grad_accum / config.max_steps
        weight = first + (last - first) * min(done, 1.0)
        return ngrams.soft_labels(chosen, shape, weight)

    return soften


def read_floor(directory: Path) -> float:
    """Nats that a perfect model needs for the validation data beside this floor.json. UserError."""
    try:
        val_nats = read_json(directory, "floor.json").get("val_nats")
    except ValueError as error:
        raise UserError(str(error)) from error
    if type(val_nats) not in (int, float) or not 0 <= val_nats < 1e300:
        raise UserError(
            f"{directory / 'floor.json'}: val_nats is {shown(val_nats)}, not a number from 0 on"
        )
    return float(val_nats)


# -------------------------------------------------------------------------------- 3. the model

# Options that decide what a run is. The others may change when it is resumed.
FIXED_OPTIONS = (
    "seed init_from data val_data val_fraction tokenizer vocab_size max_seq_len on_bad_row "
    "hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "intermediate_size max_position_embeddings rope_theta rms_norm_eps tie_word_embeddings "
    "induction_init batch_size grad_accum optimizer"
).split()


def find_resume_point(run: Path, config: TrainConfig) -> Path | None:
    """The run's newest checkpoint; None to start from the beginning.

    Raises UserError where the directory holds a run and --resume is not given, and where an option
    that decides what the run is differs from the run's own.
    """
    # os.path's, unlike Path's, bears names that no file can have.
    existing = next(path for path in [run, *run.parents] if os.path.exists(path))
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise UserError(f"--out_dir={run}: {existing} is not a directory that can be written to")
    before = checkpoint.read_run(run)
    if before is None:
        return None
    if not config.resume:
        command = [*launcher(), *sys.argv]
        elsewhere = [part for part in command if not part.startswith("--out_dir=")]
        raise UserError(
            f"{run} already holds a run; nothing was changed. Continue it:\n"
            f"  {shlex.join([*command, '--resume'])}\n"
            f"or start another one beside it:\n"
            f"  {shlex.join([*elsewhere, f'--out_dir={checkpoint.free_name(run)}'])}"
        )
    for name in FIXED_OPTIONS:
        if before[name] != getattr(config, name):
            raise UserError(
                f"{run} was started with {name} = {before[name]!r}; resuming it with "
                f"{getattr(config, name)!r} would make it another run. "
                f"Leave --{name} out, or start one elsewhere with --out_dir"
            )
    steps = checkpoint.saved_steps(run)
    return steps[-1] if steps else None


def padded(vocab_size: int) -> int:
    """The number of logits for so many ids: matrix kernels like multiples."""
    return math.ceil(vocab_size / 64) * 64


def shape_of(config: TrainConfig, vocab_size: int) -> GPTConfig:
    """The shape of a new model. Raises UserError for one that cannot be built."""
    names = (
        "hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
        "intermediate_size rope_theta rms_norm_eps tie_word_embeddings dropout attention"
    ).split()
    try:
        shape = GPTConfig(
            vocab_size=padded(vocab_size),
            max_position_embeddings=config.max_position_embeddings or config.max_seq_len,
            **{name: getattr(config, name) for name in names},
        )
    except ValueError as error:
        raise UserError(str(error)) from error
    if shape.num_hidden_layers > MOST_LAYERS:
        raise UserError(
            f"num_hidden_layers = {shape.num_hidden_layers}, but it must be at most {MOST_LAYERS}"
        )
    weights = 4 * matrix_entries(shape)  # bytes, in fp32, in the first process at least
    if weights > physical_memory():
        raise UserError(
            f"the weights of this shape need {weights / 2**30:,.0f} GiB, but this machine has "
            f"{physical_memory() / 2**30:,.0f} GiB of memory: lower --hidden_size, "
            "--intermediate_size, --num_hidden_layers or --vocab_size"
        )
    return shape


def place(model: GPT, machine: Machine, compiled: bool) -> tuple[GPT, torch.nn.Module]:
    """(the model on its device, what to call to train it): compiled, and for several processes."""
    if machine.sharded:
        import sharding  # here and below: it takes a second or two to import

        model = sharding.shard_model(model, machine.device, machine.dtype, compiled)
        return model, model
    model = model.to(machine.device)
    forward = cast(torch.nn.Module, torch.compile(model)) if compiled else model
    if machine.world_size > 1:
        forward = DistributedDataParallel(forward)
    return model, forward


def compile_ahead(forward: torch.nn.Module, batches: Batches, machine: Machine) -> None:
    """Compile forward and backward now, for every shape (B, T) that is to come, in this order.

    The code depends on the shape that is met first. A resumed run begins with another batch than
    the run that was never stopped, so left to chance they would differ in the last bits.
    The batches have no targets, so that no gradient but zero comes of them.
    """
    for shape in batches.shapes:
        input_ids = torch.zeros(shape, dtype=torch.long)
        labels = torch.full_like(input_ids, -100)
        tensors = {"input_ids": input_ids, "labels": labels}
        if batches.soften is not None:
            tensors["soft_labels"] = batches.soften(0, np.array([-1]), shape)
        tensors = {name: machine.move(tensor) for name, tensor in tensors.items()}
        # One graph for all: not dynamic=True, for which eps is a variable too. (FSDP's blocks are
        # compiled one by one, and get there by their second shape.)
        if len(batches.shapes) > 1:
            for tensor in tensors.values():
                torch._dynamo.maybe_mark_dynamic(tensor, [0, 1])
        try:
            with machine.autocast():
                loss_sum, _ = forward(**tensors)
            loss_sum.backward()
        except torch._dynamo.exc.BackendCompilerFailed as error:  # no C++ compiler, say
            why = str(error.inner_exception).partition("\n")[0]
            raise UserError(
                f"torch.compile cannot compile here ({why}); --compile=False trains without it"
            ) from error
    forward.zero_grad()


# --------------------------------------------------------------------------- 4. the optimizers


def make_optimizers(model: GPT, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """AdamW for everything; or Muon for the matrices of the blocks and AdamW for the rest.

    Muon (muon.py) is meant for hidden matrices: an embedding's rows are looked up, not multiplied.
    Its steps have AdamW's size, so both share their scale of learning rates and weight decay.
    """
    hidden = [p for p in model.model.layers.parameters() if p.dim() == 2]
    is_hidden = {id(p) for p in hidden}
    tables = [p for p in model.parameters() if p.dim() == 2 and id(p) not in is_hidden]
    norms = [p for p in model.parameters() if p.dim() == 1]
    rest_lr = config.learning_rate
    optimizers: list[torch.optim.Optimizer] = []
    if config.optimizer == "muon":
        if config.embedding_learning_rate is not None:
            rest_lr = config.embedding_learning_rate
        settings = (config.learning_rate, config.weight_decay, config.momentum)
        optimizers.append(Muon(hidden, *settings))
    else:
        tables = hidden + tables
    groups = [
        {"params": tables, "weight_decay": config.weight_decay},
        {"params": norms, "weight_decay": 0.0},  # a norm's weight has no reason to be small
    ]
    optimizers.append(torch.optim.AdamW(groups, lr=rest_lr, betas=(0.9, 0.95), fused=True))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


def schedule(step: int, config: TrainConfig) -> float:
    """The learning rate of optimizer step `step` (0-based) as a share of its peak."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.schedule == "wsd":
        decay_steps = config.decay_fraction * config.max_steps
        progress = max(0.0, 1 - (config.max_steps - step) / decay_steps)
        falling = 1 - progress
    else:
        progress = (step - config.warmup_steps) / max(1, config.max_steps - config.warmup_steps)
        falling = 0.5 * (1 + math.cos(math.pi * min(progress, 1)))
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * falling


def set_learning_rate(
    optimizers: list[torch.optim.Optimizer], step: int, config: TrainConfig
) -> None:
    """Set every group's learning rate for optimizer step `step`."""
    scale = schedule(step, config)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * scale


def load_optimizer(optimizer: torch.optim.Optimizer, saved: dict) -> None:
    """Take the saved moments, but keep the settings: they may have been changed for --resume."""
    settings = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": saved["state"], "param_groups": settings})


# --------------------------------------------------------------------------------- 5. the loop


@dataclass
class Step:
    """What one optimizer step came to, over all its micro-batches and processes."""

    loss: float  # per target
    grad_norm: float
    targets: int
    tokens: int
    asked_to_stop: bool = False

    @property
    def is_good(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


def take_step(
    forward: torch.nn.Module,
    optimizers: list[torch.optim.Optimizer],
    scaler: torch.amp.GradScaler,
    window: list[dict],
    machine: Machine,
    config: TrainConfig,
    stop: "StopSignal | None" = None,
) -> Step:
    """One optimizer step over the micro-batches in `window`.

    If the loss or the norm of the gradient is not finite, the weights stay as they are. With fp16
    that is how the scaler finds its scale, from 65,536 down: it halves with each such step.

    The loss is divided by the targets of the whole step, so every target weighs the same wherever
    it fell. The mean of the micro-batches' means, the usual shortcut, gives a target in a short
    micro-batch more weight than one in a long one.
    """
    targets = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in window)
    tokens = sum(batch["num_tokens"] for batch in window)
    counts = machine.sum(machine.numbers(targets, tokens))
    divisor = counts[0].clamp(min=1).float()
    loss = torch.zeros((), device=machine.device)
    for number, batch in enumerate(window):
        tensors = {name: machine.move(batch[name]) for name in batch if name != "num_tokens"}
        # DDP averages gradients over processes: once, with the last micro-batch. FSDP does with
        # each, since no process has room for a whole gradient.
        wait: contextlib.AbstractContextManager = contextlib.nullcontext()
        if isinstance(forward, DistributedDataParallel) and number < len(window) - 1:
            wait = forward.no_sync()
        with wait:
            with machine.autocast():
                loss_sum, _ = forward(**tensors)
            share = loss_sum / divisor
            scaler.scale(share * machine.world_size).backward()
        loss += share.detach()
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    parameters = [p for o in optimizers for group in o.param_groups for p in group["params"]]
    max_norm = config.grad_clip if config.grad_clip > 0 else math.inf
    grad_norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    if machine.sharded:
        grad_norm = grad_norm.full_tensor()  # type: ignore[attr-defined]  # it is a DTensor
    asked = machine.numbers(stop is not None and stop.asked)
    sums = machine.sum(torch.cat([loss.to(asked.dtype)[None], asked]))
    # The one place in a step where the host waits for the device.
    figures = torch.cat([sums, grad_norm.to(asked.dtype)[None], counts]).tolist()
    loss, asked, grad_norm, targets, tokens = figures
    step = Step(loss, grad_norm, int(targets), int(tokens), asked > 0)
    if step.is_good:
        for optimizer in optimizers:
            optimizer.step()  # and not scaler.step, which would wait to ask once more
    scaler.update()
    for optimizer in optimizers:
        optimizer.zero_grad()
    return step


def rows_named(batches: Batches, start: int, stop: int) -> str:
    """The rows of micro-batches start to stop - 1, as a phrase; of many only the first."""
    rows = np.concatenate([batches.rows_of(g) for g in range(start, stop)])
    shown = ", ".join(map(str, rows[:20])) + (", ..." if len(rows) > 20 else "")
    numbers = (
        f"micro-batch {start}" if stop == start + 1 else f"micro-batches {start} to {stop - 1}"
    )
    return f"{len(rows)} rows are {shown} of the training data ({numbers})"


@torch.no_grad()
def evaluate(model: GPT, batches: Batches, limit: int | None, machine: Machine) -> float:
    """Mean loss per target, over all validation batches or the first `limit`: always the same."""
    model.eval()
    sums = []
    for number in range(min(batches.per_epoch, limit or batches.per_epoch)):
        batch = batches[number]
        with machine.autocast():
            sums.append(
                model(machine.move(batch["input_ids"]), labels=machine.move(batch["labels"]))
            )
    # (batches, 2), summed in float64, which not every device has
    table = torch.stack([torch.stack([loss_sum, targets]) for loss_sum, targets in sums])
    loss_sum, targets = machine.sum(table.cpu().double().sum(0)).tolist()
    return loss_sum / max(targets, 1)


def sample_text(
    model: GPT, tokenizer: Tokenizer, val_rows: TokenRows, config: TrainConfig, step: int
) -> str:
    """A short continuation of sample_prompt; without one, of what precedes the first target of a
    validation row: nothing but the beginning for a text, the question for a chat."""
    if config.sample_tokens == 0:
        return ""
    if config.sample_prompt is not None:
        prompt = tokenizer.encode_prompt(config.sample_prompt)
    else:
        row = step // config.eval_every % len(val_rows)
        input_ids, labels = val_rows[row]
        first_target = (labels[1:] != -100).tolist().index(True) + 1
        prompt = input_ids[:first_target].tolist()
    prompt = prompt[: model.config.max_position_embeddings - 1]
    model.eval()
    new_tokens = generate(
        model,
        [prompt],
        config.sample_tokens,
        seed=config.seed,
        stop_ids=tokenizer.stop_ids,
        forbidden_ids=tokenizer.unused_ids
        + list(range(tokenizer.vocab_size, model.config.vocab_size)),
    )
    beginning = [tokenizer.bos_token_id]
    shown = prompt[1:] if prompt[:1] == beginning else prompt
    return tokenizer.decode(shown + new_tokens[0])


class StopSignal:
    """Ctrl-C and SIGTERM ask the loop to finish its step, save and end. Twice: end at once, but not
    if `patient`: of several processes, each may get one from the terminal and one from torchrun.
    """

    def __init__(self, patient: bool = False):
        self.asked, self.patient = False, patient
        numbers = (signal.SIGINT, signal.SIGTERM)
        self.before = {number: signal.signal(number, self.on_signal) for number in numbers}

    def stop_listening(self) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def on_signal(self, number, frame) -> None:
        if self.asked and not self.patient:
            raise KeyboardInterrupt
        self.asked = True


def sample_command(config: TrainConfig, rows: TokenRows) -> str:
    command = ["python", "sample.py", f"--checkpoint={config.out_dir}"]
    if rows.is_chat:
        command.append("--chat")
    elif config.sample_prompt is not None:
        command += ["--prompt", config.sample_prompt]
    return shlex.join(command)


def main(arguments: list[str]) -> None:
    warnings.filterwarnings("ignore")  # of libraries, about themselves; ours are errors
    train(parse_config(TrainConfig, arguments))


if __name__ == "__main__":
    run_program(main)
