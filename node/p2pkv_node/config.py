"""Configuration of the daemon: defaults, then a TOML file, then the environment, then flags; the later wins."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from p2pkv.errors import UsageError
from p2pkv.store.home import default_home
from p2pkv.units import parse_bytes

# A node that shares has to be reachable, so the default listens on all interfaces; `--listen` narrows it.
DEFAULT_LISTEN = ("/ip4/0.0.0.0/tcp/4101",)
_TRUE, _FALSE = frozenset({"1", "true", "yes", "on"}), frozenset({"0", "false", "no", "off"})


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """Everything that the daemon can be told.

    ``listen`` and ``announce`` are multiaddrs (``announce`` replaces what others are told), ``bootstrap`` multiaddrs with
    ``/p2p/<peer id>``; ``bulk`` keeps the TLS lane for blocks, on the hosts of ``listen`` at ``bulk_port`` (0: a free one);
    ``mirror`` announces what was fetched. ``upload_limit`` bounds what all peers together are sent, ``upload_limit_per_peer``
    what each is, in bytes of blocks per second; 0 is no limit. They may be given as text such as ``10MiB``.
    """

    home: Path
    listen: tuple[str, ...] = DEFAULT_LISTEN
    announce: tuple[str, ...] = ()
    bootstrap: tuple[str, ...] = ()
    bulk: bool = True
    bulk_port: int = 0
    mirror: bool = True
    upload_limit: int = 0
    upload_limit_per_peer: int = 0
    log_level: str = "info"


_NAMES = frozenset(field.name for field in fields(NodeConfig)) - {"home"}
_LISTS = frozenset({"listen", "announce", "bootstrap"})
_FLAGS = frozenset({"bulk", "mirror"})
_SIZES = frozenset({"upload_limit", "upload_limit_per_peer"})


def load_config(
    flags: Mapping[str, Any], *, file: Path | None = None, environment: Mapping[str, str] = os.environ
) -> NodeConfig:
    """Return the configuration. ``flags`` holds only what was given on the command line.

    ``file`` defaults to ``config.toml`` in the home, which need not exist. Environment variables are the names in capitals
    behind ``P2PKV_``, lists separated by commas. Raises UsageError that names the setting and where it came from.
    """
    home = Path(flags.get("home") or default_home()).expanduser().absolute()
    config = NodeConfig(home)
    for source, settings in (
        (str(file or home / "config.toml"), _read_file(file, home)),
        ("the environment", _read_environment(environment)),
        ("the command line", {name: value for name, value in flags.items() if name != "home"}),
    ):
        config = replace(config, **{name: _checked(name, value, source) for name, value in settings.items()})
    return config


def _read_file(file: Path | None, home: Path) -> dict[str, Any]:
    path = file or home / "config.toml"
    try:
        with path.open("rb") as stream:
            return tomllib.load(stream)
    except FileNotFoundError:
        if file is not None:
            raise UsageError(f"there is no configuration file {file}", advice="Check --config.") from None
        return {}
    except (OSError, ValueError) as error:  # not TOML, or not UTF-8
        raise UsageError(f"cannot read {path}: {error}", advice="Mend the file, or move it away.") from None


def _read_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in _NAMES:
        text = environment.get(f"P2PKV_{name.upper()}")
        if text is not None:
            found[name] = [part for part in text.split(",") if part] if name in _LISTS else text
    return found


def _checked(name: str, value: Any, source: str) -> Any:
    """Return ``value`` in the type of the setting."""
    advice = f"Settings: {', '.join(sorted(_NAMES))}."
    if name not in _NAMES:
        raise UsageError(f"{source} has the unknown setting {name!r}", advice=advice)
    if name in _LISTS and isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
        return tuple(value)
    if name in _FLAGS:
        if isinstance(value, bool):
            return value
        if str(value).lower() in _TRUE | _FALSE:
            return str(value).lower() in _TRUE
    if name == "bulk_port" and str(value).isdecimal() and int(value) <= 65_535:
        return int(value)
    if name in _SIZES and (count := parse_bytes(str(value))) is not None:
        return count
    if name == "log_level" and str(value).lower() in ("debug", "info", "warning", "error"):
        return str(value).lower()
    raise UsageError(f"{source} sets {name} to {value!r}, which is not possible", advice=advice)
