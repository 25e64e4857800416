"""Megatron-LM's text generation server."""

from starlette.routing import Route

from dtgpt.serve.service import Service


def routes(service: Service) -> list[Route]:
    """Return the routes."""
    return []
