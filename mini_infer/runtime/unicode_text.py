"""Python's strings can hold half of a surrogate pair, which is no Unicode text."""

from mini_infer.core.errors import InvalidRequestError


def utf8_bytes(text: str, name: str = "the text", param: str | None = None) -> bytes:
    """``text`` in UTF-8.

    Raises:
        InvalidRequestError: half of a surrogate pair, as a JSON escape can smuggle in.
    """
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        raise InvalidRequestError(
            f"{name} holds half of a surrogate pair (such as \\ud800), which is not Unicode text: "
            "send the whole character",
            param,
        ) from None
