from starlette.responses import PlainTextResponse
from starlette.types import Message

from services.gateway.head_method import HeadAsGet


async def answered(method: str) -> tuple[dict, list[Message]]:
    scope = {"type": "http", "method": method}
    seen = {}
    messages = []

    async def app(inner, receive, send):
        seen.update(inner)
        inner["route"] = "found"
        await PlainTextResponse("hello")(inner, receive, send)

    async def send(message):
        messages.append(message)

    await HeadAsGet(app)(scope, None, send)
    assert scope == {"type": "http", "method": method, "route": "found"}
    return seen, messages


async def test_head_is_served_as_get_and_its_body_is_left_out():
    of_get, of_head = await answered("GET"), await answered("HEAD")
    assert of_head[0] == of_get[0]
    assert of_head[1][0] == of_get[1][0]
    assert [m["body"] for _, messages in (of_get, of_head) for m in messages[1:]] == [b"hello", b""]
