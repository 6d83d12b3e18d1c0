# SPDX-License-Identifier: Apache-2.0
"""Registers the schema and the resolvers with Hydra. Call once, before `hydra.main` composes."""

from __future__ import annotations

from pathlib import Path

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from nemo_automodel.config.schema import AppConfig

REPO_ROOT = Path(__file__).resolve().parents[2]


def register() -> None:
    """Make `app_schema` and `${repo:PATH}` known. Repeated calls do no harm."""
    ConfigStore.instance().store(name="app_schema", node=AppConfig)
    # What ships with the repo is found from any working directory.
    OmegaConf.register_new_resolver("repo", lambda path: str(REPO_ROOT / path), replace=True)
