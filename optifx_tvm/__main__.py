"""``python -m optifx_tvm`` is the command ``optifx``."""

from __future__ import annotations

import sys

from optifx_tvm.cli import main

if __name__ == "__main__":
    sys.exit(main())
