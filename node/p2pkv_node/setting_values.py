"""What each setting of the daemon may be: the texts of flags and environment and the values of TOML, read into one type."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from multiaddr import Multiaddr

from p2pkv.errors import UsageError
from p2pkv.units import parse_bytes
from p2pkv_node.libp2p_errors import translated
from p2pkv_node.logs import FORMATS
from p2pkv_node.network import parse_peer_address

_TRUE, _FALSE = frozenset({"1", "true", "yes", "on"}), frozenset({"0", "false", "no", "off"})
_LOG_LEVELS: Final = ("debug", "info", "warning", "error")
_MAX_PORT: Final = 65_535
OFF: Final = "off"


@dataclass(frozen=True, slots=True)
class Kind:
    """How a setting is read. ``parse`` raises UsageError with the reason, or returns ``None``, for what is not possible."""

    parse: Callable[[Any], Any]
    advice: str
    is_list: bool = False


def _addresses(check: Callable[[str], object]) -> Callable[[Any], Any]:
    def parse(value: Any) -> tuple[str, ...] | None:
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            return None
        for item in value:
            if not item.isprintable():
                raise UsageError(f"{item!r} has characters that no address has")
            check(item)
        return tuple(value)

    return parse


def _multiaddr(text: str) -> Multiaddr:
    with translated(f"reading {text!r}"):
        return Multiaddr(text)


def _listen_address(text: str) -> None:
    names = {protocol.name for protocol in _multiaddr(text).protocols()}
    if "tcp" not in names or not names & {"ip4", "ip6"}:
        raise UsageError(f"{text!r} is not of the form /ip4/<address>/tcp/<port>")


def _truth(value: Any) -> bool | None:
    word = str(value).lower()
    return word in _TRUE if word in _TRUE | _FALSE else None


def _port(value: Any) -> int | None:
    text = str(value)
    return int(text) if re.fullmatch(r"\d{1,5}", text, re.ASCII) and int(text) <= _MAX_PORT else None


def _web(value: Any) -> str | None:
    """Return ``off``, or a loopback address and a port: ``127.0.0.1:9464``, ``[::1]:0``."""
    text = str(value).lower()
    if text == OFF:
        return OFF
    host, _, port = text.rpartition(":")
    number = _port(port)
    bracketed = host.startswith("[") and host.endswith("]")
    try:
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host[1:-1] if bracketed else host)
    except ValueError:
        return None
    if number is None or bracketed != (address.version == 6):
        return None
    if isinstance(address, ipaddress.IPv6Address) and (address.scope_id or address.ipv4_mapped):
        return None
    if not address.is_loopback:
        raise UsageError(f"{address} is not a loopback address")
    return f"[{address}]:{number}" if bracketed else f"{address}:{number}"


def _log_level(value: Any) -> str | None:
    word = str(value).lower()
    return word if word in _LOG_LEVELS else None


def _log_format(value: Any) -> str | None:
    word = str(value).lower()
    return word if word in FORMATS else None


_TRUTH = Kind(_truth, "Give true or false.")
_RATE = Kind(lambda value: parse_bytes(str(value)), "Give a number of bytes per second or a size such as 10MiB; 0: no limit.")

KINDS: Final[dict[str, Kind]] = {
    "listen": Kind(_addresses(_listen_address), "Give a list of multiaddrs such as /ip4/0.0.0.0/tcp/4101.", is_list=True),
    "announce": Kind(_addresses(_multiaddr), "Give a list of multiaddrs such as /ip4/192.0.2.1/tcp/4101.", is_list=True),
    "bootstrap": Kind(
        _addresses(parse_peer_address),
        "Give a list of whole addresses that other nodes printed, such as /ip4/192.0.2.1/tcp/4101/p2p/12D3Koo...",
        is_list=True,
    ),
    "bulk": _TRUTH,
    "bulk_port": Kind(_port, f"Give a port up to {_MAX_PORT}; 0 takes a free one."),
    "mirror": _TRUTH,
    "quota": Kind(lambda value: parse_bytes(str(value)), "Give a size such as 50GiB; 0: as much as the disk has room for."),
    "upload_limit": _RATE,
    "upload_limit_per_peer": _RATE,
    "web": Kind(
        _web,
        "Give off, or a loopback address and a port such as 127.0.0.1:9464; port 0 takes a free one. To read the page from "
        "elsewhere, forward the port with ssh.",
    ),
    "log_level": Kind(_log_level, f"Give one of {', '.join(_LOG_LEVELS)}."),
    "log_format": Kind(_log_format, f"Give one of {', '.join(FORMATS)}."),
}
