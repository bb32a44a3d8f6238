"""Run by `tests/test_interpreted.py`, in processes of their own: whether Triton interprets is read when a kernel is
defined."""

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
