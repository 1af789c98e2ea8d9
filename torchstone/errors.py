"""Every error Torchstone raises on purpose, as one tree.

    TorchstoneError
    ├── RequestError            the caller's fault or the service's state; carries an HTTP status
    │   ├── InvalidRequest 422      the body or a parameter is malformed (with JSON pointers)
    │   ├── BadRequest 400          not JSON at all, or a header that cannot be read
    │   ├── NotFound 404
    │   ├── Conflict 409
    │   ├── Gone 410
    │   ├── TooLarge 413
    │   ├── UnsupportedMediaType 415
    │   ├── RangeNotSatisfiable 416
    │   └── Unavailable 503         the store or the broker is out of reach (with Retry-After)
    ├── JobError                what ends a job as `failed`; carries a code for `job.error.code`
    │   ├── InvalidModel            the model cannot be built or run on its input
    │   ├── DataMissing             a data set's files are not on the host, or not what they should be
    │   ├── WorkloadError           the experiment itself raised
    │   ├── OutOfMemory
    │   ├── TimedOut
    │   ├── WorkerLost              the worker vanished, too often to try again
    │   ├── RankLost                one of the processes that train together died or stood still
    │   ├── ProcessDied             the job's process ended without a result (signal or exit code)
    │   └── ArtifactFailed          a result file could not be stored
    └── SetupError              this process cannot start as asked (data folder in use, no broker, unknown device)

A RequestError becomes problem+json in `service/problems.py`; a JobError becomes `job.error`.
"""

from __future__ import annotations

from typing import ClassVar, TypedDict


class FieldError(TypedDict):
    """One fault in a request: an RFC 6901 pointer into the body and a sentence."""

    pointer: str
    detail: str


class TorchstoneError(Exception):
    """The root: everything below is caught by this name."""


class RequestError(TorchstoneError):
    """A request that is answered with a problem document instead of what was asked for."""

    status: ClassVar[int] = 500
    title: ClassVar[str] = "Internal error"

    def __init__(
        self, detail: str, *, errors: list[FieldError] | None = None, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(detail)
        self.detail = detail
        self.errors = errors or []
        self.headers = headers or {}


class BadRequest(RequestError):
    """The request could not be read."""

    status = 400
    title = "Bad request"


class InvalidRequest(RequestError):
    """The request was read and is not acceptable."""

    status = 422
    title = "Invalid request"


class NotFound(RequestError):
    """No such thing."""

    status = 404
    title = "Not found"


class Conflict(RequestError):
    """The thing is in a state that forbids this."""

    status = 409
    title = "Conflict"


class Gone(RequestError):
    """It existed and was removed."""

    status = 410
    title = "Gone"


class TooLarge(RequestError):
    """The body is over the limit."""

    status = 413
    title = "Content too large"


class UnsupportedMediaType(RequestError):
    """The body is not in a format that is taken."""

    status = 415
    title = "Unsupported media type"


class RangeNotSatisfiable(RequestError):
    """The range asked for lies outside of the file."""

    status = 416
    title = "Range not satisfiable"


class Unavailable(RequestError):
    """A part that this request needs is out of reach for now."""

    status = 503
    title = "Service unavailable"

    def __init__(self, detail: str, *, retry_after_s: int = 2) -> None:
        super().__init__(detail, headers={"Retry-After": str(retry_after_s)})


class JobError(TorchstoneError):
    """Ends a job as `failed`. `code` is the stable word in `job.error.code`.

    `partial` is the Result of what was measured until then, as JSON text; `more` are further fields of `job.error`.
    """

    code: ClassVar[str] = "workload_error"

    def __init__(self, message: str, *, partial: str | None = None, more: dict[str, int | str] | None = None) -> None:
        super().__init__(message)
        self.partial = partial
        self.more = more or {}


class InvalidModel(JobError):
    """The model cannot be built, or does not take its input."""

    code = "invalid_model"


class DataMissing(JobError):
    """A data set's files are missing or broken; the message says how to get them."""

    code = "data_missing"


class WorkloadError(JobError):
    """The experiment raised."""

    code = "workload_error"


class OutOfMemory(JobError):
    """The job asked for more memory than its host gives it."""

    code = "out_of_memory"


class TimedOut(JobError):
    """The job ran for longer than its `timeout_s`."""

    code = "timed_out"


class WorkerLost(JobError):
    """The worker vanished while it ran the job, and no attempt is left."""

    code = "worker_lost"


class RankLost(JobError):
    """One of the processes that train together died, was killed, or gave no sign of life; `rank` says which."""

    code = "rank_lost"

    def __init__(self, message: str, *, rank: int, partial: str | None = None) -> None:
        super().__init__(message, partial=partial, more={"rank": rank})
        self.rank = rank

    def __reduce__(self) -> tuple[object, ...]:
        return (_rank_lost, (str(self), self.rank, self.partial))


def _rank_lost(message: str, rank: int, partial: str | None) -> RankLost:
    return RankLost(message, rank=rank, partial=partial)


class ProcessDied(JobError):
    """The job's process ended without handing over a result."""

    code = "process_died"


class ArtifactFailed(JobError):
    """A file that the job made could not be stored."""

    code = "artifact_failed"


class SetupError(TorchstoneError):
    """This process cannot start as asked; the message says what to do."""
