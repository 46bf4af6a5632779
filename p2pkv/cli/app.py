"""The command ``p2pkv``: puts the commands together and turns usage errors into the project's own form.

Importing this module is cheap: torch, transformers and httpx are imported by the commands that use them, when they run.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

from p2pkv import __version__
from p2pkv.cli import (
    build,
    doctor,
    export,
    fetch,
    gc,
    generate,
    grant,
    import_car,
    inspect,
    key,
    keygen,
    namespace,
    peers,
    publish,
    renew,
    revoke,
    sign,
    status,
    trust,
    verify,
)
from p2pkv.cli.interrupts import handle_interrupts
from p2pkv.cli.options import show_help
from p2pkv.cli.output import Output
from p2pkv.errors import UsageError

# typer's own class for what is wrong with a command line; where it lies differs between its versions.
_TyperUsageError: type[Exception] = typer.BadParameter.__bases__[0]

app = typer.Typer(
    name="p2pkv",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help reads the same in a pipe, and costs no import of rich
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"p2pkv {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def p2pkv(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Share the KV caches of language models: compute a text's prefill once, load it anywhere, verified.

    \b
    Once per person:     p2pkv keygen
    Share a text:        p2pkv publish ./model book.txt --licence CC0-1.0
    Trust who shares:    p2pkv trust add did:key:z6Mk...
    Ask about the text:  p2pkv generate ./model --prompt-file book.txt --question "Who is Ishmael?"
    Mirror an artifact:  p2pkv fetch bafyr4i...
    Sign elsewhere:      p2pkv build ./model book.txt --out book.car; p2pkv sign book.car --out signed.car
    Carry it by hand:    p2pkv export bafyr4i... book.car; p2pkv import book.car
    Keep it, make room:  p2pkv pin bafyr4i...; p2pkv gc
    Find what is wrong:  p2pkv doctor

    Keygen, key, build, sign, join, revoke, rotate, inspect, verify, trust, namespace, grant, grants and doctor work alone,
    export too where no node runs; the others talk to the p2pkv-node that keeps the same home. Every command takes --json, all
    but build and join --home, and each teaches with --help.

    \b
    Exit status: 0 done, 2 a wrong argument, key or model, 3 wrong bytes from a peer or publisher, 4 this machine, its
    daemon or the network, 5 your own rules refused, 130 interrupted, 1 a defect of p2pkv.
    """
    show_help(context)


app.command("keygen")(keygen.keygen)
app.add_typer(key.app, name="key")
app.command("build")(build.build)
app.command("sign")(sign.sign)
app.command("join")(sign.join)
app.command("publish")(publish.publish)
app.command("renew")(renew.renew)
app.command("announce")(renew.announce)
app.command("revoke")(revoke.revoke)
app.command("rotate")(revoke.rotate)
app.command("inspect")(inspect.inspect)
app.command("verify")(verify.verify)
app.add_typer(trust.app, name="trust")
app.add_typer(namespace.app, name="namespace")
app.command("grant")(grant.grant)
app.add_typer(grant.app, name="grants")
app.command("fetch")(fetch.fetch)
app.command("generate")(generate.generate)
app.command("export")(export.export)
app.command("import")(import_car.import_car)
app.command("pin")(gc.pin)
app.command("unpin")(gc.unpin)
app.command("pins")(gc.pins)
app.command("remove")(gc.remove)
app.command("gc")(gc.gc)
app.command("status")(status.status)
app.command("peers")(peers.peers)
app.command("doctor")(doctor.doctor)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit with its status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if os.environ.get("P2PKV_DEBUG"):
        logging.basicConfig(level=logging.DEBUG, stream=sys.stderr)
    else:
        # Commands say themselves what went wrong; the library's log lines would say it twice.
        logging.getLogger("p2pkv").addHandler(logging.NullHandler())
    with handle_interrupts():
        try:
            result = app(given, prog_name="p2pkv", standalone_mode=False)
        except _TyperUsageError as error:
            sys.exit(_show_usage_error(error, as_json="--json" in given))
    sys.exit(result if isinstance(result, int) else 0)


def _show_usage_error(error: Exception, *, as_json: bool) -> int:
    context = getattr(error, "ctx", None)
    message = str(getattr(error, "format_message", lambda: error)())
    path = getattr(context, "command_path", "p2pkv")
    usage = UsageError(message[:1].lower() + message[1:].rstrip("."), advice=f"Try `{path} --help`.")
    Output(as_json).error(usage)
    return usage.exit_status


if __name__ == "__main__":
    main()
