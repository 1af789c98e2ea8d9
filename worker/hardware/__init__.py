"""What this machine gives: a probe per part, each in a process of its own; `worker.workloads.hardware` runs them."""
