"""``p2pkv-node config show`` and ``config check``: what a daemon with the same flags would run with, without a daemon."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from p2pkv.errors import UsageError
from p2pkv.units import plural
from p2pkv_node.config import Configuration, Setting, SettingFault, Source, read_configuration

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Show or check the settings. The node's own options go in front of `config`.",
)

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]


@dataclass(frozen=True, slots=True)
class CommandLine:
    """What stands in front of the sub-command: the settings that are flags, the file of ``--config``, and ``--json``."""

    flags: dict[str, Any]
    file: Path | None
    as_json: bool

    def read(self) -> Configuration:
        return read_configuration(self.flags, file=self.file)


@app.command()
def show(context: typer.Context, as_json: JsonOption = False) -> None:
    """Show every setting and its source. The text may serve as config.toml."""
    given: CommandLine = context.obj
    as_json = as_json or given.as_json
    configuration = given.read()
    try:
        configuration.config()
    except UsageError as error:
        typer.echo(json.dumps({"error": error.to_dict()}) if as_json else f"p2pkv-node: {error}", err=True)
        raise typer.Exit(error.exit_status) from None
    typer.echo(json.dumps(as_dict(configuration)) if as_json else as_toml(configuration))


@app.command()
def check(context: typer.Context, as_json: JsonOption = False) -> None:
    """Name every fault of the settings, and every variable P2PKV_... that is none.

    Reads what the node would read, touches nothing; exit status 2 where a setting is wrong.
    """
    given: CommandLine = context.obj
    configuration = given.read()
    faults = configuration.faults
    if as_json or given.as_json:
        told = {"faults": [_fault(fault) for fault in faults], "stray": [asdict(one) for one in configuration.stray]}
        typer.echo(json.dumps({"ok": not faults, **_sources(configuration), **told}))
    else:
        for wrong in (*configuration.stray, *(fault.error for fault in faults)):
            typer.echo(f"p2pkv-node: {wrong}", err=True)
        if faults:
            typer.echo(plural(len(faults), "fault"), err=True)
        else:
            file = f"file {_quoted(configuration.file)}" if configuration.file else "no file"
            typer.echo(f"no faults; home {_quoted(configuration.settings[0].value)}, {file}")
    if faults:
        raise typer.Exit(faults[0].error.exit_status)


def as_toml(configuration: Configuration) -> str:
    """Return the settings as TOML, each with its source in a comment; the home, which no file sets, is a comment itself."""
    lines = [f"{'# ' if setting.name == 'home' else ''}{_line(setting)}" for setting in configuration.settings]
    return "\n".join(lines)


def as_dict(configuration: Configuration) -> dict[str, Any]:
    """Return the settings by name, each with value, source and place (``None`` for a default)."""
    settings = {
        setting.name: {"value": _plain(setting.value), "source": setting.source.value, "place": setting.place or None}
        for setting in configuration.settings
    }
    return {**_sources(configuration), "settings": settings}


def _line(setting: Setting) -> str:
    # The JSON of texts, lists, numbers and truth is TOML too, but for control characters, which no setting of a file has.
    value = json.dumps(_plain(setting.value), ensure_ascii=setting.name == "home")
    place = _quoted(setting.place) if setting.source is Source.FILE else setting.place
    return f"{setting.name} = {value}  # {' '.join(filter(None, (setting.source.value, place)))}"


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def _quoted(path: Path | str) -> str:
    """Return a path with whatever could steer a terminal or is no text escaped."""
    return json.dumps(str(path))


def _sources(configuration: Configuration) -> dict[str, Any]:
    return {"file": str(configuration.file) if configuration.file else None}


def _fault(fault: SettingFault) -> dict[str, Any]:
    return {
        "setting": fault.name or None,
        "source": fault.source.value,
        "place": fault.place or None,
        **fault.error.to_dict(),
    }
