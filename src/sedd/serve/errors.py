"""Errors of requests, and their replies in OpenAI's format."""

from collections.abc import Mapping

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

STATUS = {
    "invalid_request": 400,
    "invalid_api_key": 401,
    "model_not_found": 404,
    "deadline_exceeded": 408,
    "timeout": 408,
    "body_too_large": 413,
    "wrong_host": 421,
    "overloaded": 429,
    "non_finite": 500,
    "internal_error": 500,
    "canceled": 503,
}
"""HTTP status by the code of an error."""
LONGEST_MESSAGE = 1000


class RequestError(Exception):
    """A request that is answered with an error in OpenAI's format; ``code`` is one of `STATUS`."""

    def __init__(
        self,
        code: str | None,
        message: str,
        headers: Mapping[str, str] | None = None,
        *,
        param: str | None = None,
        status: int | None = None,
    ) -> None:
        super().__init__(message)
        self.headers, self.status = headers, status or STATUS[code or "invalid_request"]
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        error = {"message": _shorten(message), "type": kind, "param": param and _shorten(param), "code": code}
        self.body = {"error": error}

    def reply(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, self.headers)


async def answer_error(request: Request, error: Exception) -> JSONResponse:
    match error:
        case RequestError():
            return error.reply()
        case HTTPException():  # there is no such route, or not with this method
            message = f"{error.detail}: {request.method} {request.url.path}"
            return RequestError(None, message, error.headers, status=error.status_code).reply()
        case RequestValidationError():
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"][1:] if isinstance(part, str)) or None
            detail = first["msg"].removeprefix("Value error, ")
            known = {"json_invalid": "the body is not JSON", "extra_forbidden": f"unknown field {field}; leave it out"}
            message = known.get(first["type"], f"{field}: {detail}" if field else detail)
            return RequestError("invalid_request", message, param=field).reply()
    return RequestError("invalid_request", str(error)).reply()


def _shorten(message: str) -> str:
    """Cut the middle out of a message that repeats a long value."""
    return message if len(message) <= LONGEST_MESSAGE else f"{message[:400]} … {message[-400:]}"
