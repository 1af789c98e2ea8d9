"""The HTTP service: takes experiment specs, answers with jobs, results and artifacts. Never imports torch.

    python -m service                      # reads TORCHSTONE_* from the environment; see torchstone.settings

app.py         create_app(settings), and what lives as long as the process
routes/        one router a file
problems.py    every error as application/problem+json
bodies.py      reading and parsing what clients send
queries.py     query parameters and the Prefer header
documents.py   rows of the store as JSON documents
writer.py      accepts jobs, many in one commit
waits.py       wakes everybody who waits for a job to change
fleet.py       what the hosts can run, and what a job waits for
reconciler.py  puts right what workers that vanished left behind
shapes.py      the shapes of answers, for the description alone
openapi.py     the description, with the specs' schemas and working examples
"""

import os
import sys

# pydantic would look through every installed distribution for plugins, of which we use none: 3 % of the service's start
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")

# FastAPI would load pydantic's first version to ask of every parameter whether it is a model of that: 4 % of the start.
sys.modules.setdefault("pydantic.v1", None)  # type: ignore[arg-type]

import pydantic  # noqa: E402

# The models by which FastAPI describes OpenAPI are built when /openapi.json is asked for, not at the start: 9 %.
pydantic.BaseModel.model_config["defer_build"] = True

if "structlog" not in sys.modules and "rich" not in sys.modules:
    # structlog imports rich where it finds it, for tracebacks that we do not use: a tenth of the service's start.
    sys.modules["rich"] = None  # type: ignore[assignment]
    import structlog  # noqa: F401

    del sys.modules["rich"]
