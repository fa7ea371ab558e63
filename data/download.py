"""What the prepare scripts share: fetching a file, writing one whole or not at all, the last words.

Every script takes `--source`, a local copy of what it would download, so that it works offline.
"""

import http.client
import os
import shutil
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tqdm import tqdm

from config import UserError
from locks import waiting_lock

LONGEST_SILENCE = 60  # seconds in which a server sends nothing


@contextmanager
def alone_in(directory: Path) -> Iterator[None]:
    """The directory, made and locked: of two scripts that fill it, one waits for the other."""
    with ExitStack() as stack:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            stack.enter_context(waiting_lock(directory / ".lock", f"filling {directory}"))
        except OSError as error:
            raise UserError(f"{directory} cannot be written: {error.strerror}.") from error
        yield


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to, which takes its name when all went well. For one process
    at a time: see `alone_in`. UserError where the disk does not take it."""
    beside = path.with_name(f".{path.name}.part")
    try:
        yield beside
        beside.replace(path)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}.") from error
    finally:
        beside.unlink(missing_ok=True)


def fetch(source: str, path: Path) -> None:
    """Copies a file or an http(s) address to path, with a bar, unless it is there already.
    UserError where that fails."""
    if path.is_file():
        print(f"{path} is here already; remove it to fetch it anew")
        return
    with written_whole(path) as beside:
        if not source.startswith(("http://", "https://")):
            if not os.path.isfile(source):
                raise UserError(f"No such file: {source}.")
            shutil.copyfile(source, beside)
            return
        try:
            download(source, beside, path.name)
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise UserError(
                f"{source} could not be downloaded ({error}). Download it by other means and pass "
                "--source=PATH."
            ) from error


def download(source: str, path: Path, label: str) -> None:
    """OSError, ValueError or HTTPException where the server, or the network, fails."""
    with urllib.request.urlopen(source, timeout=LONGEST_SILENCE) as response:
        total = int(response.headers.get("Content-Length") or 0) or None
        bar = tqdm(desc=label, total=total, unit="B", unit_scale=True, leave=False)
        with bar, open(path, "wb") as file:
            while block := response.read(1 << 20):
                file.write(block)
                bar.update(len(block))
            received = file.tell()
    if total is not None and received != total:  # the library does not mind
        raise OSError(f"the connection broke after {received:,} of {total:,} bytes")


def train_command(config: str, data: Path, *options: str) -> None:
    """Says how to train on what was prepared."""
    print(
        "\nTrain on it:\n  " + " ".join([f"python train.py {config}", f"--data={data}", *options])
    )
