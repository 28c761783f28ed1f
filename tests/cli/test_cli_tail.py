from __future__ import annotations

from pathlib import Path

from verl_workflow.cli._tail import Tail


def test_a_growing_file_is_read_once_and_by_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    tail = Tail(path)
    assert list(tail.lines()) == []
    path.write_bytes(b"one\ntw")
    assert list(tail.lines()) == ["one"]
    with path.open("ab") as stream:
        stream.write(b"o\n\nthree")
    assert list(tail.lines()) == ["two", ""]
    assert list(tail.lines()) == []
    assert list(tail.lines(ended=True)) == ["three"]
    assert list(tail.lines(ended=True)) == []


def test_a_line_and_a_character_may_span_reads(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    encoded = "größe ✓\n".encode()
    tail = Tail(path)
    seen = []
    for byte in encoded:
        with path.open("ab") as stream:
            stream.write(bytes([byte]))
        seen += tail.lines()
    assert seen == ["größe ✓"]


def test_progress_bars_leave_their_last_drawing(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_bytes(b"  0%\r 50%\r100%\nwindows\r\n\xff\n")
    assert list(Tail(path).lines()) == ["100%", "windows", "�"]


def test_a_file_larger_than_one_block_keeps_every_line(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    lines = [f"line {index:07}" for index in range(200_000)]
    path.write_text("\n".join(lines) + "\n")
    assert list(Tail(path).lines()) == lines
