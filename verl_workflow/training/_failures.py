"""Why a training ended: classes of failure and what each one means for a retry."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

RESULT = "result.json"


class FailureClass(str, enum.Enum):
    """INFRASTRUCTURE and CHECKPOINT may pass when tried again; the others need somebody to change something."""

    INFRASTRUCTURE = "infrastructure"
    CAPACITY = "capacity"
    MEMORY = "memory"
    DISK = "disk"
    CHECKPOINT = "checkpoint"
    USER = "user"
    UNKNOWN = "unknown"

    @property
    def retryable(self) -> bool:
        return self in (FailureClass.INFRASTRUCTURE, FailureClass.CHECKPOINT)


ADVICE: Mapping[FailureClass, str] = {
    FailureClass.INFRASTRUCTURE: "A process or node was lost; the next attempt resumes from the newest checkpoint.",
    FailureClass.CAPACITY: "Give the cluster more CPUs or GPUs, or ask for fewer.",
    FailureClass.MEMORY: "Lower the micro batch size, the response length or rollout.gpu_memory_utilization.",
    FailureClass.DISK: "Free some space, or give the run other storage; then resume.",
    FailureClass.CHECKPOINT: "The checkpoint is set aside; the next attempt resumes from the one before.",
    FailureClass.USER: "Correct the configuration, the data or the reward function, then start again.",
    FailureClass.UNKNOWN: "Read the log; start again when the cause is gone.",
}

# What verl says of these leads elsewhere.
_HINTS: Sequence[tuple[re.Pattern[str], str]] = (
    (
        # It builds every critic with flash_attention_2, and takes the ImportError for a model without a value head.
        re.compile("is not a value head model"),
        "Install flash-attn where the critic trains, for verl builds it with that; or take `algorithm: grpo`.",
    ),
)

# The first that matches wins: what killed a worker shows before what the driver made of it.
_RULES: Sequence[tuple[FailureClass, re.Pattern[str]]] = (
    (FailureClass.DISK, re.compile(r"No space left on device|Errno 28\b|Disk quota exceeded")),
    (
        FailureClass.MEMORY,
        re.compile(r"OutOfMemoryError: CUDA|CUDA out of memory|CUDA error: out of memory|torch\.OutOfMemoryError"),
    ),
    (
        FailureClass.CAPACITY,
        re.compile(r"Total available GPUs .* is less than|ActorUnschedulableError|PlacementGroupSchedulingError"),
    ),
    (
        FailureClass.CHECKPOINT,
        re.compile(
            r"PytorchStreamReader|(FileNotFoundError|EOFError|UnpicklingError|BadZipFile|RuntimeError).*"
            r"(global_step_\d+|_world_size_\d+_rank_\d+\.pt)",
            re.DOTALL,
        ),
    ),
    (
        FailureClass.INFRASTRUCTURE,
        re.compile(
            r"ActorDiedError|ActorUnavailableError|NodeDiedError|WorkerCrashedError|OwnerDiedError|ObjectLostError|"
            r"LocalRayletDiedError|RayletDied|RpcError|OutOfMemoryError|NCCL.*(timeout|watchdog)|"
            r"ConnectionError|GCS|Connection reset",
        ),
    ),
    (
        FailureClass.USER,
        re.compile(
            r"hydra\.|omegaconf\.|ConfigKeyError|ConfigAttributeError|AssertionError|ValueError|TypeError|KeyError|"
            r"FileNotFoundError|NotImplementedError|AttributeError|ModuleNotFoundError|ImportError|"
            r"ZeroDivisionError|ArrowInvalid|InstantiationException|SyntaxError|NameError",
        ),
    ),
)


# What Ray puts before a worker's lines, and the line that ends a traceback.
_WORKER = re.compile(r"^\([^()]*pid=\d+[^()]*\) ?")
_RAISED = re.compile(r"^[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit|Warning)\b")


def advice(kind: FailureClass, text: str) -> str:
    """What to do about a failure of this class that says `text`."""
    return next((hint for pattern, hint in _HINTS if pattern.search(text)), ADVICE[kind])


def error_chain(error: BaseException) -> list[dict[str, str]]:
    """The error and its causes, outermost first: type (with module) and message, cut at 4,000 characters."""
    chain: list[dict[str, str]] = []
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        kind = type(current)
        chain.append({"type": f"{kind.__module__}.{kind.__qualname__}", "message": str(current)[-4000:]})
        current = getattr(current, "cause", None) or current.__cause__ or current.__context__
        if not isinstance(current, BaseException):
            break
    return chain


def classify(chain: Sequence[Mapping[str, str]]) -> FailureClass:
    """The class of a failure, from its chain of errors: the innermost that says anything decides."""
    for link in reversed(chain):
        found = classify_text(f"{link['type']}: {link['message']}")
        if found is not FailureClass.UNKNOWN:
            return found
    return FailureClass.UNKNOWN


def classify_text(text: str) -> FailureClass:
    """As `classify`, from any text that tells of the failure."""
    for found, pattern in _RULES:
        if pattern.search(text):
            return found
    return FailureClass.UNKNOWN


def raised_by_user(log: str, code_dir: Path) -> str | None:
    """The last exception that came from a file below `code_dir`, by a log with tracebacks; None when there is none.

    verl counts an answer whose reward raised as lost, and fails later for want of answers: the cause is in its log.
    """
    frame = re.compile(rf'File "{re.escape(str(code_dir))}/([^"]+)", line (\d+), in (\S+)')
    place = found = None
    for line in log.splitlines():
        text = _WORKER.sub("", line)
        if (match := frame.search(text)) is not None:
            place = f"{match[1]}:{match[2]} in {match[3]}"
        elif place is not None and _RAISED.match(text):
            found, place = f"{place} raised {text.strip()}", None
    return found


def headline(chain: Sequence[Mapping[str, str]]) -> str:
    """The innermost error in one line."""
    if not chain:
        return "no error was recorded"
    message = chain[-1]["message"].strip().splitlines() or [""]
    return f"{chain[-1]['type'].rsplit('.', 1)[-1]}: {message[-1] or message[0]}"
