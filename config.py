"""Every option of both programs: typed, and documented once, here.

`python train.py --help` prints TrainConfig, `python sample.py --help` prints SampleConfig. A recipe
in configs/ is a Python file that assigns some of these names; flags override it. Then come the
pieces that both programs share: reading the command line, choosing a device, and ending with one
sentence instead of a traceback when the mistake is the person's.
"""

import difflib
import math
import os
import runpy
import sys
import types as types_module
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_type_hints

import tyro

from files import is_text, read_json, shown


class UserError(ValueError):
    """A mistake of the person at the terminal. Its text is the whole message: what, where, mend."""


@dataclass
class TrainConfig:
    """Train a GPT:  python train.py configs/tiny.py [--option=value ...]

    A config file is Python that assigns plain values, such as `max_steps = 2000`; it is run, so
    read a stranger's before you use it. Flags override the file.
    """

    # --- the run

    out_dir: str | None = None
    """The run's directory. None: out/ and the config file's name."""
    resume: bool = False
    """Continue the run in out_dir from its newest checkpoint, or start it where there is none. The
    run keeps the options that it was started with, whatever the config file says now; flags go
    over them."""
    init_from: str | None = None
    """Start from these weights (a run, a checkpoint directory or a hub id) and their tokenizer."""
    seed: int = 1337
    """Decides the first weights, the order of the data and the dropout."""

    # --- the data

    data: str = "tinyworld"
    """Training data: "tinyworld", "tinyworld_easy" or "tinyworld_chats" (made here), a file
    (.jsonl .json .jsonl.gz .parquet .csv .txt), a directory, a glob, or a hub name."""
    val_data: str | None = None
    """Validation data. None: val.* beside train.* in a directory, else val_fraction of data."""
    val_fraction: float = 0.1
    """Share of data that validates where there is no val_data: by hash; of a .txt, its end."""
    tokenizer: str | None = None
    """"bpe" (trained on the data), "bytes", a tokenizer.json or a directory with one, or a tiktoken
    name such as "gpt2". None: that of init_from, else "bpe"."""
    vocab_size: int = 1024
    """Ids of a tokenizer that is trained here."""
    max_seq_len: int = 256
    """Longest row, in tokens; longer documents become several rows."""
    on_bad_row: Literal["stop", "skip"] = "stop"
    """What to do with a row that cannot be read: stop before training, or skip and count it."""

    # --- the model (with init_from, its own shape)

    hidden_size: int = 128
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int | None = 2
    """Heads of keys and values, each shared by a group of query heads. None: one for each."""
    head_dim: int | None = None
    """None: hidden_size / num_attention_heads."""
    intermediate_size: int = 384
    """Width of the SwiGLU layer."""
    max_position_embeddings: int | None = None
    """The context limit that the checkpoint states, in tokens. None: max_seq_len."""
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True
    """Use the embedding as the output head too."""
    dropout: float = 0.0
    attention: Literal["sdpa", "manual"] = "sdpa"
    """torch's fused attention, or the readable one."""
    induction_init: bool = False
    """Begin with most of an induction head in the weights (induction.py): a small model then learns
    early to find again what stood before. With init_from: some of its heads begin anew, for
    questions; they look for a word and say what stood around it. That takes at least 3 layers,
    4 heads and 2 key/value heads."""

    # --- optimisation

    max_steps: int = 1000
    """Optimizer steps of the whole run."""
    ngram_weight: float = 0.0
    """Share of each target, at the first step, that is what counts of the training text expect and
    not the one token that came (ngrams.py): so a small text teaches more. 0: that token alone, all
    the time. The training loss shown is the cross entropy with these mixtures."""
    ngram_last_weight: float = 0.0
    """That share at the end; it gets there in a straight line, if ngram_weight is not 0."""
    ngram_order: int = 6
    """How many tokens before a target those counts look at."""
    batch_size: int = 16
    """Rows of max_seq_len tokens in a micro-batch, over all processes; shorter rows come in larger
    numbers, up to the same batch_size * max_seq_len positions."""
    grad_accum: int = 1
    """Micro-batches in an optimizer step."""
    optimizer: Literal["adamw", "muon"] = "muon"
    """"muon": Muon for the matrices of the blocks, AdamW for embedding, head and norms."""
    learning_rate: float = 1e-2
    """Peak learning rate; with muon, of the blocks' matrices."""
    embedding_learning_rate: float | None = None
    """With muon: peak learning rate of AdamW for the rest. None: as learning_rate."""
    momentum: float = 0.95
    """With muon: the share of the past in the direction of a step. Short runs want less of it."""
    weight_decay: float = 0.1
    """Decoupled decay, of matrices only."""
    grad_clip: float = 1.0
    """Largest norm of the whole gradient; 0: no clipping."""
    warmup_steps: int = 100
    """Steps of linear rise to the peak learning rate."""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """After the warm-up: a cosine down to the end, or "wsd": stay, then a straight line down."""
    decay_fraction: float = 0.3
    """wsd: the last share of the steps, in which the learning rate falls."""
    min_lr_ratio: float = 0.0
    """Learning rate at the end, as a share of the peak."""

    # --- watching and keeping

    eval_every: int = 250
    """Steps between evaluations; the last step always evaluates."""
    eval_batches: int | None = None
    """Validation batches in an evaluation, always the same ones. None: all."""
    save_every: int = 500
    """Steps between checkpoints; the last step always saves."""
    keep_checkpoints: int = 2
    """How many of the newest checkpoints to keep; the best one is kept besides."""
    log_every: int = 10
    """Steps between lines of metrics.jsonl."""
    sample_prompt: str | None = None
    """What the samples begin with. None: the beginning of a text; of a chat, its first question."""
    sample_tokens: int = 64
    """Tokens of the sample shown at each evaluation; 0: none."""
    wandb: bool = False
    """Log to Weights & Biases too (offline where there is no login)."""
    wandb_project: str = "gpt"

    # --- the machine

    device: str = "auto"
    """"auto" (CUDA, then MPS, then CPU), or a torch device such as "cuda:1"."""
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Dtype of the matrix products; weights stay fp32. "auto": bf16 on CUDA, else fp32."""
    compile: bool | None = None
    """torch.compile the model. None: on CUDA only."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """With torchrun: "ddp", the whole model in each process, or "fsdp", a part of it in each, for
    one that a device does not hold (no samples at evaluations). See docs/several_nodes.md."""
    recompute_activations: bool = False
    """Activation checkpointing: less memory for a third more compute."""


@dataclass
class SampleConfig:
    """Continue a text, python sample.py --prompt "One day", or talk, python sample.py --chat

    The text goes to stdout; speed, and why it ended, to stderr.
    """

    # --- what to continue

    prompt: str | None = None
    """The text to continue: itself, @file, or - for standard input. None: from the beginning. With
    --chat, the first message."""
    prompts_file: str | None = None
    """Many prompts, in one batch: JSONL with {"prompt"}, {"text"} or {"messages"} a line."""
    output: str | None = None
    """Where the completions of prompts_file go, as JSONL. None: stdout."""
    chat: bool = False
    """Talk with a model that was trained on chats; /help there lists the commands."""
    checkpoint: str | None = None
    """A run, a checkpoint directory or a hub id. None: the newest run under out/."""

    # --- how long

    max_new_tokens: int = 200
    """At most so many new tokens, the prompt not counted. The cache is made for prompt and answer:
    2 * layers * kv_heads * head_dim * bytes of the dtype, per token and row (MiniMind-3 in bf16: 12
    KiB), times prompts and num_samples."""
    stop: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Also end before this text; may be given several times."""
    num_samples: int = 1
    """Continuations of each prompt."""

    # --- which token

    temperature: float = 0.8
    """Below 1 the likely becomes likelier; 0 always takes the likeliest."""
    top_k: int = 0
    """Choose among the k likeliest only; 0: all."""
    top_p: float = 1.0
    """Choose among the likeliest that together hold this probability; 1: all."""
    min_p: float = 0.0
    """Leave out what is less likely than this share of the likeliest; 0: nothing."""
    repetition_penalty: float = 1.0
    """Above 1, what stands in the prompt or output already becomes less likely."""
    seed: int | None = None
    """Same seed, same text. None: another one each time, printed."""

    # --- the machine

    device: str = "auto"
    """"auto" (CUDA, then MPS, then CPU), or a torch device such as "cuda:1"."""
    dtype: Literal["auto", "fp32", "bf16", "fp16", "int8"] = "auto"
    """Dtype of weights and cache. "auto": bf16 on CUDA, else fp32. "int8": weights of 8 bits with a
    scale for each output, the rest bf16: fewer bytes to read for a token, a little less exact."""
    compile: bool | None = None
    """A compiled decode step, several times as fast. On a CPU decode.cpp's, compiled once on each
    machine (seconds); None: yes. On CUDA torch.compile's, after the first tokens, which takes
    seconds in each process; None: if 1,000 tokens may come."""


