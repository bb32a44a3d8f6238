"""Where `data.prompts` is read from: rows of JSONL and Parquet files and of Hugging Face datasets, each with its place.

    prompts.jsonl                     one object a line
    prompts.parquet
    folder/                           of `datasets.Dataset.save_to_disk`; of a DatasetDict its split `train`
    hf:<name>[:split]                 `datasets.load_dataset(name)`; the split is `train` unless it is named
    hf:<name>:<config>:<split>

Imports what a format needs only when it is read.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainers.extras import require

Rows = Iterator[tuple[str, dict[str, Any]]]


def missing(source: str) -> str:
    """Why there is nothing to read, as far as that shows without reading; empty if there is."""
    if source.startswith("hf:"):
        wrong = not 2 <= len(parts := source.split(":")) <= 4 or not all(parts)
        return "expected hf:<name>, hf:<name>:<split> or hf:<name>:<config>:<split>" if wrong else ""
    path = Path(source).expanduser()
    if path.is_dir() and not (_is_saved(path) or _is_dict(path)):
        return "the folder holds no dataset of datasets.save_to_disk"
    return "" if path.exists() else "there is no such file"


def read_rows(source: str, key: str = "data.prompts") -> Rows:
    """(place, row) of every row; the place is file:line of JSONL, else the row's number, counted from 0. `key` is the
    setting that named the source, for errors.

    Raises:
        ValueError: a line that is not a JSON object, a file or dataset that cannot be read.
        FileNotFoundError: there is nothing to read.
        ImportError: a package of the `data` extra is not installed.
    """
    if problem := missing(source):
        error = ValueError if source.startswith("hf:") else FileNotFoundError
        raise error(f"{key}={source!r}: {problem}")
    path = Path(source).expanduser()
    if not source.startswith("hf:") and path.is_file() and path.suffix != ".parquet":
        return _jsonl(path)
    return _table_rows(source, _parquet(source, key) if path.suffix == ".parquet" else _dataset(source, key))


def _jsonl(path: Path) -> Rows:
    with path.open("rb") as file:  # bytes, so that only line feeds end a line and a bad byte has a line number
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield f"{path}:{number}", _object(line, f"{path}:{number}")


def _object(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8-sig"))  # -sig: some editors put a byte-order mark at the start of a file
    except ValueError as error:  # bad JSON or bad UTF-8
        start = line.decode(errors="replace").strip()[:60]
        raise ValueError(f"{where}: expected a JSON object, got {start!r}: {getattr(error, 'msg', error)}") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected a JSON object, got {type(row).__name__}")
    return row


def _table_rows(source: str, table: Any) -> Rows:
    row = 0
    for batch in table.to_batches(max_chunksize=1000):
        for values in batch.to_pylist():
            yield f"{source}: row {row}", _plain(values)
            row += 1


def _plain(value: Any) -> Any:
    """As JSON would have it, for checkpoints and logs carry metadata: dates, decimals and bytes become texts."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    return value if value is None or isinstance(value, str | int | float) else str(value)


def _parquet(source: str, key: str) -> Any:
    parquet = require("pyarrow.parquet", extra="data")
    try:
        return parquet.read_table(Path(source).expanduser())
    except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
        raise ValueError(f"{key}={source!r} cannot be read as Parquet: {error}") from error


def _dataset(source: str, key: str) -> Any:
    """The dataset as an Arrow table: its values as they are stored, no picture or sound decoded."""
    datasets = require("datasets", extra="data")
    try:
        if source.startswith("hf:"):
            _, name, *more = source.split(":")
            config, split = more if len(more) == 2 else (None, *(more or ["train"]))
            dataset = datasets.load_dataset(name, config, split=split)
        else:
            path = Path(source).expanduser()
            dataset = datasets.load_from_disk(str(_split_folder(path) if _is_dict(path) else path))
        return dataset.with_format("arrow")[:]
    except Exception as error:  # of many kinds: the hub's, the network's, the files', a builder's own
        raise ValueError(f"{key}={source!r} cannot be read: {type(error).__name__}: {error}") from error


def _split_folder(path: Path) -> Path:
    """`train` of a saved DatasetDict, or its only split."""
    splits = json.loads((path / "dataset_dict.json").read_text(encoding="utf-8"))["splits"]
    if "train" not in splits and len(splits) != 1:
        raise ValueError(f"no split 'train' among {', '.join(splits)}: name one, as in {path / splits[0]}")
    return path / ("train" if "train" in splits else splits[0])


def _is_saved(path: Path) -> bool:
    return (path / "state.json").is_file()


def _is_dict(path: Path) -> bool:
    return (path / "dataset_dict.json").is_file()
