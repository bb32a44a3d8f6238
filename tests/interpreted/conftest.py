"""Run by `tests/test_interpreted.py`, in processes of their own: whether Triton interprets is read when a kernel is
defined."""

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]

if os.environ.get("TRITON_INTERPRET") == "1":
    # Triton 3.6's interpreter makes a number of an array with one entry by int(), which numpy 2.4 no longer does.
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_for_numpy(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_for_numpy
