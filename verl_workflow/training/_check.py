"""Check stub"""
from __future__ import annotations
from typing import Any
def check_settings(spec: Any, chosen: Any, *, train_rows: int | None = None, where: Any = None) -> list[Any]:
    return []
def check_verl_stage(spec: Any, **_: Any) -> list[Any]:
    return []
