"""What makes a write durable."""

import os
from collections.abc import Callable
from pathlib import Path


def fsync(path: Path) -> None:
    """Flush a file or a folder's entries to disk: a rename is only safe after what it publishes."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_text(path: Path, text: str) -> None:
    """Write the file whole or not at all: under a temporary name, flushed, renamed."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    fsync(temporary)
    os.replace(temporary, path)
    fsync(path.parent)


class Writing:
    """Files written while other ranks wait for what comes after them: `writing(write)` runs it unless an earlier one
    failed, and `done()` raises that failure."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def __call__(self, write: Callable[[], object]) -> None:
        if self.error is None:
            try:
                write()
            except Exception as error:
                self.error = error

    def done(self) -> None:
        if self.error is not None:
            raise self.error
