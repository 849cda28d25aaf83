"""Inflating compressed bodies, in pieces: 2 MB can hold 2 GiB, and nobody knows before."""

import zlib
from collections.abc import Iterator

from server.errors import ApiError

CODINGS = ("identity", "gzip", "deflate")
# Most bytes in and out between two pieces: either takes a fraction of a millisecond.
MAX_IN = 16 * 1024
MAX_OUT = 64 * 1024


class Inflater:
    """Inflates one body; `coding` is gzip or deflate. Raises ApiError 400 for data that are not that."""

    def __init__(self, coding: str) -> None:
        self._coding = coding
        self._zlib: zlib._Decompress | None = None

    def pieces(self, data: bytes) -> Iterator[bytes]:
        """What the next `data` make, as it is asked for; a piece may be empty."""
        for start in range(0, len(data), MAX_IN):
            rest = data[start : start + MAX_IN]
            if self._zlib is None:
                self._zlib = zlib.decompressobj(window_bits(self._coding, rest[0]))
            piece = b""
            while rest or len(piece) == MAX_OUT:  # a full piece: more may come without input
                try:
                    piece = self._zlib.decompress(rest, MAX_OUT)
                except zlib.error as error:  # "Error -3 while decompressing data: incorrect ..."
                    raise self._wrong(str(error).rpartition(": ")[2]) from None
                yield piece
                if self._zlib.unused_data:
                    raise self._wrong("there are bytes behind its end")
                rest = self._zlib.unconsumed_tail

    def finish(self) -> None:
        """No more data will come. None at all is an empty body."""
        if self._zlib is not None and not self._zlib.eof:
            raise self._wrong("it is cut off")

    def _wrong(self, reason: str) -> ApiError:
        return ApiError(
            400,
            "invalid_json",
            f"The body is not {self._coding}, as Content-Encoding says: {reason}.",
        )


def window_bits(coding: str, first: int) -> int:
    """How zlib is told the format. Some clients mean by deflate the data without zlib's header."""
    if coding == "gzip":
        return 16 + zlib.MAX_WBITS
    has_header = first & 0xF == 8  # RFC 1950, 2.2
    return zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS
