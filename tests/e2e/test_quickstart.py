"""The quick-start for real: killed in every stage, resumed, and nothing done twice."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from _victims import (
    CLI,
    Command,
    freeze_at,
    kill_command,
    kill_driver,
    kill_head,
    kill_head_node,
    kill_training,
    running,
    trained,
    wait_for,
)

from verl_workflow.storage import Store
from verl_workflow.training import attempt_rows
from verl_workflow.workflow import RunState, RunStatus, StepStatus, read_run
from verl_workflow.workflow._definition import run_key

ROOT = Path(__file__).parents[2]
PIPELINE = ROOT / "pipelines" / "quickstart.yaml"
RUN = "killed-everywhere"
STAGES = ("model", "questions", "prepare", "train", "evaluate", "promote")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("e2e")


@pytest.fixture(scope="module")
def finished(folder: Path) -> RunState:
    """The quick-start, started once, killed three times or more in every stage, and resumed until it succeeds."""
    storage = folder / "storage"
    store = Store(str(storage))
    commands: list[Command] = []

    def command(*arguments: str) -> Command:
        commands.append(Command([*arguments, "--storage", str(storage)], folder / "output.log"))
        return commands[-1]

    def resumed() -> Command:
        return command("resume", RUN)

    try:
        current = command("run", str(PIPELINE), "--run-id", RUN)
        for stage in STAGES[1:]:
            long = stage == "train"
            reach = wait_for if long else freeze_at
            reached = trained(stage, 12) if long else running(stage)
            state = reach(current, store, RUN, reached, f"{stage} under way")
            kill_driver(state)

            again = running(stage, after_epoch=state.epoch)
            state = reach(current, store, RUN, again, f"{stage} again, after its driver was killed")
            kill_command(current, machine=not long)
            current = resumed()

            again = running(stage, after_epoch=state.epoch)
            state = reach(current, store, RUN, again, f"{stage} again, after its command was killed")
            if long:
                wait_for(current, store, RUN, trained(stage, 22), "training beyond a checkpoint")
                before = read_run(store, RUN).steps[stage].attempts[-1].number
                kill_training(current)
                wait_for(
                    current,
                    store,
                    RUN,
                    lambda now, before=before: now.steps["train"].attempts[-1].number > before,
                    "another attempt, after verl was killed",
                )
                kill_head(current)
            else:
                # The other stages are over before a driver feels that its head is missing.
                kill_head_node(current, state)
            assert current.wait(300) == 1, current.tail()
            current.stop()
            current = resumed()
        assert current.wait() == 0, current.tail()
    finally:
        for each in commands:
            each.stop()
    return read_run(store, RUN)


@pytest.fixture
def journal(folder: Path, finished: RunState) -> list[dict[str, object]]:
    store = Store(str(folder / "storage"))
    entries = [json.loads(store.get(key) or b"") for key in store.list(f"{run_key(store, RUN).folder}/journal")]
    return [{**entry, **event} for entry in entries for event in entry.pop("events")]


QUESTIONS = ("Ada: say 1111", "Zoe: print 0000", "Leo: repeat 1111")
pytestmark = [pytest.mark.e2e, pytest.mark.fault, pytest.mark.timeout(2400)]


def test_the_run_succeeds_in_the_end(finished: RunState) -> None:
    assert finished.status is RunStatus.SUCCEEDED
    assert {step.status for step in finished.steps.values()} == {StepStatus.SUCCEEDED}
    assert set(finished.steps) == set(STAGES)


def test_each_stage_is_committed_once(journal: list[dict[str, object]]) -> None:
    committed = [record["step"] for record in journal if record["kind"] == "step_succeeded"]
    assert sorted(map(str, committed)) == sorted(STAGES)


def test_no_stage_starts_again_after_its_commit(journal: list[dict[str, object]]) -> None:
    done: set[object] = set()
    for record in journal:
        if record["kind"] == "step_started":
            assert record["step"] not in done
        elif record["kind"] == "step_succeeded":
            done.add(record["step"])


def test_training_reaches_the_planned_step_and_learns(finished: RunState) -> None:
    planned = next(s for s in finished.definition["pipeline"]["stages"] if s["name"] == "train")["steps"]
    trained_to = finished.steps["train"].value
    assert trained_to["step"] == planned == trained_to["checkpoint"]["step"]
    assert trained_to["reward"]["last"] > 0.9


def test_training_resumed_from_checkpoints_and_repeated_at_most_a_save_interval(
    finished: RunState,
) -> None:
    """Each attempt's first step is at most `save_every` behind the last step seen before it."""
    stage = next(s for s in finished.definition["pipeline"]["stages"] if s["name"] == "train")
    folder = Path(finished.definition["artifacts"]) / "runs" / RUN / "stages" / "train"
    reached = 0
    resumed = 0
    for rows in attempt_rows(folder):
        trained_steps = [row.step for row in rows if row.trained]
        if not trained_steps:
            continue
        if reached:
            assert trained_steps[0] > reached - stage["save_every"]
            resumed += 1
        reached = max(reached, *trained_steps)
    assert resumed >= 2
    assert reached == stage["steps"]


