"""A browser for each file of tests, and a tab for each test, which must leave no errors behind."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from urllib.parse import urlsplit

import pytest
import pytest_asyncio

from tests.page.browser import Browser, BrowserError, Page, find_browser, running_browser

# What Chromium says of every answer that is no 2xx, and of a server that is not there
REFUSALS = ("network: Failed to load resource:", "javascript: Access to fetch at")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    program = find_browser()
    if program is None:
        pytest.skip("no Chromium is installed (on Debian: apt-get install chromium)")
    async with AsyncExitStack() as stack:
        try:
            running = await stack.enter_async_context(running_browser(program))
        except BrowserError as error:
            pytest.skip(f"{program} is installed, but does not work here: {error}")
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def tab(browser: Browser) -> AsyncIterator[Page]:
    page = await browser.new_page()
    await page.resize(1200, 800)
    yield page
    errors = [line for line in page.console if not line.startswith(REFUSALS)]
    assert errors == [], "the console must stay empty"
    hosts = {urlsplit(url).hostname for url in page.requests if url.startswith("http")}
    assert hosts <= {"127.0.0.1"}, "the page must not ask other hosts"
    await page.close()
