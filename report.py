"""What a person sees of a training run, and what is kept of it.

`Report` owns the progress bar, the evaluation lines, metrics.jsonl, loss.png and the Weights &
Biases run. In a job of several processes only the first one's report is `active`. Before it stands
what its figures are made of: the work of a forward, the most that a card can do, and memory.
"""

import contextlib
import json
import math
import os
import re
import secrets
import sys
import time
from pathlib import Path

import torch
from tqdm import tqdm

from config import TrainConfig, UserError
from files import read_file, shown
from model import GPTConfig

# A line of metrics.jsonl has those of these that are known at its step, in this order. Speeds are
# over the last two seconds or more, evaluations left out, and of all processes together:
#   tokens_per_second   real tokens, padding not counted; targets_per_second: supervised ones
#   flops_per_second    what the model needs: 3 times forward_flops, padding included
#   mfu                 that as a share of the cards' peak
#   memory_gib          the most that the process held so far, on its device; on a CPU, all in all
#   data_wait_ms        how long the step waited for its data
FIELDS = (
    "step loss val_loss val_ppl val_bpb floor lr grad_norm tokens targets tokens_per_second "
    "targets_per_second flops_per_second mfu memory_gib seconds data_wait_ms skipped_steps"
).split()

LARGEST_METRICS = 1 << 30  # bytes; a line has some 400

# Products of dense 16-bit matrices with fp32 sums, in 10**12 FLOP per second, from the makers' data
# sheets: bf16, or fp16 where there is no bf16 (T4, V100).
PEAK_TERAFLOPS = {
    r"NVIDIA B200": 2250,
    r"NVIDIA H200": 989,
    r"NVIDIA H100 80GB HBM3": 989,
    r"NVIDIA H100 NVL": 835,
    r"NVIDIA H100 PCIe": 756,
    r"NVIDIA A100\b.*": 312,
    r"NVIDIA L40S": 362,
    r"NVIDIA L4": 121,
    r"NVIDIA GeForce RTX 4090": 165,
    r"NVIDIA GeForce RTX 3090": 71,
    r"Tesla V100\b.*": 125,
    r"Tesla T4": 65,
}


def forward_flops(config: GPTConfig, B: int, T: int) -> int:
    """What a forward of (B, T) must do: 2 per weight and token in the matrices, and attention.

    Attention multiplies queries by keys and weights by values, 2 * 2 * H * D for each of the
    T * (T + 1) / 2 pairs that may look at each other. A backward takes twice a forward, so that a
    training step takes 6 per weight and token. What is computed twice to save memory counts once.
    """
    C, H, K, D = (
        config.hidden_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
    )
    layer = C * D * (2 * H + 2 * K) + 3 * C * config.intermediate_size
    matrices = config.num_hidden_layers * layer + C * config.vocab_size
    pairs = T * (T + 1) // 2
    return 2 * B * T * matrices + 4 * B * pairs * H * D * config.num_hidden_layers


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """FLOP per second that a device can do at best in 16 bits; None where that is not known."""
    if device.type != "cuda" or dtype == torch.float32:
        return None
    name = torch.cuda.get_device_name(device)
    peaks = (peak for card, peak in PEAK_TERAFLOPS.items() if re.fullmatch(card, name))
    peak = next(peaks, None)
    return peak and peak * 1e12


