"""`python -m octavo` is the `octavo` command."""

import signal
import sys


def main() -> int:
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        # Until the command is loaded ctrl-C ends the process: raised inside of an import it shows a traceback, and in
        # one of a native module it can crash.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from octavo.cli.main import main as octavo

    signal.signal(signal.SIGINT, handler)
    return octavo()


if __name__ == "__main__":
    sys.exit(main())
