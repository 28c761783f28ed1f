"""Journal appends a second on local disk, against bare file creation in the same folder.

Run: python benchmarks/journal_appends.py [--records 2000]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

from verl_workflow.storage import Store


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=2000)
    records = parser.parse_args().records
    body = json.dumps({"kind": "step_started", "step": "train", "attempt": 1, "epoch": 1, "time": 0.0}).encode()
    with tempfile.TemporaryDirectory() as folder:
        bare = Path(folder) / "bare"
        bare.mkdir()
        started = time.perf_counter()
        for number in range(records):
            with (bare / f"{number:012}.json").open("xb") as stream:
                stream.write(body)
        plain_s = time.perf_counter() - started

        store = Store(f"{folder}/store")
        started = time.perf_counter()
        for number in range(records):
            assert store.create(f"runs/benchmark/journal/{number:012}.json", body)
        journal_s = time.perf_counter() - started
    print(
        json.dumps(
            {
                "records": records,
                "appends_per_s": round(records / journal_s),
                "bare_files_per_s": round(records / plain_s),
                "ratio": round(journal_s / plain_s, 2),
            }
        )
    )


if __name__ == "__main__":
    main()
