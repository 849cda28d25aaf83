"""Requests that a server should never see, made from its own description (scripts/fuzz_http.py).

values.py    JSON schema -> values it takes, or nearly takes
bodies.py    /openapi.json -> bodies, right, nearly right, or with wrong bytes
wire.py      bodies -> bytes for a socket: split, piped, cut, with wrong lengths, chunks and headers
judge.py     what a server may answer
run.py       many of them at once, beside streams whose text must not change
"""
