"""`p2pkv-node config show` and `check` see what the daemon sees, say where it comes from, and touch nothing."""

from __future__ import annotations

import json
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from p2pkv.errors import EXIT_STATUS, Fault, UsageError
from p2pkv_node.config import Configuration, NodeConfig, Source, load_config, read_configuration
from p2pkv_node.config_command import as_dict, as_toml
from p2pkv_node.setting_values import KINDS
from tests.support.node_command import node_command

PEER = "/ip4/192.0.2.1/tcp/4101/p2p/12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp"
USAGE = EXIT_STATUS[Fault.LOCAL]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("home", "config", *KINDS):
        monkeypatch.delenv(f"P2PKV_{name.upper()}", raising=False)


def test_every_setting_of_the_daemon_has_a_kind() -> None:
    assert list(KINDS) == [field.name for field in fields(NodeConfig) if field.name != "home"]


def test_the_help_names_every_variable() -> None:
    text = " ".join(node_command("--help").stdout.split())
    for name in ("home", "config", *KINDS):
        assert f"[env: P2PKV_{name.upper()}]" in text


def test_show_names_every_setting_and_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "config.toml"
    file.write_text('bulk_port = 1\nlog_level = "error"\nupload_limit = "1KiB"\n')
    monkeypatch.setenv("P2PKV_LOG_LEVEL", "DEBUG")
    monkeypatch.setenv("P2PKV_BULK_PORT", "2")
    done = node_command("--home", tmp_path, "--bulk-port", 3, "--no-mirror", "config", "show", "--json")
    assert done.status == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["file"] == str(file)
    assert list(told["settings"]) == [field.name for field in fields(NodeConfig)]
    assert told["settings"]["home"] == {"value": str(tmp_path), "source": "flag", "place": "--home"}
    assert told["settings"]["bulk_port"] == {"value": 3, "source": "flag", "place": "--bulk-port"}
    assert told["settings"]["mirror"] == {"value": False, "source": "flag", "place": "--no-mirror"}
    assert told["settings"]["log_level"] == {"value": "debug", "source": "environment", "place": "P2PKV_LOG_LEVEL"}
    assert told["settings"]["upload_limit"] == {"value": 1024, "source": "file", "place": str(file)}
    assert told["settings"]["bulk"] == {"value": True, "source": "default", "place": None}
    lines = node_command("--home", tmp_path, "--bulk-port", 3, "config", "show").stdout.splitlines()
    assert f'# home = "{tmp_path}"  # flag --home' in lines
    assert "bulk_port = 3  # flag --bulk-port" in lines
    assert 'log_level = "debug"  # environment P2PKV_LOG_LEVEL' in lines
    assert f'upload_limit = 1024  # file "{file}"' in lines
    assert "bulk = true  # default" in lines


def test_home_and_file_may_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "other.toml"
    file.write_text("bulk = false\n")
    (tmp_path / "config.toml").write_text("not TOML")
    monkeypatch.setenv("P2PKV_HOME", str(tmp_path))
    monkeypatch.setenv("P2PKV_CONFIG", str(file))
    told = json.loads(node_command("--json", "config", "show").stdout)
    assert told["settings"]["home"] == {"value": str(tmp_path), "source": "environment", "place": "P2PKV_HOME"}
    assert told["settings"]["bulk"] == {"value": False, "source": "file", "place": str(file)}
    file.unlink()
    done = node_command("config", "check")
    assert done.status == USAGE
    assert f"there is no configuration file {file}" in done.stderr
    assert "Check P2PKV_CONFIG." in done.stderr


