"""POST /tokenize and /detokenize: the served model's tokenizer for clients."""

from common.errors import ErrorCode, RequestError
from services.gateway.admission import Admission
from services.gateway.backend import ServedModel
from services.gateway.connection import Connection
from services.gateway.detokenizer import decode_prompt
from services.gateway.http_settings import HttpSettings
from services.gateway.logprobs import Json, token_text
from services.gateway.parsing import check_model, check_token_ids, parse_json
from services.gateway.planning import chat_message, num_chars, tokenize
from services.gateway.schema import DetokenizeRequest, TokenizeRequest
from services.gateway.tokenizer import ModelTokenizer


class TokenizationService:
    """Answers with the very ids that a completion of the same text would have."""

    def __init__(
        self,
        model: ServedModel,
        settings: HttpSettings,
        tokenizer: ModelTokenizer,
        admission: Admission,
    ) -> None:
        self._model = model
        self._settings = settings
        self._tokenizer = tokenizer
        self._admission = admission

    async def tokenize(self, connection: Connection) -> None:
        """Serve /tokenize; raises ``RequestError`` before anything is written."""
        with self._admission.slots(1):
            request = parse_json(TokenizeRequest, await self._body(connection))
            self._check_model(request.model)
            token_ids = await self._token_ids(request)
            answer: Json = {
                "count": len(token_ids),
                "max_model_len": self._model.max_model_len,
                "tokens": token_ids,
            }
            if request.return_token_strs:
                table = self._tokenizer.token_bytes
                answer["token_strs"] = [token_text(table, token_id) for token_id in token_ids]
            await connection.answer(answer)

    async def detokenize(self, connection: Connection) -> None:
        """Serve /detokenize; raises ``RequestError`` before anything is written."""
        with self._admission.slots(1):
            request = parse_json(DetokenizeRequest, await self._body(connection))
            self._check_model(request.model)
            token_ids = request.tokens
            check_token_ids(token_ids, self._model, "tokens")
            table = self._tokenizer.token_bytes
            text = await tokenize(
                lambda: decode_prompt(table, token_ids), len(token_ids), self._settings
            )
            await connection.answer({"prompt": text})

    async def _token_ids(self, request: TokenizeRequest) -> list[int]:
        if (request.prompt is None) == (request.messages is None):
            raise RequestError(
                ErrorCode.BAD_REQUEST, "either prompt or messages must be given", param="prompt"
            )
        adds_special = request.add_special_tokens
        prompt = request.prompt
        if prompt is not None:
            if request.add_generation_prompt is not None:
                raise RequestError(
                    ErrorCode.BAD_REQUEST,
                    "add_generation_prompt is for messages",
                    param="add_generation_prompt",
                )
            return await tokenize(
                lambda: self._tokenizer.encode_text(
                    prompt, add_special_tokens=adds_special is not False
                ),
                len(prompt),
                self._settings,
            )
        messages = [chat_message(message) for message in request.messages or ()]
        return await tokenize(
            lambda: self._tokenizer.encode_chat(
                messages,
                add_generation_prompt=request.add_generation_prompt is not False,
                add_special_tokens=bool(adds_special),
            ),
            num_chars(messages),
            self._settings,
        )

    async def _body(self, connection: Connection) -> bytes:
        async with self._admission.drain.bounds():
            return await connection.read_body(
                self._settings.max_body_bytes, self._settings.body_timeout_seconds
            )

    def _check_model(self, name: str | None) -> None:
        if name is not None:
            check_model(name, self._model)
