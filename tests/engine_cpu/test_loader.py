"""Directories and checkpoints that cannot be served say what is wrong, and where."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.api.config import ConfigError
from engine.models.config import INDEX_FILE, ModelConfig, find_weight_files
from engine.weights.checkpoint import SafetensorsCheckpoint
from engine.weights.loader import EMBEDDING, HEAD, load_model
from engine.weights.slots import Slot, Source
from tests.engine_cpu.tiny_models import copy_model, edit_config, make_tiny

WEIGHTS = "model.safetensors"
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny("llama", tmp_path_factory.mktemp("tiny"), tokenizer=False)


@pytest.fixture
def model_dir(tiny: str, tmp_path: Path) -> Path:
    """A copy to damage."""
    return copy_model(tiny, tmp_path / "model")


def load(path: str | Path, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    config = ModelConfig.from_directory(str(path))
    return load_model(str(path), config, dtype, torch.device("cpu"), **more)


def error_of(action: Callable[[], Any]) -> str:
    """The one-line message of the ConfigError (exit code 2) that `action` raises."""
    with pytest.raises(ConfigError) as caught:
        action()
    assert caught.value.exit_code == 2
    message = str(caught.value)
    assert "\n" not in message
    return message


def change_tensors(path: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(path / WEIGHTS)
    change(tensors)
    save_file(tensors, path / WEIGHTS)


# --- directories and config.json -----------------------------------------------------------------


def test_config_of_a_checkpoint(tiny: str, model_dir: Path) -> None:
    config = ModelConfig.from_directory(tiny)
    assert config.architecture == "LlamaForCausalLM"
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (2, 4, 2)
    assert (config.head_dim, config.vocab_size, config.max_model_len) == (16, 512, 512)
    assert config.dtype == "float32"
    assert config.bos_token_id == 1
    (model_dir / "generation_config.json").write_text('{"eos_token_id": [7, 2, 9]}')
    edit_config(model_dir, eos_token_id=[2, 5], head_dim=None, num_key_value_heads=None)
    config = ModelConfig.from_directory(str(model_dir))
    assert config.eos_token_ids == [7, 2, 9, 5]
    assert (config.head_dim, config.num_kv_heads) == (16, 4)
    (model_dir / "generation_config.json").unlink()
    assert ModelConfig.from_directory(str(model_dir)).eos_token_ids == [2, 5]


def test_missing_directory(tmp_path: Path) -> None:
    message = error_of(lambda: ModelConfig.from_directory(str(tmp_path / "org/name")))
    assert f"{tmp_path}/org/name: no such directory" in message
    assert "not downloaded" in message


def test_missing_config(tmp_path: Path) -> None:
    assert "no config.json" in error_of(lambda: ModelConfig.from_directory(str(tmp_path)))
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert "m.gguf: pass that file" in error_of(lambda: ModelConfig.from_directory(str(tmp_path)))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"architectures": ["BertModel"]},
            "architecture BertModel is not supported; supported: Ll",
        ),
        ({"architectures": None}, "architecture (none given) is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization method 'awq' is not"),
        (
            {"quantization_config": {"quant_method": None}},
            "quantization_config names no quant_method",
        ),
        ({"quantization_config": []}, "quantization_config must be an object, got []"),
        ({"compression_config": 4}, "compression_config must be an object, got 4"),
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported; supported: silu"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer, got 0"),
        ({"hidden_size": "64"}, "hidden_size must be a positive integer, got '64'"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"num_key_value_heads": 3}, "4 is no multiple of num_key_value_heads 3"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "rope type 'spiral' is not supported"),
        ({"architectures": 5}, "architectures must be a list of names, got 5"),
        ({"architectures": [["x"]]}, "architectures must be a list of names, got [['x']]"),
        ({"architectures": "LlamaForCausalLM"}, "must be a list of names, got 'Llama"),
        ({"quantization_config": "awq"}, "quantization method 'awq' is not"),
        ({"eos_token_id": "x"}, "eos_token_id must be a token id or a list, got 'x'"),
        ({"bos_token_id": [1.5]}, "bos_token_id must be a token id or a list, got [1.5]"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps must be a number from 0 to 1, got 'x'"),
        ({"sliding_window": "x"}, "sliding_window must be a positive integer, got 'x'"),
        ({"hidden_size": 10**9}, "hidden_size is 1000000000, more than any model has"),
        ({"max_position_embeddings": 10**12}, "max_position_embeddings is 1000000000000, more"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 1e6}},
            "max_position_embeddings 512 and rope factor 1e+06 make 512000000 positions",
        ),
    ],
)
def test_config_that_cannot_be_served(
    model_dir: Path, changes: dict[str, Any], expected: str
) -> None:
    edit_config(model_dir, **changes)
    message = error_of(lambda: ModelConfig.from_directory(str(model_dir)))
    assert message.startswith(f"{model_dir}/config.json: ")
    assert expected in message


@pytest.mark.parametrize("value", [None, False, "", {}])
def test_no_quantization_may_be_said_in_many_ways(model_dir: Path, value: object) -> None:
    edit_config(model_dir, quantization_config=value)
    assert ModelConfig.from_directory(str(model_dir)).num_layers


def test_generation_config_that_cannot_be_served(model_dir: Path) -> None:
    (model_dir / "generation_config.json").write_text('{"eos_token_id": "x"}')
    message = error_of(lambda: ModelConfig.from_directory(str(model_dir)))
    assert message.startswith(f"{model_dir}/generation_config.json: eos_token_id must be")


def test_malformed_config(model_dir: Path) -> None:
    (model_dir / "config.json").write_text("[" * 100_000)
    assert "nested too deeply" in error_of(lambda: ModelConfig.from_directory(str(model_dir)))
    (model_dir / "config.json").write_text('{"architectures": [')
    assert "cannot be read as JSON" in error_of(lambda: ModelConfig.from_directory(str(model_dir)))
    (model_dir / "config.json").write_text("[]")
    assert "expected a JSON object" in error_of(lambda: ModelConfig.from_directory(str(model_dir)))


# --- files ------------------------------------------------------------------------------------------


def test_no_weights(model_dir: Path) -> None:
    (model_dir / WEIGHTS).unlink()
    assert "no *.safetensors" in error_of(lambda: load(model_dir))
    (model_dir / "pytorch_model.bin").write_bytes(b"")
    assert "pytorch_model.bin is not read, convert it" in error_of(lambda: load(model_dir))


def test_missing_shard(tmp_path: Path) -> None:
    make_tiny("llama", tmp_path, tokenizer=False, max_shard_size="100KB")
    shards = find_weight_files(str(tmp_path))
    Path(shards[1]).unlink()
    message = error_of(lambda: load(tmp_path))
    assert f"1 of {len(shards)} weight files listed in {INDEX_FILE} are missing" in message
    assert Path(shards[1]).name in message
    (tmp_path / INDEX_FILE).write_text('{"weight_map": {}}')
    assert "lists no weight files" in error_of(lambda: load(tmp_path))


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        ({}, "weight_map must be an object, got None"),
        ({"weight_map": None}, "weight_map must be an object, got None"),
        ({"weight_map": ["a"]}, "weight_map must be an object, got ['a']"),
        ({"weight_map": {Q_PROJ: 3}}, f"give each tensor a file name, got 3 for {Q_PROJ}"),
        ({"weight_map": {Q_PROJ: ["a"]}}, f"give each tensor a file name, got ['a'] for {Q_PROJ}"),
    ],
)
def test_an_index_that_cannot_be_used(model_dir: Path, index: Any, expected: str) -> None:
    (model_dir / INDEX_FILE).write_text(json.dumps(index))
    message = error_of(lambda: load(model_dir))
    assert message.startswith(f"{model_dir}/{INDEX_FILE}: ")
    assert expected in message


@pytest.mark.parametrize("has_index", [False, True])
def test_a_link_to_nothing_is_named_with_its_target(model_dir: Path, has_index: bool) -> None:
    if has_index:
        index = {"weight_map": {Q_PROJ: WEIGHTS}}
        (model_dir / INDEX_FILE).write_text(json.dumps(index))
    (model_dir / WEIGHTS).unlink()
    (model_dir / WEIGHTS).symlink_to("../blobs/0123")
    message = error_of(lambda: load(model_dir))
    assert message == f"{model_dir}/{WEIGHTS}: is a link to ../blobs/0123, which is not there"


def test_a_pointer_of_git_lfs_is_no_damaged_file(model_dir: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 1000\n"
    (model_dir / WEIGHTS).write_text(pointer)
    message = error_of(lambda: load(model_dir))
    assert message.startswith(f"{model_dir}/{WEIGHTS}: is a pointer of Git LFS")
    assert "git lfs pull" in message


def test_truncated_file(model_dir: Path) -> None:
    data = (model_dir / WEIGHTS).read_bytes()
    (model_dir / WEIGHTS).write_bytes(data[: len(data) // 2])
    message = error_of(lambda: load(model_dir))
    assert f"{model_dir}/{WEIGHTS}: damaged or truncated" in message


def test_consolidated_duplicates_are_left_alone(model_dir: Path) -> None:
    """Mistral's directories hold all weights twice, the second time under other names."""
    tensors = {f"layers.{name}": t for name, t in load_file(model_dir / WEIGHTS).items()}
    save_file(tensors, model_dir / "consolidated.safetensors")
    (model_dir / WEIGHTS).rename(model_dir / "part.safetensors")
    assert find_weight_files(str(model_dir)) == [f"{model_dir}/part.safetensors"]
    load(model_dir)