def test_the_promoted_model_answers_as_it_did_before_the_export(finished: RunState, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from verl_workflow.registry import Registry

    registry = Registry(Store(str(folder / "storage")), Path(finished.definition["artifacts"]))
    promoted = registry.resolve("quickstart", "champion")
    assert promoted.version == finished.steps["promote"].value["version"]
    registry.verify("quickstart", promoted.version)

    def answers(path: str) -> list[list[int]]:
        tokenizer = AutoTokenizer.from_pretrained(path)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        out = []
        for question in QUESTIONS:
            chat = [{"role": "user", "content": question}]
            ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
            out.append(model.generate(**ids, max_new_tokens=8, do_sample=False)[0].tolist())
        return out

    exported = answers(finished.steps["train"].value["model"]["path"])
    assert answers(str(promoted.path)) == exported
    assert _checkpoint_answers(finished) == exported


def _checkpoint_answers(finished: RunState) -> list[list[int]]:
    """Greedy answers of the weights in verl's own last checkpoint, read without the export."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    exported = finished.steps["train"].value["model"]["path"]
    shard = Path(finished.steps["train"].value["checkpoint"]["path"]) / "actor" / "model_world_size_1_rank_0.pt"
    weights = torch.load(shard, map_location="cpu", weights_only=False)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(exported), dtype=torch.float32)
    plain = {name: (value.to_local() if hasattr(value, "to_local") else value) for name, value in weights.items()}
    model.load_state_dict(plain)
    model.eval()
    tokenizer = AutoTokenizer.from_pretrained(exported)
    out = []
    for question in QUESTIONS:
        chat = [{"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        out.append(model.generate(**ids, max_new_tokens=8, do_sample=False)[0].tolist())
    return out


@pytest.fixture(scope="module")
def second(folder: Path, finished: RunState) -> Iterator[RunState]:
    """The same pipeline again over the same storage."""
    command = Command(
        ["run", str(PIPELINE), "--run-id", "second-night", "--storage", str(folder / "storage")],
        folder / "second.log",
    )
    try:
        assert command.wait() == 0, command.tail()
        yield read_run(Store(str(folder / "storage")), "second-night")
    finally:
        command.stop()


def test_a_second_run_takes_over_what_has_not_changed(second: RunState) -> None:
    assert second.status is RunStatus.SUCCEEDED
    assert second.steps["prepare"].reused_from == RUN
    assert second.steps["train"].reused_from == RUN


def test_models_tells_where_the_champion_comes_from(folder: Path, finished: RunState) -> None:
    done = subprocess.run(
        [str(CLI), "models", "quickstart", "--storage", str(folder / "storage"), "--json"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert RUN in json.dumps(json.loads(done.stdout))
