"""Ctrl-C: the first ends the command in good order within two seconds, the second at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

from p2pkv.cli.output import EXIT_INTERRUPTED

# Below the two seconds that the project promises, so that the promise holds on a busy machine too.
_GRACE_S: Final = 1.5


@contextmanager
def handle_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt at the first SIGINT of the block, and end the process with 130 behind the block.

    It ends earlier where getting there takes too long, or at a second SIGINT.

    Libraries may hold an exception back while their threads finish; what is half written then is what a crash leaves, which
    store and staging are made for. Does nothing outside the main thread, which has no signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end_at_once(number: int, frame: FrameType | None) -> None:
        os._exit(EXIT_INTERRUPTED)

    def interrupt(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, end_at_once)
        timer = threading.Timer(_GRACE_S, os._exit, (EXIT_INTERRUPTED,))
        timer.daemon = True
        timer.start()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is end_at_once:
            # Everything is said and cleaned up. A plain exit may wait for threads of libraries, and CPython makes it a death
            # by signal, without an exit status, where the interrupt hit code that was run from text, as dataclasses are.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(EXIT_INTERRUPTED)
        signal.signal(signal.SIGINT, before)
