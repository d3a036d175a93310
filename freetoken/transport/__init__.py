"""Typed messages between actors: one interface, several carriers."""

from freetoken.transport.endpoint import Endpoint, Handler

__all__ = ["Endpoint", "Handler"]
