"""The asynchrony experiments: a file per part, and what they share.

stage.py            one job under way: its devices, its rows, its findings
contest.py          the races of one part: contestants, points, a second heat where the first is doubtful
chain.py            a stream of products whose exact result is known, whatever its length
numpy_vs_torch.py   the same matrix work in both libraries; the book's own comparison first, called what it is
dispatch.py         when a call returns against when its result is there, by size; feeding.py: a thread that works ahead
barriers.py         what reading a result costs
graph.py            what of a graph's independent branches overlaps; forms.py: the ways of running it
reproduce.py        a plain torch script that repeats it all
"""
