"""What workers do to jobs, and what is done for workers that vanished, on both databases."""

from __future__ import annotations

import pytest
from sqlalchemy import select, update

from tests.torchstone.store_samples import (
    LEASE_S,
    a_host,
    claim,
    lease_until_us,
    let_leases_end,
    nothing_to_claim,
    reconcile,
    row,
    spec,
    state,
    submit,
    up,
)
from torchstone.jobs import State
from torchstone.scheduling import PRIORITY_STEP_US
from torchstone.store import Store, artifacts, events, hosts, jobs, leases, logs
from torchstone.store.leases import Holder
from torchstone.store.schema import hosts as hosts_table
from torchstone.store.schema import jobs as jobs_table
from torchstone.store.schema import now_us, placements

A_FILE = {"name": "script.pt", "media_type": "application/octet-stream", "bytes": 3, "sha256": "ab" * 32}


def told(store: Store, job_id: str) -> list[str]:
    """The types and states of a job's events."""
    with store.read() as conn:
        return [f"{e['type']} {e['data']}" for e in events.after(conn, job_id, 0)]


class TestClaim:
    def test_a_claimed_job_runs_on_its_devices(self, store: Store) -> None:
        # Given
        host = up(store, cpu=4)
        [job_id] = submit(store, count=2, timeout_s=60)
        # When
        claimed = claim(store, host)
        # Then
        assert claimed.holder == Holder(job_id, 1, "a", "1")
        assert claimed.devices == ("cpu:0", "cpu:1")
        assert not claimed.exclusive
        assert claimed.timeout_s == 60
        job = row(store, job_id)
        assert claimed.spec == job["spec"]
        assert (job["state"], job["attempt"]) == ("running", 1)
        assert job["started_us"] >= job["created_us"]
        [attempt] = job["attempts"]
        assert (attempt["host"], attempt["devices"], attempt["outcome"]) == ("a", ["cpu:0", "cpu:1"], None)
        with store.read() as conn:
            assert leases.held(conn, "a", "1") == {(job_id, 1): "running"}
            [item] = hosts.inventory(conn, LEASE_S)
        holders = [device["held_by"] and device["held_by"]["job"] for device in item["devices"]]
        assert holders == [job_id, job_id, None, None]

    def test_in_order_of_priority_then_arrival(self, store: Store) -> None:
        host = up(store, cpu=8)
        low = submit(store, 2, priority="low")
        normal = submit(store, 2)
        high = submit(store, 2, priority="high")
        assert [claim(store, host).holder.job_id for _ in range(6)] == high + normal + low

    def test_an_hour_of_waiting_is_worth_a_step_of_priority(self, store: Store) -> None:
        host = up(store)
        [low] = submit(store, priority="low")
        with store.write() as conn:
            ago_us = PRIORITY_STEP_US + 1_000_000
            conn.execute(update(jobs_table).values(rank_us=jobs_table.c.rank_us - ago_us))  # as if it came then
        [normal] = submit(store)
        assert [claim(store, host).holder.job_id for _ in range(2)] == [low, normal]

    def test_a_worker_makes_way_for_one_that_must_have_their_machine_alone(self, store: Store) -> None:
        # Given two workers of one machine, one with the GPU and a stream of jobs for it, the other with the cores
        gpu = up(store, "gpu", cpu=0, cuda=1, machine="m")
        cpu = up(store, "cpu", cpu=1, machine="m")
        [first] = submit(store, device_type="cuda")
        running = claim(store, gpu).holder
        assert running.job_id == first
        # When a job for the cores wants the machine for itself, and more of the stream comes behind it
        [alone] = submit(store, isolation="host")
        [later] = submit(store, device_type="cuda")
        assert nothing_to_claim(store, cpu)
        with store.write() as conn:
            leases.finish(conn, running, State.succeeded)
        # Then the stream waits until that job has had its turn
        assert nothing_to_claim(store, gpu)
        holder = claim(store, cpu).holder
        assert holder.job_id == alone
        with store.write() as conn:
            leases.finish(conn, holder, State.succeeded)
        assert claim(store, gpu).holder.job_id == later

    def test_two_workers_of_one_machine_share_its_devices(self, store: Store) -> None:
        one, two = (up(store, name, cpu=2, machine="m") for name in "ab")
        submit(store, 3)
        assert claim(store, one).devices == ("cpu:0",)
        assert claim(store, two).devices == ("cpu:1",)
        assert nothing_to_claim(store, one)
        assert nothing_to_claim(store, two)

    def test_another_machine_has_devices_of_its_own(self, store: Store) -> None:
        one, two = (up(store, name, cpu=1) for name in "ab")
        submit(store, 2)
        assert claim(store, one).devices == claim(store, two).devices == ("cpu:0",)

    def test_an_exclusive_job_waits_for_the_whole_machine_and_then_keeps_it(self, store: Store) -> None:
        # Given a neighbour
        host = up(store, cpu=4)
        submit(store)
        neighbour = claim(store, host)
        [exclusive, later] = [*submit(store, isolation="host"), *submit(store)]
        # Then it waits, and nobody overtakes it.
        assert nothing_to_claim(store, host)
        # When the neighbour has ended
        with store.write() as conn:
            leases.finish(conn, neighbour.holder, State.succeeded)
        claimed = claim(store, host)
        assert claimed.holder.job_id == exclusive
        assert claimed.exclusive
        # Then nobody else starts on three free devices, not even another worker of this machine
        assert nothing_to_claim(store, host)
        assert nothing_to_claim(store, up(store, "b", cpu=4, machine=host.machine))
        with store.read() as conn:
            assert [item["isolated_by"] for item in hosts.inventory(conn, LEASE_S)] == [exclusive, exclusive]
        # until it has ended.
        with store.write() as conn:
            leases.finish(conn, claimed.holder, State.succeeded)
        assert claim(store, host).holder.job_id == later

    def test_timing_on_cpu_devices_is_exclusive_by_itself(self, store: Store) -> None:
        host = up(store)
        submit(store, isolation="auto")
        assert claim(store, host).exclusive

    def test_a_gang_is_not_overtaken(self, store: Store) -> None:
        host = up(store, cpu=2)
        submit(store)
        small = claim(store, host)
        [gang] = submit(store, count=2)
        submit(store, 5)
        assert nothing_to_claim(store, host)
        with store.write() as conn:
            leases.finish(conn, small.holder, State.succeeded)
        assert claim(store, host).holder.job_id == gang

    def test_jobs_for_other_hosts_do_not_hide_those_for_this_one(self, store: Store) -> None:
        host = up(store, cpu=2, memory_bytes=1 << 30)
        submit(store, 400, device_type="cuda")
        submit(store, 400, count=3)
        with store.write() as conn:
            conn.execute(update(jobs_table).values(memory_bytes=0))
        too_big = submit(store, 1, priority="high")
        with store.write() as conn:
            conn.execute(update(jobs_table).where(jobs_table.c.id == too_big[0]).values(memory_bytes=2 << 30))
        [mine] = submit(store, priority="low")
        assert claim(store, host).holder.job_id == mine

    def test_auto_means_cuda_wherever_a_living_host_has_enough(self, store: Store) -> None:
        # Given a job that asks for two devices, and a CPU host
        cpu_host = up(store, "cpu host", cpu=4)
        [job_id] = submit(store, device_type="auto", count=2)
        # When another host has two GPUs
        gpu_host = up(store, "gpu host", cpu=4, cuda=2)
        # Then the CPU host leaves the job to it.
        assert nothing_to_claim(store, cpu_host)
        claimed = claim(store, gpu_host)
        assert (claimed.holder.job_id, claimed.devices) == (job_id, ("cuda:0", "cuda:1"))
        # When more are asked for than any host has GPUs, it means CPU devices.
        [wide] = submit(store, device_type="auto", count=3)
        claimed = claim(store, cpu_host)
        assert (claimed.holder.job_id, claimed.devices) == (wide, ("cpu:0", "cpu:1", "cpu:2"))

    @pytest.mark.parametrize("gone", ["down", "draining", "silent"])
    def test_auto_does_not_wait_for_a_host_that_is_gone(self, store: Store, gone: str) -> None:
        cpu_host = up(store, "cpu host", cpu=1)
        gpu_host = up(store, "gpu host", cuda=1)
        submit(store, device_type="auto")
        with store.write() as conn:
            if gone == "silent":
                old = now_us() - int(2 * LEASE_S * 1e6)
                conn.execute(update(hosts_table).where(hosts_table.c.name == gpu_host.name).values(seen_us=old))
            else:
                hosts.set_state(conn, gpu_host.name, gpu_host.incarnation, gone)
        assert claim(store, cpu_host).devices == ("cpu:0",)

    @pytest.mark.parametrize("how", ["never registered", "draining", "down", "registered anew"])
    def test_a_host_that_is_not_up_gets_nothing(self, store: Store, how: str) -> None:
        submit(store)
        host = a_host() if how == "never registered" else up(store)
        with store.write() as conn:
            if how in ("draining", "down"):
                hosts.set_state(conn, host.name, host.incarnation, how)
            elif how == "registered anew":
                hosts.register(conn, a_host(run="2"))
        assert nothing_to_claim(store, host)


