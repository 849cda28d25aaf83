"""The chat in a real browser, before a scripted backend."""

import asyncio
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from engine.api.messages import ChatPrompt, Generate, Phase, RequestError
from tests.page.browser import Page
from tests.server.conftest import eventually, free_port, running_site
from tests.server.fake_backend import Script

pytestmark = pytest.mark.asyncio(loop_scope="module")

ANSWER, STATE, PROBLEM = ".assistant .text", "#state", ".assistant .problem"
IDLE = "!document.querySelector('#send').hidden"
HELD = Script(["one ", "two ", "three "], hold="decode")


async def open_page(tab: Page, url: str, state: str = "ready") -> None:
    await tab.open(url + "/")
    await shows(tab, STATE, state)


async def shows(tab: Page, selector: str, text: str) -> None:
    """Wait until the last such element says `text`."""
    await tab.until(
        f"[...document.querySelectorAll({selector!r})].at(-1)?.innerText.includes({text!r})"
    )


async def ask(tab: Page, text: str) -> None:
    await tab.focus("#prompt")
    await tab.type(text)
    await tab.press("Enter")


async def ask_and_wait(tab: Page, text: str) -> None:
    await ask(tab, text)
    await tab.until(IDLE)


def roles(generate: Generate) -> list[tuple[str, Any]]:
    assert isinstance(generate.prompt, ChatPrompt)
    return [(message["role"], message["content"]) for message in generate.prompt.messages]


async def test_an_answer_streams_and_the_next_question_has_the_history(tab: Page) -> None:
    async with running_site() as site:
        site.backend.script = lambda g: Script(["Hel", "lo ", "there"], delay_s=0.2)
        await open_page(tab, site.url)
        assert await tab.run("document.activeElement.id") == "prompt"
        assert await tab.text("#model") == "tiny"
        await ask(tab, "Hi\nyou")
        await shows(tab, ANSWER, "Hel")
        assert await tab.text(ANSWER) != "Hello there", "shown before it is complete"
        assert await tab.run("document.querySelector('#log').ariaBusy") == "true"
        await tab.until(IDLE)
        assert await tab.text(ANSWER) == "Hello there"
        assert await tab.text(".user .text") == "Hi\nyou"
        stats = await tab.text(".assistant .stats")
        assert "3 tokens" in stats
        assert "tokens/s" in stats
        assert "first after 0." in stats
        assert await tab.run("document.querySelector('#log').ariaBusy") == "false"
        await ask_and_wait(tab, "And?")
        assert roles(site.backend.generates[1]) == [
            ("user", "Hi\nyou"), ("assistant", "Hello there"), ("user", "And?"),
        ]  # fmt: skip
    assert tab.console == []


async def test_stop_ends_the_request_and_keeps_what_came(tab: Page) -> None:
    async with running_site() as site:
        site.backend.script = lambda g: HELD
        await open_page(tab, site.url)
        for how in ("click", "Escape"):
            await ask(tab, "Count")
            await shows(tab, ANSWER, "three")
            assert site.service.client.num_live == 1
            if how == "click":
                await tab.click("#stop")
            else:
                await tab.press("Escape")
            await eventually(lambda: site.service.client.num_live == 0)
            await eventually(lambda: len(site.backend.aborted) == len(site.backend.generates))
            await shows(tab, ".assistant .stats", "stopped")
            await tab.until(IDLE)
        assert roles(site.backend.generates[1])[1] == ("assistant", "one two three ")


