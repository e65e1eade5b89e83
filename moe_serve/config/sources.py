"""Builds one typed Config from the command line, the environment, a YAML file and the defaults.

    a flag  >  an environment variable  >  the YAML file  >  the default in sections.py

A key `scheduler.max_num_seqs` is the YAML entry `max_num_seqs` in the section `scheduler`, and the
variable `MOE_SERVE_SCHEDULER_MAX_NUM_SEQS`: MOE_SERVE_<SECTION>_<NAME>, for every key. An empty
variable counts as not set; a list is written with commas, or as JSON if it begins with "[".
`MOE_SERVE_CONFIG` names the YAML file if `--config` does not. An API key `@FILE` stands for the
lines of that file.

Unknown names in the file or the environment are errors, so that a typing error does not silently
leave a default. This is the only module that reads the environment or the file.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from moe_serve.config.keys import (
    ConfigKey,
    Value,
    check_engine_config,
    config_keys,
    unknown_name,
)
from moe_serve.config.sections import Config
from moe_serve.config.tiers import TierConfig, Written
from moe_serve.config.yaml_nodes import plain_value, read_yaml, yaml_line
from moe_serve.errors import ConfigError, shortened
from moe_serve.regular_file import regular_file

PREFIX = "MOE_SERVE_"
CONFIG_VARIABLE = "MOE_SERVE_CONFIG"
API_KEY_VARIABLE = "MOE_SERVE_API_KEY"  # the client's key, which `moe-serve chat` reads
ADMIN_KEY_VARIABLE = "MOE_SERVE_ADMIN_KEY"  # the operator's, which `moe-serve trace` reads
CLUSTER_SECRET_VARIABLE = "MOE_SERVE_CLUSTER_SECRET"  # shared by every process of one cluster
DEFAULT_SOURCE = "default"
_COMMENT = re.compile(r"(^|\s)#.*")  # in a key file
_KEY_SETTING = re.compile(r"\s+(\w+)=(\S*)\Z")  # after a key, at the end of its line


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigEntry:
    """One key, its effective value, and where that value came from."""

    key: ConfigKey
    value: Value
    source: str

    @property
    def shown(self) -> str:
        """The value as YAML writes it; for a secret only the number of values."""
        if self.key.is_secret and self.value:
            assert isinstance(self.value, tuple), f"{self.key.path}: secrets are lists"
            return f"{len(self.value)} set, not shown"
        return yaml_line(self.key.plain(self.value))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedConfig:
    """The effective configuration, and the source of every key's value."""

    config: Config
    entries: tuple[ConfigEntry, ...]

    def to_yaml(self) -> str:
        """Returns the effective configuration as a file that `--config` reads, without secrets."""
        lines: list[str] = []
        for section in dict.fromkeys(entry.key.section for entry in self.entries):
            lines.append(f"{section}:")
            for entry in self.entries:
                if entry.key.section == section:
                    is_hidden = entry.key.is_secret and bool(entry.value)
                    text = f"{'# ' if is_hidden else ''}{entry.key.name}: {entry.shown}"
                    lines.append(f"  {text:<36}  # {entry.source}")
        return "\n".join(lines) + "\n"


def load_config(
    *,
    flags: Mapping[str, object],
    environ: Mapping[str, str],
    file: Path | None = None,
    settings: Mapping[str, object] | None = None,
    settings_source: str = "",
) -> LoadedConfig:
    """Merges the sources. `flags` holds the values set on the command line, as {"server.port":
    8001}.

    `settings` have the same form: they come from a cluster file and override the YAML file.
    """
    keys = {key.path: key for key in config_keys()}
    variables = {variable_name(key): key for key in keys.values()}
    _refuse_unknown_variables(environ, variables)
    chosen = {
        path: ConfigEntry(key=key, value=key.default, source=DEFAULT_SOURCE)
        for path, key in keys.items()
    }
    for entry in _file_entries(file, environ, keys):
        chosen[entry.key.path] = entry
    for path, value in (settings or {}).items():
        if path not in keys:
            raise unknown_name("key", path, settings_source, keys)
        checked = keys[path].check_yaml(value, settings_source)
        chosen[path] = ConfigEntry(key=keys[path], value=checked, source=settings_source)
    for name, key in variables.items():
        if text := environ.get(name, "").strip():
            chosen[key.path] = ConfigEntry(key=key, value=key.parse(text, name), source=name)
    for path, value in flags.items():
        source = "command line"
        checked = keys[path].check(value, source)
        chosen[path] = ConfigEntry(key=keys[path], value=checked, source=source)
    entries = tuple(_with_secrets_read(entry) for entry in chosen.values())
    config = _build(Config, {entry.key.path: entry.value for entry in entries})
    check_engine_config(config.engine)
    _check_key_tiers(config)
    return LoadedConfig(config=config, entries=entries)


def _check_key_tiers(config: Config) -> None:
    known = [tier.name for tier in config.engine.scheduler.tiers]
    for name in config.server.key_tiers:
        if name not in known:
            raise ConfigError(
                f"server.key_tiers has {shortened(repr(name))}, which is not a tier of "
                f"scheduler.tiers ({', '.join(known) or 'empty'}): name one of those, or add it."
            )


def wants_json_log(
    *, flags: Mapping[str, object], environ: Mapping[str, str], file: Path | None = None
) -> bool:
    """Returns whether `log.format` is json, before everything is read and checked, so that errors
    in the rest are reported in that format."""
    if "log.format" in flags:
        return flags["log.format"] == "json"
    if text := environ.get("MOE_SERVE_LOG_FORMAT", "").strip():
        return text == "json"
    file = _named_file(file, environ)
    try:
        root = None if file is None else _parse_yaml(file)
    except ConfigError:
        return False
    for name in ("log", "format"):
        entries = root.value if isinstance(root, yaml.MappingNode) else ()
        root = next((value for key, value in entries if key.value == name), None)
    return root is not None and root.value == "json"


