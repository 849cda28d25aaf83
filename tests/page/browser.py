"""A headless Chromium, driven by the DevTools protocol over one WebSocket. No package but aiohttp.

https://chromedevtools.github.io/devtools-protocol/
"""

import asyncio
import base64
import itertools
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
START_S = 20.0
FLAGS = (
    "--headless=new", "--disable-gpu", "--disable-extensions", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--no-first-run", "--no-default-browser-check", "--no-proxy-server", "--mute-audio",
    "--remote-debugging-port=0", "--force-color-profile=srgb", "--lang=en-US",
    "--no-sandbox",  # root and many containers have none, and the pages are ours
)  # fmt: skip


def find_browser() -> str | None:
    """The path of an installed Chromium or Chrome."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class BrowserError(RuntimeError):
    """The browser does not start."""


class PageError(AssertionError):
    """A script of the test threw, or something did not happen in time."""


class Page:
    """One tab. Collects what its console says and which addresses it asks for."""

    def __init__(self, browser: "Browser", session_id: str) -> None:
        self._browser = browser
        self._session_id = session_id
        self.console: list[str] = []  # errors and warnings of scripts and of the browser itself
        self.requests: list[str] = []  # addresses

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        return await self._browser.call(method, self._session_id, **params)

    async def open(self, url: str) -> None:
        """Returns when the page's scripts have run."""
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")

    async def run(self, script: str) -> Any:
        """The value of an expression, as JSON; a promise is awaited. Raises PageError if it throws."""
        answer = await self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise PageError(details.get("exception", {}).get("description", details["text"]))
        return answer["result"].get("value")

    async def until(self, condition: str, seconds: float = 15.0) -> None:
        """Wait until an expression is true. Raises PageError."""
        deadline = time.monotonic() + seconds
        while True:
            with suppress(PageError):
                if await self.run(f"Boolean({condition})"):
                    return
            if time.monotonic() > deadline:
                text = await self.run("document.body.innerText")
                raise PageError(f"not in {seconds:g} s: {condition}\n{text}\n{self.console}")
            await asyncio.sleep(0.03)

    async def text(self, selector: str) -> str:
        return await self.run(f"document.querySelector({selector!r})?.innerText ?? ''")

    async def focus(self, selector: str) -> None:
        await self.run(f"document.querySelector({selector!r}).focus()")

    async def click(self, selector: str) -> None:
        await self.run(f"document.querySelector({selector!r}).click()")

    async def type(self, text: str) -> None:
        """As from a keyboard, into whatever has the focus."""
        await self.call("Input.insertText", text=text)

    async def press(self, key: str, shift: bool = False) -> None:
        """Enter, Escape, Tab or Space."""
        code = {"Enter": 13, "Escape": 27, "Tab": 9, " ": 32}[key]
        typed = {"Enter": "\r", " ": " "}.get(key, "")
        event = {
            "key": key,
            "code": "Space" if key == " " else key,
            "windowsVirtualKeyCode": code,
            "modifiers": 8 if shift else 0,
        }
        kind = "keyDown" if typed else "rawKeyDown"
        await self.call("Input.dispatchKeyEvent", type=kind, text=typed, **event)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    async def resize(self, width: int, height: int, scale: float = 1.0) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 600,
        )

    async def prefer(self, scheme: str) -> None:
        """`light` or `dark`, as the system's setting would be."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def close(self) -> None:
        await self.call("Page.close")

    async def screenshot(self) -> bytes:
        """PNG."""
        answer = await self.call("Page.captureScreenshot", format="png")
        return base64.b64decode(answer["data"])

    def on_event(self, method: str, params: dict[str, Any]) -> None:
        match method:
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                self.console.append(details.get("exception", {}).get("description", str(details)))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                shown = [arg.get("value", arg.get("description")) for arg in params["args"]]
                self.console.append(f"{params['type']}: {shown}")
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                entry = params["entry"]
                self.console.append(f"{entry['source']}: {entry['text']} {entry.get('url', '')}")


class Browser:
    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._pages: dict[str, Page] = {}
        self._reader = asyncio.create_task(self._read())

    async def call(self, method: str, session_id: str = "", **params: Any) -> dict[str, Any]:
        """One command of the protocol. Raises PageError if the browser refuses it."""
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params}
        if session_id:
            message["sessionId"] = session_id
        future = asyncio.get_running_loop().create_future()
        self._answers[number] = future
        await self._socket.send_json(message)
        async with asyncio.timeout(START_S):
            return await future

    async def new_page(self) -> Page:
        """An empty tab with cookies and storage of its own."""
        context = await self.call("Target.createBrowserContext")
        where = context["browserContextId"]
        target = await self.call("Target.createTarget", url="about:blank", browserContextId=where)
        attached = await self.call(
            "Target.attachToTarget", targetId=target["targetId"], flatten=True
        )
        page = Page(self, attached["sessionId"])
        self._pages[attached["sessionId"]] = page
        for domain in ("Page", "Runtime", "Log", "Network"):
            await page.call(f"{domain}.enable")
        return page

    async def _read(self) -> None:
        async for frame in self._socket:
            message = frame.json()
            if "id" in message:
                future = self._answers.pop(message["id"])
                if future.done():
                    continue
                if "error" in message:
                    future.set_exception(PageError(message["error"]["message"]))
                else:
                    future.set_result(message["result"])
            elif page := self._pages.get(message.get("sessionId", "")):
                page.on_event(message["method"], message["params"])

    async def close(self) -> None:
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)


@asynccontextmanager
async def running_browser(program: str) -> AsyncIterator[Browser]:
    """A browser with a profile of its own, ended and forgotten at the exit. Raises BrowserError."""
    with tempfile.TemporaryDirectory(
        prefix="sluice-browser-", ignore_cleanup_errors=True
    ) as folder:
        process = await asyncio.create_subprocess_exec(
            program,
            *FLAGS,
            f"--user-data-dir={folder}",
            "about:blank",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            env={**os.environ, "HOME": folder},  # it leaves files there
        )
        try:
            address = await debugger_address(process, Path(folder) / "DevToolsActivePort")
            async with (
                aiohttp.ClientSession() as session,
                session.ws_connect(address, max_msg_size=0) as socket,
            ):
                browser = Browser(socket)
                yield browser
                with suppress(Exception):
                    await browser.call("Browser.close")
                await browser.close()
        finally:
            with suppress(ProcessLookupError):
                process.terminate()
            try:
                await asyncio.wait_for(process.wait(), 10)
            except TimeoutError:
                process.kill()
                await process.wait()


async def debugger_address(process: asyncio.subprocess.Process, file: Path) -> str:
    """Chromium writes its port and path to `file` as soon as it listens. Raises BrowserError."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.returncode is None:
        lines = file.read_text().split() if file.exists() else []
        if len(lines) == 2:
            return f"ws://127.0.0.1:{lines[0]}{lines[1]}"
        await asyncio.sleep(0.05)
    raise BrowserError(f"the browser did not start; exit code {process.returncode}")
