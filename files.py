"""Files that others made: small ones, read so that none costs more than it is worth.

A model directory may come from anybody. What is read of it has a size that is checked first, is a
regular file of the directory, and is named in the sentence about what is wrong with it. `sync` is
for files of ours.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LARGEST_JSON = 4 << 20  # bytes; the index of a 32B model in shards has 60,000
DEEPEST_JSON = 40  # levels


def read_json(directory: Path, name: str, largest: int = LARGEST_JSON) -> dict:
    """The object in a file of the directory; ValueError, naming the file, where it holds none."""
    content, file = read_file(directory, name, largest), directory / name
    try:
        text = content.decode("utf-8-sig")
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file}: expected a JSON object, found {type(value).__name__}")
    if is_deeper(value, DEEPEST_JSON):
        raise ValueError(f"{file} is nested deeper than {DEEPEST_JSON} levels")
    if "\\ud" in text.lower():  # seldom, and then mostly whole pairs
        for part in strings_in(value):
            if not is_text(part):
                raise ValueError(f"{file}: {shown(part)} is not text: half a surrogate pair")
    return value


def read_file(directory: Path, name: str, largest: int = LARGEST_JSON) -> bytes:
    """The content of a file of the directory; ValueError, naming it, where that is too large."""
    file = own_file(directory, name)
    try:
        size = file.stat().st_size
        if size <= largest:
            return file.read_bytes()
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from error
    raise ValueError(f"{file} has {size:,} bytes; of such a file at most {largest:,} are read")


def is_deeper(value: object, levels: int) -> bool:
    """Whether lists and objects stand in each other more than so deep.

    Python reads a thousand levels and then fails to write or print them, at any later time.
    """
    level: list[Any] = [value]
    for _ in range(levels + 1):
        level = [v for v in level if isinstance(v, dict | list)]
        level = [inner for v in level for inner in (v.values() if isinstance(v, dict) else v)]
        if not level:
            return False
    return True


def strings_in(value: object) -> Iterator[str]:
    """Every text in a value of JSON, names of fields too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in [*value, *value.values()] if isinstance(value, dict) else value:
            yield from strings_in(inner)


def is_text(text: str) -> bool:
    """Whether it can be written: JSON can spell halves of surrogate pairs, UTF-8 has none."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def own_file(directory: Path, name: str) -> Path:
    """directory/name, which may be missing. ValueError where it is a link that leads out of the
    directory, or no regular file: whoever opens a pipe waits for ever.

    The hub's cache is made of links: from snapshots/<commit>/ to blobs/, both of the same model.
    """
    file, root = directory / name, Path(os.path.realpath(directory))
    real = Path(os.path.realpath(file))
    of_hub = root.parent.name == "snapshots" and real.is_relative_to(root.parent.parent / "blobs")
    if not (of_hub or real.is_relative_to(root)):
        raise ValueError(f"{file} is a link that leads out of its directory, to {real}")
    if os.path.exists(real) and not os.path.isfile(real):
        raise ValueError(f"{file} is not a regular file")
    return file


def shown(value: object) -> str:
    """A value for an error sentence, however long it is."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of 5,000 digits; a list within itself
        text = f"a {type(value).__name__} too long to print"
    return text if len(text) <= 60 else text[:57] + "..."


def sync(path: Path) -> None:
    """Wait until a file, or a directory's list of names, is on the disk."""
    if path.is_dir() and os.name == "nt":
        return  # Windows cannot open a directory
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
