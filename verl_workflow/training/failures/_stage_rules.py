"""What shows that the stage as it is written is at fault: its settings, rows, reward, numbers or tracker."""

from __future__ import annotations

import re

from verl_workflow.spec._failure_class import FailureClass as Kind
from verl_workflow.training.failures._rule import rule

TRACKERS = (
    rule(
        Kind.TRACKER,
        r"wandb\.(errors|sdk)\.[\w.]+|api_key not configured|mlflow\.exceptions\.\w+|\bMlflowException\b|"
        r"swanlab\.[\w.]*Error|clearml\.[\w.]*Error",
        "Take the tracker out of verl's trainer.logger and name it under the stage's `trackers`: there, its outage "
        "touches no training.",
    ),
)

NUMBERS = (
    rule(
        Kind.NUMERIC,
        r"probability tensor contains either `?inf`?, `?nan`?|logits that are not numbers|"
        r"returned nan values|"
        r"(loss|grad(ient)?s?|logits?)\b.{0,40}\b(is|are|became|contains?) (nan|inf|non-?finite)|"
        r"Non-?finite (loss|grad)|NaN (detected|encountered|loss)",
        flags=re.IGNORECASE,
    ),
)

ROWS = (
    rule(
        Kind.DATA,
        r"tokenizer\.chat_template is not set|does not have a chat template",
        "The model's tokenizer has no chat template: take the instruct model, or put a chat_template into its "
        "tokenizer_config.json.",
    ),
    rule(
        Kind.DATA,
        r"(jinja2\.exceptions\.)?TemplateError|UndefinedError|Conversation roles must alternate",
        "The prompts do not fit the model's chat template, for example two messages of one role in a row, or a system "
        "message that it does not know: change the data stage's `prompt`.",
    ),
    rule(
        Kind.DATA,
        r"num_samples should be a positive integer value, but got num_samples=0|"
        r"([Tt]rain|[Vv]al(idation)?) dataloader is empty|dataset len: 0\b",
        "Not one row is left: verl drops rows whose prompt is longer than max_prompt_length or no list of messages, "
        "and fewer rows than batch_size make no batch.",
    ),
    rule(
        Kind.DATA,
        r"[Pp]rompt length .* is longer than|is too long, please (increase|set)",
        "Raise the stage's max_prompt_length, or leave longer prompts out in the data stage.",
    ),
    rule(
        Kind.DATA,
        r"FileNotFoundError[^\n]*\.(parquet|jsonl?|arrow)\b",
        "The rows are not there for the process that reads them: the storage has to be mounted at the same place on "
        "each node.",
    ),
    rule(
        Kind.DATA,
        r"Arrow(Invalid|TypeError|KeyError|NotImplementedError|CapacityError)|Parquet magic bytes|"
        r"Parquet file size is 0|DatasetGeneration(Cast)?Error|Couldn't cast|CastError|"
        r"KeyError: '(prompt|data_source|reward_model|extra_info|ground_truth|raw_prompt|messages)'",
        "Let a data stage write the rows: it checks each one, and names those it rejects.",
    ),
    rule(
        Kind.REWARD,
        r"Reward function is not implemented for",
        "verl knows no reward for this data_source: name a function under the stage's `reward`, then start a new run.",
    ),
    rule(
        Kind.REWARD,
        r"can't assign an? \w+ to a torch\.\w*Tensor",
        "The reward returned something that is no number: let it return a finite one, or a dict with `score`, for "
        "whatever a model may reply, then start a new run.",
    ),
    rule(
        Kind.REWARD,
        r"reward_(loop|manager|score)[^\n]*(Error|Exception)|"
        r"(Error|Exception)[^\n]*(reward (function|fn|manager)|custom_reward_function)|"
        r"rewards? (function|must|should)[^\n]*(number|float|dict)",
    ),
)

LEFT = (
    rule(Kind.CANCELLED, r"TaskCancelledError|KeyboardInterrupt|\bCancelledError", weak=True),
    rule(
        Kind.CONFIGURATION,
        r"hydra\.|omegaconf\.|Config(Key|Attribute|Type)Error|Missing(Mandatory|Config)\w*|InstantiationException|"
        r"(Assertion|Value|Type|Key|NotImplemented|Attribute|ModuleNotFound|Import|ZeroDivision|Syntax|Name|"
        r"FileNotFound|Validation)Error",
        weak=True,
    ),
)