Config = TypeVar("Config", TrainConfig, SampleConfig)


def parse_config(config_class: type[Config], arguments: list[str]) -> Config:
    """Options from the command line, over those of a config file where one is given.

    Raises UserError for a mistake in the config file. A mistake in the flags, and --help, end the
    program here, with tyro's message and exit code 2 or 0.
    """
    files, flags = split_arguments(arguments, config_class)
    refuse_unknown_flags(flags, config_class)
    if len(files) > 1:
        raise UserError(f"one config file at a time, not {len(files)}: {', '.join(files)}")
    if files and files[0].startswith("-"):
        raise UserError(f"{files[0]}: options begin with two dashes; --help lists them")
    if files and config_class is SampleConfig:
        raise UserError(f'{files[0]} belongs to no option; a prompt is given as --prompt "..."')
    config: Any = config_class()
    if files:
        config = replace(config, **read_config_file(Path(files[0]), config_class))
    program = f"{config_class.__name__.removesuffix('Config').lower()}.py"
    convert = (tyro.conf.FlagConversionOff, tyro.conf.AvoidSubcommands)
    config = tyro.cli(config_class, prog=program, default=config, args=flags, config=convert)
    if config_class is TrainConfig:
        if config.out_dir is None:
            config.out_dir = f"out/{Path(files[0]).stem if files else 'run'}"
        saved = Path(config.out_dir) / "train_config.json"
        if config.resume and os.path.isfile(saved):  # unlike Path's, it bears any name
            # The run's own options, as it was started; flags given now go over them. Where it lies
            # is for us to say: its file may be a stranger's, and name another directory.
            where = {"out_dir": config.out_dir, "resume": True}
            config = replace(config, **(read_saved_options(saved) | where))
            config = tyro.cli(
                config_class, prog=program, default=config, args=flags, config=convert
            )
    return config


