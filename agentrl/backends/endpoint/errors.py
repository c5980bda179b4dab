"""What a request is refused with: one class, which each protocol writes in its own form."""

from __future__ import annotations

from agentrl.errors import AgentrlError, PromptTooLongError, RenderError, UserError


class RequestError(UserError):
    """A request that is not answered; the message begins with the field at fault, if it is one.

    `status`: of HTTP. `code`: OpenAI's word for it, where clients look at one.
    """

    def __init__(self, message: str, *, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


def refused(problem: Exception) -> RequestError:
    """Any failure of a request, as the client is told of it. A prompt that is too long is the client's (a server's error would
    make it try again); what fails in the engine is the server's."""
    if isinstance(problem, RequestError):
        return problem
    if isinstance(problem, PromptTooLongError):
        return RequestError(f"messages: {problem}", code="context_length_exceeded")
    if isinstance(problem, RenderError):
        return RequestError(f"messages: {problem}")
    if isinstance(problem, UnicodeEncodeError):
        return RequestError("the request has half of a character (a lone surrogate)")
    if isinstance(problem, AgentrlError):
        return RequestError(str(problem), status=503, code="engine_failed")
    return RequestError(f"{type(problem).__name__}: {problem}", status=500)