class TestFence:
    """A stale attempt's writes are refused."""

    @pytest.fixture
    def stale(self, store: Store) -> Holder:
        """The holder of an attempt that was taken away; its job runs again, elsewhere."""
        old = up(store, "old")
        submit(store)
        holder = claim(store, old).holder
        with store.write() as conn:
            let_leases_end(conn, "old")
        assert reconcile(store) == [holder.job_id]
        assert claim(store, up(store, "new")).holder == Holder(holder.job_id, 2, "new", "1")
        return holder

    def test_nothing_that_it_writes_takes_effect(self, store: Store, stale: Holder) -> None:
        before = row(store, stale.job_id)
        with store.write() as conn:
            assert not leases.progress(conn, stale, {"done": 1})
            assert not leases.progress(conn, stale, None)
            ended = leases.finish(
                conn, stale, State.failed, result='{"stale":1}', error={"code": "c", "message": "m"}, files=[A_FILE]
            )
            assert ended is None
            assert leases.give_back(conn, stale, "late", spent=True, max_attempts=1) is None
        assert row(store, stale.job_id) == before
        with store.read() as conn:
            assert artifacts.all_of(conn, stale.job_id) == []

    def test_its_heartbeat_revives_nothing(self, store: Store, stale: Holder) -> None:
        with store.write() as conn:
            leases.renew(conn, stale.host, stale.incarnation, LEASE_S)
        with store.read() as conn:
            assert leases.held(conn, stale.host, stale.incarnation) == {}
            assert leases.held(conn, "new", "1") == {(stale.job_id, 2): "running"}

    def test_its_last_words_stand_under_its_own_number(self, store: Store, stale: Holder) -> None:
        with store.write() as conn:
            logs.append(conn, stale.job_id, 2, [(0, "of the second")])
            logs.append(conn, stale.job_id, stale.attempt, [(0, "of the first")])
        with store.read() as conn:
            assert logs.read(conn, stale.job_id, attempt=2) == [(2, 0, "of the second")]

    @pytest.mark.parametrize("wrong", [{"attempt": 2}, {"host": "b"}, {"incarnation": "2"}])
    def test_every_part_of_the_holder_counts(self, store: Store, wrong: dict[str, object]) -> None:
        host = up(store)
        submit(store)
        holder = claim(store, host).holder
        other = Holder(**{**vars(holder), **wrong})  # type: ignore[arg-type]
        with store.write() as conn:
            assert not leases.progress(conn, other, {"done": 1})
            assert leases.finish(conn, other, State.succeeded) is None
            assert leases.progress(conn, holder, {"done": 1})

    def test_a_worker_that_was_replaced_cannot_renew(self, store: Store) -> None:
        host = up(store)
        submit(store)
        holder = claim(store, host).holder
        with store.write() as conn:
            assert leases.renew(conn, host.name, host.incarnation, LEASE_S)
            hosts.register(conn, a_host(run="2"))
        until_us = lease_until_us(store, holder)
        with store.write() as conn:
            assert not leases.renew(conn, host.name, host.incarnation, 10 * LEASE_S)
        assert lease_until_us(store, holder) == until_us


