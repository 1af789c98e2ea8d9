"""The ways of running one model: how each is built, saved and loaded again. A new way is one row of `table.WAYS`.

    way = WAYS[Variant.script]
    scripted = way.build(model, (x,), setting)
    way.save(scripted, Path("script.pt"))
    call = way.load(Path("script.pt"), setting)

Each runs in a process of its own (`runner.Runner` inside a `worker.measure.contestant.Contestant`).
"""
