"""``p2pkv trust``: whose artifacts may be used here. Changes the home's trust file, with or without a daemon running."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from p2pkv.cli.artifacts import open_source
from p2pkv.cli.options import HomeOption, JsonOption, home_of, read_file, show_help
from p2pkv.cli.output import fields, reporting
from p2pkv.errors import FormatError, UsageError
from p2pkv.formats.did import decode_did
from p2pkv.formats.envelope import Envelope
from p2pkv.formats.statement import SignedStatement
from p2pkv.limits import MAX_STATEMENT_BYTES
from p2pkv.store.home import HomeLayout
from p2pkv.store.home_trust import HomeTrust
from p2pkv.store.survey import newest_sequence
from p2pkv.store.trust_file import TrustFile, rule_fields
from p2pkv.trust.policy import Decision
from p2pkv.trust.rules import ANYBODY, Action, Namespace, Rule
from p2pkv.units import plural

app = typer.Typer(
    invoke_without_command=True,
    callback=show_help,
    help="Say whose artifacts may be used here. By default nobody is trusted.",
    epilog="Example: p2pkv trust add did:key:z6Mk... --note 'the docs team'",
)

DidArgument = Annotated[str, typer.Argument(metavar="DID", help="A publisher, did:key:z6Mk..., as `p2pkv keygen` prints it.")]
AnyDidArgument = Annotated[str, typer.Argument(metavar="DID", help="A publisher, did:key:z6Mk..., or '*' for everybody.")]
ModelOption = Annotated[
    str | None, typer.Option("--model", metavar="ID", help="Only for this model id, 64 hexadecimal digits (`p2pkv inspect`).")
]
LicenceOption = Annotated[str | None, typer.Option("--licence", help="Only for artifacts with exactly this licence.")]
NamespaceOption = Annotated[Namespace | None, typer.Option("--namespace", help="Only for public, or for private artifacts.")]
NoteOption = Annotated[str, typer.Option("--note", help="Who that is, or why, for your own memory.")]


@app.command()
def add(
    did: DidArgument,
    model: ModelOption = None,
    licence: LicenceOption = None,
    namespace: NamespaceOption = None,
    note: NoteOption = "",
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Trust a publisher, for all that it signs or for a part of it.

    What it signed may be fetched and used from now on, also by a daemon that is running. Make sure that the name is
    really theirs: ask them by another way than the one that brought you the artifact.

    \b
    Example:
      p2pkv trust add did:key:z6MktwupdmLXVVqTzCw4i46r4uGyosGXRnR3XjN4Zq7oMMsw --note "the docs team"
    """
    _add(Action.ACCEPT, did, model, licence, namespace, note, home, as_json)