async def test_retry_and_a_new_chat(tab: Page) -> None:
    async with running_site() as site:
        site.backend.script = lambda g: Script([f"answer {len(site.backend.generates)}"])
        await open_page(tab, site.url)
        await ask_and_wait(tab, "Why?")
        await tab.click("#retry")
        await shows(tab, ANSWER, "answer 2")
        await tab.until(IDLE)
        assert await tab.run("document.querySelectorAll('.turn').length") == 2
        assert roles(site.backend.generates[1]) == [("user", "Why?")]
        site.backend.script = lambda g: HELD
        await ask(tab, "More?")
        await shows(tab, ANSWER, "three")
        await tab.click("#clear")
        await eventually(lambda: site.service.client.num_live == 0)
        assert await tab.run("document.querySelectorAll('.turn').length") == 0
        site.backend.script = lambda g: Script(["fresh"])
        await ask_and_wait(tab, "New")
        assert roles(site.backend.generates[-1]) == [("user", "New")]
        assert await tab.text(ANSWER) == "fresh"


async def test_settings_are_sent(tab: Page) -> None:
    async with running_site() as site:
        await open_page(tab, site.url)
        await ask_and_wait(tab, "plain")
        values = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "max_tokens": 12, "seed": 42}
        for name, value in values.items():
            await tab.focus(f"[name={name}]")
            await tab.type(str(value))
        await tab.focus("#system")
        await tab.type("Be brief.")
        await ask_and_wait(tab, "set")
        plain, changed = site.backend.generates
        assert roles(plain) == [("user", "plain")]
        assert plain.params.max_tokens is None
        assert {name: getattr(changed.params, name) for name in values} == values
        assert roles(changed)[0] == ("system", "Be brief.")


async def test_text_of_a_model_is_never_markup(tab: Page) -> None:
    async with running_site() as site:
        evil = "<img src=x onerror=alert(1)> <b>bold</b>\n"
        pieces = [evil, "``", "`html\n<script>alert(2)</script>\n  indented\n`", "``\nafter"]
        site.backend.script = lambda g: Script(pieces)
        await open_page(tab, site.url)
        await ask_and_wait(tab, evil)
        assert (
            await tab.run("document.querySelectorAll('#log img, #log b, #log script').length") == 0
        )
        assert await tab.text(ANSWER + " p") == evil.strip()
        assert await tab.text(ANSWER + " pre") == "<script>alert(2)</script>\n  indented"
        assert await tab.text(ANSWER + " p:last-child") == "after"
        assert await tab.text(".user .text") == evil.strip()


async def test_scripts_that_slip_in_do_not_run(tab: Page) -> None:
    """The second line of defence: what the policy in the headers forbids."""
    async with running_site() as site:
        await open_page(tab, site.url)
        inline = "const s = document.createElement('script'); s.textContent = 'window.evil = 1'"
        for attempt in (
            f"{inline}; document.body.append(s)",
            "document.body.innerHTML = '<p>x</p>'",
        ):
            refused = f"(() => {{ try {{ {attempt} }} catch (e) {{ return e.name }} }})()"
            assert await tab.run(refused) == "TypeError"
        assert await tab.run("window.evil ?? null") is None
    assert tab.console != []
    tab.console.clear()  # the browser tells of what it refused


async def test_reasoning_is_folded(tab: Page) -> None:
    async with running_site(reasoning_parser="qwen3") as site:
        site.backend.script = lambda g: Script(["<think>", "hm, ", "so</think>", "Yes."])
        await open_page(tab, site.url)
        await ask_and_wait(tab, "Sure?")
        assert await tab.text(ANSWER) == "Yes."
        assert await tab.run("document.querySelector('.assistant details').open") is False
        assert (
            await tab.run("document.querySelector('.assistant details div').textContent")
            == "hm, so"
        )
        await ask_and_wait(tab, "Really?")
        assert roles(site.backend.generates[1])[1] == ("assistant", "Yes.")


# --- errors ---------------------------------------------------------------------------------------------


def refusal(generate: Generate, status: int, code: str, message: str) -> RequestError:
    return RequestError(
        req_id=generate.req_id, n=1, status=status, code=code, message=message, param="messages"
    )


