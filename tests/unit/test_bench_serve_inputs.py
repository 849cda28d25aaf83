"""What the load test is given: datasets, lengths, addresses, result files. Each is checked, and named."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from scripts.loadtest.compare import compare
from scripts.loadtest.dataset import MOST_TOKENS, read_dataset
from scripts.loadtest.figures import Round
from scripts.loadtest.fleet import ClientFailed, Fleet, ending
from scripts.loadtest.foreign import decode, printable
from scripts.loadtest.options import build_parser
from scripts.loadtest.outputs import check_writable
from scripts.loadtest.records import Level
from scripts.loadtest.result import LevelResult, RunResult, read, write
from scripts.loadtest.run import base_of
from scripts.loadtest.watch import ServerInfo
from scripts.loadtest.workload import Lengths, Workload

# --- datasets --------------------------------------------------------------------------------------


def test_lines_end_at_line_feeds_only(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    prompts = ["a\u2028b", "c\u0085d", "e\x0cf", "g"]
    lines = [json.dumps({"prompt": p}, ensure_ascii=False) for p in prompts]
    lines[2] = lines[2].replace("\\f", "\\u000c")
    path.write_bytes("\r\n".join(["", *lines, "  ", ""]).encode("utf-8-sig"))
    assert [row.prompt for row in read_dataset(path)] == prompts


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": 5}', "`prompt` is 5: give text or a list of token ids"),
        ('{"prompt": null}', "`prompt` is None"),
        ('{"prompt": []}', "`prompt` is []"),
        ('{"prompt": [1, "a"]}', "`prompt` is [1, 'a']"),
        ('{"prompt": [1, true]}', "`prompt` is [1, True]"),
        ('{"prompt": [-1]}', "`prompt` is [-1]"),
        ('{"prompt": [4294967296]}', "`prompt` is [4294967296]"),
        ('{"messages": "x"}', "`messages` is 'x': give a list of objects, each with a `role`"),
        ('{"messages": []}', "`messages` is []"),
        ('{"messages": [1, "a"]}', "`messages` is [1, 'a']"),
        ('{"messages": [{"content": "x"}]}', "each with a `role`"),
        ('{"prompt": "a", "max_tokens": "x"}', "`max_tokens` is 'x': give a whole number from 1"),
        ('{"prompt": "a", "max_tokens": 0}', "`max_tokens` is 0"),
        ('{"prompt": "a", "max_tokens": true}', "`max_tokens` is True"),
        ('{"prompt": "a", "max_tokens": 1e3}', "`max_tokens` is 1000.0"),
        ('{"prompt": "a", "max_tokens": 10000001}', "`max_tokens` is 10000001"),
        ('{"prompt": "a", "max_tokens": NaN}', "not JSON (NaN is no JSON)"),
        ('{"prompt": ' + "[" * 100_000, "not JSON (nested too deeply)"),
        ('{"prompt": "\udcff"}', "not UTF-8"),
    ],
)  # fmt: skip
def test_a_wrong_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "set.jsonl"
    path.write_bytes(b'{"prompt": "a", "max_tokens": null}\n' + os.fsencode(line) + b"\n")
    with pytest.raises(ValueError, match=r"set\.jsonl, line 2: ") as caught:
        read_dataset(path)
    assert message in str(caught.value)
    assert len(str(caught.value)) < len(str(path)) + 200


# --- lengths ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lognormal:5:1000", "SIGMA of at most 5"),
        ("lognormal:5:1:0", "begin at 1"),
        ("normal:5:1e8", "at most 10,000,000"),
        ("uniform:1:1e8", "at most 10,000,000"),
        ("100000000", "at most 10,000,000"),
    ],
)
def test_lengths_have_bounds(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Lengths.parse(text)


def test_no_length_is_beyond_the_bound() -> None:
    class Extreme:
        def lognormvariate(self, mu: float, sigma: float) -> float:
            return 1e200

    drawn = Lengths.parse("lognormal:5:5").draw(Extreme())  # type: ignore[arg-type]
    assert drawn == MOST_TOKENS


# --- addresses -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url", ["http://[::1", "http://h:99999", "http://", "http://:8000", "http://h/v1?a=1", "http://h\n"]
)  # fmt: skip
def test_a_wrong_address_is_named(url: str) -> None:
    with pytest.raises(ValueError, match=r"--url .?http:"):
        base_of(url)


@pytest.mark.parametrize(
    "url", ["http://u:secret@host", "http://u:secret@[::1", "u:secret@host", "http://u:se/cret@h"]
)
def test_a_password_in_an_address_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(ValueError, match="--url") as caught:
        base_of(url)
    assert "secret" not in str(caught.value)
    assert "cret" not in str(caught.value)


def test_addresses_with_and_without_v1() -> None:
    assert base_of("http://[::1]:8000/v1/") == "http://[::1]:8000"
    assert base_of("https://host/proxy") == "https://host/proxy"


def test_a_deep_extra_body_is_refused() -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["--extra-body", '{"a": ' + "[" * 50_000])


# --- what others wrote -----------------------------------------------------------------------------


def test_json_is_decoded_to_a_depth() -> None:
    assert decode('{"a": [1, NaN]}')["a"][0] == 1
    assert decode("[" * 60 + "]" * 60)
    for text in ("[" * 100 + "]" * 100, "[" * 100_000, "{", "1" * 5000):
        with pytest.raises(ValueError):  # noqa: PT011
            decode(text)
    with pytest.raises(ValueError, match="NaN is no JSON"):
        decode("[NaN]", strict=True)


def test_control_characters_are_escaped() -> None:
    assert printable("Grüße, 世界") == "Grüße, 世界"
    assert printable("\x1b[31m\r\n\u202e\udcff") == "\\x1b[31m\\r\\n\\u202e\\udcff"


@pytest.mark.parametrize(
    "page", [b"[]", b"null", b'{"data": 5}', b'{"data": [1, {}]}', b"[" * 10**5]
)
def test_an_odd_list_of_models_names_none(page: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ServerInfo, "get", lambda self, path: page)
    assert ServerInfo("http://127.0.0.1:9").models() == []


def saved(tmp_path: Path) -> dict[str, Any]:
    rounds = [Round({"output_tps": 2.0})]
    write(RunResult({}, {}, [LevelResult(Level("closed", 4), rounds)]), tmp_path / "a.json")
    return read(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"levels": None}, "levels"),
        ({"settings": []}, "settings"),
        ({"when": 5}, "when"),
        ({"levels": [5]}, "level 1"),
        ({"levels": [{"mode": "closed"}]}, "level 1"),
        ({"figures": {"output_tps": 5}}, "level 1, figure output_tps"),
        ({"figures": {"x\x1b": {"median": 1, "low": 1, "rounds": 2}}}, r"figure x\\x1b"),
        ({"figures": {"x": {"median": 10**400, "low": 1, "high": 1, "rounds": 2}}}, "figure x"),
        ({"errors": {"HTTP 500": "many"}}, "level 1"),
        ({"value": "4"}, "level 1"),
    ],
)
def test_an_incomplete_result_is_refused(
    tmp_path: Path, change: dict[str, Any], wrong: str
) -> None:
    found = saved(tmp_path)
    found.update(change) if change.keys() & found.keys() else found["levels"][0].update(change)
    (tmp_path / "a.json").write_text(json.dumps(found))
    with pytest.raises(ValueError, match=rf"is incomplete \(.*{wrong}"):
        read(tmp_path / "a.json")


def test_levels_without_a_limit_are_compared(tmp_path: Path) -> None:
    """--rate inf, which JSON cannot hold, is null in the file."""
    found = saved(tmp_path)
    found["levels"][0].update(mode="rate", value=None)
    (tmp_path / "a.json").write_text(json.dumps(found))
    again = read(tmp_path / "a.json")
    assert "\nrate inf\n" in compare(again, read(tmp_path / "a.json"))


def test_a_result_that_is_nested_deeply_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"format": 1, "levels": ' + "[" * 100_000)
    with pytest.raises(ValueError, match="is not JSON"):
        read(tmp_path / "a.json")


def test_figures_that_were_not_finite_are_not_compared(tmp_path: Path) -> None:
    found = saved(tmp_path)
    found["levels"][0]["figures"]["output_tps"]["high"] = None
    found["server"]["models"] = ["\x1b[31m"]
    (tmp_path / "b.json").write_text(json.dumps(found))
    text = compare(saved(tmp_path), read(tmp_path / "b.json"))
    assert "output tok/s" not in text
    assert "\x1b" not in text


# --- where results go ------------------------------------------------------------------------------


def test_asking_whether_results_can_be_written_leaves_no_trace(tmp_path: Path) -> None:
    old = tmp_path / "old.json"
    old.write_text("{}")
    link = tmp_path / "link.json"
    link.symlink_to(tmp_path / "elsewhere.json")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)  # opening it would wait for a reader
    for path in (old, tmp_path / "new" / "a.json", link, pipe, Path("/dev/full")):
        check_writable(path, tmp_path / "plots")
    assert old.read_text() == "{}"
    assert list((tmp_path / "new").iterdir()) == []
    assert list((tmp_path / "plots").iterdir()) == []


# --- client processes that end by themselves -------------------------------------------------------


def test_only_a_kill_is_blamed_on_memory() -> None:
    assert "SIGKILL" in ending(-9)
    assert "memory" in ending(-9)
    assert ending(3) == (
        "a client process ended by itself, with exit code 3: its error is above"
    )  # fmt: skip
    assert "signal 11" in ending(-11)
    assert "memory" not in ending(3) + ending(-11)


def test_a_client_process_that_fails_is_told_from_one_that_was_killed() -> None:
    one = Lengths.parse("1")
    broken = Workload("m", False, False, input_len=Lengths("lognormal", 5, 1e9), output_len=one)
    for workload, message in ((broken, "exit code 1"), (Workload("m", False, False, one, one), "SIGKILL")):  # fmt: skip
        with Fleet(None, workload, processes=1) as fleet:  # type: ignore[arg-type]
            if message == "SIGKILL":
                fleet.members[0].kill()
                fleet.members[0].join()
            with pytest.raises(ClientFailed, match=message):
                fleet.run(Level("closed", 1), 0, 0, 40)
