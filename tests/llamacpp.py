"""llama.cpp as tests ask it: through xllamacpp, in a process of its own, in an environment made on the first call.

`XLLAMACPP_PYTHON` names an interpreter that has it already.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from tests.client_environment import client_python

REQUIREMENTS = Path(__file__).parent / "clients" / "llamacpp.txt"
LIMIT_SECONDS = 240


def ask_llamacpp(place: Path, model: Path, prompts: list[Any], steps: int = 1) -> list[dict[str, Any]]:
    """Its answers to the prompts, each a text or a list of token ids; see llamacpp_client.py. Files go to `place`."""
    request, answer = place / "request.json", place / "answer.json"
    request.write_text(json.dumps({"model": str(model), "prompts": prompts, "steps": steps}))
    python = os.environ.get("XLLAMACPP_PYTHON") or str(client_python(REQUIREMENTS))
    command = [python, str(Path(__file__).with_name("llamacpp_client.py")), str(request), str(answer)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT_SECONDS)
    assert done.returncode == 0, done.stdout[-3000:]
    answers: list[dict[str, Any]] = json.loads(answer.read_text())
    return answers
