"""Whether a file can be written, asked before the work whose result it is to hold."""

import os
from pathlib import Path


def probe(path: Path, flag: str, wanted: str) -> None:
    """Makes the folders that are missing. Raises ValueError that ends with advice: "give `wanted`".

    By doing it, as permissions say little to root, and nothing of a file system that is read-only.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not os.path.lexists(path):
            path.open("xb").close()
            path.unlink()  # whoever finds a file may take it for a result
        elif path.is_file() or path.is_dir():  # opening a pipe would be felt by its reader
            path.open("ab").close()
    except OSError as error:
        reason = f"{error.strerror}: {error.filename}"
        raise ValueError(f"{flag}: cannot be written ({reason}), give {wanted}") from None