class TestFinish:
    def test_result_error_and_files_are_stored_with_the_end(self, store: Store) -> None:
        host = up(store)
        [job_id] = submit(store)
        holder = claim(store, host).holder
        error = {"code": "workload_error", "message": "it \x00 raised"}
        with store.write() as conn:
            ended = leases.finish(conn, holder, State.failed, result='{"a":1}', error=error, files=[A_FILE])
        assert ended is State.failed
        job = row(store, job_id)
        assert (job["state"], job["result"]) == ("failed", '{"a":1}')
        assert job["error"] == '{"code":"workload_error","message":"it \\u0000 raised"}'
        assert job["finished_us"] >= job["started_us"]
        [attempt] = job["attempts"]
        assert (attempt["outcome"], attempt["reason"]) == ("failed", "it \ufffd raised")
        with store.read() as conn:
            [stored_file] = artifacts.all_of(conn, job_id)
            assert A_FILE.items() <= stored_file.items()
            assert artifacts.named(conn, job_id, "script.pt") == stored_file
            assert artifacts.named(conn, job_id, "other") is None
            assert leases.held(conn, host.name, host.incarnation) == {}

    @pytest.mark.parametrize("end", [State.succeeded, State.failed])
    def test_said_twice_it_is_done_once(self, store: Store, end: State) -> None:
        """The answer to a commit can get lost with the connection."""
        host = up(store)
        [job_id] = submit(store)
        holder = claim(store, host).holder

        def finish() -> State | None:
            with store.write() as conn:
                return leases.finish(conn, holder, end, result="{}", files=[A_FILE])

        assert finish() is end
        once = row(store, job_id)
        assert finish() is end
        assert row(store, job_id) == once
        assert len(told(store, job_id)) == 3

    def test_devices_are_free_again(self, store: Store) -> None:
        host = up(store, cpu=1)
        submit(store, 2)
        first = claim(store, host)
        assert nothing_to_claim(store, host)
        with store.write() as conn:
            leases.finish(conn, first.holder, State.succeeded)
        assert claim(store, host).devices == first.devices

    def test_only_an_end_is_an_end(self, store: Store) -> None:
        host = up(store)
        submit(store)
        holder = claim(store, host).holder
        with pytest.raises(AssertionError), store.write() as conn:
            leases.finish(conn, holder, State.queued)


