"""The command ``p2pkv-node``."""

from __future__ import annotations

import gc
import json
import logging
import sys
from pathlib import Path
from typing import Annotated, Any

import trio
import typer

from p2pkv import __version__
from p2pkv.errors import P2pkvError
from p2pkv.swarm.background import open_background
from p2pkv_node import config_command
from p2pkv_node.config import NodeConfig, read_configuration
from p2pkv_node.daemon import run_daemon, stop_on_signals
from p2pkv_node.logs import JSON, TEXT, start_logging
from p2pkv_node.node import Node

logger = logging.getLogger(__name__)

# Without markup, which would take "[env: ...]" in the help for its own.
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.callback(invoke_without_command=True)
def node(
    context: typer.Context,
    home: Annotated[Path | None, typer.Option(help="Folder of blocks, index and keys. [env: P2PKV_HOME]")] = None,
    config: Annotated[
        Path | None, typer.Option(help="TOML file; default: config.toml in the home. [env: P2PKV_CONFIG]")
    ] = None,
    listen: Annotated[
        list[str] | None,
        typer.Option(help="Multiaddr to listen on, e.g. /ip4/0.0.0.0/tcp/4101; repeatable. [env: P2PKV_LISTEN]"),
    ] = None,
    announce: Annotated[
        list[str] | None, typer.Option(help="Multiaddr to tell others instead; repeatable. [env: P2PKV_ANNOUNCE]")
    ] = None,
    bootstrap: Annotated[
        list[str] | None,
        typer.Option(help="Full multiaddr of a node to join through; repeatable. [env: P2PKV_BOOTSTRAP]"),
    ] = None,
    bulk: Annotated[bool | None, typer.Option(help="Keep the fast TLS lane for blocks. [env: P2PKV_BULK]")] = None,
    bulk_port: Annotated[
        int | None, typer.Option(help="Port of that lane; 0 takes a free one. [env: P2PKV_BULK_PORT]")
    ] = None,
    mirror: Annotated[bool | None, typer.Option(help="Announce what was fetched. [env: P2PKV_MIRROR]")] = None,
    quota: Annotated[
        str | None,
        typer.Option(help="Bytes of blocks to keep, such as 50GiB; 0: as much as the disk has room for. [env: P2PKV_QUOTA]"),
    ] = None,
    upload_limit: Annotated[
        str | None,
        typer.Option(help="Bytes sent to all peers per second, such as 10MiB; 0: no limit. [env: P2PKV_UPLOAD_LIMIT]"),
    ] = None,
    upload_limit_per_peer: Annotated[
        str | None, typer.Option(help="The same for each peer. [env: P2PKV_UPLOAD_LIMIT_PER_PEER]")
    ] = None,
    web: Annotated[
        str | None,
        typer.Option(help="Loopback address of metrics and status page, such as 127.0.0.1:9464, or off. [env: P2PKV_WEB]"),
    ] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error. [env: P2PKV_LOG_LEVEL]")] = None,
    log_format: Annotated[
        str | None, typer.Option(help="text, or json: one object a line on stderr. [env: P2PKV_LOG_FORMAT]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the ready line and errors as JSON.")] = False,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Run a p2pkv node: it stores, serves and announces KV caches, and fetches for the programs on this machine.

    When it is ready it prints its addresses; give one of them to other nodes as --bootstrap. Ctrl-C ends it within two
    seconds, a second Ctrl-C at once; whatever was being fetched resumes where it stopped.

    With `config show` or `config check` behind the same options it shows or checks the settings instead.
    """
    if version:
        typer.echo(__version__)
        raise typer.Exit
    flags = {name: value for name, value in locals().items() if name not in ("context", "config", "as_json", "version")}
    given: dict[str, Any] = {name: value for name, value in flags.items() if value not in (None, [])}
    if context.invoked_subcommand is not None:
        context.obj = config_command.CommandLine(given, config, as_json)
        return
    log_form = TEXT
    try:
        configuration = read_configuration(given, file=config)
        settings = configuration.config()
        log_form = settings.log_format
        start_logging(settings.log_level, log_form)
        for variable in configuration.stray:
            logger.warning("%s", variable)
        trio.run(_run, settings, as_json)
    except P2pkvError as error:
        if log_form == JSON and not as_json:
            logger.error("the node ends: %s", error)
        else:
            typer.echo(json.dumps({"error": error.to_dict()}) if as_json else f"p2pkv-node: {error}", err=True)
        raise SystemExit(error.exit_status) from None


app.add_typer(config_command.app, name="config")


async def _run(settings: NodeConfig, as_json: bool) -> None:
    stop, started, starting = trio.Event(), trio.Event(), trio.CancelScope()

    def ready(running: Node) -> None:
        started.set()
        # What was imported stays for good: without this, every full collection walks through all of it in mid-transfer.
        gc.collect()
        gc.freeze()
        if as_json:
            network = running.network
            text = json.dumps(
                {"ready": True, "peer_id": network.peer_id, "addresses": network.addresses, "web": running.web_url}
            )
        else:
            lines = [f"ready at {address}" for address in running.network.addresses]
            text = "\n".join([*lines, f"status page at {running.web_url}"] if running.web_url else lines)
        typer.echo(text)
        sys.stdout.flush()

    async def give_up() -> None:
        """End a start, in which an index may be made anew, as soon as it is told to stop."""
        await stop.wait()
        if not started.is_set():
            starting.cancel()

    with stop_on_signals(stop), starting:
        async with open_background() as nursery:
            nursery.start_soon(give_up)
            await run_daemon(settings, ready=ready, stop=stop)


def main() -> None:
    app()
