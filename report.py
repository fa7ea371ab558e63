"""What a person sees of a training run, and what is kept of it.

`Report` owns the progress bar, the evaluation lines, metrics.jsonl, loss.png and the Weights &
Biases run. In a job of several processes only the first one's report is `active`.
"""

import json
import math
import os
import time
from pathlib import Path

from tqdm import tqdm

from config import TrainConfig, UserError

# A line of metrics.jsonl has those of these that are known at its step, in this order.
FIELDS = (
    "step loss val_loss val_ppl val_bpb floor lr grad_norm "
    "tokens targets tokens_per_second seconds data_wait_ms skipped_steps"
).split()


class Report:
    """The figures of one run, from `start_step` on."""

    def __init__(self, run: Path, config: TrainConfig, active: bool, start_step: int):
        self.run = run
        self.active = active
        self.clock, self.tokens = time.perf_counter(), None  # where the speed is measured from
        self.speed = (
            None  # tokens per second over the last two seconds or more, evaluations left out
        )
        self.bar = tqdm(
            total=config.max_steps,
            initial=start_step,
            unit="step",
            disable=not active,
            dynamic_ncols=True,
            bar_format="{percentage:3.0f}%|{bar}| {n:,}/{total:,} steps, {remaining} left{postfix}",
        )
        self.wandb = start_wandb(run, config) if config.wandb and active else None

    def step(self, line: dict) -> None:
        """Move the bar. `line` has the figures of the step, by the names in FIELDS."""
        now = time.perf_counter()
        if self.tokens is None:
            self.clock, self.tokens = now, line["tokens"]
        elif now - self.clock > 2 or self.speed is None:
            self.speed = (line["tokens"] - self.tokens) / (now - self.clock)
            self.clock, self.tokens = now, line["tokens"]
        speed = f", {self.speed:,.0f} tokens/s" if self.speed else ""
        self.bar.set_postfix_str(f"loss {line['loss']:.3f}, lr {line['lr']:.1e}{speed}", False)
        self.bar.update()

    def write(self, line: dict) -> None:
        """Append a line to metrics.jsonl (and to wandb)."""
        if not self.active:
            return
        line = line | {"tokens_per_second": self.speed and round(self.speed)}
        known = {name: line[name] for name in FIELDS if line.get(name) is not None}
        finite = {k: v if math.isfinite(v) else str(v) for k, v in known.items()}
        with (self.run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(finite) + "\n")
        if self.wandb:
            self.wandb.log(known, step=line["step"])

    def evaluation(self, line: dict, train_loss: float, sample: str) -> None:
        """Print an evaluation and a sample above the bar, and draw the curve anew."""
        self.clock, self.tokens = time.perf_counter(), line["tokens"]
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
        draw_curve(self.run)

    def say(self, text: str) -> None:
        """Print above the bar."""
        if self.active:
            self.bar.write(text)

    def close(self) -> None:
        self.bar.close()
        if self.wandb:
            self.wandb.finish()


def start_wandb(run: Path, config: TrainConfig):
    """The wandb run of that name; a resumed run continues its own. Offline without a login."""
    os.environ.setdefault("WANDB_SILENT", "true")
    import wandb

    logged_in = os.environ.get("WANDB_API_KEY") or wandb.api.api_key
    name = (
        str(run.resolve().relative_to(Path.cwd()))
        if run.resolve().is_relative_to(Path.cwd())
        else str(run)
    )
    return wandb.init(
        project=config.wandb_project,
        id=name.replace("/", "-"),
        resume="allow",
        dir=run,
        mode=None if logged_in else "offline",
        config=vars(config),
    )


def read_metrics(run: Path) -> list[dict]:
    """The lines of a run's metrics.jsonl, oldest first; a line cut off by a kill is left out.

    Raises UserError, naming the line, for one that is not an object with a step.
    """
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.is_file() else []
    read = []
    for number, line in enumerate(lines, start=1):
        if not line.endswith("}") and number == len(lines):
            break
        try:
            read.append(json.loads(line))
            read[-1]["step"] + 0
        except (ValueError, TypeError, LookupError) as error:
            raise UserError(
                f"{file}, line {number}: not a line of metrics; remove it to go on"
            ) from error
    return read


def draw_curve(run: Path) -> Path:
    """Draw run/loss.png: training and validation loss, and the floor where it is known."""
    from matplotlib.figure import Figure  # here: it takes a second to import

    lines = read_metrics(run)
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    train = [(line["step"], line["loss"]) for line in lines if isinstance(line["loss"], float)]
    val = [(x["step"], x["val_loss"]) for x in lines if isinstance(x.get("val_loss"), float)]
    axes.plot(*zip(*train, strict=True), color="tab:blue", alpha=0.5, lw=1, label="training")
    if val:
        label = f"validation ({val[-1][1]:.4f} at the end)"
        axes.plot(*zip(*val, strict=True), color="tab:orange", marker="o", ms=4, label=label)
    floor = lines[-1].get("floor") or next((x["floor"] for x in lines if "floor" in x), None)
    if floor is not None:
        axes.axhline(floor, color="black", ls="--", lw=1, label=f"floor ({floor:.4f})")
    axes.set_xlabel("optimizer steps")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title(run.name)
    axes.grid(alpha=0.3)
    axes.legend()
    partial = run / ".partial_loss.png"
    figure.savefig(partial, dpi=120, format="png")
    return partial.replace(run / "loss.png")