class TestProgress:
    def test_it_shows_and_is_told(self, store: Store) -> None:
        host = up(store)
        [job_id] = submit(store)
        holder = claim(store, host).holder
        with store.write() as conn:
            assert leases.progress(conn, holder, {"done": 3, "total": float("nan")})
            assert leases.progress(conn, holder, None)
        assert row(store, job_id)["progress"] == '{"done":3,"total":null}'
        assert told(store, job_id)[-1] == 'progress {"done":3,"total":null}'

    def test_an_attempt_starts_without_the_last_ones(self, store: Store) -> None:
        host = up(store)
        [job_id] = submit(store)
        holder = claim(store, host).holder
        with store.write() as conn:
            leases.progress(conn, holder, {"done": 3})
            leases.give_back(conn, holder, "drain", spent=False, max_attempts=3)
        assert row(store, job_id)["progress"] is None


class TestGiveBack:
    def test_without_spending_an_attempt(self, store: Store) -> None:
        host = up(store)
        [job_id] = submit(store)
        for number in range(1, 6):
            holder = claim(store, host).holder
            assert holder.attempt == number
            with store.write() as conn:
                assert leases.give_back(conn, holder, "drain", spent=False, max_attempts=1) is State.queued
        job = row(store, job_id)
        assert (job["state"], job["lost"], job["started_us"]) == ("queued", 0, None)
        assert [attempt["outcome"] for attempt in job["attempts"]] == ["returned"] * 5

    def test_spending_the_last_attempt_ends_the_job(self, store: Store) -> None:
        host = up(store)
        [job_id] = submit(store)
        states = []
        for _ in range(3):
            holder = claim(store, host).holder
            with store.write() as conn:
                states.append(leases.give_back(conn, holder, "its process vanished", spent=True, max_attempts=3))
        assert states == [State.queued, State.queued, State.failed]
        error = row(store, job_id)["error"]
        assert '"code":"worker_lost"' in error
        assert "lost 3 times, the last time: its process vanished" in error

    def test_an_orderly_return_after_losses_is_not_a_loss(self, store: Store) -> None:
        host = up(store)
        [job_id] = submit(store)
        for spent in (True, True, False):
            holder = claim(store, host).holder
            with store.write() as conn:
                assert leases.give_back(conn, holder, "r", spent=spent, max_attempts=3) is State.queued
        assert row(store, job_id)["lost"] == 2

    def test_a_job_that_is_canceling_is_canceled(self, store: Store) -> None:
        host = up(store)
        [job_id] = submit(store)
        holder = claim(store, host).holder
        with store.write() as conn:
            jobs.cancel(conn, job_id)
            assert leases.give_back(conn, holder, "drain", spent=False, max_attempts=3) is State.canceled
        assert row(store, job_id)["finished_us"] is not None


