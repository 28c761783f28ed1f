from __future__ import annotations

import json
from pathlib import Path

import pytest
from _runs import Invoke, Runs


@pytest.fixture
def trained(runs: Runs) -> Runs:
    runs.finish("r1", {"train": lambda _: {"step": 1}})
    log = runs.log("r1", "train", 1).with_name("verl_metrics.jsonl")
    log.write_text(json.dumps({"step": 1, "data": {"critic/score/mean": 0.5, "timing_s/step": 1.0}}) + "\n")
    return runs


def test_plot_writes_the_picture_and_tells_where(
    trained: Runs, invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = invoke("plot", "r1")
    assert (shown.exit_code, shown.stdout) == (0, "r1.png\n")
    assert (tmp_path / "r1.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads(invoke("plot", "r1", "-o", "curve.svg", "--json").stdout)
    assert found == {"run_id": "r1", "path": str(tmp_path / "curve.svg")}
    assert (tmp_path / "curve.svg").exists()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["r2"], "r2"),
        (["r1", "-o", "curve.doc"], "format is not known"),
        (["r1", "-o", "nowhere/curve.png"], "nowhere"),
        (["r3"], "no training of the run has made a step yet"),
    ],
)
def test_what_cannot_be_drawn_is_told_in_one_line(
    trained: Runs, invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    trained.finish("r3", {"prepare": lambda _: {}})
    shown = invoke("plot", *arguments)
    assert shown.exit_code == 2
    assert told in shown.stderr
    assert "Traceback" not in shown.stderr
