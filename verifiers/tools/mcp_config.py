"""How to reach an MCP server (Model Context Protocol), and which of these settings are secret."""

from __future__ import annotations

import functools
import itertools
import logging
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from verifiers.clients.secrets import HIDDEN, hide_in_url, redact, secrets_in

MAX_TRACEBACKS = 20  # in the log, per logger and process
_LOGGERS = (
    *("client", "mcp.client.stdio", "mcp.client.streamable_http", "mcp.client.session", "mcp.client.sse"),
    *("mcp.shared.jsonrpc_dispatcher", "mcp.shared.dispatcher", "mcp.shared.session", "httpx", "httpx2"),
)


@dataclass(frozen=True, kw_only=True)
class MCPServerConfig:
    """A server that is started (``command``, ``args``, ``env``) or reached over HTTP (``url``, ``headers``).

    The values of ``env`` and ``headers`` are secrets and are hidden in everything the server returns. With
    ``per_rollout`` each rollout has its own server (or its own session over HTTP); with ``sequential`` the calls of
    one turn to its tools run in order.

    >>> MCPServerConfig(name="files", command="server", env={"TOKEN": "sk-abc123"})
    MCPServerConfig(name='files', command='server', args=[], env={'TOKEN': '[hidden]'})
    """

    name: str
    command: str | None = None
    args: list[str] = field(default_factory=list)
    env: dict[str, str] | None = None
    description: str = ""
    timeout_s: float = 60.0
    url: str | None = None
    headers: dict[str, str] | None = None
    per_rollout: bool = False
    sequential: bool = False

    def __post_init__(self) -> None:
        given: Any = self.args
        if isinstance(given, str):
            raise TypeError(f"args of the MCP server {self.name!r} must be a list; got the string {given!r}")
        if (self.command is None) == (self.url is None):
            raise TypeError(f"the MCP server {self.name!r} needs either a command or a url, not both")
        useless = ("args", "env") if self.url is not None else ("headers",)
        if wrong := [key for key in useless if getattr(self, key)]:
            reached = "url" if self.url is not None else "command"
            raise TypeError(f"{wrong[0]} has no effect on the MCP server {self.name!r}, which has a {reached}")

    def __repr__(self) -> str:
        shown: dict[str, Any] = {"name": self.name}
        if self.url is not None:
            shown |= {"url": hide_in_url(self.url), "headers": dict.fromkeys(self.headers or {}, HIDDEN)}
        else:
            args = [self.hide(arg) for arg in self.args]
            shown |= {"command": self.command, "args": args, "env": dict.fromkeys(self.env or {}, HIDDEN)}
        return f"MCPServerConfig({', '.join(f'{key}={value!r}' for key, value in shown.items())})"

    @property
    def address(self) -> str:
        """The command or URL, as an error may show it."""
        return self.command if self.command is not None else hide_in_url(str(self.url))

    @functools.cached_property
    def secrets(self) -> list[str]:
        """Values that must not be shown: of ``env`` and ``headers``, except existing paths, and keys in ``args``."""
        values = [str(value) for value in [*(self.env or {}).values(), *(self.headers or {}).values()]]
        values += [last for value in values if (last := value.rpartition(" ")[2]) != value]  # "Bearer <token>"
        values += secrets_in({}, [self.url] if self.url else [])
        for flag, following in itertools.pairwise([*self.args, ""]):
            name, equals, value = flag.partition("=")
            values += secrets_in({name: value if equals else following}) if name.startswith("-") else []
        return [value for value in values if not os.path.exists(value)]

    def hide(self, text: str) -> str:
        """A text without the secrets of this server."""
        return redact(text, self.secrets)


def as_config(given: MCPServerConfig | Mapping[str, Any]) -> MCPServerConfig:
    """A configuration, from itself or a dict.

    >>> as_config({"name": "files", "command": "server", "args": ["--root", "."]}).args
    ['--root', '.']
    """
    if isinstance(given, MCPServerConfig):
        return given
    try:
        return MCPServerConfig(**given)
    except TypeError as error:
        if "MCP server" in str(error):
            raise
        known = "name, command, args, env, description, timeout_s, url, headers, per_rollout, sequential"
        said = str(error).replace("MCPServerConfig.__init__() ", "")
        raise TypeError(f"the settings of an MCP server are {known}; {said}") from None


class HideSecrets(logging.Filter):
    """Redacts the secrets of servers in the log records of the libraries in `_LOGGERS`, and limits tracebacks.

    The MCP library logs a traceback for every line on a server's stdout that is not a message.
    """

    def __init__(self) -> None:
        super().__init__()
        self._secrets: set[str] = set()
        self._tracebacks: Counter[str] = Counter()

    def add(self, config: MCPServerConfig) -> None:
        self._secrets |= set(config.secrets)
        for name in _LOGGERS:
            logging.getLogger(name).addFilter(self)  # a second time has no effect

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info:
            self._tracebacks[record.name] += 1
            if self._tracebacks[record.name] > MAX_TRACEBACKS:
                return False
            if self._tracebacks[record.name] == MAX_TRACEBACKS:
                record.msg = f"{record.msg} (further tracebacks of this logger are not shown)"
        if not self._secrets:
            return True
        record.msg, record.args = redact(record.getMessage(), self._secrets), None
        if record.exc_info:
            record.exc_text = redact(logging.Formatter().formatException(record.exc_info), self._secrets)
            record.exc_info = None
        return True


hidden_in_logs = HideSecrets()
