"""Appends a second to a run's journal on local disk, against bare file creation, side by side in one run.

An append is what a driver does for each event: encode it, create the next numbered file if absent, keep the entry. A
bare file is opened for exclusive creation and written with as many bytes. The sides take turns.

Run: python benchmarks/journal_appends.py [--records 2000] [--rounds 5]

Prints medians over the rounds; `append_time_over_bare` is the time of an append over that of a bare file.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from verl_workflow.storage import Store
from verl_workflow.workflow import create_run, this_process
from verl_workflow.workflow._definition import run_key
from verl_workflow.workflow._journal import Journal
from verl_workflow.workflow._records import Claimed, StepStarted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    rows = []
    for _ in range(arguments.rounds):
        with tempfile.TemporaryDirectory() as folder:
            rows.append(_round(Path(folder), arguments.records))
    appends, bare = (statistics.median(side) for side in zip(*rows, strict=True))
    result = {
        "records": arguments.records,
        "rounds": arguments.rounds,
        "appends_per_s": round(arguments.records / appends),
        "bare_files_per_s": round(arguments.records / bare),
        "append_time_over_bare": round(statistics.median(mine / theirs for mine, theirs in rows), 2),
    }
    print(json.dumps(result))


def _round(folder: Path, records: int) -> tuple[float, float]:
    """Seconds for so many appends, and for as many bare files."""
    store = Store(str(folder / "store"))
    create_run(store, "benchmark", {})
    journal = Journal(store, run_key(store, "benchmark"))
    assert journal.claim(Claimed(owner=this_process(), steps=["train"]))
    started = time.perf_counter()
    for number in range(1, records + 1):
        journal.append(StepStarted(step=f"step-{number}", attempt=1))
    appends = time.perf_counter() - started

    *_, last = journal.entries()
    body = last.to_bytes()
    bare = folder / "bare"
    bare.mkdir()
    started = time.perf_counter()
    for number in range(records):
        with (bare / f"{number:012}.json").open("xb") as stream:
            stream.write(body)
    return appends, time.perf_counter() - started


if __name__ == "__main__":
    main()
