"""Flower with our login in front of everything, our figures among its metrics, and operations switched off."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from celery import Celery
from flower.app import Flower
from flower.options import options
from flower.views import BaseHandler
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, generate_latest
from prometheus_client.registry import Collector
from tornado.httpserver import HTTPServer
from tornado.httputil import HTTPServerRequest
from tornado.ioloop import IOLoop
from tornado.netutil import bind_sockets
from tornado.web import RequestHandler, url

from .flower_history import History
from .flower_login import REALM, Login

log = logging.getLogger(__name__)


class MillFlower(Flower):  # type: ignore[misc]  # Flower has no types
    """One Flower. ``collector``'s figures are on its metrics page until it is stopped."""

    def __init__(self, *, capp: Celery, login: Login, collector: Collector, settings: dict[str, Any]) -> None:
        """To be made on a running event loop, after Flower's global ``options`` are set."""
        self._login = login
        self._prefix = f"/{options.url_prefix.strip('/')}" if options.url_prefix else ""
        self._collector: Collector | None = collector
        self._server: HTTPServer | None = None
        # One thread, so that a database that hangs holds no more than that; scrapes then wait behind each other.
        self.metrics_thread = ThreadPoolExecutor(1, thread_name_prefix="metrics")
        super().__init__(options=options, capp=capp, events=_history(capp), io_loop=IOLoop.current(), **settings)
        self.add_handlers(r".*", [url(f"{self._prefix}/metrics", Metrics), url(f"{self._prefix}/healthcheck", Health)])
        REGISTRY.register(collector)

    def get_handler_delegate(
        self, request: HTTPServerRequest, target_class: type[RequestHandler], *arguments: Any, **named: Any
    ) -> Any:
        """Every request of every page passes here, also those that Flower leaves open and those it may get later."""
        path = request.path.removeprefix(self._prefix)
        if self._login.admits(path, request.headers.get("Authorization", "")):
            return super().get_handler_delegate(request, target_class, *arguments, **named)
        if "Authorization" in request.headers:
            log.warning("login_refused ip=%s path=%s", request.remote_ip, request.path)
        return super().get_handler_delegate(request, LoginNeeded)

    def listen_there(self) -> int:
        """Listens where the options say; answers the port. Raises OSError. Unlike Flower's own, it can be ended."""
        sockets = bind_sockets(options.port, address=options.address)
        self._server = HTTPServer(self, ssl_options=self.ssl_options, xheaders=options.xheaders)
        self._server.add_sockets(sockets)
        return int(sockets[0].getsockname()[1])

    def start(self) -> None:
        """Begins to listen to events. Unlike Flower's own, it leaves the event loop to whoever runs it."""
        self.events.start()
        self.started = True
        self.update_workers()

    def stop(self) -> None:
        """Saves the history and lets go of everything but the event loop. Idempotent."""
        if self._server is not None:
            self._server.stop()
        if self.started:
            self.started = False
            self.events.stop()
        if self._collector is not None:
            REGISTRY.unregister(self._collector)
            self._collector = None
        self.executor.shutdown(wait=False, cancel_futures=True)
        self.metrics_thread.shutdown(wait=False, cancel_futures=True)


def _history(capp: Celery) -> History:
    return History(
        capp,
        io_loop=IOLoop.current(),
        db=options.db,
        persistent=options.persistent,
        state_save_interval=options.state_save_interval,
        enable_events=options.enable_events,
        max_workers_in_memory=options.max_workers,
        max_tasks_in_memory=options.max_tasks,
    )


class LoginNeeded(RequestHandler):
    """Answers whoever has not logged in, whatever was asked for."""

    def prepare(self) -> None:
        self.set_status(401)
        self.set_header("WWW-Authenticate", f'Basic realm="{REALM}", charset="UTF-8"')
        self.set_header("Cache-Control", "no-store")
        self.finish("Login needed: user batchmill, password as `batchmill flower` says.\n")

    def check_xsrf_cookie(self) -> None:
        """Nobody is let in here, so there is nothing to forge."""


class Metrics(BaseHandler):  # type: ignore[misc]  # Flower has no types
    """Flower's figures and ours. SQL is read in a thread: the event loop takes in events meanwhile."""

    async def get(self) -> None:
        self.application.purge_offline_worker_metrics()
        loop = asyncio.get_running_loop()
        page = await loop.run_in_executor(self.application.metrics_thread, generate_latest)
        self.set_header("Content-Type", CONTENT_TYPE_LATEST)
        self.write(page)


class Health(BaseHandler):  # type: ignore[misc]  # Flower has no types
    """Whether Flower answers; behind the login or the token, like everything."""

    async def get(self) -> None:
        self.write("OK")
