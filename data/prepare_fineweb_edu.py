"""FineWeb-Edu, educational web pages, as many tokens as asked: python -m data.prepare_fineweb_edu

The pages are streamed from the hub and written until the tokens are there (as the data set counts
them, with GPT-2's tokenizer); nothing else is stored.
"""

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import tyro
from tqdm import tqdm

from config import UserError, run_program
from data.download import alone_in, train_command, written_whole
from data.sources import RowError, find_sources, parse, place, read_chunks

HUB = "HuggingFaceFW/fineweb-edu"


def prepare(
    directory: Path = Path("data/fineweb_edu"),
    tokens: int = 100_000_000,
    source: str = HUB,
    subset: str = "sample-10BT",
) -> None:
    """Writes the first pages of FineWeb-Edu to pages.jsonl.

    Args:
        directory: where pages.jsonl goes
        tokens: how many GPT-2 tokens at least (about 4.7 bytes of text each)
        source: the name on the hub, or a local file, .parquet or JSON lines, or a directory of them
        subset: which sample of the data set
    """
    path, written, count = directory / "pages.jsonl", 0, 0
    pages = local_pages(source) if os.path.exists(source) else hub_pages(source, subset)
    bar = tqdm(total=tokens, desc=path.name, unit=" tokens", unit_scale=True, leave=False)
    with alone_in(directory), written_whole(path) as beside, bar:
        with open(beside, "w", encoding="utf-8", newline="\n") as file:
            for page in pages:
                file.write(json.dumps({"text": page["text"]}, ensure_ascii=False) + "\n")
                written, count = written + page["token_count"], count + 1
                bar.update(page["token_count"])
                if written >= tokens:
                    break
        if not count:
            raise UserError(f"{source} holds no page.")
    print(f"{path}: {count:,} pages, {written:,} tokens (GPT-2's)")
    if written < tokens:
        print(f"The source held no more; {tokens:,} were asked for.")
    train_command("configs/tiny.py", path, "--val_fraction=0.005")


def hub_pages(name: str, subset: str) -> Iterable[dict]:
    import datasets
    import huggingface_hub

    datasets.disable_progress_bars()
    huggingface_hub.logging.set_verbosity_error()
    try:
        yield from datasets.load_dataset(name, name=subset, split="train", streaming=True)
    except Exception as error:  # the network, in many forms
        raise UserError(
            f"{name} could not be streamed from the Hugging Face hub ({type(error).__name__}). "
            "Download some of its .parquet files by other means and pass --source=PATH."
        ) from error


def local_pages(source: str) -> Iterator[dict]:
    for file in find_sources(source)[0]:
        for chunk in read_chunks(file):
            for number, item in chunk.items:
                where = place(file.name, chunk.unit, number)
                try:
                    text = parse(item).text
                except RowError as error:
                    raise UserError(f"{where}: {error}. Fix or remove the file.") from error
                page = json.loads(item) if isinstance(item, bytes) else item  # of JSON lines
                if text is None or not isinstance(page.get("token_count"), int):
                    raise UserError(f"{where} is not FineWeb-Edu: no 'text' and 'token_count'.")
                yield page


if __name__ == "__main__":
    run_program(lambda arguments: tyro.cli(prepare, args=arguments))