def test_check_names_every_fault_with_setting_place_and_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "config.toml"
    file.write_text('lsiten = []\nbulk_port = 70000\n\n[node]\nhome = "/x"\n')
    monkeypatch.setenv("P2PKV_MIRROR", "perhaps")
    monkeypatch.setenv("P2PKV_BOOTSTRAP", f"{PEER},/ip4/192.0.2.1/tcp/4101")
    command = ("--home", tmp_path, "--listen", "/ip4/127.0.0.1/udp/1", "--upload-limit", "fast")
    done = node_command(*command, "config", "check", "--json")
    assert done.status == USAGE
    told = json.loads(done.stdout)
    assert not told["ok"]
    assert [(fault["setting"], fault["source"], fault["place"]) for fault in told["faults"]] == [
        ("lsiten", "file", str(file)),
        ("bulk_port", "file", str(file)),
        ("node", "file", str(file)),
        ("bootstrap", "environment", "P2PKV_BOOTSTRAP"),
        ("mirror", "environment", "P2PKV_MIRROR"),
        ("listen", "flag", "--listen"),
        ("upload_limit", "flag", "--upload-limit"),
    ]
    assert {(fault["code"], fault["fault"]) for fault in told["faults"]} == {("usage", "local")}
    by_setting = {fault["setting"]: fault for fault in told["faults"]}
    assert by_setting["lsiten"]["advice"].startswith("Did you mean listen?")
    assert "a port up to 65535" in by_setting["bulk_port"]["advice"]
    assert "/p2p/<peer id>" in by_setting["bootstrap"]["message"]
    assert "/ip4/<address>/tcp/<port>" in by_setting["listen"]["message"]
    done = node_command(*command, "config", "check")
    assert (done.status, done.stdout) == (USAGE, "")
    assert [line.startswith("p2pkv-node: ") for line in done.stderr.splitlines()] == [True] * 7 + [False]
    assert done.stderr.splitlines()[-1] == "7 faults"


def test_show_and_daemon_refuse_with_the_first_fault_that_check_names(tmp_path: Path) -> None:
    command = ("--home", tmp_path / "home", "--json", "--log-level", "loud")
    checked = json.loads(node_command(*command, "config", "check").stdout)["faults"][0]
    for done in (node_command(*command, "config", "show"), node_command(*command)):
        assert (done.status, done.stdout) == (USAGE, "")
        error = json.loads(done.stderr)["error"]
        assert error == {key: checked[key] for key in error}
    assert not (tmp_path / "home").exists()


def test_neither_touches_anything(tmp_path: Path) -> None:
    home = tmp_path / "a" / "home"
    done = node_command("--home", home, "config", "check")
    assert done.status == 0
    assert done.stdout == f'no faults; home "{home}", no file\n'
    assert node_command("--home", home, "config", "show").status == 0
    assert list(tmp_path.iterdir()) == []


def test_check_names_variables_that_are_no_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("P2PKV_BULKPORT", "1")
    done = node_command("--home", tmp_path, "config", "check")
    assert (done.status, done.stdout) == (0, f'no faults; home "{tmp_path}", no file\n')
    assert "the variable P2PKV_BULKPORT is no setting and is ignored. Did you mean P2PKV_BULK_PORT?" in done.stderr
    told = json.loads(node_command("--home", tmp_path, "config", "check", "--json").stdout)
    assert (told["ok"], told["faults"]) == (True, [])
    assert told["stray"] == [{"name": "P2PKV_BULKPORT", "advice": "Did you mean P2PKV_BULK_PORT?"}]


def test_the_daemon_logs_variables_that_are_no_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("P2PKV_BULKPORT", "1")
    (tmp_path / "blocks").write_text("")
    assert (
        node_command("--home", tmp_path).status == EXIT_STATUS[Fault.ENVIRONMENT]
    )  # a file in the folder's place ends it early
    assert "P2PKV_BULKPORT is no setting" in caplog.text


def test_the_file_of_the_flag_wins_over_that_of_the_environment(tmp_path: Path) -> None:
    for name, port in (("flag", 1), ("variable", 2), ("config", 3)):
        (tmp_path / f"{name}.toml").write_text(f"bulk_port = {port}\n")
    environment = {"P2PKV_CONFIG": str(tmp_path / "variable.toml")}
    flags = {"home": tmp_path}
    assert load_config(flags, file=tmp_path / "flag.toml", environment=environment).bulk_port == 1
    assert load_config(flags, environment=environment).bulk_port == 2
    assert load_config(flags, environment={"P2PKV_CONFIG": ""}).bulk_port == 3


def test_a_home_of_nobody_is_a_fault_and_not_a_crash() -> None:
    with pytest.raises(UsageError, match=r"--home cannot be '~nobody-of-this-name/x'"):
        load_config({"home": "~nobody-of-this-name/x"}, environment={})


