"""Version, load, probes, docs; HEAD, content types, kept connections; API keys."""

import asyncio
import json
import re
from html.parser import HTMLParser
from importlib.metadata import version

import httpx
import pytest

from services.gateway.fake_backend import FakeBehaviour
from services.gateway.http_settings import HttpSettings
from tests.support.fake_backend import MODEL_NAME, asgi_client, fake_backend, served
from tests.support.json_schema import schema_problems

CHAT_PATH, TEXT_PATH = "/v1/chat/completions", "/v1/completions"
TEXT = {"model": MODEL_NAME, "prompt": "hello"}
GET_PATHS = {
    "/v1/models": "ModelList",
    f"/v1/models/{MODEL_NAME}": "ModelCard",
    "/health": "Healthy",
    "/ping": "Healthy",
    "/load": "Load",
    "/version": "Version",
}
PAGES = ("/metrics", "/docs", "/openapi.json")
KEYS = HttpSettings(api_keys=frozenset({"first-key", "second-këy"}))
DEADLINE_SECONDS = 10


@pytest.mark.parametrize(("path", "schema"), GET_PATHS.items())
async def test_an_answer_is_as_the_openapi_document_says(tiny_folder, path, schema):
    async with asgi_client(fake_backend(tiny_folder)) as client:
        document = (await client.get("/openapi.json")).json()
        response = await client.get(path)
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    assert schema_problems(document, schema, response.json()) == []
    named = "/v1/models/{model_id}" if path.endswith(MODEL_NAME) else path
    shown = document["paths"][named]["get"]["responses"]["200"]["content"]["application/json"]
    assert shown["schema"]["$ref"] == f"#/components/schemas/{schema}"


async def test_the_version_is_the_package_s(tiny_folder):
    async with asgi_client(fake_backend(tiny_folder)) as client:
        assert (await client.get("/version")).json() == {"version": version("flowpath")}
        info = (await client.get("/openapi.json")).json()["info"]
    assert info["version"] == version("flowpath")


async def test_ping_is_health_under_another_name(tiny_folder):
    backend = fake_backend(tiny_folder)
    backend.readiness_answer = (False, "no decode worker")
    async with asgi_client(backend) as client:
        document = (await client.get("/openapi.json")).json()
        for path in ("/ping", "/health"):
            response = await client.get(path)
            assert (response.status_code, response.json()["reason"]) == (503, "no decode worker")
            assert schema_problems(document, "Unhealthy", response.json()) == []


async def test_load_counts_each_prompt_in_work(tiny_folder):
    backend = fake_backend(tiny_folder, behaviour=FakeBehaviour(num_tokens_before_wait=0))
    async with served(backend) as port, asyncio.TaskGroup() as group:
        base = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=base) as client, asyncio.timeout(DEADLINE_SECONDS):
            request = {**TEXT, "prompt": ["hello", "there"]}
            asked = group.create_task(client.post(TEXT_PATH, json=request))
            await backend.wait_for_submission(1)
            assert (await client.get("/load")).json() == {"server_load": 2}
            backend.behaviour.resume.set()
            assert (await asked).status_code == 200
            while (await client.get("/load")).json() != {"server_load": 0}:
                pass


async def test_the_bare_address_leads_to_the_docs(tiny_folder):
    async with asgi_client(fake_backend(tiny_folder)) as client:
        response = await client.get("/")
        assert response.status_code == 307
        assert response.headers["location"] == "docs"
        assert "/v1" in response.text
        page = await client.get("/", follow_redirects=True)
        assert (page.status_code, page.url.path) == (200, "/docs")
        assert (await client.head("/")).status_code == 307
        assert "/" not in (await client.get("/openapi.json")).json()["paths"]


@pytest.mark.parametrize("path", ["/nowhere", "/v1", "/v1/", "/docs/"])
async def test_a_path_that_does_not_exist_is_told_where_the_others_are(tiny_folder, path):
    async with asgi_client(fake_backend(tiny_folder)) as client:
        response = await client.get(path)
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (404, "invalid_request_error")
    assert error["message"] == f"GET {path}: Not Found; /docs lists what there is"


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.targets: list[str] = []
        self.ids: set[str] = set()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        for name, value in attrs:
            if name in ("src", "href"):
                self.targets.append(value)
            if name == "id":
                self.ids.add(value)


