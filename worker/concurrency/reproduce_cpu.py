"""What of `reproduce.py` runs on CPU devices: a process for each of them, pinned to its cores; see `reproduce`.

TEXT is the script below its head, which defines SIZE, REPEATS, DTYPE, ATOL, SEED, DEVICES, THREADS, ROUNDS, STREAMS,
PARTS, `matrix` and `check`.
"""

from __future__ import annotations

_COMMON = '''
import multiprocessing as mp
import tempfile
from concurrent.futures import ThreadPoolExecutor

import torch.distributed as dist

context = mp.get_context("forkserver")
context.set_forkserver_preload(["torch", "torch.distributed"])
started = []


def start(target, *arguments):
    """A process that answers what it is sent through the pipe that this returns."""
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()  # so that its end, also by a failed check, is seen here
    started.append((process, ours))
    return ours


def order(at_once, *orders):
    """Seconds from the first order, a (pipe, word), to the last answer, a moment."""
    begun, ends = time.perf_counter(), []
    if at_once:
        for pipe, word in orders:
            pipe.send(word)
    for pipe, word in orders:
        if not at_once:
            pipe.send(word)
        ends.append(pipe.recv())
    return max(ends) - begun


def measure(ways, after=lambda: None):
    """The median of each way's orders, all taken in turns, the first round not counted; then every process is ended."""
    seconds = {name: [] for name in ways}
    for _ in range(ROUNDS + 1):
        for name, (at_once, orders, checks) in ways.items():
            seconds[name].append(order(at_once, *orders))
            order(True, *checks)
            after()
    for name in ways:
        print(f"{name:24} {statistics.median(seconds[name][1:]):.6f} s", flush=True)
    for _, pipe in started:
        pipe.send(None)
    while started:
        started.pop()[0].join()


def begin(cores, threads):
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(threads)
'''

_DEVICES = '''

# -- concurrency and overlap: run(x) on each device, and copies of what the first one computes


def device(pipe, cores, seed, shared, heard):
    """One CPU device: products into memory that the copying process sees; a byte for each that is done."""
    begin(cores, THREADS)
    x, local = matrix(seed), torch.empty_like(shared)
    expected = x @ x
    while (word := pipe.recv()) is not None:
        if word == "run":
            for i in range(REPEATS):
                torch.mm(x, x, out=shared[i])
                heard.release()
        elif word == "receive":
            for i in range(REPEATS):
                heard.acquire()
                local[i].copy_(shared[i])
        end = time.perf_counter()
        if word == "check":
            check(shared, expected)
        elif word == "receive":
            check(local, expected)
        pipe.send(end)


def devices_and_copies():
    shared = [torch.full((REPEATS, SIZE, SIZE), torch.nan, dtype=DTYPE).share_memory_() for _ in GROUPS]
    heard = [context.Semaphore(0) for _ in GROUPS]
    pipes = [start(device, group, SEED + r, shared[r], heard[r]) for r, group in enumerate(GROUPS)]
    copier = start(device, GROUPS[min(1, DEVICES - 1)], SEED, shared[0], heard[0])  # copies what device 0 computes
    every = [(pipe, "run") for pipe in pipes]
    checks = [(pipe, "check") for pipe in pipes]
    ways = {}
    if "concurrency" in PARTS:
        ways |= {f"device {r} alone": (True, [every[r]], [checks[r]]) for r in range(DEVICES)}
        for count in range(2, DEVICES):
            ways[f"{count} at once"] = (True, every[:count], checks[:count])
        ways |= {"one after another": (False, every, checks), "all at once": (True, every, checks)}
    if "overlap" in PARTS:
        both = [every[0], (copier, "receive")]
        ways |= {"compute, then copy": (False, both, checks[:1]), "copy while computing": (True, both, checks[:1])}

    def forget_what_was_told():
        for each in heard:
            while each.acquire(block=False):
                pass

    measure(ways, forget_what_was_told)
'''

