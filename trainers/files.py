"""What makes a write durable."""

import os
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
