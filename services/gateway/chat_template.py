"""The model's chat template, rendered in a sandbox."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.errors import ErrorCode, ModelError, RequestError

_SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token")


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message as templates read it; ``content`` is plain text."""

    role: str
    content: str
    name: str | None = None

    def as_variable(self, rewrite: Callable[[str], str]) -> dict[str, str]:
        """Return the template's variable, with ``rewrite`` applied to the caller's text."""
        variable = {"role": self.role, "content": rewrite(self.content)}
        if self.name is not None:
            variable["name"] = rewrite(self.name)
        return variable


class _GenerationTag(Extension):
    """Lets ``{% generation %}`` blocks pass: they mark text for training and change nothing."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 reads a plain class attribute

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """Renders messages to the prompt text."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise ModelError(f"the chat template does not parse: {error}") from error
        self._special_tokens = dict(special_tokens)
        self.source = source

    @classmethod
    def load(cls, folder: Path) -> "ChatTemplate | None":
        """Read the template of a model folder; None when the model has none.

        Raises ``ModelError`` naming the file that cannot be used.
        """
        config_path = folder / "tokenizer_config.json"
        config = _read_json(config_path) if config_path.exists() else {}
        special_tokens = _special_tokens(config)
        template_path = folder / "chat_template.jinja"
        if template_path.exists():
            return cls(template_path.read_text(encoding="utf-8"), special_tokens)
        source = config.get("chat_template")
        if isinstance(source, list):
            named = {entry["name"]: entry["template"] for entry in source}
            source = named.get("default")
        if source is None:
            return None
        if not isinstance(source, str):
            raise ModelError(f"{config_path}: chat_template is not a text")
        return cls(source, special_tokens)

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        rewrite: Callable[[str], str],
        max_chars: int,
        add_generation_prompt: bool = True,
    ) -> str:
        """Render the conversation; ``rewrite`` is applied to every text of the caller's.

        Raises ``RequestError`` when the template refuses the messages or the text passes
        ``max_chars``.
        """
        pieces: list[str] = []
        num_chars = 0
        try:
            for piece in self._template.generate(
                messages=[message.as_variable(rewrite) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            ):
                num_chars += len(piece)
                if num_chars > max_chars:
                    raise RequestError(
                        ErrorCode.CONTEXT_EXCEEDED,
                        f"the rendered messages are longer than {max_chars} characters, "
                        "more than the model's context can hold",
                        param="messages",
                    )
                pieces.append(piece)
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise RequestError(
                ErrorCode.BAD_REQUEST,
                f"the model's chat template refuses these messages: {error}",
                param="messages",
            ) from error
        return "".join(pieces)


def _special_tokens(config: Mapping[str, object]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in _SPECIAL_TOKEN_NAMES:
        value = config.get(name)
        if isinstance(value, Mapping):
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found


def _read_json(path: Path) -> dict[str, object]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: is not a JSON object")
    return value


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)


def _to_json(
    value: object,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - the filter's arguments in templates
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002 - the filter's arguments in templates
) -> str:
    """Encode as JSON without the HTML escapes of jinja2's own filter."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
