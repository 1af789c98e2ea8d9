"""`choose` over time: a fleet of hosts, jobs that come and end, any of them; what the queue promises is kept.

The fleet is simulated as the workers behave: each time something changes every host starts what `choose` gives it, one
after the other in any order, and the compare-and-set is that a job is taken off the queue once.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from torchstone.scheduling import PRIORITIES, PRIORITY_STEP_US, HostView, Waiting, choose, is_exclusive, rank_us

STEP_S = PRIORITY_STEP_US / 1e6


@dataclass(frozen=True)
class Arrival:
    """A job: when it comes, how long it runs, what it needs."""

    at_s: float
    runs_s: float
    count: int = 1
    priority: int = 1
    isolation: str = "device"

    def waiting(self, number: int) -> Waiting:
        rank = rank_us(int(self.at_s * 1e6), self.priority)
        return Waiting(f"{number:04d}", "cpu", self.count, self.isolation, rank_us=rank)


@dataclass
class Fleet:
    """Hosts with so many devices each, and what happened on them."""

    sizes: list[int]
    arrivals: list[Arrival]
    started: dict[int, tuple[float, int]] = field(default_factory=dict)  # job -> (when, host)
    ended_s: dict[int, float] = field(default_factory=dict)
    head_s: dict[int, float] = field(default_factory=dict)  # when it became first of all that wait
    _leased: list[dict[str, int]] = field(default_factory=list)

    def run(self, orders: st.DataObject) -> None:
        """From the first arrival to the last end."""
        self._leased = [{} for _ in self.sizes]
        happenings = [(arrival.at_s, 1, number) for number, arrival in enumerate(self.arrivals)]
        heapq.heapify(happenings)
        queue: dict[int, Waiting] = {}
        while happenings:
            now_s, is_arrival, number = heapq.heappop(happenings)
            if is_arrival:
                queue[number] = self.arrivals[number].waiting(number)
            else:
                _, host = self.started[number]
                self._leased[host] = {name: job for name, job in self._leased[host].items() if job != number}
                self.ended_s[number] = now_s
            if happenings and happenings[0][0] == now_s:
                continue  # all that happens at once is seen at once
            for host in orders.draw(st.permutations(range(len(self.sizes)))):
                for begun in self._start(host, queue, now_s):
                    heapq.heappush(happenings, (now_s + self.arrivals[begun].runs_s, 0, begun))
            self._check_no_idle_host(queue)
            if queue:
                self.head_s.setdefault(min(queue, key=lambda job: queue[job].place), now_s)

    def view(self, host: int) -> HostView:
        leased = self._leased[host]
        names = tuple(f"cpu:{i}" for i in range(self.sizes[host]))
        alone = any(self._is_alone(job) for job in leased.values())
        return HostView({"cpu": names}, frozenset(leased), alone, 1)

    def _is_alone(self, number: int) -> bool:
        return is_exclusive(self.arrivals[number].isolation, "cpu")

    def _start(self, host: int, queue: dict[int, Waiting], now_s: float) -> list[int]:
        begun = []
        in_order = sorted(queue.values(), key=lambda job: job.place)
        while (choice := choose(self.view(host), in_order)) is not None:
            number = int(choice.job_id)
            job = queue.pop(number)
            in_order.remove(job)
            # All or nothing, on devices that nobody holds, and alone where it must be.
            assert len(set(choice.devices)) == job.device_count
            assert not set(choice.devices) & set(self._leased[host])
            assert not (self._leased[host] and choice.exclusive)
            assert not any(self._is_alone(other) for other in self._leased[host].values())
            self._leased[host].update(dict.fromkeys(choice.devices, number))
            self.started[number] = (now_s, host)
            begun.append(number)
        return begun

    def _check_no_idle_host(self, queue: dict[int, Waiting]) -> None:
        """No job waits while a host that could run it does nothing at all."""
        for host, size in enumerate(self.sizes):
            assert self._leased[host] or all(job.device_count > size for job in queue.values())


arrivals = st.builds(
    Arrival,
    at_s=st.integers(0, 12).map(float),
    runs_s=st.integers(1, 6).map(float),
    count=st.integers(1, 3),
    priority=st.sampled_from(sorted(PRIORITIES.values())),
    isolation=st.sampled_from(["device", "host"]),
)
fleets = st.builds(Fleet, sizes=st.lists(st.integers(1, 3), min_size=1, max_size=3), arrivals=st.lists(arrivals))


@settings(max_examples=300, deadline=None)
@given(fleets, st.data())
def test_every_job_that_some_host_could_run_runs_once_to_its_end(fleet: Fleet, data: st.DataObject) -> None:
    """All or nothing, no deadlock, no idle host: see `Fleet`."""
    fleet.run(data)
    possible = {number for number, job in enumerate(fleet.arrivals) if job.count <= max(fleet.sizes)}
    assert set(fleet.started) == set(fleet.ended_s) == possible


@settings(max_examples=300, deadline=None)
@given(fleets, st.data())
def test_whoever_is_first_starts_when_those_that_run_then_have_ended(fleet: Fleet, data: st.DataObject) -> None:
    """The bound on starvation: a gang behind a stream of small jobs waits for what ran when it came to the head."""
    fleet.run(data)
    for number, head_s in fleet.head_s.items():
        if number not in fleet.started:
            continue
        begun_s, _ = fleet.started[number]
        able = {host for host, size in enumerate(fleet.sizes) if size >= fleet.arrivals[number].count}
        # On each host that could take it: when the last of those has ended that ran there at that moment. Jobs that
        # were more urgent and came later may have gone before it; they are counted as if they had run then, too.
        ahead = fleet.arrivals[number].waiting(number).place
        bound_s = min(
            max(
                [head_s]
                + [
                    fleet.ended_s[other]
                    for other, (other_s, where) in fleet.started.items()
                    if where == host
                    and other != number
                    and (other_s <= head_s or fleet.arrivals[other].waiting(other).place < ahead)
                    and other_s <= begun_s
                    and fleet.ended_s[other] > head_s
                ]
            )
            for host in able
        )
        assert begun_s <= bound_s


@given(st.integers(1, 3), st.data())
def test_a_gang_overtakes_an_endless_stream(runs_s: int, data: st.DataObject) -> None:
    """Two devices, one-device jobs that come faster than they end: the gang starts after what ran when it came."""
    stream = [Arrival(float(at), float(runs_s) + 1.0) for at in range(40)]
    gang = Arrival(10.0, 1.0, count=2)
    fleet = Fleet([2], [*stream, replace(gang, at_s=0.5)])
    fleet.run(data)
    begun_s, _ = fleet.started[len(stream)]
    assert begun_s <= 0.5 + runs_s + 1.0


@given(st.data())
def test_a_low_job_is_overtaken_only_by_what_came_within_the_step(data: st.DataObject) -> None:
    """An endless stream of urgent jobs that keeps the host busy: the low one starts after two steps all the same."""
    run_s = STEP_S / 5
    stream = [Arrival(number * run_s, run_s, priority=PRIORITIES["high"]) for number in range(20)]
    fleet = Fleet([1], [*stream, Arrival(0.0, run_s, priority=PRIORITIES["low"])])
    fleet.run(data)
    begun_s, _ = fleet.started[len(stream)]
    assert 2 * STEP_S <= begun_s <= 2 * STEP_S + 2 * run_s
