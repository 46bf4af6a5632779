"""Which hosts a request to the status page may name."""

from __future__ import annotations

import pytest

from p2pkv_node.web.guard import hosts_of


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "[::1]"])
def test_the_address_and_the_names_of_this_machine_with_the_port(host: str) -> None:
    names = {host, "localhost", "127.0.0.1", "[::1]"}
    assert hosts_of(host, 9464) == {f"{name}:9464" for name in names}


def test_the_port_of_http_may_be_left_out() -> None:
    """As browsers do."""
    assert hosts_of("127.0.0.1", 80) == {
        *("127.0.0.1", "localhost", "[::1]"),
        *("127.0.0.1:80", "localhost:80", "[::1]:80"),
    }
