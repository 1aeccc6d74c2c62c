"""An error that the client made, or that it must know of: a sentence, and the HTTP status of its kind."""

from __future__ import annotations


class Refusal(Exception):  # noqa: N818 - the server is well; it refuses a request
    """The request is not carried out, and changed nothing.

    `status`: the SDK makes 400 BadRequestError, 401 AuthenticationError, 404 NotFoundError and 422
    UnprocessableEntityError of it. An operation that is refused when its turn has come fails with the SDK's
    RequestFailedError of category User.
    """

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status
