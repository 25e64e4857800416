"""Cases of `fixtures/serving.json`, or of another file of the same form."""

import json
import os
from pathlib import Path

FILE = Path(__file__).parents[1] / "fixtures" / "serving.json"


def serving_cases(section: str) -> list[dict]:
    return json.loads(Path(os.environ.get("DTGPT_SERVING_FIXTURES") or FILE).read_text())[section]
