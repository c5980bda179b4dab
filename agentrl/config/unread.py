"""Keys that nothing reads under the others of a config: who sets one expects that it does something."""

from __future__ import annotations

from pydantic import BaseModel

from agentrl.errors import ConfigError


def check_unread(at: str, section: BaseModel, keys: tuple[str, ...], needs: str) -> None:
    """Raise ConfigError for one of these keys of the section `at` whose value is not its default. `needs`: what would read it."""
    for key in keys:
        value = getattr(section, key)
        if value != type(section).model_fields[key].default:
            raise ConfigError(f"{at}.{key} = {value!r} is read with {needs} alone; set that too, or leave this out")
