"""Configuration of the daemon: defaults, then a TOML file, then the environment, then flags; the later wins."""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from p2pkv.errors import UsageError
from p2pkv.store.home import default_home
from p2pkv_node.logs import TEXT
from p2pkv_node.setting_values import KINDS, OFF

# A node that shares has to be reachable, so the default listens on all interfaces; `--listen` narrows it.
DEFAULT_LISTEN = ("/ip4/0.0.0.0/tcp/4101",)
_PREFIX: Final = "P2PKV_"
# Read before all others, and by the command p2pkv, which may share the environment.
_OTHER_VARIABLES: Final = ("HOME", "CONFIG", "DEBUG")


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """Everything that the daemon can be told.

    ``listen`` and ``announce`` are multiaddrs (``announce`` replaces what others are told), ``bootstrap`` multiaddrs with
    ``/p2p/<peer id>``; ``bulk`` keeps the TLS lane for blocks, on the hosts of ``listen`` at ``bulk_port`` (0: a free one);
    ``mirror`` announces what was fetched; ``quota`` bounds the bytes of blocks that are kept, 0 for what the disk has room
    for. ``upload_limit`` bounds what all peers together are sent, ``upload_limit_per_peer`` what each is, in bytes of blocks
    per second; 0 is no limit. All three may be given as text such as ``10MiB``. ``web`` is where
    metrics and status page are: a loopback address and a port, or ``off``. ``log_format`` is text for people or json.
    """

    home: Path
    listen: tuple[str, ...] = DEFAULT_LISTEN
    announce: tuple[str, ...] = ()
    bootstrap: tuple[str, ...] = ()
    bulk: bool = True
    bulk_port: int = 0
    mirror: bool = True
    quota: int = 0
    upload_limit: int = 0
    upload_limit_per_peer: int = 0
    web: str = OFF
    log_level: str = "info"
    log_format: str = TEXT


