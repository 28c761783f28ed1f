"""The models pipelines start from: the built-in one, a folder, or a GGUF file exported once."""

from verl_workflow.models._check import check_folder
from verl_workflow.models._make import make_model

__all__ = ["check_folder", "make_model"]
