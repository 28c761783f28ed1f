"""From verl's save to a checkpoint: moved, at once and whole, to where checkpoints are looked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_workflow.training._checkpoints import write_manifest
from verl_workflow.training._discard import discard
from verl_workflow.training._owner import require_owner


def publish(saved: Path, root: Path, *, owner: str, identity: Mapping[str, Any], roles: Sequence[str]) -> Path:
    """Give a save that is through its manifest and move it into `root`; its place there.

    Args:
        saved: folder ``global_step_<step>`` in the owner's saving folder. owner: the attempt that saved it.
        identity: what it is bound to. roles: whose weights it holds.

    Raises:
        OvertakenError: a later attempt trains in `root`.
    """
    require_owner(root, owner)
    write_manifest(saved, writer=owner, identity=identity, roles=roles)
    place = root / saved.name
    if place.exists():
        discard(place)
    # Whoever is overtaken after the check finds nothing to move: a claim takes the saving folders of all others away.
    saved.rename(place)
    return place
