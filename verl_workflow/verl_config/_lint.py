"""All that is wrong with a configuration of verl, against the verl that is installed; imports neither it nor torch."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_workflow.errors import UserError
from verl_workflow.verl_config._compose import ENGINE, compose_config
from verl_workflow.verl_config._finding import Code, Finding, Severity
from verl_workflow.verl_config._schema import schema
from verl_workflow.verl_config._setting import ENGINES, problem
from verl_workflow.verl_config._together import Clash, Values, clashes, habits, paths
from verl_workflow.verl_config._written import Setting

_URI = ("hdfs://", "s3://", "gs://", "http://", "https://", "pkg://", "abfs://")
_DATA = ("data.train_files", "data.val_files")
_MODELS = frozenset({"actor_rollout_ref.model.path", "critic.model.path"})
# What verl/utils/tracking.py reads of each tracker: any one of the first is enough.
_CREDENTIALS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "wandb": (("WANDB_API_KEY", "WANDB_MODE", "WANDB_DISABLED"), "Set WANDB_API_KEY, or WANDB_MODE=offline."),
    "swanlab": (("SWANLAB_API_KEY", "SWANLAB_MODE"), "Set SWANLAB_API_KEY, or SWANLAB_MODE=local."),
    "vemlp_wandb": (("VOLC_ACCESS_KEY_ID",), "Set VOLC_ACCESS_KEY_ID, VOLC_SECRET_ACCESS_KEY, MLP_TRACKING_REGION."),
    "clearml": (
        ("CLEARML_API_ACCESS_KEY", "CLEARML_CONFIG_FILE"),
        "Set CLEARML_API_ACCESS_KEY.",
    ),
    "mlflow": (
        ("MLFLOW_TRACKING_URI",),
        "Set MLFLOW_TRACKING_URI; without it verl writes below /tmp.",
    ),
}


def lint(settings: Sequence[Setting], *, rows: int | None = None) -> list[Finding]:
    """Everything that is found, in the order of the settings; what is about verl's own defaults comes last.

    Takes about a second.

    Args:
        rows: of the training set; by default counted when the settings name local parquet files.

    Raises:
        UserError(DEPENDENCY_MISSING): verl is not installed.
    """
    found = list(_alone(settings))
    broken = {finding.key for finding in found if finding.severity is Severity.ERROR}
    sound = {
        setting.key.lstrip("+~"): setting.value
        for setting in settings
        if not setting.group and not setting.key.startswith("~") and setting.key.lstrip("+~") not in broken
    }
    groups = [f"{setting.key}={setting.value}" for setting in settings if setting.group]
    try:
        values = Values(config=compose_config(sound, groups))
    except UserError as error:
        place = next((setting.where for setting in settings if setting.group), "")
        what = f"verl's configuration cannot be composed: {error.what}"
        remedy = "Choose groups that are in verl's trainer/config."
        found.append(_error(Code.CANNOT_BE_READ, "", what, remedy, where=place))
        return found
    counted = rows if rows is not None else _rows(values.get(_DATA[0]))
    written = {setting.key.lstrip("+~"): setting for setting in settings}
    for clash in (*clashes(values, rows=counted), *habits(values)):
        # Whether there is a critic is not known of an estimator that does not exist.
        unsure = clash.key.startswith("critic.") and "algorithm.adv_estimator" in broken
        if clash.key not in broken and not unsure:
            found.append(_of_clash(clash, written.get(clash.key)))
    found += [finding for finding in surroundings(values, written) if finding.key not in broken]
    order = {setting.key.lstrip("+~"): number for number, setting in enumerate(settings)}
    return sorted(found, key=lambda finding: order.get(finding.key, len(order)))


def _alone(settings: Sequence[Setting]) -> Iterator[Finding]:
    engine = next((setting.value for setting in settings if setting.key.lstrip("+") == ENGINE), "dp")
    known = schema(engine if engine in ENGINES else "dp")
    for setting in settings:
        if setting.group:
            continue
        if (wrong := problem(known, setting.key, setting.value)) is not None:
            yield Finding(
                code=wrong.code,
                severity=Severity.ERROR if wrong.fatal else Severity.WARNING,
                key=setting.key.lstrip("+~"),
                what=wrong.what,
                remedy=wrong.remedy,
                where=setting.where,
                value=setting.value,
            )


def _of_clash(clash: Clash, setting: Setting | None) -> Finding:
    return Finding(
        code=clash.code,
        severity=Severity.ERROR if clash.fatal else Severity.WARNING,
        key=clash.key,
        what=clash.what,
        remedy=clash.remedy,
        where=setting.where if setting is not None else "",
        value=setting.value if setting is not None else None,
    )


def surroundings(values: Values, written: Mapping[str, Setting]) -> list[Finding]:
    """What is wrong with what settings lead to: paths, a reward's function, trackers' credentials.

    Args:
        values: the whole configuration. written: settings of it that somebody wrote, by key.
    """
    return [*_files(values, written), *_trackers(values, written)]


def _files(values: Values, written: Mapping[str, Setting]) -> Iterator[Finding]:
    """Paths that lead nowhere, or somewhere else on another node."""
    for key, value in paths(values).items():
        setting = written.get(key)
        if setting is None and key != "trainer.default_local_dir":
            continue
        where = setting.where if setting is not None else ""
        for path in value if isinstance(value, list) else [value]:
            if not isinstance(path, str) or "${" in path or path.startswith(_URI):
                continue
            if not Path(path).expanduser().is_absolute() and key not in _MODELS:
                what = (
                    f"`{key}` is relative: it is looked up in the working directory of a Ray worker, a temporary folder"
                )
                yield _warning(Code.RELATIVE_PATH, key, what, "Write an absolute path.", where, path)
            elif key in _DATA and not Path(path).expanduser().exists():
                what = f"`{key}` names a file that is not on this machine"
                yield _warning(Code.FILE_MISSING, key, what, "Check the path, and that each node sees it.", where, path)
            elif key == "reward.custom_reward_function.path":
                yield from _reward(values, path, where)


def _reward(values: Values, path: str, where: str) -> Iterator[Finding]:
    key, name = "reward.custom_reward_function.path", values.get("reward.custom_reward_function.name")
    file = Path(path).expanduser()
    if not file.is_file():
        what = f"`{key}` names a file that is not on this machine"
        yield _warning(Code.FILE_MISSING, key, what, "Check the path, and that each node sees it.", where, path)
        return
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError, OSError) as error:
        yield _error(Code.REWARD_MISSING, key, f"the reward's file cannot be read: {error}", "Mend it.", where, path)
        return
    functions = [node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    imported = any(isinstance(node, (ast.Import, ast.ImportFrom, ast.Assign)) for node in tree.body)
    if isinstance(name, str) and name not in functions and not imported:
        what = f"the reward's file has no function {name!r}"
        remedy = f"Its functions are: {', '.join(functions) or 'none'}; set reward.custom_reward_function.name."
        yield _error(Code.REWARD_MISSING, key, what, remedy, where, path)


def _trackers(values: Values, written: Mapping[str, Setting]) -> Iterator[Finding]:
    key = "trainer.logger"
    loggers = values.get(key)
    setting = written.get(key)
    for name in loggers if isinstance(loggers, list) else [loggers]:
        variables, remedy = _CREDENTIALS.get(str(name), ((), ""))
        if not variables or any(os.environ.get(variable) for variable in variables):
            continue
        if name == "wandb" and _netrc_has("wandb"):
            continue
        origin = "" if setting is not None else " (verl's default)"
        what = f"`{key}` has {name}{origin}, and none of {', '.join(variables)} is set here"
        yield _warning(Code.CREDENTIALS_MISSING, key, what, remedy, setting.where if setting else "", name)


def _netrc_has(word: str) -> bool:
    try:
        return word in (Path.home() / ".netrc").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False


def _rows(files: Any) -> int | None:
    """Rows of local parquet files; None when one of them cannot be counted."""
    named = files if isinstance(files, list) else [files]
    local = [Path(file).expanduser() for file in named if isinstance(file, str) and file.endswith(".parquet")]
    if len(local) != len(named) or not all(file.is_file() for file in local):
        return None
    from pyarrow import ArrowException
    from pyarrow import parquet as pq

    try:
        return sum(int(pq.read_metadata(file).num_rows) for file in local)
    except (ArrowException, OSError):
        return None


def _error(code: Code, key: str, what: str, remedy: str, where: str = "", value: Any = None) -> Finding:
    return Finding(code=code, severity=Severity.ERROR, key=key, what=what, remedy=remedy, where=where, value=value)


def _warning(code: Code, key: str, what: str, remedy: str, where: str = "", value: Any = None) -> Finding:
    return Finding(code=code, severity=Severity.WARNING, key=key, what=what, remedy=remedy, where=where, value=value)
