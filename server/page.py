"""The files of the page at `/`, read once at the start.

They are small, public and the same for everybody, so they are kept in memory. The page needs no key: it
has a field for one, and everything that it asks for does.
"""

from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "static"
PREFIX = "/page/"
CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True)
class PageFile:
    body: bytes
    content_type: str
    etag: str  # without quotes


def read_files(folder: Path) -> dict[str, PageFile]:
    """By the path under which each is served; index.html is `/`."""
    files = {}
    for file in sorted(folder.iterdir()):
        if file.suffix in CONTENT_TYPES:
            body = file.read_bytes()
            path = "/" if file.name == "index.html" else PREFIX + file.name
            etag = blake2b(body, digest_size=10).hexdigest()
            files[path] = PageFile(body, CONTENT_TYPES[file.suffix], etag)
    return files


FILES = read_files(FOLDER)
PAGE_PATHS = frozenset(FILES)
