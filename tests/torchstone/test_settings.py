"""What settings are refused, and with which words; what is derived from them."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchstone.errors import SetupError
from torchstone.settings import Settings


@pytest.mark.parametrize("name", ["..", ".", "/", "../../home", "a/b", "a\nb", "x" * 256])
def test_a_host_name_that_is_no_folder_of_its_own_is_refused(name: str) -> None:
    """The worker empties the folder of that name."""
    with pytest.raises(SetupError, match="TORCHSTONE_HOST_NAME: must be a name"):
        Settings.load(host_name=name)


@pytest.mark.parametrize("value", ["inf", "nan", "-1", "soon"])
def test_times_are_finite(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("TORCHSTONE_LEASE_S", value)
    with pytest.raises(SetupError, match="TORCHSTONE_LEASE_S: "):
        Settings.load()


@pytest.mark.parametrize("times", [{"lease_s": 3.0}, {"fence_s": 30.0}, {"heartbeat_s": 20.0}])
def test_a_lease_that_ends_before_its_holder_knows_is_refused(times: dict[str, float]) -> None:
    with pytest.raises(SetupError, match="_FENCE_S < _LEASE_S must hold"):
        Settings.load(**times)


def test_the_home_of_a_stranger_is_refused_in_words() -> None:
    with pytest.raises(SetupError, match="the data folder ~nobody-of-that-name/x"):
        Settings.load(data=Path("~nobody-of-that-name/x"))


@pytest.mark.parametrize(
    ("host", "url"), [("127.0.0.1", "http://127.0.0.1:80"), ("::1", "http://[::1]:80"), ("h", "http://h:80")]
)
def test_the_url_of_a_host_is_one(host: str, url: str) -> None:
    assert Settings(host=host, port=80).public_url == url
