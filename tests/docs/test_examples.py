"""The Python examples of the pages compile, and those that are marked run as they stand.

``<!-- runs with a node -->`` or ``<!-- runs alone -->`` in front of a block marks it. They run in a folder that looks like a
checkout, with a tiny model in the place of the real one; those with a node find one on the default home.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from nacl.signing import SigningKey

from p2pkv.formats.did import encode_did
from p2pkv.store.home import HomeLayout
from p2pkv.store.publisher_key import write_publisher_key
from p2pkv.store.trust_file import TrustFile
from tests.docs.pages import NAMES, read

BLOCK = re.compile(r"(?:^<!-- runs (?P<how>[^>]*) -->\n)?^```python\n(?P<code>.*?)^```", re.MULTILINE | re.DOTALL)
MODEL = "build/models/smollm2-135m"
DOCUMENT = "bench/demo/constitution.txt"
TEXT = "We the People of the United States, in Order to form a more perfect Union, establish Justice. " * 6


@dataclass(frozen=True)
class Example:
    """One fenced block of Python on a page; ``how`` says what it needs to run, and is empty for one that does not."""

    page: str
    number: int
    how: str
    code: str

    def compile(self) -> object:
        return compile(self.code, f"{self.page}, example {self.number}", "exec")

    def run(self) -> None:
        exec(self.code, {"__name__": "__main__"})  # noqa: S102 - the project's own page


EXAMPLES = [
    Example(page, number, match["how"] or "", match["code"])
    for page in NAMES
    for number, match in enumerate(BLOCK.finditer(read(page)), 1)
]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: f"{example.page}-{example.number}")
def test_an_example_compiles_and_its_mark_is_known(example: Example) -> None:
    example.compile()
    assert example.how in ("", "alone", "with a node")


def test_the_library_page_has_examples_of_both_kinds_and_no_unmarked_one() -> None:
    assert {example.how for example in EXAMPLES if example.page == "docs/python.md"} == {"alone", "with a node"}


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with model and text where a checkout has them, as the working folder; the home lies in it."""
    from tests.cli.checkpoint import save_checkpoint

    save_checkpoint(tmp_path / MODEL)
    (tmp_path / DOCUMENT).parent.mkdir(parents=True)
    (tmp_path / DOCUMENT).write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("P2PKV_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


# Running an example loads torch and starts nodes, which takes long on a busy machine.
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_examples_run_with_a_node(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from p2pkv_node.embedded import embedded_node

    examples = [example for example in EXAMPLES if example.how == "with a node"]
    publishes = [example for example in examples if ".publish(" in example.code]
    layout = HomeLayout(checkout / "home")
    key = SigningKey.generate()
    write_publisher_key(layout.publisher_key, bytes(key))
    TrustFile(layout.trust).add(encode_did(bytes(key.verify_key)), "ourselves", 0)
    with embedded_node():
        # Publications first, so that the others have something to find.
        for example in [*publishes, *(example for example in examples if example not in publishes)]:
            example.run()
    assert f"hit {len(TEXT):,} of " in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.usefixtures("checkout")
@pytest.mark.parametrize(
    "example", [e for e in EXAMPLES if e.how == "alone"], ids=lambda example: f"{example.page}-{example.number}"
)
def test_an_example_runs_alone(example: Example) -> None:
    example.run()
