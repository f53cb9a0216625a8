"""``python -m mla_kernels.model train`` and ``measure``."""

import sys

from . import measure, train

COMMANDS = {"train": train.main, "measure": measure.main}

if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
    sys.exit(f"usage: python -m mla_kernels.model {{{','.join(COMMANDS)}}} [options]")
COMMANDS[sys.argv[1]](sys.argv[2:])
