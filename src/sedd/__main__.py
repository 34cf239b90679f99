"""``sedd`` and ``python -m sedd``: end without a traceback at Ctrl-C, also while the command line is imported."""

import os
import signal

INTERRUPTED = 128 + signal.SIGINT


def main() -> None:
    """Import the command line and run it."""
    handler = signal.getsignal(signal.SIGINT)
    is_caught = handler is signal.default_int_handler  # not where it is ignored
    try:
        if is_caught:  # KeyboardInterrupt within an import can come out as another error
            signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
        from sedd.cli import main as run

        if is_caught:
            signal.signal(signal.SIGINT, handler)
        run()
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None


if __name__ == "__main__":
    main()
