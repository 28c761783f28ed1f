from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from verl_workflow.training._handover import ask, asked_by_sigterm, is_asked


@pytest.fixture
def terminations() -> Iterator[list[int]]:
    """Each SIGTERM that comes through to the handler that was there."""
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    yield heard
    signal.signal(signal.SIGTERM, before)


def test_asking_twice_is_as_asking_once(tmp_path: Path) -> None:
    assert not is_asked(tmp_path)
    ask(tmp_path)
    ask(tmp_path)
    assert is_asked(tmp_path)


def test_the_first_sigterm_asks_and_the_second_ends(tmp_path: Path, terminations: list[int]) -> None:
    with asked_by_sigterm(tmp_path):
        os.kill(os.getpid(), signal.SIGTERM)
        assert is_asked(tmp_path)
        assert terminations == []
        os.kill(os.getpid(), signal.SIGTERM)
        assert terminations == [signal.SIGTERM]


def test_afterwards_a_sigterm_does_what_it_did_before(tmp_path: Path, terminations: list[int]) -> None:
    with asked_by_sigterm(tmp_path):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    assert terminations == [signal.SIGTERM]
    assert not is_asked(tmp_path)


def test_in_a_thread_signals_are_left_alone(tmp_path: Path, terminations: list[int]) -> None:
    inside, done = threading.Event(), threading.Event()

    def supervise() -> None:
        with asked_by_sigterm(tmp_path):
            inside.set()
            done.wait()

    thread = threading.Thread(target=supervise)
    thread.start()
    inside.wait()
    os.kill(os.getpid(), signal.SIGTERM)
    done.set()
    thread.join()
    assert terminations == [signal.SIGTERM]
    assert not is_asked(tmp_path)