class TestReconcile:
    def test_an_expired_lease_puts_the_job_back_until_attempts_run_out(self, store: Store) -> None:
        host = up(store)
        [job_id] = submit(store)
        for expected in ("queued", "queued", "failed"):
            claim(store, host)
            assert reconcile(store) == []  # the lease still runs
            with store.write() as conn:
                let_leases_end(conn, host.name)
            assert reconcile(store) == [job_id]
            assert state(store, job_id) == expected
        assert reconcile(store) == []
        job = row(store, job_id)
        assert '"code":"worker_lost"' in job["error"]
        assert [attempt["outcome"] for attempt in job["attempts"]] == ["lost"] * 3

    def test_a_renewed_lease_does_not_expire(self, store: Store) -> None:
        host = up(store)
        submit(store)
        claim(store, host)
        with store.write() as conn:
            let_leases_end(conn, host.name)
            leases.renew(conn, host.name, host.incarnation, LEASE_S)
        assert reconcile(store) == []

    def test_canceling_with_a_lost_worker_is_canceled(self, store: Store) -> None:
        host = up(store)
        [job_id] = submit(store)
        claim(store, host)
        with store.write() as conn:
            jobs.cancel(conn, job_id)
            let_leases_end(conn, host.name)
        assert reconcile(store, max_attempts=1) == [job_id]
        job = row(store, job_id)
        assert (job["state"], job["error"]) == ("canceled", None)

    def test_a_job_that_waited_too_long_expires_and_is_never_started(self, store: Store) -> None:
        host = up(store)
        [late, patient] = [*submit(store, start_within_s=60), *submit(store, start_within_s=1000)]
        with store.write() as conn:
            conn.execute(update(jobs_table).where(jobs_table.c.id == late).values(start_by_us=now_us() - 1))
        assert claim(store, host).holder.job_id == patient  # though nobody reconciled yet
        assert reconcile(store) == []
        assert state(store, late) == "expired"
        assert row(store, late)["finished_us"] is not None
        assert "it was not started within" in row(store, late)["error"]
        assert told(store, late)[-1] == 'state {"state":"expired"}'

    def test_one_that_started_in_time_is_tried_again_after_its_worker_was_lost(self, store: Store) -> None:
        host = up(store)
        [job_id] = submit(store, start_within_s=60)
        claim(store, host)
        with store.write() as conn:
            conn.execute(update(jobs_table).values(start_by_us=now_us() - 1))
            let_leases_end(conn, host.name)
        assert reconcile(store) == [job_id]
        assert state(store, job_id) == "queued"
        assert claim(store, host).holder.attempt == 2

    def test_gangs_that_wait_are_rung_for_again(self, store: Store) -> None:
        submit(store, 3)
        submit(store, count=2, device_type="auto")

        def gangs(ring_again_s: float) -> list[tuple[str, int]]:
            with store.write() as conn:
                return sorted(leases.reconcile(conn, max_attempts=3, ring_again_s=ring_again_s)[1])

        assert gangs(60) == []  # they were rung for when they came
        assert gangs(0) == gangs(0) == [("auto", 2), ("cpu", 1)]
        # When a job comes back from a lost worker, it is rung for at once.
        host = up(store)
        claim(store, host)
        with store.write() as conn:
            let_leases_end(conn, host.name)
        assert gangs(60) == [("cpu", 1)]
        # When nothing waits, nothing is rung for.
        with store.write() as conn:
            conn.execute(update(jobs_table).values(state="canceled"))
        assert gangs(0) == []


class TestTakeBackFrom:
    def test_a_restarted_worker_takes_back_what_its_earlier_run_held(self, store: Store) -> None:
        # Given
        host, other = up(store), up(store, "b")
        mine, canceling, theirs = submit(store, 3)
        assert [claim(store, h).holder.job_id for h in (host, host, other)] == [mine, canceling, theirs]
        with store.write() as conn:
            jobs.cancel(conn, canceling)
            # When
            hosts.register(conn, a_host(run="2"))
            taken = leases.take_back_from(conn, "a", "2", "its worker was restarted", max_attempts=3)
        # Then
        assert [holder.job_id for holder in taken] == [mine, canceling]
        assert [state(store, job_id) for job_id in (mine, canceling, theirs)] == ["queued", "canceled", "running"]
        assert row(store, mine)["lost"] == 1
        assert row(store, mine)["attempts"][0]["reason"] == "its worker was restarted"
        # And its own are none of these.
        assert claim(store, a_host(run="2")).holder.job_id == mine
        with store.write() as conn:
            assert leases.take_back_from(conn, "a", "2", "again", max_attempts=3) == []

    def test_devices_of_the_earlier_run_are_free_again(self, store: Store) -> None:
        host = up(store, cpu=1)
        submit(store)
        claim(store, host)
        with store.write() as conn:
            hosts.register(conn, a_host(cpu=1, run="2"))
            leases.take_back_from(conn, "a", "2", "r", max_attempts=3)
        with store.read() as conn:
            assert conn.scalar(select(placements.c.released_us)) is not None
        assert claim(store, a_host(cpu=1, run="2")).devices == ("cpu:0",)


