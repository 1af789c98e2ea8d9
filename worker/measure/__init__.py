"""The stopwatch: contestants in their own processes take turns in random order, and the samples are believed or not.

    lanes = {"eager": ..., "script": ...}                       # measure.contestant: one process each
    record = race(lanes, key="1", plan=plan)                    # measure.race: warm up, interleave, stop
    statistics.compare(record.seconds["script"], record.seconds["eager"])
    quality.grade(...)                                          # measure.quality: how far to believe it

Nothing here knows what is timed: every experiment kind hands over zero-argument calls (`measure.stopwatch`).
"""
