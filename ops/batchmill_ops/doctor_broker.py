"""The check of the broker: does it answer, with this password, is it new enough, and does it keep what it is given."""

from __future__ import annotations

from urllib.parse import urlsplit

import redis

from batchmill_core.errors import ConfigurationError
from batchmill_core.settings import Settings, redacted_url

from .doctor_check import Check, fail, how_to_set, how_to_unset, ok, place_of, refused, warn
from .figures import one_line
from .stack import is_running
from .valkey_server import server_binary

_NAME = "broker"
_CONNECT_S = 3.0
_LEAST_VERSION = (6, 2)
_PORT = 6379
_NEARLY_FULL = 0.9


def check_broker(settings: Settings) -> Check:
    """Whether the broker answers, is new enough, takes writes and never evicts."""
    url = settings.broker_url
    if url is None:
        return _check_embedded(settings)
    client = redis.Redis.from_url(url, socket_timeout=_CONNECT_S, socket_connect_timeout=_CONNECT_S)
    try:
        client.ping()
        return _check_server(client, redacted_url(url), _command(url))
    except redis.RedisError as fault:
        return fail(_NAME, f"{redacted_url(url)}: {one_line(str(fault))}", _advice(fault, url, settings))
    finally:
        client.close()


def _check_embedded(settings: Settings) -> Check:
    if is_running(settings):
        return ok(_NAME, "embedded: runs")
    try:
        server_binary()
    except ConfigurationError as fault:
        return refused(_NAME, fault)
    return ok(_NAME, "embedded: starts when needed")


def _check_server(client: redis.Redis, shown: str, command: str) -> Check:
    info = client.info()
    found = str(info.get("redis_version", "0"))
    detail = f"{shown} answers, version {found}"
    if tuple(int(n) for n in found.split(".")[:2] if n.isdigit()) < _LEAST_VERSION:
        return fail(_NAME, detail, "use Redis 6.2 or newer, or Valkey: `docker compose up -d redis` brings one")
    if info.get("role") == "slave":
        primary = f"{info.get('master_host')}:{info.get('master_port')}"
        return fail(
            _NAME, f"{detail}, but is a read-only replica of {primary}", f"name that one in broker_url: {primary}"
        )
    policy = _eviction_policy(client)
    if policy not in (None, "noeviction"):
        advice = f"a broker that evicts loses messages: `{command} CONFIG SET maxmemory-policy noeviction`, and the same in its redis.conf"
        return fail(_NAME, f"{detail}, maxmemory-policy {policy}", advice)
    limit, used = int(info.get("maxmemory") or 0), int(info.get("used_memory") or 0)
    if limit and used > _NEARLY_FULL * limit:
        advice = f"give it more: `{command} CONFIG SET maxmemory {2 * limit}`, and the same in its redis.conf"
        return warn(
            _NAME, f"{detail}, its memory is nearly used up ({used / 1e6:,.0f} of {limit / 1e6:,.0f} MB)", advice
        )
    return ok(_NAME, detail)


def _eviction_policy(client: redis.Redis) -> str | None:
    """None where the server does not tell, as hosted ones do."""
    try:
        found: str | None = client.config_get("maxmemory-policy").get("maxmemory-policy")
    except redis.ResponseError:
        return None
    return found


def _advice(fault: redis.RedisError, url: str, settings: Settings) -> str:
    parts = urlsplit(url)
    where = place_of("broker_url", settings)
    address = f"{parts.hostname}:{parts.port or _PORT}"
    if isinstance(fault, redis.AuthenticationError) or "AUTH" in str(fault).upper() or "WRONGPASS" in str(fault):
        user = parts.username or ""
        example = f"{parts.scheme}://{user}:PASSWORD@{address}/{parts.path.strip('/') or 0}"
        return f"correct the user or password: {how_to_set('broker_url', example, settings)}"
    if "Name or service not known" in str(fault) or "name resolution" in str(fault):
        return f"correct the host name in {where}"
    start = f"redis-server --port {parts.port or _PORT} --appendonly yes"
    embedded = f"{how_to_unset('broker_url', settings)} to run embedded"
    return f"start it: `docker compose up -d redis` or `{start}`; or correct {where}, or {embedded}"


def _command(url: str) -> str:
    """How to speak to this server by hand; its password is left to be asked for."""
    parts = urlsplit(url)
    ask = " --askpass" if parts.password else ""
    tls = " --tls" if parts.scheme == "rediss" else ""
    return f"redis-cli -h {parts.hostname} -p {parts.port or _PORT}{ask}{tls}"