class TestHosts:
    def test_registering_again_replaces_the_earlier_run(self, store: Store) -> None:
        up(store, cpu=1)
        up(store, cpu=3, cuda=1, run="2")
        with store.read() as conn:
            found = hosts.find(conn, "a")
            [living] = hosts.living(conn, LEASE_S)
        assert found is not None
        assert (found["incarnation"], found["state"]) == ("2", "up")
        assert 0 <= found["silent_s"] < 5
        assert (living["cpu_count"], living["cuda_count"]) == (3, 1)

    def test_an_earlier_run_cannot_speak_for_the_host(self, store: Store) -> None:
        up(store)
        up(store, run="2")
        with store.write() as conn:
            hosts.set_state(conn, "a", "1", "down")
            assert [host["name"] for host in hosts.living(conn, LEASE_S)] == ["a"]

    def test_a_host_not_heard_of_is_lost_and_its_jobs_show_until_taken_back(self, store: Store) -> None:
        host = up(store)
        [job_id] = submit(store)
        claim(store, host)
        with store.write() as conn:
            conn.execute(update(hosts_table).values(seen_us=now_us() - int(LEASE_S * 1e6)))
        with store.read() as conn:
            assert hosts.living(conn, LEASE_S) == []
            [item] = hosts.inventory(conn, LEASE_S)
            [lease] = hosts.leased(conn)
        assert item["state"] == "lost"
        assert item["devices"][0]["held_by"]["job"] == job_id
        by_us = row(store, job_id)["started_us"] + 3600 * 1_000_000
        assert lease == {
            "machine": host.machine,
            "job_id": job_id,
            "exclusive": False,
            "left_s": None,
            "by_us": by_us,
        }


class TestLogs:
    def test_chunks_come_back_in_order_and_page_by_page(self, store: Store) -> None:
        [job_id] = submit(store)
        with store.write() as conn:
            logs.append(conn, job_id, 1, [(i, f"line {i}\n") for i in range(10)])
            logs.append(conn, job_id, 2, [])
            logs.append(conn, job_id, 2, [(0, "nul \x00 and \ud800")])
        with store.read() as conn:
            assert [seq for _, seq, _ in logs.read(conn, job_id, attempt=1, after=3, limit=4)] == [4, 5, 6, 7]
            assert logs.read(conn, job_id, attempt=2) == [(2, 0, "nul \ufffd and ?")]
            assert len(logs.read(conn, job_id)) == 11

    def test_a_chunk_stored_twice_is_there_once(self, store: Store) -> None:
        """The answer to a commit can get lost with the connection."""
        [job_id] = submit(store)
        for chunks in ([(0, "a")], [(0, "a"), (1, "b")]):
            with store.write() as conn:
                logs.append(conn, job_id, 1, chunks)
        with store.read() as conn:
            assert logs.read(conn, job_id) == [(1, 0, "a"), (1, 1, "b")]


def test_an_auto_job_that_no_gpu_host_has_room_for_runs_on_cpus(store: Store) -> None:
    small, big = up(store, "gpu", cuda=2, memory_bytes=16 << 30), up(store, "cpu", cpu=2, memory_bytes=64 << 30)
    wanted = spec(device_type="auto")
    with store.read() as conn:
        jobs.check_capacity(wanted, 40 << 30, hosts.living(conn, LEASE_S))
    with store.write() as conn:
        jobs.insert_many(conn, [jobs.NewJob.of(wanted, memory_bytes=40 << 30)])
    assert nothing_to_claim(store, small)
    assert claim(store, big).devices == ("cpu:0",)
    # One that a GPU host could run is left to it
    submit(store, device_type="auto")
    assert nothing_to_claim(store, big)
    assert claim(store, small).devices == ("cuda:0",)
