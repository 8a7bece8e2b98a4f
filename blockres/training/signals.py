"""SIGTERM and Ctrl-C: the first asks for an orderly end, a later one gets its way at once."""

import os
import signal
import sys
import threading
import time
from types import TracebackType

AGAIN_SECONDS = 1.0  # at Ctrl-C a launcher passes on what the terminal has sent already


class StopRequest:
    """While it is entered, SIGTERM and SIGINT are noted. Only the main thread enters it.

    A thread reads the signals, since Python's own handlers wait while the main one is in a collective.

    Attributes:
        received: the first of these signals, or None.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._when = 0.0

    def __enter__(self) -> "StopRequest":
        self._reading_end, self._writing_end = os.pipe()
        os.set_blocking(self._writing_end, False)
        self._earlier_wakeup = signal.set_wakeup_fd(self._writing_end)
        self._earlier = {number: signal.signal(number, _leave_to_thread) for number in (signal.SIGINT, signal.SIGTERM)}
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._earlier.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._earlier_wakeup)
        os.close(self._writing_end)  # ends the thread
        self._thread.join()
        os.close(self._reading_end)

    def _listen(self) -> None:
        while numbers := os.read(self._reading_end, 64):
            for number in numbers:
                if number in (signal.SIGINT, signal.SIGTERM):
                    self._note(signal.Signals(number))

    def _note(self, received: signal.Signals) -> None:
        if self.received is None:
            self.received, self._when = received, time.monotonic()
        elif time.monotonic() - self._when > AGAIN_SECONDS:
            print(f"blockres.train: {received.name} again, ending at once", file=sys.stderr, flush=True)
            os._exit(128 + received)


def _leave_to_thread(number: int, frame: object) -> None:
    """Without a handler of Python's own there is no wake-up."""