def peak_memory(device: torch.device) -> int | None:
    """Bytes: the most that tensors took on a CUDA device, else that this process took at all."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:
        return None  # Windows
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024


class Report:
    """The figures of one run, from `start_step` on. `peak`: FLOP per second of all its devices."""

    def __init__(
        self,
        run: Path,
        config: TrainConfig,
        active: bool,
        start_step: int,
        device: torch.device,
        peak: float | None,
    ):
        self.run = run
        self.active = active
        self.lost_lines = 0  # of metrics.jsonl, for want of room
        self.device, self.peak = device, peak
        self.flops = 0
        # Where speeds are measured from: (clock, tokens, targets, FLOP).
        self.mark: tuple[float, int, int, int] | None = None
        self.speeds: dict[str, float] = {}
        self.bar = tqdm(
            total=config.max_steps,
            initial=start_step,
            unit="step",
            disable=not active,
            dynamic_ncols=True,
            mininterval=0.5,  # a tiny model takes less time for a step than tqdm for a line
            bar_format="{percentage:3.0f}%|{bar}| {n:,}/{total:,} steps, {remaining} left{postfix}",
        )
        self.wandb = start_wandb(run, config) if config.wandb and active else None

    def step(self, line: dict, flops: int) -> None:
        """Move the bar. `line` has the figures of the step, by the names in FIELDS; `flops` is what
        it took, of all processes."""
        self.flops += flops
        now = (time.perf_counter(), line["tokens"], line["targets"], self.flops)
        if self.mark is None:
            self.mark = now
        elif now[0] - self.mark[0] > 2 or not self.speeds:
            seconds, *amounts = (
                after - before for before, after in zip(self.mark, now, strict=True)
            )
            names = ("tokens_per_second", "targets_per_second", "flops_per_second")
            rates = (round(amount / seconds) for amount in amounts)
            self.speeds = dict(zip(names, rates, strict=True))
            if self.peak:
                self.speeds["mfu"] = round(self.speeds["flops_per_second"] / self.peak, 4)
            self.mark = now
        speed = f", {self.speeds['tokens_per_second']:,} tokens/s" if self.speeds else ""
        self.bar.set_postfix_str(f"loss {line['loss']:.3f}, lr {line['lr']:.1e}{speed}", False)
        self.bar.update()

    def write(self, line: dict) -> None:
        """Append a line to metrics.jsonl (and to wandb)."""
        if not self.active:
            return
        memory = peak_memory(self.device)
        line = line | self.speeds | {"memory_gib": memory and round(memory / 2**30, 3)}
        known = {name: line[name] for name in FIELDS if line.get(name) is not None}
        finite = {k: v if math.isfinite(v) else str(v) for k, v in known.items()}
        self.append(json.dumps(finite) + "\n")
        if self.wandb:
            self.wandb.log(known, step=line["step"])

    def append(self, text: str) -> None:
        """Add a line to metrics.jsonl. A full disk must not end the training: it loses the line,
        says so once, and leaves no half of it."""
        file = self.run / "metrics.jsonl"
        length = os.path.getsize(file) if os.path.isfile(file) else 0
        try:
            with file.open("a", encoding="utf-8", newline="\n") as opened:
                opened.write(text)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.truncate(file, length)
            if not self.lost_lines:
                self.say(f"{file} cannot be written ({error.strerror}): its lines are lost for now")
            self.lost_lines += 1

    def evaluation(self, line: dict, train_loss: float, sample: str) -> None:
        """Print an evaluation and a sample above the bar, and draw the curve anew."""
        self.mark = (time.perf_counter(), line["tokens"], line["targets"], self.flops)
        if not self.active:
            return
        text = (
            f"step {line['step']:,}: train loss {train_loss:.4f}, "
            f"validation loss {line['val_loss']:.4f}, perplexity {line['val_ppl']:.2f}, "
            f"{line['val_bpb']:.3f} bits per byte"
        )
        if line.get("floor") is not None:
            above = line["val_loss"] - line["floor"]
            text += f"; floor {line['floor']:.4f}, {above:.4f} above it"
        self.say(text)
        if sample:
            self.say("".join(f"  | {row}\n" for row in sample.splitlines()).rstrip("\n"))
        try:
            draw_curve(self.run)
        except Exception as error:  # whatever it is: a picture must not end the training
            reason = getattr(error, "strerror", None) or error
            self.say(f"{self.run / 'loss.png'} cannot be written: {reason}")

    def say(self, text: str) -> None:
        """Print above the bar."""
        if self.active:
            self.bar.write(text)

    def close(self) -> None:
        self.bar.close()
        if self.wandb:
            self.wandb.finish()


def start_wandb(run: Path, config: TrainConfig):
    """The run at wandb; a resumed run continues its own. Offline without a login.

    Its id is kept in the run's directory and not made of its name, which another run may have had.
    """
    os.environ.setdefault("WANDB_SILENT", "true")
    import wandb

    logged_in = os.environ.get("WANDB_API_KEY") or wandb.api.api_key
    directory = run.resolve()
    here = directory.is_relative_to(Path.cwd())
    return wandb.init(
        project=config.wandb_project,
        id=wandb_id(run),
        name=str(directory.relative_to(Path.cwd()) if here else run),
        resume="allow",
        dir=run,
        mode=None if logged_in else "offline",
        config=vars(config),
    )


def wandb_id(run: Path) -> str:
    """The id in run/wandb_id.txt, made where there is none. UserError for what cannot be one."""
    file = run / "wandb_id.txt"
    try:
        if not os.path.lexists(file):
            file.write_text(secrets.token_hex(4) + "\n", encoding="utf-8")
        found = read_file(run, file.name, 100).decode("utf-8").strip()
        if not re.fullmatch(r"[\w-]+", found):
            raise ValueError(f"{file} holds no id: {shown(found)}")
    except (OSError, ValueError) as error:
        raise UserError(f"{error}; without {file} the run begins anew at wandb") from error
    return found


def read_metrics(run: Path) -> list[dict]:
    """The lines of a run's metrics.jsonl, oldest first; a line cut off by a kill is left out.

    Raises UserError, naming the line, for one that is not an object with a step.
    """
    file = run / "metrics.jsonl"
    try:
        content = read_file(run, file.name, LARGEST_METRICS) if os.path.lexists(file) else b""
        lines = content.decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not UTF-8 (byte {error.start}): remove it to go on") from error
    except ValueError as error:
        raise UserError(str(error)) from error
    read: list[dict] = []
    for number, line in enumerate(lines, start=1):
        if not line.endswith("}") and number == len(lines):
            break
        try:
            figures = json.loads(line)
        except (ValueError, RecursionError):
            figures = None
        if not is_line(figures):
            raise UserError(f"{file}, line {number}: not a line of metrics; remove it to go on")
        read.append(figures)
    return read


def is_line(figures: object) -> bool:
    """Whether it is an object with a step, and with nothing nested."""
    if not isinstance(figures, dict) or any(isinstance(x, dict | list) for x in figures.values()):
        return False
    step = figures.get("step")
    return type(step) is int and 0 <= step < 2**31


def draw_curve(run: Path) -> Path:
    """Draw run/loss.png: training and validation loss, and the floor where it is known."""
    from matplotlib.figure import Figure  # here: it takes a second to import

    lines = read_metrics(run)
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    train = [(x["step"], x["loss"]) for x in lines if isinstance(x.get("loss"), float)]
    val = [(x["step"], x["val_loss"]) for x in lines if isinstance(x.get("val_loss"), float)]
    axes.plot(*zip(*train, strict=True), color="tab:blue", alpha=0.5, lw=1, label="training")
    if val:
        label = f"validation ({val[-1][1]:.4f} at the end)"
        axes.plot(*zip(*val, strict=True), color="tab:orange", marker="o", ms=4, label=label)
    floors = [x["floor"] for x in lines if isinstance(x.get("floor"), float)]
    if floors:
        floor = floors[-1]
        axes.axhline(floor, color="black", ls="--", lw=1, label=f"floor ({floor:.4f})")
    axes.set_xlabel("optimizer steps")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title(run.name, parse_math=False)  # a $ in a name is no formula
    axes.grid(alpha=0.3)
    axes.legend()
    partial = run / ".partial_loss.png"
    figure.savefig(partial, dpi=120, format="png")
    return partial.replace(run / "loss.png")
