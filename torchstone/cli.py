"""The command line: `torchstone up | serve | worker | migrate | data`, and the client's `submit | get | watch ...`.

    torchstone up --port 0 --data /srv/torchstone
    torchstone submit spec.json --wait
    echo '{"kind": "jit", "model": {"preset": "mlp"}}' | torchstone submit -

Every command imports what it needs when it runs, so that `--help` and completion stay quick. What a script reads (a
job's id, JSON, a table) goes to stdout; progress and errors go to stderr. Exit codes: 0 done, 1 an error, or the job
did not succeed, 2 wrong usage.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from torchstone.client import Client
    from torchstone.settings import Settings

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Deep-learning performance experiments as jobs: POST a spec, get numbers and a model to download.",
)

Url = Annotated[str | None, typer.Option("--url", metavar="URL", help="The service. [default: TORCHSTONE_URL]")]
Host = Annotated[str | None, typer.Option(metavar="ADDRESS", help="Address the API listens on.")]
Port = Annotated[int | None, typer.Option(min=0, max=65535, help="Port of the API; 0 = any free one.")]
Data = Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of database, broker and artifacts.")]
Devices = Annotated[str | None, typer.Option(metavar="LIST", help="Devices of this worker, e.g. cpu:0,cpu:1.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
JobId = Annotated[str, typer.Argument(metavar="ID", help="The job's id.")]


def main() -> None:
    """The program `torchstone`."""
    from torchstone.errors import TorchstoneError

    try:
        app()
    except TorchstoneError as error:
        from torchstone import show

        show.error(error)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # `torchstone list | head`
        sys.stderr.close()
        sys.exit(1)


# -- running the parts ------------------------------------------------------------------------------------------


@app.command(rich_help_panel="Run")
def up(host: Host = None, port: Port = None, data: Data = None, devices: Devices = None) -> None:
    """Start everything on this machine: broker, database, API and one worker."""
    from torchstone import up as parts

    raise typer.Exit(parts.up(_settings(host=host, port=port, data=data, devices=devices)))


@app.command(rich_help_panel="Run")
def serve(host: Host = None, port: Port = None, data: Data = None) -> None:
    """Start the API alone, against TORCHSTONE_DATABASE_URL, _BROKER_URL and _ARTIFACTS_URL."""
    from torchstone import up as parts

    parts.serve(_settings(host=host, port=port, data=data))


@app.command(rich_help_panel="Run")
def worker(devices: Devices = None, data: Data = None) -> None:
    """Start this host's worker alone, against the same URLs as `serve`."""
    from torchstone import up as parts

    raise typer.Exit(parts.worker(_settings(devices=devices, data=data)))


@app.command(rich_help_panel="Run")
def migrate(data: Data = None) -> None:
    """Bring the database to the newest schema."""
    from torchstone import up as parts

    print(f"the database is at revision {parts.migrate(_settings(data=data))}")


# -- jobs -------------------------------------------------------------------------------------------------------


@app.command(rich_help_panel="Jobs")
def submit(
    file: Annotated[str, typer.Argument(metavar="FILE|-", help="A spec as JSON; - reads it from stdin.")],
    wait: Annotated[bool, typer.Option("--wait", help="Watch it, then print the result.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Only validate: print the spec with its defaults.")] = False,
    key: Annotated[str | None, typer.Option("--key", help="Idempotency key: the same job for the same key.")] = None,
    url: Url = None,
) -> None:
    """Submit a spec; prints the job's id."""
    from torchstone import show

    spec = _spec(file)
    with _client(url) as client:
        if check:
            show.as_json(client.check(spec))
            return
        job = client.submit(spec, idempotency_key=key)
        if not wait:
            print(job["id"])
            return
        _follow(client, job["id"])


@app.command(rich_help_panel="Jobs")
def get(job_id: JobId, url: Url = None, json: AsJson = False) -> None:
    """Show a job, with its result as a table."""
    from torchstone import render, show

    with _client(url) as client:
        job = client.job(job_id)
    show.as_json(job) if json else sys.stdout.write(render.text(job))


@app.command(rich_help_panel="Jobs")
def watch(job_id: JobId, url: Url = None) -> None:
    """Follow a job until it ends, then print its result."""
    with _client(url) as client:
        _follow(client, job_id)


