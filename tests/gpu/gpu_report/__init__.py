"""The parts of tests/gpu/run.py: how a stage runs, what it finds, and the report."""
