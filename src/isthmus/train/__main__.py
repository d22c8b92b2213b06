"""``python -m isthmus.train RUN_DIR``: a rank, as isthmus's own launcher starts it."""

from __future__ import annotations

import signal

# Until the loop can stop after a step, Ctrl-C ends this process without a word, also while torch
# is being imported.
signal.signal(signal.SIGINT, signal.SIG_DFL)

if __name__ == "__main__":
    from isthmus.train.worker import main

    main()
