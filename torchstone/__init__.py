"""The contract that the service and the worker share: specs, results, jobs, the store and the queue.

Nothing here imports torch, FastAPI, or either house (`service`, `worker`).
"""

__version__ = "0.1.0"
