"""What stands between a model's response and a verifier that was written for friendly input."""

import ast
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any

# fmt: off
MATHS_NAMES = {
    "sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh",
    "exp", "log", "ln", "sqrt", "Abs", "pi", "Integral",  # some answers hold an integral that sympy could not solve
}
# fmt: on
NOT_AN_EXPRESSION = "("
AGAIN_SECONDS = 0.2  # between two interruptions of a block that is late


def guarded_verifier(verify: Callable[..., float]) -> Callable[..., float]:
    """The method `score_answer(answer, entry)` of a reasoning-gym dataset, without a way to run code from the answer.

    Four datasets call `eval` on it: they get `ast.literal_eval`. Five call sympy's `parse_expr`, which calls `eval`
    with all of Python's builtins: they see the answer if it is plain maths, else one that does not parse.
    """
    function = verify.__func__
    copy = FunctionType(
        function.__code__,
        {**function.__globals__, "eval": ast.literal_eval},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    guarded = MethodType(copy, verify.__self__)
    if "parse_expr" not in function.__code__.co_names:
        return guarded
    return lambda answer, entry: guarded(answer if is_plain_maths(answer) else NOT_AN_EXPRESSION, entry=entry)


def is_plain_maths(text: str) -> bool:
    """Numbers, operators, one-letter variables and common functions: no quotes, attributes, brackets or other names."""
    names = re.findall(r"[A-Za-z_]\w*", text)
    return (
        re.fullmatch(r"[\w\s.,+\-*/^()=]*", text, re.ASCII) is not None
        and re.search(r"\.\s*[A-Za-z_]", text) is None
        and all(name in MATHS_NAMES or (len(name) == 1 and name != "_") for name in names)
    )


class TooSlow(BaseException):
    """Not an Exception, so that a verifier's own `except Exception` lets it through."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TooSlow in the block after `seconds`; without effect outside the main thread, which alone gets signals.

    Seconds that this process computes: a reward must not depend on who else is busy on the machine.
    It is raised again until the block is left: the first one is lost if it comes while Python runs what may not raise,
    such as a weak reference's callback, and nothing would end the block then.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    inside = True

    def too_slow(signum: int, frame: Any) -> None:
        if inside:
            raise TooSlow

    handler = signal.signal(signal.SIGVTALRM, too_slow)
    timer = signal.setitimer(signal.ITIMER_VIRTUAL, seconds, AGAIN_SECONDS)
    try:
        yield
    finally:
        while True:  # the next one may come here
            try:
                inside = False
                signal.setitimer(signal.ITIMER_VIRTUAL, *timer)  # somebody else's
                signal.signal(signal.SIGVTALRM, handler)
                break
            except TooSlow:
                pass