class Source(StrEnum):
    """Where a setting comes from, the weakest first."""

    DEFAULT = "default"
    FILE = "file"
    ENVIRONMENT = "environment"
    FLAG = "flag"


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting as it holds. ``place`` is the path, the variable or the flag that says so; empty for a default."""

    name: str
    value: Any
    source: Source
    place: str


@dataclass(frozen=True, slots=True)
class SettingFault:
    """What is wrong at one place. ``name`` is empty where the place cannot be read at all."""

    name: str
    source: Source
    place: str
    error: UsageError


@dataclass(frozen=True, slots=True)
class StrayVariable:
    """A variable of the environment with the prefix of settings that is none. ``advice`` says what may have been meant."""

    name: str
    advice: str

    def __str__(self) -> str:
        return f"the variable {self.name} is no setting and is ignored. {self.advice}"


@dataclass(frozen=True, slots=True)
class Configuration:
    """What all sources say together: each setting in the order of NodeConfig, every fault, and the file that was read.

    A stray variable is no fault: the environment is shared with other programs, and with other versions.
    """

    settings: tuple[Setting, ...]
    faults: tuple[SettingFault, ...]
    file: Path | None
    stray: tuple[StrayVariable, ...] = ()

    def config(self) -> NodeConfig:
        """Return what the daemon runs with. Raises the UsageError of the first fault."""
        if self.faults:
            raise self.faults[0].error
        return NodeConfig(**{setting.name: setting.value for setting in self.settings})


def load_config(
    flags: Mapping[str, Any], *, file: Path | None = None, environment: Mapping[str, str] = os.environ
) -> NodeConfig:
    """Return the configuration. ``flags`` holds only what was given on the command line.

    ``file`` defaults to ``$P2PKV_CONFIG``, which has to exist, else to ``config.toml`` in the home, which need not.
    Environment variables are the names in capitals behind ``P2PKV_``, lists separated by commas. Raises UsageError that names
    the setting and where it came from.
    """
    return read_configuration(flags, file=file, environment=environment).config()


def read_configuration(
    flags: Mapping[str, Any], *, file: Path | None = None, environment: Mapping[str, str] = os.environ
) -> Configuration:
    """Return all settings and all faults; reads at most one file, changes nothing. Parameters as for :func:`load_config`."""
    faults: list[SettingFault] = []
    home = _read_home(flags, environment, faults)
    found = {
        field.name: Setting(field.name, field.default, Source.DEFAULT, "")
        for field in fields(NodeConfig)
        if field.default is not MISSING
    }
    path, table = _read_file(file, environment, home.value, faults)
    for source, place, name, value in (
        *((Source.FILE, str(path), name, value) for name, value in table.items()),
        *_of_environment(environment),
        *((Source.FLAG, _flag(name, value), name, value) for name, value in flags.items() if name != "home"),
    ):
        try:
            found[name] = Setting(name, _checked(name, value, source, place), source, place)
        except UsageError as error:
            faults.append(SettingFault(name, source, place, error))
    return Configuration((home, *found.values()), tuple(faults), path, tuple(_stray(environment)))


def _read_home(flags: Mapping[str, Any], environment: Mapping[str, str], faults: list[SettingFault]) -> Setting:
    text, source, place = default_home(), Source.DEFAULT, ""
    if flags.get("home"):
        text, source, place = flags["home"], Source.FLAG, "--home"
    elif environment.get("P2PKV_HOME"):
        text, source, place = Path(environment["P2PKV_HOME"]), Source.ENVIRONMENT, "P2PKV_HOME"
    home = _expanded(Path(text), "home", source, place, faults)
    return Setting("home", home, source, place)


def _read_file(
    file: Path | None, environment: Mapping[str, str], home: Path, faults: list[SettingFault]
) -> tuple[Path | None, dict[str, Any]]:
    """Return the file that was read, ``None`` where there is none, and what it sets."""
    place = "--config"
    if file is None and environment.get("P2PKV_CONFIG"):
        file, place = Path(environment["P2PKV_CONFIG"]), "P2PKV_CONFIG"
    source = Source.FLAG if place == "--config" else Source.ENVIRONMENT
    path = home / "config.toml" if file is None else _expanded(file, "config", source, place, faults)
    try:
        with path.open("rb") as stream:
            return path, tomllib.load(stream)
    except FileNotFoundError:
        if file is not None:
            error = UsageError(f"there is no configuration file {path}", advice=f"Check {place}.")
            faults.append(SettingFault("", source, place, error))
        return None, {}
    except (OSError, ValueError, RecursionError) as caught:  # not TOML, not UTF-8, or nested without end
        error = UsageError(f"cannot read {path}: {caught}", advice="Mend the file, or move it away.")
        faults.append(SettingFault("", Source.FILE, str(path), error))
        return None, {}


def _expanded(path: Path, name: str, source: Source, place: str, faults: list[SettingFault]) -> Path:
    """Return ``path`` absolute, with its tilde replaced."""
    try:
        return path.expanduser().absolute()
    except RuntimeError as caught:
        error = UsageError(f"{place or 'the default home'} cannot be {str(path)!r}: {caught}", advice="Give a whole path.")
        faults.append(SettingFault(name, source, place, error))
        return path.absolute()


def _of_environment(environment: Mapping[str, str]) -> Iterator[tuple[Source, str, str, Any]]:
    for name, kind in KINDS.items():
        place = f"{_PREFIX}{name.upper()}"
        text = environment.get(place)
        if text is not None:
            value = [part for part in text.split(",") if part] if kind.is_list else text
            yield Source.ENVIRONMENT, place, name, value


def _stray(environment: Mapping[str, str]) -> Iterator[StrayVariable]:
    known = sorted([*_OTHER_VARIABLES, *map(str.upper, KINDS)])
    for variable in sorted(environment):
        name = variable.removeprefix(_PREFIX)
        if variable.startswith(_PREFIX) and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            advice = (
                f"Did you mean {_PREFIX}{near[0]}?" if near else f"There are {', '.join(f'{_PREFIX}{one}' for one in known)}."
            )
            yield StrayVariable(variable, advice)


def _flag(name: str, value: Any) -> str:
    return f"--{'no-' if value is False else ''}{name.replace('_', '-')}"


def _checked(name: str, value: Any, source: Source, place: str) -> Any:
    """Return ``value`` in the type of the setting. Raises UsageError."""
    where = {Source.ENVIRONMENT: f"the environment ({place})", Source.FLAG: f"the command line ({place})"}.get(source, place)
    kind = KINDS.get(name)
    if kind is None:
        near = difflib.get_close_matches(name, KINDS, n=1)
        guess = f"Did you mean {near[0]}? " if near else ""
        if name == "home":
            guess = "Set it with --home or P2PKV_HOME. "
        raise UsageError(f"{where} has the unknown setting {name!r}", advice=f"{guess}Settings: {', '.join(sorted(KINDS))}.")
    reason = ""
    try:
        shown = repr(value)
    except ValueError:  # Python shows no number of so many digits
        raise UsageError(f"{where} sets {name} to a number that is far too large", advice=kind.advice) from None
    try:
        parsed = kind.parse(value)
    except UsageError as error:
        parsed, reason = None, f": {error.message}"
    if parsed is None:
        raise UsageError(f"{where} sets {name} to {shown}, which is not possible{reason}", advice=kind.advice)
    return parsed
