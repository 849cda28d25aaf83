"""Runs the checks one after the other against a server."""

import asyncio
import json
import time

import aiohttp

from scripts.operate.checks import CHECKS
from scripts.operate.findings import Finding, Findings
from scripts.operate.probe_client import CheckFailed, CheckSkipped, Client


async def run_checks(
    found: Findings,
    url: str,
    key: str,
    model: str,
    timeout_s: float,
    names: list[str],
    verify: bool = True,
) -> None:
    """Raises CheckFailed if the server cannot be reached at all. `verify`: check its certificate."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    connector = aiohttp.TCPConnector(force_close=True, ssl=verify)
    async with aiohttp.ClientSession(headers=headers, connector=connector) as session:
        client = Client(url, session, model, timeout_s)
        client.model = model or await first_model(client)
        for name in names:
            found.add(await run_check(name, client))


async def first_model(client: Client) -> str:
    try:
        status, body = await client.get("/v1/models")
    except aiohttp.ClientSSLError as error:
        raise CheckFailed(
            f"TLS to {client.url} fails ({error}): is it a server with a certificate? One that this "
            "machine does not trust can be named in the environment's SSL_CERT_FILE"
        ) from None
    except (aiohttp.ClientError, TimeoutError) as error:
        reason = str(error) or f"no answer within {client.timeout_s:g} s"
        raise CheckFailed(
            f"nothing answers at {client.url} ({reason}): is the server started, and is this its address?"
        ) from None
    if status == 401:
        raise CheckFailed(f"{client.url} asks for a key: give --api-key")
    try:
        name: str = json.loads(body)["data"][0]["id"]
    except (ValueError, KeyError, IndexError, TypeError):
        raise CheckFailed(f"{client.url}/v1/models answered {status} and names no model") from None
    return name


async def run_check(name: str, client: Client) -> Finding:
    started = time.perf_counter()
    level, remedy = "pass", ""
    try:
        detail = await CHECKS[name](client)
    except CheckSkipped as reason:
        level, detail = "skip", str(reason)
    except CheckFailed as failure:
        level, detail = "fail", str(failure)
    except TimeoutError:
        level, detail = "fail", f"no answer within {client.timeout_s:g} s"
        remedy = "a slow machine may need a longer --timeout"
    except (aiohttp.ClientError, asyncio.IncompleteReadError) as error:
        level, detail = "fail", f"the connection broke: {error}"
    except (KeyError, IndexError, TypeError, ValueError) as error:
        level, detail = "fail", f"an answer without {type(error).__name__} {error}"
    return Finding(level, name, detail, remedy, 1e3 * (time.perf_counter() - started))
