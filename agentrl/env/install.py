"""Installing a suite: its source is checked, its tasks are counted, and the record is written; nothing is copied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path

from agentrl.env.source import InstallRecord, find_source, fingerprint, read_files, read_record, record_file, write_record
from agentrl.env.suite import SuiteEnv
from agentrl.errors import ConfigError


def install(classes: Mapping[str, type[SuiteEnv]], given: str | None) -> InstallRecord:
    """Check the source of a suite and write its record. `classes`: its environments by id, at least one. `given`: the folder; by
    default what is recorded already, or the importable package.

    Raises ConfigError if there is no source, or if it has not what the suite reads; TaskDataError for a bad task."""
    suite = next(iter(classes.values()))
    folder, _ = find_source(suite.suite, given, suite.module, obtain=suite.obtain, called="--from")
    version = suite.located(str(folder))[1]
    tasks = {env_id: one.counted(folder) for env_id, one in classes.items()}
    files = read_files(folder, suite.files)
    if not files:
        raise ConfigError(f"{suite.suite}: no file of {folder} matches {', '.join(suite.files)}")
    record = InstallRecord(suite.suite, str(folder), version, date.today().isoformat(), files, tasks)
    write_record(record)
    return record


def remove(suite: str) -> Path:
    """Delete the record of a suite; its source stays. Returns the record's path. Raises ConfigError if it is not installed."""
    file = record_file(suite)
    if not file.is_file():
        raise ConfigError(f"{suite} is not installed: there is no {file}")
    file.unlink()
    return file


def source_notes(env: SuiteEnv, shown: int = 6) -> Sequence[str]:
    """What a run should say of an environment's source: the files that changed since it was installed, by name."""
    record = _record_of(env)
    changed = [] if record is None else record.changes(env.files)
    if record is None or not changed:
        return ()
    more = f" and {len(changed) - shown} more" if len(changed) > shown else ""
    return (
        f"{env.suite}: its source {env.source} is not what was installed on {record.installed} ({record.version}): "
        f"{', '.join(changed[:shown])}{more}; if that is meant: agentrl env install {env.suite} --from {env.source}",
    )


def source_fingerprint(env: SuiteEnv) -> str:
    """One digest of the files that tasks and checkers come from; by the record, if nothing changed since."""
    record = _record_of(env)
    if record is not None and not record.changes(env.files):
        return fingerprint(record.files)
    return fingerprint(read_files(env.source, env.files))


def _record_of(env: SuiteEnv) -> InstallRecord | None:
    record = read_record(env.suite)
    return record if record is not None and Path(record.source).resolve() == env.source else None
