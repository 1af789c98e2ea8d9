"""`choose` against every host and queue that hypothesis can think of."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torchstone.scheduling import Choice, HostView, Waiting, choose, is_exclusive, resolve_type


def names(kind: str, count: int) -> tuple[str, ...]:
    return tuple(f"{kind}:{i}" for i in range(count))


@st.composite
def host_views(draw: st.DrawFn) -> HostView:
    devices = {"cuda": names("cuda", draw(st.integers(0, 4))), "cpu": names("cpu", draw(st.integers(0, 4)))}
    leased = draw(st.sets(st.sampled_from([*names("cuda", 4), *names("cpu", 4)])))  # other workers' devices too
    return HostView(
        devices={kind: found for kind, found in devices.items() if found},
        leased=frozenset(leased),
        taken_whole=bool(leased) and draw(st.booleans()),
        memory_bytes=draw(st.integers(0, 3)),
        cuda_hosts=draw(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), max_size=2).map(tuple)),
    )


waiting_jobs = st.builds(
    Waiting,
    job_id=st.uuids().map(str),
    device_type=st.sampled_from(["auto", "cuda", "cpu"]),
    device_count=st.integers(1, 5),
    isolation=st.sampled_from(["auto", "device", "host"]),
    memory_bytes=st.integers(0, 3),
)
queues = st.lists(waiting_jobs, max_size=6, unique_by=lambda job: job.job_id)


def means(host: HostView, job: Waiting) -> str:
    return resolve_type(job, host.cuda_anywhere)


def could_ever_hold(host: HostView, job: Waiting) -> bool:
    return job.device_count <= len(host.devices.get(means(host, job), ())) and job.memory_bytes <= host.memory_bytes


def idle(host: HostView) -> HostView:
    return HostView(host.devices, frozenset(), False, host.memory_bytes, host.cuda_hosts)


@given(host_views(), queues)
def test_a_choice_is_the_first_that_fits_on_free_devices_of_its_type(host: HostView, queue: list[Waiting]) -> None:
    choice = choose(host, queue)
    fitting = [job for job in queue if could_ever_hold(host, job)]
    if choice is None:
        return
    job = fitting[0]
    assert choice.job_id == job.job_id
    assert len(set(choice.devices)) == len(choice.devices) == job.device_count
    assert set(choice.devices) <= set(host.devices[means(host, job)]) - host.leased
    assert not host.taken_whole
    assert choice.exclusive == is_exclusive(job.isolation, means(host, job))
    assert not (choice.exclusive and host.leased)


@given(host_views(), queues)
def test_none_means_that_the_first_must_wait_or_that_there_is_none(host: HostView, queue: list[Waiting]) -> None:
    fitting = [job for job in queue if could_ever_hold(host, job)]
    if choose(host, queue) is not None or not fitting or host.taken_whole:
        return
    job = fitting[0]
    free = set(host.devices[means(host, job)]) - host.leased
    assert len(free) < job.device_count or (is_exclusive(job.isolation, means(host, job)) and host.leased)


@given(host_views(), queues, waiting_jobs)
def test_what_this_host_cannot_hold_changes_nothing(host: HostView, queue: list[Waiting], other: Waiting) -> None:
    if not could_ever_hold(host, other):
        assert choose(host, [other, *queue]) == choose(host, queue)


@given(host_views(), queues, queues)
def test_what_comes_later_changes_nothing(host: HostView, queue: list[Waiting], later: list[Waiting]) -> None:
    if any(could_ever_hold(host, job) for job in queue):
        assert choose(host, [*queue, *later]) == choose(host, queue)


@given(host_views(), queues)
def test_a_gang_is_never_starved(host: HostView, queue: list[Waiting]) -> None:
    """However the first job that fits waits: nothing else starts, so the leases run out, and then it starts."""
    fitting = [job for job in queue if could_ever_hold(host, job)]
    choice = choose(host, queue)
    assert choice is None or choice.job_id == fitting[0].job_id
    if fitting:
        started = choose(idle(host), queue)
        assert started is not None
        assert started.job_id == fitting[0].job_id


@given(host_views(), queues)
def test_a_host_that_starts_all_it_may_never_mixes_or_doubles(host: HostView, queue: list[Waiting]) -> None:
    host, left = idle(host), list(queue)
    running: list[Choice] = []
    while (choice := choose(host, left)) is not None:
        running.append(choice)
        left = [job for job in left if job.job_id != choice.job_id]
        leased = host.leased | set(choice.devices)
        host = HostView(host.devices, leased, choice.exclusive, host.memory_bytes, host.cuda_hosts)
    used = [name for choice in running for name in choice.devices]
    assert len(used) == len(set(used))
    assert len(running) == 1 or not any(choice.exclusive for choice in running)


@given(host_views(), waiting_jobs)
def test_auto_is_cuda_exactly_where_some_host_could_run_it(host: HostView, job: Waiting) -> None:
    here = (len(host.devices.get("cuda", ())), host.memory_bytes)
    enough = [count for count, room in [here, *host.cuda_hosts] if room >= job.memory_bytes]
    if job.device_type == "auto":
        assert means(host, job) == ("cuda" if max(enough, default=0) >= job.device_count else "cpu")
    else:
        assert means(host, job) == job.device_type
