"""Draw the loss of runs against steps and against seconds, beside figures that others published.

  python docs/curves.py out/shakespeare_char --nanogpt --out docs/shakespeare.png
  python docs/curves.py out/tiny out/tiny_seed2 out/tiny_seed3 --out docs/tiny.png

Reads each run's metrics.jsonl (validation losses, seconds of wall clock with evaluations included)
and train_config.json (the name of the data). Runs that one picture shows must share their data: a
loss per character and one per word are not the same thing.
"""

import argparse
import sys
from pathlib import Path

from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).parents[1]))
from config import UserError, run_program
from files import read_json, shown
from report import read_metrics

# Of nanoGPT's README, "train a GPT on the works of Shakespeare": tiny Shakespeare, by characters.
# The seconds of the first are ours: a replica of that recipe ended at 1.895 after 75 s, on the 2
# cores of the runs in docs/shakespeare.png; on others nanoGPT itself ended at 1.886 after 105 s.
NANOGPT = [
    ("nanoGPT on a CPU: 1.88, 0.80 M parameters", 1.88, 2000, 75),
    ("nanoGPT on a GPU: 1.4697, 10.7 M parameters", 1.4697, 5000, None),
]


def data_of(run: Path) -> str:
    """The name of the data that a run trained on. Raises UserError."""
    try:
        data = read_json(run, "train_config.json").get("data")
    except ValueError as error:
        raise UserError(str(error)) from error
    if not isinstance(data, str):
        raise UserError(f"{run / 'train_config.json'}: data is {shown(data)}, not a name")
    return data


def read_curve(run: Path) -> list[dict]:
    """The lines of a run's metrics.jsonl with a validation loss that is a number. A figure that is
    none, as a loss that overflowed, is left out. Raises UserError where none is left."""
    lines = [{k: v for k, v in line.items() if is_number(v)} for line in read_metrics(run)]
    curve = [line for line in lines if "val_loss" in line and "seconds" in line]
    if not curve:
        file = run / "metrics.jsonl"
        raise UserError(f"{file} has no line with a validation loss and seconds to draw")
    return curve


def is_number(value: object) -> bool:
    return type(value) in (int, float) and abs(value) < 1e300  # which nan is not either


def draw(runs: list[Path], out: Path, nanogpt: bool) -> None:
    """Write the picture: left, loss against optimizer steps; right, against seconds.

    Raises UserError for a run that cannot be drawn, for runs on different data, and for a picture
    that cannot be written.
    """
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    by_steps, by_seconds = figure.subplots(1, 2, sharey=True)
    data = {data_of(run) for run in runs}
    if len(data) > 1:
        raise UserError(
            f"the runs are on different data ({', '.join(sorted(data))}): one at a time"
        )
    floor = None
    for run in runs:
        lines = read_curve(run)
        losses = [line["val_loss"] for line in lines]
        name = run.name.replace("$", r"\$")  # no formula
        label = f"{name} ({losses[-1]:.4f} at the end)"
        by_steps.plot([line["step"] for line in lines], losses, marker="o", ms=3, label=label)
        by_seconds.plot([line["seconds"] for line in lines], losses, marker="o", ms=3, label=label)
        floor = lines[-1].get("floor", floor)
    for name, loss, steps, seconds in NANOGPT if nanogpt else []:
        for axes, place in ((by_steps, steps), (by_seconds, seconds)):
            line = axes.axhline(loss, ls=":", lw=1, color="black")
            if place is None:
                line.set_label(name)
            else:
                axes.plot(place, loss, marker="*", ms=10, ls="", color="black", label=name)
    if floor is not None:
        for axes in (by_steps, by_seconds):
            axes.axhline(floor, ls="--", lw=1, color="black", label=f"floor ({floor:.4f})")
    by_steps.set_xlabel("optimizer steps")
    by_seconds.set_xlabel("seconds of wall clock, evaluations included")
    by_steps.set_ylabel("validation loss (nats per token)")
    for axes in (by_steps, by_seconds):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, dpi=120)
    except (OSError, ValueError) as error:  # ValueError: an ending that is no format, a null byte
        raise UserError(f"--out={out} cannot be written: {error}") from error


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="docs/curves.py", description=__doc__.split("\n")[0])
    parser.add_argument("runs", type=Path, nargs="+", help="directories such as out/tiny")
    parser.add_argument("--out", type=Path, default=Path("docs/curves.png"))
    parser.add_argument("--nanogpt", action="store_true", help="show nanoGPT's published losses")
    options = parser.parse_args(arguments)
    draw(options.runs, options.out, options.nanogpt)
    print(options.out)


if __name__ == "__main__":
    run_program(main)