_STREAMS = '''

# -- streams: independent products on one device, one after another or several at a time


def share(inputs: list[torch.Tensor], outputs: list[torch.Tensor], first: int, step: int) -> int:
    for i in range(first, len(inputs), step):
        torch.mm(inputs[i], inputs[i], out=outputs[i])
    return 0


def forked(inputs: list[torch.Tensor], outputs: list[torch.Tensor], lanes: int) -> int:
    futures = [torch.jit.fork(share, inputs, outputs, first, lanes) for first in range(1, lanes)]
    done = share(inputs, outputs, 0, lanes)
    for future in futures:
        done += torch.jit.wait(future)
    return done


def stream_device(pipe, cores, way, lanes):
    """One way of doing 64 small and 4 large products; a fork is asynchronous only inside a script."""
    begin(cores, THREADS if way == "one stream" else 1)
    if way == "fork":
        torch.set_num_interop_threads(lanes)
        script = torch.jit.script(forked)
    pool = ThreadPoolExecutor(lanes, initializer=lambda: torch.set_num_threads(1))
    work = {}
    for which, size, count in (("small", 64, 64), ("large", SIZE, 4)):
        inputs = [matrix(SEED + i, size) for i in range(count)]
        work[which] = inputs, [torch.full_like(x, torch.nan) for x in inputs], [x @ x for x in inputs]
    while (which := pipe.recv()) is not None:
        if which.startswith("check"):
            for output, right in zip(*work[which.split()[1]][1:]):
                check(output[None], right)
        else:
            inputs, outputs, _ = work[which]
            if way == "one stream":
                share(inputs, outputs, 0, 1)
            elif way == "threads":
                list(pool.map(lambda first: share(inputs, outputs, first, lanes), range(lanes)))
            else:
                script(inputs, outputs, lanes)
        pipe.send(time.perf_counter())


def streams():
    lanes, ways = min(STREAMS, max(2, THREADS)), {}
    pipes = {way: start(stream_device, GROUPS[0], way, lanes) for way in ("one stream", "threads", "fork")}
    for which in ("small", "large"):
        for way, pipe in pipes.items():
            ways[f"{which}, {way}"] = (True, [(pipe, which)], [(pipe, f"check {which}")])
    measure(ways)
'''

