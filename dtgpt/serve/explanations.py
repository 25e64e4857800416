"""How to ask a server, for whoever gives its address to `dtgpt generate`, which takes a model."""

import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

from dtgpt.util.shared.explanations import Explanations

KEY = "DTGPT_API_KEY"  # environment variable


class OfServers(Explanations):
    """Explains the address of a server, and the option of a key for it."""

    def of_command(self, command: str, name: str, value: str) -> str | None:
        if command != "generate" or name.replace("-", "_") != "api_key":
            return None
        return "--api-key belongs to dtgpt serve; dtgpt generate asks no server: use OpenAI's client, or curl"

    def of_model(self, path: Path, options: Any) -> str | None:
        text = str(path)
        if not (found := re.fullmatch(r"(https?):/*([!-~]+)", text)):  # `Path` makes one slash of two
            found = None if path.exists() else re.fullmatch(r"()([\w.-]+:\d{1,5})", text)
        if not found:
            return None
        address = f"{found[1] or 'http'}://{found[2].rstrip('/')}"
        body: dict[str, Any] = {"prompt": options.prompt or "Once upon a time", "max_tokens": options.max_new_tokens}
        body |= {"temperature": options.temperature, "top_k": options.top_k}
        given = json.dumps({name: value for name, value in body.items() if value is not None})
        headers = '-H "Content-Type: application/json"' + f' -H "Authorization: Bearer ${KEY}"' * (KEY in os.environ)
        return (
            f"{address} is a server, and dtgpt generate takes a model; ask the server with OpenAI's client "
            f"(base_url={address}/v1) or with: curl {shlex.quote(f'{address}/v1/completions')} {headers} "
            f"-d {shlex.quote(given)}"
        )


EXPLANATIONS = OfServers()
