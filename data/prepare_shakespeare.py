"""Tiny Shakespeare, 1.1 MB of plays as one text: python -m data.prepare_shakespeare"""

from pathlib import Path

import tyro

from config import UserError, run_program
from data.download import alone_in, fetch, train_command

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"


def prepare(directory: Path = Path("data/shakespeare"), source: str = URL) -> None:
    """Downloads tiny Shakespeare. Its first 90% trains, the rest validates.

    Args:
        directory: where tinyshakespeare.txt goes
        source: the address, or a local copy
    """
    path = directory / "tinyshakespeare.txt"
    with alone_in(directory):
        fetch(source, path)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 (byte {error.start}).") from error
    print(f"{path}: {len(text):,} characters, {len(set(text))} distinct")
    train_command("configs/shakespeare_char.py", path)


if __name__ == "__main__":
    run_program(lambda arguments: tyro.cli(prepare, args=arguments))
