"""What the `parallel` experiment is made of: devices that compute, copy and wait, and the clock that all of them share.

    pace.py       how fast a product is here, and how many of them a budget holds
    crew.py       the processes: one a CPU device, pinned to its cores; one for all GPUs
    lanes.py      what is timed, in turns, and the spans of the run nearest the median
    products.py   run(x) in the process of one CPU device; cuda.py the same, and copies, on GPUs
    devices.py    the part `concurrency`;  scaling.py  its curves and efficiencies
    copies.py     the part `overlap`
    streams.py    the part `streams`
    schedule.py   the part `schedule`; step.py, backend.py, cuda_step.py  its training step, and who schedules it
    part.py       what parts are told and what they check
    report.py     rows of a Result;  ceilings.py  fractions of what the host was measured to reach
    reproduce.py, reproduce_cpu.py  the job as a plain script

`perf_counter` is one clock for all processes of a machine (CLOCK_MONOTONIC on Linux), so their readings can be laid on
one timeline.
"""
