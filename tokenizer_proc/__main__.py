"""python -m tokenizer_proc --config FILE: see `TokenizerConfig` for the file."""

import argparse
import gc
import logging
import os
import signal
import sys

from engine.api.messages import Sockets
from engine.api.process import die_with_parent
from tokenizer_proc.config import read_config
from tokenizer_proc.errors import TokenizerLoadError
from tokenizer_proc.loading import load_tokenizer


def main() -> int:
    """Exit codes: 0 stopped by SIGTERM, 2 the configuration cannot work (one line on stderr)."""
    parser = argparse.ArgumentParser(prog="python -m tokenizer_proc")
    parser.add_argument("--config", required=True, metavar="FILE", help="TokenizerConfig as JSON")
    path = parser.parse_args().config
    try:
        config = read_config(path)
    except (OSError, ValueError) as error:
        print(f"--config {path}: {error}", file=sys.stderr)
        return 2
    die_with_parent(config.parent_pid)
    # Ctrl-C reaches the whole process group; the server decides when this process may end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(
        level=config.log_level.upper(),
        format="%(asctime)s %(levelname)s tokenizer: %(message)s",
        stream=sys.stderr,
    )
    # transformers imports torch if it can, to no use here: 2 s later and 230 MB larger.
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        tokenizer = load_tokenizer(config.tokenizer_dir, config.chat_template)
        from tokenizer_proc.main import TokenizerLoop

        sockets = Sockets.in_directory(config.run_dir, config.epoch)
        loop = TokenizerLoop(tokenizer, sockets, config.epoch, config.seed)
        gc.freeze()  # the vocabulary lives as long as the process; collections need not walk it
        signal.signal(signal.SIGTERM, lambda *_: loop.stop())
        loop.run()
    except TokenizerLoadError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # a plain exit would wait for a thread that may encode a long prompt for seconds
