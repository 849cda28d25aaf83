"""The server, started as ever but for its engine: `python -m scripts.frontend.serve [FLAG ...]`."""

import sys

from server import cli
from server.launcher import Launcher

if __name__ == "__main__":
    Launcher.engine_module = "scripts.frontend.engine"
    sys.exit(cli.main())
