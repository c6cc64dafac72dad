"""Load tests of a single service: latency and throughput that its clients see at a given rate or concurrency."""
