"""This rank's slices of parameters, their masters, states and checkpoints."""
