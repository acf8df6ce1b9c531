"""Refusals in the OpenAI API's JSON."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse, Response


class ApiError(Exception):
    def __init__(
        self, status: int, message: str, kind: str = "invalid_request_error", retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}

    def body(self) -> dict[str, Any]:
        return {"error": {"message": str(self), "type": self.kind, "param": None, "code": self.status}}


def refusal(error: ApiError) -> Response:
    return JSONResponse(error.body(), error.status, error.headers)
