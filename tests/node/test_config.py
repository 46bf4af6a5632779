"""The daemon's configuration: which source wins, and that every setting that is not possible is named with its source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from p2pkv.errors import UsageError
from p2pkv.units import GIB, MIB
from p2pkv_node.config import DEFAULT_LISTEN, NodeConfig, load_config, read_configuration
from p2pkv_node.setting_values import KINDS

A, B, C = "/ip4/127.0.0.1/tcp/1", "/ip4/127.0.0.1/tcp/2", "/ip4/127.0.0.1/tcp/3"


def load(
    home: Path, *, flags: dict[str, Any] | None = None, text: str | None = None, env: dict[str, str] | None = None
) -> NodeConfig:
    if text is not None:
        (home / "config.toml").write_text(text)
    return load_config({"home": home, **(flags or {})}, environment=env or {})


def test_defaults(tmp_path: Path) -> None:
    assert load(tmp_path) == NodeConfig(tmp_path)
    assert NodeConfig(tmp_path) == NodeConfig(tmp_path, DEFAULT_LISTEN, (), (), True, 0, True, 0, 0, 0, "off", "info", "text")


def test_each_source_wins_over_the_one_before(tmp_path: Path) -> None:
    text = f'listen = ["{A}"]\nbulk_port = 1\nlog_level = "error"\nmirror = false\n'
    env = {"P2PKV_LISTEN": B, "P2PKV_BULK_PORT": "2", "P2PKV_UNRELATED": "x"}
    found = load(tmp_path, text=text, env=env, flags={"listen": [C]})
    assert found == NodeConfig(tmp_path, listen=(C,), bulk_port=2, log_level="error", mirror=False)
    found = load(tmp_path, text=text, env=env)
    assert found.listen == (B,)
    assert load(tmp_path, text=text).listen == (A,)


def test_the_environment_has_lists_by_commas_and_flags_by_words(tmp_path: Path) -> None:
    env = {"P2PKV_LISTEN": f"{A},{B},", "P2PKV_BULK": "off", "P2PKV_MIRROR": "Yes", "P2PKV_LOG_LEVEL": "DEBUG"}
    found = load(tmp_path, env=env)
    assert (found.listen, found.bulk, found.mirror, found.log_level) == ((A, B), False, True, "debug")


@pytest.mark.parametrize(
    ("text", "value"), [("0", 0), ("1000000", 1_000_000), ("10MiB", 10 * MIB), ("1.5 kib", 1536), ("2GiB", 2 * GIB)]
)
def test_limits_are_numbers_of_bytes_or_sizes(tmp_path: Path, text: str, value: int) -> None:
    assert load(tmp_path, env={"P2PKV_UPLOAD_LIMIT": text}).upload_limit == value
    assert load(tmp_path, flags={"upload_limit_per_peer": text}).upload_limit_per_peer == value
    assert load(tmp_path, text=f'upload_limit = "{text}"\nupload_limit_per_peer = 5\n').upload_limit_per_peer == 5


@pytest.mark.parametrize(("word", "value"), [("1", True), ("TRUE", True), ("on", True), ("0", False), ("no", False)])
def test_words_for_flags(tmp_path: Path, word: str, value: bool) -> None:
    assert load(tmp_path, env={"P2PKV_BULK": word}).bulk is value


def test_a_named_file_is_read_instead_and_has_to_be_there(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("bulk_port = 1\n")
    other = tmp_path / "other.toml"
    with pytest.raises(UsageError, match=r"no configuration file .*other\.toml"):
        load_config({"home": tmp_path}, file=other, environment={})
    other.write_text("bulk_port = 2\n")
    assert load_config({"home": tmp_path}, file=other, environment={}).bulk_port == 2


def test_the_home_is_absolute_and_knows_the_tilde(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_config({"home": "~/here"}, environment={}).home == tmp_path / "here"
    assert load_config({}, environment={"P2PKV_HOME": "~/there"}).home == tmp_path / "there"


BAD: list[tuple[str, Any, str]] = [
    ("listen", "not a list", '"not a list"'),
    ("listen", [1], "[1]"),
    ("listen", ["nonsense"], '["nonsense"]'),
    ("listen", ["/ip4/127.0.0.1/udp/1"], '["/ip4/127.0.0.1/udp/1"]'),
    ("announce", ["/ip4/127.0.0.1/tcp/70000"], '["/ip4/127.0.0.1/tcp/70000"]'),
    ("announce", ["/unix/a\x7f"], '["/unix/a\\u007f"]'),
    ("bootstrap", [A], f'["{A}"]'),
    ("bootstrap", True, "true"),
    ("announce", {"a": "b"}, '{a = "b"}'),
    ("bulk", "perhaps", '"perhaps"'),
    ("bulk", 2, "2"),
    ("mirror", [], "[]"),
    ("bulk_port", -1, "-1"),
    ("bulk_port", 65536, "65536"),
    ("bulk_port", "http", '"http"'),
    ("bulk_port", True, "true"),
    ("bulk_port", 1.5, "1.5"),
    ("upload_limit", "fast", '"fast"'),
    ("upload_limit", -1, "-1"),
    ("upload_limit", True, "true"),
    ("upload_limit_per_peer", "10MB", '"10MB"'),
    ("upload_limit_per_peer", "", '""'),
    ("upload_limit_per_peer", "1e9", '"1e9"'),
    ("log_level", "loud", '"loud"'),
    ("log_level", 3, "3"),
    ("log_format", "xml", '"xml"'),
    ("log_format", True, "true"),
    ("lsiten", [A], f'["{A}"]'),
    ("home", "/elsewhere", '"/elsewhere"'),
]


@pytest.mark.parametrize(("name", "value", "toml"), BAD)
def test_a_bad_setting_in_the_file(tmp_path: Path, name: str, value: Any, toml: str) -> None:
    with pytest.raises(UsageError) as caught:
        load(tmp_path, text=f"{name} = {toml}\n")
    assert "config.toml" in caught.value.message
    assert name in caught.value.message
    assert (caught.value.advice == KINDS[name].advice) if name in KINDS else ("bootstrap, bulk" in caught.value.advice)


@pytest.mark.parametrize(("name", "value", "toml"), [case for case in BAD if case[0] != "home"])
def test_a_bad_setting_on_the_command_line(tmp_path: Path, name: str, value: Any, toml: str) -> None:
    with pytest.raises(UsageError) as caught:
        load(tmp_path, flags={name: value})
    assert "the command line" in caught.value.message
    assert name in caught.value.message


@pytest.mark.parametrize(
    ("variable", "text"),
    [("P2PKV_BULK", "perhaps"), ("P2PKV_MIRROR", ""), ("P2PKV_BULK_PORT", "65536"), ("P2PKV_LOG_LEVEL", "loud")],
)
def test_a_bad_setting_in_the_environment(tmp_path: Path, variable: str, text: str) -> None:
    with pytest.raises(UsageError) as caught:
        load(tmp_path, env={variable: text})
    assert "the environment" in caught.value.message
    assert variable.removeprefix("P2PKV_").lower() in caught.value.message
    assert repr(text) in caught.value.message


@pytest.mark.parametrize(
    "content", [b"listen = [", b"a = 1\na = 2", b"\xff\xfe", b"log_level = \x00", b"a = " + b"[" * 100_000], ids=range(5)
)
def test_a_file_that_is_not_toml(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.toml").write_bytes(content)
    with pytest.raises(UsageError, match=r"cannot read .*config\.toml"):
        load(tmp_path)


def test_a_number_without_end_is_a_fault_and_not_a_crash(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="bulk_port"):
        load(tmp_path, env={"P2PKV_BULK_PORT": "1" * 5000})


def test_a_file_that_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.toml").mkdir()
    with pytest.raises(UsageError, match=r"cannot read .*config\.toml"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["bulk_port", "quota", "web", "mirror", "listen", "log_level", "lsiten"])
@pytest.mark.parametrize("value", ["0x" + "f" * 5000, "[[0b" + "1" * 20_000 + "]]", "{a = 0o" + "7" * 9000 + "}"])
def test_a_number_that_python_cannot_show_is_a_fault_and_not_a_crash(tmp_path: Path, name: str, value: str) -> None:
    with pytest.raises(UsageError) as caught:
        load(tmp_path, text=f"{name} = {value}\n")
    assert name in caught.value.message
    assert "config.toml" in caught.value.message


def test_a_variable_that_is_no_setting_is_named_and_ignored(tmp_path: Path) -> None:
    env = {"P2PKV_LSITEN": A, "P2PKV_UNRELATED": "x", "P2PKV_DEBUG": "1", "P2PKV_CONFIG": "", "P2PKV_BULK": "off", "PATH": ""}
    found = read_configuration({"home": tmp_path}, environment=env)
    assert found.faults == ()
    assert found.config() == NodeConfig(tmp_path, bulk=False)
    assert [variable.name for variable in found.stray] == ["P2PKV_LSITEN", "P2PKV_UNRELATED"]
    assert found.stray[0].advice == "Did you mean P2PKV_LISTEN?"
    assert "P2PKV_BULK, P2PKV_BULK_PORT, P2PKV_CONFIG, P2PKV_DEBUG, P2PKV_HOME" in found.stray[1].advice
