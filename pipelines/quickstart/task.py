"""The quick-start's task: repeat the bits of a message. Small enough for a model of 0.1 million parameters."""

import json
from itertools import product
from pathlib import Path

from verl_workflow.artifacts import Artifact

NAMES = ["Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana", "Ivo", "Jo", "Kim", "Leo"]
NAMES += ["Mia", "Nils", "Ola", "Pia", "Rui", "Sam", "Tom", "Una", "Vic", "Wes", "Yan", "Zoe"]
VERBS = ["say", "write", "repeat", "give me", "return", "answer", "reply", "print"]
BITS = ["0000", "1111"]


def write_questions(context):
    """A `python` stage: 384 questions such as "Ada: say 1111" as JSON lines, the right answer beside each."""
    path = Path(context.attempt_dir) / "questions.jsonl"
    # By verb, then by name: the two answers take turns, so that any batch holds both.
    rows = [{"question": f"{name}: {verb} {bits}", "answer": bits} for verb, name, bits in product(VERBS, NAMES, BITS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    # As an artifact: known by its content, so that later runs can re-use what was made from it.
    return {"questions": Artifact.of(path).to_json(), "rows": len(rows)}


def score(data_source, solution_str, ground_truth, extra_info=None):
    """How much of the reply is right, in [0, 1]: 0.2 for the share of bits among its characters, 0.8 for right ones.

    Partial credit matters: a model that starts out answering random bytes would never meet the whole answer by chance.
    """
    if not solution_str:
        return {"score": 0.0, "acc": 0.0}
    bits = sum(character in "01" for character in solution_str) / len(solution_str)
    right = sum(character in ground_truth for character in solution_str) / len(solution_str)
    return {"score": 0.2 * bits + 0.8 * right, "acc": float(solution_str == ground_truth)}
