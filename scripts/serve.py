#!/usr/bin/env python3
"""Start the server: python scripts/serve.py [DIR] [--flag value ...]; see --help."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from server.__main__ import run

if __name__ == "__main__":
    sys.exit(run())
