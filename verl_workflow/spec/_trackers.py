"""Where a training's metrics are shown besides here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Tag

from verl_workflow.spec._fields import Input, Strict


class MlflowTracker(Strict):
    """MLflow. Credentials come from its own variables (MLFLOW_TRACKING_TOKEN, ...).

    Attributes:
        uri: of the server or store; by default MLFLOW_TRACKING_URI of the node where the stage runs.
        experiment: by default the pipeline's run belongs to ``verl-workflow``.
    """

    kind: Literal["mlflow"] = "mlflow"
    uri: Input | None = None
    experiment: Input = "verl-workflow"


class WandbTracker(Strict):
    """Weights & Biases. The key comes from WANDB_API_KEY, or from where `wandb login` put it.

    Attributes:
        project, entity: as there. mode: ``offline`` writes into the run's folder, for ``wandb sync``.
    """

    kind: Literal["wandb"] = "wandb"
    project: Input = "verl-workflow"
    entity: Input | None = None
    mode: Literal["online", "offline"] = "online"


class TensorboardTracker(Strict):
    """TensorBoard.

    Attributes:
        folder: its log directory; by default in the stage's folder. A folder for each stage of each run is made in it.
    """

    kind: Literal["tensorboard"] = "tensorboard"
    folder: Input | None = None


def _kind(value: Any) -> Any:
    return value.get("kind") if isinstance(value, Mapping) else getattr(value, "kind", None)


Tracker = Annotated[
    Annotated[MlflowTracker, Tag("mlflow")]
    | Annotated[WandbTracker, Tag("wandb")]
    | Annotated[TensorboardTracker, Tag("tensorboard")],
    Discriminator(_kind),
]
