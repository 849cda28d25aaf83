"""Philox against published vectors and against a second implementation in Python integers."""

import math

import numpy as np
import pytest
import torch

from engine.ops.philox import gumbel, philox4x32, token_bits, token_noise
from tests.unit.sampling_oracle import philox_words, uniform

# (counter, key, output) from the known-answer tests of Random123
KNOWN_ANSWERS = [
    (
        (0, 0, 0, 0),
        (0, 0),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]

SEEDS = [0, 1, -1, 2**63 - 1, -(2**63), 0x123456789ABCDEF]
POSITIONS = [0, 1, 7, 131_071, 2**32, 2**33 + 5]


def tensors(values: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.tensor([value]) for value in values]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answers(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    with_torch = philox4x32(*tensors(counter), *tensors(key))
    assert tuple(int(word) for word in with_torch) == expected
    with_numpy = philox4x32(*(np.array([v]) for v in counter), *(np.array([v]) for v in key))
    assert tuple(int(word[0]) for word in with_numpy) == expected
    assert philox_words(counter, key) == expected  # the oracle of these tests is right, too


def test_arguments_are_left_alone() -> None:
    words = [np.arange(5) + i for i in range(4)]
    before = [word.copy() for word in words]
    philox4x32(*words, np.array([3]), np.array([4]))
    for word, copy in zip(words, before, strict=True):
        np.testing.assert_array_equal(word, copy)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("position", POSITIONS)
def test_bits_of_a_token_are_those_of_its_block(seed: int, position: int) -> None:
    ids = np.array([0, 1, 2, 3, 4, 7, 8, 13, 151_935])
    seeds, positions = np.full(len(ids), seed), np.full(len(ids), position)
    coarse, fine = token_bits(seeds, positions, ids)
    u = [(int(c) * 2**32 + int(f) + 0.5) / 2**48 for c, f in zip(coarse, fine, strict=True)]
    assert u == [uniform(seed, position, int(token_id)) for token_id in ids]


def test_torch_and_numpy_give_the_same_bits() -> None:
    seeds = np.array(SEEDS)[:, None]
    positions = np.array(POSITIONS)[:, None]
    ids = np.arange(50)[None]
    as_tensors = [torch.from_numpy(a) for a in (seeds, positions, ids)]
    with_torch = token_bits(*as_tensors)
    for bits, tensor in zip(token_bits(seeds, positions, ids), with_torch, strict=True):
        np.testing.assert_array_equal(bits, tensor.numpy())
    np.testing.assert_allclose(
        token_noise(seeds, positions, ids), token_noise(*as_tensors).numpy(), rtol=1e-14, atol=1e-15
    )


def test_extreme_bits_give_finite_noise() -> None:
    noise = gumbel(np.array([0, 2**16 - 1]), np.array([0, 2**32 - 1]))
    assert noise[0] == pytest.approx(49 * math.log(2))
    assert noise[1] == pytest.approx(-math.log(49 * math.log(2)))


def test_noise_is_standard_gumbel() -> None:
    """Kolmogorov-Smirnov distance to exp(-exp(-g)), over tokens, positions and seeds in turn."""
    size = 20_000
    zero, run = np.zeros(size, np.int64), np.arange(size)
    for arguments in ((zero, zero, run), (zero, run, zero), (run, zero, zero)):
        noise = np.sort(token_noise(*arguments))
        empirical = (np.arange(size) + 0.5) / size
        distance = np.abs(np.exp(-np.exp(-noise)) - empirical).max()
        assert distance < 1.63 / math.sqrt(size)  # 1% level


def test_neighbours_are_uncorrelated() -> None:
    size = 20_000
    zero, run = np.zeros(size + 1, np.int64), np.arange(size + 1)
    for arguments in ((zero, zero, run), (zero, run, zero), (run, zero, zero)):
        noise = token_noise(*arguments)
        correlation = np.corrcoef(noise[:-1], noise[1:])[0, 1]
        assert abs(correlation) < 3 / math.sqrt(size)
