import pytest

from common.errors import ConfigError
from services.cli.bench_serve_client import Target
from services.cli.chat import HttpChatServer
from services.cli.server_url import ServerUrl, parse_server_url


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("http://127.0.0.1:8000/v1", ServerUrl("http", "127.0.0.1", 8000, "/v1")),
        ("https://server", ServerUrl("https", "server", 443, "")),
        ("http://[::1]", ServerUrl("http", "::1", 80, "")),
        ("http://server:0", ServerUrl("http", "server", 0, "")),
    ],
)
def test_an_address_is_read(url: str, found: ServerUrl) -> None:
    assert parse_server_url(url, "http", "https") == found


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:99999", "http://server:x", "http://[::1", "ftp://server", "server"]
)
def test_what_is_no_address_is_refused_by_name(url: str) -> None:
    for use in (Target, lambda given: HttpChatServer(given, None, None)):
        with pytest.raises(ConfigError) as caught:
            use(url)
        assert str(caught.value).startswith(f"{url} is no http://")
