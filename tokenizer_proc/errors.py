"""The two ways things go wrong here: the tokenizer cannot be used, or a prompt cannot be served."""

from engine.api.config import ConfigError


class TokenizerLoadError(ConfigError):
    """The tokenizer or chat template cannot be used. The text says what was looked for where."""


class PromptError(ValueError):
    """A request that cannot be served as it is. The fields become the HTTP error."""

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