_SCHEDULE = '''

# -- schedule: a training step of two layers over one CPU, which holds the weights, and two devices

BATCH, FEATURES, RATE = 256, max(16, min(1024, SIZE // 4)), 0.1


def weights_and_batch():
    def normal(seed, *shapes):
        generator = torch.Generator().manual_seed(seed)
        return [torch.randn(*shape, generator=generator, dtype=DTYPE) for shape in shapes]

    weights = [w / FEATURES for w in normal(SEED, *[(FEATURES, FEATURES)] * 2)]
    return weights, normal(SEED + 1, *[(BATCH, FEATURES)] * 2)


def check_step(weights):
    """Against a step on the whole batch in float64."""
    (w1, w2), (x, target) = ([t.double() for t in each] for each in weights_and_batch())
    w1.requires_grad_(), w2.requires_grad_()
    loss = ((torch.relu(x @ w1.T) @ w2.T - target) ** 2).sum() / BATCH
    for ours, w, gradient in zip(weights, (w1, w2), torch.autograd.grad(loss, (w1, w2))):
        error = float((ours.double() - (w - RATE * gradient)).detach().abs().max())
        assert error <= (1e-5 if DTYPE == torch.float32 else 1e-12), f"a device has other weights: off by {error}"


def step_device(pipe, cores, rank, shared, gradients, up, down):
    """One device. `run`: gradients go up as they come, weights come down as they are ready."""
    begin(cores, THREADS)
    initial, batch = weights_and_batch()
    (w1, w2), (x, target) = [w.clone() for w in initial], [part.chunk(2)[rank] for part in batch]
    while (word := pipe.recv()) is not None:
        if word in ("compute", "run"):
            a = x @ w1.T
            h = torch.relu(a)
            error = (h @ w2.T - target) * (2 / BATCH)
            gradients[1].copy_(error.T @ h)
            if word == "run":
                up.send_bytes(b"2")
            gradients[0].copy_(((error @ w2) * (a > 0)).T @ x)
            if word == "run":
                up.send_bytes(b"1")
        if word in ("pull", "run"):
            for layer, w in ((1, w2), (0, w1)):
                if word == "run":
                    down.recv_bytes()
                w.copy_(shared[layer])
        end = time.perf_counter()
        if word == "check":
            check_step([w1, w2])
            w1.copy_(initial[0]), w2.copy_(initial[1]), gradients.fill_(torch.nan)
        pipe.send(end)


def step_host(pipe, cores, shared, gradients, ups, downs):
    """The CPU: sums the gradients of a layer, updates its weights and tells so."""
    begin(cores, 1)
    initial, _ = weights_and_batch()
    while (word := pipe.recv()) is not None:
        for layer in (1, 0) if word != "check" else ():
            for up in ups if word == "run" else ():
                up.recv_bytes()
            shared[layer].sub_(gradients[0][layer] + gradients[1][layer], alpha=RATE)
            for down in downs if word == "run" else ():
                down.send_bytes(b".")
        if word == "check":
            shared[0].copy_(initial[0]), shared[1].copy_(initial[1])
        pipe.send(time.perf_counter())


def step_backend(pipe, cores, rank, meeting):
    """One device as DistributedDataParallel has it: each updates its own weights."""
    begin(cores, THREADS)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    initial, batch = weights_and_batch()
    x, target = [part.chunk(2)[rank] for part in batch]
    first, second = [torch.nn.Linear(FEATURES, FEATURES, bias=False, dtype=DTYPE) for _ in range(2)]
    model = torch.nn.Sequential(first, torch.nn.ReLU(), second)
    layer_mb = initial[0].nbytes / 2**20
    ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=layer_mb / 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)

    def reset():
        with torch.no_grad():
            first.weight.copy_(initial[0]), second.weight.copy_(initial[1])

    def step():
        optimizer.zero_grad()
        (((ddp(x) - target) ** 2).sum() * (2 / BATCH)).backward()
        optimizer.step()

    for _ in range(3):  # until its buckets are settled
        step()
    reset()
    while (word := pipe.recv()) is not None:
        if word == "run":
            step()
        end = time.perf_counter()
        if word == "check":
            check_step([first.weight.detach(), second.weight.detach()])
            reset()
        pipe.send(end)
    dist.destroy_process_group()


def schedule():
    initial, _ = weights_and_batch()
    shared = torch.stack(initial).share_memory_()
    gradients = torch.full((2, 2, FEATURES, FEATURES), torch.nan, dtype=DTYPE).share_memory_()
    ups, downs = ([context.Pipe(duplex=False) for _ in range(2)] for _ in range(2))
    workers = [start(step_device, GROUPS[r], r, shared, gradients[r], ups[r][1], downs[r][0]) for r in range(2)]
    host = start(step_host, GROUPS[0] | GROUPS[1], shared, gradients, [u[0] for u in ups], [d[1] for d in downs])
    with tempfile.TemporaryDirectory() as folder:
        backends = [start(step_backend, GROUPS[rank], rank, folder + "/meeting") for rank in range(2)]
        computed = [(worker, "compute") for worker in workers]
        in_order = [*computed, (host, "sum"), *[(worker, "pull") for worker in workers]]
        by_hand = [(host, "run"), *[(worker, "run") for worker in workers]]
        by_backend = [(backend, "run") for backend in backends]
        checks = [(host, "check"), *[(worker, "check") for worker in workers]]
        measure(
            {
                "step, in order": (False, in_order, checks),
                "step, by hand": (True, by_hand, checks),
                "step, by the backend": (True, by_backend, [(backend, "check") for backend in backends]),
            }
        )
'''

_MAIN = """

CORES = sorted(os.sched_getaffinity(0))
GROUPS = [set(CORES[rank::DEVICES]) or set(CORES) for rank in range(DEVICES)]


def main():
    if {"concurrency", "overlap"} & set(PARTS):
        devices_and_copies()
    if "streams" in PARTS:
        streams()
    if "schedule" in PARTS:
        schedule()


if __name__ == "__main__":
    main()
"""

TEXT = _COMMON + _DEVICES + _STREAMS + _SCHEDULE + _MAIN