def read_saved_options(file: Path) -> dict:
    """A run's train_config.json, each option checked; an option added since has its default."""
    try:
        saved = read_json(file.parent, file.name)
    except ValueError as error:
        raise UserError(f"{error}; the run cannot be continued") from error
    types = get_type_hints(TrainConfig)
    if not saved.keys() <= types.keys():
        raise UserError(f"{file} does not hold the options of a run; it cannot be continued")
    values: dict[str, Any] = {
        name: checked(value, types[name], f"{file}: {name}") for name, value in saved.items()
    }
    return vars(TrainConfig(**values))


def split_arguments(arguments: list[str], config_class: type) -> tuple[list[str], list[str]]:
    """(config files, flags); a switch alone, such as `--chat`, becomes `--chat=True`."""
    types = get_type_hints(config_class)
    switches = {name for name, kind in types.items() if bool in (kind, *get_args(kind))}
    files, flags = [], []
    is_value = False  # the one before was a flag that waits for its value
    for place, argument in enumerate(arguments):
        name = argument.removeprefix("--").replace("-", "_")
        is_flag = not is_value and argument.startswith("--")
        if is_flag and name in switches:
            following = arguments[place + 1 : place + 2]
            if following not in (["True"], ["False"], ["None"]):
                argument += "=True"
        if not (is_flag or is_value or argument == "-h"):
            files.append(argument)
        else:
            flags.append(argument)
        is_value = is_flag and "=" not in argument
    return files, flags


def refuse_unknown_flags(flags: list[str], config_class: type) -> None:
    """A flag that does not exist is a UserError that names the nearest one that does."""
    known = list(get_type_hints(config_class)) + ["help"]
    for flag in flags:
        name = flag.removeprefix("--").split("=")[0].replace("-", "_")
        if flag.startswith("--") and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean --{near[0]}?" if near else "--help lists all"
            raise UserError(f"there is no option --{name}; {hint}")


