"""TinyStories (GPT-4's), 2.2 GB of short stories: python -m data.prepare_tinystories

The files hold stories between lines that say <|endoftext|>; they become JSON lines here, since the
end of a document is an id and never text. Bytes that are no UTF-8 become U+FFFD.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import tyro
from tqdm import tqdm

from config import UserError, run_program
from data.download import alone_in, fetch, train_command, written_whole

URL = "https://huggingface.co/datasets/roneneldan/TinyStories/resolve/main"
FILES = {"train": "TinyStoriesV2-GPT4-train.txt", "val": "TinyStoriesV2-GPT4-valid.txt"}


def prepare(directory: Path = Path("data/tinystories"), source: str = URL) -> None:
    """Downloads TinyStories and writes train.jsonl and val.jsonl.

    Args:
        directory: where the files go
        source: the address, or a local directory, that holds the two .txt files
    """
    with alone_in(directory):
        for side, name in FILES.items():
            if not (directory / f"{side}.jsonl").is_file():
                fetch(f"{source}/{name}", directory / name)
                write_jsonl(directory / name, directory / f"{side}.jsonl")
                (directory / name).unlink()
    train_command("configs/tiny.py", directory)


def write_jsonl(text: Path, path: Path) -> None:
    count = 0
    bar = tqdm(stories(text), desc=path.name, unit=" stories", leave=False)
    with (
        written_whole(path) as beside,
        open(beside, "w", encoding="utf-8", newline="\n") as file,
        bar,
    ):
        for story in bar:
            file.write(json.dumps({"text": story}, ensure_ascii=False) + "\n")
            count += 1
        if not count:
            raise UserError(f"{text} holds no story.")
    print(f"{path}: {count:,} stories")


def stories(path: Path) -> Iterator[str]:
    """The texts between the <|endoftext|> lines."""
    lines: list[str] = []
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.strip() != "<|endoftext|>":
                lines.append(line)
                continue
            if story := "".join(lines).strip():
                yield story
            lines = []
    if story := "".join(lines).strip():
        yield story


if __name__ == "__main__":
    run_program(lambda arguments: tyro.cli(prepare, args=arguments))