def test_the_group_without_a_command_shows_what_there_is() -> None:
    done = node_command("config")
    text = done.stdout + done.stderr
    assert "show" in text
    assert "check" in text


PORT = st.integers(0, 65_535)
ADDRESS = st.builds("/ip4/{}/tcp/{}".format, st.ip_addresses(v=4), PORT)
ANY_ADDRESS = ADDRESS | st.just("/unix/\N{OPEN FILE FOLDER}")  # beyond what JSON escapes in TOML's way
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "listen": st.lists(ADDRESS, min_size=1, max_size=3),
    "announce": st.lists(ANY_ADDRESS, min_size=1, max_size=3),
    "bootstrap": st.just([PEER]),
    "bulk": st.booleans(),
    "bulk_port": PORT,
    "mirror": st.booleans(),
    "quota": st.integers(0, 1 << 50),
    "upload_limit": st.integers(0, 1 << 40),
    "upload_limit_per_peer": st.integers(0, 1 << 40),
    "log_level": st.sampled_from(["debug", "info", "warning", "error"]),
    "log_format": st.sampled_from(["text", "json"]),
}
SOME = st.fixed_dictionaries({}, optional=VALUES)


def read(home: Path, file: dict[str, Any], environment: dict[str, Any], flags: dict[str, Any]) -> Configuration:
    (home / "config.toml").write_text(
        "".join(f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in file.items()), encoding="utf-8"
    )
    variables = {
        f"P2PKV_{name.upper()}": ",".join(value) if isinstance(value, list) else str(value)
        for name, value in environment.items()
    }
    return read_configuration({"home": home, **flags}, environment=variables)


@given(file=SOME, environment=SOME, flags=SOME)
def test_flags_beat_environment_beats_file_beats_default(
    file: dict[str, Any], environment: dict[str, Any], flags: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    configuration = read(tmp_path_factory.mktemp("home"), file, environment, flags)
    assert configuration.faults == ()
    for setting in configuration.settings[1:]:
        sources = ((Source.FLAG, flags), (Source.ENVIRONMENT, environment), (Source.FILE, file))
        winner = next(((source, said) for source, said in sources if setting.name in said), None)
        assert setting.source is (winner[0] if winner else Source.DEFAULT)
        if winner:
            value = winner[1][setting.name]
            assert setting.value == (tuple(value) if isinstance(value, list) else value)
        assert bool(setting.place) is (winner is not None)


@given(file=SOME, flags=SOME)
def test_what_is_shown_is_a_file_that_says_the_same(
    file: dict[str, Any], flags: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    home = tmp_path_factory.mktemp("home")
    configuration = read(home, file, {}, flags)
    text = as_toml(configuration)
    (home / "shown.toml").write_text(text, encoding="utf-8")
    again = load_config({"home": home}, file=home / "shown.toml", environment={})
    assert again == configuration.config()
    told = as_dict(configuration)["settings"]
    assert tomllib.loads(text) == json.loads(json.dumps({name: told[name]["value"] for name in KINDS}))


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=5,
)


@settings(deadline=None)
@given(name=st.sampled_from(sorted(KINDS)), value=ANYTHING | st.lists(st.text(alphabet="/ip46tcp2.:")))
def test_whatever_is_given_is_a_value_or_a_named_fault(name: str, value: Any) -> None:
    configuration = read_configuration({"home": Path("/nowhere"), name: value}, environment={})
    for fault in configuration.faults:
        assert (fault.name, fault.source) == (name, Source.FLAG)
        assert fault.error.advice
        assert name in fault.error.message
        assert fault.place == f"--{'no-' if value is False else ''}{name.replace('_', '-')}"


@given(text=st.text())
def test_whatever_the_environment_says_is_a_value_or_a_named_fault(text: str) -> None:
    environment = {f"P2PKV_{name.upper()}": text for name in KINDS}
    for fault in read_configuration({"home": Path("/nowhere")}, environment=environment).faults:
        assert (fault.source, fault.place) == (Source.ENVIRONMENT, f"P2PKV_{fault.name.upper()}")
        assert fault.place in fault.error.message