def read_config_file(path: Path, config_class: type) -> dict:
    """Run a config file; return its assignments, each checked against the option of that name."""
    if not os.path.isfile(path):  # False, too, for what no file can be called
        there = sorted(str(file) for file in Path("configs").glob("*.py"))
        raise UserError(f"{path} does not exist; the configs here are: {', '.join(there)}")
    try:
        assigned = runpy.run_path(str(path))
    except (Exception, SystemExit) as error:
        line = getattr(error, "lineno", None)
        where = f"{path}, line {line}" if line else str(path)
        raise UserError(f"{where}: {type(error).__name__}: {error}") from error
    types = get_type_hints(config_class)
    values = {name: value for name, value in assigned.items() if not name.startswith("_")}
    values = {name: v for name, v in values.items() if not isinstance(v, types_module.ModuleType)}
    for name, value in values.items():
        if name not in types:
            near = difflib.get_close_matches(name, types, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UserError(f"{path}: there is no option {name}{hint}")
        values[name] = checked(value, types[name], f"{path}: {name}")
    return values


def checked(value: object, expected: type, where: str) -> Any:
    """The value, if it is of the option's type (a whole number passes for a float)."""
    allowed = get_args(expected) or (expected,)
    if float in allowed and type(value) is int and abs(value) < 1e300:
        return float(value)
    is_str = isinstance(value, str)  # a Literal's; an array would answer == with an array
    if not any(type(value) is option or (is_str and value == option) for option in allowed):
        names = [getattr(option, "__name__", repr(option)) for option in allowed]
        names = ["None" if name == "NoneType" else name for name in names]
        raise UserError(f"{where} = {shown(value)}, but it must be {' or '.join(names)}")
    return value


def check_values(config: TrainConfig) -> None:
    """Refuse values outside their range, by name. Raises UserError."""
    for name, kind in get_type_hints(TrainConfig).items():
        value = getattr(config, name)
        checked(value, kind, name)
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{name} = {value}, but it must be a finite number")
        if isinstance(value, int) and abs(value) >= 2**31:
            raise UserError(f"{name} = {shown(value)}, but it must be below 2**31")
        if value == "":
            raise UserError(f"{name} is empty: leave --{name} out, or give it a value")
        if isinstance(value, str) and not is_text(value):
            raise UserError(
                f"{name} = {shown(value)} is not UTF-8: the run could not be continued, for its "
                "train_config.json cannot hold that; choose another name"
            )
    at_least_one = (
        "max_steps batch_size grad_accum vocab_size eval_every save_every log_every ngram_order"
    )
    for name in at_least_one.split() + ["keep_checkpoints", "eval_batches"]:
        value = getattr(config, name)
        if value is not None and value < 1:
            raise UserError(f"{name} = {value}, but it must be at least 1")
    if config.max_seq_len < 2:
        raise UserError(f"max_seq_len = {config.max_seq_len}: a row needs a token and its target")
    at_least_zero = "seed learning_rate embedding_learning_rate weight_decay grad_clip warmup_steps"
    for name in at_least_zero.split() + ["sample_tokens", "min_lr_ratio"]:
        value = getattr(config, name)
        if value is not None and value < 0:
            raise UserError(f"{name} = {value}, but it must be at least 0")
    for name in ("rope_theta", "rms_norm_eps"):
        if getattr(config, name) <= 0:
            raise UserError(f"{name} = {getattr(config, name)}, but it must be above 0")
    if not 0 <= config.momentum < 1:
        raise UserError(f"momentum = {config.momentum}, but it must be at least 0 and below 1")
    for name in ("ngram_weight", "ngram_last_weight"):
        if not 0 <= getattr(config, name) <= 1:
            raise UserError(f"{name} = {getattr(config, name)}, but it must be from 0 to 1")
    for name in ("val_fraction", "decay_fraction"):
        if not 0 < getattr(config, name) < 1:
            raise UserError(f"{name} = {getattr(config, name)}, but it must be between 0 and 1")


def choose_device(device: str, dtype: str):
    """Resolve "auto": (torch.device, torch.dtype, the reason as a phrase to print)."""
    import torch  # here, so that --help does not wait for it

    if device == "auto":
        if torch.cuda.is_available():
            device = "cuda"
        elif torch.backends.mps.is_available():
            device = "mps"
        else:
            device = "cpu"
        reason = {"cuda": "a CUDA device is there", "mps": "an Apple GPU is there, no CUDA"}
        why = reason.get(device, "neither CUDA nor MPS is there")
    else:
        why = "as asked"
    if device.split(":")[0] not in ("cpu", "cuda", "mps"):
        raise UserError(f'--device={device}: it is "auto", "cpu", "mps", "cuda" or "cuda:1"')
    try:
        torch_device = torch.device(device)
        torch.empty(1, device=torch_device)
    except (RuntimeError, AssertionError) as error:
        first_line = str(error).splitlines()[0]
        raise UserError(f"--device={device} cannot be used here: {first_line}") from error
    if dtype == "auto":
        bf16 = torch_device.type == "cuda" and torch.cuda.is_bf16_supported()
        fp16 = torch_device.type == "cuda" and not bf16
        dtype = "bf16" if bf16 else "fp16" if fp16 else "fp32"
        why += f"; {dtype} is the default there"
    else:
        why += f"; {dtype} as asked"
    torch_dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    return torch_device, torch_dtype, why


def run_program(main: Callable[[list[str]], None]) -> None:
    """Run a program's main(arguments); a UserError becomes one sentence and exit code 2."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):  # whatever the locale says
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors="replace")
    try:
        main(sys.argv[1:])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)  # as the shell has it for Ctrl-C
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output went away, as in `| head`
        sys.exit(1)