# --- tensors ----------------------------------------------------------------------------------------


def test_missing_tensor_names_layer_source_and_file(model_dir: Path) -> None:
    change_tensors(model_dir, lambda tensors: tensors.pop(Q_PROJ))
    message = error_of(lambda: load(model_dir))
    assert message.startswith(f"model.layers.1.self_attn.qkv: needs tensor {Q_PROJ}")
    assert f"{model_dir}/{WEIGHTS}" in message


def test_wrong_shape_names_layer_source_file_and_both_shapes(model_dir: Path) -> None:
    def cut(tensors: dict[str, Tensor]) -> None:
        tensors[Q_PROJ] = tensors[Q_PROJ][:32].clone()

    change_tensors(model_dir, cut)
    message = error_of(lambda: load(model_dir))
    assert f"{Q_PROJ} in {model_dir}/{WEIGHTS} has shape [32, 64]" in message
    assert message.startswith("model.layers.1.self_attn.qkv: ")
    assert "[64, 64]" in message


def test_leftover_tensors_are_an_error(model_dir: Path) -> None:
    edit_config(model_dir, num_hidden_layers=1)
    message = error_of(lambda: load(model_dir))
    assert "9 tensors have no place in a LlamaForCausalLM with 1 layers" in message
    assert "model.layers.1." in message
    assert message.count(WEIGHTS) == 5
    assert "and 4 more" in message


