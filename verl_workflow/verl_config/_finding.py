"""What is said of a configuration."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any


class Severity(str, enum.Enum):
    """ERROR: verl refuses it, or trains something else than what is meant. WARNING: a night may be lost by it."""

    ERROR = "error"
    WARNING = "warning"


class Code(str, enum.Enum):
    """Stable names of what is found; docs/lint.md says what each means."""

    UNKNOWN_KEY = "unknown_key"
    LEGACY_KEY = "legacy_key"
    WITHOUT_EFFECT = "without_effect"
    WRONG_TYPE = "wrong_type"
    NOT_ONE_OF = "not_one_of"
    OUT_OF_RANGE = "out_of_range"
    DECIDED_BY_STAGE = "decided_by_stage"
    BATCH_ARITHMETIC = "batch_arithmetic"
    WORLD_SIZE = "world_size"
    MICRO_BATCH_MISSING = "micro_batch_missing"
    MICRO_BATCH_TWICE = "micro_batch_twice"
    TOO_FEW_ROLLOUTS = "too_few_rollouts"
    TOO_FEW_ROWS = "too_few_rows"
    ENDS_EARLY = "ends_early"
    CRITIC_MODEL_MISSING = "critic_model_missing"
    ROLLOUT_MISSING = "rollout_missing"
    NO_CHECKPOINTS = "no_checkpoints"
    ONLY_ONE_CHECKPOINT = "only_one_checkpoint"
    ASYNC_SAVE = "async_save"
    RESUME_PATH_MISSING = "resume_path_missing"
    RELATIVE_PATH = "relative_path"
    FILE_MISSING = "file_missing"
    REWARD_MISSING = "reward_missing"
    VAL_ONLY_TRAINS = "val_only_trains"
    OLD_TRAINER = "old_trainer"
    SEPARATE_ASYNC = "separate_async"
    CREDENTIALS_MISSING = "credentials_missing"
    CANNOT_BE_READ = "cannot_be_read"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong with a configuration.

    Attributes:
        key: verl's dotted key that it is about. where: ``file:line:column``, or the override as it was written; empty
            when what is found is a default of verl's.
        what: a sentence fragment. value: what stands there, None when there is no such value.
        remedy: what to do, in a sentence.
    """

    code: Code
    severity: Severity
    key: str
    what: str
    remedy: str
    where: str = ""
    value: Any = None

    def to_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "code": self.code.value,
            "severity": self.severity.value,
            "key": self.key,
            "where": self.where,
            "what": self.what,
            "value": self.value,
            "remedy": self.remedy,
        }
