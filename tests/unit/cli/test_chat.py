import io
from collections.abc import Iterator

from common.errors import ConfigError
from services.cli.chat import chat


class ScriptedServer:
    """Answers from a list; a piece that is an exception is raised."""

    def __init__(self, *answers: list[str | BaseException]) -> None:
        self.asked: list[list[dict[str, str]]] = []
        self.num_closed = 0
        self._answers = list(answers)

    def answer(self, messages: list[dict[str, str]]) -> Iterator[str]:
        self.asked.append([dict(message) for message in messages])
        try:
            for piece in self._answers.pop(0):
                if isinstance(piece, BaseException):
                    raise piece
                yield piece
        finally:
            self.num_closed += 1


def talk(server: ScriptedServer, text: str, system: str | None = None) -> str:
    sink = io.StringIO()
    chat(server, io.StringIO(text), sink, system)
    return sink.getvalue()


def test_a_conversation_carries_all_earlier_turns() -> None:
    server = ScriptedServer(["Hel", "lo"], ["Bye"])
    printed = talk(server, "hi\n\nthanks\n/exit\nnever\n", "be kind")
    assert printed == "> Hello\n> > Bye\n> "
    assert server.asked[1] == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "thanks"},
    ]


def test_an_interrupt_stops_one_answer_and_what_came_is_kept() -> None:
    server = ScriptedServer(["a", KeyboardInterrupt()], ["b"])
    assert talk(server, "x\ny\n") == "> a [stopped]\n> b\n> \n"
    assert server.asked[1][1] == {"role": "assistant", "content": "a"}
    assert server.num_closed == 2


def test_a_failed_answer_is_told_and_its_question_taken_back() -> None:
    server = ScriptedServer([ConfigError("queue full (HTTP 429)")], ["ok"])
    assert talk(server, "x\ny\n") == "> [error] queue full (HTTP 429)\n> ok\n> \n"
    assert server.asked[1] == [{"role": "user", "content": "y"}]