def describe(loaded: LoadedConfig) -> list[ConfigEntry]:
    """Returns every key with its value and its source. Print `entry.shown`, never `entry.value`."""
    return list(loaded.entries)


def variable_name(key: ConfigKey) -> str:
    return f"{PREFIX}{key.section}_{key.name}".upper()


def _refuse_unknown_variables(environ: Mapping[str, str], known: Mapping[str, ConfigKey]) -> None:
    own = {CONFIG_VARIABLE, API_KEY_VARIABLE, ADMIN_KEY_VARIABLE, CLUSTER_SECRET_VARIABLE}
    names = {*known, *own}
    for name in environ:
        if name.startswith(PREFIX) and name not in names:
            raise unknown_name("environment variable", name, "environment", names)


def _file_entries(
    file: Path | None, environ: Mapping[str, str], keys: Mapping[str, ConfigKey]
) -> Iterator[ConfigEntry]:
    file = _named_file(file, environ)
    if file is None:
        return
    sections = {key.section for key in keys.values()}
    for section, section_node, where in _mapping(_parse_yaml(file), file, "the file"):
        if section not in sections:
            raise unknown_name("section", section, where, sections)
        for name, node, place in _mapping(section_node, file, f"the section {section}"):
            path = f"{section}.{name}"
            if path not in keys:
                known = {key.name for key in keys.values() if key.section == section}
                raise unknown_name("key", path, place, {f"{section}.{other}" for other in known})
            is_tiers = keys[path].kind is TierConfig and isinstance(node, yaml.MappingNode)
            written = _written(node, place, file) if is_tiers else _plain_value(node, place)
            value = keys[path].check_yaml(written, place)
            yield ConfigEntry(key=keys[path], value=value, source=place)


def _named_file(file: Path | None, environ: Mapping[str, str]) -> Path | None:
    """Returns the file of `--config`, or the one that the environment names instead."""
    named = environ.get(CONFIG_VARIABLE, "").strip()
    return Path(named) if file is None and named else file


def _parse_yaml(file: Path) -> yaml.Node | None:
    try:
        return read_yaml(regular_file(file).read_text("utf-8"), str(file))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {file}: {error.strerror}.") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"the configuration {file} is not valid YAML: {reason}") from error
    except RecursionError:
        raise ConfigError(
            f"the configuration {file} has values nested too deeply to be read."
        ) from None


def _written(node: yaml.Node, place: str, file: Path) -> Written:
    """Returns the value of a node, in which every part keeps the place of its own line."""
    if not isinstance(node, yaml.MappingNode):
        return Written(value=_plain_value(node, place), source=place)
    parts = _mapping(node, file, "it")
    return Written(value={name: _written(part, at, file) for name, part, at in parts}, source=place)


def _plain_value(node: yaml.Node, place: str) -> object:
    try:
        return plain_value(node)
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"this is not a plain value ({place}): {reason}.") from error


def _mapping(node: yaml.Node | None, file: Path, what: str) -> Iterator[tuple[str, yaml.Node, str]]:
    """Yields (name, node, "file:line") of each entry of a mapping."""
    if node is None or (isinstance(node, yaml.ScalarNode) and not node.value):
        return
    if not isinstance(node, yaml.MappingNode):
        line = node.start_mark.line + 1
        raise ConfigError(f"{what} must hold `name: value` lines ({file}:{line}).")
    for name_node, value_node in node.value:
        yield name_node.value, value_node, f"{file}:{name_node.start_mark.line + 1}"


def _with_secrets_read(entry: ConfigEntry) -> ConfigEntry:
    """Replaces `@FILE` among the API keys by the lines of that file."""
    if not entry.key.is_secret or not isinstance(entry.value, tuple):
        return entry
    secrets: list[str] = []
    for item in map(str, entry.value):
        secrets += read_secret_file(item[1:]) if item.startswith("@") else [item]
    checked = entry.key.check(secrets, entry.source)
    return dataclasses.replace(entry, value=checked)


def read_secret_file(path: str) -> list[str]:
    """Reads one secret per line. Empty lines are skipped, and so are comments: from a # at the
    start or after a space to the end of the line."""
    try:
        lines = regular_file(Path(path)).read_text("utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read the API keys in {path}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the file of API keys {path} is not UTF-8 text.") from error
    secrets = [secret for line in lines if (secret := _COMMENT.sub("", line).strip())]
    if not secrets:
        raise ConfigError(f"the file {path} holds no API key: write one on each line.")
    return secrets


def split_key(line: str) -> tuple[str, list[tuple[str, str]]]:
    """Splits a line into a key and the settings after it: `s3cret min_priority=-10`."""
    settings: list[tuple[str, str]] = []
    while found := _KEY_SETTING.search(line):
        settings.append((found[1], found[2]))
        line = line[: found.start()]
    return line, settings


def read_first_key(path: str) -> str:
    """Returns the key that a client sends: the first one of a file, without its settings."""
    return split_key(read_secret_file(path)[0])[0]


def _build(component: type, values: Mapping[str, Value], section: str = "") -> Any:
    """Builds the dataclass `component` with all its parts from {"section.name": value}."""
    arguments: dict[str, Any] = {}
    for item in dataclasses.fields(component):
        if item.default is dataclasses.MISSING:
            part: object = item.default_factory
            assert isinstance(part, type), f"{item.name}: a part is made by its dataclass"
            arguments[item.name] = _build(part, values, item.name)
        else:
            arguments[item.name] = values[f"{section}.{item.name}"]
    return component(**arguments)
