"""What operators ask of the engine: the prefix cache is forgotten, profiles are written."""

import gzip
import json
from pathlib import Path

import pytest
import torch

from engine.api.messages import Control, ControlAction, ControlResult
from engine.control import ControlDesk, gpu_memory_bytes
from engine.kv.block_pool import BlockPool
from engine.kv.host_tier import HostTier
from engine.kv.manager import KVCacheManager

RESET, START, STOP = ControlAction


class Desk:
    """A ControlDesk and its answers."""

    def __init__(self, profile_dir: str = "") -> None:
        self.kv = KVCacheManager(8, 4, True)
        self.answers: list[ControlResult] = []
        self.desk = ControlDesk(self.kv, profile_dir, self.answers.append)

    def ask(self, action: ControlAction) -> tuple[bool, str]:
        self.desk.handle(Control(call_id=7, action=action))
        answer = self.answers.pop()
        assert answer.call_id == 7
        assert self.answers == [], "one answer each"
        return answer.is_done, answer.message


def named_pool() -> tuple[BlockPool, list[int], list[int]]:
    """A pool of 7 blocks: two named and in use, two named and cached, three free."""
    pool = BlockPool(8)
    used: list[int] = []
    cached: list[int] = []
    pool.allocate(2, used)
    pool.allocate(2, cached)
    for block in (*used, *cached):
        assert pool.set_name(block, bytes([block]))
    for block in cached:
        pool.release(block)
    return pool, used, cached


def test_all_names_are_forgotten_and_holders_keep_their_blocks() -> None:
    pool, used, cached = named_pool()
    assert pool.forget_all() == 4
    pool.check_invariants()
    assert [pool.name_of(block) for block in (*used, *cached)] == [None] * 4
    assert [pool.refs(block) for block in used] == [1, 1]
    assert pool.num_free == 5
    assert pool.set_name(used[0], b"new"), "blocks in use may be named again"
    assert pool.forget_all() == 1
    for block in used:
        pool.release(block)
    pool.check_invariants()
    assert pool.num_free == 7
    assert pool.forget_all() == 0


def test_host_memory_is_forgotten_too() -> None:
    """All but what the next step reads, whose slots are not free yet."""
    tier = HostTier(4, keeps_all=True)
    for block, name in ((1, b"a"), (2, b"b"), (3, b"c")):
        tier.save(block, name)
    tier.take_copies()
    tier.reserve([b"c"])
    assert tier.forget_all() == 2
    tier.check_invariants()
    assert [name in tier for name in (b"a", b"b", b"c")] == [False, False, True]
    tier.load(b"c", 5)
    tier.take_copies()
    assert tier.forget_all() == 1
    assert tier.num_used == 0
    tier.check_invariants()


def test_reset_tells_how_much_was_forgotten() -> None:
    desk = Desk()
    table: list[int] = []
    desk.kv.pool.allocate(1, table)
    desk.kv.pool.set_name(table[0], b"name")
    assert desk.ask(RESET) == (True, "1 blocks forgotten")
    assert desk.ask(RESET) == (True, "0 blocks forgotten")


def test_a_profile_needs_a_directory() -> None:
    is_done, message = Desk().ask(START)
    assert not is_done
    assert "--profile-dir" in message


def test_a_profile_is_written(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "traces"
    desk = Desk(str(folder))
    is_done, message = desk.ask(STOP)
    assert (is_done, "/start_profile" in message) == (False, True)
    assert desk.ask(START)[0]
    is_done, message = desk.ask(START)
    assert (is_done, "/stop_profile" in message) == (False, True)
    torch.ones(8, 8) @ torch.ones(8, 8)
    is_done, message = desk.ask(STOP)
    assert is_done
    (file,) = folder.iterdir()
    assert message == f"written to {file.name}", "the name only: where it lies is the operator's"
    trace = json.loads(gzip.decompress(file.read_bytes()))
    assert any("mm" in event.get("name", "") for event in trace["traceEvents"])
    assert desk.ask(START)[0], "another one may follow"
    assert desk.ask(STOP)[0]
    assert len(list(folder.iterdir())) == 2


def test_a_failure_is_an_answer_not_an_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    is_done, message = Desk(str(file)).ask(START)  # no directory can be made there
    assert not is_done
    assert "FileExistsError" in message
    assert str(tmp_path) not in message
    assert "start_profile failed" in caplog.text


def test_no_gpu_holds_nothing() -> None:
    assert gpu_memory_bytes("cpu")() == 0
