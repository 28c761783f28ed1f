"""`status` and `list`: what the storage says about runs. Needs no cluster."""

from __future__ import annotations

from verl_workflow.cli import _options
from verl_workflow.cli._output import note, print_json, print_line, print_table, reported
from verl_workflow.cli._words import duration, liveness, moment


def status(run_id: _options.RunId, storage: _options.Storage = None, as_json: _options.Json = False) -> None:
    """Tell how a run is doing: each stage, its progress, its result, and whether the driver is alive."""
    with reported(as_json):
        from verl_workflow.cli._facts import facts_of
        from verl_workflow.cli._find import find_run
        from verl_workflow.cli._summary import advice, summary
        from verl_workflow.cli._view import table

        store, state = find_run(storage, run_id)
        facts = facts_of(state, store.uri, values=True)
        if as_json:
            print_json(facts.to_json())
            return
        if facts.ended:
            for line in summary(facts) + advice(facts):
                print_line(line)
            return
        print_table(table(facts))
        for line in [liveness(facts), *advice(facts)]:
            print_line(line)


def list_(storage: _options.Storage = None, as_json: _options.Json = False) -> None:
    """List the runs in the storage, newest first."""
    with reported(as_json):
        from rich.table import Table

        from verl_workflow.cli._facts import listed_facts
        from verl_workflow.storage import Store
        from verl_workflow.workflow import list_runs

        store = Store(_options.storage_of(storage))
        runs = [listed_facts(state, store.uri) for state in list_runs(store)]
        runs.sort(key=lambda facts: (facts.started_at or 0.0, facts.run_id), reverse=True)
        if as_json:
            print_json({"storage": store.uri, "runs": [facts.to_json(brief=True) for facts in runs]})
            return
        if not runs:
            note(f"no runs in {store.uri}")
            return
        rows = Table("run", "pipeline", "status", "stages", "started", "elapsed", box=None, pad_edge=False)
        for facts in runs:
            done = sum(stage.status == "succeeded" for stage in facts.stages)
            rows.add_row(
                facts.run_id,
                facts.pipeline,
                facts.status,
                f"{done}/{len(facts.stages)}",
                moment(facts.started_at),
                duration(facts.elapsed),
            )
        print_table(rows)
        for facts in runs:
            if facts.status == "damaged" and facts.error:
                note(f"error: {facts.run_id}: {facts.error['message']}")
