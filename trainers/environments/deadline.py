"""A limit on the time that a reward may take, wherever it spends it.

In the main thread the reward runs where it was called: what it keeps per thread, its event loop and its own alarms work
as they do without a limit. Once it is late, SIGPROF raises TooLate in it. A watchdog thread sends the signal, which
also ends sleeps and reads; code that does not let go of the interpreter, such as a regular expression or a power of
large integers, would keep the watchdog waiting, so the process' CPU clock sends it too. (SIGALRM is left to verifiers,
many of which use it.) It is sent again until the call has ended: an `except:` may have swallowed it, and what a `with`
does at its end may wait as well.

Any other thread gets no signals: there a daemon thread runs the reward, and is abandoned when it is late.
"""

import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextvars import copy_context
from typing import Any

AGAIN_SECONDS = 0.2  # between two signals to a call that is late
CPU_AGAIN_SECONDS = 1.0

_deadline: float | None = None  # of the call that is running in the main thread
_raised = 0.0


class TooLate(BaseException):
    """Not an Exception, so that a reward's own `except Exception` lets it through."""


def call_within(seconds: float | None, function: Callable[..., Any], *arguments: Any) -> Any:
    """`function(*arguments)`; None is no limit.

    Raises:
        TooLate: it took longer than `seconds`. It has been interrupted, or (called outside the main thread) goes on in
            a daemon thread.
    """
    if seconds is None:
        return function(*arguments)
    if threading.current_thread() is threading.main_thread():
        return _interrupted(seconds, function, arguments)
    return _abandoned(seconds, function, arguments)


def _interrupted(seconds: float, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    global _deadline
    ended = threading.Event()
    main = threading.main_thread().ident
    assert main is not None

    def watch() -> None:
        wait = seconds
        while not ended.wait(wait):
            signal.pthread_kill(main, signal.SIGPROF)
            wait = AGAIN_SECONDS

    def end() -> None:
        global _deadline
        _deadline = None
        signal.setitimer(signal.ITIMER_PROF, 0)
        ended.set()

    # The handler stays: to a signal that comes too late it does nothing, where the default action ends the process.
    signal.signal(signal.SIGPROF, _raise_if_late)
    _deadline = time.monotonic() + seconds
    try:
        try:
            threading.Thread(target=watch, name="reward-watchdog", daemon=True).start()
            signal.setitimer(signal.ITIMER_PROF, seconds, CPU_AGAIN_SECONDS)
            return function(*arguments)
        finally:
            end()
    finally:
        end()  # once more, should the signal have come in the middle of the first


def _raise_if_late(number: int, frame: Any) -> None:
    global _raised
    now = time.monotonic()
    if _deadline is not None and now >= _deadline and now - _raised > AGAIN_SECONDS / 2:
        _raised = now
        raise TooLate


def _abandoned(seconds: float, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    answer: Future[Any] = Future()
    context = copy_context()

    def work() -> None:
        try:
            answer.set_result(context.run(function, *arguments))
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=work, name="reward", daemon=True).start()
    try:
        return answer.result(timeout=seconds)
    except FutureTimeoutError:
        if answer.done():
            raise  # the reward's own
        raise TooLate from None
