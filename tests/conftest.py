"""Shared by all tests: Ray without token authentication or anyone else's cluster."""

import os

os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.pop("RAY_ADDRESS", None)
