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
