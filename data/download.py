"""What the prepare scripts share: fetching a file, writing one whole or not at all, the last words.

Every script takes `--source`, a local copy of what it would download, so that it works offline.
"""

import os
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from config import UserError


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to, which takes its name when all went well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield beside
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def fetch(source: str, path: Path) -> None:
    """Copies a file or an http(s) address to path, with a bar. UserError where that fails."""
    with written_whole(path) as beside:
        if not source.startswith(("http://", "https://")):
            if not Path(source).is_file():
                raise UserError(f"No such file: {source}.")
            shutil.copyfile(source, beside)
            return
        try:
            with urllib.request.urlopen(source) as response, open(beside, "wb") as file:
                total = int(response.headers.get("Content-Length") or 0) or None
                with tqdm(desc=path.name, total=total, unit="B", unit_scale=True) as bar:
                    while block := response.read(1 << 20):
                        file.write(block)
                        bar.update(len(block))
        except (urllib.error.URLError, OSError) as error:
            raise UserError(
                f"{source} could not be downloaded ({error}). Download it by other means and pass "
                "--source=PATH."
            ) from error


def train_command(config: str, data: Path, *options: str) -> None:
    """Says how to train on what was prepared."""
    print(
        "\nTrain on it:\n  " + " ".join([f"python train.py {config}", f"--data={data}", *options])
    )
