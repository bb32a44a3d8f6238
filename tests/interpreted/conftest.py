"""Run by `tests/test_interpreted.py`, in processes of their own: whether Triton interprets is read when a kernel is
defined."""

import functools
import inspect
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

    # At every call, of a kernel's functions too, it lists all of triton.language to find what it has not replaced yet,
    # which was a third of the time. The names are always the same.
    is_builtin = interpreter.tl.core.is_builtin

    @functools.cache
    def builtins_of(owner):
        return [name for name, member in inspect.getmembers(owner) if is_builtin(member)]

    def patch_builtin(owner, *builder_and_scope):
        for name in builtins_of(owner):
            member = getattr(owner, name)
            if is_builtin(member):
                interpreter._patch_attr(owner, name, member, *builder_and_scope)

    interpreter._patch_builtin = patch_builtin
