"""What tests/gpu/run.py is made of: how a stage runs, what it found, and the report of it all."""