async def test_the_docs_page_shows_every_route_and_needs_no_other_host(tiny_folder):
    async with asgi_client(fake_backend(tiny_folder)) as client:
        document = (await client.get("/openapi.json")).json()
        response = await client.get("/docs")
    page = response.text
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in response.headers["content-security-policy"]
    links = _Links()
    links.feed(page)
    assert not links.tags & {"script", "link", "img", "iframe"}
    assert "http:" not in page
    assert "https:" not in page
    assert {t.removeprefix("#") for t in links.targets} - {"openapi.json"} <= links.ids
    assert all(f"<code>{path}</code>" in page for path in document["paths"])
    assert set(document["components"]["schemas"]) <= links.ids
    for field in ("max_completion_tokens", "best_of", "prompt_cache_key"):
        assert f"<code>{field}</code>" in page


async def test_the_document_refers_to_nothing_that_is_not_there(tiny_folder):
    async with asgi_client(fake_backend(tiny_folder)) as client:
        document = (await client.get("/openapi.json")).json()
    names = set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(document)))
    assert names <= set(document["components"]["schemas"])
    ids = [found["operationId"] for path in document["paths"].values() for found in path.values()]
    assert len(ids) == len(set(ids))
    assert {"422"}.isdisjoint(
        status
        for path in document["paths"].values()
        for found in path.values()
        for status in found["responses"]
    )


@pytest.mark.parametrize("path", [*GET_PATHS, *PAGES])
async def test_head_is_get_without_a_body_on_a_kept_connection(tiny_folder, path):
    async with served(fake_backend(tiny_folder)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        raw = f"HEAD {path} HTTP/1.1\r\nHost: g\r\n\r\nGET /version HTTP/1.1\r\nHost: g\r\n\r\n"
        async with asyncio.timeout(DEADLINE_SECONDS):
            writer.write(raw.encode())
            head = await reader.readuntil(b"\r\n\r\n")
            second = await reader.readuntil(b"\r\n\r\n")
            body = await reader.readexactly(int(re.search(rb"length: (\d+)", second)[1]))
        writer.close()
        await writer.wait_closed()
    assert head.startswith(b"HTTP/1.1 200 ")
    assert int(re.search(rb"content-length: (\d+)", head)[1]) > 0
    assert json.loads(body) == {"version": version("flowpath")}


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", CHAT_PATH, "POST"),
        ("HEAD", TEXT_PATH, "POST"),
        ("POST", "/health", "GET"),
        ("OPTIONS", TEXT_PATH, "POST"),
        ("DELETE", "/v1/models", "GET"),
    ],
)
async def test_a_wrong_method_is_405_and_says_what_is_allowed(tiny_folder, method, path, allowed):
    async with asgi_client(fake_backend(tiny_folder)) as client:
        response = await client.request(method, path)
    assert response.status_code == 405
    assert response.headers["allow"] == allowed
    if method != "HEAD":
        assert response.json()["error"]["type"] == "invalid_request_error"


async def test_no_answer_lets_a_foreign_page_read_it(tiny_folder):
    origin = {"origin": "http://elsewhere.example"}
    async with asgi_client(fake_backend(tiny_folder)) as client:
        asked = await client.post(TEXT_PATH, json=TEXT, headers=origin)
        preflight = await client.options(
            TEXT_PATH, headers={**origin, "access-control-request-method": "POST"}
        )
    assert asked.status_code == 200
    for response in (asked, preflight):
        assert not [name for name in response.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        (None, 200),
        ("application/json", 200),
        ("Application/JSON; charset=UTF-8", 200),
        ('application/json; charset="utf-8"', 200),
        ("application/json; charset=utf-8; x=y", 200),
        ('application/json ; x="; charset=latin-1"; charset=utf-8;', 200),
        ("application/json; x=charset=latin-1", 200),
        ("application/json; charset=latin-1", 415),
        ('application/json; x="y"; charset="latin-1"', 415),
        ("application/json; charset=utf-8; charset=latin-1", 415),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=x", 415),
        ("", 415),
    ],
)
@pytest.mark.parametrize("path", [TEXT_PATH, "/tokenize"])
async def test_a_body_must_be_json_by_its_type(tiny_folder, path, content_type, status):
    headers = {} if content_type is None else {"content-type": content_type}
    async with asgi_client(fake_backend(tiny_folder)) as client:
        response = await client.post(path, content=json.dumps(TEXT), headers=headers)
    assert response.status_code == status
    if status == 415:
        assert "json" in response.text or "utf-8" in response.text


