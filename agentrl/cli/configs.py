"""What the commands that take a config share: finding it and opening its run folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.errors import CatalogError

if TYPE_CHECKING:
    from agentrl.config import TrainConfig
    from agentrl.run.folder import RunFolder


def find_config_file(name: str) -> Path:
    """A path to a TOML file, or the name of a config on a shelf. Raises UserError if there is none."""
    path = Path(name)
    if path.is_file():
        return path
    from agentrl.catalog import find_config

    try:
        return Path(find_config(name))
    except CatalogError:
        if path.suffix == ".toml":
            return path  # load_config says which file is missing and what is near it
        raise


def open_folder(config: TrainConfig, *, overwrite: bool) -> RunFolder:
    """The run's new folder; with `overwrite` an older run of that name is removed first."""
    from agentrl.run.folder import RunFolder

    target = Path(config.out) / config.name
    if overwrite and (target / "config.toml").is_file():
        shutil.rmtree(target)
    return RunFolder.create(config)