def test_weights_that_are_not_floating_point(model_dir: Path) -> None:
    def quantize(tensors: dict[str, Tensor]) -> None:
        tensors[Q_PROJ] = tensors[Q_PROJ].to(torch.int8)

    change_tensors(model_dir, quantize)
    assert f"{Q_PROJ} in {model_dir}/{WEIGHTS} is stored as I8" in error_of(lambda: load(model_dir))


def test_harmless_leftovers(model_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Rotary buffers of old checkpoints, and the embedding once more as the head that is tied to it."""

    def add(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
        tensors[HEAD] = tensors[EMBEDDING].clone()

    change_tensors(model_dir, add)
    edit_config(model_dir, tie_word_embeddings=True)
    with caplog.at_level(logging.INFO):
        assert load(model_dir).head.tied
    assert caplog.text == ""


def test_casts_are_logged_once(tiny: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        load(tiny, torch.bfloat16)
    assert caplog.text.count("converted from float32 to bfloat16") == 1
    caplog.clear()
    with caplog.at_level(logging.INFO):
        load(tiny, torch.float32)
    assert "converted" not in caplog.text


def test_progress_rises_to_one(tiny: str) -> None:
    seen: list[tuple[float, str]] = []
    load(tiny, progress=lambda fraction, what: seen.append((fraction, what)))
    fractions = [fraction for fraction, _ in seen]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
    assert seen[0][1] == "model.embed_tokens"


def test_a_region_is_read_alone(tiny: str) -> None:
    """What a tensor-parallel rank will ask for: some rows of one tensor, some columns of another."""
    checkpoint = SafetensorsCheckpoint(tiny)
    whole = checkpoint.read(Source(Q_PROJ, (64, 64)))
    rows = Source(Q_PROJ, (64, 64), (slice(16, 32),))
    columns = Source(Q_PROJ, (64, 64), (slice(None), slice(0, 24)))
    assert torch.equal(checkpoint.read(rows), whole[16:32])
    assert torch.equal(checkpoint.read(columns), whole[:, :24])
    assert Slot("layer", (rows, rows)).shape == (32, 64)
    assert Slot("layer", (columns,)).shape == (64, 24)


def test_index_decides_which_files_count(model_dir: Path) -> None:
    index = {"weight_map": dict.fromkeys(load_file(model_dir / WEIGHTS), WEIGHTS)}
    (model_dir / INDEX_FILE).write_text(json.dumps(index))
    save_file({"stray": torch.ones(1)}, model_dir / "stray.safetensors")
    assert find_weight_files(str(model_dir)) == [f"{model_dir}/{WEIGHTS}"]
    load(model_dir)


# --- failures known from other servers -----------------------------------------------------------------

INDEX_WITH_A_HOLE = {"weight_map": {Q_PROJ: "model-00001-of-00001.safetensors"}}


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("has_head", [False, True])
def test_a_head_is_needed_unless_it_is_tied(
    model_dir: Path, is_tied: bool, has_head: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A head that is there although it is tied is no error; what it is good for: test_models.py."""
    edit_config(model_dir, tie_word_embeddings=is_tied)
    if not has_head:
        change_tensors(model_dir, lambda tensors: tensors.pop(HEAD))
    if not is_tied and not has_head:
        assert HEAD in error_of(lambda: load(model_dir))
        return
    with caplog.at_level(logging.INFO):
        load(model_dir)
    warning = f"{model_dir}/{WEIGHTS}: {HEAD} is not the embedding"
    assert caplog.text.count(warning) == (is_tied and has_head)


@pytest.mark.parametrize("rows", [-1, 1])
def test_a_tied_head_of_another_shape_is_not_used(
    model_dir: Path, rows: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Padding makes such heads."""
    shapes: list[list[int]] = []

    def change(tensors: dict[str, Tensor]) -> None:
        vocab_size, hidden_size = tensors[EMBEDDING].shape
        tensors[HEAD] = torch.ones(vocab_size + rows, hidden_size)
        shapes.extend(list(tensors[name].shape) for name in (HEAD, EMBEDDING))

    change_tensors(model_dir, change)
    edit_config(model_dir, tie_word_embeddings=True)
    assert load(model_dir).head.tied
    (record,) = caplog.records
    assert (record.levelname, f"{model_dir}/{WEIGHTS}: {HEAD}" in record.message) == (
        "WARNING",
        True,
    )
    assert f"shape {shapes[0]} and the embedding {shapes[1]}" in record.message


def test_an_index_that_lists_a_missing_file_names_it(model_dir: Path) -> None:
    """B18: though there is another file with all weights, as the index decides."""
    (model_dir / INDEX_FILE).write_text(json.dumps(INDEX_WITH_A_HOLE))
    assert "model-00001-of-00001.safetensors" in error_of(lambda: load(model_dir))


def yarn(name: str) -> dict[str, Any]:
    return {name: "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    ("settings", "positions"),
    [
        ({"rope_parameters": None}, 512),
        ({"rope_scaling": {"rope_type": "default"}}, 512),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 1024),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, 1024),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 1024),
        ({"rope_scaling": yarn("type")}, 512),
        ({"rope_scaling": yarn("rope_type")}, 512),
        ({"rope_parameters": {"rope_theta": 5e5, **yarn("rope_type")}}, 512),
    ],
)
def test_rope_settings_load_under_every_name(
    model_dir: Path, settings: dict[str, Any], positions: int
) -> None:
    """B17: `type` and `rope_type`, `rope_scaling` and `rope_parameters`; yarn counts from the original."""
    edit_config(model_dir, rope_parameters=None, rope_theta=10000.0)
    edit_config(model_dir, **settings)
    assert ModelConfig.from_directory(str(model_dir)).max_model_len == positions
    load(model_dir)


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        ({"type": "spiral"}, "rope type 'spiral' is not supported; supported: default, "),
        ({"type": "yarn"}, "'yarn' needs factor"),
        ({"rope_type": "longrope", "factor": 4.0}, "'longrope' needs short_factor"),
    ],
)
def test_rope_settings_that_cannot_be_used_are_named(
    model_dir: Path, scaling: dict[str, Any], words: str
) -> None:
    """B17: one line that says which, at the start."""
    edit_config(model_dir, rope_parameters=None, rope_scaling=scaling)
    message = error_of(lambda: ModelConfig.from_directory(str(model_dir)))
    assert message.startswith(f"{model_dir}/config.json: ")
    assert words in message
