"""Typed errors. Each says what was wrong and what to do; none shows a user a traceback."""

DEBUG = "MINI_INFER_DEBUG"
"""The environment variable that shows tracebacks all the same."""


class MiniInferError(Exception):
    """Base of every error that mini-infer raises on purpose.

    ``status`` is the HTTP status and ``exit_code`` the exit code of a command that ends with it.
    """

    status = 500
    exit_code = 1


class InvalidRequestError(MiniInferError, ValueError):
    """A request that can't be served as it stands; ``param`` names the field at fault."""

    status = 400
    exit_code = 2

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PromptTooLongError(InvalidRequestError):
    """Prompt, or prompt plus ``max_tokens``, exceeds what the model or the KV pool can hold."""


class InvalidConfigError(MiniInferError, ValueError):
    """An engine option, or a combination of options, that can't work."""

    exit_code = 2


class ModelNotFoundError(MiniInferError):
    """No such folder, file, alias or hub id."""

    status = 404
    exit_code = 2


class UnsupportedModelError(MiniInferError):
    """An architecture, tokenizer or file format that mini-infer does not implement."""

    exit_code = 2


class WeightsError(MiniInferError):
    """A checkpoint that is missing, truncated, surplus or misshapen; names the tensor or file."""

    exit_code = 2


class OutOfMemoryError(MiniInferError):
    """The weights or the smallest useful KV cache do not fit the memory that is there."""


class PolicyError(MiniInferError):
    """A user's scheduling policy raised, or answered what is no answer; names policy and method."""


class RouterError(MiniInferError):
    """A user's router raised, or chose what is no replica; names it."""


class ProposerError(MiniInferError):
    """A user's proposer of drafts raised, or proposed what are no drafts; names it."""


class StepError(MiniInferError):
    """A model step raised while one of the caller's requests was in it."""


class EngineDeadError(MiniInferError):
    """The engine stopped after a fault. A server starts another one, or ends."""

    status = 503
    retry_after = 2
    """Seconds after which it is worth another try."""


class ClusterResourcesError(MiniInferError):
    """A cluster has less than an engine needs: says what it has, and what is needed. Later it may
    have more."""

    status = 503


class UnavailableError(MiniInferError):
    """The server takes no new request now: too many wait, or it is shutting down."""

    status = 503
    retry_after = 1
    """Seconds after which it is worth another try."""


class SlowReaderError(MiniInferError):
    """A client did not read its stream while too much of it piled up; the request was aborted."""

    status = 408


class RequestTimeoutError(MiniInferError):
    """A request took longer than the server allows, and was aborted."""

    status = 504
