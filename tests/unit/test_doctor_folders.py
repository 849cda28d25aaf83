"""doctor.py on a machine without a place for temporary files."""

import errno
from pathlib import Path

import pytest

from scripts.operate.findings import Findings
from scripts.operate.machine import check_temporary_folder


@pytest.mark.parametrize(("is_there", "level"), [(True, "ok"), (False, "fail")])
def test_temporary_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_there: bool, level: str
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path if is_there else tmp_path / "gone"))
    found = Findings(quiet=True)
    check_temporary_folder(found)
    assert [finding.level for finding in found.all] == [level]


def test_no_usable_temporary_folder_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_is_usable() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr("tempfile.gettempdir", none_is_usable)
    found = Findings(quiet=True)
    check_temporary_folder(found)
    (finding,) = found.all
    assert (finding.level, "No usable" in finding.detail) == ("fail", True)
    assert "TMPDIR" in finding.remedy
