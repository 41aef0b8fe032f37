"""Files that are read: every limit from both sides."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_dataflex.core import files


def test_a_file_has_a_size(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"12345")
    assert files.check_file(path, 5, "Mend it.") is None
    with pytest.raises(ValueError, match=r"has 5 bytes, and at most 4 are read\. Give a smaller file"):
        files.check_file(path, 4, "Mend it.")
    path.write_bytes(b"")
    with pytest.raises(ValueError, match=rf"^'{path}' is empty\. Mend it"):
        files.check_file(path, 5, "Mend it.")
    assert files.check_size("x", 1000, 1000) is None
    with pytest.raises(ValueError, match=r"^x has 1,001 bytes, and at most 1,000 are read\. Do it"):
        files.check_size("x", 1001, 1000, "Do it.")


@pytest.mark.parametrize(
    ("text", "depth", "num"),
    [
        ("3", 0, 1),
        ("[]", 1, 1),
        ("[1, 2]", 1, 3),
        ("a: 1", 1, 3),
        ("a: [1, {b: 2}]", 3, 7),
        ("[[1], [[2]], 3]", 3, 7),
        # An alias counts what it stands for: a scalar 1, a list of two 3.
        ("[&a 1, *a, *a]", 1, 4),
        ("[&a [1, 2], *a, *a]", 2, 10),
        ("[&a [&b [1], *b], *a, *b]", 3, 13),
    ],
)
def test_the_extent_of_a_document(text: str, depth: int, num: int) -> None:
    assert files._extent(text) == (depth, num)


def test_what_holds_itself_has_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    assert files._extent("&a [*a]")[1] > files.MOST_NODES
    assert files._extent("[" * 70 + "]" * 70)[0] == files.MOST_DEPTH + 1
    monkeypatch.setattr(files, "MOST_NODES", 100)
    assert files._extent("[" + "1," * 200 + "]")[1] == 101


def refused(path: Path, text: str) -> str:
    path.write_text(text)
    try:
        files.check_config_file(path)
    except ValueError as error:
        return str(error).removeprefix(f"'{path}' ")
    return ""


def test_a_configuration_has_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "c.yaml"
    assert refused(path, "a: " + "[" * 63 + "]" * 63) == ""
    assert refused(path, "a: " + "[" * 64 + "]" * 64).startswith("is nested more than 64 deep")
    with monkeypatch.context() as small:
        small.setattr(files, "MOST_NODES", 1000)
        assert refused(path, "[" + "1," * 999 + "]") == ""
        assert refused(path, "[" + "1," * 1000 + "]").startswith("holds more than 1,000 values")
    assert refused(path, "a: " + "1" * 3_999) == ""
    assert refused(path, "a: " + "1" * 4_000).startswith("holds a number of more than 4,000 digits")
    assert refused(path, "a: 1\nb: [1").startswith("cannot be read as YAML at line 2. Correct it there")
    assert refused(path, "a: 1\n\0").startswith("cannot be read as YAML. Correct it there")