async def test_another_expectation_than_100_continue_is_not_met(tiny_folder):
    async with asgi_client(fake_backend(tiny_folder)) as client:
        for expected, status in (("200-ok", 417), ("100-Continue", 200)):
            response = await client.post(TEXT_PATH, json=TEXT, headers={"expect": expected})
            assert response.status_code == status
            assert ("error" in response.json()) == (status == 417)


async def test_pages_are_counted_under_their_names(tiny_folder):
    async with asgi_client(fake_backend(tiny_folder)) as client:
        for path in ("/openapi.json", "/docs", "/nowhere"):
            await client.get(path)
        page = (await client.get("/metrics")).text
    counted = re.findall(r'flowpath_http_requests_total{route="([^"]+)"', page)
    assert sorted(counted) == ["/docs", "/openapi.json", "unmatched"]


async def test_a_compressed_body_is_refused(tiny_folder):
    async with asgi_client(fake_backend(tiny_folder)) as client:
        for encoding, status in (("gzip", 415), ("identity", 200)):
            headers = {"content-encoding": encoding}
            assert (await client.post(TEXT_PATH, json=TEXT, headers=headers)).status_code == status


@pytest.mark.parametrize(
    ("path", "status"), [(TEXT_PATH, 415), ("/nowhere", 404), ("/health", 405)]
)
async def test_a_connection_lives_on_after_a_refusal_with_an_unread_body(tiny_folder, path, status):
    body = b"x" * 100_000
    first = (
        f"POST {path} HTTP/1.1\r\nHost: g\r\nContent-Type: text/plain\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    async with served(fake_backend(tiny_folder)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        async with asyncio.timeout(DEADLINE_SECONDS):
            writer.write(first.encode() + body + b"GET /health HTTP/1.1\r\nHost: g\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(re.search(rb"content-length: (\d+)", head)[1]))
            second = await reader.readuntil(b"\r\n\r\n")
        writer.close()
        await writer.wait_closed()
    assert head.startswith(f"HTTP/1.1 {status} ".encode())
    assert second.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "path", ["/", *GET_PATHS, *PAGES, CHAT_PATH, TEXT_PATH, "/tokenize", "/detokenize", "/nowhere"]
)
async def test_without_a_key_only_probes_and_metrics_answer(tiny_folder, path):
    async with asgi_client(fake_backend(tiny_folder), KEYS) as client:
        response = await client.get(path)
    if path in ("/health", "/ping", "/metrics"):
        assert response.status_code == 200
        return
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.headers["x-request-id"].startswith("req-")
    assert response.json()["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (b"Bearer first-key", 200),
        (b"bearer  first-key ", 200),
        ("Bearer second-këy".encode(), 200),
        (b"Bearer first-ke", 401),
        (b"Bearer first-keyy", 401),
        (b"Bearer ", 401),
        (b"Bearer", 401),
        (b"", 401),
        (b"first-key", 401),
        (b"Basic first-key", 401),
        (b"Bearer \xff\xfe", 401),
    ],
)
async def test_a_key_is_taken_when_it_is_one_of_ours(tiny_folder, header, status, capsys):
    async with asgi_client(fake_backend(tiny_folder), KEYS) as client:
        headers = {b"authorization": header}
        response = await client.post(TEXT_PATH, json=TEXT, headers=headers)
    assert response.status_code == status
    assert "first-ke" not in capsys.readouterr().out + response.text


async def test_the_document_says_where_a_key_is_needed(tiny_folder):
    async with asgi_client(fake_backend(tiny_folder), KEYS) as client:
        headers = {"authorization": "Bearer first-key"}
        document = (await client.get("/openapi.json", headers=headers)).json()
    async with asgi_client(fake_backend(tiny_folder)) as client:
        open_document = (await client.get("/openapi.json")).json()
    assert document["paths"][TEXT_PATH]["post"]["security"] == [{"ApiKey": []}]
    assert "401" in document["paths"]["/version"]["get"]["responses"]
    assert "security" not in document["paths"]["/health"]["get"]
    assert "securitySchemes" not in open_document["components"]


def test_settings_show_no_keys():
    assert "first-key" not in repr(KEYS)
