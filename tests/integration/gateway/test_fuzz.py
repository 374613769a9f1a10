"""Whatever is posted is answered with 200 or a named refusal, and never a 5xx."""

import asyncio
import json

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.gateway.app import build_app
from services.gateway.http_settings import HttpSettings
from services.gateway.schema import ChatRequest, TextRequest
from tests.support.fake_backend import MODEL_NAME, fake_backend

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-2, 20)
    | st.floats(0, 2)
    | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=6,
)
CONTENT = st.text(max_size=20) | st.lists(
    st.fixed_dictionaries({"type": st.just("text"), "text": st.text(max_size=8)}), max_size=2
)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user"]), "content": CONTENT}),
    min_size=1,
    max_size=3,
)
BASES = {
    "/v1/chat/completions": (ChatRequest, st.fixed_dictionaries({"messages": MESSAGES})),
    "/v1/completions": (
        TextRequest,
        st.fixed_dictionaries({"prompt": st.text(max_size=20) | st.lists(st.integers(0, 400))}),
    ),
}


@pytest.fixture(scope="module")
def app(tiny_folder):
    return build_app(fake_backend(tiny_folder), HttpSettings())


@pytest.mark.parametrize("path", list(BASES))
@settings(
    deadline=None,
    derandomize=True,
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_a_fuzzed_request_never_crashes(app, path, data):
    request_type, bases = BASES[path]
    names = sorted(set(request_type.model_fields) - {"model", "messages", "prompt"})
    fields = data.draw(st.dictionaries(st.sampled_from(names), VALUES, max_size=2))
    body = {"model": MODEL_NAME, **data.draw(bases), **fields}

    async def post() -> httpx.Response:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            return await client.post(path, content=json.dumps(body).encode("ascii"))

    response = asyncio.run(post())
    assert response.status_code in (200, 400)
    if response.status_code == 400:
        assert response.json()["error"]["message"]
    elif body.get("stream"):
        assert response.text.endswith("data: [DONE]\n\n")
