"""Draw the loss of runs against steps and against seconds, beside figures that others published.

  python docs/curves.py out/shakespeare_char --nanogpt --out docs/shakespeare.png
  python docs/curves.py out/tiny out/tiny_seed2 out/tiny_seed3 --out docs/tiny.png

Reads each run's metrics.jsonl (validation losses, seconds of wall clock with evaluations included)
and train_config.json (the name of the data). Runs that one picture shows must share their data: a
loss per character and one per word are not the same thing.
"""

import argparse
import json
import sys
from pathlib import Path

from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).parents[1]))
from config import UserError
from report import read_metrics

# Of nanoGPT's README, "train a GPT on the works of Shakespeare": tiny Shakespeare, by characters.
# The seconds of the first are ours: the same recipe, run on 2 CPU cores, ended at 1.886 in 105 s.
NANOGPT = [
    ("nanoGPT on a CPU: 1.88, 0.80 M parameters", 1.88, 2000, 105),
    ("nanoGPT on a GPU: 1.4697, 10.7 M parameters", 1.4697, 5000, None),
]


def draw(runs: list[Path], out: Path, nanogpt: bool) -> None:
    """Write the picture: left, loss against optimizer steps; right, against seconds.

    Raises UserError for a run without validation losses, and for runs on different data.
    """
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    by_steps, by_seconds = figure.subplots(1, 2, sharey=True)
    data = {json.loads((run / "train_config.json").read_text())["data"] for run in runs}
    if len(data) > 1:
        raise UserError(
            f"the runs are on different data ({', '.join(sorted(data))}): one at a time"
        )
    floor = None
    for run in runs:
        lines = [line for line in read_metrics(run) if isinstance(line.get("val_loss"), float)]
        if not lines:
            raise UserError(f"{run}/metrics.jsonl has no validation loss to draw")
        losses = [line["val_loss"] for line in lines]
        label = f"{run.name} ({losses[-1]:.4f} at the end)"
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
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(prog="docs/curves.py", description=__doc__.split("\n")[0])
    parser.add_argument("runs", type=Path, nargs="+", help="directories such as out/tiny")
    parser.add_argument("--out", type=Path, default=Path("docs/curves.png"))
    parser.add_argument("--nanogpt", action="store_true", help="show nanoGPT's published losses")
    arguments = parser.parse_args()
    try:
        draw(arguments.runs, arguments.out, arguments.nanogpt)
    except (UserError, OSError) as error:
        parser.error(str(error))
    print(arguments.out)


if __name__ == "__main__":
    main()
