"""Training on several devices: a file per strategy, and the engine that they share.

ranks.py      the processes: started, pinned to their devices, watched, blamed when they fail
loop.py       what a rank answers: prove that it is right, train an epoch, count what it gets right, hand over
equality.py   the reference that every strategy must equal, and how close is equal
single.py     one device; also the shape that the other strategies fill in
"""
