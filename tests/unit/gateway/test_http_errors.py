import json

import pytest

from common.errors import ErrorCode, RequestError
from services.gateway.http_errors import HTTP_MAPPINGS, request_error_response

STATUSES = {
    ErrorCode.BAD_REQUEST: 400,
    ErrorCode.CONTEXT_EXCEEDED: 400,
    ErrorCode.MODEL_NOT_FOUND: 404,
    ErrorCode.BODY_TOO_LARGE: 413,
    ErrorCode.QUEUE_FULL: 429,
    ErrorCode.NO_WORKER: 503,
    ErrorCode.NO_ROOM: 503,
    ErrorCode.SHUTTING_DOWN: 503,
    ErrorCode.CANCELLED: 503,
    ErrorCode.WORKER_DIED: 502,
    ErrorCode.TRANSFER_FAILED: 502,
    ErrorCode.DEADLINE_EXCEEDED: 504,
    ErrorCode.INTERNAL: 500,
}


def test_every_code_is_mapped():
    assert {code: mapping.status for code, mapping in HTTP_MAPPINGS.items()} == STATUSES
    assert set(HTTP_MAPPINGS) == set(ErrorCode)


@pytest.mark.parametrize("code", list(ErrorCode))
def test_the_body_is_openais_error_object(code):
    response = request_error_response(RequestError(code, "why \ud800", param="n"))
    error = json.loads(bytes(response.body))["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["message"], error["param"]) == ("why ?", "n")


@pytest.mark.parametrize(("seconds", "header"), [(None, "1"), (0.2, "1"), (2.1, "3")])
def test_retry_after_is_whole_seconds_and_at_least_one(seconds, header):
    error = RequestError(ErrorCode.QUEUE_FULL, "full", retry_after_seconds=seconds)
    assert request_error_response(error).headers["retry-after"] == header


def test_what_cannot_be_retried_has_no_retry_after():
    response = request_error_response(RequestError(ErrorCode.BAD_REQUEST, "bad"))
    assert "retry-after" not in response.headers
