"""--config FILE: YAML and TOML, with text as it is written, and one helpful line for what is wrong."""

from pathlib import Path

import pytest

from engine.api.config import ConfigError
from server.cli import parse


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("c.yaml", "model: /m\nmax_num_seqs: 3\nserved-model-name: [a, b]\nenforce-eager: true\n"),
        (
            "c.toml",
            'model = "/m"\nmax-num-seqs = 3\nserved_model_name = ["a", "b"]\nenforce-eager = true\n',
        ),
    ],
)
def test_config_file(tmp_path: Path, name: str, text: str) -> None:
    file = tmp_path / name
    file.write_text(text)
    server, engine = parse(["--config", str(file)])
    assert (engine.model, engine.max_num_seqs, engine.enforce_eager) == ("/m", 3, True)
    assert server.served_model_name == ["a", "b"]
    _, engine = parse(
        ["/other", "--config", str(file), "--max-num-seqs", "5", "--no-enforce-eager"]
    )
    assert (engine.model, engine.max_num_seqs, engine.enforce_eager) == ("/other", 5, False)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max-modle-len: 3", "unknown flag --max-modle-len: did you mean --max-model-len"),
        ("just words", "expected lines like"),
        ("port: {b: 1}", "port must be a single value, not a section"),
        ("port: [1, 2]", "port must be a single value, not a list"),
        ("x: [", "while parsing"),
        ("port: x", "--port: invalid integer value: 'x'"),
        ("dtype: int4", "--dtype: invalid choice: 'int4'"),
        ("tensor-parallel-size: 2", "--tensor-parallel-size 2"),
        ("config: other.yaml", "config belongs on the command line"),
    ],
)
def test_bad_config_file(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        parse(["--config", str(file)])
    message = str(caught.value)
    assert message.startswith(f"--config {file}: ")
    assert message.count(str(file)) == 1
    assert words in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "text",
    [
        "0123456",
        "12:30:45",
        "1_000",
        "0x10",
        "yes",
        "on",
        "3.10",
        "1e3",
        "2026-01-02",
        ".inf",
        '"7"',
    ],
)
def test_text_in_a_file_is_as_written(tmp_path: Path, text: str) -> None:
    """YAML by itself makes 42798 of the first of these."""
    file = tmp_path / "c.yaml"
    file.write_text(f"api-key: {text}\nserved-model-name: [{text}, b]\n")
    server, _ = parse(["--config", str(file)])
    assert (server.api_key, server.served_model_name) == (
        [text.strip('"')], [text.strip('"'), "b"],
    )  # fmt: skip


@pytest.mark.parametrize("text", ["7", "0x10", "true", "2026-01-02", "[7]"])
def test_text_in_toml_is_in_quotes(tmp_path: Path, text: str) -> None:
    file = tmp_path / "c.toml"
    file.write_text(f"api-key = {text}\n")
    with pytest.raises(ConfigError, match=r"api-key must be text, got .*: put it in quotes"):
        parse(["--config", str(file)])
    file.write_text("api-key = 3.10\nrequest-timeout = 0.50\nport = 0x10\n")
    server, _ = parse(["--config", str(file)])
    assert (server.api_key, server.request_timeout, server.port) == (["3.10"], 0.5, 16)


@pytest.mark.parametrize("name", ["c.yaml", "c.toml"])
def test_config_file_with_a_mark_of_windows(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.write_bytes(b"\xef\xbb\xbf" + (b"port: 5\n" if name == "c.yaml" else b"port = 5\n"))
    assert parse(["--config", str(file)])[0].port == 5


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("port: 1\nport: 2", "port is given twice"),
        ("max_num_seqs: 1\nmax-num-seqs: 2", "max_num_seqs and max-num-seqs are the same flag"),
        ("disable-page: maybe", "disable-page is true or false, got 'maybe'"),
        ("no-overlap: [true]", "no-overlap must be a single value, not a list"),
        ("served-model-name: [{a: 1}]", "served-model-name must be text"),
        ("!!map [a]", "expected a mapping"),
        ("port: yes", "--port: invalid integer value: 'yes'"),
    ],
)
def test_lines_that_would_be_guessed_at(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        parse(["--config", str(file)])
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "page", "overlap"),
    [
        ("disable-page: true\nno-overlap: true", False, "off"),
        ("disable-page: false\nno-overlap: false", True, "auto"),
        ("no-page: true\noverlap: false", False, "off"),
        ("page: off\noverlap: yes", False, "on"),
    ],
)
def test_switches_in_a_file(tmp_path: Path, text: str, page: bool, overlap: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    server, engine = parse(["--config", str(file)])
    assert (server.page, engine.overlap) == (page, overlap)


@pytest.mark.parametrize("name", ["c.yaml", "c.toml"])
def test_an_item_of_a_list_is_no_flag(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    mark = ":" if name == "c.yaml" else " ="
    file.write_text(f'served-model-name{mark} ["a", "--port=5", "--no-page"]\n')
    server, _ = parse(["--config", str(file)])
    assert server.served_model_name == ["a", "--port=5", "--no-page"]
    assert (server.port, server.page) == (8000, True)


@pytest.mark.parametrize(
    ("name", "text"), [("c.yaml", "[" * 10_000), ("c.toml", "x = " + "[" * 10_000)]
)
def test_config_file_nested_too_deeply(tmp_path: Path, name: str, text: str) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(ConfigError, match="nested too deeply") as caught:
        parse(["--config", str(file)])
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("name", ["c.yaml", "c.toml"])
@pytest.mark.parametrize("text", ["", "# nothing yet\n"])
def test_empty_config_file(tmp_path: Path, name: str, text: str) -> None:
    file = tmp_path / name
    file.write_text(text)
    assert parse(["--config", str(file)]) == parse([])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("enable-log-requests: true", "on"),
        ("disable-log-requests: true", "off"),
        ("enable_log_requests: false", "off"),
        ("log-requests: on", "on"),
        ("log-requests: prompts", "prompts"),
    ],
)
def test_log_requests_in_a_file(tmp_path: Path, text: str, value: str) -> None:
    """vLLM's names of it as well."""
    file = tmp_path / "c.yaml"
    file.write_text(text + "\n")
    assert parse(["--config", str(file)])[0].log_requests == value


def test_words_that_yaml_takes_for_truth(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("overlap: off\nenable-lora: false\nserved-model-name: []\n")
    server, engine = parse(["--config", str(file)])
    assert (engine.overlap, server.served_model_name) == ("off", [])
    file.write_text("overlap: on\n")
    assert parse(["--config", str(file)])[1].overlap == "on"