@app.command()
def reject(
    did: AnyDidArgument,
    model: ModelOption = None,
    licence: LicenceOption = None,
    namespace: NamespaceOption = None,
    note: NoteOption = "",
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Use nothing of a publisher, or nothing of a part of it, whatever other rules say.

    A rule that rejects wins over all that accept. For '*' it holds for every publisher.

    \b
    Example:
      p2pkv trust reject '*' --licence "CC-BY-NC-4.0" --note "not for our product"
    """
    _add(Action.REJECT, did, model, licence, namespace, note, home, as_json)


def _add(
    action: Action,
    did: str,
    model: str | None,
    licence: str | None,
    namespace: Namespace | None,
    note: str,
    home: Path | None,
    as_json: bool,
) -> None:
    with reporting(as_json) as output:
        rule = Rule(action, _publisher(did), parse_model(model), licence, namespace, note, int(time.time()))
        added = trust_file(home_of(home)).add_rule(rule)
        verb = "trusted" if action is Action.ACCEPT else "rejected"
        line = f"now {verb}: {_scope(rule)}" if added else f"{verb} already: {_scope(rule)}"
        output.result({"rule": rule_fields(rule), "added": added}, [line])


@app.command("list")
def show(home: HomeOption = None, as_json: JsonOption = False) -> None:
    """List the rules, in the order they were added. Their order does not matter: what one rejects, none can accept.

    \b
    Example:
      p2pkv trust list
    """
    with reporting(as_json) as output:
        rules = trust_file(home_of(home)).rules()
        lines = [f"{rule}  since {datetime.fromtimestamp(rule.added, UTC):%Y-%m-%d}  {rule.note}".rstrip() for rule in rules]
        output.result({"rules": [rule_fields(rule) for rule in rules]}, lines)
        if not any(rule.action is Action.ACCEPT for rule in rules):
            output.note("Nobody is trusted. Add a publisher with `p2pkv trust add DID`.")


@app.command()
def remove(
    did: AnyDidArgument,
    model: ModelOption = None,
    licence: LicenceOption = None,
    namespace: NamespaceOption = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take away the rules about a publisher: all of them, or those with the model, licence or namespace that is named.

    Whom no rule accepts is not trusted. What was fetched stays on the disk and is not used any more.

    \b
    Example:
      p2pkv trust remove did:key:z6MktwupdmLXVVqTzCw4i46r4uGyosGXRnR3XjN4Zq7oMMsw
    """
    with reporting(as_json) as output:
        wanted = parse_model(model)

        def unwanted(rule: Rule) -> bool:
            return (
                (wanted is None or wanted == rule.model)
                and (licence is None or licence == rule.licence)
                and (namespace is None or namespace is rule.namespace)
            )

        removed = trust_file(home_of(home)).remove(_publisher(did), unwanted)
        lines = [f"removed: {rule}" for rule in removed] or [f"no rule is about {did}"]
        output.result({"removed": [rule_fields(rule) for rule in removed]}, lines)


@app.command()
def hear(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A signed statement: of `p2pkv revoke --out`, `rotate --out`.")],
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take note of what a publisher says in a file: revocations, or the key that follows its own.

    The file may come from anybody, its signature is checked. Nodes hear of the same over the network; this is for those who
    have none, and for the publisher's node where the key is on another machine. Trusts nobody by itself.

    \b
    Example:
      p2pkv trust hear revocations.statement
    """
    with reporting(as_json) as output:
        data = read_file(file, MAX_STATEMENT_BYTES, advice="Name a file that `p2pkv revoke --out` wrote.")
        signed = SignedStatement.decode(data)
        news = HomeTrust(HomeLayout(home_of(home))).records.hear(signed)
        document = {"publisher": signed.publisher, "statement": signed.kind.value, "news": news}
        line = f"{'heard' if news else 'known already'}: {signed.kind.value} of {signed.publisher}"
        output.result(document, [line])


@app.command()
def explain(
    artifact: Annotated[
        str, typer.Argument(metavar="ARTIFACT", help="Manifest CID of an artifact in the home, or the file of an envelope.")
    ],
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show step by step why an artifact may be used here or not, and which command would change that.

    Looks at the rules, at what publishers took back as far as this home knows, and at the clock. Tells when this home last
    heard what the publisher takes back. Changes nothing, and needs neither a network nor a daemon. The exit status is 0
    whatever the decision is.

    \b
    Example:
      p2pkv trust explain bafyr4iabc...
    """
    with reporting(as_json) as output:
        place = home_of(home)
        source = open_source(artifact, place)
        source.cid.check(source.envelope)
        manifest = Envelope.decode(source.envelope).open()
        layout = HomeLayout(place)
        newest = newest_sequence(layout.index, manifest.publisher, manifest.last_chain_key)
        trust = HomeTrust(layout)
        decision = trust.judge(manifest, source.cid, time.time(), newest=newest)
        heard = trust.records.heard(manifest.publisher)
        document = {
            "manifest": str(source.cid),
            "publisher": manifest.publisher,
            "accepted": decision.accepted,
            "heard": int(heard) if heard is not None else None,
            "steps": [
                {
                    "check": step.check.value,
                    "passed": step.error is None,
                    "found": step.text,
                    "error": step.error.to_dict() if step.error is not None else None,
                }
                for step in decision.steps
            ],
        }
        output.result(document, _explanation(decision, manifest.publisher, heard))


def _explanation(decision: Decision, publisher: str, heard: float | None) -> list[str]:
    steps = [(step.check.value, f"{'no: ' if step.error is not None else ''}{step.text}") for step in decision.steps]
    last = "never" if heard is None else f"{datetime.fromtimestamp(heard, UTC):%Y-%m-%d %H:%M UTC}"
    lines = fields([("publisher", publisher), ("signature", "valid"), *steps, ("last heard of it", last)])
    if decision.accepted:
        return [*lines, f"accepted. To stop that: p2pkv trust reject {publisher}"]
    lines.append(f"refused, for {plural(len(decision.errors), 'reason')}. What to do:")
    return [*lines, *(f"  {error.advice} [{error.code}]" for error in decision.errors)]


def trust_file(home: Path) -> TrustFile:
    return TrustFile(HomeLayout(home).trust)


def parse_model(text: str | None) -> bytes | None:
    """Return the model id that ``--model`` names. Raises UsageError."""
    if text is None:
        return None
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise UsageError(
            f"{text!r} is no model id", advice="Name it by its 64 hexadecimal digits, as `p2pkv inspect` shows it."
        ) from None


def _publisher(text: str) -> str:
    """Check a publisher's name before any file is opened. Raises UsageError."""
    try:
        if text != ANYBODY:
            decode_did(text)
    except FormatError as error:
        raise UsageError(error.message, advice=error.advice) from None
    return text


def _scope(rule: Rule) -> str:
    return str(rule).removeprefix(f"{rule.action.value} ")
