#!/usr/bin/env python3
"""Take the pictures of docs/images: the page of a real server, in a headless Chromium.

    python scripts/screenshots.py [--model DIR]

Starts a server of its own (the default model, unless told otherwise), lets it answer, and gives it more
requests than it may run at once. What the pictures say differs a little from run to run.
"""

import argparse
import asyncio
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import aiohttp  # noqa: E402

from tests.page.browser import Page, find_browser, running_browser  # noqa: E402
from tests.server.conftest import spawned, wait_for  # noqa: E402

FOLDER = ROOT / "docs" / "images"
MAX_BYTES = 300_000  # of all pictures together
NAME = "SmolLM2-135M-Instruct"
FLAGS = ("--max-num-seqs", "4", "--num-blocks", "600", "--served-model-name", NAME)
QUESTION = "Write a Python function that adds two numbers, and explain it in one sentence."
IDLE = "!document.querySelector('#send').hidden"
NUM_OTHERS = 7


async def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--model", metavar="DIR", help="a model to serve (default: the default model)"
    )
    model = parser.parse_args().model
    program = find_browser()
    if program is None:
        print("no Chromium is installed (on Debian: apt-get install chromium)", file=sys.stderr)
        return 75
    with spawned(*(["--model", model] if model else []), *FLAGS) as server:
        wait_for(server, "/ready", 300)
        async with running_browser(program) as browser, aiohttp.ClientSession() as session:
            page = await browser.new_page()
            await take_chat(page, server.url)
            others = [
                asyncio.create_task(complete(session, server.url, index))
                for index in range(NUM_OTHERS)
            ]
            await take_live(page)
            for other in others:
                other.cancel()
            await asyncio.gather(*others, return_exceptions=True)
    sizes = {file.name: file.stat().st_size for file in sorted(FOLDER.glob("*.png"))}
    print("\n".join(f"{name}  {size:,} bytes" for name, size in sizes.items()))
    if sum(sizes.values()) > MAX_BYTES:
        print(f"more than {MAX_BYTES:,} bytes together: make them smaller", file=sys.stderr)
        return 1
    return 0


async def take_chat(page: Page, url: str) -> None:
    await page.prefer("light")
    await page.resize(1000, 640)
    await page.open(url + "/")
    await page.until("document.querySelector('#state').innerText === 'ready'", 60)
    for name, value in (("temperature", "0"), ("max_tokens", "160")):
        await page.focus(f"[name={name}]")
        await page.type(value)
    await page.focus("#prompt")
    await page.type(QUESTION)
    await page.press("Enter")
    await page.until(f"{IDLE} && document.querySelector('.assistant .stats')?.innerText", 120)
    await save(page, "chat-light")
    await page.prefer("dark")
    await save(page, "chat-dark")
    await page.resize(390, 780)
    await page.run("document.querySelector('#settings').open = false")
    await save(page, "chat-narrow")


async def take_live(page: Page) -> None:
    await page.prefer("light")
    await page.resize(1100, 1010)
    await page.run("location.hash = '#live'")
    await page.until("document.querySelector('#requests tr.waiting')", 60)
    await asyncio.sleep(6)  # for the charts to have a history
    await save(page, "live")


async def complete(session: aiohttp.ClientSession, url: str, index: int) -> None:
    """A story of a length of its own; its beginning is the others' as well."""
    start = "Once upon a time there was a small harbour town. " * (4 + index)
    body = {"prompt": start, "max_tokens": 400, "ignore_eos": True, "seed": index}
    async with session.post(f"{url}/v1/completions", json=body) as response:
        await response.read()


async def save(page: Page, name: str) -> None:
    await asyncio.sleep(0.3)  # for the last frame
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{name}.png").write_bytes(await page.screenshot())


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
