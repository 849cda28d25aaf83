"""The doctor's look at the server's certificate: a start takes one that clients will refuse."""

import ssl
import time

from scripts.operate.findings import Findings
from server.config import ServerConfig

SOON_S = 14 * 24 * 3600.0
RENEW = "get a new one; SIGHUP makes a running server read it"


def check_certificate(found: Findings, server: ServerConfig) -> None:
    """Nothing without one, or if it is no certificate, which the settings' check tells."""
    file = server.ssl_certfile
    if not file:
        return
    try:
        begins, ends = valid_times(file)
    except (OSError, ValueError, AttributeError):  # an SSLError is an OSError; see below
        return
    now = time.time()
    if now < begins:
        remedy = "wait, get another one, or look at this machine's clock"
        found.warn("certificate", f"{file} is not valid before {day(begins)}", remedy)
    elif now >= ends:
        found.warn("certificate", f"{file} is expired since {day(ends)}", RENEW)
    elif ends - now < SOON_S:
        found.warn("certificate", f"{file} expires soon, on {day(ends)}", RENEW)
    else:
        found.ok("certificate", f"{file} is valid until {day(ends)}")


def valid_times(file: str) -> tuple[float, float]:
    """From when and until when the first certificate of a PEM file holds, in seconds since 1970.

    By what Python's own tests read certificates with, which another Python may lack: nothing public does
    it without a connection.
    """
    fields = ssl._ssl._test_decode_cert(file)  # type: ignore[attr-defined]
    times = [ssl.cert_time_to_seconds(fields[name]) for name in ("notBefore", "notAfter")]
    return float(times[0]), float(times[1])


def day(moment: float) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(moment))