async def test_errors_are_shown_with_advice(tab: Page) -> None:
    async with running_site() as site:
        cases = [
            (400, "context_length_exceeded", "too long by 7", None, "Begin a new chat"),
            (503, "queue_timeout", "nobody came", None, "Try again in 1 s"),
            (500, "internal_error", "it broke", 1, "the server's log says more"),
        ]
        await open_page(tab, site.url)
        for status, code, message, after, advice in cases:
            site.backend.script = lambda g, s=status, c=code, m=message, a=after: Script(
                ["partial", " text"], error=refusal(g, s, c, m), error_after=a
            )
            await ask(tab, "go")
            await shows(tab, PROBLEM, message)
            await shows(tab, PROBLEM, advice)
            await tab.until(IDLE)
        assert await tab.text(ANSWER) == "partial", "what came before the error stays"
        site.backend.script = lambda g: Script(["fine"])
        await tab.click("#retry")
        await tab.until("!document.querySelector('.problem:not(#live-problem)')")
        await shows(tab, ANSWER, "fine")


async def test_a_key_is_asked_for_and_kept_in_the_tab_alone(tab: Page) -> None:
    async with running_site(api_key=["secret-key"]) as site:
        await open_page(tab, site.url, "needs an API key")
        await ask(tab, "Hi")
        await shows(tab, PROBLEM, "field API key")
        await tab.focus("#key")
        await tab.type("secret-key")
        await tab.press("Enter")
        await shows(tab, STATE, "ready")
        await tab.click("#retry")
        await shows(tab, ANSWER, "Hello world!")
        assert await tab.run("JSON.stringify(localStorage).includes('secret')") is False
        assert await tab.run("document.cookie") == ""
        assert not [url for url in tab.requests if "secret" in url]
        await open_page(tab, site.url)  # the same tab still knows it


async def test_a_server_that_is_not_there(tab: Page) -> None:
    async with running_site() as site:
        await open_page(tab, site.url)
        await tab.run(f"sessionStorage.setItem('base', 'http://127.0.0.1:{free_port()}')")
        await open_page(tab, site.url, "no answer")
        await ask(tab, "Hi")
        await shows(tab, PROBLEM, f"--allowed-origins {site.url}")


async def test_states_in_words(tab: Page) -> None:
    async with running_site(ready=False) as site:
        site.backend.state(Phase.LOADING, 0.42)
        await open_page(tab, site.url, "loading weights 42%")
        assert await tab.text("#model") == "tiny", "known before the model is"
        await ask(tab, "Too early")
        await shows(tab, PROBLEM, "try again when it says ready")
        site.backend.ready()
        await shows(tab, STATE, "ready")
        status = site.service.client.status
        status.set_paused(True)
        await open_page(tab, site.url, "draining")
        status.set_dead("it fell over")
        await open_page(tab, site.url, "the engine has stopped")


# --- keyboard, colours, width ---------------------------------------------------------------------------


async def test_everything_with_the_keyboard(tab: Page) -> None:
    async with running_site() as site:
        await open_page(tab, site.url)
        await tab.type("first")
        await tab.press("Enter", shift=True)
        await tab.type("second")
        assert await tab.run("document.querySelector('#prompt').value") == "first\nsecond"
        seen = []
        while await tab.run("document.activeElement !== document.body") and len(seen) < 30:
            await tab.press("Tab")
            name = "document.activeElement.id || document.activeElement.name || 'other'"
            seen.append(await tab.run(name))
            if await tab.run("document.activeElement === document.body"):
                break  # behind the last field
            outline = await tab.run("getComputedStyle(document.activeElement).outlineStyle")
            assert outline != "none", f"{seen[-1]}: the focus must be seen"
        assert seen[0] == "send"
        assert {"system", "temperature", "seed", "key", "base"} <= set(seen)
        await tab.focus("#send")
        site.backend.script = lambda g: HELD
        await tab.press(" ")
        await shows(tab, ANSWER, "three")
        assert await tab.run("document.activeElement.id") == "prompt", "not lost with the button"
        await tab.press("Escape")
        await eventually(lambda: site.service.client.num_live == 0)
        await tab.until(IDLE)
        unnamed = await tab.run(
            "[...document.querySelectorAll('button, input, textarea, select')].filter(e => "
            "!e.labels?.length && !e.ariaLabel && !e.textContent.trim()).map(e => e.outerHTML)"
        )
        assert unnamed == [], "each field has a label"


