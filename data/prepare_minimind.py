"""MiniMind-3's own data, Chinese and English: python -m data.prepare_minimind --stage=pretrain

Both files are JSON lines that this project reads as they are. Here they are downloaded and read
once, so that bad rows are known before any training.
"""

from collections import Counter
from pathlib import Path
from typing import Literal

import tyro

from config import UserError, run_program
from data.download import alone_in, fetch, train_command
from data.sources import RowError, find_sources, parse, place, read_chunks

URL = "https://huggingface.co/datasets/jingyaogong/minimind_dataset/resolve/main"
FILES = {"pretrain": "pretrain_t2t_mini.jsonl", "sft": "sft_t2t_mini.jsonl"}


def prepare(
    stage: Literal["pretrain", "sft"], directory: Path = Path("data/minimind"), source: str = URL
) -> None:
    """Downloads the texts (pretrain) or the chats (sft) that MiniMind-3 is trained on.

    Args:
        stage: which of the two
        directory: where the file goes
        source: the address, or a local directory, that holds the file
    """
    path = directory / FILES[stage]
    with alone_in(directory):
        fetch(f"{source}/{path.name}", path)
    kinds: Counter[str] = Counter()
    problems: list[str] = []
    for chunk in read_chunks(find_sources(path)[0][0]):
        for number, item in chunk.items:
            try:
                kinds[parse(item).kind] += 1
            except RowError as error:
                kinds["bad"] += 1
                problems = problems or [f"{place(chunk.name, chunk.unit, number)}: {error}"]
    print(f"{path}: " + ", ".join(f"{n:,} {kind}" for kind, n in kinds.items()))
    if problems:
        print(f"the first bad row: {problems[0]}")
    if set(kinds) <= {"bad"}:
        raise UserError(f"{path} holds no good row.")
    options = ["--val_fraction=0.005"] + ["--on_bad_row=skip"] * bool(problems)
    if stage == "sft":
        options.append("--init_from=out/YOUR_PRETRAINED_RUN")
    train_command(f"configs/minimind{'' if stage == 'pretrain' else '_sft'}.py", path, *options)


if __name__ == "__main__":
    run_program(lambda arguments: tyro.cli(prepare, args=arguments))
