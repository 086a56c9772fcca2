"""``python -m tests.fuzz``: see ``cli``."""

import os
import sys

if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from .cli import main

    sys.exit(main())
