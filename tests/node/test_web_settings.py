"""The setting ``web``: a loopback address with a port, or off, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2pkv.errors import UsageError
from p2pkv_node.config import NodeConfig, load_config
from p2pkv_node.setting_values import OFF


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("127.0.0.1:9464", "127.0.0.1:9464"),
        ("127.8.8.8:0", "127.8.8.8:0"),
        ("localhost:80", "127.0.0.1:80"),
        ("LocalHost:080", "127.0.0.1:80"),
        ("[::1]:9464", "[::1]:9464"),
        ("[0:0::1]:65535", "[::1]:65535"),
        ("off", OFF),
        ("OFF", OFF),
    ],
)
def test_loopback_or_off(tmp_path: Path, text: str, value: str) -> None:
    assert NodeConfig(tmp_path).web == OFF
    assert load_config({"home": tmp_path, "web": text}, environment={}).web == value
    assert load_config({"home": tmp_path}, environment={"P2PKV_WEB": text}).web == value
    (tmp_path / "config.toml").write_text(f'web = "{text}"\n')
    assert load_config({"home": tmp_path}, environment={}).web == value


@pytest.mark.parametrize(
    "text",
    [
        *("", "on", "true", "9464", ":9464", "127.0.0.1", "127.0.0.1:", "127.0.0.1:65536", "127.0.0.1:-1", "127.0.0.1:http"),
        *("::1:9464", "[127.0.0.1]:9464", "[::1%lo]:9464", "[::ffff:127.0.0.1]:9464", "[::1:9464", "localhost.:9464"),
        *("0.0.0.0:9464", "[::]:9464", "192.0.2.1:9464", "[2001:db8::1]:9464", "10.0.0.1:9464", "example.org:9464"),
        *("http://127.0.0.1:9464", "127.0.0.1:9464/", "127.1:9464", "2130706433:9464", "127.0.0.1:9464\n", "127.0.0.1:٣"),
    ],
)
def test_anything_else_is_a_fault_with_advice(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_config({"home": tmp_path}, environment={"P2PKV_WEB": text})
    assert "P2PKV_WEB" in caught.value.message
    assert "127.0.0.1:9464" in caught.value.advice
    assert "ssh" in caught.value.advice


def test_an_address_that_others_reach_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"0\.0\.0\.0 is not a loopback address"):
        load_config({"home": tmp_path, "web": "0.0.0.0:9464"}, environment={})
