"""What `LLM` is given is checked before anything runs, and threads that share one do not mix."""

import threading

import numpy as np
import pytest
import torch

from engine import LLM, SamplingParams
from engine.api.config import ConfigError
from engine.llm_arguments import as_list, as_prompt, make_config, params_for
from tests.engine_cpu.tiny_models import make_tiny


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        (None, "a prompt is a string"),
        (5, "a prompt is a string"),
        (b"abc", "a prompt is a string"),
        ([None], "a prompt is a string"),
        ([b"abc"], "a prompt is a string"),
        ([[[1, 2], [3, 4]]], "a prompt is a string"),
        ([[[1, 2], [3]]], "a prompt is a string"),
        ([[1, 2.5]], "whole numbers"),
        ([3.5], "whole numbers"),
        ([["a", "b"]], "whole numbers"),
        ([True], "whole numbers"),
        ([[2**31]], r"below 2\*\*31"),
        ([[2**70]], r"below 2\*\*31"),
        ([{"prompt": 5}], "'prompt' in a dict is a string"),
        ([{"prompt_token_ids": None}], "a prompt is a string"),
        ([{"text": "a", 3: "b"}], "needs 'prompt'"),
    ],
)
def test_what_is_no_prompt_is_refused(prompts, words):
    with pytest.raises(ValueError, match=words):
        [as_prompt(prompt) for prompt in as_list(prompts)]


@pytest.mark.parametrize("ids", [[5, 6], (5, 6), np.array([5, 6]), np.array([5, 6], np.uint8)])
def test_ids_come_in_any_sequence(ids):
    for prompts in (ids, [ids], {"prompt_token_ids": ids}):
        [prompt] = [as_prompt(p) for p in as_list(prompts)]
        assert np.frombuffer(prompt.token_ids, np.int32).tolist() == [5, 6]


@pytest.mark.parametrize("given", [{"max_tokens": 3}, "x", 5, [None], [{"max_tokens": 3}]])
def test_what_is_no_sampling_params_is_refused(given):
    with pytest.raises(ValueError, match="SamplingParams"):
        params_for([as_prompt("a")], given)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"max_num_seqs": "8"}, "max_num_seqs='8': expected a whole number"),
        ({"max_num_seqs": True}, "max_num_seqs=True: expected a whole number"),
        ({"num_blocks": 2.5}, "num_blocks=2.5: expected a whole number"),
        ({"swap_space": "4"}, "swap_space='4': expected a number"),
        ({"enable_prefix_caching": "no"}, "expected True or False"),
        ({"overlap": "maybe"}, "overlap='maybe': choose one of auto, on, off"),
        ({"dtype": "int3"}, "dtype='int3': choose one of auto, half"),
        ({"dtype": torch.int8}, r"dtype=torch.int8: choose one of auto, half, .*torch.bfloat16"),
        ({"dtype": torch.float64}, r"dtype=torch.float64: choose one of .*torch.float32"),
        ({"dtype": np.float32}, r"dtype=<class 'numpy.float32'>: choose one of .*torch.float32"),
        ({"dtype": ["float32"]}, r"dtype=\['float32'\]: choose one of auto"),
        ({"dtype": np.zeros(2)}, r"dtype=array\(\[0., 0.\]\): choose one of auto"),
        ({"kv_cache_dtype": torch.int8}, "kv_cache_dtype=torch.int8: choose one of auto"),
        ({"max_model_len": 1.5}, "expected a whole number, or a text like '8k'"),
    ],
)
def test_settings_have_the_type_of_their_flag(setting, words):
    with pytest.raises(ConfigError, match=words):
        make_config("DIR", "", setting)


def test_settings_that_flags_write_otherwise():
    config = make_config("DIR", "", {"overlap": True, "max_model_len": 8192, "swap_space": 4})
    assert (config.overlap, config.max_model_len, config.swap_space) == ("on", "8192", 4)
    assert make_config("DIR", "", {"overlap": False}).overlap == "off"
    left_out = make_config(
        "DIR", "", {"max_model_len": None, "preemption_mode": None, "seed": None}
    )
    assert left_out == make_config("DIR", "", {})


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32"])
def test_dtypes_of_torch_mean_what_their_names_mean(name):
    given = make_config("DIR", "", {"dtype": getattr(torch, name)})
    assert given == make_config("DIR", "", {"dtype": name})


def test_an_llm_takes_a_dtype_of_torch(tmp_path):
    with LLM(
        make_tiny("llama", tmp_path), dtype=torch.float32, cpu_threads=1, num_blocks=16
    ) as llm:
        assert llm.config.dtype == "float32"
        assert llm.generate("a", SamplingParams(max_tokens=2), use_tqdm=False)[0].finished


def test_threads_that_share_an_llm_take_turns(tmp_path):
    params = SamplingParams(temperature=0.0, max_tokens=12)
    prompts = ["Once", "The capital of"] * 10
    texts: dict[int, list[str]] = {}

    def generate(thread: int) -> None:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        texts[thread] = [output.outputs[0].text for output in outputs]

    with LLM(make_tiny("llama", tmp_path), cpu_threads=1, num_blocks=64, max_model_len=64) as llm:
        generate(0)
        threads = [threading.Thread(target=generate, args=(i,)) for i in (1, 2, 3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not llm.engine.has_work()
    assert [texts.get(i) for i in (1, 2, 3)] == [texts[0]] * 3
