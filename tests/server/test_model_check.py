"""What is wrong with a model directory is told before any process is started."""

import json
import os

import pytest

from engine.api.config import ConfigError
from engine.models.config import find_weight_files
from server.model_check import check_vocabulary, check_weights, model_digest


def write_tokenizer(folder, vocab):
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}}))


@pytest.mark.parametrize(
    "vocab", [{f"t{i}": i for i in range(12)}, [[f"t{i}", -1.0] for i in range(12)]]
)
def test_ordinary_tokens_beyond_the_embedding_are_refused(tmp_path, vocab):
    write_tokenizer(tmp_path, vocab)
    check_vocabulary(tmp_path, 12)
    with pytest.raises(ConfigError, match="up to 11, but the model embeds only 10") as caught:
        check_vocabulary(tmp_path, 10)
    assert caught.value.exit_code == 2


def test_what_it_cannot_judge_is_left_to_the_tokenizer_process(tmp_path):
    check_vocabulary(tmp_path, 10)  # no tokenizer.json
    write_tokenizer(tmp_path, "odd")
    check_vocabulary(tmp_path, 10)
    write_tokenizer(tmp_path, {"a": 99})
    check_vocabulary(tmp_path, None)  # no vocab_size


def test_digest_tells_models_apart(tmp_path):
    """Not by where they lie; fine-tunes of one shape differ in their weights only."""
    digests = set()
    for name, config, weights in (
        ("a", "{}", b"x" * 10_000),
        ("b", "{ }", b"x" * 10_000),
        ("c", "{}", b"x" * 9_999 + b"y"),
        ("d", "{}", b"x" * 10_001),
    ):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(config)
        (folder / "model.safetensors").write_bytes(weights)
        digests.add(model_digest(str(folder)))
    assert len(digests) == 4
    assert model_digest(str((tmp_path / "a").rename(tmp_path / "moved"))) in digests
    assert model_digest(str(tmp_path / "none")), "a .gguf file that is converted, for one"


def test_only_files_are_weights(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"x")
    digest = model_digest(str(tmp_path))
    (tmp_path / "more.safetensors").mkdir()
    os.mkfifo(tmp_path / "pipe.safetensors")  # whoever opened it would wait for ever
    assert model_digest(str(tmp_path)) == digest
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"no \*\.safetensors"):
        check_weights(tmp_path)
    with pytest.raises(ConfigError, match=r"no \*\.safetensors"):
        find_weight_files(str(tmp_path))


@pytest.mark.parametrize("has_index", [False, True])
def test_a_link_to_nothing_is_named_with_its_target(tmp_path, has_index):
    if has_index:
        index = {"weight_map": {"x": "model.safetensors"}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "model.safetensors").symlink_to("../blobs/0123")
    with pytest.raises(ConfigError, match=r"model.safetensors: is a link to \.\./blobs/0123"):
        check_weights(tmp_path)


def test_a_link_to_nothing_beside_the_weights_does_not_matter(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "consolidated.safetensors").symlink_to("../blobs/0123")
    check_weights(tmp_path)
    assert find_weight_files(str(tmp_path)) == [str(tmp_path / "model.safetensors")]
