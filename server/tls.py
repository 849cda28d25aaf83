"""HTTPS: one SSL context, whose certificate can be read anew while the server runs."""

import ssl

from engine.api.config import ConfigError
from server.config import ServerConfig, check_file

CERT_REQS = (ssl.CERT_NONE, ssl.CERT_OPTIONAL, ssl.CERT_REQUIRED)


class TlsContext:
    """`context` serves connections; `reload` changes what later ones are shown."""

    def __init__(self, config: ServerConfig) -> None:
        """Raises ConfigError naming the flag whose file cannot be used."""
        self._certfile, self._keyfile = config.ssl_certfile, config.ssl_keyfile
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.set_alpn_protocols(["http/1.1"])
        if config.ssl_ca_certs:
            try:
                self.context.load_verify_locations(config.ssl_ca_certs)
            except OSError as error:
                raise ConfigError(
                    f"--ssl-ca-certs {config.ssl_ca_certs}: {reason(error)}"
                ) from None
        self.context.verify_mode = CERT_REQS[config.ssl_cert_reqs]
        self.reload()

    def reload(self) -> None:
        """Raises ConfigError if the files do not fit; the old certificate then stays in use."""
        # A failed load can leave half of a pair behind, so files are tried on another context.
        for context in (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), self.context):
            try:
                context.load_cert_chain(self._certfile, self._keyfile or None, refuse_password)
            except OSError as error:
                files = f"--ssl-certfile {self._certfile}"
                if self._keyfile:
                    files += f", --ssl-keyfile {self._keyfile}"
                raise ConfigError(f"{files}: {reason(error)}") from None


def tls_context(config: ServerConfig) -> TlsContext | None:
    """None: plain HTTP. Raises ConfigError for flags that contradict each other."""
    if config.ssl_cert_reqs not in range(len(CERT_REQS)):
        raise ConfigError(f"--ssl-cert-reqs {config.ssl_cert_reqs}: choose 0, 1 or 2")
    if not config.ssl_certfile:
        for flag, value in (
            ("--ssl-keyfile", config.ssl_keyfile),
            ("--ssl-ca-certs", config.ssl_ca_certs),
            ("--ssl-cert-reqs", config.ssl_cert_reqs),
        ):
            if value:
                raise ConfigError(f"{flag} {value}: needs --ssl-certfile as well")
        return None
    if config.ssl_cert_reqs and not config.ssl_ca_certs:
        raise ConfigError(
            f"--ssl-cert-reqs {config.ssl_cert_reqs}: needs --ssl-ca-certs, to check clients against"
        )
    for flag, name in (
        ("--ssl-certfile", config.ssl_certfile),
        ("--ssl-keyfile", config.ssl_keyfile),
        ("--ssl-ca-certs", config.ssl_ca_certs),
    ):
        if name:
            check_file(flag, name)
    return TlsContext(config)


def refuse_password() -> str:
    raise OSError(0, "the private key is encrypted; give one without a password")


def reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        if error.reason == "KEY_VALUES_MISMATCH":
            return "certificate and private key do not belong together"
        return f"is no usable PEM file ({error.reason or error.args[-1]})"
    return str(error.strerror)
