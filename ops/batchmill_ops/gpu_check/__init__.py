"""Checks the GPU wing for real on this machine: pinning, engine, memory that runs out, samples, use, throughput."""
