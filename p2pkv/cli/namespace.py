"""``p2pkv namespace``: the secrets in which private artifacts are published."""

from __future__ import annotations

import secrets
from typing import Annotated

import typer

from p2pkv.artifact.private import NAMESPACE_BYTES
from p2pkv.cli.options import HomeOption, JsonOption, home_of, show_help
from p2pkv.cli.output import fields, reporting
from p2pkv.store.namespaces import create_namespace, list_namespaces

app = typer.Typer(
    invoke_without_command=True,
    callback=show_help,
    help="Make the secrets in which private artifacts are published.",
    epilog="Example: p2pkv namespace create team",
)


@app.command()
def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name for you alone: small letters, digits, dots, - and _.")],
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a namespace: a secret that only those have who publish in it.

    Private artifacts of one namespace share what their texts have in common; those of two share nothing, and nobody without
    the secret can find out by guessing what a text is. Readers do not need it: they are granted single artifacts with
    `p2pkv grant`. Whoever has the file can open all that was published in the namespace: keep it as you keep the key.

    \b
    Example:
      p2pkv namespace create team
    """
    with reporting(as_json) as output:
        path = create_namespace(home_of(home), name, secrets.token_bytes(NAMESPACE_BYTES))
        output.result({"namespace": name, "file": str(path)}, fields([("namespace", name), ("file", str(path))]))


@app.command("list")
def show(home: HomeOption = None, as_json: JsonOption = False) -> None:
    """List the namespaces of this home.

    \b
    Example:
      p2pkv namespace list
    """
    with reporting(as_json) as output:
        names = list_namespaces(home_of(home))
        output.result({"namespaces": names}, names)
        if not names:
            output.note("There are none. Make one with `p2pkv namespace create NAME`.")
