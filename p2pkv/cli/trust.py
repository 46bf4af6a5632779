"""``p2pkv trust``: whose artifacts may be used here. Changes the home's trust file, with or without a daemon running."""

from __future__ import annotations

import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from p2pkv.cli.options import HomeOption, JsonOption, home_of, show_help
from p2pkv.cli.output import reporting
from p2pkv.store.home import HomeLayout
from p2pkv.store.trust_file import TrustFile

app = typer.Typer(
    invoke_without_command=True,
    callback=show_help,
    help="Say whose artifacts may be used here. By default nobody is trusted.",
    epilog="Example: p2pkv trust add did:key:z6Mk... --note 'the docs team'",
)

DidArgument = Annotated[str, typer.Argument(metavar="DID", help="A publisher, did:key:z6Mk..., as `p2pkv keygen` prints it.")]


@app.command()
def add(
    did: DidArgument,
    note: Annotated[str, typer.Option(help="Who that is, for your own memory.")] = "",
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Trust a publisher.

    What it signed may be fetched and used from now on, also by a daemon that is running. Make sure that the name is
    really theirs: ask them by another way than the one that brought you the artifact.

    \b
    Example:
      p2pkv trust add did:key:z6MktwupdmLXVVqTzCw4i46r4uGyosGXRnR3XjN4Zq7oMMsw --note "the docs team"
    """
    with reporting(as_json) as output:
        added = trust_file(home_of(home)).add(did, note, int(time.time()))
        line = f"now trusted: {did}" if added else f"trusted already: {did}"
        output.result({"did": did, "note": note, "added": added}, [line])


@app.command("list")
def show(home: HomeOption = None, as_json: JsonOption = False) -> None:
    """List the trusted publishers, in the order they were added.

    \b
    Example:
      p2pkv trust list
    """
    with reporting(as_json) as output:
        publishers = trust_file(home_of(home)).list()
        lines = [
            f"{publisher.did}  since {datetime.fromtimestamp(publisher.added, UTC):%Y-%m-%d}  {publisher.note}".rstrip()
            for publisher in publishers
        ]
        output.result({"publishers": [asdict(publisher) for publisher in publishers]}, lines)
        if not publishers:
            output.note("Nobody is trusted. Add a publisher with `p2pkv trust add DID`.")


@app.command()
def remove(did: DidArgument, home: HomeOption = None, as_json: JsonOption = False) -> None:
    """Stop trusting a publisher. What was fetched stays on the disk and is not used any more.

    \b
    Example:
      p2pkv trust remove did:key:z6MktwupdmLXVVqTzCw4i46r4uGyosGXRnR3XjN4Zq7oMMsw
    """
    with reporting(as_json) as output:
        removed = trust_file(home_of(home)).remove(did)
        line = f"no longer trusted: {did}" if removed else f"was not trusted: {did}"
        output.result({"did": did, "removed": removed}, [line])


def trust_file(home: Path) -> TrustFile:
    return TrustFile(HomeLayout(home).trust)
