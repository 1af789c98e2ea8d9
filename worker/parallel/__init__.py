"""Training on several devices: a file per strategy, and the engine that they share.

setting.py     what every rank is told; steps, epochs, learning rates
ranks.py       the processes: started, pinned to their devices, watched, blamed by name when they fail
loop.py        what a rank answers: prove that it is right, train an epoch, count right answers, hand over
single.py      one device; also the shape that the other strategies fill in
reference.py   what every strategy must equal; equality.py: how close is equal; proof.py: the rows of checks
saving.py      checkpoints: another attempt goes on where a lost one stood
report.py      the rows of a result; export.py: the trained model as a download; reproduce.py: without Torchstone
"""