@app.command("list", rich_help_panel="Jobs")
def list_jobs(
    state: Annotated[str | None, typer.Option(help="Only jobs in this state.")] = None,
    kind: Annotated[str | None, typer.Option(help="Only jobs of this kind.")] = None,
    label: Annotated[str | None, typer.Option(metavar="KEY:VALUE", help="Only jobs with this label.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many, newest first.")] = 20,
    url: Url = None,
    json: AsJson = False,
) -> None:
    """List jobs, newest first."""
    from torchstone import show

    with _client(url) as client:
        jobs = list(client.list(state=state, kind=kind, label=label, limit=limit))
    show.as_json(jobs) if json else show.jobs(jobs)


@app.command(rich_help_panel="Jobs")
def logs(
    job_id: JobId,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Until the job ends.")] = False,
    url: Url = None,
) -> None:
    """Print what a job printed."""
    with _client(url) as client:
        for piece in client.logs(job_id, follow=follow):
            sys.stdout.write(piece)
            sys.stdout.flush()


@app.command(rich_help_panel="Jobs")
def download(
    job_id: JobId,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The artifact's name, e.g. script.pt.")],
    to: Annotated[Path | None, typer.Option("--to", "-o", metavar="PATH", help="[default: ./NAME]")] = None,
    url: Url = None,
) -> None:
    """Download an artifact; resumes a broken download, and checks the SHA-256."""
    with _client(url) as client:
        print(client.download(job_id, name, to or Path(Path(name).name)))


@app.command(rich_help_panel="Jobs")
def cancel(job_id: JobId, url: Url = None) -> None:
    """Cancel a job."""
    with _client(url) as client:
        print(client.cancel(job_id)["state"])


@app.command(rich_help_panel="Jobs")
def delete(job_id: JobId, url: Url = None) -> None:
    """Delete a finished job and its files."""
    with _client(url) as client:
        client.delete(job_id)


# -- inventory --------------------------------------------------------------------------------------------------


@app.command(rich_help_panel="Inventory")
def devices(url: Url = None, json: AsJson = False) -> None:
    """Show every host's devices, and who holds them."""
    from torchstone import show

    with _client(url) as client:
        hosts = client.devices()
    show.as_json(hosts) if json else show.devices(hosts)


@app.command(rich_help_panel="Inventory")
def kinds(url: Url = None, json: AsJson = False) -> None:
    """Show the kinds of experiment, with an example of each."""
    from torchstone import show

    with _client(url) as client:
        found = client.kinds()
    show.as_json(found) if json else show.kinds(found)


@app.command(rich_help_panel="Inventory")
def version() -> None:
    """Print the version."""
    from torchstone import __version__

    print(__version__)


# -- data sets --------------------------------------------------------------------------------------------------

data_app = typer.Typer(no_args_is_help=True, help="Data sets on this host, for its worker.")
app.add_typer(data_app, name="data", rich_help_panel="Run")


@data_app.command("fetch")
def fetch_data(
    name: Annotated[str, typer.Argument(metavar="NAME", help="fashion_mnist.")],
    source: Annotated[
        Path | None,
        typer.Option("--from", metavar="FOLDER", help="Copy the .gz files from here, not Debian's package."),
    ] = None,
    data: Data = None,
) -> None:
    """Put a data set into the data folder, checked; prints where it is."""
    from torchstone import datasets

    print(datasets.fetch(name, _settings(data=data).datasets, source))


@data_app.command("list")
def list_data(data: Data = None, json: AsJson = False) -> None:
    """Show the data sets that specs can name, and whether this host has them."""
    from torchstone import datasets, show

    found = datasets.available(_settings(data=data).datasets)
    show.as_json(found) if json else show.datasets(found)


# -- shared -----------------------------------------------------------------------------------------------------


def _settings(**given: Any) -> Settings:
    """Settings from the environment, with those options that were given. Raises SetupError for a wrong value."""
    from torchstone.settings import Settings

    return Settings.load(**{name: value for name, value in given.items() if value is not None})


def _client(url: str | None) -> Client:
    from torchstone.client import Client

    return Client(url or _settings().public_url)


def _spec(file: str) -> Any:
    import json

    from torchstone.errors import BadRequest

    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
        return json.loads(text)
    except OSError as error:
        raise BadRequest(f"{file}: {error.strerror}") from None
    except ValueError as error:
        raise BadRequest(f"{file} is not JSON: {error}") from None


def _follow(client: Client, job_id: str) -> None:
    """Show the progress on stderr and the result on stdout; exit 1 where the job did not succeed."""
    from torchstone import render, show

    with show.progress(job_id) as on_progress:
        job = client.wait(job_id, on_progress)
    sys.stdout.write(render.text(job))
    if job["state"] != "succeeded":
        raise typer.Exit(1)