def is_dark(color: str) -> bool:
    channels = [int(part) for part in color.strip("rgb()").split(",")]
    return sum(channels) < 3 * 128


async def test_dark_and_light(tab: Page) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    async with running_site() as site:
        for scheme in ("dark", "light"):
            await tab.prefer(scheme)
            await open_page(tab, site.url)
            assert is_dark(await tab.run(ground)) is (scheme == "dark"), "as the system says"
        await tab.click("#theme")
        assert is_dark(await tab.run(ground))
        await open_page(tab, site.url)
        assert is_dark(await tab.run(ground)), "remembered"
        assert await tab.run("document.querySelector('#theme').ariaPressed") == "true"


async def test_a_phone_s_width(tab: Page) -> None:
    async with running_site() as site:
        await tab.resize(360, 640)
        word = "long" * 50
        site.backend.script = lambda g: Script([word, "\n```\n", word, "\n```\n"])
        await open_page(tab, site.url)
        assert await tab.run("document.querySelector('#settings').open") is False
        await ask_and_wait(tab, word)
        for view in ("#chat", "#live"):
            await tab.run(f"location.hash = {view!r}")
            await asyncio.sleep(0.1)
            assert await tab.run("document.documentElement.scrollWidth") <= 360, view
        await tab.run("location.hash = '#chat'")
        box = await tab.run(
            "JSON.parse(JSON.stringify(document.querySelector('#send').getBoundingClientRect()))"
        )
        assert box["bottom"] <= 640, "the button is on the screen"


# --- other addresses ------------------------------------------------------------------------------------


async def prefix_proxy(target: str, prefix: str) -> web.AppRunner:
    """As a reverse proxy does: PREFIX/x becomes TARGET/x, and answers pass as they come."""

    async def forward(request: web.Request) -> web.StreamResponse:
        url = target + "/" + request.match_info["rest"]
        headers = {
            k: v for k, v in request.headers.items() if k in ("Content-Type", "Authorization")
        }
        async with (
            aiohttp.ClientSession() as session,
            session.request(
                request.method,
                url,
                params=request.query,
                data=await request.read() or None,
                headers=headers,
            ) as answer,
        ):
            kept = ("Content-Type", "Content-Security-Policy")
            response = web.StreamResponse(
                status=answer.status,
                headers={name: answer.headers[name] for name in kept if name in answer.headers},
            )
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            return response

    app = web.Application()
    app.router.add_route("*", prefix + "/{rest:.*}", forward)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner


async def test_below_a_path_of_a_proxy(tab: Page) -> None:
    async with running_site() as site:
        proxy = await prefix_proxy(site.url, "/models/one")
        try:
            url = f"http://127.0.0.1:{proxy.addresses[0][1]}/models/one"
            await open_page(tab, url)
            await ask_and_wait(tab, "Hi")
            assert await tab.text(ANSWER) == "Hello world!"
            assert not [asked for asked in tab.requests if not asked.startswith((url, "about:"))]
        finally:
            await proxy.cleanup()


async def test_another_server_that_allows_the_page(tab: Page) -> None:
    async with running_site() as home:
        away_settings: dict[str, Any] = {"allowed_origins": [home.url], "api_key": ["k"]}
        async with running_site(served_model_name=["away"], **away_settings) as away:
            await open_page(tab, home.url)
            await tab.focus("#base")
            await tab.type(away.url.removeprefix("http://") + "/v1/")
            await tab.focus("#key")
            await tab.type("k")
            await tab.focus("#prompt")
            await shows(tab, "#model", "away")
            await shows(tab, STATE, "ready")
            await ask_and_wait(tab, "Hi")
            assert await tab.text(ANSWER) == "Hello world!"
            assert len(away.backend.generates) == 1
            assert home.backend.generates == []
